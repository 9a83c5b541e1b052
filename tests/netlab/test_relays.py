"""Relays die, in the middle of a transfer and for good."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.netlab.hosts import LabPeer, create, join
from tests.netlab.lab import Lab, Site

LARGE_BYTES = 256 << 20
LIMIT_S = 10.0


def wait_relays(peer: LabPeer, relays: set[str]) -> None:
    """Until the peer can be reached through exactly these relays (their ids in hex)."""
    until = time.monotonic() + LIMIT_S
    while {address.rpartition("/")[2] for address in peer.look()} != relays:
        assert time.monotonic() < until, f"{peer.contact} is not at {relays}"
        time.sleep(0.05)


def relay_of(answer: dict[str, Any], relays: list[LabPeer]) -> LabPeer:
    return next(relay for relay in relays if relay.id.startswith(answer["path"].removeprefix("relayed by ")))


@pytest.mark.slow
def test_a_transfer_fails_clearly_when_its_relay_is_killed_and_passes_over_another() -> None:
    with Lab(Site("a"), Site("b"), public=("pub", "pub2")) as lab:
        first = create(lab, "pub")
        (second,) = join(lab, first.invite, "pub2", relay=True)
        alice, bob = join(lab, first.invite, "a", "b", punch=False)
        for peer in (alice, bob):
            wait_relays(peer, {first.id, second.id})
        relays = [first, second]
        killed = relay_of(alice.ask("call", bob.contact, LIMIT_S), relays)
        alice.tell("send", bob.contact, LARGE_BYTES)
        assert alice.program.line() == {"half": True}
        killed.program.kill()
        killed_at = time.monotonic()
        failed = alice.program.line(LIMIT_S)
        assert "PeerLost" in failed["error"], failed
        again = alice.send(bob, LARGE_BYTES // 4)
        assert again["intact"] and time.monotonic() - killed_at < LIMIT_S
        assert relay_of(again, relays) is not killed


@pytest.mark.slow
def test_peers_meet_again_when_the_only_relay_comes_back(tmp_path: Path) -> None:
    with Lab(Site("a"), Site("b")) as lab:
        relay = create(lab, "pub", identity=str(tmp_path / "key"))
        alice, bob = join(lab, relay.invite, "a", "b", punch=False)
        assert alice.send(bob, 1 << 20)["intact"]
        relay.program.kill()
        assert "error" in alice.ask("call", bob.contact, 1.0)
        back = create(lab, "pub", identity=str(tmp_path / "key"))
        assert back.id == relay.id
        for peer in (alice, bob):
            wait_relays(peer, {relay.id})
        assert alice.send(bob, 1 << 20)["intact"]
