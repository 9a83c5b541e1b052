"""Circuits: the relay's state, peers that talk through a relay, and relays and callers that mean ill."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from colab_swarm.errors import CallRefused, PeerError, PeerLost
from colab_swarm.net import relay as module
from colab_swarm.net.carrier import NodeSettings
from colab_swarm.net.handshake import VERSION
from colab_swarm.net.node import Node
from colab_swarm.net.noise import Handshake
from colab_swarm.net.peers import Ack, Contact, PeerId, Refusal, short
from colab_swarm.net.relay import Circuits, Relay, RelayQuota, RelayState, _Pump, choose
from tests.net.swarm import Echo, candidates, peers, until

ALICE, BOB, CAROL = PeerId(b"a" * 32), PeerId(b"b" * 32), PeerId(b"c" * 32)


def state(**quota: float) -> RelayState:
    made = RelayState(RelayQuota(**quota), now=0.0)  # type: ignore[arg-type]
    made.reserve(BOB, 0.0)
    return made


def test_places_and_circuits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("PLACES", 1), ("CIRCUITS", 2), ("CIRCUITS_PER_PEER", 1)):
        monkeypatch.setattr(module, name, most)
    one = state()
    with pytest.raises(Refusal, match="all 1 places"):
        one.reserve(CAROL, 1.0)
    one.reserve(BOB, 1.0)
    assert one.places == {BOB: 1.0}
    one.open(ALICE, CAROL, 16.0, os.urandom)
    with pytest.raises(Refusal, match="1 circuits of"):
        one.open(BOB, CAROL, 16.0, os.urandom)
    one.open(BOB, PeerId(b"d" * 32), 16.0, os.urandom)  # these two have none
    with pytest.raises(Refusal, match="2 circuits are open here"):
        one.open(PeerId(b"e" * 32), PeerId(b"f" * 32), 16.0, os.urandom)


def test_a_ticket_is_good_once_and_a_circuit_is_dropped_when_it_is_silent_or_half_open() -> None:
    one = state()
    circuit = one.open(ALICE, BOB, 100.0, os.urandom)
    mine, theirs = circuit.tokens
    assert one.find(theirs) == (circuit, 1) and one.find(theirs) is None
    assert one.find(b"guessed") is None and one.find(mine) == (circuit, 0)
    assert one.overdue(115.0) == {} and list(one.overdue(116.0)) == [circuit]
    circuit.pumps = {0: None, 1: None}  # type: ignore[dict-item]
    one.carry(circuit, 1, 110.0)
    assert one.overdue(230.0) == {} and one.overdue(231.0) == {circuit: "the circuit was silent"}


def test_bandwidth_and_total_are_bounded() -> None:
    one = state(total_bps=8e6, total_bytes=2_100_001)
    circuit = one.open(ALICE, BOB, 0.0, os.urandom)
    delay_s, fault = one.carry(circuit, 1_100_000, 0.0)
    assert delay_s == pytest.approx(1.0) and fault is None
    assert one.carry(circuit, 1_000_000, 9.0)[1] is None
    assert "has carried its" in str(one.carry(circuit, 1, 9.0)[1])
    with pytest.raises(Refusal, match="has carried its"):
        one.open(ALICE, BOB, 9.0, os.urandom)


def test_the_nearest_relays_are_chosen_and_not_changed_needlessly() -> None:
    assert choose({ALICE: 0.1, BOB: 0.02, CAROL: 0.05}, (), places=2) == [BOB, CAROL]
    assert choose({ALICE: 0.02, BOB: 0.019}, [ALICE], places=1) == [ALICE]
    assert choose({ALICE: 0.1, BOB: 0.019}, [ALICE], places=1) == [BOB]


@asynccontextmanager
async def relayed(
    *relays: Node, quota: RelayQuota | None = None
) -> AsyncIterator[tuple[Node, Node, list[Relay]]]:
    """Alice and bob, neither of whom can be dialled; bob holds a place at each relay."""
    serving = [Relay(relay, quota or RelayQuota()) for relay in relays]
    async with peers("alice", "bob", listen=False) as (alice, bob):
        circuits_of(alice, *relays)
        far = circuits_of(bob, *relays)
        far.start()
        await until(lambda: len(far.places) == len(relays))
        bob.addresses = tuple(address for addresses in far.places.values() for address in addresses)
        alice.learn(bob.contact)
        yield alice, bob, serving


def circuits_of(node: Node, *relays: Node, on_change: Callable[[], None] = lambda: None) -> Circuits:
    return Circuits(node, candidates(*relays), on_change, random.Random(1))


async def test_a_nearer_relay_replaces_the_farthest(monkeypatch: pytest.MonkeyPatch) -> None:
    async with peers("carol", "dave", "erin") as relays, peers("bob", listen=False) as (bob,):
        carol, dave, erin = (relay.id for relay in relays)
        known = [relays[0].contact, relays[1].contact, bob.contact]

        async def rtt(circuits: Circuits, relay: PeerId) -> float:
            return {carol: 0.1, dave: 0.2, erin: 0.01}[relay]

        async def look() -> list[Contact]:
            return known

        monkeypatch.setattr(Circuits, "_rtt", rtt)
        monkeypatch.setattr(module, "RETRY_S", 0.01)
        monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
        for relay in relays:
            Relay(relay)
        circuits = Circuits(bob, look, lambda: None, random.Random(1))
        circuits.start()
        await until(lambda: set(circuits.places) == {carol, dave})
        known.append(relays[2].contact)
        await until(lambda: set(circuits.places) == {carol, erin})


async def test_peers_talk_through_a_relay_that_sees_no_plaintext(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = bytearray()
    pass_on = _Pump.on_message

    def spy(pump: _Pump, data: memoryview) -> None:
        seen.extend(data)
        pass_on(pump, data)

    monkeypatch.setattr(_Pump, "on_message", spy)
    async with peers("carol") as (carol,), relayed(carol) as (alice, bob, (relay,)):
        big = Echo(b"attack at dawn" * 15_000)
        assert await alice.call(bob.id, big, Echo, timeout_s=5) == big
        for one, other in ((alice, bob), (bob, alice)):
            assert one.way_to(other.id) == f"relayed by {short(carol.id)}"
        assert relay.state.carried_bytes > 400_000 and len(seen) > 400_000
        assert not any(text in seen for text in (b"attack at dawn", bob.public_key, alice.id))


async def test_a_relay_that_swaps_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """She shakes hands with both ends, with keys of her own, and passes on their messages."""
    prologue = f"colab_swarm {VERSION} {NodeSettings().run_id}".encode()
    ends = [
        Handshake(initiator=initiator, static=X25519PrivateKey.generate(), prologue=prologue)
        for initiator in (False, True)
    ]
    overheard = bytearray()

    def swap(pump: _Pump, data: memoryview) -> None:
        assert pump.other is not None
        said = ends[0].read(bytes(data))
        overheard.extend(said)
        ends.reverse()  # the two take turns
        pump.other.socket.send_bytes(ends[0].write(said))

    async with peers("carol") as (carol,), relayed(carol) as (alice, bob, _):
        monkeypatch.setattr(_Pump, "on_message", swap)
        with pytest.raises(PeerError, match="signature"):
            await alice.call(bob.id, Echo(b"attack at dawn"), Echo, timeout_s=5)
        assert bob.public_key in overheard  # so far she came
        assert bob.id not in alice.linked() and alice.id not in bob.linked()


async def test_when_a_relay_dies_calls_go_through_another() -> None:
    async with peers("carol", "dave") as nodes, relayed(*nodes) as (alice, bob, relays):
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        path = alice.path_to(bob.id)
        assert path
        (dying,) = [index for index, node in enumerate(nodes) if node.id == path.relay]
        relays[dying].close()
        await nodes[dying].close()
        for _ in range(3):
            with suppress(PeerError):
                await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        assert alice.way_to(bob.id) == f"relayed by {short(nodes[1 - dying].id)}"


async def test_a_relay_keeps_its_rate_and_says_why_it_carries_no_more() -> None:
    quota = RelayQuota(total_bytes=300_000, total_bps=4e6)
    async with peers("carol") as (carol,), relayed(carol, quota=quota) as (alice, bob, (relay,)):
        began_at = asyncio.get_running_loop().time()
        for _ in range(3):
            assert await alice.call(bob.id, Echo(bytes(40_000)), Echo, timeout_s=5)
        seconds = asyncio.get_running_loop().time() - began_at
        assert seconds > 0.1  # 0.24 MB at 0.5 MB/s, after a burst; 0.01 s without a limit
        with pytest.raises(PeerLost, match=r"the relay has carried its 0\.0003 GB"):
            await alice.call(bob.id, Echo(bytes(200_000)), Echo, timeout_s=5)
        relay.state.places.clear()
        with pytest.raises(PeerError, match="holds no place"):
            await alice.call(bob.id, Echo(), Echo, timeout_s=5)


async def test_a_peer_dialled_by_some_needs_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.net.handshake.DETOUR_AFTER_S", 0.0)
    async with peers("carol", "dave") as (carol, dave), relayed(carol) as (_, bob, _):
        carol.learn(dave.contact)
        circuits_of(dave)
        bob.learn(Contact(dave.id, ("ws://127.0.0.1:1",)))  # as if a firewall blocked the way to dave
        assert await bob.call(dave.id, Echo(b"hello"), Echo, timeout_s=5) == Echo(b"hello")
        path = bob.path_to(dave.id)
        assert path and path.relay == carol.id


async def test_nobody_is_led_to_the_relay_back_to_itself_or_to_a_peer_that_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with peers("carol") as (carol,), relayed(carol) as (alice, bob, (relay,)):
        alice.learn(carol.contact)
        for called in (alice.id, carol.id):
            with pytest.raises(CallRefused, match="a third peer"):
                await alice.call(carol.id, module.OpenCircuit(called), module.CircuitTicket, timeout_s=5)
        assert not relay.state.circuits
        monkeypatch.setattr(bob.table, "full", lambda limit: True)
        with pytest.raises(PeerError, match="refused the link"):
            await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        assert bob.linked() == {carol.id} and not relay.state.circuits


@pytest.mark.slow
async def test_a_place_lasts_as_long_as_the_link_which_stays_open_unused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("colab_swarm.net.node.IDLE_LINK_S", 0.05)
    async with peers("carol") as (carol,):
        relay = Relay(carol)
        async with peers("bob", listen=False) as (bob,):
            circuits = circuits_of(bob, carol)
            bob.addresses = (f"{carol.contact.addresses[0]}/relay/{carol.id.hex()}",)
            circuits.start()
            await until(lambda: bool(circuits.places))
            (link,) = carol.table.of(bob.id)
            await until(lambda: asyncio.get_running_loop().time() - link.used_at > 0.2)
            assert set(relay.state.places) == {bob.id} == carol.linked() and circuits.places
        await until(lambda: not relay.state.places and not carol.pinned)
        # one that is not reserved again is given up
        relay.state.places = {ALICE: float("-inf"), BOB: asyncio.get_running_loop().time()}
        carol.pinned |= {ALICE, BOB}
        await until(lambda: carol.pinned == {BOB} == set(relay.state.places))


async def test_a_place_that_the_relay_dropped_is_reserved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "_SECOND_PLACE_S", 0.01)
    changes: list[int] = []
    async with peers("carol") as (carol,), peers("bob", listen=False) as (bob,):
        relay = Relay(carol)
        circuits = circuits_of(bob, carol, on_change=lambda: changes.append(len(circuits.places)))
        circuits.start()
        await until(lambda: changes == [1])
        relay.state.places.clear()
        await until(lambda: bob.id in relay.state.places)
        carol.unserve(module.Reserve)  # as if all places were taken
        await until(lambda: changes == [1, 0])


async def test_a_relay_that_drops_peers_with_a_place_is_retried_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.1)
    reserved_at: list[float] = []
    async with peers("alice", listen=False) as (alice,), peers("carol") as (carol,):

        async def drop(peer: PeerId, message: module.Reserve) -> Ack:
            loop = asyncio.get_running_loop()
            reserved_at.append(loop.time())
            loop.call_later(0.002, lambda: [link.abort("") for link in carol.table.of(peer)])
            return Ack()

        carol.serve(module.Reserve, drop)
        circuits_of(alice, carol).start()
        await until(lambda: len(reserved_at) == 3)
    assert reserved_at[2] - reserved_at[0] >= 2 * 0.08


async def test_a_relay_has_room_for_all_that_one_read_can_bring() -> None:
    async with peers("carol") as (carol,):
        relay, whole_bytes = Relay(carol), module.MAX_MESSAGE_BYTES + 10  # with its head
        for size in (*[module.MAX_MESSAGE_BYTES] * 5, module.SCRATCH_BYTES - 4 * whole_bytes - 4):
            relay.add(memoryview(bytes(size)))  # the first one was received before, in fragments
        assert relay._batched_bytes == module.SCRATCH_BYTES + whole_bytes
