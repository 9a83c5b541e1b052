from __future__ import annotations

import math
from dataclasses import replace

import pytest

from colab_swarm.elastic import schedulers
from colab_swarm.elastic.schedulers import (
    Arrived,
    BoundedStaleness,
    CrashTolerant,
    NormBounded,
    Scheduler,
    StepFacts,
    StepStatus,
    Synchronous,
    VarianceBounded,
)

NOTHING, PART, ALL = Arrived(0.0, 0, False), Arrived(0.6, 20, False), Arrived(1.0, 100, True)


def standing(*arrived: Arrived, overdue: int = 0, lost: int = 0, waited_s: float = 0.0) -> StepStatus:
    """Status of a peer whose gradient has norm 1 and 100 values; what has not arrived is owed."""
    owed = sum(not one.complete for one in arrived)
    peers = 1 + len(arrived) + lost
    return StepStatus(7, peers, 1.0, 100, arrived, overdue, owed, lost, waited_s)


def test_synchronous_waits_for_all_that_are_not_lost() -> None:
    assert Synchronous().may_go_on(standing(ALL, ALL))
    assert Synchronous().may_go_on(standing(ALL, lost=1))
    assert not Synchronous().may_go_on(standing(ALL, NOTHING, overdue=1, waited_s=1e6))


@pytest.mark.parametrize(
    ("beta", "continues"), [(0.0, True), (0.5, True), (0.6, True), (0.7, False), (1.0, False)]
)
def test_norm_bounded_continues_at_a_beta_fraction_of_its_own_norm(beta: float, continues: bool) -> None:
    assert NormBounded(beta).may_go_on(standing(PART)) is continues
    assert NormBounded(beta).may_go_on(standing(ALL))


def test_norm_bounded_may_count_values_instead() -> None:
    assert NormBounded(0.2, "l0").may_go_on(standing(PART))
    assert not NormBounded(0.3, "l0").may_go_on(standing(PART))


def test_norm_bounded_needs_enough_from_every_peer() -> None:
    assert not NormBounded(0.5).may_go_on(standing(ALL, PART, NOTHING))


def test_beta_1_waits_for_the_rest_of_a_gradient_larger_than_the_own() -> None:
    larger = Arrived(5.0, 99, False)
    assert not NormBounded(1.0).may_go_on(standing(larger))
    assert NormBounded(0.99).may_go_on(standing(larger))


@pytest.mark.parametrize("scheduler", [NormBounded(0.0), VarianceBounded(0.0), BoundedStaleness(3)])
def test_no_scheduler_continues_while_something_too_old_is_missing(scheduler: Scheduler) -> None:
    assert scheduler.may_go_on(standing(NOTHING, waited_s=9.0))
    assert not scheduler.may_go_on(standing(NOTHING, overdue=1, waited_s=9.0))
    assert scheduler.ask_again_s(standing(NOTHING, overdue=1)) is None


def test_variance_bounded_continues_after_its_timeout() -> None:
    scheduler = VarianceBounded(timeout_s=0.5)
    assert not scheduler.may_go_on(standing(PART, waited_s=0.4))
    assert scheduler.ask_again_s(standing(PART, waited_s=0.4)) == pytest.approx(0.1)
    assert scheduler.may_go_on(standing(PART, waited_s=0.5))
    assert scheduler.may_go_on(standing(ALL)) and scheduler.ask_again_s(standing(ALL)) is None


def test_asking_a_rounding_error_too_early_does_not_repeat_at_once() -> None:
    asked = VarianceBounded(0.3).ask_again_s(standing(PART, waited_s=0.3 - 1e-15))
    assert asked is not None and asked >= 1e-3


def test_crash_tolerant_leaves_out_one_slow_peer_after_the_timeout_and_a_lost_one_at_once() -> None:
    scheduler = CrashTolerant(f=1, timeout_s=0.5)
    assert scheduler.may_go_on(standing(ALL, lost=1))
    assert not scheduler.may_go_on(standing(ALL, NOTHING, waited_s=0.4))
    assert scheduler.ask_again_s(standing(ALL, NOTHING, waited_s=0.4)) == pytest.approx(0.1)
    assert scheduler.may_go_on(standing(ALL, NOTHING, waited_s=0.5))


def test_crash_tolerant_never_leaves_out_more_than_f() -> None:
    scheduler = CrashTolerant(f=1, timeout_s=0.5)
    for too_much in (standing(NOTHING, NOTHING, waited_s=9.0), standing(NOTHING, lost=1, waited_s=9.0)):
        assert not scheduler.may_go_on(too_much)
        assert scheduler.ask_again_s(replace(too_much, waited_s=0.0)) is None


def test_more_crashes_than_f_raise_the_bound_but_do_not_block() -> None:
    scheduler = CrashTolerant(f=1, timeout_s=0.5)
    assert scheduler.may_go_on(standing(ALL, lost=2))
    assert scheduler.bound(StepFacts(4, 2.0, 1.0)) == pytest.approx(0.5)
    assert scheduler.bound(StepFacts(4, 2.0, 1.0, crashed=2)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("scheduler", "bound"),
    [
        (Synchronous(), 0.0),
        (NormBounded(1.0), 0.0),
        (NormBounded(0.9), 1.5),
        (VarianceBounded(1.0), 3.0),
        (BoundedStaleness(3), 4.5),
        (CrashTolerant(2, 1.0), 1.0),
    ],
)
def test_bounds_are_those_of_table_1(scheduler: Scheduler, bound: float) -> None:
    facts = StepFacts(peers=4, m=2.0, sigma=1.0)
    assert scheduler.bound(facts) == pytest.approx(bound)
    compressed = scheduler.bound(replace(facts, gamma=0.5))
    assert compressed == pytest.approx(bound + 6**0.5 * 2.0)


@pytest.mark.parametrize("gamma", [None, 1.0])
def test_an_unknown_codec_has_no_bound(gamma: float | None) -> None:
    assert Synchronous().bound(StepFacts(4, 2.0, 1.0, gamma)) is None


def test_missing_is_a_share_of_the_others_values() -> None:
    assert standing(ALL, PART).missing == pytest.approx(0.4)
    assert standing(lost=1).missing == 0.0


def test_invalid_settings_are_refused() -> None:
    for make in (
        lambda: NormBounded(1.1),
        lambda: NormBounded(float("nan")),
        lambda: NormBounded(0.5, "l3"),  # type: ignore[arg-type]
        lambda: VarianceBounded(-1.0),
        lambda: BoundedStaleness(0),
        lambda: CrashTolerant(0, 1.0),
        lambda: CrashTolerant(1, float("nan")),
    ):
        with pytest.raises(ValueError, match="="):
            make()


def test_one_peer_is_never_stale_and_many_are_by_tau_gradients() -> None:
    assert schedulers.bounded_staleness(1, 5, 2.0) == 0.0
    assert schedulers.bounded_staleness(2, 1, 2.0) == 1.0
    assert schedulers.bounded_staleness(16, 3, 2.0) == pytest.approx(5.625)


def test_faults_cost_their_share_of_the_mean() -> None:
    assert schedulers.faults(4, 1, 2.0) == 0.5
    assert schedulers.variance_bounded(2.0) == 6.0


def test_no_compression_costs_nothing_and_half_the_square_norm_costs_the_root_of_six() -> None:
    assert schedulers.compression(0.0, 3.0) == 0.0
    assert schedulers.compression(0.5, 1.0) == pytest.approx(math.sqrt(6))
    assert schedulers.compression(0.99, 1.0) == pytest.approx(1000.0, rel=1e-3)


def test_error_feedback_stays_under_the_bound_of_the_worst_compressor() -> None:
    """A compressor that always loses gamma of the square norm, on a constant gradient, loses most."""
    gamma, residual = 0.3, 0.0
    for _ in range(1000):
        residual = math.sqrt(gamma) * (residual + 1.0)
    assert residual < schedulers.compression(gamma, 1.0)
    assert residual > 0.3 * schedulers.compression(gamma, 1.0), "the bound is not vacuous"
