"""Figure 4 of the VC-ASGD paper: the effect of alpha on speed and spread, compared with serial training.

Digits by an MLP instead of CIFAR-10 by a ResNet of 552 layers, or the images of ``--data``. The
product's own code trains and assimilates units. Finishing times are random: 3 volunteers, the
slowest of which takes twice as long as the fastest, with 4 units at a time each (P3C3T4). A unit
starts from the parameters at its assignment, so up to 11 others are assimilated before it: that is
its staleness.
"""

from __future__ import annotations

import heapq
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from colab_swarm.bench.harness import BenchReport, drawn
from colab_swarm.recipes.classify import classification_job
from colab_swarm.workunits.job import Alpha, Evaluator, Job, UnitTraining, WorkPlan, unit_seed
from colab_swarm.workunits.weights import Floats, assimilate

ALPHAS: dict[str, Alpha] = {"0.7": 0.7, "0.95": 0.95, "0.999": 0.999, "e/(e+1)": "e/(e+1)"}
SPEEDS = (1.0, 1.5, 2.0)
AT_ONCE = 4
SCATTER = 0.2
EARLY = 6  # epochs; in the paper the order of 0.7 and 0.95 turns after them


@dataclass(frozen=True)
class Epoch:
    """Accuracy over the units of an epoch, each after its assimilation; and its end, in units' times."""

    mean: float
    low: float
    high: float
    at: float


def train_by_volunteers(job: Job, *, seed: int) -> list[Epoch]:
    """Return each epoch of a run with these volunteers."""
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
        epochs.append(Epoch(statistics.mean(accuracies), min(accuracies), max(accuracies), now))
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


@dataclass
class AccuracyCurves(BenchReport):
    """The report, with every epoch of every run: by alpha or ``serial``, then by seed."""

    epochs: dict[str, list[list[Epoch]]] = field(default_factory=dict)


def run(*, quick: bool, data: str = "digits") -> AccuracyCurves:
    """Report the orders that the paper found, as differences that are over 0 where they hold."""
    seeds = range(1 if quick else 3)
    runs = {
        name: [train_by_volunteers(_job(data, seed, alpha, quick=quick), seed=seed) for seed in seeds]
        for name, alpha in ALPHAS.items()
    }
    serial = [_job(data, seed, 0.0, quick=quick).train_serially().accuracies for seed in seeds]
    runs["serial"] = [[Epoch(one, one, one, at) for at, one in enumerate(curve)] for curve in serial]
    report = AccuracyCurves("vc-asgd", quick, epochs=runs)
    _add_figures(report)
    return report


def _add_figures(report: AccuracyCurves) -> None:
    for name, curves in report.epochs.items():
        key = re.sub(r"[()]", "", name.replace("/", "_over_"))
        report.add(f"{key}.final", _mean(curves, slice(-1, None)), "%", f"{len(curves)} seeds")
        report.add(f"{key}.early", _mean(curves, slice(EARLY)), "%", f"mean of the first {EARLY} epochs")
        if name != "serial":
            report.add(f"{key}.spread", _spread(curves), "points", "of the units of an epoch, mean")
    found = report.figures
    names = ("0.7", "0.95", "e_over_e+1")
    orders = {
        "slowest_is_0.999_by": min(found[f"{name}.early"] for name in names) - found["0.999.early"],
        "variable_ahead_of_0.95_by": found["e_over_e+1.early"] - found["0.95.early"],
        "spread_of_0.7_over_0.95": found["0.7.spread"] - found["0.95.spread"],
        "serial_minus_best": found["serial.final"]
        - max(found[f"{name}.final"] for name in (*names, "0.999")),
    }
    report.add_all(orders, "points", "the paper: over 0")


def _mean(curves: Sequence[Sequence[Epoch]], part: slice) -> float:
    return 100 * statistics.mean(epoch.mean for curve in curves for epoch in curve[part])


def _spread(curves: Sequence[Sequence[Epoch]]) -> float:
    return 100 * statistics.mean(epoch.high - epoch.low for curve in curves for epoch in curve)


def plot(report: BenchReport, path: str | Path) -> None:
    assert isinstance(report, AccuracyCurves)
    with drawn(path, (7, 4.5)) as (axes,):
        axes.set(xlabel="epoch", ylabel="validation accuracy")
        for name, (first, *_) in report.epochs.items():
            means = [epoch.mean for epoch in first]
            below, above = zip(
                *((epoch.mean - epoch.low, epoch.high - epoch.mean) for epoch in first), strict=True
            )
            axes.errorbar(range(1, len(first) + 1), means, [below, above], label=name, capsize=2)
