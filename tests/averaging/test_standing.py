"""Patience is earned: the loss by hostile members is bounded, whatever they delay."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.averaging.standing import BURST_S, PART, SHARE, SUSPECTED_S, TELLERS, Standing
from colab_swarm.events import EventLog, Waited

ME, HONEST, KNOWN_ROUNDS = b"me", [b"H%d" % index for index in range(5)], 3


def by_letter(peer: bytes) -> bytes:
    return peer[:1]


@given(st.integers(0, 1 << 32), st.integers(1, 20), st.integers(1, 3), st.booleans())
def test_hostile_vouchers_cost_a_share_of_the_time_and_one_burst_each(
    seed: int, attackers: int, vouchers: int, tellers: bool
) -> None:
    """Any delays, pauses and numbers of identities; at most half of the accounts of a wait are hostile.

    It costs them no less if they tell that they wait for honest peers.
    """
    rng, rounds, now, lost_s, hostile_accounts = random.Random(seed), Counter[bytes](), 0.0, 0.0, set[bytes]()

    def account_of(peer: bytes) -> bytes:
        return peer if peer == ME or rounds[peer] >= KNOWN_ROUNDS else b"voucher " + peer[:1]

    one = Standing(ME, account_of)
    for peer in HONEST * KNOWN_ROUNDS:
        rounds[peer] += 1
    for turn in range(200):
        hostile = {b"%d %d" % (rng.randrange(vouchers), rng.randrange(50)) for _ in range(attackers)}
        kept = sorted(set(map(account_of, hostile)))[: len(HONEST) + 1]
        hostile = {peer for peer in hostile if account_of(peer) in kept}
        hostile_accounts.update(kept)
        beyond = {
            peer: min(
                rng.choice([0.0, 0.5, 3.0, 1e9]) * rng.random(),
                rng.choice([1, 2]) * one.patience_s(peer, now),
            )
            for peer in hostile
        }
        wait_s = max(beyond.values())
        lost_s, now = lost_s + wait_s, now + 1.0 + wait_s + rng.choice([0.0, 5.0]) * rng.random()
        told = {peer: rng.choice([None, *HONEST]) for peer in hostile} if tellers else {}
        charged = one.settle("to come", beyond, [ME, *HONEST, *hostile], now, told)
        paid_s = sum(seconds for peer, seconds in charged.items() if peer in beyond)
        assert paid_s >= wait_s - 1e-9
        if turn % 3 == 0:  # one trains, to be waited for again
            trained = rng.choice(sorted(hostile))
            rounds[trained] += 1
            hostile_accounts.add(account_of(trained))
            one.earn(trained, now)
    assert lost_s <= len(hostile_accounts) * (BURST_S + SHARE * now) + 1e-6


def test_credit_comes_back_by_counted_samples_only() -> None:
    one = Standing(ME, by_letter)
    one.earn(b"a1", 0.0)
    assert one.settle("to come", {b"a1": 10.0}, [ME, b"a1", b"b1"], 0.0) == {b"a1": BURST_S}
    assert one.credit_s(b"a1") == 0.0 and one.credit_s(b"b1") == BURST_S
    assert one.credit_s(b"a2") == 0.0  # another identity of the same invitation
    assert (
        one.settle("to come", {b"a1": 5.0}, [ME, b"a1", b"b1"], 50.0) == {}
    )  # it was not awaited any longer
    one.earn(b"a1", 100.0)
    assert one.credit_s(b"a1") == pytest.approx(SHARE * 100)
    one.earn(b"a1", 1e6)
    assert one.credit_s(b"a1") == BURST_S


def test_nobody_is_charged_if_over_half_of_the_accounts_are_late() -> None:
    one = Standing(ME, by_letter)
    assert one.settle("to come", {b"a1": 9.0, b"b1": 9.0}, [ME, b"a1", b"b1"], 1.0) == {}
    assert one.credit_s(b"a1") == one.credit_s(b"b1") == BURST_S


def test_many_identities_of_one_invitation_are_no_majority() -> None:
    one, ghosts = Standing(ME, by_letter), [b"a%d" % index for index in range(100)]
    assert one.settle("to come", dict.fromkeys(ghosts, 9.0), [ME, b"b1", *ghosts], 1.0) == {
        max(ghosts): BURST_S
    }


def test_who_is_silent_while_awaited_is_suspected_until_it_is_heard_or_for_a_minute() -> None:
    heard_at = {b"a1": 3.0, b"b1": 9.5}
    events = EventLog()
    one = Standing(ME, by_letter, heard_at=lambda peer: heard_at.get(peer, 0.0), events=events)
    assert one.settle("to come", {b"a1": 2.5, b"b1": 2.5}, [ME, b"a1", b"b1", b"c1"], 10.0)
    assert [(told.peer, told.what, told.seconds) for told in events.recent(Waited)] == [
        (peer.hex(), "to come", 2.5) for peer in (b"a1", b"b1")
    ]
    assert one.suspects(10.0) == {b"a1"} and one.patience_s(b"a1", 10.0) == 0.0 < one.patience_s(b"b1", 10.0)
    assert not one.suspects(10.0 + SUSPECTED_S)
    heard_at[b"a1"] = 11.0
    assert not one.suspects(11.0) and one.patience_s(b"a1", 11.0) == (BURST_S - 2.5) / PART


def test_who_has_less_than_half_of_the_usual_credit_organizes_nothing() -> None:
    one, peers = Standing(ME, by_letter), [b"a1", b"a2", b"a3", b"b1", b"c1"]
    one.settle("to come", {b"a1": 0.6 * BURST_S}, [ME, *peers], 0.0)
    assert one.trusted(peers, 0.0) == {b"b1", b"c1"}  # many identities of one invitation set no median
    for peer in (b"b1", b"c1"):  # as where all share a busy machine
        one.settle("to come", {peer: 0.6 * BURST_S}, [ME, *peers], 0.0)
    assert one.trusted(peers, 0.0) == {*peers}


def test_a_claim_about_a_third_peer_counts_only_where_this_one_waited_for_it_too() -> None:
    one, everyone = Standing(ME, by_letter), [ME, b"a1", b"b1", b"c1", b"d1"]
    told = {b"a1": b"b1"}
    assert one.settle("to come", {b"a1": 1.0}, everyone, 1.0, told) == {b"a1": 1.0}
    both = {b"a1": 2.0, b"b1": 1.0}
    assert one.settle("to come", both, everyone, 2.0, told) == {b"b1": 2.0, b"a1": 2.0 * TELLERS}
    for other in (b"a1", b"stranger", ME, None):
        assert set(one.settle("to come", {b"a1": 0.5}, everyone, 3.0, {b"a1": other})) == {b"a1"}
