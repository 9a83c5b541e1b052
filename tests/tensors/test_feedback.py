"""Error feedback: in the long run, the sent values sum to the true ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.errors import StateError
from colab_swarm.tensors.codecs import ErrorFeedback, Floats, codec_of

biased = pytest.mark.parametrize("name", ["int8", "onebit", "topk:0.1"])


def vectors(seed: int, steps: int, numel: int) -> Floats:
    return np.random.default_rng(seed).standard_normal((steps, numel), dtype=np.float32)


@biased
@given(seed=st.integers(0, 1 << 32), numel=st.integers(1, 200), cut=st.integers(0, 200))
@settings(max_examples=30, deadline=None)
def test_received_values_and_the_residual_sum_to_the_true_values(
    name: str, seed: int, numel: int, cut: int
) -> None:
    feedback, arrived = ErrorFeedback(numel), np.zeros(numel)
    cut = min(cut, numel)
    for meant in vectors(seed, 5, numel):
        for start, piece in ((0, meant[:cut]), (cut, meant[cut:])):
            encoded, decoded = feedback.encode(codec_of(name), start, piece)
            np.testing.assert_array_equal(codec_of(name).decode(encoded, len(piece)), decoded)
            arrived[start : start + len(piece)] += decoded
        feedback.settle()
    np.testing.assert_allclose(arrived + feedback.residual, vectors(seed, 5, numel).sum(0), atol=1e-4)


@biased
def test_the_residual_stays_bounded(name: str) -> None:
    """By ``2 sqrt(gamma) / (1 - gamma) max ||g||``, much less in practice; without feedback, losses would sum."""
    feedback, numel = ErrorFeedback(500), 500
    norms = []
    for meant in vectors(0, 200, numel):
        feedback.encode(codec_of(name), 0, meant)
        feedback.settle()
        norms.append(float(np.linalg.norm(feedback.residual)))
    assert max(norms[100:]) <= 1.2 * max(norms[:100])


def test_a_vector_that_was_not_received_changes_nothing() -> None:
    feedback, first, second = ErrorFeedback(10), *vectors(0, 2, 10)
    feedback.encode(codec_of("onebit"), 0, first)
    feedback.settle()
    owed = feedback.residual.copy()
    feedback.encode(codec_of("onebit"), 0, second)
    np.testing.assert_array_equal(feedback.residual, owed)
    feedback.begin()
    feedback.settle()
    assert not feedback.residual.any()


def test_pieces_without_a_record_lose_nothing() -> None:
    feedback = ErrorFeedback(4)
    feedback.begin()
    feedback.cut_off(2, np.array([3, 4], np.float32), np.array([1, 1], np.float32))
    feedback.settle(2.0)
    np.testing.assert_array_equal(feedback.residual, [0, 0, 4, 6])


def test_a_vector_that_is_not_finite_is_refused_and_leaves_the_residual() -> None:
    feedback = ErrorFeedback(2)
    feedback.encode(codec_of("topk:0.5"), 0, np.array([2, 1], np.float32))
    feedback.settle()
    with pytest.raises(ValueError, match="not finite"):
        feedback.encode(codec_of("topk:0.5"), 0, np.array([np.nan, 1], np.float32))
    np.testing.assert_array_equal(feedback.residual, [0, 1])


def test_a_saved_state_is_restored() -> None:
    feedback = ErrorFeedback(10)
    feedback.encode(codec_of("onebit"), 0, vectors(0, 1, 10)[0])
    feedback.settle()
    restored = ErrorFeedback(10, feedback.state_dict())
    np.testing.assert_array_equal(restored.residual, feedback.residual)
    assert restored.residual is not feedback.residual and restored.residual.any()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"residual": torch.zeros(9)},
        {"residual": torch.zeros(2, 5)},
        {"residual": torch.full((10,), float("nan"))},
        {"residual": "none"},
    ],
)
def test_an_invalid_state_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(StateError, match="error feedback"):
        ErrorFeedback(10, state)
