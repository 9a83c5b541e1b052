"""VC-ASGD: the effect of alpha (Figures 4 to 6), and jobs on preemptible instances (section IV-E).

*alpha*, compared with serial training: an MLP learns digits, instead of a ResNet of 552 layers that learns CIFAR-10.
The package's own code trains and assimilates units. Finishing times are random. There are 3 volunteers, of which the
slowest takes twice as long as the fastest, and each trains 4 units at a time (P3C3T4). A unit starts from the
parameters at its assignment, so up to 11 other units are assimilated between its start and its own assimilation.

*preemption*: the time and price of a job, by the real dispatcher on virtual time. In the paper, a slot trains n units
in sequence, a fraction p of them is lost with its instance, and each loss costs the timeout t_o. So the job takes
``n t_e + n p t_o``. In the simulation, a new instance takes units immediately, and only the lost unit waits. So one
epoch of 2,000 units has a quarter of the formula's extra time. In the paper's 40 epochs of 50 units, each epoch waits
for its last unit. Relative to the formula, the extra time is then:

- 1.2 (p = 0.05) and 0.8 (p = 0.2) in the simulation;
- 2.0 and 1.6 without the dispatcher's copies of overdue units;
- 1.6 and 1.0 with these copies, if a new instance comes a minute later.

The paper's fleet of 5 costs $1.67 an hour, or $0.50 if it is preemptible: $13.4 or $4 for its 8 hours.
"""

import asyncio
import heapq
import itertools
import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from colab_swarm.experiments.report import Lines, Report, draw, reports, simulated
from colab_swarm.recipes.classify import classification_job, shape_of
from colab_swarm.runtime import loop_now
from colab_swarm.workunits import WorkPlan
from colab_swarm.workunits.dispatcher import Dispatcher
from colab_swarm.workunits.job import Alpha, Job, UnitTraining, measure, unit_seed
from colab_swarm.workunits.state import AnyEntry, Assimilated, Measured
from colab_swarm.workunits.weights import Floats, Schema, assimilate

ALPHAS: dict[str, Alpha] = {"0.7": 0.7, "0.95": 0.95, "0.999": 0.999, "e/(e+1)": "e/(e+1)"}
SPEEDS = (1.0, 1.5, 2.0)
SCATTER = 0.2
EARLY = 6  # number of epochs after which, in the paper, the order of 0.7 and 0.95 is reversed
LATE = slice(EARLY, None)


@dataclass(frozen=True)
class Epoch:
    """Accuracy over the units of an epoch, measured after the assimilation of each."""

    mean: float
    low: float
    high: float


def train_by_volunteers(job: Job, *, seed: int) -> list[Epoch]:
    plan = job.plan
    rng = random.Random(seed)
    rows = job.rows()
    validation = job.validation_rows()
    parts = rows.cut(plan.subsets_of(len(rows), rows.size_bytes), seed=plan.seed)
    model = job.first_model()
    schema = Schema.of(model)
    values: Floats = schema.flatten(model)
    epochs = list[Epoch]()
    now = 0.0
    for epoch in range(1, plan.max_epochs + 1):
        waiting = rng.sample(range(len(parts)), len(parts))
        accuracies = []
        flying: list[tuple[float, int, float, Floats]] = []  # returned at, subset, speed, first parameters
        free = list(SPEEDS) * 4  # each volunteer trains 4 units at a time
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
    size: dict[str, Any]
    if quick:
        size = {"subsets": 20, "max_epochs": 8}
    else:
        size = {"subsets": 50, "max_epochs": 40}
    plan = WorkPlan(**size, local_epochs=4, batch_size=8, alpha=alpha, seed=seed, validation_samples=400)
    return classification_job(
        data, shape=shape_of(data), model="mlp" if data == "digits" else "resnet", plan=plan
    )


@reports("vc_asgd")
def run(report: Report, data: str = "digits") -> None:
    """Report the accuracy of each alpha and of serial training.

    ``data`` may be an ``.npz`` file of images, such as CIFAR-10, see `classification_job`. A ResNet then learns them.
    """
    seeds = range(1 if report.quick else 3)
    runs: dict[str, list[list[Epoch]]] = {name: [] for name in (*ALPHAS, "serial")}
    for seed in seeds:
        for name, alpha in ALPHAS.items():
            job = _job(data, seed, alpha, quick=report.quick)
            runs[name].append(train_by_volunteers(job, seed=seed))
        job = _job(data, seed, 0.0, quick=report.quick)
        _, accuracies = job.train_serially()
        runs["serial"].append([Epoch(accuracy, accuracy, accuracy) for accuracy in accuracies])
    report.curves |= runs
    for name, curves in runs.items():
        key = re.sub(r"[()]", "", name.replace("/", "_over_"))
        last = [100 * curve[-1].mean for curve in curves]
        report.add_seeds(f"{key}.final", last, "%")
        early = [_mean(curve[:EARLY]) for curve in curves]
        report.add_seeds(f"{key}.early", early, "%", f"mean of the first {EARLY} epochs")
        late = [_mean(curve[LATE]) for curve in curves]
        report.add_seeds(f"{key}.late", late, "%", "mean of the later epochs")
        changes = [_change(curve[LATE]) for curve in curves]
        report.add_seeds(
            f"{key}.change", changes, "points", "from an epoch to the next, mean of the later ones"
        )
        if name != "serial":
            spreads = [spread(curve) for curve in curves]
            report.add_seeds(f"{key}.spread", spreads, "points", "of the units of an epoch, mean")
            spreads = [spread(curve[LATE]) for curve in curves]
            report.add_seeds(f"{key}.late_spread", spreads, "points", "the same of the later epochs")
    figures = report.figures
    best = max(figures[f"{name}.final"] for name in ("0.7", "0.95", "0.999", "e_over_e+1"))
    report.add("serial_minus_best", figures["serial.final"] - best, "points", "the paper: 9")


def _mean(epochs: Sequence[Epoch]) -> float:
    return 100 * statistics.mean(epoch.mean for epoch in epochs)


def _change(epochs: Sequence[Epoch]) -> float:
    return 100 * statistics.mean(abs(now.mean - before.mean) for before, now in pairwise(epochs))


def spread(epochs: Sequence[Epoch]) -> float:
    return 100 * statistics.mean(epoch.high - epoch.low for epoch in epochs)


def plot(report: Report, path: str | Path) -> None:
    lines: Lines = {}
    for index, (name, (first, *_)) in enumerate(report.curves.items()):
        epochs = range(1, len(first) + 1)
        means, lows, highs = zip(*((epoch.mean, epoch.low, epoch.high) for epoch in first), strict=True)
        lines[name] = epochs, means, f"C{index}o-"
        lines[f"_{name}, lowest"] = epochs, lows, f"C{index}:"
        lines[f"_{name}, highest"] = epochs, highs, f"C{index}:"
    draw(path, [({"xlabel": "epoch", "ylabel": "validation accuracy"}, lines)])


@dataclass(frozen=True)
class PreemptionModel:
    """A job on preemptible instances.

    Each of the ``volunteers`` instances trains ``slots`` units at a time. The job has ``epochs`` epochs of ``units``
    units. A unit takes ``unit_s`` (t_e) and expires after ``deadline_s`` (t_o). An instance is preempted during a unit
    with ``kill_probability`` (p). A new instance takes its place after ``restart_s``, for which the paper's formula
    has no term.
    """

    volunteers: int
    slots: int
    units: int
    unit_s: float
    deadline_s: float
    kill_probability: float
    restart_s: float = 0.0
    epochs: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.kill_probability < 1 and 0 < self.unit_s < self.deadline_s):
            raise ValueError(f"{self}: kill_probability must be in [0, 1), unit_s below deadline_s")

    @property
    def undisturbed_s(self) -> float:
        """Time without preemptions: n t_e."""
        return self.units * self.epochs / (self.volunteers * self.slots) * self.unit_s

    @property
    def expected_s(self) -> float:
        """Time by the paper's formula: n t_e + n p t_o."""
        return self.undisturbed_s * (1 + self.kill_probability * self.deadline_s / self.unit_s)


def simulate_preemption(model: PreemptionModel, seed: int = 0) -> tuple[float, int]:
    """Simulate the job; return its seconds, and how many instances were preempted.

    The instances cost ``volunteers * seconds``. The same ``seed`` gives the same result.
    """
    return simulated(_Fleet(model, seed).run())


class _Fleet:
    """Instances that request units from a dispatcher; results are assimilated immediately."""

    def __init__(self, model: PreemptionModel, seed: int) -> None:
        self._model = model
        self._rng = random.Random(seed)
        plan = WorkPlan(
            subsets=model.units, max_epochs=model.epochs, deadline_s=model.deadline_s, in_flight=model.slots
        )
        self._dispatcher = Dispatcher(plan, model.units, random.Random(seed + 1))
        self._kills = 0
        self._ended_at = 0.0

    async def run(self) -> tuple[float, int]:
        async with asyncio.TaskGroup() as instances:
            for number in range(self._model.volunteers):
                instances.create_task(self._instances(f"place {number}"))
        return self._ended_at, self._kills

    async def _instances(self, place: str) -> None:
        rate = -math.log(1 - self._model.kill_probability) / self._model.unit_s
        for number in itertools.count():
            if self._dispatcher.state.finished:
                return
            # the instance that takes its place is another volunteer
            name = f"{place}, instance {number}"
            try:
                async with asyncio.timeout(self._rng.expovariate(rate) if rate else None):
                    await asyncio.gather(*(self._slot(name) for _ in range(self._model.slots)))
            except TimeoutError:
                self._kills += not self._dispatcher.state.finished
                await asyncio.sleep(self._model.restart_s)

    async def _slot(self, instance: str) -> None:
        dispatcher = self._dispatcher
        while not dispatcher.state.finished:
            now = loop_now()
            self._commit(*dispatcher.expired(now=now))
            given = dispatcher.assign(instance, now=now)
            if given is None:
                await asyncio.sleep(dispatcher.wait_s(instance, now=now))
                continue
            self._commit(given)
            await asyncio.sleep(self._model.unit_s)
            now = loop_now()
            unit = given.unit
            name = given.assignment
            # the result of a copy of the unit came first
            if dispatcher.refusal(name, instance, now=now) is not None:
                continue
            self._ended_at = now
            self._commit(
                *dispatcher.on_result(name, 1.0, lambda *_: 0.0, now=now),
                Assimilated(at=now, unit=unit, assignment=name, server="", version=0, seconds=0.0),
                Measured(at=now, unit=unit, accuracy=0.0),
            )
            while due := dispatcher.advance(now=now):
                self._commit(*due)

    def _commit(self, *entries: AnyEntry) -> None:
        for entry in entries:
            self._dispatcher.state.apply(entry)


P5C5T2 = PreemptionModel(
    volunteers=5, slots=2, units=50, unit_s=144.0, deadline_s=300.0, kill_probability=0.0, epochs=40
)
# price of the paper's five instances, dollars per hour
PRICE = 1.67
PREEMPTIBLE_PRICE = 0.50
HOURS = 8


@reports("preemption")
def run_preemption(report: Report) -> None:
    """Report the minutes that preemptions add to the paper's job of 2,000 units, and the cost of its fleet."""
    seeds = range(1 if report.quick else 10)
    long_epoch = replace(P5C5T2, units=P5C5T2.units * P5C5T2.epochs, epochs=1)
    for percent in (5, 20):
        for name, job in (("", P5C5T2), ("_one_epoch", long_epoch)):
            model = replace(job, kill_probability=percent / 100)
            took_s = [simulate_preemption(model, seed)[0] for seed in seeds]
            added_s = statistics.mean(took_s) - model.undisturbed_s
            report.add(f"simulated_{percent}{name}_min", added_s / 60, "min", f"{len(seeds)} seeds")
        formula_s = model.expected_s - model.undisturbed_s
        report.add(f"formula_{percent}_min", formula_s / 60, "min", "n p t_o")
    report.add("standard_usd", PRICE * HOURS, "USD", f"{HOURS} hours")
    report.add("preemptible_usd", PREEMPTIBLE_PRICE * HOURS, "USD", f"{HOURS} hours")
