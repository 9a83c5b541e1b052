"""Work units under fire.

The coordinator is killed (SIGKILL) at random moments, its parameter servers with it, and started again in the same
folder; volunteers are killed in the middle of a unit with probability 0.2 and come back under their names. At the end
the store's log must hold every unit of every epoch as assimilated exactly once.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from colab_swarm.bench.report import BenchReport
from colab_swarm.errors import JoinError
from colab_swarm.recipes.classify import classification_job
from colab_swarm.workunits.coordinator import coordinate
from colab_swarm.workunits.job import Job, WorkPlan
from colab_swarm.workunits.state import Assimilated, EpochEnded, Expired, Finished
from colab_swarm.workunits.store import open_store
from colab_swarm.workunits.volunteering import volunteer

NAMES = ("alice", "bob", "carol")
KILL_PROBABILITY = 0.2
"""Per unit of a volunteer, as in the issue of preemptible instances."""
UP_S = (0.2, 4.0)
"""How long a coordinator lives."""
TIME_LIMIT_S = 600.0
PRELOADED = [
    "colab_swarm.workunits.coordinator",
    "colab_swarm.workunits.volunteering",
    "colab_swarm.recipes.classify",
]
"""So that a new process has torch at once."""


@dataclass(frozen=True)
class Endured:
    """What was done to a run, and what its log says.

    Attributes:
        coordinator_kills, volunteer_kills: that happened while the job was going on.
        units: epochs times subsets.
        once: units that were assimilated exactly once.
        versions_in_order: whether the parameters' versions are 1, 2, … without a gap.
        expired: assignments whose deadline passed.
        finished: why the job ended; None if it did not.
        accuracy: of the last epoch.
        seconds: of all.
    """

    coordinator_kills: int
    volunteer_kills: int
    units: int
    once: int
    versions_in_order: bool
    expired: int
    finished: str | None
    accuracy: float
    seconds: float


def run(*, quick: bool) -> BenchReport:
    """20 kills of the coordinator over 30 epochs; or 3 over 3."""
    with tempfile.TemporaryDirectory() as folder:
        endured = ordeal(Path(folder), kills=3 if quick else 20, epochs=3 if quick else 30)
    report = BenchReport("work-ordeal", quick)
    report.add(
        "work_ordeal.coordinator_kills", endured.coordinator_kills, "", "SIGKILL, parameter servers included"
    )
    report.add("work_ordeal.volunteer_kills", endured.volunteer_kills, "", "SIGKILL within a unit")
    report.add("work_ordeal.expired", endured.expired, "", "deadlines that passed")
    report.add("work_ordeal.units", endured.units, "", "of all epochs")
    report.add("work_ordeal.once", endured.once, "", "assimilated exactly once, by the store's log")
    report.add("work_ordeal.versions_in_order", endured.versions_in_order, "", "1: without a gap")
    report.add("work_ordeal.finished", endured.finished is not None, "", "1: the job came to its end")
    report.add("work_ordeal.seconds", endured.seconds, "s")
    return report


def ordeal(folder: Path, *, kills: int, epochs: int, seed: int = 0) -> Endured:
    """Run a job on the digits to its end; see the module.

    Args:
        folder: for everything.
        kills: of the coordinator.
        epochs: of 12 units each; enough that the job outlives the kills.
        seed: of what chance decides here; the machine decides the rest.
    """
    job, rng, begun = _job(epochs), random.Random(seed), time.monotonic()
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(
        ["colab_swarm.bench.work_ordeal"]
    )  # so that a new process has torch at once
    new_coordinator = partial(processes.Process, target=_coordinate, args=(job, folder))
    coordinator = _started(new_coordinator)
    link, deaths = _link(folder, begun), Counter[str]()
    volunteers: dict[str, BaseProcess] = {}
    new_volunteer: dict[str, Callable[[], BaseProcess]] = {
        name: partial(processes.Process, target=_volunteer, args=(job, link, folder, name, rng.random()))
        for name in NAMES
    }
    done = 0
    die_at = time.monotonic() + rng.uniform(*UP_S)
    while coordinator.is_alive() and time.monotonic() - begun < TIME_LIMIT_S:
        for name in NAMES:
            if name not in volunteers or not volunteers[name].is_alive():
                deaths[name] += name in volunteers and volunteers[name].exitcode == -signal.SIGKILL
                volunteers[name] = _started(new_volunteer[name])
        if done < kills and time.monotonic() >= die_at:
            coordinator.kill()
            coordinator.join()
            done += coordinator.exitcode == -signal.SIGKILL
            coordinator = _started(new_coordinator)
            die_at = time.monotonic() + rng.uniform(*UP_S)
        time.sleep(0.02)
    for one in (coordinator, *volunteers.values()):
        one.kill()
        one.join()
    return replace(_told(folder, job, begun), coordinator_kills=done, volunteer_kills=sum(deaths.values()))


def _job(epochs: int) -> Job:
    plan = WorkPlan(
        subsets=12, max_epochs=epochs, local_epochs=4, batch_size=8, alpha=0.7, deadline_s=4.0, in_flight=2
    )
    return classification_job(plan=plan)


def _started(make: Callable[[], BaseProcess]) -> BaseProcess:
    process = make()
    process.daemon = True
    process.start()
    return process


def _link(folder: Path, begun: float) -> str:
    while time.monotonic() - begun < TIME_LIMIT_S:
        with suppress(FileNotFoundError):
            return (folder / "link").read_text()
        time.sleep(0.02)
    raise TimeoutError("the coordinator did not start")


def _coordinate(job: Job, folder: Path) -> None:
    coordinator = coordinate(job, folder=folder / "work", host="127.0.0.1", servers=2)
    partial_file = folder / "link.partial"
    partial_file.write_text(coordinator.link)
    partial_file.replace(folder / "link")
    coordinator.wait()
    os._exit(0)


def _volunteer(job: Job, link: str, folder: Path, name: str, chance: float) -> None:
    rng, own = random.Random(f"{chance} {os.getpid()}"), None
    while own is None:
        with suppress(JoinError):  # the coordinator is dead just now
            own = volunteer(link, job=job, name=name, folder=folder / "volunteers")
    last = ""
    while not own.wait(0.01):
        unit = own.snapshot().units[0].unit
        if unit and unit != last and rng.random() < KILL_PROBABILITY:
            threading.Timer(rng.uniform(0.0, 0.3), os.kill, (os.getpid(), signal.SIGKILL)).start()
        last = unit or last


def _told(folder: Path, job: Job, begun: float) -> Endured:
    store = open_store(str(folder / "work" / "job.db"), job.name)
    log = [entry for _, entry in store.entries()]
    store.close()
    assimilated = [entry for entry in log if isinstance(entry, Assimilated)]
    times = Counter(entry.unit for entry in assimilated)
    versions = [entry.version for entry in assimilated]
    ends = [entry for entry in log if isinstance(entry, Finished)]
    accuracies = [entry.accuracy for entry in log if isinstance(entry, EpochEnded)]
    return Endured(
        coordinator_kills=0,
        volunteer_kills=0,
        units=job.plan.max_epochs * 12,
        once=sum(count == 1 for count in times.values()),
        versions_in_order=versions == list(range(1, len(versions) + 1)),
        expired=sum(isinstance(entry, Expired) for entry in log),
        finished=ends[0].reason if ends else None,
        accuracy=accuracies[-1] if accuracies else 0.0,
        seconds=time.monotonic() - begun,
    )
