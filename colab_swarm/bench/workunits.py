"""Figure 3 of the VC-ASGD paper: time per epoch by parameter servers, volunteers and units at a time (PnCnTn).

Real processes on this machine: a coordinator, its parameter servers, the volunteers. As in the paper, the volunteers
limit an epoch at first, and with more of their units at a time the parameter servers do. Each of these measures the
accuracy after every result, here of a small ResNetV2 on 11,504 images. That takes far longer than to train a unit of 30
images, so one server is too slow. ``--data`` takes an ``.npz`` of 32 x 32 colour images instead.

*work-ordeal*: the coordinator is killed (SIGKILL) at random moments together with its parameter servers, and restarted
in the same folder. Volunteers are killed in the middle of a unit with probability 0.2 and come back under their names.
At the end the store's log must contain every unit of every epoch as assimilated exactly once.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from colab_swarm.bench.harness import BenchReport
from colab_swarm.errors import JoinError
from colab_swarm.recipes.classify import classification_job
from colab_swarm.workunits.coordinator import coordinate
from colab_swarm.workunits.job import Job, WorkPlan
from colab_swarm.workunits.state import Assigned, Assimilated, EpochEnded, Expired, Finished
from colab_swarm.workunits.store import open_store
from colab_swarm.workunits.volunteering import volunteer

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


def _started(work: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start a process that is forked from one with torch and this module, so that it begins at once."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    process = processes.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def run(*, quick: bool, data: str = "digits") -> BenchReport:
    """Measure seconds per epoch of each arrangement, and the ratio between one and three parameter servers."""
    report = BenchReport("workunits", quick)
    for servers, volunteers, units in QUICK if quick else GRID:
        with tempfile.TemporaryDirectory() as folder:
            seconds = epoch_seconds(Path(folder), servers, volunteers, units, data=data, quick=quick)
        report.add(f"p{servers}c{volunteers}t{units}_epoch_s", seconds, "s", f"{SUBSETS} units")
    ratio = report.figures["p1c3t8_epoch_s"] / report.figures["p3c3t8_epoch_s"]
    report.add("p1c3t8_vs_p3c3t8", ratio, "x", "the paper: over 1, assimilation is the bottleneck")
    return report


def epoch_seconds(
    folder: Path, servers: int, volunteers: int, units: int, *, data: str = "digits", quick: bool = False
) -> float:
    """Return the median time of an epoch except the first, from its first assignment to its last measured result."""
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


# --- the ordeal ----------------------------------------------------------------------------------------------------

NAMES = ("alice", "bob", "carol")
ORDEAL_SUBSETS = 12
KILL_PROBABILITY = 0.2  # per unit of a volunteer
UP_S, ORDEAL_LIMIT_S = (0.2, 4.0), 600.0  # life of a coordinator, of all


def run_ordeal(*, quick: bool) -> BenchReport:
    report = BenchReport("work-ordeal", quick)
    with tempfile.TemporaryDirectory() as folder:
        ordeal(report, Path(folder), kills=3 if quick else 20, epochs=3 if quick else 30)
    return report


def ordeal(report: BenchReport, folder: Path, *, kills: int, epochs: int) -> None:
    """Run a job of so many epochs on the digits to its end, kill the coordinator, and report what its log says."""
    plan = WorkPlan(
        subsets=ORDEAL_SUBSETS,
        max_epochs=epochs,
        local_epochs=4,
        batch_size=8,
        alpha=0.7,
        deadline_s=4.0,
        in_flight=2,
    )
    job, rng, began = classification_job(plan=plan), random.Random(0), time.monotonic()
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
    _add_log(report, folder, job.name)
    report.add("units", epochs * ORDEAL_SUBSETS, "", "of all epochs")
    report.add("seconds", time.monotonic() - began, "s")


def _add_log(report: BenchReport, folder: Path, job: str) -> None:
    store = open_store(str(folder / "work" / "job.db"), job)
    log = [entry for _, entry in store.entries()]
    store.close()
    assimilated = [entry for entry in log if isinstance(entry, Assimilated)]
    counts = Counter(entry.unit for entry in assimilated)
    in_order = [entry.version for entry in assimilated] == list(range(1, len(assimilated) + 1))
    ends = [entry.reason for entry in log if isinstance(entry, Finished)]
    found = {
        "expired": sum(isinstance(entry, Expired) for entry in log),
        "once": list(counts.values()).count(1),
        "versions_in_order": in_order,
        "finished": bool(ends),
    }
    report.add_all(found, "", f"by the store's log; the end: {', '.join(ends)}")


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
