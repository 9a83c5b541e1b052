"""Decisions of the reachability policy; peers dial each other back, and announce new addresses."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from colab_swarm.errors import CallRefused, TunnelError
from colab_swarm.events import EventLog, ReachabilityChanged
from colab_swarm.net import reachability
from colab_swarm.net.carrier import Path
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Ack, PeerId
from colab_swarm.net.reachability import DialledBack, ReachabilityLevel, ReachabilityPolicy
from colab_swarm.net.relay import Relay
from colab_swarm.net.tunnels import TunnelSettings
from tests.net.swarm import Echo, candidates, deafen, peers, until

PUBLIC, PRIVATE, LOOPBACK = "ws://203.0.113.7:4500", "ws://192.168.1.5:4500", "ws://127.0.0.1:4500"
ALICE, BOB, RELAY = PeerId(b"a" * 32), PeerId(b"b" * 32), PeerId(b"r" * 32)
CIRCUIT = f"ws://203.0.113.9:4500/relay/{RELAY.hex()}"
SILENT = "did not answer in 1.5 s"


@asynccontextmanager
async def watched(
    *nodes: Node, relays: tuple[Node, ...] = (), events: EventLog | None = None, **options: Any
) -> AsyncIterator[list[reachability.ReachabilityWatch]]:
    log = events or EventLog()
    given = candidates(*relays), log, random.Random(1)
    watches = [reachability.ReachabilityWatch(node, *given, **options) for node in nodes]
    yield watches
    for watch in watches:
        await watch.close()


async def test_a_peer_that_is_dialled_back_on_its_own_machine_is_in_the_lan() -> None:
    async with peers("alice", "bob") as (alice, bob), watched(alice, bob) as (watch, _):
        assert watch.current.level is ReachabilityLevel.UNVERIFIED
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        assert alice.way_to(bob.id) == "same machine"
        await watch.start()
        current = watch.current
        assert current.level is ReachabilityLevel.LAN and alice.contact.addresses == current.addresses
        assert bob.linked() == {alice.id} and len(bob.table) == 1  # the dial-back left no link


def test_iroh_is_announced_first_where_no_port_leads_to_this_peer() -> None:
    one, by_iroh = policy(PRIVATE), f"iroh://{'ab' * 32}@relay.test"
    one.iroh = (by_iroh,)
    assert one.decide().level is ReachabilityLevel.IROH  # before the first peer, too
    one.reports[BOB] = DialledBack("203.0.113.7", ((PRIVATE, SILENT),))
    one.places = {RELAY: (CIRCUIT,)}
    decided = one.decide()
    assert decided.level is ReachabilityLevel.IROH and decided.addresses[:2] == (by_iroh, CIRCUIT)
    one.reports[BOB] = DialledBack("192.168.1.9", ((PRIVATE, ""),))
    assert one.decide().level is ReachabilityLevel.LAN and by_iroh in one.decide().addresses


async def test_a_peer_behind_a_nat_gets_a_place_at_a_relay_and_announces_it() -> None:
    events = EventLog()
    async with peers("alice", "bob", "carol") as (alice, bob, carol):
        Relay(carol)
        async with watched(alice, bob, relays=(carol,), events=events) as (watch, _):
            for other in (bob, carol):
                await alice.call(other.id, Echo(), Echo, timeout_s=5)
            alice.port = 1  # no peer listens there: dial-backs are refused
            watch._policy.listening = alice.listening()[:1]
            assert not alice.metered
            await watch.start()
            assert str(watch.current) == f"relayed by {carol.id.hex()[:8]}" and alice.metered
            assert "blocks it" in dict(watch.current.reasons)[ReachabilityLevel.LAN]
            assert events.recent(ReachabilityChanged)[-1].how == str(watch.current)  # type: ignore[attr-defined]
            await until(lambda: bob.contact_of(alice.id).addresses == watch.current.addresses)
            assert not bob.contact_of(alice.id).direct


async def test_places_at_relays_are_kept_while_none_can_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "CHECK_EVERY_S", 0.01)
    async with peers("alice", "carol") as (alice, carol):
        Relay(carol)
        async with watched(alice, carol, relays=(carol,)) as (watch, _):
            port, alice.port = alice.port, 1  # no peer listens there
            await alice.call(carol.id, Echo(), Echo, timeout_s=5)
            await watch.start()
            await until(lambda: watch.current.level is ReachabilityLevel.RELAYED)
            alice.port = port
            await until(lambda: watch.current.level is ReachabilityLevel.LAN and not watch._policy.places)
            verified_at = watch._verified_at
            await asyncio.sleep(0.05)  # several checks
            assert watch._verified_at == verified_at


async def test_a_peer_that_does_not_listen_and_finds_no_relay_is_outgoing_only() -> None:
    async with peers("alice", "carol", listen=False) as (alice, carol), peers("bob") as (bob,):
        alice.learn(bob.contact)
        async with watched(alice, bob, use_relays=False) as (watch, _):
            await alice.call(bob.id, Echo(), Echo, timeout_s=5)
            await watch.start()
            assert watch.current.level is ReachabilityLevel.OUTGOING and not watch._policy.reports
            assert "use_relays=False" in dict(watch.current.reasons)[ReachabilityLevel.RELAYED]
        async with watched(carol, tunnel=TunnelSettings("cloudflared")) as (watch,):
            with pytest.raises(TunnelError, match="remove listen=False"):
                await watch.start()


async def test_peers_across_the_internet_verify_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "VERIFIERS", 1)
    monkeypatch.setattr(reachability, "DIAL_BACK_GAP_S", 0.0)
    async with (
        peers("alice", "bob", "carol") as (alice, bob, carol),
        watched(alice, bob, carol) as (watch, *_),
    ):
        for other in (bob, carol):
            await alice.call(other.id, Echo(), Echo, timeout_s=5)
        seen = {bob.id: "127.0.0.1", carol.id: "203.0.113.9"}
        monkeypatch.setattr(alice, "path_to", lambda peer: Path(remote=(seen[peer], 1)))
        for _ in range(8):
            watch._policy.reports.clear()
            await watch.verify()
            assert set(watch._policy.reports) == {carol.id}


async def test_dial_backs_are_limited_in_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "DIAL_BACK_GAP_S", 60.0)
    async with peers("alice", "bob") as (alice, bob), watched(bob):
        ask = reachability.DialBack(alice.contact.addresses)
        found = await alice.call(bob.id, ask, DialledBack, timeout_s=5)
        assert found.outcomes == ((alice.contact.addresses[0], ""),)
        with pytest.raises(CallRefused, match="less than 60 s ago"):
            await alice.call(bob.id, reachability.DialBack(()), DialledBack, timeout_s=5)


async def test_a_dial_back_names_silent_and_wrong_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "PROBE_TIMEOUT_S", 0.2)
    async with peers("alice", "bob", "carol", "dave") as (alice, bob, carol, dave), watched(bob):
        deafen(carol)
        nodes = (carol, dave, alice)
        ask = reachability.DialBack(tuple(node.contact.addresses[0] for node in nodes))
        outcomes = (await alice.call(bob.id, ask, DialledBack, timeout_s=5)).outcomes
        (_, silent), (_, wrong), (_, heard) = outcomes
        assert silent == "did not answer in 0.2 s" and "was expected" in wrong and heard == ""
        assert not dave.linked()


async def test_new_addresses_are_those_of_their_sender_and_only_sound_ones_count() -> None:
    async with peers("alice", "bob") as (alice, bob), watched(bob):
        moved = reachability.Moved((PUBLIC, "ws://x/y?z", CIRCUIT))
        await alice.call(bob.id, moved, Ack, timeout_s=5)
        assert bob.contact_of(alice.id).addresses == (PUBLIC, CIRCUIT)


def policy(*addresses: str) -> ReachabilityPolicy:
    return ReachabilityPolicy(addresses or (LOOPBACK, PRIVATE))


def test_a_neighbour_makes_it_a_lan_until_a_peer_outside_fails() -> None:
    one = policy()
    one.reports[ALICE] = DialledBack("192.168.1.5", ((PRIVATE, ""),))
    assert str(one.decide()) == "LAN" and one.decide().addresses == (PRIVATE,) and one.dialable
    one.reports[BOB] = DialledBack("203.0.113.7", ())
    decided = one.decide()
    assert str(decided) == "outgoing only" and decided.addresses == (PRIVATE,) and not one.dialable
    one.places = {RELAY: (CIRCUIT,)}
    decided = one.decide()
    assert str(decided) == "relayed by 72727272" and decided.addresses == (CIRCUIT,)


def test_a_relay_is_better_than_a_tunnel() -> None:
    one = policy()
    one.reports[BOB] = DialledBack("203.0.113.7", ((PRIVATE, SILENT),))
    one.tunnel = "wss://swarm.example"
    assert str(one.decide()) == "tunnel wss://swarm.example"
    one.places = {RELAY: (CIRCUIT,)}
    assert one.decide().level is ReachabilityLevel.RELAYED
    assert one.decide().addresses == (CIRCUIT, "wss://swarm.example")
    one.places, one.tunnel = {}, None
    assert one.decide().level is ReachabilityLevel.OUTGOING


def test_each_higher_level_says_why_it_does_not_work() -> None:
    one = policy()
    one.reports[BOB] = DialledBack("203.0.113.7", ((PRIVATE, SILENT),))
    why = dict(one.decide().reasons)
    assert list(why) == list(ReachabilityLevel)[:5]
    assert why[ReachabilityLevel.DIRECT] == "this machine has no public address"
    assert why[ReachabilityLevel.LAN] == f"dialled back at {PRIVATE}, {SILENT}; a NAT or firewall blocks it"
    assert "tunnel='ngrok'" in why[ReachabilityLevel.TUNNEL]
    deaf = dict(ReachabilityPolicy(()).decide().reasons)
    assert deaf[ReachabilityLevel.DIRECT] == "this peer does not listen (listen=False)"
    assert one.decide().explain().splitlines()[0] == "outgoing only"


def test_addresses_that_nobody_has_tried_are_called_so_unless_the_user_gave_them() -> None:
    assert policy(PUBLIC, PRIVATE).decide().explain() == "waiting for the first peer"
    assert policy(PUBLIC).dialable and not ReachabilityPolicy(()).dialable
    given = ReachabilityPolicy(("ws://swarm.example:4500",), trusted=True).decide()
    assert given.level is ReachabilityLevel.DIRECT and given.addresses == ("ws://swarm.example:4500",)


def test_a_public_address_stays_announced_while_all_see_this_peer_through_a_relay_or_tunnel() -> None:
    one = policy(PUBLIC, PRIVATE)
    assert one.decide().addresses == (PUBLIC, PRIVATE)
    one.reports[ALICE] = DialledBack("", ())
    decided = one.decide()
    assert decided.level is ReachabilityLevel.UNVERIFIED and decided.addresses == (PUBLIC,)
    assert "through a relay or a tunnel" in decided.explain() and not one.dialable  # so it looks for relays
    one.places = {RELAY: (CIRCUIT,)}
    assert one.decide().level is ReachabilityLevel.RELAYED and one.decide().addresses == (CIRCUIT, PUBLIC)
    one.reports[BOB] = DialledBack("198.51.100.7", ())
    assert one.decide().addresses == (CIRCUIT,)  # bob sees it elsewhere: behind a NAT
    assert "no peer outside this network has tried" in one.decide().explain()
    one.reports[BOB] = DialledBack("203.0.113.7", ((PUBLIC, ""),))
    assert one.decide().level is ReachabilityLevel.DIRECT and one.decide().addresses[-1] == PUBLIC
