"""Peers dial each other back, and announce new addresses."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from colab_swarm.errors import CallRefused
from colab_swarm.events import EventLog, ReachabilityChanged
from colab_swarm.net import reachability
from colab_swarm.net.addresses import may_dial_back
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact
from colab_swarm.net.reachability import DialBack, DialledBack, ReachabilityLevel, ReachabilityWatch
from colab_swarm.net.relay import Relay
from tests.net.swarm import Echo, peers, until


@asynccontextmanager
async def watched(
    *nodes: Node, relays: tuple[Node, ...] = (), events: EventLog | None = None, **options: Any
) -> AsyncIterator[list[ReachabilityWatch]]:
    async def known() -> list[Contact]:
        return [relay.contact for relay in relays]

    log = events or EventLog()
    watches = [ReachabilityWatch(node, known, log, random.Random(1), **options) for node in nodes]
    yield watches
    for watch in watches:
        await watch.close()


async def test_a_peer_that_is_dialled_back_on_its_own_machine_is_in_the_lan() -> None:
    async with peers("alice", "bob") as (alice, bob), watched(alice, bob) as (watch, _):
        assert watch.current.level is ReachabilityLevel.UNVERIFIED
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        await watch.start()
        assert (
            watch.current.level is ReachabilityLevel.LAN
            and alice.contact.addresses == watch.current.addresses
        )
        assert bob.linked() == {alice.id} and len(bob.linker.table) == 1  # the dial-back left no link


async def test_a_peer_behind_a_nat_gets_a_place_at_a_relay_and_announces_it() -> None:
    events = EventLog()
    async with peers("alice", "bob", "carol") as (alice, bob, carol):
        relay = Relay(carol)
        async with watched(alice, bob, relays=(carol,), events=events) as (watch, _):
            for other in (bob, carol):
                await alice.call(other.id, Echo(), Echo, timeout_s=5)
            alice.port = 1  # no peer listens there: dial-backs are refused
            watch._policy.on_listening(alice.listening()[:1])
            await watch.start()
            assert str(watch.current) == f"relayed by {carol.id.hex()[:8]}"
            assert "blocks it" in dict(watch.current.reasons)[ReachabilityLevel.LAN]
            assert events.recent(ReachabilityChanged)[-1].how == str(watch.current)  # type: ignore[attr-defined]
            await until(lambda: bob.contact_of(alice.id).addresses == watch.current.addresses)
            assert not bob.contact_of(alice.id).direct
        relay.close()


async def test_a_peer_that_does_not_listen_and_finds_no_relay_is_outgoing_only() -> None:
    async with peers("alice", listen=False) as (alice,), peers("bob") as (bob,):
        alice.learn(bob.contact)
        async with watched(alice, use_relays=False) as (watch,):
            await alice.call(bob.id, Echo(), Echo, timeout_s=5)
            await watch.start()
            assert watch.current.level is ReachabilityLevel.OUTGOING
            assert "use_relays=False" in dict(watch.current.reasons)[ReachabilityLevel.RELAYED]


def test_private_addresses_of_other_networks_are_not_tried() -> None:
    assert may_dial_back("ws://203.0.113.7:1", "203.0.113.7")
    assert may_dial_back("ws://192.168.1.9:1", "192.168.1.9") and may_dial_back(
        "ws://127.0.0.1:1", "127.0.0.1"
    )
    assert not may_dial_back("ws://192.168.1.5:1", "203.0.113.7")
    assert not may_dial_back("ws://192.168.1.5:1", "192.168.1.9")
    assert not may_dial_back("ws://127.0.0.1:1", "192.168.1.9")
    assert not may_dial_back("ws://203.0.113.7:1/admin", "203.0.113.7")
    assert not may_dial_back(f"ws://203.0.113.7:1/relay/{'0' * 64}", "203.0.113.7")


async def test_dial_backs_are_limited_in_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "DIAL_BACK_GAP_S", 60.0)
    async with peers("alice", "bob") as (alice, bob), watched(bob):
        found = await alice.call(bob.id, DialBack(alice.contact.addresses), DialledBack, timeout_s=5)
        assert found.outcomes == ((alice.contact.addresses[0], ""),)
        with pytest.raises(CallRefused, match="less than 60 s ago"):
            await alice.call(bob.id, DialBack(()), DialledBack, timeout_s=5)


async def test_a_dial_back_that_meets_another_peer_fails() -> None:
    async with peers("alice", "bob", "carol") as (alice, bob, carol), watched(bob):
        ask = DialBack(carol.contact.addresses)
        ((_, fault),) = (await alice.call(bob.id, ask, DialledBack, timeout_s=5)).outcomes
        assert "was expected" in fault and carol.linked() == frozenset()
