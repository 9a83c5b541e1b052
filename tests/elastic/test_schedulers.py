import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from colab_swarm.elastic import (
    AdaptiveBeta,
    BoundedStaleness,
    CrashTolerant,
    NormBounded,
    Synchronous,
    VarianceBounded,
)
from colab_swarm.elastic.schedulers import Scheduler, StepFacts, StepStatus

NOTHING, PART, ALL = (0.0, 0), (0.6, 20), (1.0, 100)  # norm and values
LARGER = (5.0, 99)  # than the own gradient, but not complete


def standing(
    *arrived: tuple[float, int], overdue: int = 0, lost: int = 0, waited_s: float = 0.0
) -> StepStatus:
    """Status of a peer whose gradient has norm 1 and 100 values; the values that have not arrived are owed."""
    norms, numels = tuple(norm for norm, _ in arrived), tuple(numel for _, numel in arrived)
    owed = sum(numel < 100 for numel in numels)
    return StepStatus(1.0, 100, norms, numels, overdue, owed, lost, waited_s)


TIMED, TOLERANT = VarianceBounded(timeout_s=0.5), CrashTolerant(f=1, timeout_s=0.5)
CONTINUES = [
    (Synchronous(), standing(ALL, ALL)),
    (Synchronous(), standing(ALL, lost=1)),
    *((NormBounded(beta), standing(PART)) for beta in (0.0, 0.5, 0.6)),
    *((NormBounded(beta), standing(ALL)) for beta in (0.0, 0.7, 1.0)),
    (NormBounded(0.2, "l0"), standing(PART)),
    (NormBounded(0.99), standing(LARGER)),
    *((TIMED, one) for one in (standing(PART, waited_s=0.5), standing(ALL))),
    (TOLERANT, standing(ALL, lost=1)),
    (TOLERANT, standing(ALL, NOTHING, waited_s=0.5)),
    (TOLERANT, standing(ALL, lost=2)),  # more crashes than f do not block
]
WAITS = [
    (Synchronous(), standing(ALL, NOTHING, overdue=1, waited_s=1e6), None),
    *((NormBounded(beta), standing(PART), None) for beta in (0.7, 1.0)),
    (NormBounded(0.3, "l0"), standing(PART), None),
    (NormBounded(0.5), standing(ALL, PART, NOTHING), None),  # it needs enough from every peer
    (NormBounded(1.0), standing(LARGER), None),
    (TIMED, standing(PART, waited_s=0.4), 0.1),
    (VarianceBounded(0.3), standing(PART, waited_s=0.3 - 1e-15), 1e-3),  # clocks round
    (TOLERANT, standing(ALL, NOTHING, waited_s=0.4), 0.1),
    (TOLERANT, standing(NOTHING, NOTHING, waited_s=0.5), None),  # never more than f
    (TOLERANT, standing(NOTHING, lost=1, waited_s=9.0), None),
    *((TOLERANT, one, None) for one in (standing(NOTHING, NOTHING), standing(NOTHING, lost=1))),
]


@pytest.mark.parametrize(("scheduler", "status"), CONTINUES)
def test_a_peer_continues_when_enough_has_arrived(scheduler: Scheduler, status: StepStatus) -> None:
    assert scheduler.may_go_on(status)
    assert scheduler.ask_again_s(status) is None


@pytest.mark.parametrize(("scheduler", "status", "ask_again_s"), WAITS)
def test_a_peer_waits_for_the_rest_or_for_its_timeout(
    scheduler: Scheduler, status: StepStatus, ask_again_s: float | None
) -> None:
    assert not scheduler.may_go_on(status)
    assert scheduler.ask_again_s(status) == (ask_again_s and pytest.approx(ask_again_s))


@pytest.mark.parametrize("scheduler", [NormBounded(0.0), VarianceBounded(0.0), BoundedStaleness(3)])
def test_no_scheduler_continues_while_something_too_old_is_missing(scheduler: Scheduler) -> None:
    assert scheduler.may_go_on(standing(NOTHING, waited_s=9.0))
    assert not scheduler.may_go_on(standing(NOTHING, overdue=1, waited_s=9.0))
    assert scheduler.ask_again_s(standing(NOTHING, overdue=1)) is None


@pytest.mark.parametrize(
    ("scheduler", "bound"),
    [
        *((Synchronous(), 0.0), (NormBounded(1.0), 0.0), (NormBounded(0.9), 1.5)),
        *((VarianceBounded(1.0), 3.0), (BoundedStaleness(3), 4.5), (BoundedStaleness(1), 1.5)),
        *((CrashTolerant(2, 1.0), 1.0), (TOLERANT, 0.5), (AdaptiveBeta(1.0), 1.5)),
        *((BoundedStaleness(tau, stand_in=True), 3 * 3 * tau / 4) for tau in (1, 3)),
        *((CrashTolerant(f, 1.0, stand_in=True), 3 * f / 4) for f in (1, 2)),
    ],
)
def test_bounds_are_those_of_table_1(scheduler: Scheduler, bound: float) -> None:
    facts = StepFacts(peers=4, m=2.0, sigma=1.0)
    assert scheduler.bound(facts) == pytest.approx(bound)
    assert scheduler.bound(replace(facts, gamma=0.5)) == pytest.approx(bound + 6**0.5 * 2.0)
    assert TOLERANT.bound(replace(facts, crashed=2)) == pytest.approx(1.0)  # more than f
    assert all(scheduler.bound(replace(facts, gamma=unknown)) is None for unknown in (None, 1.0))


@pytest.mark.parametrize("make", [BoundedStaleness, partial(CrashTolerant, timeout_s=0.0)])
def test_a_lost_peer_adds_its_stand_ins_that_nobody_can_correct(make: Callable[..., Scheduler]) -> None:
    facts = StepFacts(peers=4, m=2.0, sigma=1.0, largest=3.0)
    for delay, crashed in ((1, 1), (3, 1), (2, 2)):
        scheduler = make(delay, stand_in=True)
        alive = scheduler.bound(facts)
        lost = scheduler.bound(replace(facts, crashed=crashed))
        assert lost == pytest.approx((alive or 0) + crashed * (delay + 1) * 3.0 / 4)


def test_missing_is_a_share_of_the_others_values() -> None:
    assert standing(ALL, PART).missing == pytest.approx(0.4)
    assert standing(lost=1).missing == 0.0


def test_invalid_settings_are_refused() -> None:
    for kind, arguments in (
        *((NormBounded, one) for one in ([1.1], [math.nan], [0.5, "l3"])),
        *((VarianceBounded, [-1.0]), (BoundedStaleness, [0])),
        *((CrashTolerant, one) for one in ([0, 1.0], [1, math.nan])),
        *((AdaptiveBeta, [one]) for one in (0.0, -1.0, math.nan)),
    ):
        with pytest.raises(ValueError, match="="):
            kind(*arguments)
    with pytest.raises(ValueError, match="stand_in=True needs parallel steps"):
        BoundedStaleness(1, stand_in=True, single_steps=True)
    assert BoundedStaleness(1).max_delay == CrashTolerant(1, 0.0).max_delay == 1, "the least"
