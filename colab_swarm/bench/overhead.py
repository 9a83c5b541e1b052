"""What being a peer costs: training speed, memory, time to join. Against the same loop without a swarm."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from colab_swarm.bench.report import BenchReport


@dataclass(frozen=True)
class OverheadPlan:
    """Sizes: the ALBERT and its micro-batch, micro-batches per phase, phases, parameters of the joiner's model."""

    size: str
    tokens: int
    batches: int
    phases: int
    joiner_numel: int


FULL = OverheadPlan(size="base", tokens=128, batches=8, phases=5, joiner_numel=18_000_000)
QUICK = OverheadPlan(size="tiny", tokens=128, batches=40, phases=2, joiner_numel=2_000_000)
AVERAGE_EVERY = 4  # micro-batches of one peer per global step


@contextmanager
def worker(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """A fresh process that runs ``target(pipe, *arguments)``; it is killed at the end."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=target, args=(far, *arguments), daemon=True)
    process.start()
    far.close()
    try:
        yield near
    finally:
        process.kill()
        process.join()
        near.close()


def _say(pipe: Connection, *words: object) -> Any:
    pipe.send(words)
    return pipe.recv()


# --- training speed -------------------------------------------------------------------------------------------------


def _train(pipe: Connection, plan: OverheadPlan, invite: str | None) -> None:
    """Train whenever told to; answer with samples per second, global steps left out. No invite: the bare loop."""
    import torch

    from colab_swarm.recipes.masked_lm import albert
    from colab_swarm.swarm.joining import join
    from colab_swarm.training.layerwise import Lamb

    torch.set_num_threads(1)
    model, batches = albert(plan.size, batch_size=2, sequence_length=plan.tokens)
    optimizer: Any = Lamb(model.parameters(), lr=1e-3)
    if invite is not None:
        optimizer = join(invite).optimizer(optimizer, target_batch_size=2 * 2 * AVERAGE_EVERY)
    batch = next(iter(batches))
    pipe.send("ready")
    while pipe.recv():
        began, stepping_s = time.perf_counter(), 0.0
        for number in range(plan.batches):
            model(**batch).loss.backward()
            before = time.perf_counter()
            if invite is not None:
                stepped = optimizer.step(samples=2) is not None
            elif stepped := number % AVERAGE_EVERY == AVERAGE_EVERY - 1:
                optimizer.step()
                optimizer.zero_grad()
            stepping_s += time.perf_counter() - before if stepped else 0.0
        pipe.send(2 * plan.batches / (time.perf_counter() - began - stepping_s))


def _throughput(plan: OverheadPlan, report: BenchReport, invite: str) -> None:
    def phase(pair: list[Connection]) -> float:
        for pipe in pair:
            pipe.send(True)
        return float(statistics.mean(pipe.recv() for pipe in pair))

    with (
        worker(_train, plan, None) as carol,
        worker(_train, plan, None) as dave,
        worker(_train, plan, invite) as alice,
        worker(_train, plan, invite) as bob,
    ):
        pairs = ([carol, dave], [alice, bob])
        for pipe in (carol, dave, alice, bob):
            pipe.recv()
        ratios = []
        for number in range(plan.phases + 1):
            bare, swarm = phase(pairs[0]), phase(pairs[1])
            if number:  # the first warms up
                ratios.append(swarm / bare)
    what = f"ALBERT-{plan.size}, 2 peers, against 2 bare loops, averaging left out of both"
    report.add("overhead.throughput_ratio", statistics.median(ratios), "", what)


# --- an idle peer ---------------------------------------------------------------------------------------------------


def memory_mib() -> float:
    """Proportional memory of this process where the system tells, else its peak."""
    rollup = Path("/proc/self/smaps_rollup")
    if rollup.exists():
        pss = next(line for line in rollup.read_text().splitlines() if line.startswith("Pss:"))
        return int(pss.split()[1]) / 1024
    if sys.platform == "win32":
        return float("nan")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1024 if sys.platform != "darwin" else 1024**2
    )


def _children() -> int:
    listings = Path("/proc/self/task").glob("*/children")
    return sum(len(listing.read_text().split()) for listing in listings)


def _idle(pipe: Connection, invite: str) -> None:
    import torch

    torch.ones(256, 256) @ torch.ones(256, 256)
    memory, children, began = memory_mib(), _children(), time.perf_counter()
    import colab_swarm as cs

    swarm = cs.join(invite)
    took_s = time.perf_counter() - began
    time.sleep(3.0)  # as a peer that stands by does
    pipe.send((memory_mib() - memory, _children() - children, took_s, len(swarm.snapshot().peers)))
    pipe.recv()


def _idle_peer(report: BenchReport, invite: str) -> None:
    with worker(_idle, invite) as pipe:
        memory_mib, processes, took_s, peers = pipe.recv()
    report.add("overhead.memory_mib", memory_mib, "MiB", f"an idle peer of {peers}, torch loaded before")
    report.add("overhead.processes", processes, "", "child processes of an idle peer")
    report.add("overhead.join_s", took_s, "s", "import colab_swarm and join")


# --- joining late ---------------------------------------------------------------------------------------------------


def _volunteer(pipe: Connection, numel: int, invite: str) -> None:
    """Train a model of ``numel`` parameters with Adam and made-up gradients; told to join, tell how long it took."""
    import torch

    from colab_swarm.swarm.joining import join

    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.zeros(numel // 8)) for _ in range(8)]
    gradient = torch.full((numel // 8,), 1e-3)
    pipe.send("ready")
    pipe.recv()
    began = time.perf_counter()
    inner = torch.optim.Adam(parameters, lr=1e-4)
    optimizer = join(invite).optimizer(inner, target_batch_size=16)
    joined_at, counted = optimizer.global_step, 0.0
    while True:
        for parameter in parameters:
            parameter.grad = gradient.clone()
        time.sleep(0.1)  # the forward and backward pass of a GPU
        optimizer.step(samples=1)
        if not counted:
            counted = time.perf_counter() - began
            pipe.send((counted, joined_at))
        if pipe.poll():
            pipe.send((pipe.recv(), optimizer.global_step))


def _late_joiner(plan: OverheadPlan, report: BenchReport, invite: str) -> None:
    with (
        worker(_volunteer, plan.joiner_numel, invite) as alice,
        worker(_volunteer, plan.joiner_numel, invite) as bob,
        worker(_volunteer, plan.joiner_numel, invite) as carol,
    ):
        for pipe in (alice, bob, carol):
            pipe.recv()
        for pipe in (alice, bob):
            pipe.send("join")
            pipe.recv()
        calm = _steps_per_s(alice, 5.0)
        before, began = _say(alice, "step")[1], time.perf_counter()
        seconds, step = _say(carol, "join")
        during = (_say(alice, "step")[1] - before) / (time.perf_counter() - began)
    what = f"from join to the first counted sample, {plan.joiner_numel / 1e6:g} M parameters and Adam"
    report.add("join.first_sample_s", seconds, "s", f"{what}, at step {step}")
    report.add("join.others_step_rate", during / calm, "", "of the others meanwhile, against before")


def _steps_per_s(pipe: Connection, seconds: float) -> float:
    first, began = _say(pipe, "step")[1], time.perf_counter()
    time.sleep(seconds)
    return float((_say(pipe, "step")[1] - first) / (time.perf_counter() - began))


def run(quick: bool) -> BenchReport:
    """Measure; see `OverheadPlan` for the sizes."""
    from colab_swarm.swarm.joining import create

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    plan, report = QUICK if quick else FULL, BenchReport("overhead", quick)
    for measure in (_throughput, _late_joiner):
        with create("overhead", peer_name="backbone") as backbone:
            measure(plan, report, backbone.invite())
    with create("overhead", peer_name="backbone") as backbone:
        _idle_peer(report, backbone.invite())
    return report
