"""Two or more real nodes on loopback."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from colab_swarm.errors import CallRefused, PeerLost, PeerUnreachable, WrongPeer
from colab_swarm.events import EventLog, Fault, PeerJoined, PeerLeft
from colab_swarm.net import node
from colab_swarm.net.carrier import LinkType, Path
from colab_swarm.net.link import LinkTable
from colab_swarm.net.peers import CIRCUIT, Contact, Message, PeerId, Stream
from colab_swarm.net.websocket import WebSocket
from tests.net.swarm import Echo, Piece, Talk, deafen, peers, until

SMALL, BIG = PeerId(bytes(32)), PeerId(b"b" * 32)


async def test_two_peers_with_one_identity_say_so() -> None:
    async with peers("alice") as (alice,), peers("alice", "bob") as (twin, bob):
        bob.learn(alice.contact)
        alice.learn(Contact(bob.id, twin.contact.addresses))
        with pytest.raises(WrongPeer, match="key file in use twice"):
            await alice.call(bob.id, Echo(), Echo, timeout_s=5)


async def test_an_address_that_accepts_and_is_silent_delays_the_others_and_does_not_stop_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "DIAL_TIMEOUT_S", 0.2)
    async with peers("alice", "bob", "carol") as (alice, bob, carol):
        deafen(carol)
        alice.learn(carol.contact)
        with pytest.raises(PeerUnreachable, match=r"did not answer in 0\.2 s"):
            await alice.call(carol.id, Echo(), Echo, timeout_s=5)
        alice.learn(Contact(bob.id, carol.contact.addresses + bob.contact.addresses))
        assert await alice.call(bob.id, Echo(b"here"), Echo, timeout_s=5) == Echo(b"here")


async def test_the_fault_of_a_handler_is_an_event() -> None:
    async def answer(peer: PeerId, message: Echo) -> Message:
        raise RuntimeError("a bug")

    async def converse(opening: Talk, stream: Stream) -> None:
        raise RuntimeError("another")

    events = EventLog()
    async with peers("alice") as (alice,), peers("bob", events=events) as (bob,):
        bob.unserve(Echo)
        bob.serve(Echo, answer)
        bob.serve_stream(Talk, converse)
        alice.learn(bob.contact)
        with pytest.raises(CallRefused, match="a bug"):
            await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        with pytest.raises(CallRefused, match="another"):
            await (await alice.stream(bob.id, Talk(), timeout_s=5)).receive(Piece)
    faults = [(fault.where, fault.text) for fault in events.recent(Fault)]
    assert faults == [("call handler", "RuntimeError: a bug"), ("stream handler", "RuntimeError: another")]


@pytest.mark.parametrize(("own", "other"), [(SMALL, BIG), (BIG, SMALL)])
def test_of_links_dialled_at_once_both_ends_use_one_but_a_later_one_wins(own: PeerId, other: PeerId) -> None:
    table: Any = LinkTable(own)
    best, relayed, direct = [], Path(LinkType.RELAYED), Path()
    links = [(BIG, 1.0, relayed), (SMALL, 2.0, relayed), (BIG, 3.0, direct)]
    links += [(SMALL, 4.0, direct), (BIG, 13.9, direct), (BIG, 14.0, direct)]
    for dialler, opened_at, path in links:
        known = {"peer": other, "leaving": False, "remote": SimpleNamespace(path=path)}
        table.add(SimpleNamespace(dialled=dialler == own, opened_at=opened_at, **known))
        best.append(table.best(other).opened_at)
    assert best == [1.0, 2.0, 3.0, 4.0, 4.0, 14.0]


async def test_joining_and_leaving_are_events_and_a_lost_link_is_dialled_again() -> None:
    events, own_events = EventLog(), EventLog()
    async with peers("bob", events=events) as (bob,):
        async with peers("alice", events=own_events) as (alice,):
            bob.learn(alice.contact)
            with pytest.raises(OSError, match="Connect call failed"):
                await asyncio.open_connection("127.0.0.2", alice.port)  # its host is 127.0.0.1
            await bob.call(alice.id, Echo(), Echo, timeout_s=5)
        await until(lambda: not bob.linked())
        assert [event.peer for event in events.recent(PeerJoined)] == [alice.id.hex()]
        left = [(one.peer, one.reason) for one in events.recent(PeerLeft)]
        assert left == [(alice.id.hex(), "the peer left")]
        assert own_events.recent(PeerJoined) and not own_events.recent(PeerLeft)  # the others stay
        async with peers("alice", port=alice.port):
            assert await bob.call(alice.id, Echo(), Echo, timeout_s=5) == Echo()
        await until(lambda: not bob.linked())
        with pytest.raises(PeerUnreachable, match=r"127\.0\.0\.1"):
            await bob.call(alice.id, Echo(), Echo, timeout_s=5)


async def test_an_unused_link_is_closed_and_a_client_modes_link_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "IDLE_LINK_S", 0.05)
    client_mode = peers("carol", listen=False, keep_alive_s=0.1)
    async with peers("alice", "bob", keep_alive_s=0.1) as (alice, bob), client_mode as (carol,):
        carol.learn(bob.contact)
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        await carol.call(bob.id, Echo(), Echo, timeout_s=5)
        await until(lambda: not alice.linked())
        assert bob.linked() == {carol.id}


async def test_a_full_peer_drops_its_longest_unused_link_and_refuses_where_all_are_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def wait(peer: PeerId, message: Talk) -> Message:
        await asyncio.Event().wait()
        return message

    monkeypatch.setattr("colab_swarm.net.link.MAX_CALLS", 1)
    monkeypatch.setattr(node, "MAX_LINKS", 2)
    async with peers("bob", "alice", "carol", "dave") as (bob, alice, carol, dave):
        bob.serve(Talk, wait)
        for caller in (alice, carol, dave):
            await caller.call(bob.id, Echo(), Echo, timeout_s=5)
        await until(lambda: bob.linked() == {carol.id, dave.id})
        assert not any(link.leaving for link in bob.table)
        await until(lambda: not alice.linked())
        calls = [asyncio.create_task(one.call(bob.id, Talk(), Talk, timeout_s=5)) for one in (carol, dave)]
        await until(lambda: repr(list(bob.table)).count("serving=1") == 2)
        assert "accepted" in repr(bob.table.of(carol.id))
        with pytest.raises(PeerUnreachable, match="all busy"):
            await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        with pytest.raises(CallRefused, match=r"1 calls to .* are pending already"):
            await carol.call(bob.id, Echo(), Echo, timeout_s=5)
        await bob.call(alice.id, Echo(), Echo, timeout_s=5)
        assert not any(link.leaving for link in bob.table)  # neither the busy ones nor the new one
        for call in calls:
            call.cancel()


async def test_close_wakes_tasks_that_wait_for_a_link_and_refuses_new_calls() -> None:
    async with peers("alice", "bob") as (alice, bob):
        visitors = deafen(bob)
        call = asyncio.create_task(alice.call(bob.id, Echo(), Echo, timeout_s=10))
        await until(lambda: bool(visitors))
        await alice.close()
        for late in (call, alice.call(bob.id, Echo(), Echo, timeout_s=10)):
            with pytest.raises(PeerLost, match="closed"):
                await late


async def test_a_peer_whose_dial_failed_unforeseen_can_be_dialled_again() -> None:
    async def fail(relay: Contact, peer: PeerId, receiver: object) -> WebSocket:
        raise RuntimeError("a bug")

    events = EventLog()
    async with peers("alice", events=events) as (alice,), peers("bob") as (bob,):
        alice.learn(Contact(bob.id, (f"ws://127.0.0.1:9{CIRCUIT}{'ab' * 32}",)))
        with pytest.raises(PeerUnreachable, match="uses no relays"):
            await alice.call(bob.id, Echo(), Echo, timeout_s=1)
        alice.open_circuit = fail
        with pytest.raises(PeerUnreachable, match=r"failed.*a bug$"):
            await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        alice.learn(bob.contact)
        assert await alice.call(bob.id, Echo(b"hello"), Echo, timeout_s=5) == Echo(b"hello")
    assert len(events.recent(Fault)) == 1
