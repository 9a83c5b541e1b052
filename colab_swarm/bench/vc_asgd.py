"""Figures 3 and 4 of the VC-ASGD paper: time per epoch by arrangement, and the effect of alpha on speed and spread.

*workunits*: time per epoch by parameter servers, volunteers and units at a time (PnCnTn), all real
processes. As in the paper, the volunteers limit an epoch at first, and with more of their units at
a time the parameter servers do: each measures the accuracy after every result, here of a small
ResNetV2 on 11,504 images, which takes far longer than to train a unit of 30 images.
``--data`` takes an ``.npz`` of 32 x 32 colour images instead.

*vc-asgd*: the effect of alpha, compared with serial training. Digits by an MLP instead of CIFAR-10 by
a ResNet of 552 layers, or the images of ``--data``. The product's own code trains and assimilates
units. Finishing times are random: 3 volunteers, the slowest of which takes twice as long as the
fastest, with 4 units at a time each (P3C3T4). A unit starts from the parameters at its assignment,
so up to 11 others are assimilated before it: that is its staleness.
"""

import heapq
import random
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from colab_swarm.bench.harness import BenchReport, Channel, Crew, benchmark, drawn
from colab_swarm.recipes.classify import classification_job
from colab_swarm.workunits import WorkPlan, coordinate, volunteer
from colab_swarm.workunits.job import Alpha, Evaluator, Job, UnitTraining, unit_seed
from colab_swarm.workunits.state import Assigned, EpochEnded
from colab_swarm.workunits.weights import Floats, assimilate

CODE = """
from dataclasses import replace
import colab_swarm as cs
import numpy as np
from colab_swarm.recipes.classify import classification_job

plan = cs.workunits.WorkPlan(
    subsets={subsets}, max_epochs={epochs}, alpha=0.95, batch_size=16, validation_samples={validation}
)
learned = classification_job({data!r}, shape={shape}, model="resnet", plan=plan)
job = replace(learned, validation=lambda: [np.concatenate([part] * 8) for part in learned.data()])
"""
GRID = tuple(product((1, 3, 5), (3, 5), (2, 4, 8)))
QUICK = ((1, 3, 8), (3, 3, 8))
SUBSETS, EPOCHS = 48, 3
TIME_LIMIT_S = 300.0


@benchmark("workunits")
def run_workunits(report: BenchReport, data: str = "digits") -> None:
    for servers, volunteers, units in QUICK if report.quick else GRID:
        with tempfile.TemporaryDirectory() as folder:
            seconds = epoch_seconds(Path(folder), servers, volunteers, units, data=data, quick=report.quick)
        report.add(f"p{servers}c{volunteers}t{units}_epoch_s", seconds, "s", f"{SUBSETS} units")
    ratio = report.figures["p1c3t8_epoch_s"] / report.figures["p3c3t8_epoch_s"]
    report.add("p1c3t8_vs_p3c3t8", ratio, "x", "the paper: over 1, assimilation is the bottleneck")


def epoch_seconds(
    folder: Path, servers: int, volunteers: int, units: int, *, data: str = "digits", quick: bool = False
) -> float:
    """Return the median time of a later epoch, from first assignment to last measured result."""
    shape, validation = ((1, 8, 8), 12_000) if data == "digits" else ((3, 32, 32), 1500)
    where = data if data == "digits" else str(Path(data).resolve())
    file, epochs = folder / "job.py", 2 if quick else EPOCHS
    code = CODE.format(subsets=SUBSETS, epochs=epochs, data=where, shape=shape, validation=validation)
    file.write_text(code)
    coordinator = coordinate(file, folder=folder / "work", host="127.0.0.1", servers=servers)
    try:
        with Crew() as crew:
            for number in range(volunteers):
                name = f"volunteer-{number}"
                crew.start(volunteer_all, str(coordinator.link), str(folder / "volunteers"), name, units)
            if not coordinator.wait(TIME_LIMIT_S):
                raise TimeoutError(f"no {epochs} epochs in {TIME_LIMIT_S:.0f} s: {coordinator!r}")
        log = list(coordinator.log())
    finally:
        coordinator.stop()
    assigned = [entry for entry in log if isinstance(entry, Assigned)]
    begun = {entry.unit.epoch: entry.at for entry in assigned[::-1]}
    took_s = [entry.at - begun[entry.epoch] for entry in log if isinstance(entry, EpochEnded)]
    return statistics.median(took_s[1:])


def volunteer_all(parent: Channel, link: str, folder: str, name: str, units: int) -> None:
    torch.set_num_threads(1)
    volunteer(link, trust_code=True, name=name, folder=folder, units=units).wait()


ALPHAS: dict[str, Alpha] = {"0.7": 0.7, "0.95": 0.95, "0.999": 0.999, "e/(e+1)": "e/(e+1)"}
SPEEDS = (1.0, 1.5, 2.0)
AT_ONCE = 4
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
    evaluator, rows = Evaluator(job), job.rows()
    parts = rows.cut(plan.subsets_of(len(rows), rows.size_bytes), seed=plan.seed)
    model = job.first_model()
    values: Floats = evaluator.schema.flatten(model)
    epochs: list[Epoch] = []
    now = 0.0
    for epoch in range(1, plan.max_epochs + 1):
        waiting, accuracies = rng.sample(range(len(parts)), len(parts)), []
        flying: list[tuple[float, int, float, Floats]] = []  # returned at, subset, speed, first parameters
        free = list(SPEEDS) * AT_ONCE
        while waiting or flying:
            while waiting and free:
                speed = free.pop()
                back = now + speed * rng.uniform(1 - SCATTER, 1 + SCATTER)
                heapq.heappush(flying, (back, waiting.pop(), speed, values))
            now, subset, speed, base = heapq.heappop(flying)
            free.append(speed)
            evaluator.schema.load(model, base)
            UnitTraining(
                job,
                parts[subset],
                local_epochs=plan.local_epochs,
                batch_size=plan.batch_size,
                seed=unit_seed(plan.seed, epoch, subset),
                model=model,
            ).finish()
            values = assimilate(values, evaluator.schema.flatten(model), plan.alpha_of(epoch))
            accuracies.append(evaluator.accuracy(values))
        epochs.append(Epoch(statistics.mean(accuracies), min(accuracies), max(accuracies)))
    return epochs


def _job(data: str, seed: int, alpha: Alpha, *, quick: bool) -> Job:
    epochs, subsets = (8, 20) if quick else (40, 50)
    plan = WorkPlan(
        subsets=subsets,
        max_epochs=epochs,
        local_epochs=4,
        batch_size=8,
        alpha=alpha,
        seed=seed,
        validation_samples=400,
    )
    if data == "digits":
        return classification_job(plan=plan)
    return classification_job(data, shape=(3, 32, 32), model="resnet", plan=plan)


@benchmark("vc-asgd")
def run(report: BenchReport, data: str = "digits") -> None:
    """Report the orders that the paper found, as differences that are over 0 where they hold."""
    seeds = range(1 if report.quick else 3)
    runs = {
        name: [train_by_volunteers(_job(data, seed, alpha, quick=report.quick), seed=seed) for seed in seeds]
        for name, alpha in ALPHAS.items()
    }
    serial = [_job(data, seed, 0.0, quick=report.quick).train_serially().accuracies for seed in seeds]
    runs["serial"] = [[Epoch(one, one, one) for one in curve] for curve in serial]
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


def plot(report: BenchReport, path: str | Path) -> None:
    with drawn(path, (7, 4.5)) as (axes,):
        axes.set(xlabel="epoch", ylabel="validation accuracy")
        for name, (first, *_) in report.curves.items():
            means = [epoch.mean for epoch in first]
            below, above = zip(
                *((epoch.mean - epoch.low, epoch.high - epoch.mean) for epoch in first), strict=True
            )
            axes.errorbar(range(1, len(first) + 1), means, [below, above], label=name, capsize=2)
