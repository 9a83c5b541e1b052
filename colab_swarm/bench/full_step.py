"""Full steps (find the group, average, done) among processes on loopback: ours, and hivemind's in the same run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colab_swarm.bench.report import BenchReport

OURS = (sys.executable, "-m", "colab_swarm.bench.full_step_worker")
CROWD = 16
THEIRS = Path(__file__).with_name("hivemind_worker.py")


@dataclass(frozen=True)
class StepPlan:
    """How many processes, and how many steps of a vector of how many values (float16 on the wire)."""

    peers: tuple[int, ...]
    numel: int
    steps: int


FULL = StepPlan(peers=(4, 8), numel=2_400_000, steps=10)
QUICK = StepPlan(peers=(4,), numel=400_000, steps=3)


@dataclass(frozen=True)
class StepTimes:
    """Per step: the slowest member's seconds in all and in the all-reduce, whether the mean was right at all, and the
    bytes that went over the loopback interface (empty where the system does not count them)."""

    seconds: list[float]
    reduced_s: list[float]
    right: list[bool]
    traffic: list[int]


class StepWorker:
    """A process that speaks JSON lines; ends with the `with` block."""

    def __init__(self, command: Sequence[object]) -> None:
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def say(self, **message: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The next line that is ours: libraries print, too.

        Raises:
            RuntimeError: the worker ended.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"a worker ended: {self.process.args!r}, exit code {self.process.wait()}")

    def __enter__(self) -> StepWorker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def measure(command: Sequence[object], peers: int, plan: StepPlan) -> StepTimes:
    """Steps of ``peers`` processes, the first of which is not counted."""
    steps = StepTimes([], [], [], [])
    with ExitStack() as stack:
        first = stack.enter_context(StepWorker([*command, plan.numel, peers]))
        entry = first.hear()["contact"]
        others = [
            stack.enter_context(StepWorker([*command, plan.numel, peers, entry])) for _ in range(peers - 1)
        ]
        for worker in others:
            worker.hear()
        workers = [first, *others]
        for _ in range(plan.steps + 1):
            for index, worker in enumerate(workers):
                worker.say(value=float(index))
            for worker in workers:
                worker.hear()
            before = loopback_bytes()
            for worker in workers:
                worker.say()
            told = [worker.hear() for worker in workers]
            steps.traffic.extend([loopback_bytes() - before] if before else [])
            mean = (peers - 1) / 2
            steps.seconds.append(max(one["seconds"] for one in told))
            steps.reduced_s.append(max(one["reduced_s"] for one in told))
            steps.right.append(
                all(abs(one["low"] - mean) < 0.01 and abs(one["high"] - mean) < 0.01 for one in told)
            )
    return StepTimes(steps.seconds[1:], steps.reduced_s[1:], steps.right[1:], steps.traffic[1:])


def loopback_bytes() -> int:
    """Sent over the loopback interface since the system began; 0 where it is not told."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[9]) for line in lines if line.strip().startswith("lo:")), 0)


def run(report: BenchReport, *, python: str | None) -> None:
    """Measure ours and, with a ``python`` that has hivemind, theirs."""
    plan = QUICK if report.quick else FULL
    for peers in plan.peers:
        ours = measure((*OURS, "step"), peers, plan)
        seconds, reduced_s = _add(report, "", ours, peers, plan)
        waits = [whole - part for whole, part in zip(ours.seconds, ours.reduced_s, strict=True)]
        what = "of a step is not the averaging itself"
        report.add(f"averaging.overhead_s_{peers}", statistics.median(waits), "s", what)
        if python is not None:
            theirs = _add(report, "hivemind_", measure((python, THEIRS), peers, plan), peers, plan)
            suffix = "" if peers == plan.peers[-1] else f"_{peers}"
            report.add(
                f"averaging.step_vs_hivemind{suffix}", theirs[0] / seconds, "times", "faster per full step"
            )
            report.add(
                f"averaging.allreduce_vs_hivemind{suffix}", theirs[1] / reduced_s, "times", "faster in it"
            )

    if not report.quick:
        crowd = measure((*OURS, "groups"), CROWD, plan)
        what = f"of {len(crowd.right)} averages of {CROWD} processes in groups of 4, right at all"
        report.add("averaging.groups_success", sum(crowd.right) / len(crowd.right), "", what)


def _add(
    report: BenchReport, whose: str, steps: StepTimes, peers: int, plan: StepPlan
) -> tuple[float, float]:
    seconds, reduced_s = statistics.median(steps.seconds), statistics.median(steps.reduced_s)
    right = sum(steps.right)
    what = f"{peers} processes, {plan.numel / 1e6:g} M values as float16; right at all in {right} of {plan.steps}"
    report.add(f"averaging.{whose}step_s_{peers}", seconds, "s", what)
    report.add(f"averaging.{whose}allreduce_s_{peers}", reduced_s, "s", "the averaging itself")
    if steps.traffic:
        least_mb = 2 * (peers - 1) * plan.numel * 2 / 1e6
        what = f"over loopback in a step, headers included; the values alone are {least_mb:.1f}"
        report.add(f"averaging.{whose}traffic_mb_{peers}", statistics.median(steps.traffic) / 1e6, "MB", what)
    return seconds, reduced_s
