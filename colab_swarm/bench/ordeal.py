"""Training through experts while their hosts are killed all the time (SIGKILL), as processes over encrypted links.

    python -m colab_swarm.bench.ordeal [MINUTES KILL_EVERY_S]

At intervals one of four hosts is killed, at random. In turn, it comes back two seconds later with
its disk and identity, or a new host without.
"""

import queue
import random
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import colab_swarm as cs
from colab_swarm.bench.harness import BenchReport, Channel, Crew, Worker
from colab_swarm.events import ExpertHosted
from colab_swarm.moe.calls import MixtureStatistics

GRID, DIM, HOSTS, PER_HOST = (4, 4), 64, 4, 3
AWAY_S, SMOOTHED = 2.0, 50


class Victims(Crew):
    """Hosts that can be killed, ``alive`` by name; ``messages`` gets all that they send."""

    def __init__(self, invite: str, folder: str) -> None:
        super().__init__()
        self._arguments = invite, Path(folder)
        self.alive: dict[str, Worker] = {}
        self.killed = 0
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()

    def start_host(self, name: str) -> None:
        invite, folder = self._arguments
        worker = self.alive[name] = self.start(host_experts, invite, str(folder / name))

        def read() -> None:
            with suppress(EOFError, ValueError):  # it ended
                while True:
                    self.messages.put(worker.receive())

        threading.Thread(target=read, daemon=True).start()

    def kill_until(self, over: threading.Event, every_s: float) -> None:
        """Kill a random host now and then; RuntimeError if a process ended by itself."""
        rng, number = random.Random(0), HOSTS
        while not over.wait(every_s - AWAY_S):
            victim = rng.choice(list(self.alive))
            if ended := [name for name, worker in self.alive.items() if worker.process.poll() is not None]:
                raise RuntimeError(f"{ended} ended without being killed")
            self.alive.pop(victim).close()
            self.killed += 1
            if over.wait(AWAY_S):
                break
            if self.killed % 2 == 0:
                victim, number = f"host-{number}", number + 1
            self.start_host(victim)


def host_experts(parent: Channel, invite: str, folder: str) -> None:
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


def run_experts(*, minutes: float, kill_every_s: float) -> BenchReport:
    over, messages = threading.Event(), list[dict[str, Any]]()
    with (
        tempfile.TemporaryDirectory() as folder,
        cs.create("ordeal", options=cs.NetworkOptions(lan=False)) as swarm,
        Victims(str(swarm.invite()), folder) as victims,
    ):
        for number in range(HOSTS):
            victims.start_host(f"host-{number}")
        while sum("ready" in message for message in messages) < HOSTS:
            messages.append(victims.messages.get(timeout=120))
        killer = threading.Thread(target=victims.kill_until, args=(over, kill_every_s))
        killer.start()
        try:
            losses, right, seen = _train_on_digits(swarm, minutes)
        finally:
            over.set()
            killer.join()
        messages += [victims.messages.get() for _ in range(victims.messages.qsize())]
    report = BenchReport("expert_ordeal", quick=False, prefix="moe")
    hosted = [message["over"] for message in messages if message.get("step")]
    found = {
        "ordeal_steps": len(losses),
        "ordeal_loss": fmean(losses[-SMOOTHED:]),
        "ordeal_accuracy": right,
        "ordeal_killed": victims.killed,
        "ordeal_taken_over": sum(hosted),
        "ordeal_came_back": hosted.count(False),
        "ordeal_unanswered": seen.unanswered,
    }
    report.add_all(found)
    return report


def _train_on_digits(swarm: cs.Swarm, minutes: float) -> tuple[list[float], float, MixtureStatistics]:
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
    minutes, kill_every_s = map(float, sys.argv[1:] or (2, 10))
    print(run_experts(minutes=minutes, kill_every_s=kill_every_s).table())
