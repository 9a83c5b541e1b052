"""What it costs to be a peer: training speed, memory and time to join, compared with the same loop without a swarm."""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from colab_swarm.bench.report import BenchReport
from colab_swarm.bench.workers import Parent, Worker

AVERAGE_EVERY = 4
"""Micro-batches of one peer per global step."""


def run(quick: bool) -> BenchReport:
    """Measure speed and joining with one backbone, an idle peer with another."""
    from colab_swarm.swarm.joining import create

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = BenchReport("overhead", quick)
    for measure in (_throughput, _late_joiner, _idle_peer):
        with create("overhead", peer_name="backbone") as backbone:
            measure(report, str(backbone.invite()))
    return report


# --- training speed -------------------------------------------------------------------------------------------------


def train(parent: Parent, size: str, batches: int, invite: str) -> None:
    """Worker: train for each message; answer with samples per second, without global steps. No invite: a bare loop."""
    import torch

    from colab_swarm.recipes.masked_lm import albert
    from colab_swarm.swarm.joining import join
    from colab_swarm.training.layerwise import Lamb

    torch.set_num_threads(1)
    model, stream = albert(size, batch_size=2, sequence_length=128)
    optimizer: Any = Lamb(model.parameters(), lr=1e-3)
    if invite:
        optimizer = join(invite).optimizer(optimizer, target_batch_size=2 * 2 * AVERAGE_EVERY)
    batch = next(iter(stream))
    parent.send()
    while True:
        parent.receive()
        began, stepping_s = time.perf_counter(), 0.0
        for number in range(batches):
            model(**batch).loss.backward()
            before = time.perf_counter()
            if invite:
                stepped = optimizer.step(samples=2) is not None
            elif stepped := number % AVERAGE_EVERY == AVERAGE_EVERY - 1:
                optimizer.step()
                optimizer.zero_grad()
            stepping_s += time.perf_counter() - before if stepped else 0.0
        parent.send(samples_per_s=2 * batches / (time.perf_counter() - began - stepping_s))


def _throughput(report: BenchReport, invite: str) -> None:
    size, batches, phases = ("tiny", 40, 2) if report.quick else ("base", 8, 5)
    ratios = []
    with ExitStack() as stack:
        invites = ("", "", invite, invite)
        workers = [stack.enter_context(Worker(train, size, batches, one)) for one in invites]
        for worker in workers:
            worker.receive()
        for _ in range(phases + 1):
            speeds = []
            for pair in (workers[:2], workers[2:]):
                for worker in pair:
                    worker.send()
                speeds.append(statistics.mean(worker.receive()["samples_per_s"] for worker in pair))
            ratios.append(speeds[1] / speeds[0])
    what = f"ALBERT-{size}, 2 peers, against 2 bare loops, averaging left out of both"
    report.add("overhead.throughput_ratio", statistics.median(ratios[1:]), "", what)  # the first warms up


# --- an idle peer ---------------------------------------------------------------------------------------------------


def memory_mib() -> float:
    """Return the proportional memory of this process, or its peak where the system does not count that."""
    rollup = Path("/proc/self/smaps_rollup")
    if rollup.exists():
        pss = next(line for line in rollup.read_text().splitlines() if line.startswith("Pss:"))
        return int(pss.split()[1]) / 1024
    if sys.platform == "win32":
        return float("nan")
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024**2 if sys.platform == "darwin" else 1024)


def _children() -> int:
    listings = Path("/proc/self/task").glob("*/children")
    return sum(len(listing.read_text().split()) for listing in listings)


def idle(parent: Parent, invite: str) -> None:
    """Worker: join, wait, and report what that added to this process."""
    import torch

    torch.ones(256, 256) @ torch.ones(256, 256)
    memory, children, began = memory_mib(), _children(), time.perf_counter()
    import colab_swarm as cs

    swarm = cs.join(invite)
    took_s = time.perf_counter() - began
    time.sleep(3.0)
    peers = len(swarm.snapshot().peers)
    parent.send(memory=memory_mib() - memory, children=_children() - children, took_s=took_s, peers=peers)
    parent.receive()


def _idle_peer(report: BenchReport, invite: str) -> None:
    with Worker(idle, invite) as worker:
        found = worker.receive()
    what = f"an idle peer of {found['peers']}, torch loaded before"
    report.add("overhead.memory_mib", found["memory"], "MiB", what)
    report.add("overhead.processes", found["children"], "", "child processes of an idle peer")
    report.add("overhead.join_s", found["took_s"], "s", "import colab_swarm and join")


# --- joining late ---------------------------------------------------------------------------------------------------


def join_late(parent: Parent, numel: int, invite: str) -> None:
    """Worker: at a message, join and train ``numel`` parameters on made-up gradients; report how long it took."""
    import torch

    from colab_swarm.swarm.joining import join

    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.zeros(numel // 8)) for _ in range(8)]
    gradient = torch.full((numel // 8,), 1e-3)
    parent.send()
    parent.receive()
    began, counted = time.perf_counter(), False
    inner = torch.optim.Adam(parameters, lr=1e-4)
    optimizer = join(invite).optimizer(inner, target_batch_size=16)
    joined_at = optimizer.global_step
    answers = threading.Thread(target=_answer_with_step, args=(parent, optimizer), daemon=True)
    while True:
        for parameter in parameters:
            parameter.grad = gradient.clone()
        time.sleep(0.1)  # the forward and backward pass of a GPU
        optimizer.step(samples=1)
        if not counted:
            counted = True
            parent.send(seconds=time.perf_counter() - began, step=joined_at)
            answers.start()


def _answer_with_step(parent: Parent, optimizer: Any) -> None:
    while True:
        parent.receive()
        parent.send(step=optimizer.global_step)


def _late_joiner(report: BenchReport, invite: str) -> None:
    numel = 2_000_000 if report.quick else 18_000_000
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(join_late, numel, invite)) for _ in range(3)]
        for worker in workers:
            worker.receive()
        alice, bob, carol = workers
        alice.call()
        bob.call()
        first, began = alice.call()["step"], time.perf_counter()
        time.sleep(5.0)
        calm = (alice.call()["step"] - first) / (time.perf_counter() - began)
        first, began = alice.call()["step"], time.perf_counter()
        joined = carol.call()
        during = (alice.call()["step"] - first) / (time.perf_counter() - began)
    what = f"from join to the first counted sample, {numel / 1e6:g} M parameters and Adam"
    report.add("join.first_sample_s", joined["seconds"], "s", f"{what}, at step {joined['step']}")
    report.add("join.others_step_rate", during / calm, "", "of the others meanwhile, against before")
