"""Peers behind all kinds of NATs come and go, and all reach each other at all times."""

import time
from pathlib import Path
from random import Random

import pytest

from tests.netlab.hosts import LabPeer, create, join
from tests.netlab.lab import Lab, Nat, Site

HOSTS = dict.fromkeys("abcd", Nat()) | {"e": Nat(random=True), "f": Nat(only_https=True)}
CALL_S = 5.0
LEAVE_S = 20.0


def meet_all(peers: list[LabPeer]) -> None:
    for k in range(1, len(peers)):
        for n, peer in enumerate(peers):
            peer.tell("path", peers[(n + k) % len(peers)].contact, "", CALL_S)
        answers = [peer.program.line() for peer in peers]
        assert all("path" in answer for answer in answers), answers


def open_files(peer: LabPeer) -> int:
    return len(list(Path(f"/proc/{peer.program.process.pid}/fd").iterdir()))


@pytest.mark.slow
@pytest.mark.ordeal
def test_all_peers_reach_each_other_under_churn_and_the_relays_forget_them() -> None:
    rng = Random(1)
    with Lab(*(Site(host, nat=nat) for host, nat in HOSTS.items()), public=("pub", "pub2")) as lab:
        first = create(lab, "pub")
        relays = [first, *join(lab, first.invite, "pub2", relay=True, port=443)]
        before = sum(map(open_files, relays))
        peers = dict(zip(HOSTS, join(lab, first.invite, *HOSTS), strict=True))
        for _ in range(3):
            meet_all(list(peers.values()))
            killed, leaving = rng.sample(list(HOSTS), 2)
            peers[killed].program.kill()
            peers[leaving].leave()
            peers |= zip((killed, leaving), join(lab, first.invite, killed, leaving), strict=True)
        meet_all(list(peers.values()))
        for peer in peers.values():
            peer.leave()
        until = time.monotonic() + LEAVE_S
        while sum(map(open_files, relays)) > before:
            assert time.monotonic() < until, "the relays keep connections of peers that have left"
            time.sleep(0.1)
