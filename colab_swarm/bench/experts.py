"""Experts under load: one host and many callers, each a process, over encrypted links on loopback.

The limit is what the same expert computes on the same thread of the same process without callers.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from functools import partial
from typing import Any

import numpy as np
import torch

from colab_swarm.bench.harness import BenchReport, Crew, Parent, Worker, call_all
from colab_swarm.bench.link import contact, start_node, where
from colab_swarm.dht.service import DHT, DHTSettings
from colab_swarm.events import EventLog
from colab_swarm.moe.calls import ExpertCalls
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import Expert, ExpertRule, FeedForward
from colab_swarm.moe.grid import ExpertInfo, ExpertServices
from colab_swarm.moe.server import BatchLimits, ExpertServer
from colab_swarm.net.node import Node
from colab_swarm.runtime import Runtime

HIVEMIND_SAMPLES_PER_S = 2692.0
"""hivemind 1.1.12 on two cores: 4 experts ffn 256, 4 callers, batch 128, forward and backward."""
NOP_BATCH, NOP_DIM = 32, 1024  # 128 KiB


def run(quick: bool = False) -> BenchReport:
    """Measure large calls, calls without computation, small calls merged or not, and hivemind's own setting."""
    report = BenchReport("experts", quick)
    dim, batch, callers, seconds, rounds = (256, 256, 4, 1.0, 2) if quick else (1024, 2048, 8, 15.0, 3)
    with Crew() as crew:
        host = crew.start(serve_experts)
        address = host.receive()
        for _ in range(callers):
            crew.start(call_experts, address)
        load = partial(_calls_per_s, report, crew[1:], seconds)

        host.call(serve={"uids": ["ffn.0"], "dim": dim})
        alone = host.call(alone={"batch": batch, "rounds": rounds})["samples_per_s"]
        rate = batch * load("forward", uids=["ffn.0"], batch=batch, dim=dim)
        note = f"{callers} callers, forward, batch {batch}, width {dim}"
        report.add_all({"forward_samples_per_s": rate, "local_samples_per_s": alone}, "samples/s", note)
        report.add("vs_local", rate / alone, "", "of the same expert without callers; >= 0.6 wanted")

        host.call(serve={"uids": ["nop.0"], "dim": NOP_DIM, "nop": True})
        rate = load("nop", uids=["nop.0"], batch=NOP_BATCH, dim=NOP_DIM, in_flight=2)
        report.add("nop_calls_per_s", rate, "calls/s", "128 KiB each way; hivemind 86; >= 600 wanted")

        small: dict[str, Any] = {"uids": ["ffn.0"], "batch": 1, "dim": dim, "in_flight": 16}
        host.call(serve={"uids": ["ffn.0"], "dim": dim})
        merged = load("merged", **small)
        host.call(serve={"uids": ["ffn.0"], "dim": dim, "max_batch_size": 1})
        single = load(**small)
        note = f"{callers} callers, 16 calls of one sample in flight each"
        report.add_all({"merged_calls_per_s": merged, "single_calls_per_s": single}, "calls/s", note)
        report.add("batching_gain", merged / single, "times", ">= 4 wanted")

        uids = [f"ffn.{index}" for index in range(4)]
        host.call(serve={"uids": uids, "dim": 256})
        alone = host.call(alone={"batch": 128, "rounds": rounds, "backward": True})["samples_per_s"]
        order: dict[str, Any] = {"uids": uids, "batch": 128, "dim": 256, "backward": True}
        rate = 128 * _calls_per_s(report, crew[1:5], seconds, "learning", **order)
    note = "4 experts 256, 4 callers, batch 128, forward and backward"
    report.add("samples_per_s", rate, "samples/s", note)
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
    directory = Directory(ExpertServices(node, dht, EventLog(), rng, ""))
    return ExpertCalls(node, directory, Runtime(), timeout_s=timeout_s)


async def call_experts(parent: Parent, host: dict[str, Any]) -> None:
    """Worker: for each message, call experts without a pause and report the seconds of each call.

    A message has the experts' ``uids``, the ``dim`` of an input, the ``batch`` size, for how many ``seconds``, the
    calls ``in_flight``, and whether to go ``backward``.
    """
    calls = calls_of(await start_node(listen=False), timeout_s=120.0)
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
