"""Figure 4 (top) of Learning@home: the throughput that remains when every block's answer is delayed.

A model is a chain of blocks, each an expert behind an encrypted link on loopback. After each block
its answer waits for an exponentially distributed time, in real time. *Ours* has many batches in
flight. *Model-parallel* is one batch that goes from block to block with the same delays and no
network. The *bound* is the same computations with neither. Forward only, as published. Without a
GPU blocks are small; with one they are the published ones.

*experts*: one host and many callers, each a process, over encrypted links on loopback. The limit is what the same
expert computes on the same thread of the same process without callers.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from colab_swarm.bench.harness import BenchReport, Crew, Parent, Worker, call_all, torch_threads
from colab_swarm.bench.link import contact, start_node, where
from colab_swarm.dht.service import DHT, DHTSettings, RunServices
from colab_swarm.events import EventLog
from colab_swarm.moe.calls import ExpertCalls
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import BatchLimits, Expert, ExpertRule, FeedForward, TransformerBlock
from colab_swarm.moe.grid import ExpertInfo
from colab_swarm.moe.server import ExpertServer
from colab_swarm.net.node import Node
from colab_swarm.runtime import Runtime

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
    found = {f"{kind.name}_{name}_samples_per_s": rate for name, rate in rates.items()}
    report.add_all(found, "samples/s", f"{plan.in_flight} batches in flight")
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


# --- experts under load -----------------------------------------------------------------------------------------------

HIVEMIND_SAMPLES_PER_S = 2692.0  # version 1.1.12 on two cores, in the same setting
NOP_BATCH, NOP_DIM = 32, 1024  # 128 KiB


def run_experts(quick: bool = False) -> BenchReport:
    """Measure large calls, calls without computation, small calls merged or not, and hivemind's own setting."""
    report = BenchReport("experts", quick)
    dim, batch, callers, seconds, rounds = (256, 256, 4, 1.0, 2) if quick else (1024, 2048, 8, 15.0, 3)
    with Crew() as crew:
        host = crew.start(serve_experts)
        address = host.receive()
        for _ in range(callers):
            crew.start(call_experts, address)
        for caller in crew[1:]:  # while they import, they would slow down the host
            caller.receive()
        load = partial(_calls_per_s, report, crew[1:], seconds)

        host.call(serve={"uids": ["ffn.0"], "dim": dim})
        alone = host.call(alone={"batch": batch, "rounds": rounds})["samples_per_s"]
        rate = batch * load("forward", uids=["ffn.0"], batch=batch, dim=dim)
        report.add_all(
            {"forward_samples_per_s": rate, "local_samples_per_s": alone},
            "samples/s",
            f"{callers} callers, batch {batch}",
        )
        report.add("vs_local", rate / alone, "", "of the same expert without callers; >= 0.6 wanted")

        host.call(serve={"uids": ["nop.0"], "dim": NOP_DIM, "nop": True})
        rate = load("nop", uids=["nop.0"], batch=NOP_BATCH, dim=NOP_DIM, in_flight=2)
        report.add("nop_calls_per_s", rate, "calls/s", "128 KiB each way; hivemind 86; >= 600 wanted")

        small: dict[str, Any] = {"uids": ["ffn.0"], "batch": 1, "dim": dim, "in_flight": 16}
        host.call(serve={"uids": ["ffn.0"], "dim": dim})
        merged = load("merged", **small)
        host.call(serve={"uids": ["ffn.0"], "dim": dim, "max_batch_size": 1})
        single = load(**small)
        report.add_all(
            {"merged_calls_per_s": merged, "single_calls_per_s": single},
            "calls/s",
            "16 calls of one sample in flight each",
        )
        report.add("batching_gain", merged / single, "times", ">= 4 wanted")

        uids = [f"ffn.{index}" for index in range(4)]
        host.call(serve={"uids": uids, "dim": 256})
        alone = host.call(alone={"batch": 128, "rounds": rounds, "backward": True})["samples_per_s"]
        order: dict[str, Any] = {"uids": uids, "batch": 128, "dim": 256, "backward": True}
        rate = 128 * _calls_per_s(report, crew[1:5], seconds, "learning", **order)
    report.add("samples_per_s", rate, "samples/s", "4 experts 256, 4 callers, batch 128, both ways")
    report.add("learning_vs_local", rate / alone, "", "of local; >= 0.8 wanted, or")
    report.add("vs_hivemind", rate / HIVEMIND_SAMPLES_PER_S, "times", ">= 3 wanted")
    return report


def _calls_per_s(
    report: BenchReport, workers: list[Worker], seconds: float, what: str = "", **load: Any
) -> float:
    """Load the host, see `call_experts`; report the times of calls. A short load comes first to open links."""
    call_all(workers, **load, seconds=min(1.0, seconds))
    found = call_all(workers, **load, seconds=seconds)
    if what:
        took_ms = sorted(1000 * took_s for one in found for took_s in one["took_s"])
        p99_ms = took_ms[int(0.99 * len(took_ms))]
        report.add_all({f"{what}_p50_ms": statistics.median(took_ms), f"{what}_p99_ms": p99_ms}, "ms")
    return float(sum(len(one["took_s"]) / one["seconds"] for one in found))


def calls_of(node: Node, *, timeout_s: float) -> ExpertCalls:
    """Return calls of experts whose hosts are known: the directory is never used."""
    dht, rng = DHT(node, DHTSettings(), random.Random(0)), random.Random(0)
    directory = Directory(RunServices(node, dht, EventLog(), rng, ""))
    return ExpertCalls(node, directory, Runtime(), timeout_s=timeout_s)


async def call_experts(parent: Parent, host: dict[str, Any]) -> None:
    """Worker: for each message, call experts without a pause and report the seconds of each call.

    A message has the experts' ``uids``, the ``dim`` of an input, the ``batch`` size, for how many
    ``seconds``, the calls ``in_flight``, and whether to go ``backward``.
    """
    calls = calls_of(await start_node(listen=False), timeout_s=120.0)
    parent.send()
    while True:
        load = await parent.wait()
        inputs = np.random.default_rng(0).standard_normal((load["batch"], load["dim"]), np.float32)
        infos = [ExpertInfo(uid, contact(host), (load["dim"],), 0, 0.0) for uid in load["uids"]]
        began = time.perf_counter()
        call_on = partial(
            _call_on, calls, infos, inputs, began + load["seconds"], load.get("backward", False)
        )
        lanes = await asyncio.gather(*map(call_on, range(load.get("in_flight", 1))))
        parent.send(seconds=time.perf_counter() - began, took_s=[took for lane in lanes for took in lane])


async def _call_on(
    calls: ExpertCalls,
    infos: list[ExpertInfo],
    inputs: np.ndarray[Any, np.dtype[np.float32]],
    until: float,
    backward: bool,
    turn: int,
) -> list[float]:
    took_s = []
    while (began := time.perf_counter()) < until:
        info = infos[turn % len(infos)]
        outputs = await calls.forward(info, inputs)
        if backward:
            await calls.backward(info, inputs, outputs)
        took_s.append(time.perf_counter() - began)
        turn += 1
    return took_s


async def serve_experts(parent: Parent) -> None:
    """Worker: ``serve`` replaces the hosted experts, ``alone`` measures them without callers."""
    torch.set_num_threads(os.cpu_count() or 1)  # as a peer does
    node = await start_node()
    parent.send(**where(node))
    server, experts = ExpertServer(node, EventLog(), BatchLimits()), list[Expert]()
    while True:
        match await parent.wait():
            case {"serve": order}:
                await server.close()
                server, experts = _serve(node, **order)
                parent.send()
            case {"alone": order}:
                rate = await server.device.run(partial(_samples_per_s_alone, experts, **order))
                parent.send(samples_per_s=rate)


def _serve(
    node: Node, uids: list[str], dim: int, nop: bool = False, max_batch_size: int = 4096
) -> tuple[ExpertServer, list[Expert]]:
    server = ExpertServer(node, EventLog(), BatchLimits(max_batch_size=max_batch_size))
    rule = ExpertRule(partial(torch.optim.Adam, lr=1e-3))
    experts = [Expert(uid, torch.nn.Identity() if nop else FeedForward(dim), rule, (dim,)) for uid in uids]
    for expert in experts:
        server.add(expert)
    return server, experts


def _samples_per_s_alone(experts: list[Expert], batch: int, rounds: int, backward: bool = False) -> float:
    rates = []
    for _ in range(rounds + 1):
        inputs = torch.randn(batch, *experts[0].shape)
        began = time.perf_counter()
        for expert in experts:
            outputs = expert.forward(inputs)
            if backward:
                expert.backward(inputs, outputs)
        rates.append(batch * len(experts) / (time.perf_counter() - began))
    return max(rates[1:])  # the first warms up
