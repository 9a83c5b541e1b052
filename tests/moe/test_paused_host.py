"""A paused host answers new calls with busy at once, and computes admitted calls when it continues."""

from __future__ import annotations

import asyncio

import pytest

from colab_swarm.errors import ExpertError
from colab_swarm.events import EventLog
from colab_swarm.moe.calls import ForwardExpert, Part
from colab_swarm.moe.server import PAUSED_RETRY_S, ExpertServer
from colab_swarm.runtime import PauseGate
from tests.moe.local import calls_of
from tests.moe.test_server import DIM, expert, info, samples
from tests.net.swarm import peers, run, until


def test_a_paused_host_takes_no_calls_and_finishes_those_it_has_afterwards() -> None:
    async def main() -> None:
        gate = PauseGate()
        async with peers("alice", "bob") as (alice, bob):
            server = ExpertServer(bob, EventLog(), gate=gate)
            server.add(expert())
            stream = await alice.stream(bob.id, ForwardExpert("ffn.0", 2, (DIM,), "float32"), timeout_s=5)
            await until(lambda: len(server._batching._inside) == 1)
            gate.hold()
            await stream.send(Part(), samples(2).tobytes())
            with pytest.raises(ExpertError) as caught:
                await calls_of(alice).attempt(ForwardExpert, info(bob), [samples(3)])
            assert caught.value.retry_s == PAUSED_RETRY_S
            await until(lambda: next(iter(server._batching._inside)).parts != [])
            await asyncio.sleep(0)
            assert server.statistics()["ffn.0"].calls == 0
            gate.release()
            _, answer = await stream.receive(Part)
            assert len(answer) == 2 * DIM * 4 and server.statistics()["ffn.0"].calls == 1
            await server.close()

    run(main())
