"""VC-ASGD, Figure 3 and section IV-D: time per epoch by arrangement, and the store. And kills.

*workunits*: time per epoch by parameter servers, volunteers and units at a time (PnCnTn), all real
processes. As in the paper, the volunteers limit an epoch at first, and with more of their units at
a time the parameter servers do: each measures the accuracy after every result, here of a small
ResNetV2 on 11,504 images, which takes far longer than to train a unit of 30 images.

*parameter-store*: how long one update of 5 M parameters takes in each store (paper: Redis 0.87 s, MySQL 1.29 s).
An update is all work of a parameter server except measuring accuracy: it claims a result, reads it
and the parameters, computes ``W_s <- alpha W_s + (1 - alpha) W_c`` and writes the new ones.

*work-ordeal*: the coordinator is killed (SIGKILL) at random moments together with its parameter servers, and restarted
in the same folder. Volunteers are killed in the middle of a unit with probability 0.2 and come back under their names.
At the end the store's log must contain every unit of every epoch as assimilated exactly once.
"""

import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from colab_swarm.errors import JoinError
from colab_swarm.experiments.report import Report, reports
from colab_swarm.recipes.classify import classification_job
from colab_swarm.workunits import WorkPlan, coordinate, volunteer
from colab_swarm.workunits.job import Job
from colab_swarm.workunits.state import Accepted, Assigned, Assimilated, EpochEnded, Finished, Unit
from colab_swarm.workunits.store import KEEP_MEMORY, open_store
from colab_swarm.workunits.weights import assimilate
from tests.benchmarks.harness import Channel, Crew
from tests.workunits.servers import mariadb_server, postgresql_server, redis_server

CODE = """
from dataclasses import replace
import colab_swarm as cs
import numpy as np
from colab_swarm.recipes.classify import classification_job

plan = cs.workunits.WorkPlan(
    subsets={subsets}, max_epochs={epochs}, alpha=0.95, batch_size=16, validation_samples=12_000
)
learned = classification_job(model="resnet", plan=plan)
job = replace(learned, validation=lambda: [np.concatenate([part] * 8) for part in learned.data()])
"""
SUBSETS = 48
TIME_LIMIT_S = 300.0


@reports("workunits")
def run_workunits(report: Report) -> None:
    for servers, volunteers, units in ((1, 3, 8), (3, 3, 8)):
        with tempfile.TemporaryDirectory() as folder:
            seconds = epoch_seconds(Path(folder), servers, volunteers, units, epochs=2 if report.quick else 3)
        report.add(f"p{servers}c{volunteers}t{units}_epoch_s", seconds, "s", f"{SUBSETS} units")
    ratio = report.figures["p1c3t8_epoch_s"] / report.figures["p3c3t8_epoch_s"]
    report.add("p1c3t8_vs_p3c3t8", ratio, "x", "the paper: over 1, assimilation is the bottleneck")


def epoch_seconds(folder: Path, servers: int, volunteers: int, units: int, *, epochs: int) -> float:
    """Return the median time of a later epoch, from first assignment to last measured result."""
    file = folder / "job.py"
    file.write_text(CODE.format(subsets=SUBSETS, epochs=epochs))
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
        coordinator.close()
    begun = {entry.unit.epoch: entry.at for entry in reversed(log) if isinstance(entry, Assigned)}
    took_s = [entry.at - begun[entry.epoch] for entry in log if isinstance(entry, EpochEnded)]
    return statistics.median(took_s[1:])


def volunteer_all(parent: Channel, link: str, folder: str, name: str, units: int) -> None:
    torch.set_num_threads(1)
    volunteer(link, trust_code=True, peer_name=name, folder=folder, units=units).wait()


NUMEL = 5_000_000


@contextmanager
def _sqlite() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"{folder}/job.db"


STORES: dict[str, tuple[Callable[[], AbstractContextManager[str]], str]] = {
    "memory": (lambda: nullcontext("memory"), "of this process"),
    "sqlite": (_sqlite, "durable"),
    "redis": (redis_server, "in memory, as the paper has it; published 870 ms"),
    "redis_durable": (partial(redis_server, durable=True), "appendonly yes"),
    "postgresql": (postgresql_server, "durable, strong consistency"),
    "mariadb": (mariadb_server, "durable, strong consistency; published 1,290 ms (MySQL)"),
}
SQL = ("mariadb", "postgresql")


@reports("store")
def run_stores(report: Report) -> None:
    updates = 5 if report.quick else 20
    for name, (opened, note) in STORES.items():
        try:
            with opened() as url, Crew() as crew:
                worker = crew.start(time_updates, url, NUMEL, updates, environment=KEEP_MEMORY)
                report.add(f"{name}_ms", worker.receive()["ms"], "ms", f"median of {updates}; {note}")
        except FileNotFoundError as absent:
            print(f"{name} is left out: {absent}", flush=True)
    found = report.figures
    if sql := next((name for name in SQL if f"{name}_ms" in found), None):
        report.add("sql_ms", found[f"{sql}_ms"], "ms", sql)
        if "redis_ms" in found:
            report.add("sql_to_redis", found[f"{sql}_ms"] / found["redis_ms"], "times", "paper: 1.5")


def time_updates(parent: Channel, url: str, numel: int, updates: int) -> None:
    store = open_store(url, "bench")
    rng = np.random.default_rng(0)
    store.begin(rng.random(numel, np.float32))
    result = rng.random(numel, np.float32).tobytes()
    took_s = []
    for subset in range(updates + 1):
        name = f"{subset:032x}"
        accepted = Accepted(at=0.0, unit=Unit(1, subset), assignment=name, alpha=0.95, change=1.0)
        store.append([accepted], put={accepted.result: result})
        began = time.perf_counter()
        claimed = store.claim("bench", now=1.0, lease_s=60.0)
        assert claimed is not None
        update = partial(assimilate, result=np.frombuffer(store.blob(claimed.result), "<f4"), alpha=0.95)
        store.assimilate(claimed, update, server="bench", now=1.0)
        took_s.append(time.perf_counter() - began)
    store.close()
    parent.send(ms=1000 * statistics.median(took_s[1:]))  # the first grows files and memory


NAMES = ("alice", "bob", "carol")
ORDEAL_SUBSETS = 12
# life of a coordinator, of all
UP_S = (0.2, 4.0)
ORDEAL_LIMIT_S = 600.0


def ordeal_job(epochs: int) -> Job:
    settings: dict[str, Any] = {"alpha": 0.7, "deadline_s": 4.0, "in_flight": 2}
    plan = WorkPlan(subsets=ORDEAL_SUBSETS, max_epochs=epochs, local_epochs=4, batch_size=8, **settings)
    return classification_job(plan=plan)


@reports("work_ordeal")
def run_ordeal(report: Report) -> None:
    kills, epochs = (3, 3) if report.quick else (20, 30)
    with tempfile.TemporaryDirectory() as folder, Crew() as crew:
        killed, volunteers_killed = _kill_in_turn(crew, folder, epochs, kills)
        store = open_store(str(Path(folder) / "work" / "job.db"), ordeal_job(epochs).name)
        log = [entry for _, entry in store.entries()]
        store.close()
    assimilated = [entry for entry in log if isinstance(entry, Assimilated)]
    ends = [entry.reason for entry in log if isinstance(entry, Finished)]
    found = {
        "once": list(Counter(entry.unit for entry in assimilated).values()).count(1),
        "units": epochs * ORDEAL_SUBSETS,
        "versions_in_order": [one.version for one in assimilated] == list(range(1, len(assimilated) + 1)),
    }
    report.add_all(found, "", f"by the store's log; the end: {', '.join(ends)}")
    report.add_all({"coordinator_kills": killed, "volunteer_kills": volunteers_killed}, "", "SIGKILL")


def _kill_in_turn(crew: Crew, folder: str, epochs: int, kills: int) -> tuple[int, int]:
    """Restart what is killed until the job is done; return how often coordinator and volunteers were."""
    rng = random.Random(0)
    until = time.monotonic() + ORDEAL_LIMIT_S
    coordinator = crew.start(coordinate_until_killed, epochs, folder)
    start = partial(crew.start, die_in_units, epochs, folder, coordinator.receive()["link"])
    volunteers = {name: start(name) for name in NAMES}
    killed = 0
    volunteers_killed = 0
    die_at = time.monotonic() + rng.uniform(*UP_S)
    while coordinator.process.poll() is None and time.monotonic() < until:
        for name, worker in volunteers.items():
            if worker.process.poll() is not None:
                volunteers_killed += worker.process.returncode == -signal.SIGKILL
                volunteers[name] = start(name)
        if killed < kills and time.monotonic() >= die_at:
            coordinator.process.kill()
            killed += coordinator.process.wait() == -signal.SIGKILL
            coordinator = crew.start(coordinate_until_killed, epochs, folder)
            coordinator.receive()  # its link is that of the first one
            die_at = time.monotonic() + rng.uniform(*UP_S)
        time.sleep(0.02)
    for worker in (coordinator, *volunteers.values()):
        worker.close()
    return killed, volunteers_killed


def coordinate_until_killed(parent: Channel, epochs: int, folder: str) -> None:
    coordinator = coordinate(ordeal_job(epochs), folder=Path(folder) / "work", host="127.0.0.1", servers=2)
    parent.send(link=coordinator.link)
    coordinator.wait()
    os._exit(0)


def die_in_units(parent: Channel, epochs: int, folder: str, link: str, name: str) -> None:
    rng = random.Random(f"{name} {os.getpid()}")
    own = None
    last = ""
    while own is None:
        with suppress(JoinError):  # the coordinator is being started again
            own = volunteer(link, job=ordeal_job(epochs), peer_name=name, folder=Path(folder) / "volunteers")
        time.sleep(0.02)
    while not own.wait(0.01):
        units = own.snapshot().units
        unit = units[0].unit if units else ""
        if unit and unit != last and rng.random() < 0.2:
            threading.Timer(rng.uniform(0.0, 0.3), os.kill, (os.getpid(), signal.SIGKILL)).start()
        last = unit or last
