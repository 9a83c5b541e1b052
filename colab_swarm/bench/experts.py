"""Experts under load: one host and many callers, each a process, over encrypted links on loopback.

The limit is what the same expert computes on the same thread of the same process without callers.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from colab_swarm.bench.report import BenchReport
from colab_swarm.bench.workers import Parent, Worker
from colab_swarm.dht.service import DHT, DHTSettings
from colab_swarm.events import EventLog
from colab_swarm.moe.calls import ExpertCalls
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.grid import ExpertInfo, ExpertServices
from colab_swarm.moe.server import BatchLimits
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node, NodeSettings
from colab_swarm.net.peers import Contact, PeerId
from colab_swarm.runtime import Runtime

if TYPE_CHECKING:
    from colab_swarm.moe.expert import Expert
    from colab_swarm.moe.server import ExpertServer

HIVEMIND_SAMPLES_PER_S = 2692.0
"""hivemind 1.1.12 on two cores: 4 experts ffn 256, 4 callers, batch 128, forward and backward."""
HIVEMIND_NOP_CALLS_PER_S = 86.0
NOP_BATCH, NOP_DIM = 32, 1024  # 128 KiB


class CallRates(NamedTuple):
    """Of all callers together: samples and calls per second; seconds of the median call and of the slowest 1 %."""

    samples_per_s: float
    calls_per_s: float
    p50_s: float
    p99_s: float


def run(quick: bool = False) -> BenchReport:
    """Measure large calls, calls without computation, small calls merged or not, and hivemind's own setting."""
    report = BenchReport("experts", quick)
    dim, batch, callers, seconds, rounds = (256, 256, 4, 1.0, 2) if quick else (1024, 2048, 8, 15.0, 3)
    with ExitStack() as stack:
        host = stack.enter_context(Worker(serve_experts))
        where = host.receive()
        workers = [
            stack.enter_context(Worker(call_experts, where["id"], where["address"])) for _ in range(callers)
        ]

        host.call(serve={"uids": ["ffn.0"], "dim": dim})
        alone = host.call(alone={"batch": batch, "rounds": rounds})["samples_per_s"]
        rates = _load(workers, uids=["ffn.0"], batch=batch, dim=dim, seconds=seconds)
        what = f"{callers} callers, forward, batch {batch}, feed-forward {dim}"
        report.add("experts.forward_samples_per_s", rates.samples_per_s, "samples/s", what)
        report.add("experts.local_samples_per_s", alone, "samples/s", "the same expert without callers")
        report.add("experts.vs_local", rates.samples_per_s / alone, "", "of local; >= 0.6 wanted")
        _add_latencies(report, "forward", rates)

        host.call(serve={"uids": ["nop.0"], "dim": NOP_DIM, "nop": True})
        rates = _load(workers, uids=["nop.0"], batch=NOP_BATCH, dim=NOP_DIM, seconds=seconds, in_flight=2)
        what = f"128 KiB each way; hivemind {HIVEMIND_NOP_CALLS_PER_S:g}; >= 600 wanted"
        report.add("experts.nop_calls_per_s", rates.calls_per_s, "calls/s", what)
        _add_latencies(report, "nop", rates)

        small = partial(_load, workers, uids=["ffn.0"], batch=1, dim=dim, seconds=seconds, in_flight=16)
        host.call(serve={"uids": ["ffn.0"], "dim": dim})
        merged = small()
        host.call(serve={"uids": ["ffn.0"], "dim": dim, "max_batch_size": 1})
        single = small()
        what = f"{callers} callers, 16 calls of one sample in flight each"
        report.add("experts.merged_calls_per_s", merged.calls_per_s, "calls/s", what)
        report.add("experts.single_calls_per_s", single.calls_per_s, "calls/s", "the same, none merged")
        report.add("experts.batching_gain", merged.calls_per_s / single.calls_per_s, "times", ">= 4 wanted")
        _add_latencies(report, "merged", merged)

        uids = [f"ffn.{index}" for index in range(4)]
        host.call(serve={"uids": uids, "dim": 256})
        alone = host.call(alone={"batch": 128, "rounds": rounds, "backward": True})["samples_per_s"]
        rates = _load(workers[:4], uids=uids, batch=128, dim=256, seconds=seconds, backward=True)
    what = "4 experts 256, 4 callers, batch 128, forward and backward"
    report.add("experts.samples_per_s", rates.samples_per_s, "samples/s", what)
    report.add("experts.learning_vs_local", rates.samples_per_s / alone, "", "of local; >= 0.8 wanted, or")
    what = f"its {HIVEMIND_SAMPLES_PER_S:g} samples/s; >= 3 wanted"
    report.add("experts.vs_hivemind", rates.samples_per_s / HIVEMIND_SAMPLES_PER_S, "times", what)
    _add_latencies(report, "learning", rates)
    return report


def _add_latencies(report: BenchReport, what: str, rates: CallRates) -> None:
    report.add(f"experts.{what}_p50_ms", 1000 * rates.p50_s, "ms", "of a call")
    report.add(f"experts.{what}_p99_ms", 1000 * rates.p99_s, "ms")


def _load(workers: list[Worker], *, seconds: float, **load: Any) -> CallRates:
    """Load the host; see `call_experts`. A short load comes first to open links and warm up memory."""
    for length_s in (min(1.0, seconds), seconds):
        for worker in workers:
            worker.send(**load, seconds=length_s)
        found = [worker.receive() for worker in workers]
    took_s = sorted(seconds for one in found for seconds in one["took_s"])
    calls_per_s = sum(len(one["took_s"]) / one["seconds"] for one in found)
    p99_s = took_s[min(len(took_s) - 1, int(0.99 * len(took_s)))]
    return CallRates(load["batch"] * calls_per_s, calls_per_s, statistics.median(took_s), p99_s)


def calls_of(node: Node, *, timeout_s: float) -> ExpertCalls:
    """Return calls of experts whose hosts are known: the directory is never used."""
    services = ExpertServices(
        node, DHT(node, DHTSettings(), random.Random(0)), EventLog(), random.Random(0), ""
    )
    return ExpertCalls(node, Directory(services), Runtime(), timeout_s=timeout_s)


async def call_experts(parent: Parent, host: str, address: str) -> None:
    """Worker: for each message, call experts without a pause and report the seconds of each call."""
    contact = Contact(PeerId(bytes.fromhex(host)), (address,))
    calls = calls_of(await Node.start(Identity(), NodeSettings(listen=False)), timeout_s=120.0)
    while True:
        load = await parent.wait()
        began = time.perf_counter()
        took_s = await _carry(calls, contact, **load)
        parent.send(seconds=time.perf_counter() - began, took_s=took_s)


async def _carry(
    calls: ExpertCalls,
    host: Contact,
    *,
    uids: list[str],
    batch: int,
    dim: int,
    seconds: float,
    in_flight: int = 1,
    backward: bool = False,
) -> list[float]:
    """Keep ``in_flight`` calls of ``batch`` samples going, each of the next of ``uids``; return their seconds."""
    inputs = np.random.default_rng(0).standard_normal((batch, dim), np.float32)
    until = time.perf_counter() + seconds
    took_s: list[float] = []

    async def call_on(turn: int) -> None:
        while (began := time.perf_counter()) < until:
            info = ExpertInfo(uids[turn % len(uids)], host, (dim,), 0, 0.0)
            outputs = await calls.forward(info, inputs)
            if backward:
                await calls.backward(info, inputs, outputs)
            took_s.append(time.perf_counter() - began)
            turn += 1

    await asyncio.gather(*(call_on(lane) for lane in range(in_flight)))
    return took_s


async def serve_experts(parent: Parent) -> None:
    """Worker: ``serve`` replaces the hosted experts, ``alone`` measures them without callers."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)  # as a peer does
    node = await Node.start(Identity(), NodeSettings(host="127.0.0.1"))
    host = _Host(node)
    parent.send(id=node.id.hex(), address=node.contact.addresses[0])
    while True:
        order = await parent.wait()
        if "serve" in order:
            await host.serve(**order["serve"])
            parent.send()
        else:
            assert host.server
            alone = partial(host.samples_per_s_alone, **order["alone"])
            parent.send(samples_per_s=await host.server.device.run(alone))


class _Host:
    """A node and the experts that it serves now."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._experts: list[Expert] = []
        self.server: ExpertServer | None = None

    async def serve(self, uids: list[str], dim: int, nop: bool = False, max_batch_size: int = 4096) -> None:
        """Serve these experts instead."""
        import torch

        from colab_swarm.moe.expert import Expert, ExpertRule, FeedForward
        from colab_swarm.moe.server import ExpertServer

        if self.server:
            await self.server.close()
        limits = BatchLimits(max_batch_size=max_batch_size)
        self.server = ExpertServer(self._node, EventLog(), limits)
        rule = ExpertRule(partial(torch.optim.Adam, lr=1e-3))
        self._experts = [
            Expert(uid, torch.nn.Identity() if nop else FeedForward(dim), rule, (dim,)) for uid in uids
        ]
        for expert in self._experts:
            self.server.add(expert)

    def samples_per_s_alone(self, batch: int, rounds: int, backward: bool = False) -> float:
        """Return the speed of the experts on random batches, without a network."""
        import torch

        rates = []
        for _ in range(rounds + 1):
            inputs = torch.randn(batch, *self._experts[0].shape)
            began = time.perf_counter()
            for expert in self._experts:
                outputs = expert.forward(inputs)
                if backward:
                    expert.backward(inputs, outputs)
            rates.append(batch * len(self._experts) / (time.perf_counter() - began))
        return max(rates[1:])  # the first warms up
