"""Decisions of the reachability policy, without a network."""

from __future__ import annotations

from colab_swarm.net.peers import PeerId
from colab_swarm.net.reachability import DialledBack, ReachabilityLevel, ReachabilityPolicy

PUBLIC, PRIVATE, LOOPBACK = "ws://203.0.113.7:4500", "ws://192.168.1.5:4500", "ws://127.0.0.1:4500"
ALICE, BOB, RELAY = PeerId(b"a" * 32), PeerId(b"b" * 32), PeerId(b"r" * 32)
CIRCUIT = f"ws://203.0.113.9:4500/relay/{RELAY.hex()}"
SILENT = "did not answer in 1.5 s"


def policy(*addresses: str) -> ReachabilityPolicy:
    return ReachabilityPolicy(addresses or (LOOPBACK, PRIVATE))


def test_a_public_address_that_answers_is_direct() -> None:
    one = policy(PUBLIC, PRIVATE)
    assert one.decide().level is ReachabilityLevel.UNVERIFIED and one.decide().addresses == (PUBLIC, PRIVATE)
    one.on_report(ALICE, DialledBack("203.0.113.7", ((PUBLIC, ""),)))
    assert one.decide().level is ReachabilityLevel.DIRECT and one.decide().addresses == (PUBLIC,)


def test_a_neighbour_makes_it_a_lan_until_a_peer_outside_fails() -> None:
    one = policy()
    one.on_report(ALICE, DialledBack("192.168.1.5", ((PRIVATE, ""),)))
    assert (
        one.decide().level is ReachabilityLevel.LAN and one.decide().addresses == (PRIVATE,) and one.dialable
    )
    one.on_report(BOB, DialledBack("203.0.113.7", ()))
    decided = one.decide()
    assert (
        decided.level is ReachabilityLevel.OUTGOING and decided.addresses == (PRIVATE,) and not one.dialable
    )
    one.on_places((RELAY,), (CIRCUIT,))
    decided = one.decide()
    assert str(decided) == "relayed by 72727272" and decided.addresses == (CIRCUIT,)


def test_a_punched_link_is_better_than_a_relayed_one_and_a_tunnel_comes_last() -> None:
    one = policy()
    one.on_report(BOB, DialledBack("203.0.113.7", ((PRIVATE, SILENT),)))
    one.on_tunnel("wss://swarm.example")
    assert str(one.decide()) == "tunnel wss://swarm.example"
    one.on_places((RELAY,), (CIRCUIT,))
    assert one.decide().level is ReachabilityLevel.RELAYED
    assert one.decide().addresses == (CIRCUIT, "wss://swarm.example")
    one.on_punched(ALICE, None)
    assert one.decide().level is ReachabilityLevel.PUNCHED
    one.on_punched(ALICE, "the holes did not meet")
    assert one.decide().level is ReachabilityLevel.RELAYED
    one.on_places((), ())
    one.on_tunnel(None, "it was lost")
    assert one.decide().level is ReachabilityLevel.OUTGOING


def test_each_higher_level_says_why_it_does_not_work() -> None:
    one = policy()
    one.on_report(BOB, DialledBack("203.0.113.7", ((PRIVATE, SILENT),)))
    why = dict(one.decide().reasons)
    assert list(why) == [
        ReachabilityLevel.DIRECT,
        ReachabilityLevel.LAN,
        ReachabilityLevel.PUNCHED,
        ReachabilityLevel.RELAYED,
        ReachabilityLevel.TUNNEL,
    ]
    assert why[ReachabilityLevel.DIRECT] == "this machine has no public address"
    assert why[ReachabilityLevel.LAN] == f"dialled back at {PRIVATE}, {SILENT}; a NAT or firewall blocks it"
    assert "tunnel='ngrok'" in why[ReachabilityLevel.TUNNEL]
    assert (
        dict(ReachabilityPolicy(()).decide().reasons)[ReachabilityLevel.DIRECT]
        == "this peer does not listen (listen=False)"
    )
    assert one.decide().explain().splitlines()[0] == "outgoing only"


def test_a_changed_network_voids_the_evidence() -> None:
    one = policy(PUBLIC)
    one.on_report(ALICE, DialledBack("203.0.113.7", ((PUBLIC, ""),)))
    one.on_listening((PRIVATE,))
    assert one.decide().level is ReachabilityLevel.UNVERIFIED and not one.verifiers


def test_addresses_from_the_user_are_announced_unverified() -> None:
    one = ReachabilityPolicy(("ws://swarm.example:4500",), trusted=True)
    assert one.decide().level is ReachabilityLevel.DIRECT and one.decide().addresses == (
        "ws://swarm.example:4500",
    )


def test_private_addresses_without_a_dial_back_are_called_so() -> None:
    assert str(policy().decide()) == "listening in the local network, nobody has tried yet"
    assert str(policy(PUBLIC, PRIVATE).decide()) == "listening, nobody has tried yet"


def test_a_public_address_stays_announced_while_all_see_this_peer_through_a_relay_or_tunnel() -> None:
    one = policy(PUBLIC, PRIVATE)
    one.on_report(ALICE, DialledBack("", ()))
    decided = one.decide()
    assert decided.level is ReachabilityLevel.UNVERIFIED and decided.addresses == (PUBLIC,)
    assert "through a relay or a tunnel" in decided.explain() and not one.dialable  # so it looks for relays
    one.on_places((RELAY,), (CIRCUIT,))
    assert one.decide().level is ReachabilityLevel.RELAYED and one.decide().addresses == (CIRCUIT, PUBLIC)
    one.on_report(BOB, DialledBack("198.51.100.7", ()))
    assert one.decide().addresses == (CIRCUIT,)  # bob sees it elsewhere: behind a NAT
    one.on_report(BOB, DialledBack("203.0.113.7", ((PUBLIC, ""),)))
    assert one.decide().level is ReachabilityLevel.DIRECT
