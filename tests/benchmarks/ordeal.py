"""Experts while the processes of their hosts are killed all the time (SIGKILL).

*expert-ordeal*: a model trains through the experts of four hosts, over encrypted links. At
intervals one is killed, at random. In turn, it comes back two seconds later with its disk and
identity, or a new host without.
"""

import itertools
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import colab_swarm as cs
from colab_swarm.events import ExpertHosted
from colab_swarm.experiments.report import Report, reports
from colab_swarm.recipes.classify import classification_job
from tests.benchmarks.harness import Channel, Crew, Worker, enter

GRID = (4, 4)
DIM = 64
HOSTS = 4
PER_HOST = 3


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
        hosted = swarm.experts.host("ffn", make, grid=GRID, count=PER_HOST, folder=path / "saves", **settings)
        parent.send(ready=len(hosted.uids))
        hosted.wait(3600)


def kill_in_turn(alive: dict[str, Worker], start: partial[Worker], every_s: float) -> Iterator[None]:
    """Kill a random host now and then, between two items; another one starts."""
    rng = random.Random(0)
    number = HOSTS
    kill_at = time.monotonic() + every_s
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
            victim = f"host-{number}"
            number = number + 1
        alive[victim] = start(victim)
        kill_at += every_s


@reports("moe")
def run_experts(report: Report) -> None:
    minutes, kill_every_s = (0.15, 3.0) if report.quick else (2.0, 10.0)
    with TemporaryDirectory() as folder, enter() as swarm, Crew() as crew:
        start = partial(crew.start, host_experts, folder, str(swarm.invite()))
        alive = {name: start(name) for name in [f"host-{number}" for number in range(HOSTS)]}
        for worker in crew:
            while "ready" not in worker.receive():
                pass
        images, labels = classification_job().data()
        x = torch.from_numpy(images).flatten(1) / 255
        y = torch.from_numpy(labels)
        torch.manual_seed(0)
        layer = swarm.experts.mixture("ffn", DIM, grid=GRID, k=2, timeout_s=5.0)
        model = torch.nn.Sequential(layer, torch.nn.Linear(DIM, 10))
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        until = time.monotonic() + 60 * minutes
        losses = list[float]()
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
