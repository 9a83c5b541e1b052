"""A trainer whose experts' hosts are killed all the time, as processes over encrypted links.

``python -m colab_swarm.bench.expert_ordeal [--minutes 2] [--kill-every 10]``: four hosts serve a grid of experts to a
trainer that learns to name digits. Every so often a random host is killed with -9. In turn, it comes back two seconds
later with its disk and identity, or never, and a newcomer without either comes instead.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colab_swarm.bench.report import BenchReport

if TYPE_CHECKING:
    from colab_swarm.moe.layer import MixtureStatistics

GRID, DIM, HOSTS, PER_HOST = (4, 4), 64, 4, 3
AWAY_S = 2.0
SMOOTHED = 50


class HostProcess:
    """A host; what it tells goes into ``told``."""

    def __init__(self, name: str, invite: str, folder: Path, told: queue.Queue[dict[str, Any]]) -> None:
        self.name, self.folder = name, folder
        command = [sys.executable, "-m", "colab_swarm.bench.expert_ordeal", "--host", invite, str(folder)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True
        )
        threading.Thread(target=self._read, args=(told,), daemon=True).start()

    def _read(self, told: queue.Queue[dict[str, Any]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told.put({"host": self.name, **json.loads(line)})

    def kill(self) -> None:
        """With -9."""
        self.process.kill()
        self.process.wait()


def host(invite: str, folder: Path) -> None:
    """Serve until killed."""
    import colab_swarm as cs
    from colab_swarm.events import ExpertHosted

    def tell(event: object) -> None:
        if isinstance(event, ExpertHosted):
            print(json.dumps({"uid": event.uid, "step": event.step, "over": event.taken_over}), flush=True)

    folder.mkdir(parents=True, exist_ok=True)
    options = cs.NetworkOptions(lan=False, identity=folder / "key")
    with cs.join(invite, peer_name=folder.name, options=options) as swarm:
        swarm.events.listen(tell)
        served = swarm.host_experts(
            "ffn",
            lambda: cs.moe.FeedForward(DIM),
            grid=GRID,
            count=PER_HOST,
            folder=folder / "saves",
            save_s=3.0,
            takeover_s=5.0,
            spare=2 * PER_HOST,
        )
        print(json.dumps({"ready": len(served.uids)}), flush=True)
        served.wait(3600)


@dataclass
class ExpertOrdealLog:
    """What happened: losses of the trainer, names of the killed, what the hosts told."""

    losses: list[float] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)


class Incidents(threading.Thread):
    """Kills and restarts hosts until `over` is set."""

    def __init__(self, story: ExpertOrdealLog, invite: str, folder: Path, *, every_s: float) -> None:
        super().__init__(daemon=True)
        self._story, self._invite, self._folder, self._every_s = story, invite, folder, every_s
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._rng = random.Random(0)
        self._hosts = [self._begin(f"host-{number}") for number in range(HOSTS)]
        self._names = HOSTS
        self.over = threading.Event()

    def _begin(self, name: str) -> HostProcess:
        return HostProcess(name, self._invite, self._folder / name, self._queue)

    def wait_ready(self) -> None:
        """Until all hosts serve."""
        ready = 0
        while ready < HOSTS:
            self._story.told.append(told := self._queue.get(timeout=60))
            ready += "ready" in told

    def run(self) -> None:
        while not self.over.wait(self._every_s - AWAY_S):
            victim = self._hosts.pop(self._rng.randrange(len(self._hosts)))
            victim.kill()
            self._story.killed.append(victim.name)
            if self.over.wait(AWAY_S):
                break
            name = victim.name
            if len(self._story.killed) % 2 == 0:
                name, self._names = f"host-{self._names}", self._names + 1
            self._hosts.append(self._begin(name))
        while not self._queue.empty():
            self._story.told.append(self._queue.get())
        for left in self._hosts:
            left.kill()


def run(*, minutes: float, kill_every_s: float) -> BenchReport:
    """Train while hosts die; an exception in the training loop is raised here."""
    import torch
    from sklearn.datasets import load_digits
    from torch.nn.functional import cross_entropy

    import colab_swarm as cs

    torch.manual_seed(0)
    digits, story = load_digits(), ExpertOrdealLog()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    with (
        tempfile.TemporaryDirectory() as folder,
        cs.create("ordeal", options=cs.NetworkOptions(lan=False)) as swarm,
    ):
        incidents = Incidents(story, str(swarm.invite()), Path(folder), every_s=kill_every_s)
        try:
            incidents.wait_ready()
            layer = swarm.mixture_of_experts("ffn", DIM, grid=GRID, k=2, timeout_s=5.0)
            model = torch.nn.Sequential(layer, torch.nn.Linear(DIM, 10))
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            incidents.start()
            until = time.monotonic() + 60 * minutes
            while time.monotonic() < until:
                rows = torch.randint(0, 1500, (64,))
                loss = cross_entropy(model(images[rows]), labels[rows]) + 0.01 * layer.balance_loss
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                story.losses.append(loss.item())
                time.sleep(0.02)  # the hosts share these cores
            with torch.no_grad():
                right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
            seen = layer.statistics()
        finally:
            incidents.over.set()
            if incidents.is_alive():
                incidents.join()
    return _report(story, right, seen)


def _report(story: ExpertOrdealLog, right: float, seen: MixtureStatistics) -> BenchReport:
    report = BenchReport("expert_ordeal", quick=False)
    steps = len(story.losses)
    report.add("moe.ordeal_steps", steps, "", "without an exception")
    report.add("moe.ordeal_killed", len(story.killed), "hosts", "with -9")
    first, last = (statistics.fmean(part) for part in (story.losses[:SMOOTHED], story.losses[-SMOOTHED:]))
    report.add("moe.ordeal_loss", last, "", f"mean of the last {SMOOTHED} steps, {first:.3g} at first")
    report.add("moe.ordeal_accuracy", right, "", "of digits never trained on")
    hosted = [told for told in story.told if "uid" in told]
    over = [told for told in hosted if told["over"]]
    back = [told for told in hosted if not told["over"] and told["step"]]
    report.add(
        "moe.ordeal_taken_over", len(over), "experts", f"at steps {sorted(told['step'] for told in over)}"
    )
    report.add(
        "moe.ordeal_came_back", len(back), "experts", "with their host, from its disk, at a step above 0"
    )
    report.add(
        "moe.ordeal_unanswered", seen.unanswered, "inputs", f"of {steps * 64}; {seen.failures} calls failed"
    )
    return report


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m colab_swarm.bench.expert_ordeal", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--kill-every", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--host", nargs=2, metavar=("INVITATION", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.host:
        host(options.host[0], Path(options.host[1]))
    else:
        print(run(minutes=options.minutes, kill_every_s=options.kill_every).table())


if __name__ == "__main__":
    main()
