"""The vector of a round in main memory: what is encoded, what is kept as feedback, what a mean overwrites."""

import numpy as np
import pytest

from colab_swarm.tensors.codecs import ErrorFeedback, codec_of
from colab_swarm.tensors.vector import HostVector

NUMEL = 10_000


def random_values() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(NUMEL).astype(np.float32)


def test_a_piece_is_encoded_as_its_codec_does_and_only_what_a_codec_cuts_off_is_kept() -> None:
    values = random_values()
    feedback = ErrorFeedback(NUMEL)
    vector = HostVector(values, feedback)
    int8 = codec_of("int8")
    encoded = bytes(vector.encode(4096, 9000, int8))
    assert encoded == bytes(int8.encode(values[4096:9000]))
    assert bytes(vector.encode(0, 4096, codec_of("float32"))) == values[:4096].tobytes()
    feedback.settle()
    np.testing.assert_array_equal(
        feedback.residual[4096:9000], values[4096:9000] - int8.decode(encoded, 4904)
    )
    assert not feedback.residual[:4096].any() and not feedback.residual[9000:].any()


def test_a_mean_overwrites_its_piece_only() -> None:
    values = random_values()
    before = values.copy()
    vector = HostVector(values)
    vector.take(10, 20, codec_of("float32"), np.zeros(10, np.float32).tobytes())
    assert not vector.read(10, 20).any()
    assert np.array_equal(values[:10], before[:10]) and np.array_equal(values[20:], before[20:])


@pytest.mark.parametrize("mean", [np.nan, np.inf, -2.0, 1e30])
def test_a_mean_that_nobody_can_have_sent_changes_nothing(mean: float) -> None:
    values = random_values()
    before = values.copy()
    payload = np.full(10, mean, np.float32).tobytes()
    with pytest.raises(ValueError, match="not finite, or far too large"):
        HostVector(values).take(10, 20, codec_of("float32"), payload, most_rms=2.0)
    assert np.array_equal(values, before)


@pytest.mark.parametrize("values", [np.zeros(4), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]])
def test_a_vector_of_another_form_is_refused(values: np.ndarray) -> None:
    with pytest.raises(ValueError, match="float32 values are needed"):
        HostVector(values)
