"""A relay dies and comes back."""

import time
from pathlib import Path

import pytest

from tests.netlab.hosts import LabPeer, create, join
from tests.netlab.lab import Lab, Site

LIMIT_S = 10.0


def wait_relays(peer: LabPeer, relays: set[str]) -> None:
    until = time.monotonic() + LIMIT_S
    while {address.rpartition("/")[2] for address in peer.look()} != relays:
        assert time.monotonic() < until, f"{peer.contact} is not at {relays}"
        time.sleep(0.05)


@pytest.mark.slow
def test_peers_meet_again_when_the_only_relay_comes_back(tmp_path: Path) -> None:
    with Lab(Site("a"), Site("b")) as lab:
        relay = create(lab, "pub", identity=str(tmp_path / "key"))
        alice, bob = join(lab, relay.invite, "a", "b")
        assert alice.send(bob, 1 << 20)["intact"]
        relay.program.kill()
        assert "error" in alice.ask("path", bob.contact, "", 1.0)
        back = create(lab, "pub", identity=str(tmp_path / "key"))
        assert back.id == relay.id
        for peer in (alice, bob):
            wait_relays(peer, {relay.id})
        assert alice.send(bob, 1 << 20)["intact"]
