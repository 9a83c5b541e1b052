"""A member that is silent or slow within rounds costs the others a burst in all, and no mean."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from colab_swarm.averaging.lateness import TICK_S
from colab_swarm.averaging.result import GroupResult
from colab_swarm.averaging.round import Averager
from colab_swarm.averaging.span_server import SpanServer
from colab_swarm.averaging.standing import BURST_S, SHARE
from colab_swarm.averaging.upload import Upload
from colab_swarm.events import EventLog, Waited
from colab_swarm.runtime import loop_now
from colab_swarm.sim import HOME, LAN, SimNetwork, run_virtual
from colab_swarm.tensors.vector import HostVector
from tests.averaging.swarm import NAMES, SETTINGS, make_group, vector

ROUNDS, NUMEL, LIAR = 40, 400_000, "dave"  # six chunks a span
HONEST_ROUNDS = 3  # of one that takes no part later
USUAL_S = 0.1


async def hold(*_: Any) -> None:
    await asyncio.sleep(1e6)


async def drip(send: Callable[..., Any], *message: Any) -> None:
    await asyncio.sleep(2.0)
    await send(*message)


async def blame(self: SpanServer, stream: Any) -> None:
    """Return the means late, and without a member that sent everything in time."""
    await asyncio.sleep(2.0)
    other = (self.own.me + 1) % len(self.own.group.members)
    for message, payload in [*self._means]:
        await stream.send(msgspec.structs.replace(message, missing=(other,)), payload)


ATTACKS = (
    "withholds its means",
    "blames another",
    "contributes nothing",
    "sends a chunk each two seconds",
    "takes no part",
)


def attack(kind: str, fired: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the liar's rounds do that."""

    def instead(part: type[Upload | SpanServer], name: str, liars: Callable[..., Any]) -> None:
        honest = getattr(part, name)

        async def method(self: Upload | SpanServer, *given: Any) -> Any:
            if getattr(self.own.peers, "name", "") != LIAR:
                return await honest(self, *given)
            fired.append(loop_now())
            return await liars(self, *given)

        monkeypatch.setattr(part, name, method)

    if kind == "withholds its means":
        instead(SpanServer, "_return_means", hold)
    elif kind == "blames another":
        instead(SpanServer, "_return_means", blame)
    elif kind == "contributes nothing":
        instead(Upload, "_send_chunks", hold)
    elif kind == "sends a chunk each two seconds":
        honest = Upload._send_chunks

        async def slowly(self: Upload, stream: Any, reducer: int) -> None:
            send = stream.send
            monkeypatch.setattr(stream, "send", lambda *message: drip(send, *message))
            await honest(self, stream, reducer)

        instead(Upload, "_send_chunks", slowly)


@pytest.mark.parametrize("kind", ATTACKS)
def test_silence_within_rounds_costs_a_burst_in_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fired, waits, logs = list[float](), list[float](), list[EventLog]()
    attack(kind, fired, monkeypatch)

    async def main() -> None:
        network = SimNetwork(LAN, seed=3)
        peers = [network.peer(name) for name in NAMES[:4]]
        network.introduce()
        logs.extend(EventLog() for _ in peers)
        averagers = [Averager(peer, SETTINGS, log) for peer, log in zip(peers, logs, strict=True)]
        honest, liar = averagers[:3], averagers[3]
        for number in range(ROUNDS):
            group, began = make_group(peers, [1, 1, 1, 1], NUMEL, round_id=number), loop_now()
            vectors = [vector(4 * number + index, NUMEL) for index in range(4)]
            own = [values.copy() for values in vectors]
            lying = None
            if kind != "takes no part" or number < HONEST_ROUNDS:
                lying = asyncio.create_task(liar.average(group, HostVector(own[3])))
            else:
                fired.append(began)
            results: list[GroupResult] = await asyncio.gather(
                *(one.average(group, HostVector(values)) for one, values in zip(honest, own, strict=False))
            )
            waits.append(loop_now() - began)
            if lying is not None:
                lying.cancel()
            low, high = np.min(vectors, axis=0) - 1e-5, np.max(vectors, axis=0) + 1e-5
            assert all(np.array_equal(own[0], values) for values in own[1:3]) and not results[0].kept_local
            assert ((low <= own[0]) & (own[0] <= high)).all()
            for averager in honest:
                for peer in set(results[0].contributors):
                    averager.standings[""].earn(peer, loop_now())
            await asyncio.sleep(1.0)

        names = {peer.id.hex(): peer.name for peer in peers}
        for log in logs[:3]:
            waited = log.recent(Waited)
            assert LIAR in {names[one.peer] for one in waited}
            assert sum(one.seconds for one in waited if names[one.peer] != LIAR) < 1.0

    run_virtual(main())
    assert len(fired) >= ROUNDS - HONEST_ROUNDS
    # The liar's chunks are late for one reducer after another, so each of the three loses a burst.
    assert sum(waits) < 3 * (BURST_S + SHARE * ROUNDS) + USUAL_S * ROUNDS and max(waits[10:]) < 2 * USUAL_S


def test_a_member_without_credit_still_has_the_usual_time() -> None:
    async def main() -> None:
        network = SimNetwork(HOME, seed=3)
        peers = [network.peer(name) for name in NAMES[:4]]
        network.introduce()
        averagers = [Averager(peer, SETTINGS) for peer in peers]
        everyone = [peer.id for peer in peers]
        for number in range(6):
            group = make_group(peers, [1, 1, 1, 1], NUMEL, round_id=number)
            if number == 4:
                for averager in averagers[:3]:
                    standing = averager.standings[""]
                    standing.settle("its part of a round", {everyone[3]: 60.0}, everyone, loop_now())
                    assert standing.credit_s(everyone[3]) == 0.0
            began = loop_now()
            results = await asyncio.gather(
                *(averager.average(group, HostVector(vector(number, NUMEL))) for averager in averagers)
            )
            assert loop_now() - began > 2 * TICK_S, "late members are looked for"
            assert all(len(result.contributors) == 4 for result in results)

    run_virtual(main())
