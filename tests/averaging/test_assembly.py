import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.averaging.assembly import WINDOW_S, Assembly, WaitingPeer
from colab_swarm.averaging.group import Group, RoundRefused
from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.dht.service import DHT, Found
from colab_swarm.net.node import Node
from colab_swarm.net.peers import PeerId, Role
from colab_swarm.sim import LAN, SimNetwork, run_virtual

NAMES = ("alice", "bob", "carol", "dave")


class Place:
    """Peers on a simulated LAN that can meet; the last ``clients`` cannot be dialled."""

    def __init__(self, count: int, *, size: int | None = None, clients: int = 0) -> None:
        self.network = SimNetwork(LAN)
        names = NAMES[:count]
        self.peers = [self.network.peer(name, listen=name in names[: count - clients]) for name in names]
        self.dhts = [DHT(peers, random.Random(peers.name)) for peers in self.peers]
        self.assemblies = [
            Assembly(PrefixRouter(peers), dht, "run/meeting", size=size)
            for peers, dht in zip(self.peers, self.dhts, strict=True)
        ]

    async def open(self) -> "Place":
        for dht in self.dhts[1:]:
            await dht.bootstrap([self.peers[0].contact])
        return self

    async def meet(self, index: int, *, after_s: float = 0.0, terms: str = "") -> Group:
        await asyncio.sleep(after_s)
        return await self.assemblies[index].meet(terms, 2.0 + index)

    async def meet_all(self, count: int, *, apart_s: float = 0.0) -> Group:
        """The one group of ``count`` peers."""
        groups = await asyncio.gather(*(self.meet(i, after_s=i * apart_s) for i in range(count)))
        assert len(set(groups)) == 1 and len(groups[0].members) == count
        return groups[0]


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("clients", [0, 3])
async def test_all_get_the_same_group_with_everyones_weight(clients: int) -> None:
    group = await (await Place(4, clients=clients).open()).meet_all(4, apart_s=1.0)
    assert sorted(member.weight for member in group.members) == [2, 3, 4, 5]
    assert now() == pytest.approx(WINDOW_S, abs=0.5)


async def test_those_of_the_last_meeting_begin_when_all_are_back_and_await_an_absent_one_once() -> None:
    place = await Place(3).open()
    for _ in range(5):
        await place.meet_all(3)
    assert now() < WINDOW_S + 4 * 0.5
    place.network.now().crash("carol")
    began = now()
    for _ in range(3):
        await place.meet_all(2)
    assert now() - began < WINDOW_S + 3.0
    assert [fault.name for fault in place.network.fired] == ["crash"]


async def test_an_organizer_that_dies_costs_the_others_one_more_window() -> None:
    place = await Place(3).open()
    first = asyncio.create_task(place.meet(0))
    others = asyncio.gather(*(place.meet(i, after_s=1.0) for i in (1, 2)))
    await asyncio.sleep(4.0)
    place.network.now().crash("alice")
    groups = await others
    assert len(set(groups)) == 1 and len(groups[0].members) == 2
    assert now() < 4.0 + WINDOW_S + 3.0
    assert [fault.name for fault in place.network.fired] == ["crash"]
    first.cancel()


async def test_peers_with_other_terms_do_not_meet() -> None:
    place = await Place(3).open()
    alone, *both = await asyncio.gather(
        place.meet(0, terms="beta=1"), place.meet(1, terms="beta=2"), place.meet(2, terms="beta=2")
    )
    assert len(alone.members) == 1 and len(both[0].members) == 2 and both[0] == both[1]
    assert now() < 2 * WINDOW_S


class Garbage(DHT):
    """It stores nothing, and every read returns this."""

    def __init__(self, peers: Node, value: Any) -> None:
        self._peers, self._value = peers, value

    async def publish(self, *_: object, **__: object) -> int:
        return 0

    async def get(self, key: str) -> dict[PeerId, Found]:
        return {PeerId(b"x" * 32): Found(self._value, 1e12, Role.WORKER)}


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(anything | st.lists(anything, min_size=2, max_size=2) | st.tuples(st.floats(), st.just(["ws://x:1"])))
@settings(max_examples=25)
def test_nothing_that_strangers_write_keeps_a_peer_from_meeting(value: Any) -> None:
    async def main() -> None:
        peers = SimNetwork(LAN).peer("alice")
        assembly = Assembly(PrefixRouter(peers), Garbage(peers, value), "run/meeting")
        assert len((await assembly.meet()).members) == 1
        assembly.close()

    run_virtual(main())


async def test_the_record_of_a_peer_that_does_not_wait_delays_no_meeting() -> None:
    place = await Place(3).open()
    mallory = place.peers[2]
    for since in (-1e12, 0.0, 1e12):
        record = WaitingPeer(since, mallory.contact.addresses)
        await place.dhts[2].publish("run/meeting", record, ttl_s=60)
        began = now()
        await place.meet_all(2)
        assert now() - began < WINDOW_S + 2.0


async def test_a_group_of_a_fixed_size_is_formed_as_soon_as_all_wait_and_not_before() -> None:
    await (await Place(3, size=3).open()).meet_all(3, apart_s=4.2 * WINDOW_S)
    assert now() == pytest.approx(2 * 4.2 * WINDOW_S, abs=1.0)


async def test_of_one_peer_too_many_the_others_have_the_same_group() -> None:
    place = await Place(3, size=2).open()
    meetings = [asyncio.wait_for(place.meet(i), 30.0) for i in range(3)]
    outcomes = await asyncio.gather(*meetings, return_exceptions=True)
    groups = [outcome for outcome in outcomes if isinstance(outcome, Group)]
    assert len(groups) == 2 and groups[0] == groups[1] and len(groups[0].members) == 2
    assert any(isinstance(outcome, RoundRefused | TimeoutError) for outcome in outcomes)


async def test_the_record_of_a_dead_peer_does_not_stop_a_fixed_size() -> None:
    place = await Place(3, size=2).open()
    dead = asyncio.create_task(place.meet(2))
    await asyncio.sleep(1.0)
    place.network.now().crash("carol")
    await place.meet_all(2)
    dead.cancel()
    assert [fault.name for fault in place.network.fired] == ["crash"]
    assert now() < 30.0


async def test_other_terms_are_an_error_once_it_is_clear_that_the_record_is_no_leftover() -> None:
    place = await Place(2, size=2).open()
    theirs = WaitingPeer(1.0, place.peers[1].contact.addresses, "beta=2", told_at=1.0)
    await place.dhts[1].publish("run/meeting", theirs, ttl_s=600.0)
    meeting = asyncio.create_task(place.meet(0, terms="beta=1"))
    await asyncio.sleep(3 * WINDOW_S)
    assert not meeting.done()
    second = asyncio.create_task(place.meet(1, terms="beta=2"))
    with pytest.raises(ValueError, match="other settings: 'beta=2'; this peer: 'beta=1'"):
        await meeting
    with pytest.raises(ValueError, match="other settings: 'beta=1'; this peer: 'beta=2'"):
        await second
