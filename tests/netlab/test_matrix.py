"""Every pair of places: how two peers there come to be linked, and that a tensor passes intact.

``python -m tests.netlab.matrix`` tries each pair more often.
"""

import pytest

from tests.netlab.hosts import create, join
from tests.netlab.matrix import PAIRS, expected_way, lab_of, meet

TENSOR_BYTES = 16 << 20
FIRST_LINK_S = 5.0
CROSSING_TRIES = 3
# Two strict places stand for the others that only a relay joins.
RELAYED = [pair for pair in PAIRS if expected_way(pair) == "relayed" and len({*pair, "public"}) > 2]
TRIED = [
    *(pair for pair in PAIRS if pair not in RELAYED),
    *(pytest.param(pair, marks=pytest.mark.ordeal) for pair in RELAYED),
]


@pytest.mark.slow
@pytest.mark.parametrize("pair", TRIED, ids="-".join)
def test_two_peers_are_linked_and_a_tensor_passes(pair: tuple[str, str]) -> None:
    way = expected_way(pair)
    # where both routers answer by RST the SYNs have to cross in flight: at no distance that is luck, else nearly sure
    crossing = pair == ("answering", "answering")
    for _ in range(CROSSING_TRIES if crossing else 1):
        with lab_of(pair, rtt_s=0.01 if crossing else 0.0) as lab:
            alice, bob = join(lab, create(lab, "pub").invite, "a", "b")
            met = meet(alice, bob, way)
            sent = alice.send(bob, TENSOR_BYTES)
            back = bob.send(alice, TENSOR_BYTES // 16)
        assert met.linked_s < FIRST_LINK_S and sent["intact"] and back["intact"]
        if met.way in way:
            break
    assert met.way in way


@pytest.mark.slow
def test_two_peers_whose_link_breaks_are_punched_again_from_the_same_ports() -> None:
    with lab_of(("masquerade", "masquerade")) as lab:
        alice, bob = join(lab, create(lab, "pub").invite, "a", "b")
        for one, other in ((alice, bob), (bob, alice), (alice, bob)):
            assert meet(one, other, "punched").way == meet(other, one, "punched").way == "punched"
            assert one.ask("drop", other.contact)["dropped"] > 0
            other.ask("path", one.contact, "", FIRST_LINK_S)  # may fail: the link is lost under it


@pytest.mark.slow
def test_loss_does_not_stop_a_punch() -> None:
    with lab_of(("masquerade", "masquerade"), rtt_s=0.06, loss=0.02) as lab:
        alice, bob = join(lab, create(lab, "pub").invite, "a", "b")
        assert meet(alice, bob, "punched").way == "punched"
