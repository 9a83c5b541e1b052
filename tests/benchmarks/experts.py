"""Experts under load: one host and many callers, each a process, over encrypted links on loopback.

The limit is what the same expert computes on the same thread of the same process without callers.
"""

import asyncio
import os
import time
from functools import partial
from typing import Any

import numpy as np
import torch

from colab_swarm.events import EventLog
from colab_swarm.experiments.learning_at_home import calls_of
from colab_swarm.experiments.report import Report, reports
from colab_swarm.moe.blocks import FeedForward
from colab_swarm.moe.calls import ExpertCalls, ExpertServer
from colab_swarm.moe.expert import BatchLimits, Expert, ExpertRule
from colab_swarm.moe.grid import ExpertInfo
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact
from colab_swarm.tensors.device import to_host
from tests.benchmarks.harness import Channel, Crew, Worker, call_all, receive_all, timed
from tests.benchmarks.link import contact, start_node, where


@reports("experts")
def run_experts(report: Report) -> None:
    dim, batch, callers, seconds = (256, 256, 4, 1.0) if report.quick else (1024, 2048, 8, 15.0)
    with Crew() as crew:
        host = crew.start(serve_experts)
        address = host.receive()
        for _ in range(callers):
            crew.start(call_experts, address)
        receive_all(crew[1:])  # while they import, they would slow down the host
        load = partial(_calls_per_s, seconds, crew[1:], uids=["ffn.0"])
        alone = host.call(uids=["ffn.0"], dim=dim, alone=batch)["samples_per_s"]
        rate = batch * load(batch=batch, dim=dim)
        report.add("vs_local", rate / alone, "", f"of {alone:,.0f} samples/s without callers; >= 0.6 wanted")
        host.call(uids=["ffn.0"], dim=1024, nop=True)
        rate = load(batch=32, dim=1024, in_flight=2)
        report.add("nop_calls_per_s", rate, "calls/s", "128 KiB each way; hivemind 86; >= 600 wanted")
        host.call(uids=["ffn.0"], dim=dim)
        merged = load(batch=1, dim=dim, in_flight=16)
        host.call(uids=["ffn.0"], dim=dim, max_batch_size=1)
        single = load(batch=1, dim=dim, in_flight=16)
        report.add("batching_gain", merged / single, "times", "16 calls of one sample; >= 4 wanted")
        uids = [f"ffn.{index}" for index in range(4)]
        host.call(uids=uids, dim=256)
        rate = 128 * _calls_per_s(seconds, crew[1:5], uids=uids, batch=128, dim=256, backward=True)
    report.add("samples_per_s", rate, "samples/s", "4 experts 256, 4 callers, batch 128, both ways")


def _calls_per_s(seconds: float, workers: list[Worker], **load: Any) -> float:
    """Load the host, see `_load`. A short load comes first to open links."""
    call_all(workers, **load, seconds=min(1.0, seconds))
    return float(sum(one["calls_per_s"] for one in call_all(workers, **load, seconds=seconds)))


async def call_experts(parent: Channel, host: dict[str, Any]) -> None:
    calls = calls_of(await start_node(listen=False), timeout_s=120.0)
    found: dict[str, Any] = {}
    while True:
        found = await _load(calls, contact(host), **await parent.wait_call(**found))


async def _load(
    calls: ExpertCalls,
    host: Contact,
    uids: list[str],
    batch: int,
    dim: int,
    seconds: float,
    in_flight: int = 1,
    backward: bool = False,
) -> dict[str, Any]:
    """Call experts without a pause; return the calls per second."""
    inputs = np.random.default_rng(0).standard_normal((batch, dim), np.float32)
    done = 0
    infos = [ExpertInfo(uid, host, (dim,), 0, 0.0) for uid in uids]
    began = time.perf_counter()

    async def call_on(turn: int) -> None:
        nonlocal done
        while time.perf_counter() < began + seconds:
            info = infos[turn % len(infos)]
            outputs = await calls.forward(info, inputs)
            if backward:
                await calls.backward(info, inputs, outputs)
            done += 1
            turn += 1

    await asyncio.gather(*map(call_on, range(in_flight)))
    return {"calls_per_s": done / (time.perf_counter() - began)}


async def serve_experts(parent: Channel) -> None:
    """Worker: replace the hosted experts by those of each message; see `_serve`."""
    torch.set_num_threads(os.cpu_count() or 1)  # as a peer does
    node = await start_node()
    found = where(node)
    server = ExpertServer(node, EventLog(), BatchLimits())
    while True:
        order = await parent.wait_call(**found)
        await server.close()
        server, found = await _serve(node, **order)


async def _serve(
    node: Node, uids: list[str], dim: int, nop: bool = False, max_batch_size: int = 4096, alone: int = 0
) -> tuple[ExpertServer, dict[str, float]]:
    """Host experts; with ``alone``, return their speed at such batches without callers."""
    server = ExpertServer(node, EventLog(), BatchLimits(max_batch_size=max_batch_size))
    rule = ExpertRule(partial(torch.optim.Adam, lr=1e-3))
    for uid in uids:
        expert = Expert(uid, torch.nn.Identity() if nop else FeedForward(dim), rule, (dim,))
        expert.forward(torch.zeros(2, dim))  # on this thread, as a host does before: OpenMP spins less then
        server.add(expert)
    inputs = torch.randn(alone, dim)
    if not alone:
        return server, {}
    took_s = []
    for _ in range(4):
        seconds, _ = await timed(server.run(expert.device, lambda: to_host(expert.forward(inputs))))
        took_s.append(seconds)
    # the first warms up
    return server, {"samples_per_s": alone / min(took_s[1:])}
