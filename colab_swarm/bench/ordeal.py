"""Training while its processes are killed all the time (SIGKILL), as processes over encrypted links.

    python -m colab_swarm.bench.ordeal training [--minutes 10] [--kill-every 60] [--text FILE]
    python -m colab_swarm.bench.ordeal experts [--minutes 2] [--kill-every 10]

*training*: a backbone with checkpoints and dashboard, three trainers limited to 50, 100 and 200 Mbit/s and a peer that
only reduces train ALBERT-tiny. At intervals one of them is killed and restarted, the backbone once. The loss is
compared with that of one process with the same batch.

*experts*: four hosts serve a grid of experts to a trainer that learns digits. At intervals a random host is killed. In
turn, it comes back two seconds later with its disk and identity, or a new host without either replaces it.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import colab_swarm as cs
from colab_swarm.bench.harness import BenchReport, Parent, Worker
from colab_swarm.events import ExpertHosted
from colab_swarm.moe.layer import MixtureStatistics
from colab_swarm.swarm.swarm import Swarm

TARGET_BATCH_SIZE = 96
MBIT_S = {"alice": 50, "bob": 100, "carol": 200}
SMOOTHED_STEPS = 20
RUN = """name = "ordeal"
[network]
port = {port}
announce = ["ws://127.0.0.1:{port}"]
lan = false
[dashboard]
port = {page}
[[collaborations]]
every_steps = 20
keep = 3
"""
GRID, DIM, HOSTS, PER_HOST = (4, 4), 64, 4, 3
AWAY_S = 2.0
SMOOTHED = 50


class Victims:
    """Processes by name that can be killed; ``messages`` gets all that they send."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self._workers: dict[str, Worker] = {}

    def start(self, name: str, work: Any, *arguments: object) -> None:
        """Start a `Worker`, or start it again."""
        worker = Worker(work, *arguments, environment={"TOKENIZERS_PARALLELISM": "false"})
        self._workers[name] = worker
        threading.Thread(target=self._read, args=(worker,), daemon=True).start()

    def _read(self, worker: Worker) -> None:
        with suppress(RuntimeError, ValueError):  # it ended
            while True:
                self.messages.put(worker.receive())

    def drain(self) -> list[dict[str, Any]]:
        """Return the messages that are there."""
        return [self.messages.get() for _ in range(self.messages.qsize())]

    def kill(self, name: str) -> None:
        """Kill one with SIGKILL."""
        self._workers.pop(name).__exit__()
        self.killed.append(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.__exit__()

    @property
    def names(self) -> list[str]:
        """Return the names of the running processes.

        Raises:
            RuntimeError: one of them ended by itself.
        """
        for name, worker in self._workers.items():
            if worker.process.poll() is not None:
                raise RuntimeError(f"{name} ended without being killed")
        return list(self._workers)


# --- training --------------------------------------------------------------------------------------------------------


def run_training(*, minutes: float, kill_every_s: float, text: str = "python-docs") -> BenchReport:
    """Train among processes, then load each checkpoint, then train alone."""
    report = BenchReport("ordeal", quick=False)
    with tempfile.TemporaryDirectory() as folder:
        losses, killed = _train_among_kills(Path(folder), minutes, min(kill_every_s, 15 * minutes), text)
        loaded = [_continue_from(path, text) for path in Path(folder).glob("ordeal/model/*.safetensors")]
    curve = [statistics.fmean(losses[step]) for step in sorted(losses)]
    smooth, alone = (_smoothed(one) for one in (curve, _train_alone(len(curve), text)))
    gap = max(abs(ours - theirs) for ours, theirs in zip(smooth, alone, strict=True))
    report.add("steps", len(curve), "", f"{minutes:g} minutes, {len(killed)} killed: {', '.join(killed)}")
    what = f"mean of {SMOOTHED_STEPS} steps"
    report.add("loss", smooth[-1], "", f"{what}, the last ones; {curve[0]:.2f} at the first")
    report.add("loss_alone", alone[-1], "", "one process, the same batch, as many steps")
    report.add("loss_gap", gap, "", f"largest; {what}")
    report.add("checkpoints", len(loaded), "", f"loaded and continued, of steps {sorted(loaded)}")
    return report


def _smoothed(curve: list[float]) -> list[float]:
    ends = range(SMOOTHED_STEPS, len(curve) + 1)
    return [statistics.fmean(curve[end - SMOOTHED_STEPS : end]) for end in ends]


def _train_among_kills(
    folder: Path, minutes: float, kill_every_s: float, text: str, away_s: float = 5.0
) -> tuple[dict[int, list[float]], list[str]]:
    """Return the losses of each step and the names of the killed processes."""
    file, losses = folder / "run.toml", defaultdict[int, list[float]](list)
    port, page = random.Random().sample(range(20_000, 60_000), 2)
    file.write_text(RUN.format(port=port, page=page))
    command = [sys.executable, "-m", "colab_swarm.cli"]
    words: dict[str, list[object]] = {"backbone": ["backbone", file, "--json-lines"]}
    until = time.monotonic() + 60 * minutes
    with Victims() as victims:
        victims.start("backbone", command, *words["backbone"])
        facts: dict[str, Any] = {}
        while not {"invite", "dashboard"} <= facts.keys():
            facts |= victims.messages.get(timeout=120)
        print(f"  dashboard: {facts['dashboard']}", flush=True)
        peer = ["peer", facts["invite"], "--json-lines", "--no-lan", "--peer-name"]
        words["reducer"] = [*peer, "reducer", "--reduce-only"]
        for name, mbit_s in MBIT_S.items():
            limits = ["--upload-mbit-s", mbit_s, "--download-mbit-s", mbit_s, "--text", text]
            batch = ["--target-batch-size", TARGET_BATCH_SIZE, "--batch-size", 8]
            words[name] = [*peer, name, *limits, *batch]
        for name in ("reducer", *MBIT_S):
            victims.start(name, command, *words[name])
        order = itertools.cycle(["carol", "backbone", "alice", "reducer", "bob"])
        while until - time.monotonic() > kill_every_s:
            time.sleep(kill_every_s - away_s)
            victim = next(order)
            if victim == "backbone" and victim in victims.killed:
                victim = next(order)
            victims.kill(victim)
            time.sleep(away_s)
            victims.start(victim, command, *words[victim])
            print(f"  {victim} was killed", flush=True)
        time.sleep(max(0.0, until - time.monotonic()))
        assert len(victims.names) == len(words)
        for message in victims.drain():
            if message.get("event") == "step" and message["loss"] is not None:
                losses[message["step"]].append(message["loss"])
    return losses, victims.killed


def _train_alone(steps: int, text: str) -> list[float]:
    """Train one process with the joint batch, set up like the trainers; return its losses."""
    model, batches = cs.recipes.albert("tiny", text=text, batch_size=8)
    optimizer = cs.Lamb(cs.recipes.parameter_groups(model), lr=1e-2)
    losses: list[float] = []
    for _ in range(steps):
        parts = []
        for batch in itertools.islice(batches, TARGET_BATCH_SIZE // 8):
            loss = model(**batch).loss
            (loss * 8 / TARGET_BATCH_SIZE).backward()
            parts.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(statistics.fmean(parts))
    return losses


def _continue_from(checkpoint: Path, text: str) -> int:
    """Load a checkpoint and take a step with it; return its step."""
    model, batches = cs.recipes.albert("tiny", text=text, batch_size=8)
    with cs.create("check", options=cs.NetworkOptions(lan=False, listen=False)) as swarm:
        lamb = cs.Lamb(cs.recipes.parameter_groups(model), lr=1e-2)
        optimizer = swarm.optimizer(lamb, target_batch_size=8, max_grad_norm=1.0)
        optimizer.load(checkpoint)
        before = optimizer.global_step
        model(**next(iter(batches))).loss.backward()
        optimizer.step(samples=8)
        if optimizer.global_step != before + 1:
            raise RuntimeError(f"training does not continue from {checkpoint}")
    return before


# --- experts ---------------------------------------------------------------------------------------------------------


def host_experts(parent: Parent, invite: str, folder: str) -> None:
    """Worker: host experts until killed."""

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
        victim = rng.choice(victims.names)
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
    first, last = (statistics.fmean(part) for part in (losses[:SMOOTHED], losses[-SMOOTHED:]))
    hosted = [message for message in messages if message.get("step")]
    over_at = sorted(message["step"] for message in messages if message.get("over"))
    back = sum(not message["over"] for message in hosted)
    unanswered = f"of {len(losses) * 64}; {seen.failures} calls failed"
    report.add("ordeal_steps", len(losses), "", "without an exception")
    report.add("ordeal_killed", len(victims.killed), "hosts", "with SIGKILL")
    report.add("ordeal_loss", last, "", f"mean of the last {SMOOTHED} steps, {first:.3g} at first")
    report.add("ordeal_accuracy", right, "", "of digits never trained on")
    report.add("ordeal_taken_over", len(over_at), "experts", f"at steps {over_at}")
    report.add("ordeal_came_back", back, "experts", "with their host, from its disk, at a step above 0")
    report.add("ordeal_unanswered", seen.unanswered, "inputs", unanswered)
    return report


def _train_on_digits(swarm: Swarm, minutes: float) -> tuple[list[float], float, MixtureStatistics]:
    """Return the loss of each step, the accuracy on unseen digits, and the statistics of the mixture."""
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
    parser.add_argument("kind", choices=["training", "experts"])
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--kill-every", type=float, metavar="SECONDS")
    parser.add_argument("--text", default="python-docs")
    given = parser.parse_args()
    if given.kind == "training":
        made = run_training(minutes=given.minutes or 10, kill_every_s=given.kill_every or 60, text=given.text)
    else:
        made = run_experts(minutes=given.minutes or 2, kill_every_s=given.kill_every or 10)
    print(made.table())
