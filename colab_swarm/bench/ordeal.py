"""Training through experts while their hosts are killed all the time (SIGKILL), as processes over encrypted links.

    python -m colab_swarm.bench.ordeal [--minutes 2] [--kill-every 10]

Four hosts serve a grid of experts to a trainer that learns digits. At intervals a random host is killed. In turn, it
comes back two seconds later with its disk and identity, or a new host without either replaces it.
"""

from __future__ import annotations

import argparse
import queue
import random
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import colab_swarm as cs
from colab_swarm.bench.harness import BenchReport, Parent, Worker
from colab_swarm.events import ExpertHosted
from colab_swarm.moe.calls import MixtureStatistics
from colab_swarm.swarm.swarm import Swarm

GRID, DIM, HOSTS, PER_HOST = (4, 4), 64, 4, 3
AWAY_S, SMOOTHED = 2.0, 50


class Victims(dict[str, Worker]):
    """Processes by name that can be killed; ``messages`` gets all that they send."""

    def __init__(self) -> None:
        super().__init__()
        self.killed: list[str] = []
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()

    def start(self, name: str, work: Any, *arguments: object) -> None:
        self[name] = Worker(work, *arguments)
        threading.Thread(target=self._read, args=(self[name],), daemon=True).start()

    def _read(self, worker: Worker) -> None:
        with suppress(RuntimeError, ValueError):  # it ended
            while True:
                self.messages.put(worker.receive())

    def drain(self) -> list[dict[str, Any]]:
        return [self.messages.get() for _ in range(self.messages.qsize())]

    def kill(self, name: str) -> None:
        """Kill one with SIGKILL.

        Raises:
            RuntimeError: a process ended by itself.
        """
        if ended := [name for name, worker in self.items() if worker.process.poll() is not None]:
            raise RuntimeError(f"{ended} ended without being killed")
        self.pop(name).close()
        self.killed.append(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.values():
            worker.close()


def host_experts(parent: Parent, invite: str, folder: str) -> None:
    def on_event(event: object) -> None:
        if isinstance(event, ExpertHosted):
            parent.send(uid=event.uid, step=event.step, over=event.taken_over)

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    options = cs.NetworkOptions(lan=False, identity=path / "key")
    with cs.join(invite, peer_name=path.name, options=options) as swarm:
        swarm.events.listen(on_event)
        hosted = swarm.host_experts(
            "ffn",
            lambda: cs.moe.FeedForward(DIM),
            grid=GRID,
            count=PER_HOST,
            folder=path / "saves",
            save_s=3.0,
            takeover_s=5.0,
            spare=2 * PER_HOST,
        )
        parent.send(ready=len(hosted.uids))
        hosted.wait(3600)


def _kill_hosts(victims: Victims, invite: str, folder: Path, every_s: float, over: threading.Event) -> None:
    rng, number = random.Random(0), HOSTS
    while not over.wait(every_s - AWAY_S):
        victim = rng.choice(list(victims))
        victims.kill(victim)
        if over.wait(AWAY_S):
            break
        if len(victims.killed) % 2 == 0:
            victim, number = f"host-{number}", number + 1
        victims.start(victim, host_experts, invite, str(folder / victim))


def run_experts(*, minutes: float, kill_every_s: float) -> BenchReport:
    """Train through experts while their hosts are killed; an exception in the training loop is raised here."""
    over, messages = threading.Event(), list[dict[str, Any]]()
    with (
        tempfile.TemporaryDirectory() as folder,
        cs.create("ordeal", options=cs.NetworkOptions(lan=False)) as swarm,
        Victims() as victims,
    ):
        invite = str(swarm.invite())
        for number in range(HOSTS):
            victims.start(f"host-{number}", host_experts, invite, str(Path(folder) / f"host-{number}"))
        while sum("ready" in message for message in messages) < HOSTS:
            messages.append(victims.messages.get(timeout=120))
        arguments = (victims, invite, Path(folder), kill_every_s, over)
        killer = threading.Thread(target=_kill_hosts, args=arguments)
        killer.start()
        try:
            losses, right, seen = _train_on_digits(swarm, minutes)
        finally:
            over.set()
            killer.join()
        messages += victims.drain()
    report = BenchReport("expert_ordeal", quick=False, prefix="moe")
    hosted = [message["over"] for message in messages if message.get("step")]
    found = {"steps": len(losses), "loss": fmean(losses[-SMOOTHED:]), "accuracy": right}
    found |= {"killed": len(victims.killed), "taken_over": sum(hosted), "came_back": hosted.count(False)}
    found |= {"unanswered": seen.unanswered}
    report.add_all({f"ordeal_{key}": value for key, value in found.items()})
    return report


def _train_on_digits(swarm: Swarm, minutes: float) -> tuple[list[float], float, MixtureStatistics]:
    torch.manual_seed(0)
    digits, losses = load_digits(), list[float]()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    layer = swarm.mixture_of_experts("ffn", DIM, grid=GRID, k=2, timeout_s=5.0)
    model = torch.nn.Sequential(layer, torch.nn.Linear(DIM, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        rows = torch.randint(0, 1500, (64,))
        loss = cross_entropy(model(images[rows]), labels[rows]) + 0.01 * layer.balance_loss
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        time.sleep(0.02)  # the hosts share these cores
    with torch.no_grad():
        right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    return losses, right, layer.statistics()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m colab_swarm.bench.ordeal", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--kill-every", type=float, metavar="SECONDS", default=10)
    given = parser.parse_args()
    print(run_experts(minutes=given.minutes, kill_every_s=given.kill_every).table())
