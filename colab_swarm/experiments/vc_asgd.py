"""VC-ASGD, Figure 4: the effect of alpha, compared with serial training.

Digits by an MLP instead of CIFAR-10 by a ResNet of 552 layers. The product's own code trains and assimilates units.
Finishing times are random: 3 volunteers, the slowest of which takes twice as long as the fastest, with 4 units at a
time each (P3C3T4). A unit starts from the parameters at its assignment, so up to 11 others precede it.
"""

import heapq
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colab_swarm.experiments.report import Lines, Report, draw, reports
from colab_swarm.recipes.classify import classification_job, shape_of
from colab_swarm.workunits import WorkPlan
from colab_swarm.workunits.job import Alpha, Job, UnitTraining, measure, unit_seed
from colab_swarm.workunits.weights import Floats, Schema, assimilate

ALPHAS: dict[str, Alpha] = {"0.7": 0.7, "0.95": 0.95, "0.999": 0.999, "e/(e+1)": "e/(e+1)"}
SPEEDS = (1.0, 1.5, 2.0)
SCATTER = 0.2
EARLY = 6  # epochs; in the paper the order of 0.7 and 0.95 turns after them


@dataclass(frozen=True)
class Epoch:
    """Accuracy over the units of an epoch, each after its assimilation."""

    mean: float
    low: float
    high: float


def train_by_volunteers(job: Job, *, seed: int) -> list[Epoch]:
    plan, rng = job.plan, random.Random(seed)
    rows, validation = job.rows(), job.validation_rows()
    parts = rows.cut(plan.subsets_of(len(rows), rows.size_bytes), seed=plan.seed)
    schema = Schema.of(model := job.first_model())
    values: Floats = schema.flatten(model)
    epochs, now = list[Epoch](), 0.0
    for epoch in range(1, plan.max_epochs + 1):
        waiting, accuracies = rng.sample(range(len(parts)), len(parts)), []
        flying: list[tuple[float, int, float, Floats]] = []  # returned at, subset, speed, first parameters
        free = list(SPEEDS) * 4  # units at a time
        while waiting or flying:
            while waiting and free:
                speed = free.pop()
                back = now + speed * rng.uniform(1 - SCATTER, 1 + SCATTER)
                heapq.heappush(flying, (back, waiting.pop(), speed, values))
            now, subset, speed, base = heapq.heappop(flying)
            free.append(speed)
            schema.load(model, base)
            UnitTraining(job, parts[subset], seed=unit_seed(plan.seed, epoch, subset), model=model).finish()
            values = assimilate(values, schema.flatten(model), plan.alpha_of(epoch))
            schema.load(model, values)
            accuracies.append(measure(job, model, validation))
        epochs.append(Epoch(statistics.mean(accuracies), min(accuracies), max(accuracies)))
    return epochs


def _job(data: str, seed: int, alpha: Alpha, *, quick: bool) -> Job:
    size = {"subsets": 20, "max_epochs": 8} if quick else {"subsets": 50, "max_epochs": 40}
    plan = WorkPlan(**size, local_epochs=4, batch_size=8, alpha=alpha, seed=seed, validation_samples=400)
    return classification_job(
        data, shape=shape_of(data), model="mlp" if data == "digits" else "resnet", plan=plan
    )


@reports("vc_asgd")
def run(report: Report, data: str = "digits") -> None:
    """Report the orders that the paper found, as differences that are over 0 where they hold.

    ``data`` may be an ``.npz`` file of images, such as CIFAR-10's, see `classification_job`: a ResNet learns them.
    """
    seeds = range(1 if report.quick else 3)
    runs = {
        name: [train_by_volunteers(_job(data, seed, alpha, quick=report.quick), seed=seed) for seed in seeds]
        for name, alpha in ALPHAS.items()
    }
    runs["serial"] = [
        [Epoch(one, one, one) for one in _job(data, seed, 0.0, quick=report.quick).train_serially()[1]]
        for seed in seeds
    ]
    report.curves |= runs
    for name, curves in runs.items():
        key = re.sub(r"[()]", "", name.replace("/", "_over_"))
        report.add(f"{key}.final", _mean(curves, slice(-1, None)), "%", f"{len(curves)} seeds")
        report.add(f"{key}.early", _mean(curves, slice(EARLY)), "%", f"mean of the first {EARLY} epochs")
        if name != "serial":
            report.add(f"{key}.spread", spread(curves), "points", "of the units of an epoch, mean")
    found = report.figures
    names = ("0.7", "0.95", "e_over_e+1")
    best = max(found[f"{name}.final"] for name in (*names, "0.999"))
    orders = {
        "slowest_is_0.999_by": min(found[f"{name}.early"] for name in names) - found["0.999.early"],
        "variable_ahead_of_0.95_by": found["e_over_e+1.early"] - found["0.95.early"],
        "spread_of_0.7_over_0.95": found["0.7.spread"] - found["0.95.spread"],
        "serial_minus_best": found["serial.final"] - best,
    }
    report.add_all(orders, "points", "the paper: over 0")


def _mean(curves: Sequence[Sequence[Epoch]], part: slice) -> float:
    return 100 * statistics.mean(epoch.mean for curve in curves for epoch in curve[part])


def spread(curves: Sequence[Sequence[Epoch]]) -> float:
    return 100 * statistics.mean(epoch.high - epoch.low for curve in curves for epoch in curve)


def plot(report: Report, path: str | Path) -> None:
    lines: Lines = {}
    for index, (name, (first, *_)) in enumerate(report.curves.items()):
        epochs = range(1, len(first) + 1)
        lines[name] = epochs, [epoch.mean for epoch in first], f"C{index}o-"
        lines[f"_{name}, lowest"] = epochs, [epoch.low for epoch in first], f"C{index}:"
        lines[f"_{name}, highest"] = epochs, [epoch.high for epoch in first], f"C{index}:"
    draw(path, [({"xlabel": "epoch", "ylabel": "validation accuracy"}, lines)])
