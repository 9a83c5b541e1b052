"""The bandwidth that a peer learns from rounds."""

from __future__ import annotations

import pytest

from colab_swarm.training.rounds import KEPT_PER_ROUND, ROUNDS, Rate

MB = 1_000_000


def test_a_round_shorter_than_a_second_shows_the_bandwidth() -> None:
    rate = Rate()
    assert rate.known(None) is None and rate.known(5e6) == 5e6
    for _ in range(ROUNDS - 1):
        rate.on_round(2 * MB, 0.1)
        assert rate.known(5e6) == 5e6  # a few rounds may have waited for anything
    rate.on_round(2 * MB, 0.1)
    assert rate.known(5e6) == 160e6
    rate.on_round(1000, 1e-6)  # a few bytes say nothing
    assert rate.known(None) == pytest.approx(160e6 * KEPT_PER_ROUND)


def test_a_lower_bandwidth_is_believed_in_the_end() -> None:
    rate = Rate()
    rate.on_round(2 * MB, 0.1)
    for _ in range(500):
        rate.on_round(2 * MB, 1.0)
    assert rate.known(None) == 16e6


def test_a_budget_bounds_the_reported_bandwidth() -> None:
    rate = Rate()
    assert rate.known(None, 10e6) == 10e6
    for _ in range(ROUNDS):
        rate.on_round(2 * MB, 0.1)
    assert rate.known(None, 10e6) == 10e6
