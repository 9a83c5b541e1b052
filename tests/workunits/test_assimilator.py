"""Equation 1 of the VC-ASGD paper, and what it comes to."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.workunits.weights import PIECE, Floats, assimilate


def unrolled(
    first: Floats, results: list[Floats], alphas: list[float]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Equation 2: the parameters after all results at once, in float64."""
    total = math.prod(alphas) * first.astype(np.float64)
    for place, result in enumerate(results):
        total = total + (1 - alphas[place]) * math.prod(alphas[place + 1 :]) * result.astype(np.float64)
    return total


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from((0.0, 0.3, 0.5, 0.7, 2 / 3, 0.95, 0.999)), min_size=1, max_size=20),
)
def test_updates_one_by_one_are_the_unrolled_formula(seed: int, alphas: list[float]) -> None:
    rng = np.random.default_rng(seed)
    first, *results = rng.uniform(-1, 1, (len(alphas) + 1, 50)).astype(np.float32)
    values: Floats = first
    for result, alpha in zip(results, alphas, strict=True):
        values = assimilate(values, result, alpha)
    np.testing.assert_allclose(values, unrolled(first, results, alphas), rtol=0, atol=1e-6)


def test_equal_weights_give_the_closed_form_of_the_paper() -> None:
    alpha, n = 0.95, 12
    first, *results = np.random.default_rng(1).normal(size=(n + 1, 20)).astype(np.float32)
    values: Floats = first
    for result in results:
        values = assimilate(values, result, alpha)
    closed = alpha**n * first + (1 - alpha) * sum(alpha ** (j - 1) * results[n - j] for j in range(1, n + 1))
    np.testing.assert_allclose(values, closed, rtol=0, atol=1e-6)


def test_alpha_0_takes_the_result_bit_for_bit_and_nothing_is_changed_in_place() -> None:
    server, result = np.random.default_rng(1).normal(size=(2, PIECE + 3)).astype(np.float32)
    before = server.copy()
    np.testing.assert_array_equal(assimilate(server, result, 0.0), result)
    np.testing.assert_array_equal(server, before)
    np.testing.assert_array_equal(assimilate(server, server, 0.95), server)
