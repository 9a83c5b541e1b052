from __future__ import annotations

import math

import pytest

from colab_swarm.elastic import schedulers


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
    """One that always loses gamma of the square norm, on a gradient that never changes, loses most."""
    gamma, residual = 0.3, 0.0
    for _ in range(1000):
        residual = math.sqrt(gamma) * (residual + 1.0)
    assert residual < schedulers.compression(gamma, 1.0)
    assert residual > 0.3 * schedulers.compression(gamma, 1.0), "the bound is not vacuous"
