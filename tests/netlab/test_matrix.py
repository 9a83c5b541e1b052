"""Pairs of places: how two peers there come to be linked, and that a tensor passes intact."""

import pytest

from tests.netlab.hosts import create, join
from tests.netlab.lab import Lab, Nat, Site

WAY_TIMEOUT_S = 20.0
TENSOR_BYTES = 4 << 20
FIRST_LINK_S = 5.0
NATS = {"masquerade": Nat(), "random": Nat(random=True), "strict": Nat(only_https=True)}
PAIRS = (
    *(("public", "masquerade"), ("public", "strict"), ("neighbour", "neighbour")),
    *(("masquerade", "random"), ("random", "strict")),
)


def lab_of(pair: tuple[str, str]) -> Lab:
    if "neighbour" in pair:
        return Lab(Site("a", "b"))
    places = dict(zip("ab", pair, strict=True))
    sites = [Site(host, nat=NATS[place]) for host, place in places.items() if place in NATS]
    return Lab(*sites, public=("pub", *(host for host, place in places.items() if place == "public")))


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_two_peers_are_linked_and_a_tensor_passes(pair: tuple[str, str]) -> None:
    # Of a public peer and another one, the other one dials; neighbours have addresses of one network.
    dials = "public" in pair and "strict" not in pair
    expected = "direct" if dials or "neighbour" in pair else "relayed"
    with lab_of(pair) as lab:
        alice, bob = join(lab, create(lab, "pub").invite, "a", "b")
        path = alice.ask("path", bob.contact, expected, WAY_TIMEOUT_S, timeout_s=WAY_TIMEOUT_S + 10)
        sent = alice.send(bob, TENSOR_BYTES)
        back = bob.send(alice, TENSOR_BYTES // 16)
    assert path["path"].split()[0] == expected and path["linked_s"] < FIRST_LINK_S
    assert sent["intact"] and back["intact"]
