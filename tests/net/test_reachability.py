"""Decisions of the reachability policy; peers dial each other back, and announce new addresses."""

import random
from collections import Counter
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


async def test_a_peer_is_dialled_back_and_tells_of_addresses_of_its_own() -> None:
    async with peers("alice", "bob") as (alice, bob), watched(alice, bob) as (watch, _):
        assert watch.current.level is ReachabilityLevel.UNVERIFIED
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        assert alice.way_to(bob.id) == "same machine"
        await watch.start()
        current = watch.current
        assert current.level is ReachabilityLevel.LAN and alice.contact.addresses == current.addresses
        assert bob.linked() == {alice.id} and len(bob.table) == 1  # the dial-back left no link
        # of new addresses only sound ones count
        moved = reachability.Moved((PUBLIC, "ws://x/y?z", CIRCUIT))
        await alice.call(bob.id, moved, Ack, timeout_s=5)
        assert bob.contact_of(alice.id).addresses == (PUBLIC, CIRCUIT)


@pytest.mark.slow
async def test_a_peer_behind_a_nat_announces_a_place_at_a_relay_until_it_can_be_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reachability, "CHECK_EVERY_S", 0.01)
    events = EventLog()
    async with peers("alice", "bob", "carol") as (alice, bob, carol):
        Relay(carol)
        async with watched(alice, bob, carol, relays=(carol,), events=events) as (watch, *_):
            for other in (bob, carol):
                await alice.call(other.id, Echo(), Echo, timeout_s=5)
            port, alice.port = alice.port, 1  # no peer listens there: dial-backs are refused
            watch._policy.listening = alice.listening()[:1]
            assert not alice.metered
            await watch.start()
            relayed = f"relayed by {carol.id.hex()[:8]}"
            await until(lambda: str(watch.current) == relayed)
            assert alice.metered and "blocks it" in dict(watch.current.reasons)[ReachabilityLevel.LAN]
            assert events.recent(ReachabilityChanged)[-1].how == relayed  # type: ignore[attr-defined]
            await until(lambda: bob.contact_of(alice.id).addresses == watch.current.addresses)
            assert not bob.contact_of(alice.id).direct
            alice.port = port
            await until(lambda: watch.current.level is ReachabilityLevel.LAN and not watch._policy.places)
            await until(lambda: alice.linked() == watch._policy.reports.keys())
            verified_at, checks, listening = watch._verified_at, Counter[str](), alice.listening

            def count() -> tuple[str, ...]:
                checks["done"] += 1
                return listening()

            monkeypatch.setattr(alice, "listening", count)
            await until(lambda: checks["done"] == 3)
            assert watch._verified_at == verified_at, "it was verified lately"


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


async def test_a_dial_back_names_silent_and_wrong_peers_and_the_next_is_a_minute_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reachability, "PROBE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(reachability, "DIAL_BACK_GAP_S", 60.0)
    async with peers("alice", "bob", "carol", "dave") as (alice, bob, carol, dave), watched(bob):
        deafen(carol)
        nodes = (carol, dave, alice)
        ask = reachability.DialBack(tuple(node.contact.addresses[0] for node in nodes))
        outcomes = (await alice.call(bob.id, ask, DialledBack, timeout_s=5)).outcomes
        (_, silent), (_, wrong), (_, heard) = outcomes
        assert silent == "did not answer in 0.2 s" and "was expected" in wrong and heard == ""
        assert not dave.linked()
        with pytest.raises(CallRefused, match="less than 60 s ago"):
            await alice.call(bob.id, reachability.DialBack(()), DialledBack, timeout_s=5)


NEIGHBOUR = {ALICE: DialledBack("192.168.1.9", ((PRIVATE, ""),))}
BLOCKED = {BOB: DialledBack("203.0.113.7", ((PRIVATE, SILENT),))}
BY_CIRCUIT = {ALICE: DialledBack("", ())}
ELSEWHERE = {BOB: DialledBack("198.51.100.7", ())}
REACHED = {BOB: DialledBack("203.0.113.7", ((PUBLIC, ""),))}
IROH, TUNNEL = f"iroh://{'ab' * 32}@relay.test", "wss://swarm.example"
AT_HOME, AT_LARGE = (LOOPBACK, PRIVATE), (PUBLIC, PRIVATE)
AT_RELAY = {RELAY: (CIRCUIT,)}
UNTRIED = "waiting for the first peer"


HOME, LARGE = {"listening": AT_HOME}, {"listening": AT_LARGE}
BY_RELAY = "relayed by 72727272"


@pytest.mark.parametrize(
    ("evidence", "level", "addresses", "dialable"),
    [
        ({"listening": ()}, "outgoing only", (), False),
        (LARGE, UNTRIED, AT_LARGE, True),
        (LARGE | {"trusted": True}, "direct", AT_LARGE, True),
        (HOME | {"iroh": (IROH,)}, "iroh", (IROH, *AT_HOME), False),
        (HOME | {"reports": NEIGHBOUR}, "LAN", (PRIVATE,), True),
        (HOME | {"reports": NEIGHBOUR, "iroh": (IROH,)}, "LAN", (PRIVATE, IROH), True),
        (HOME | {"reports": NEIGHBOUR | BLOCKED}, "outgoing only", (PRIVATE,), False),
        (HOME | {"reports": BLOCKED, "tunnel": TUNNEL}, f"tunnel {TUNNEL}", (TUNNEL,), False),
        (
            HOME | {"reports": BLOCKED, "tunnel": TUNNEL, "places": AT_RELAY},
            BY_RELAY,
            (CIRCUIT, TUNNEL),
            False,
        ),
        (
            HOME | {"reports": BLOCKED, "iroh": (IROH,), "places": AT_RELAY},
            "iroh",
            (IROH, CIRCUIT, *AT_HOME),
            False,
        ),
        # while all see it through a relay or a tunnel, a public address stays announced, and it looks for relays
        (LARGE | {"reports": BY_CIRCUIT}, UNTRIED, (PUBLIC,), False),
        (LARGE | {"reports": BY_CIRCUIT, "places": AT_RELAY}, BY_RELAY, (CIRCUIT, PUBLIC), False),
        (LARGE | {"reports": BY_CIRCUIT | ELSEWHERE, "places": AT_RELAY}, BY_RELAY, (CIRCUIT,), False),
        (LARGE | {"reports": REACHED, "places": AT_RELAY}, "direct", (PUBLIC,), True),
    ],
)
def test_the_best_level_that_works_is_announced(
    evidence: dict[str, Any], level: str, addresses: tuple[str, ...], dialable: bool
) -> None:
    policy = ReachabilityPolicy(**evidence)
    decided = policy.decide()
    assert (str(decided), decided.addresses, policy.dialable) == (level, addresses, dialable)


def test_each_higher_level_says_why_it_does_not_work() -> None:
    decided = ReachabilityPolicy(AT_HOME, reports=BLOCKED).decide()
    why = dict(decided.reasons)
    assert list(why) == list(ReachabilityLevel)[:5]
    assert why[ReachabilityLevel.DIRECT] == "this machine has no public address"
    assert why[ReachabilityLevel.LAN] == f"dialled back at {PRIVATE}, {SILENT}; a NAT or firewall blocks it"
    assert "tunnel='ngrok'" in why[ReachabilityLevel.TUNNEL]
    assert decided.explain().splitlines()[0] == "outgoing only"
    for evidence, text in (
        ({"listening": ()}, "this peer does not listen (listen=False)"),
        ({"listening": AT_LARGE, "reports": BY_CIRCUIT}, "through a relay or a tunnel"),
        ({"listening": AT_LARGE, "reports": ELSEWHERE}, "no peer outside this network has tried"),
    ):
        assert text in ReachabilityPolicy(**evidence).decide().explain()  # type: ignore[arg-type]
