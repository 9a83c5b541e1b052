"""Every pair of places: how two peers there come to be linked, and that a tensor passes intact.

``python -m tests.netlab.matrix`` tries each pair more often.
"""

import pytest

from tests.netlab.hosts import create, join
from tests.netlab.matrix import PAIRS, expected_way, lab_of, meet

TENSOR_BYTES = 16 << 20
FIRST_LINK_S = 5.0
# Two strict places, and two usual routers, stand for the others that only a relay joins.
RELAYED = [pair for pair in PAIRS if expected_way(pair) == "relayed" and len({*pair, "public"}) > 2]
TRIED = [
    *(pair for pair in PAIRS if pair not in RELAYED),
    *(pytest.param(pair, marks=pytest.mark.ordeal) for pair in RELAYED),
]


@pytest.mark.slow
@pytest.mark.parametrize("pair", TRIED, ids="-".join)
def test_two_peers_are_linked_and_a_tensor_passes(pair: tuple[str, str]) -> None:
    with lab_of(pair) as lab:
        alice, bob = join(lab, create(lab, "pub").invite, "a", "b")
        met = meet(alice, bob, expected_way(pair))
        sent = alice.send(bob, TENSOR_BYTES)
        back = bob.send(alice, TENSOR_BYTES // 16)
    assert met.linked_s < FIRST_LINK_S and sent["intact"] and back["intact"]
    assert met.way == expected_way(pair)
