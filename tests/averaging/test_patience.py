"""A member that is late within rounds costs the others a wait now and then, and no mean; nobody else is left out."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from colab_swarm.averaging.exchange import TICK_S, Round
from colab_swarm.averaging.result import GroupResult
from colab_swarm.averaging.round import LEFT_OUT_S, Averager
from colab_swarm.events import EventLog, Waited
from colab_swarm.net.patience import Patience
from colab_swarm.runtime import loop_now
from colab_swarm.sim import LAN, SimNetwork, run_virtual
from colab_swarm.tensors.vector import HostVector
from tests.averaging.swarm import NAMES, SETTINGS, make_group, vector

NUMEL = 400_000  # six chunks a span
LEAST_S = 2.0  # of a limit
USUAL_S = 0.1
PEERS = NAMES[:4]


class Town:
    """Four peers on a LAN, which average in one round after the other."""

    def __init__(self) -> None:
        self.network = SimNetwork(LAN, seed=3)
        self.peers = [self.network.peer(name) for name in PEERS]
        self.network.introduce()
        self.names = {peer.id: peer.name for peer in self.peers}
        self.logs = {name: EventLog() for name in PEERS}
        self.averagers = {peer.name: Averager(peer, SETTINGS, self.logs[peer.name]) for peer in self.peers}
        self.round = 0
        self.claimed_bps = 0.0

    async def average(self, *names: str, awaited: Sequence[str] = PEERS[:3]) -> float:
        """One round in which these take part; return its seconds at the ``awaited``, who end with the same mean."""
        self.round += 1
        group = make_group(self.peers, [1, 1, 1, 1], NUMEL, round_id=self.round)
        if self.claimed_bps:
            rates = {name: 100e6 for name in PEERS} | {"dave": self.claimed_bps}
            members = [
                replace(one, upload_bps=rates[self.names[one.id]], download_bps=rates[self.names[one.id]])
                for one in group.members
            ]
            group = replace(group, members=tuple(members))
        vectors = [vector(4 * self.round + index, NUMEL) for index in range(4)]
        own = {name: values.copy() for name, values in zip(PEERS, vectors, strict=True)}
        tasks = {
            name: asyncio.create_task(self.averagers[name].average(group, HostVector(own[name])))
            for name in names
        }
        began_at = loop_now()
        self.results: list[GroupResult] = await asyncio.gather(*(tasks[name] for name in awaited))
        seconds = loop_now() - began_at
        for task in tasks.values():
            task.cancel()
        low, high = np.min(vectors, axis=0) - 1e-5, np.max(vectors, axis=0) + 1e-5
        for name in awaited:
            np.testing.assert_array_equal(own[name], own[awaited[0]])
            assert ((low <= own[name]) & (own[name] <= high)).all()
        await asyncio.sleep(1.0)
        return seconds

    def waited(self) -> list[set[str]]:
        """For whom each of the first three was told to have waited."""
        logs = [self.logs[name] for name in PEERS[:3]]
        return [{self.names[bytes.fromhex(event.peer)] for event in log.recent(Waited)} for log in logs]

    def counted(self) -> set[str]:
        return {self.names[peer] for peer in self.results[0].contributors}


@pytest.mark.parametrize("way", ["_return_means", "_send_chunks", "", "claims a slow line"])
def test_a_late_member_costs_its_limit_and_then_nothing_for_a_while(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It withholds its means, contributes nothing, or takes no part; and says besides that its line is slow."""
    hangs = list[int]()

    async def main() -> None:
        town = Town()
        if way == "claims a slow line":
            town.claimed_bps = 6e6
        town.averagers["dave"]._patience = Patience(LEFT_OUT_S, least_s=1e6)  # it gives up nobody itself
        for _ in range(3):
            assert await town.average(*PEERS, awaited=PEERS) < USUAL_S
        if way.startswith("_"):
            honest = getattr(Round, way)

            async def hang(own: Round, *given: Any) -> None:
                if town.names[own.peers.id] == "dave":
                    hangs.append(town.round)
                    await asyncio.sleep(1e6)
                await honest(own, *given)

            monkeypatch.setattr(Round, way, hang)
        names = PEERS if way.startswith("_") else PEERS[:3]
        assert LEAST_S < await town.average(*names) < 3 * LEAST_S
        assert town.waited() == [{"dave"}] * 3
        (waited,) = town.logs["alice"].recent(Waited)
        (late,) = (one for one in town.results[0].members if one.peer == waited.peer)
        assert late.dropped.startswith("too slow: nothing came for ") or way == "_return_means"
        assert LEAST_S <= waited.seconds < 3 * LEAST_S
        for _ in range(3):
            assert await town.average(*names) < USUAL_S + 2 * TICK_S
        await asyncio.sleep(LEFT_OUT_S)
        assert await town.average(*names) > LEAST_S, "it is awaited again"
        await asyncio.sleep(LEFT_OUT_S)
        assert await town.average(*names) < USUAL_S + 2 * TICK_S, "it is left out for twice as long"
        assert town.waited() == [{"dave"}] * 3

    run_virtual(main())
    assert len(set(hangs)) >= 6 or not way.startswith("_")


def test_who_comes_in_time_counts_and_is_awaited_again() -> None:
    async def main() -> None:
        town = Town()
        await town.average(*PEERS, awaited=PEERS)
        for _ in range(2):
            assert await town.average(*PEERS[:3]) > LEAST_S
            assert town.counted() == {*PEERS[:3]}
            assert await town.average(*PEERS, awaited=PEERS) < USUAL_S + 2 * TICK_S
            assert town.counted() == {*PEERS}

    run_virtual(main())


def test_nobody_is_left_out_where_more_than_half_are_late() -> None:
    async def main() -> None:
        town = Town()
        assert await town.average("alice", awaited=["alice"]) < 2 * SETTINGS.patience_s + 1.0
        assert town.waited() == [set()] * 3
        await town.average(*PEERS[1:], awaited=PEERS[1:])

    run_virtual(main())


def test_a_peer_that_has_slept_gives_the_others_more_time_and_blames_none() -> None:
    async def main() -> None:
        town = Town()
        loop: Any = asyncio.get_running_loop()
        loop.call_later(0.01, setattr, loop, "now", 30.0)
        await town.average(*PEERS, awaited=PEERS)
        assert town.counted() == {*PEERS} and town.waited() == [set()] * 3

    run_virtual(main())


def test_a_line_that_has_become_slow_is_not_late() -> None:
    async def main() -> None:
        town = Town()
        for _ in range(3):
            await town.average(*PEERS, awaited=PEERS)
        town.network.now().slow("dave", 400.0)
        assert await town.average(*PEERS, awaited=PEERS) > 2 * LEAST_S
        assert town.counted() == {*PEERS} and town.waited() == [set()] * 3

    run_virtual(main())
