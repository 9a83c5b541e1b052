"""Figure 4 (top) of Learning@home: the throughput that remains when every block's answer is delayed.

A model is a chain of blocks, each an expert behind an encrypted link on loopback. After each block its answer waits
for an exponentially distributed time, in real time. *Ours* has many batches in flight. *Model-parallel* is one batch
that goes from block to block with the same delays and no network. The *bound* is the same computations with neither.
Forward only, as published. Without a GPU blocks are small; with one they are the published ones.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import nn

from colab_swarm.bench.experts import calls_of
from colab_swarm.bench.harness import BenchReport, torch_threads
from colab_swarm.bench.link import start_node
from colab_swarm.events import EventLog
from colab_swarm.moe.expert import Expert, ExpertRule, FeedForward, TransformerBlock
from colab_swarm.moe.grid import ExpertInfo
from colab_swarm.moe.server import BatchLimits, ExpertServer
from colab_swarm.net.node import Node

BASELINE_S = 4.0


@dataclass(frozen=True)
class BlockKind:
    """Blocks of one kind: how to make one, the shape of a sample, samples in a batch, samples merged at most."""

    name: str
    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    batch: int
    merged: int


@dataclass(frozen=True)
class ThroughputPlan:
    """The sizes: blocks in the chain, batches in flight, mean delays, seconds of each measurement."""

    kinds: tuple[BlockKind, ...]
    blocks: int
    in_flight: int
    delays_s: tuple[float, ...] = (0.0, 0.05, 0.1, 0.15, 0.2)
    seconds: float = 8.0


CPU = ThroughputPlan(
    (
        BlockKind("ffn", lambda: FeedForward(256, 1024), (256,), batch=80, merged=320),
        BlockKind("transformer", lambda: TransformerBlock(64, 4), (48, 64), batch=6, merged=24),
    ),
    blocks=8,
    in_flight=240,
)
GPU = ThroughputPlan(
    (
        BlockKind("ffn", lambda: FeedForward(1024, 4096), (1024,), batch=2048, merged=2048),
        BlockKind("transformer", lambda: TransformerBlock(1024, 16), (512, 1024), batch=4, merged=4),
    ),
    blocks=224,
    in_flight=64,
)


def run(quick: bool = False) -> BenchReport:
    """Measure both kinds of blocks under all delays."""
    report, plan = BenchReport("moe-throughput", quick, "moe"), GPU if torch.cuda.is_available() else CPU
    if quick:
        plan = replace(plan, blocks=min(plan.blocks, 8), delays_s=(0.0, 0.2), seconds=2.0)
    with torch_threads(max(1, (os.cpu_count() or 2) - 1)):  # one core is the network's
        for kind in plan.kinds:
            asyncio.run(_measure(report, plan, kind))
    values = report.figures
    for key, text in (("retained", ">= 0.9 wanted"), ("vs_model_parallel", ">= 40 wanted; published 41.6")):
        worst = min(values[f"{kind.name}_{key}_at_200ms"] for kind in plan.kinds)
        report.add(f"{key}_at_200ms", worst, "times", f"{text}; the worse of both kinds")
    return report


async def _measure(report: BenchReport, plan: ThroughputPlan, kind: BlockKind) -> None:
    host, guest = [await start_node() for _ in range(2)]
    chain, rates = _Chain(plan, kind, host, guest), {}
    rates["bound"] = await chain.server.device.run(chain.bound)
    for delay_s in plan.delays_s:
        ms = f"{round(1000 * delay_s)}ms"
        rates[ms] = await chain.ours(delay_s)
        rates[f"model_parallel_{ms}"] = await chain.model_parallel(delay_s)
    for closing in (chain.server, host, guest):
        await closing.close()
    note = f"{plan.blocks} blocks, {plan.in_flight} batches of {kind.batch} in flight"
    found = {f"{kind.name}_{name}_samples_per_s": rate for name, rate in rates.items()}
    report.add_all(found, "samples/s", note)
    for key, against in (
        ("retained", "0ms"),
        ("vs_model_parallel", "model_parallel_200ms"),
        ("of_bound", "bound"),
    ):
        report.add(f"{kind.name}_{key}_at_200ms", rates["200ms"] / rates[against], "times")


class _Chain:
    """The blocks of one model behind a link, and ways to send batches through."""

    def __init__(self, plan: ThroughputPlan, kind: BlockKind, host: Node, guest: Node) -> None:
        self._plan, self._kind = plan, kind
        rule = ExpertRule(partial(torch.optim.SGD, lr=0.0))  # forward only: it never steps
        names = [f"{kind.name}.{index}" for index in range(plan.blocks)]
        self._experts = [Expert(name, kind.make(), rule, kind.sample) for name in names]
        limits = BatchLimits(kind.merged, max_batch_bytes=512 << 20, max_held_bytes=4 << 30)
        self.server = ExpertServer(host, EventLog(), limits)
        for expert in self._experts:
            self.server.add(expert)
        self._infos = [ExpertInfo(name, host.contact, kind.sample, 0, 0.0) for name in names]
        self._calls = calls_of(guest, timeout_s=600.0)
        self._inputs = np.random.default_rng(0).standard_normal((kind.batch, *kind.sample), np.float32)

    def _samples_per_s(self, block_calls: int, seconds: float) -> float:
        return block_calls * self._kind.batch / len(self._experts) / seconds

    async def ours(self, delay_s: float) -> float:
        done = 0

        async def travel(rng: random.Random) -> None:
            nonlocal done
            for info in itertools.islice(itertools.cycle(self._infos), rng.randrange(len(self._infos)), None):
                # never the last output: over many rounds it would grow without end
                await self._calls.forward(info, self._inputs)
                done += 1
                await asyncio.sleep(_exponential(delay_s, rng))

        async with asyncio.TaskGroup() as group:
            rngs = map(random.Random, range(self._plan.in_flight))
            travels = [group.create_task(travel(rng)) for rng in rngs]
            await asyncio.sleep(max(1.0, 5 * delay_s))  # until batches are spread over the chain
            before, began = done, time.perf_counter()
            await asyncio.sleep(self._plan.seconds)
            rate = self._samples_per_s(done - before, time.perf_counter() - began)
            for task in travels:
                task.cancel()
        return rate

    async def model_parallel(self, delay_s: float) -> float:
        """Return samples per second of one batch after the other, block by block."""
        rng, inputs = random.Random(0), torch.from_numpy(self._inputs)
        done, began, luck_s = 0, time.perf_counter(), 0.0
        while time.perf_counter() - began < min(BASELINE_S, self._plan.seconds):
            await self.server.device.run(partial(self._experts[done % len(self._experts)].forward, inputs))
            done += 1
            wait_s = _exponential(delay_s, rng)
            luck_s += delay_s - wait_s  # of a few dozen draws: they count by their mean
            await asyncio.sleep(wait_s)
        return self._samples_per_s(done, time.perf_counter() - began + luck_s)

    def bound(self) -> float:
        inputs, done, began = torch.from_numpy(self._inputs), 0, time.perf_counter()
        while time.perf_counter() - began < min(BASELINE_S, self._plan.seconds):
            self._experts[done % len(self._experts)].forward(inputs)
            done += 1
        return self._samples_per_s(done, time.perf_counter() - began)


def _exponential(mean_s: float, rng: random.Random) -> float:
    return rng.expovariate(1 / mean_s) if mean_s else 0.0
