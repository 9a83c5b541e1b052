"""Minutes of real training among processes that are killed all the time, against one process with the same batch.

``python -m colab_swarm.bench.ordeal [--minutes 10] [--kill-every 60] [--text FILE] [--folder FOLDER]``: a backbone with
checkpoints and dashboard, three trainers shaped to 50, 100 and 200 Mbit/s and a peer that only reduces train
ALBERT-tiny. Every so often one of them is killed with -9 and started again, the backbone once.
"""

from __future__ import annotations

import argparse
import itertools
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colab_swarm.bench.report import BenchReport

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


class Process:
    """A command of ours that tells JSON lines; each goes to ``on_told``."""

    def __init__(
        self, name: str, arguments: Sequence[str], on_told: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self.name = name
        command = [sys.executable, "-m", "colab_swarm.cli", *arguments, "--json-lines"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, env=environment, text=True
        )
        self._on_told = on_told
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._on_told(self.name, json.loads(line))

    def kill(self) -> None:
        """With -9."""
        self.process.kill()
        self.process.wait()


@dataclass
class OrdealLog:
    """What happened.

    Attributes:
        losses: by step, what each trainer told.
        killed: names, in order.
    """

    losses: dict[int, list[float]] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    steps_by: dict[str, int] = field(default_factory=dict)

    def curve(self) -> list[float]:
        """Mean loss of each step, in order."""
        return [statistics.fmean(self.losses[step]) for step in sorted(self.losses)]


class Ordeal:
    """The processes, and what they told."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder, self._text = folder, text
        self.story = OrdealLog()
        self._facts: queue.Queue[dict[str, Any]] = queue.Queue()
        self._processes: dict[str, Process] = {}
        self.dashboard, self._invite = "", ""
        port, page = random.Random().sample(range(20_000, 60_000), 2)
        self._file = folder / "run.toml"
        self._file.write_text(RUN.format(port=port, page=page))
        self.start("backbone")

    def start(self, name: str) -> None:
        """Start a process, or start it again."""
        if name == "backbone":
            arguments = ["backbone", str(self._file)]
        elif name == "reducer":
            arguments = ["peer", self._invite, "--reduce-only", "--no-lan", "--peer-name", name]
        else:
            limit, size = str(MBIT_S[name]), str(TARGET_BATCH_SIZE)
            limits = ["--upload-mbit-s", limit, "--download-mbit-s", limit]
            training = ["--target-batch-size", size, "--batch-size", "8", "--text", self._text]
            arguments = ["peer", self._invite, "--no-lan", "--peer-name", name, *limits, *training]
        self._processes[name] = Process(name, arguments, self._on_told)
        if name == "backbone":
            self._invite = str(self._wait_fact("invite"))
            self.dashboard = str(self._wait_fact("dashboard"))

    def _wait_fact(self, key: str) -> Any:
        while key not in (told := self._facts.get(timeout=60)):
            pass
        return told[key]

    def _on_told(self, name: str, told: dict[str, Any]) -> None:
        if name == "backbone":
            self._facts.put(told)
        elif told["event"] == "step":
            self.story.steps_by[name] = told["step"]
            if told["loss"] is not None:
                self.story.losses.setdefault(told["step"], []).append(told["loss"])

    def kill(self, name: str) -> None:
        """Kill it with -9 and start it again a little later."""
        self._processes[name].kill()
        self.story.killed.append(name)

    def stop(self) -> None:
        """End all."""
        for process in self._processes.values():
            process.kill()

    @property
    def alive(self) -> bool:
        """Whether all processes that were not killed still run."""
        return all(process.process.poll() is None for process in self._processes.values())


def endure(folder: Path, *, minutes: float, kill_every_s: float, text: str, away_s: float = 5.0) -> OrdealLog:
    """Let it run; returns what happened."""
    ordeal = Ordeal(folder, text)
    try:
        print(f"  dashboard: {ordeal.dashboard}", flush=True)
        for name in ("reducer", *MBIT_S):
            ordeal.start(name)
        until = time.monotonic() + 60 * minutes
        victims = itertools.cycle(["carol", "backbone", "alice", "reducer", "bob"])
        while until - time.monotonic() > kill_every_s:
            time.sleep(kill_every_s - away_s)
            victim = next(victims)
            if victim == "backbone" and "backbone" in ordeal.story.killed:
                victim = next(victims)
            ordeal.kill(victim)
            time.sleep(away_s)
            ordeal.start(victim)
            print(f"  {victim} was killed; steps {ordeal.story.steps_by}", flush=True)
        time.sleep(max(0.0, until - time.monotonic()))
        if not ordeal.alive:
            raise RuntimeError("a process ended that nobody killed")
        return ordeal.story
    finally:
        ordeal.stop()


def alone(steps: int, text: str) -> list[float]:
    """One process with the joined batch, set up as the command line's trainers: its losses."""
    import torch

    import colab_swarm as cs

    model, batches = cs.recipes.albert("tiny", text=text, batch_size=8)
    optimizer = cs.Lamb(cs.recipes.parameter_groups(model), lr=1e-2)
    losses: list[float] = []
    stream = iter(batches)
    for _ in range(steps):
        parts = []
        for _ in range(TARGET_BATCH_SIZE // 8):
            loss = model(**next(stream)).loss
            (loss * 8 / TARGET_BATCH_SIZE).backward()
            parts.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(statistics.fmean(parts))
    return losses


def check_checkpoints(folder: Path, text: str) -> list[int]:
    """Load each checkpoint that is left and take a step with it; returns their steps."""
    import colab_swarm as cs

    steps = []
    for path in sorted((folder / "ordeal" / "model").glob("*.safetensors")):
        model, batches = cs.recipes.albert("tiny", text=text, batch_size=8)
        with cs.create("check", options=cs.NetworkOptions(lan=False, listen=False)) as swarm:
            lamb = cs.Lamb(cs.recipes.parameter_groups(model), lr=1e-2)
            optimizer = swarm.optimizer(lamb, target_batch_size=8, max_grad_norm=1.0)
            optimizer.load(path)
            before = optimizer.global_step
            loss = model(**next(iter(batches))).loss
            loss.backward()
            optimizer.step(samples=8)
            if optimizer.global_step != before + 1:
                raise RuntimeError(f"{path} does not continue")
            steps.append(before)
    return steps


def run(
    quick: bool, *, minutes: float | None = None, kill_every_s: float = 60.0, text: str = "python-docs"
) -> BenchReport:
    """Measure."""
    report = BenchReport("ordeal", quick)
    minutes = minutes or (1.5 if quick else 10.0)
    kill_every_s = min(kill_every_s, 60 * minutes / 4)
    with tempfile.TemporaryDirectory() as folder:
        story = endure(Path(folder), minutes=minutes, kill_every_s=kill_every_s, text=text)
        kept = check_checkpoints(Path(folder), text)
    curve = story.curve()
    reference = alone(len(curve), text)
    last, lasts = (statistics.fmean(losses[-SMOOTHED_STEPS:]) for losses in (curve, reference))
    what = f"{minutes:g} minutes, {len(story.killed)} killed: {', '.join(story.killed)}"
    report.add("ordeal.steps", len(curve), "", what)
    report.add(
        "ordeal.loss", last, "", f"mean of the last {SMOOTHED_STEPS} steps; {curve[0]:.2f} at the first"
    )
    report.add("ordeal.loss_alone", lasts, "", "one process, the same batch, as many steps")
    gaps = [abs(a - b) for a, b in zip(_smooth(curve), _smooth(reference), strict=True)]
    report.add("ordeal.loss_gap", max(gaps), "", f"largest, of means over {SMOOTHED_STEPS} steps")
    report.add("ordeal.checkpoints", len(kept), "", f"loaded and continued, of steps {kept}")
    return report


def _smooth(losses: Sequence[float]) -> list[float]:
    ends = range(SMOOTHED_STEPS, len(losses) + 1)
    return [statistics.fmean(losses[end - SMOOTHED_STEPS : end]) for end in ends]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kill-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--text", default="python-docs")
    given = parser.parse_args()
    print(run(False, minutes=given.minutes, kill_every_s=given.kill_every, text=given.text).table())
