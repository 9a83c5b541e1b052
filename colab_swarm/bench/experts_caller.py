"""One caller of ``bench experts``: ``python -m colab_swarm.bench.experts_caller ID ADDRESS``, then JSON lines.

An order is the fields of `Load`; the answer tells how many samples came back in how many seconds, and how long each
call took.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass

import numpy as np

from colab_swarm.dht.service import DHT, DHTSettings
from colab_swarm.events import EventLog
from colab_swarm.moe.calls import ExpertCalls
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.records import ExpertInfo, ExpertServices
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node, NodeSettings
from colab_swarm.net.peers import Contact, PeerId
from colab_swarm.runtime import Runtime


@dataclass(frozen=True)
class Load:
    """Calls without a pause: ``in_flight`` at a time, each of ``batch`` samples of ``dim`` values, for ``seconds``.

    Each call is of the next of ``uids``; with ``backward`` a forward call and then a backward call are one.
    """

    uids: list[str]
    batch: int
    dim: int
    seconds: float
    in_flight: int = 1
    backward: bool = False


class Caller:
    """Calls the experts of one host."""

    def __init__(self, node: Node, host: Contact) -> None:
        services = ExpertServices(
            node, DHT(node, DHTSettings(), random.Random(0)), EventLog(), random.Random(0), ""
        )
        self._host = host
        self._calls = ExpertCalls(node, Directory(services), Runtime(), timeout_s=120.0)

    async def carry(self, load: Load) -> list[float]:
        """Seconds of each call."""
        inputs = np.random.default_rng(0).standard_normal((load.batch, load.dim), np.float32)
        until = time.perf_counter() + load.seconds
        took_s: list[float] = []

        async def call_on(lane: int) -> None:
            turn = lane
            while (began := time.perf_counter()) < until:
                info = ExpertInfo(load.uids[turn % len(load.uids)], self._host, (load.dim,), 0, 0.0)
                outputs = await self._calls.forward(info, inputs)
                if load.backward:
                    await self._calls.backward(info, inputs, outputs)
                took_s.append(time.perf_counter() - began)
                turn += 1

        await asyncio.gather(*(call_on(lane) for lane in range(load.in_flight)))
        return took_s


async def main(host: Contact) -> None:
    """Obey orders until stdin ends."""
    node = await Node.start(Identity(), NodeSettings(listen=False))
    caller = Caller(node, host)
    while line := await asyncio.to_thread(sys.stdin.readline):
        load = Load(**json.loads(line))
        began = time.perf_counter()
        took_s = await caller.carry(load)
        seconds = time.perf_counter() - began
        print(json.dumps({"calls": len(took_s), "seconds": seconds, "took_s": took_s}), flush=True)
    await node.close()


if __name__ == "__main__":
    asyncio.run(main(Contact(PeerId(bytes.fromhex(sys.argv[1])), (sys.argv[2],))))
