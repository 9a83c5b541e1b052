"""When a membership is renewed."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.dht.service import DHT, DHTSettings
from colab_swarm.events import EventLog, Fault
from colab_swarm.net.membership import Grant, Membership, MembershipAdmission
from colab_swarm.net.peers import Role
from colab_swarm.sim import SimNetwork
from colab_swarm.trust.member import (
    MAX_RETRY_S,
    RETRY_S,
    TICK_S,
    ClockWatch,
    Credentials,
    RenewalPlan,
    RunMember,
)
from tests.net.swarm import identity

RUN, NOW, LIFE = "my-run-0badcafe", 1_750_000_000.0, 14_400.0
HELD = Membership(RUN, Role.WORKER, b"k" * 32, "", NOW, NOW + LIFE)
GRANT = Grant(RUN, Role.WORKER, b"l" * 32, NOW + LIFE, NOW + LIFE)


def test_a_membership_by_the_authority_is_renewed_at_half_of_its_life() -> None:
    plan = RenewalPlan()
    assert not plan.due(HELD, now=NOW + LIFE / 2 - 1) and plan.due(HELD, now=NOW + LIFE / 2)


def test_a_self_signed_membership_is_renewed_at_once() -> None:
    own = Membership(RUN, Role.WORKER, b"k" * 32, "", NOW, NOW + LIFE, GRANT)
    assert RenewalPlan().due(own, now=NOW)


def test_requests_to_an_absent_authority_become_rarer_but_happen_every_ten_minutes() -> None:
    plan, now, tries = RenewalPlan(), NOW + LIFE / 2, []
    while now < NOW + LIFE:
        if plan.due(HELD, now=now):
            tries.append(now)
            plan.on_failed(now=now)
        now += 10.0
    pauses = [later - sooner for sooner, later in pairwise(tries)]
    assert pauses[:3] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S] and max(pauses) <= MAX_RETRY_S


def test_the_token_is_in_no_repr() -> None:
    assert "hf_secret" not in repr(Credentials(GRANT, identity("link"), "hf_secret"))


@pytest.mark.virtual_time
async def test_a_membership_that_cannot_be_renewed_is_an_event_and_a_retry() -> None:
    def fail() -> float:
        raise ZeroDivisionError("a bug")

    alice, events = SimNetwork().peer("alice"), EventLog()
    dht = DHT(alice, DHTSettings(), random.Random(0))
    admission = MembershipAdmission(RUN, authority=b"a" * 32, own=alice.public_key)
    member = RunMember(alice, dht, admission, events, None, lambda peer, membership: Role.WORKER, fail)
    member.start()
    await asyncio.sleep(1.5 * TICK_S)
    await member.stop()
    faults = [(fault.where, fault.text) for fault in events.recent(Fault) if isinstance(fault, Fault)]
    assert faults == [("renewing the membership", "ZeroDivisionError: a bug")] * 2


def test_half_a_minute_is_not_worth_a_word() -> None:
    assert ClockWatch().on_skew(30.0) is None


def test_a_compensated_skew_is_reported_once() -> None:
    watch = ClockWatch()
    assert watch.on_skew(240.0) == (
        "this machine's clock is 4 minutes behind the other peers': compensated, you need to do nothing"
    )
    assert watch.on_skew(241.0) is None


def test_a_skew_of_more_than_ten_minutes_comes_with_the_fix() -> None:
    watch = ClockWatch()
    watch.on_skew(-590.0)
    text = watch.on_skew(-7200.0)
    assert text is not None
    assert text.startswith("this machine's clock is 2 hours ahead of the other peers': beyond 10 minutes")
    assert "sudo timedatectl set-ntp true" in text and "restart the runtime" in text


def test_the_end_of_a_skew_is_reported() -> None:
    watch = ClockWatch()
    watch.on_skew(100.0)
    assert watch.on_skew(20.0) is None  # not yet clearly
    assert watch.on_skew(1.0) == "this machine's clock is right again"
    assert watch.on_skew(2.0) is None


@given(st.lists(st.floats(-1e9, 1e9), max_size=30))
def test_the_same_skew_is_never_reported_twice(skews: list[float]) -> None:
    watch = ClockWatch()
    for skew in skews:
        watch.on_skew(skew)
        assert watch.on_skew(skew) is None
