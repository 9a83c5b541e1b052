"""Work units while processes are killed.

The coordinator is killed (SIGKILL) at random moments together with its parameter servers, and restarted in the same
folder. Volunteers are killed in the middle of a unit with probability 0.2 and come back under their names. At the end
the store's log must contain every unit of every epoch as assimilated exactly once.
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
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from colab_swarm.bench.report import BenchReport
from colab_swarm.errors import JoinError
from colab_swarm.recipes.classify import classification_job
from colab_swarm.workunits.coordinator import coordinate
from colab_swarm.workunits.job import Job, WorkPlan
from colab_swarm.workunits.state import Assimilated, Expired, Finished
from colab_swarm.workunits.store import open_store
from colab_swarm.workunits.volunteering import volunteer

NAMES = ("alice", "bob", "carol")
SUBSETS = 12
KILL_PROBABILITY = 0.2
"""Per unit of a volunteer."""
UP_S = (0.2, 4.0)
"""Life of a coordinator."""
TIME_LIMIT_S = 600.0


class Endured(NamedTuple):
    """The results of a run.

    Attributes:
        coordinator_kills, volunteer_kills: while the job was running.
        expired: assignments whose deadline passed.
        units: epochs times subsets.
        once: units that were assimilated exactly once.
        versions_in_order: whether the parameters' versions are 1, 2, … without a gap.
        finished: why the job ended; None if it did not.
        seconds: of the whole run.
    """

    coordinator_kills: int
    volunteer_kills: int
    expired: int
    units: int
    once: int
    versions_in_order: bool
    finished: str | None
    seconds: float


NOTES = {
    "coordinator_kills": "SIGKILL, parameter servers included",
    "volunteer_kills": "SIGKILL within a unit",
    "expired": "deadlines that passed",
    "units": "of all epochs",
    "once": "assimilated exactly once, by the store's log",
    "versions_in_order": "1: without a gap",
    "finished": "1: the job reached its end",
}


def run(*, quick: bool) -> BenchReport:
    """Kill the coordinator 20 times over 30 epochs; if quick, 3 times over 3."""
    report = BenchReport("work-ordeal", quick)
    with tempfile.TemporaryDirectory() as folder:
        endured = ordeal(Path(folder), kills=3 if quick else 20, epochs=3 if quick else 30)
    figures = endured._replace(finished=endured.finished and "1")._asdict()
    for key, note in NOTES.items():
        report.add(f"work_ordeal.{key}", float(figures[key] or 0), "", note)
    report.add("work_ordeal.seconds", endured.seconds, "s")
    return report


def ordeal(folder: Path, *, kills: int, epochs: int, seed: int = 0) -> Endured:
    """Run a job on the digits to its end; see the module.

    Args:
        folder: for all files.
        kills: of the coordinator.
        epochs: of 12 units each; enough that the job outlives the kills.
        seed: of the random decisions here; the machine decides the rest.
    """
    plan = WorkPlan(
        subsets=SUBSETS,
        max_epochs=epochs,
        local_epochs=4,
        batch_size=8,
        alpha=0.7,
        deadline_s=4.0,
        in_flight=2,
    )
    job, rng, begun = classification_job(plan=plan), random.Random(seed), time.monotonic()
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])  # so that a new process has torch at once
    new_coordinator = partial(processes.Process, target=_coordinate, args=(job, folder), daemon=True)
    coordinator = _started(new_coordinator)
    link, volunteer_kills = _link(folder, begun), 0
    volunteers: dict[str, BaseProcess] = {}
    new_volunteer: dict[str, Callable[[], BaseProcess]] = {}
    for name in NAMES:
        arguments = (job, link, folder, name, rng.random())
        new_volunteer[name] = partial(processes.Process, target=_volunteer, args=arguments, daemon=True)
    done, die_at = 0, time.monotonic() + rng.uniform(*UP_S)
    while coordinator.is_alive() and time.monotonic() - begun < TIME_LIMIT_S:
        for name in NAMES:
            if name not in volunteers or not volunteers[name].is_alive():
                volunteer_kills += name in volunteers and volunteers[name].exitcode == -signal.SIGKILL
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
    store = open_store(str(folder / "work" / "job.db"), job.name)
    log = [entry for _, entry in store.entries()]
    store.close()
    assimilated = [entry for entry in log if isinstance(entry, Assimilated)]
    return Endured(
        coordinator_kills=done,
        volunteer_kills=volunteer_kills,
        expired=sum(isinstance(entry, Expired) for entry in log),
        units=epochs * SUBSETS,
        once=sum(count == 1 for count in Counter(entry.unit for entry in assimilated).values()),
        versions_in_order=[entry.version for entry in assimilated] == list(range(1, len(assimilated) + 1)),
        finished=next((entry.reason for entry in log if isinstance(entry, Finished)), None),
        seconds=time.monotonic() - begun,
    )


def _started(make: Callable[[], BaseProcess]) -> BaseProcess:
    process = make()
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
        with suppress(JoinError):  # the coordinator is being restarted
            own = volunteer(link, job=job, name=name, folder=folder / "volunteers")
    last = ""
    while not own.wait(0.01):
        unit = own.snapshot().units[0].unit
        if unit and unit != last and rng.random() < KILL_PROBABILITY:
            threading.Timer(rng.uniform(0.0, 0.3), os.kill, (os.getpid(), signal.SIGKILL)).start()
        last = unit or last
