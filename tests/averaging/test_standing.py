"""Patience is earned: the loss by hostile members is bounded, whatever they delay."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.averaging.standing import BURST_S, KNOWN_ROUNDS, SHARE, Standing

HONEST, USUAL_S = 5, 1.0


def standing() -> Standing:
    return Standing(lambda peer: peer[:1])


@given(st.integers(0, 1 << 32), st.integers(1, HONEST), st.integers(1, 3))
def test_hostile_vouchers_cost_a_share_of_the_time_and_one_burst_each(
    seed: int, attackers: int, vouchers: int
) -> None:
    """Any delays, any pauses, any number of identities in turn; no more than half of a wait's peers are hostile."""
    rng, one, now, lost_s = random.Random(seed), standing(), 0.0, 0.0
    honest = [b"H%d" % index for index in range(HONEST)]
    for turn in range(200):
        hostile = [b"%d %d" % (rng.randrange(vouchers), rng.randrange(1000)) for _ in range(attackers)]
        hostile = list(dict.fromkeys(hostile))
        beyond = {
            peer: min(rng.choice([0.0, 0.5, 3.0, 1e9]) * rng.random(), one.credit_s(peer)) for peer in hostile
        }
        wait_s = max(beyond.values())
        lost_s, now = lost_s + wait_s, now + USUAL_S + wait_s + rng.choice([0.0, 5.0]) * rng.random()
        charged = one.settle(beyond, HONEST + len(hostile), now)
        assert sum(charged.values()) >= wait_s - 1e-9 and set(charged) <= set(beyond)
        for peer in honest:
            one.earn(peer, now)
        if turn % 3 == 0:
            one.earn(rng.choice(hostile), now)  # it trains, to be waited for again
    known = sum(count >= KNOWN_ROUNDS for count in one._counted.values()) - HONEST
    assert lost_s <= (vouchers + known) * (BURST_S + SHARE * now) + 1e-6


def test_credit_comes_back_by_counted_samples_only() -> None:
    one = standing()
    one.earn(b"a1", 0.0)
    assert one.settle({b"a1": 10.0}, 2, 0.0) == {b"a1": 10.0}
    assert one.patience_s(b"a1", USUAL_S) == USUAL_S and one.patience_s(b"b1", USUAL_S) == USUAL_S + BURST_S
    assert one.patience_s(b"a2", USUAL_S) == USUAL_S  # another identity of the same invitation
    assert one.settle({b"a1": 5.0}, 2, 50.0) == {}  # it was not awaited any longer
    one.earn(b"a1", 100.0)
    assert one.credit_s(b"a1") == pytest.approx(SHARE * 100)
    one.earn(b"a1", 1e6)
    assert one.credit_s(b"a1") == BURST_S


def test_a_peer_that_took_part_has_an_account_of_its_own() -> None:
    one = standing()
    for step in range(KNOWN_ROUNDS):
        one.earn(b"a1", float(step))
    one.settle({b"a2": 10.0}, 2, 3.0)
    assert one.credit_s(b"a2") == 0.0 and one.credit_s(b"a1") == BURST_S


def test_nobody_is_charged_if_over_half_are_late() -> None:
    one = standing()
    peers = [b"a1", b"b1", b"c1"]
    assert one.settle({peer: 9.0 for peer in peers[:2]}, 3, 1.0) == {}
    assert {one.credit_s(peer) for peer in peers} == {BURST_S}
