from __future__ import annotations

import numpy as np
import pytest

from colab_swarm.elastic.schedulers import AdaptiveBeta, NormBounded, StepFacts
from tests.elastic.test_meter import emulate

STEPS, SETTLED = 400, 60


def rms(values: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.slow
@pytest.mark.parametrize("target", [0.1, 0.2, 0.3])
def test_the_measured_distance_stays_under_the_target_and_close_to_it(target: float) -> None:
    """Without waiting it would be 0.4."""
    run = emulate(lambda: AdaptiveBeta(target), STEPS)
    for peer, member in enumerate(run.members):
        exact = [run.exact.distances[peer, step] for step in range(SETTLED, STEPS)]
        assert rms(exact) < target
        assert rms(exact) > 0.6 * target, "there was room"
        windows = [rms(exact[begin : begin + 40]) for begin in range(0, len(exact) - 40, 10)]
        assert max(windows) < 1.1 * target
        assert 0 < np.mean(member.betas[SETTLED:]) < 1


def test_it_does_not_stick_at_beta_1_when_there_is_room() -> None:
    run, synchronous = emulate(lambda: AdaptiveBeta(2.0), 60), emulate(lambda: NormBounded(1.0), 60)
    for member, slow in zip(run.members, synchronous.members, strict=True):
        assert member.betas[0] == 1.0 and member.betas[-1] == 0.0
        assert member.waited_s < 0.8 * slow.waited_s


def test_one_large_distance_is_compensated_by_many_waiting_steps() -> None:
    scheduler = AdaptiveBeta(1.0)
    for _ in range(20):
        scheduler.on_measured(0.0)
    assert scheduler.beta == pytest.approx(0.3)
    scheduler.on_measured(10.0)
    waits = 0
    while scheduler.beta == 1.0:
        scheduler.on_measured(0.0)
        waits += 1
    assert waits >= 20


def test_its_bound_allows_one_step_of_delay_even_while_it_waits() -> None:
    scheduler = AdaptiveBeta(1.0)
    assert scheduler.beta == 1.0
    assert scheduler.bound(StepFacts(peers=2, m=3.0, sigma=1.0)) == 1.5


def test_a_target_that_allows_nothing_is_refused() -> None:
    for target in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="Synchronous"):
            AdaptiveBeta(target)
