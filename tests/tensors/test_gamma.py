"""What a codec loses of a vector: within its bound, and sent later by error feedback."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from colab_swarm.errors import StateError
from colab_swarm.tensors import codecs as module
from colab_swarm.tensors.codecs import BLOCK_VALUES, ErrorFeedback, Floats, codec_of
from tests.tensors.test_codecs import KINDS, LARGEST, LENGTHS, host_decode, host_encode

RANGES: dict[str, tuple[float, float]] = {
    "float16": (2.0**-25, module.FLOAT16_MAX),
    "bfloat16": (2.0**-134, 3.3e38),
    "int8": (1e-35, LARGEST),
    **dict.fromkeys(("onebit", "sparseloco"), (2.0**-149, LARGEST)),
    **dict.fromkeys(("float32", "topk:0.0001", "topk:0.01", "topk:0.5"), (0.0, LARGEST)),
}
"""By codec: the largest value that may become 0, and the largest value that it can represent."""
codecs = pytest.mark.parametrize("name", RANGES)
finite = hnp.arrays(
    np.float32, st.integers(0, 300), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


def round_trip(name: str, values: Floats) -> Floats:
    return host_decode(name, host_encode(name, values), len(values))


def vectors(seed: int, steps: int, numel: int) -> Floats:
    return np.random.default_rng(seed).standard_normal((steps, numel), dtype=np.float32)


@pytest.mark.parametrize(
    ("name", "most", "relative", "least"),
    [
        ("float32", LARGEST, 0.0, 0.0),
        ("float16", module.FLOAT16_MAX, 2.0**-11, 2.0**-25),
        ("bfloat16", module.BFLOAT16_MAX, 2.0**-8, 2.0**-134),
    ],
)
@given(values=finite)
@settings(max_examples=50)
def test_casts_stay_within_their_bounds_and_clamp(
    name: str, most: float, relative: float, least: float, values: Floats
) -> None:
    clamped = np.clip(values, -most, most).astype(np.float64)
    lost = np.abs(round_trip(name, values) - clamped)
    assert (lost <= np.maximum(relative * np.abs(clamped), least)).all()


@given(finite, st.sampled_from([0, BLOCK_VALUES - 3, BLOCK_VALUES, 2 * BLOCK_VALUES + 1]))
@settings(max_examples=50)
def test_int8_stays_within_its_bound_in_every_block(values: Floats, padding: int) -> None:
    values = np.concatenate([np.full(padding, 1e-3, np.float32), values])
    decoded = round_trip("int8", values)
    for start in range(0, len(values), BLOCK_VALUES):
        block = values[start : start + BLOCK_VALUES].astype(np.float64)
        got = decoded[start : start + BLOCK_VALUES]
        assert np.isfinite(got).all()
        assert np.abs(got - block).max() <= max(np.abs(block).max() / 250, 1e-35)


def test_onebit_sends_the_means_of_positive_values_and_of_the_rest_of_every_block() -> None:
    decoded = round_trip("onebit", np.array([1, -2, 3, 0, -4], np.float32))
    np.testing.assert_array_equal(decoded, [2, -2, 2, -2, -2])
    values = np.repeat(np.array([3.0, -5.0], np.float32), BLOCK_VALUES)
    np.testing.assert_array_equal(round_trip("onebit", values), values)


def assert_within_gamma(name: str, values: Floats) -> None:
    least, most = RANGES[name]
    values = np.clip(values, np.float32(-most), np.float32(most))
    exact = values.astype(np.float64)
    lost = round_trip(name, values).astype(np.float64) - exact
    gamma = codec_of(name).gamma(len(values))
    assert 0 <= gamma < 1
    assert lost @ lost <= (gamma + 1e-12) * (exact @ exact) + len(values) * least**2


@codecs
@given(values=finite)
@settings(max_examples=20)
def test_the_error_of_any_vector_is_within_gamma(name: str, values: Floats) -> None:
    assert_within_gamma(name, values)


@codecs
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_an_adversarial_vector_is_within_gamma(name: str, kind: str) -> None:
    for numel in LENGTHS:
        assert_within_gamma(name, KINDS[kind](numel).astype(np.float32))


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8", "onebit"])
@given(st.integers(0, 2**32 - 1), st.integers(1, 3 * BLOCK_VALUES), st.floats(-30, 30))
@settings(max_examples=25)
def test_what_a_codec_decodes_it_encodes_to_the_same_bytes(
    name: str, seed: int, numel: int, exponent: float
) -> None:
    """So a mean that another member passes on is known by the digest of its reducer's encoding."""
    values = vectors(seed, 1, numel)[0] * np.float32(2.0**exponent)
    encoded = host_encode(name, values)
    assert host_encode(name, host_decode(name, encoded, numel).copy()) == encoded


@pytest.mark.parametrize("name", ["int8", "onebit", "sparseloco", "topk:0.1"])
@given(seed=st.integers(0, 1 << 32), numel=st.integers(1, 200), cut=st.integers(0, 200))
@settings(max_examples=30)
def test_received_and_residual_sum_to_the_true_values(name: str, seed: int, numel: int, cut: int) -> None:
    feedback, arrived = ErrorFeedback(numel), np.zeros(numel)
    cut = min(cut, numel)
    for meant in vectors(seed, 5, numel):
        for start, piece in ((0, meant[:cut]), (cut, meant[cut:])):
            encoded, decoded = feedback.encode(codec_of(name), start, piece)
            np.testing.assert_array_equal(codec_of(name).decode(encoded, len(piece)), decoded)
            arrived[start : start + len(piece)] += decoded
        feedback.settle()
    np.testing.assert_allclose(arrived + feedback.residual, vectors(seed, 5, numel).sum(0), atol=1e-4)


def test_a_vector_that_was_not_received_changes_nothing_and_a_saved_residual_is_restored() -> None:
    feedback, first, second = ErrorFeedback(10), *vectors(0, 2, 10)
    feedback.encode(codec_of("onebit"), 0, first)
    feedback.settle()
    owed = feedback.residual.copy()
    feedback.encode(codec_of("onebit"), 0, second)
    np.testing.assert_array_equal(feedback.residual, owed)
    restored = ErrorFeedback(10, feedback.state_dict())
    np.testing.assert_array_equal(restored.residual, owed)
    assert restored.residual is not feedback.residual and owed.any()
    feedback.begin()
    feedback.cut_off(2, np.array([3, 4], np.float32), np.array([1, 1], np.float32))
    feedback.settle(2.0)  # pieces without a record lost nothing
    np.testing.assert_array_equal(feedback.residual, [0, 0, 4, 6, 0, 0, 0, 0, 0, 0])
    for residual in (np.zeros(9), np.zeros((2, 5)), np.full(10, np.nan), "none"):
        with pytest.raises(StateError, match="error feedback"):
            ErrorFeedback(10, {"residual": residual})
    with pytest.raises(StateError, match="error feedback"):
        ErrorFeedback(10, {})
