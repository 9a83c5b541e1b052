import asyncio
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.averaging.assembly import QUICK, WINDOW_S, Assembly, Meeting, WaitingPeer
from colab_swarm.averaging.group import Group, JoinEta, RoundRefused, RoundTerms
from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.dht.service import DHT, DHTSettings, Found
from colab_swarm.net.peers import PeerId, Peers, Role
from colab_swarm.sim import LAN, SimNetwork, run_virtual

NAMES = ("alice", "bob", "carol", "dave")
SCHEMA = b"schema"
LINEAGE = b""  # of no terms


class Place:
    """Peers on a simulated LAN that can meet."""

    def __init__(self, count: int, *, size: int | None = None, terms: str = "") -> None:
        self.network = SimNetwork(LAN)
        self.peers = [self.network.peer(name) for name in NAMES[:count]]
        self.dhts = [DHT(peers, DHTSettings(), random.Random(peers.name)) for peers in self.peers]
        self.assemblies = [
            Assembly(PrefixRouter(peers), dht, "run/meeting", replace(QUICK, size=size), terms=terms)
            for peers, dht in zip(self.peers, self.dhts, strict=True)
        ]

    async def open(self) -> "Place":
        for dht in self.dhts[1:]:
            await dht.bootstrap([self.peers[0].contact])
        return self

    async def meet(self, index: int, *, after_s: float = 0.0) -> Group:
        await asyncio.sleep(after_s)
        return await self.assemblies[index].meet(10, SCHEMA, lambda peers: 2 + index)

    async def meet_all(self, count: int, *, apart_s: float = 0.0) -> Group:
        """The one group of ``count`` peers."""
        groups = await asyncio.gather(*(self.meet(i, after_s=i * apart_s) for i in range(count)))
        assert len(set(groups)) == 1 and len(groups[0].members) == count
        return groups[0]


def now() -> float:
    return asyncio.get_running_loop().time()


ALICE, BOB, CAROL = (PeerId(name.encode().ljust(32)) for name in NAMES[:3])
TERMS = RoundTerms("run/meeting", 0, LINEAGE, 10, SCHEMA)


def waiting(number: int, terms: str = "", at: float = 0.0) -> WaitingPeer:
    return WaitingPeer(number, (), terms, at)


def meeting_of_alice(*, size: int | None = None, now_ms: float = 5000.0) -> Meeting:
    meeting = Meeting(ALICE, size, "beta=1")
    meeting.begin(TERMS, now_ms)
    return meeting


def test_the_lowest_meeting_counts_and_the_own_one_again_when_its_peer_has_left() -> None:
    meeting = meeting_of_alice()
    meeting.on_records({ALICE: waiting(1), BOB: waiting(4000), CAROL: waiting(4500)}, 5000.0)
    meeting.take_lowest()
    assert meeting.number == 4000 and meeting.waiting == {BOB: 4000, CAROL: 4500}
    meeting.on_records({}, 5000.0)
    meeting.take_lowest()
    assert meeting.number == 5000


def test_a_called_peer_keeps_the_callers_meeting_and_refuses_another() -> None:
    meeting = meeting_of_alice()
    assert meeting.on_called(msgspec.structs.replace(TERMS, step=4000), 5000.0)
    assert not meeting.on_called(msgspec.structs.replace(TERMS, step=4001), 5000.0)
    meeting.on_records({BOB: waiting(3000)}, 5000.0)
    meeting.take_lowest()
    assert meeting.number == 4000 and meeting.join().step == 4000


def test_a_peer_comes_to_no_meeting_while_it_does_not_wait_or_for_another_vector() -> None:
    meeting = meeting_of_alice()
    assert not meeting.on_called(msgspec.structs.replace(TERMS, step=5000, numel=11), 5000.0)
    meeting.end()
    assert not meeting.on_called(msgspec.structs.replace(TERMS, step=5000), 5000.0)


def test_a_meeting_that_this_peer_took_part_in_is_over_for_it() -> None:
    meeting = meeting_of_alice()
    meeting.join()
    meeting.end()
    meeting.begin(TERMS, 5000.0)
    meeting.on_records({BOB: waiting(5000), CAROL: waiting(5001)}, 5000.0)
    assert meeting.number == 5001 and meeting.waiting == {CAROL: 5001}


def test_other_terms_count_only_with_a_second_record_and_only_in_a_fixed_size() -> None:
    meeting = meeting_of_alice(size=2)
    meeting.on_records({BOB: waiting(4000, "beta=2", at=1.0)}, 5000.0)
    assert not meeting.waiting and not meeting.complete
    with pytest.raises(ValueError, match="other settings: 'beta=2'; this peer: 'beta=1'"):
        meeting.on_records({BOB: waiting(4000, "beta=2", at=2.0)}, 5000.0)
    meeting.on_records({CAROL: waiting(4000, "beta=1")}, 5000.0)
    assert meeting.complete
    free = meeting_of_alice()
    free.on_records({BOB: waiting(4000, "beta=2")}, 5000.0)
    assert free.waiting and not free.complete


async def test_all_get_the_same_group_with_everyones_vote() -> None:
    group = await (await Place(4).open()).meet_all(4, apart_s=1.0)
    assert sorted(member.weight for member in group.members) == [2, 3, 4, 5]
    assert now() == pytest.approx(WINDOW_S, abs=0.5)


async def test_those_of_the_last_meeting_begin_as_soon_as_all_are_back() -> None:
    place = await Place(3).open()
    for _ in range(5):
        await place.meet_all(3)
    assert now() < WINDOW_S + 4 * 0.5


async def test_a_peer_that_does_not_come_back_is_waited_for_once() -> None:
    place = await Place(3).open()
    await place.meet_all(3)
    place.network.now().crash("carol")
    began = now()
    for _ in range(3):
        await place.meet_all(2)
    assert now() - began < WINDOW_S + 3.0
    assert [fault.name for fault in place.network.fired] == ["crash"]


@pytest.mark.parametrize("change", [{"step": 0}, {"step": 1}, {"step": (1 << 48) - 1}, {"numel": 11}])
async def test_a_call_to_an_impossible_meeting_changes_nothing(change: dict[str, int]) -> None:
    place = await Place(3).open()
    meeting = asyncio.create_task(place.meet_all(2))
    await asyncio.sleep(1)
    own = RoundTerms("run/meeting", place.assemblies[0].meeting.number, LINEAGE, 10, SCHEMA)
    terms = msgspec.structs.replace(own, **change)
    answer = await place.peers[2].call(place.peers[0].id, terms, JoinEta, timeout_s=5)
    assert answer == JoinEta(None)
    await meeting


class Garbage(DHT):
    """It stores nothing, and every read returns this."""

    def __init__(self, peers: Peers, value: Any) -> None:
        self._peers, self._value = peers, value

    async def publish(self, *_: object, **__: object) -> int:
        return 0

    async def get(self, key: str) -> dict[PeerId, Found]:
        return {PeerId(b"x" * 32): Found(self._value, 1e12, Role.WORKER, b"")}


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(anything | st.lists(anything, min_size=2, max_size=2))
@settings(max_examples=60)
def test_nothing_that_strangers_write_keeps_a_peer_from_meeting(value: Any) -> None:
    async def main() -> None:
        peers = SimNetwork(LAN).peer("alice")
        assembly = Assembly(PrefixRouter(peers), Garbage(peers, value), "run/meeting")
        assert len((await assembly.meet(10, SCHEMA, lambda peers: 2)).members) == 1
        assembly.close()

    run_virtual(main())


async def test_an_absurd_number_does_not_move_the_meeting() -> None:
    place = await Place(3).open()
    mallory = place.peers[2]
    for number in (-1, 0, 1 << 60):
        record = WaitingPeer(number, mallory.contact.addresses)
        await place.dhts[2].publish("run/meeting", record, ttl_s=60)
        await place.meet_all(2)


async def test_a_caller_is_expected_although_its_record_is_late() -> None:
    place = await Place(3).open()
    assembly, (alice, _bob, carol) = place.assemblies[0], place.peers
    meeting = asyncio.create_task(place.meet(0))
    await asyncio.sleep(1.0)
    terms = RoundTerms("run/meeting", assembly.meeting.number, LINEAGE, 10, SCHEMA)
    for later, answer in ((0, JoinEta(0.0)), (1, JoinEta(None))):
        asked = msgspec.structs.replace(terms, step=terms.step + later)
        assert await carol.call(alice.id, asked, JoinEta, timeout_s=5) == answer
    assert await assembly.expected(assembly.meeting.number, LINEAGE) == [carol.id]
    meeting.cancel()


async def test_a_group_of_a_fixed_size_is_formed_as_soon_as_all_wait_and_not_before() -> None:
    await (await Place(3, size=3).open()).meet_all(3, apart_s=4.2 * WINDOW_S)
    assert now() == pytest.approx(2 * 4.2 * WINDOW_S, abs=1.0)


async def test_one_peer_too_many_is_refused_and_the_others_have_the_same_group() -> None:
    place = await Place(3, size=2).open()
    outcomes = await asyncio.gather(*(place.meet(i) for i in range(3)), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, RoundRefused)]
    assert [refusal.reason for refusal in refused] == ["late"]
    assert len({outcome for outcome in outcomes if isinstance(outcome, Group)}) == 1


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
    place = await Place(2, size=2, terms="beta=1").open()
    theirs = WaitingPeer(1, place.peers[1].contact.addresses, "beta=2", at=1.0)
    await place.dhts[1].publish("run/meeting", theirs, ttl_s=600.0)
    meeting = asyncio.create_task(place.meet(0))
    await asyncio.sleep(3 * WINDOW_S)
    assert not meeting.done()
    await place.dhts[1].publish("run/meeting", msgspec.structs.replace(theirs, at=2.0), ttl_s=600.0)
    with pytest.raises(ValueError, match="other settings: 'beta=2'; this peer: 'beta=1'"):
        await meeting
