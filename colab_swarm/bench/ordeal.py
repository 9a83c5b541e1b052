"""Experts and work units while their processes are killed all the time (SIGKILL).

*expert-ordeal*: a model trains through the experts of four hosts, over encrypted links. At
intervals one is killed, at random. In turn, it comes back two seconds later with its disk and
identity, or a new host without.

*work-ordeal*: the coordinator is killed at random moments together with its parameter servers, and
restarted in the same folder. Volunteers are killed in the middle of a unit with probability 0.2 and
come back under their names. At the end the store's log must contain every unit of every epoch as
assimilated exactly once.
"""

import itertools
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import colab_swarm as cs
from colab_swarm.bench.harness import BenchReport, Channel, Crew, Worker, benchmark
from colab_swarm.errors import JoinError
from colab_swarm.events import ExpertHosted
from colab_swarm.recipes.classify import classification_job
from colab_swarm.workunits import WorkPlan, coordinate, volunteer
from colab_swarm.workunits.job import Job
from colab_swarm.workunits.state import Assimilated, Finished
from colab_swarm.workunits.store import open_store

GRID, DIM, HOSTS, PER_HOST = (4, 4), 64, 4, 3


def host_experts(parent: Channel, folder: str, invite: str, name: str) -> None:
    path = Path(folder) / name
    path.mkdir(parents=True, exist_ok=True)
    options = cs.NetworkOptions(lan=False, identity=path / "key")
    with cs.join(invite, peer_name=name, options=options) as swarm:
        swarm.events.listen(
            lambda event: (
                parent.send(taken_over=event.taken_over) if isinstance(event, ExpertHosted) else None
            )
        )
        settings: dict[str, Any] = {"save_s": 3.0, "takeover_s": 5.0, "spare": 2 * PER_HOST}
        make = partial(cs.moe.FeedForward, DIM)
        hosted = swarm.host_experts("ffn", make, grid=GRID, count=PER_HOST, folder=path / "saves", **settings)
        parent.send(ready=len(hosted.uids))
        hosted.wait(3600)


def kill_in_turn(alive: dict[str, Worker], start: partial[Worker], every_s: float) -> Iterator[None]:
    """Kill a random host now and then, between two items; another one starts."""
    rng, number, kill_at = random.Random(0), HOSTS, time.monotonic() + every_s
    for killed in itertools.count(1):
        while time.monotonic() < kill_at:
            yield
        if ended := [name for name, worker in alive.items() if worker.process.poll() is not None]:
            raise RuntimeError(f"{ended} ended without being killed")
        victim = rng.choice(list(alive))
        alive.pop(victim).process.kill()
        while time.monotonic() < kill_at + 2.0:
            yield
        if killed % 2 == 0:
            victim, number = f"host-{number}", number + 1
        alive[victim] = start(victim)
        kill_at += every_s


@benchmark("moe")
def run_experts(report: BenchReport) -> None:
    minutes, kill_every_s = (0.15, 3.0) if report.quick else (2.0, 10.0)
    options = cs.NetworkOptions(lan=False)
    with TemporaryDirectory() as folder, cs.create("ordeal", options=options) as swarm, Crew() as crew:
        start = partial(crew.start, host_experts, folder, str(swarm.invite()))
        alive = {name: start(name) for name in [f"host-{number}" for number in range(HOSTS)]}
        for worker in crew:
            while "ready" not in worker.receive():
                pass
        images, labels = classification_job().data()
        x, y = torch.from_numpy(images).flatten(1) / 255, torch.from_numpy(labels)
        torch.manual_seed(0)
        layer = swarm.mixture_of_experts("ffn", DIM, grid=GRID, k=2, timeout_s=5.0)
        model = torch.nn.Sequential(layer, torch.nn.Linear(DIM, 10))
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        until, losses = time.monotonic() + 60 * minutes, list[float]()
        for _ in kill_in_turn(alive, start, kill_every_s):
            if time.monotonic() > until:
                break
            rows = torch.randint(0, len(y), (64,))
            loss = cross_entropy(model(x[rows]), y[rows]) + 0.01 * layer.balance_loss
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            time.sleep(0.02)  # the hosts share these cores
        taken_over = 0
        for worker in crew:
            worker.process.kill()
            with suppress(EOFError):
                while True:
                    taken_over += worker.receive().get("taken_over", 0)
    report.add_all({"ordeal_steps": len(losses), "ordeal_loss": statistics.mean(losses[-50:])})
    report.add_all({"ordeal_killed": len(crew) - len(alive), "ordeal_taken_over": taken_over})


NAMES = ("alice", "bob", "carol")
SUBSETS = 12
UP_S, TIME_LIMIT_S = (0.2, 4.0), 600.0  # life of a coordinator, of all


def job_of(epochs: int) -> Job:
    settings: dict[str, Any] = {"alpha": 0.7, "deadline_s": 4.0, "in_flight": 2}
    return classification_job(
        plan=WorkPlan(subsets=SUBSETS, max_epochs=epochs, local_epochs=4, batch_size=8, **settings)
    )


@benchmark("work_ordeal")
def run_work(report: BenchReport) -> None:
    kills, epochs = (3, 3) if report.quick else (20, 30)
    rng, until = random.Random(0), time.monotonic() + TIME_LIMIT_S
    with TemporaryDirectory() as folder, Crew() as crew:
        coordinator = crew.start(coordinate_until_killed, epochs, folder)
        link, killed, volunteers_killed = coordinator.receive()["link"], 0, 0
        start = partial(crew.start, die_in_units, epochs, folder, link)
        volunteers = {name: start(name) for name in NAMES}
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
        store = open_store(str(Path(folder) / "work" / "job.db"), job_of(epochs).name)
        log = [entry for _, entry in store.entries()]
        store.close()
    assimilated = [entry for entry in log if isinstance(entry, Assimilated)]
    ends = [entry.reason for entry in log if isinstance(entry, Finished)]
    found = {
        "once": list(Counter(entry.unit for entry in assimilated).values()).count(1),
        "units": epochs * SUBSETS,
        "versions_in_order": [one.version for one in assimilated] == list(range(1, len(assimilated) + 1)),
    }
    report.add_all(found, "", f"by the store's log; the end: {', '.join(ends)}")
    report.add_all({"coordinator_kills": killed, "volunteer_kills": volunteers_killed}, "", "SIGKILL")


def coordinate_until_killed(parent: Channel, epochs: int, folder: str) -> None:
    coordinator = coordinate(job_of(epochs), folder=Path(folder) / "work", host="127.0.0.1", servers=2)
    parent.send(link=coordinator.link)
    coordinator.wait()
    os._exit(0)


def die_in_units(parent: Channel, epochs: int, folder: str, link: str, name: str) -> None:
    rng, own, last = random.Random(f"{name} {os.getpid()}"), None, ""
    while own is None:
        with suppress(JoinError):  # the coordinator is being started again
            own = volunteer(link, job=job_of(epochs), name=name, folder=Path(folder) / "volunteers")
        time.sleep(0.02)
    while not own.wait(0.01):
        unit = own.snapshot().units[0].unit
        if unit and unit != last and rng.random() < 0.2:
            threading.Timer(rng.uniform(0.0, 0.3), os.kill, (os.getpid(), signal.SIGKILL)).start()
        last = unit or last
