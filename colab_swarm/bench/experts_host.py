"""The host of ``bench experts``: ``python -m colab_swarm.bench.experts_host``, then JSON lines.

It tells its id and address first. ``{"serve": …}`` (the fields of `HostedExperts`) serves other experts from now on,
``{"alone": …}`` (those of `Alone`) measures them without callers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from functools import partial

import torch

from colab_swarm.events import EventLog
from colab_swarm.moe.batching import BatchLimits
from colab_swarm.moe.expert import Expert, ExpertRule, FeedForward
from colab_swarm.moe.server import ExpertServer
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node, NodeSettings


@dataclass(frozen=True)
class HostedExperts:
    """Feed-forward experts of this width, or ``nop`` experts; and how many samples are computed at once, at most."""

    uids: list[str]
    dim: int
    nop: bool = False
    max_batch_size: int = 4096


@dataclass(frozen=True)
class Alone:
    """Batches computed by each expert in turn, without a network."""

    batch: int
    rounds: int
    backward: bool = False


class ExpertBenchHost:
    """The experts served now."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._experts: list[Expert] = []
        self._server: ExpertServer | None = None

    async def serve(self, hosting: HostedExperts) -> None:
        """Serve these instead."""
        if self._server:
            await self._server.close()
        limits = BatchLimits(max_batch_size=hosting.max_batch_size)
        self._server = ExpertServer(self._node, EventLog(), limits)
        rule = ExpertRule(partial(torch.optim.Adam, lr=1e-3))
        self._experts = [
            Expert(
                uid, torch.nn.Identity() if hosting.nop else FeedForward(hosting.dim), rule, (hosting.dim,)
            )
            for uid in hosting.uids
        ]
        for expert in self._experts:
            self._server.add(expert)

    async def alone(self, alone: Alone) -> float:
        """Samples per second of the experts by themselves, on the thread that serves them."""
        assert self._server
        return await self._server.run(partial(self._compute, alone))

    def _compute(self, alone: Alone) -> float:
        rates = []
        for turn in range(alone.rounds + 1):
            inputs = torch.randn(alone.batch, *self._experts[0].shape)
            began = time.perf_counter()
            for expert in self._experts:
                outputs = expert.forward(inputs)
                if alone.backward:
                    expert.backward(inputs, outputs)
            if turn:  # the first warms up
                rates.append(alone.batch * len(self._experts) / (time.perf_counter() - began))
        return max(rates)


async def main() -> None:
    """Obey orders until stdin ends."""
    torch.set_num_threads(os.cpu_count() or 1)  # as a peer does
    node = await Node.start(Identity(), NodeSettings(host="127.0.0.1"))
    host = ExpertBenchHost(node)
    print(json.dumps({"id": node.id.hex(), "address": node.contact.addresses[0]}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        if "serve" in order:
            await host.serve(HostedExperts(**order["serve"]))
            print(json.dumps({"ready": True}), flush=True)
        else:
            print(json.dumps({"samples_per_s": await host.alone(Alone(**order["alone"]))}), flush=True)
    await node.close()


if __name__ == "__main__":
    asyncio.run(main())
