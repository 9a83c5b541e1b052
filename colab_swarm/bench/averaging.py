"""An averaging round among processes on loopback, against torch.distributed's gloo and memory alone."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from colab_swarm.averaging.group import Group, GroupMember
from colab_swarm.bench import full_step
from colab_swarm.bench.averaging_worker import Done, Round, WorkerReady, filled
from colab_swarm.bench.report import BenchReport
from colab_swarm.net.peers import Contact

M = TypeVar("M", bound=msgspec.Struct)


@dataclass(frozen=True)
class AveragingPlan:
    """How much to run: values per vector, rounds against gloo, rounds with a kill."""

    numel: int
    peers: int
    rounds: int
    crowd: int
    kills: int


FULL = AveragingPlan(numel=18_000_000, peers=4, rounds=50, crowd=8, kills=10)
QUICK = AveragingPlan(numel=2_000_000, peers=4, rounds=6, crowd=4, kills=2)


class AveragingWorker:
    """A process of `averaging_worker`; ends with the `with` block."""

    def __init__(self, *arguments: object) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "colab_swarm.bench.averaging_worker", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self.seed = int(str(arguments[1]))
        self.contact: Contact | None = None

    def say(self, message: msgspec.Struct) -> None:
        """One line to the worker."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(message) + b"\n")
        self.process.stdin.flush()

    def hear(self, kind: type[M]) -> M:
        """The worker's next line.

        Raises:
            RuntimeError: the worker ended.
        """
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return msgspec.json.decode(line, type=kind)
        raise RuntimeError(f"a worker of the averaging benchmark ended: exit code {self.process.wait()}")

    def wait_ready(self) -> AveragingWorker:
        """Wait until it is up."""
        self.contact = self.hear(WorkerReady).contact
        return self

    def __enter__(self) -> AveragingWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def run(quick: bool, python: str | None = None) -> BenchReport:
    """Measure; see `AveragingPlan` for the sizes. ``python`` has hivemind to compare full steps with."""
    plan, report = QUICK if quick else FULL, BenchReport("averaging", quick)
    _against_gloo(plan, report)
    _with_kills(plan, report)
    full_step.run(report, python=python)
    return report


def _against_gloo(plan: AveragingPlan, report: BenchReport) -> None:
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        ours = [stack.enter_context(AveragingWorker("swarm", i, plan.numel)) for i in range(plan.peers)]
        meeting = Path(folder) / "meeting"
        ranks = range(plan.peers)
        gloo = [
            stack.enter_context(AveragingWorker("gloo", i, plan.numel, plan.peers, meeting)) for i in ranks
        ]
        for worker in (*ours, *gloo):
            worker.wait_ready()
        _round(ours, plan.numel), _gloo_round(gloo)  # links are made, memory is touched
        mine: list[list[Done]] = []
        theirs: list[list[Done]] = []
        for _ in range(plan.rounds):
            mine.append(_round(ours, plan.numel))
            theirs.append(_gloo_round(gloo))
    seconds, gloo_s = _median_s(mine), _median_s(theirs)
    successes = [all(not done.kept_local and not done.wrong for done in dones) for dones in mine]
    wire_gb = 2 * (plan.peers - 1) * plan.numel * 4 / 1e9
    what = f"{plan.peers} processes, {plan.numel / 1e6:g} M float32 values, encrypted"
    report.add("averaging.seconds", seconds, "s", what)
    report.add("averaging.gloo_seconds", gloo_s, "s", "torch.distributed all_reduce, in turns, not encrypted")
    report.add("averaging.vs_gloo", seconds / gloo_s, "times", "lower is better")
    cpu_s = statistics.median(sum(done.cpu_s for done in dones) for dones in mine)
    report.add("averaging.cpu_s_per_gb", cpu_s / wire_gb, "CPU-s/GB", "of payload, all processes together")
    report.add("averaging.memory_limit_s", _memory_limit_s(plan), "s", "summing and copying, no network")
    report.add("averaging.success", sum(successes) / len(successes), "", f"of {len(successes)} rounds")


def _with_kills(plan: AveragingPlan, report: BenchReport) -> None:
    rng = random.Random(0)
    with ExitStack() as stack:
        crowd = [stack.enter_context(AveragingWorker("swarm", i, plan.numel)) for i in range(plan.crowd)]
        for worker in crowd:
            worker.wait_ready()
        calm = [_round(crowd, plan.numel) for _ in range(4)]
        calm_s = _median_s(calm[1:])
        killed: list[list[Done]] = []
        for number in range(plan.kills):
            victim = rng.choice(crowd)
            killed.append(_round(crowd, plan.numel, victim=victim, after_s=calm_s * rng.random()))
            crowd.remove(victim)
            fresh = stack.enter_context(AveragingWorker("swarm", plan.crowd + number, plan.numel))
            crowd.append(fresh.wait_ready())
    extra_s = [max(done.seconds for done in dones) - calm_s for dones in killed]
    exact = [all(not done.kept_local and not done.wrong for done in dones) for dones in killed]
    what = f"1 of {plan.crowd} killed in each of {plan.kills} rounds, over {calm_s:.2f} s undisturbed"
    report.add("averaging.kill_extra_s", max(extra_s), "s", f"slowest survivor; {what}")
    report.add(
        "averaging.kill_success", sum(exact) / len(exact), "", "rounds complete and right at all survivors"
    )


def _round(
    workers: Sequence[AveragingWorker],
    numel: int,
    *,
    victim: AveragingWorker | None = None,
    after_s: float = 0.0,
) -> list[Done]:
    """One round of all workers at once; the victim is killed ``after_s`` after the start and left out."""
    ordered = sorted(workers, key=lambda worker: _contact(worker).id)
    members = tuple(
        GroupMember(_contact(w).id, _contact(w).addresses, 1.0 + w.seed % 3, 1.0) for w in ordered
    )
    group = Group(os.urandom(16), 0, b"bench", members, numel)
    task = Round(group, tuple(w.seed for w in ordered), (victim.seed,) if victim else ())
    _all_do(workers, task)
    _tell(workers, task)
    if victim is not None:
        time.sleep(after_s)
        victim.process.kill()
    return _finish([worker for worker in workers if worker is not victim], task)


def _gloo_round(workers: Sequence[AveragingWorker]) -> list[Done]:
    task = Round()
    _all_do(workers, task)
    _tell(workers, task)
    return _finish(workers, task)


def _all_do(workers: Sequence[AveragingWorker], task: Round) -> None:
    """The next stage of a round begins when all are ready for it."""
    _tell(workers, task)
    for worker in workers:
        worker.hear(WorkerReady)


def _finish(workers: Sequence[AveragingWorker], task: Round) -> list[Done]:
    for worker in workers:
        worker.hear(WorkerReady)
    _tell(workers, task)
    return [worker.hear(Done) for worker in workers]


def _tell(workers: Sequence[AveragingWorker], task: Round) -> None:
    for worker in workers:
        worker.say(task)


def _contact(worker: AveragingWorker) -> Contact:
    assert worker.contact is not None
    return worker.contact


def _median_s(rounds: Sequence[Sequence[Done]]) -> float:
    """Median over rounds of the slowest member."""
    return statistics.median(max(done.seconds for done in dones) for dones in rounds)


def _memory_limit_s(plan: AveragingPlan) -> float:
    """What the sums and copies of a round cost all cores together, in pieces that fit the cache."""
    vectors = [filled(seed, plan.numel) for seed in range(plan.peers)]
    piece, began = 1 << 14, time.perf_counter()
    for start in range(0, plan.numel, piece):
        total = sum(vector[start : start + piece] for vector in vectors)
        for vector in vectors:
            np.copyto(vector[start : start + piece], total)
    return (time.perf_counter() - began) / min(plan.peers, os.cpu_count() or 1)
