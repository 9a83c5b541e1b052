"""Figures 3 and 4 of the VC-ASGD paper: time per epoch by arrangement, and the effect of alpha on speed and spread.

*workunits*: time per epoch by parameter servers, volunteers and units at a time (PnCnTn), all real
processes. As in the paper, the volunteers limit an epoch at first, and with more of their units at
a time the parameter servers do: each measures the accuracy after every result, here of a small
ResNetV2 on 11,504 images, which takes far longer than to train a unit of 30 images.
``--data`` takes an ``.npz`` of 32 x 32 colour images instead.

*work-ordeal*: the coordinator is killed (SIGKILL) at random moments together with its parameter
servers, and restarted in the same folder. Volunteers are killed in the middle of a unit with
probability 0.2 and come back under their names. At the end the store's log must contain every unit
of every epoch as assimilated exactly once.

*vc-asgd*: the effect of alpha, compared with serial training. Digits by an MLP instead of CIFAR-10 by
a ResNet of 552 layers, or the images of ``--data``. The product's own code trains and assimilates
units. Finishing times are random: 3 volunteers, the slowest of which takes twice as long as the
fastest, with 4 units at a time each (P3C3T4). A unit starts from the parameters at its assignment,
so up to 11 others are assimilated before it: that is its staleness.
"""

import heapq
import multiprocessing
import os
import random
import re
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from colab_swarm.bench.harness import BenchReport, benchmark, drawn
from colab_swarm.errors import JoinError
from colab_swarm.recipes.classify import classification_job
from colab_swarm.workunits import WorkPlan, coordinate, volunteer
from colab_swarm.workunits.job import Alpha, Job, UnitTraining, measure, unit_seed
from colab_swarm.workunits.state import Assigned, Assimilated, EpochEnded, Expired, Finished
from colab_swarm.workunits.store import open_store
from colab_swarm.workunits.weights import Floats, Schema, assimilate

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
SMALL_UNITS: dict[str, Any] = {"local_epochs": 4, "batch_size": 8}
TIME_LIMIT_S = 300.0


def _started(work: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start a process that is forked from one with torch and this module: it begins at once."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    process = processes.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


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
    helping = [
        _started(_volunteer, str(coordinator.link), folder / "volunteers", f"volunteer-{number}", units)
        for number in range(volunteers)
    ]
    try:
        if not coordinator.wait(TIME_LIMIT_S):
            raise TimeoutError(f"no {epochs} epochs in {TIME_LIMIT_S:.0f} s: {coordinator!r}")
        log = list(coordinator.log())
    finally:
        coordinator.stop()
        for process in helping:
            _end(process)
    assigned = [entry for entry in log if isinstance(entry, Assigned)]
    begun = {entry.unit.epoch: entry.at for entry in assigned[::-1]}
    took_s = [entry.at - begun[entry.epoch] for entry in log if isinstance(entry, EpochEnded)]
    return statistics.median(took_s[1:])


def _volunteer(link: str, folder: Path, name: str, units: int) -> None:
    torch.set_num_threads(1)
    volunteer(link, trust_code=True, name=name, folder=folder, units=units).wait()
    os._exit(0)


NAMES = ("alice", "bob", "carol")
ORDEAL_SUBSETS = 12
KILL_PROBABILITY = 0.2  # per unit of a volunteer
UP_S, ORDEAL_LIMIT_S = (0.2, 4.0), 600.0  # life of a coordinator, of all


@benchmark("work-ordeal")
def run_ordeal(report: BenchReport) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ordeal(report, Path(folder), kills=3 if report.quick else 20, epochs=3 if report.quick else 30)


def ordeal(report: BenchReport, folder: Path, *, kills: int, epochs: int) -> None:
    plan = WorkPlan(
        subsets=ORDEAL_SUBSETS, max_epochs=epochs, **SMALL_UNITS, alpha=0.7, deadline_s=4.0, in_flight=2
    )
    job = classification_job(plan=plan)
    rng, began = random.Random(0), time.monotonic()
    coordinator = _started(_coordinate, job, folder)
    while coordinator.is_alive() and not (folder / "link").exists():
        time.sleep(0.02)
    link = (folder / "link").read_text()  # it outlives the coordinator's restarts
    volunteers = {name: _started(_die_in_units, job, folder, name, link) for name in NAMES}
    killed, volunteers_killed, die_at = 0, 0, time.monotonic() + rng.uniform(*UP_S)
    while coordinator.is_alive() and time.monotonic() - began < ORDEAL_LIMIT_S:
        for name, process in volunteers.items():
            if not process.is_alive():
                volunteers_killed += process.exitcode == -signal.SIGKILL
                volunteers[name] = _started(_die_in_units, job, folder, name, link)
        if killed < kills and time.monotonic() >= die_at:
            _end(coordinator)
            killed += coordinator.exitcode == -signal.SIGKILL
            coordinator = _started(_coordinate, job, folder)
            die_at = time.monotonic() + rng.uniform(*UP_S)
        time.sleep(0.02)
    for process in (coordinator, *volunteers.values()):
        _end(process)
    report.add_all({"coordinator_kills": killed, "volunteer_kills": volunteers_killed}, "", "SIGKILL")
    store = open_store(str(folder / "work" / "job.db"), job.name)
    log = [entry for _, entry in store.entries()]
    store.close()
    assimilated = [entry for entry in log if isinstance(entry, Assimilated)]
    ends = [entry.reason for entry in log if isinstance(entry, Finished)]
    found = {
        "expired": sum(isinstance(entry, Expired) for entry in log),
        "once": list(Counter(entry.unit for entry in assimilated).values()).count(1),
        "versions_in_order": [one.version for one in assimilated] == list(range(1, len(assimilated) + 1)),
        "finished": bool(ends),
    }
    report.add_all(found, "", f"by the store's log; the end: {', '.join(ends)}")
    report.add("units", epochs * ORDEAL_SUBSETS, "", "of all epochs")
    report.add("seconds", time.monotonic() - began, "s")


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join()


def _coordinate(job: Job, folder: Path) -> None:
    coordinator = coordinate(job, folder=folder / "work", host="127.0.0.1", servers=2)
    (folder / "partial").write_text(coordinator.link)
    (folder / "partial").replace(folder / "link")
    coordinator.wait()
    os._exit(0)


def _die_in_units(job: Job, folder: Path, name: str, link: str) -> None:
    rng, own = random.Random(f"{name} {os.getpid()}"), None
    while own is None:
        with suppress(JoinError):  # the coordinator is being started again
            own = volunteer(link, job=job, name=name, folder=folder / "volunteers")
        time.sleep(0.02)
    last = ""
    while not own.wait(0.01):
        unit = own.snapshot().units[0].unit
        if unit and unit != last and rng.random() < KILL_PROBABILITY:
            threading.Timer(rng.uniform(0.0, 0.3), os.kill, (os.getpid(), signal.SIGKILL)).start()
        last = unit or last


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
    plan, rng = job.plan, random.Random(seed)
    rows, validation = job.rows(), job.validation_rows()
    parts = rows.cut(plan.subsets_of(len(rows), rows.size_bytes), seed=plan.seed)
    schema = Schema.of(model := job.first_model())
    values: Floats = schema.flatten(model)
    epochs, now = list[Epoch](), 0.0
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
            schema.load(model, base)
            UnitTraining(job, parts[subset], seed=unit_seed(plan.seed, epoch, subset), model=model).finish()
            values = assimilate(values, schema.flatten(model), plan.alpha_of(epoch))
            schema.load(model, values)
            accuracies.append(measure(job, model, validation))
        epochs.append(Epoch(statistics.mean(accuracies), min(accuracies), max(accuracies), now))
    return epochs


def _job(data: str, seed: int, alpha: Alpha, *, quick: bool) -> Job:
    epochs, subsets = (8, 20) if quick else (40, 50)
    plan = WorkPlan(
        subsets=subsets, max_epochs=epochs, **SMALL_UNITS, alpha=alpha, seed=seed, validation_samples=400
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
    serial = [_job(data, seed, 0.0, quick=report.quick).train_serially()[1] for seed in seeds]
    runs["serial"] = [[Epoch(one, one, one, at) for at, one in enumerate(curve)] for curve in serial]
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
