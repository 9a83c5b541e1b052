"""``||Q(w) - w||^2 <= gamma ||w||^2``: what elastic consistency asks of a compressor, of each codec (equation 25)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from colab_swarm.tensors.codecs import BLOCK_VALUES, FLOAT16_MAX, Floats, codec_of

DENORMAL = np.float32(1e-45)
LARGEST = np.float32(np.finfo(np.float32).max)
RANGES: dict[str, tuple[float, float]] = {
    "float32": (0.0, float(LARGEST)),
    "float16": (2.0**-25, FLOAT16_MAX),
    "bfloat16": (2.0**-134, 3.3e38),
    "int8": (1e-35, float(LARGEST)),
    "onebit": (2.0**-149, float(LARGEST)),
    "topk:0.0001": (0.0, float(LARGEST)),
    "topk:0.01": (0.0, float(LARGEST)),
    "topk:0.5": (0.0, float(LARGEST)),
}
"""By codec: what it may take for 0, and the largest value that it can tell."""
codecs = pytest.mark.parametrize("name", RANGES)


def assert_within_gamma(name: str, values: Floats) -> None:
    codec, (least, most) = codec_of(name), RANGES[name]
    values = np.clip(values, np.float32(-most), np.float32(most))
    numel = len(values)
    exact = values.astype(np.float64)
    lost = codec.decode(codec.encode(values), numel).astype(np.float64) - exact
    gamma = codec.gamma(numel)
    assert 0 <= gamma < 1
    assert lost @ lost <= (gamma + 1e-12) * (exact @ exact) + numel * least**2


@codecs
@given(
    hnp.arrays(
        np.float32, st.integers(0, 300), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    )
)
@settings(max_examples=150, deadline=None)
def test_the_error_of_any_vector_is_within_gamma(name: str, values: Floats) -> None:
    assert_within_gamma(name, values)


@codecs
@given(
    numel=st.sampled_from([1, 2, BLOCK_VALUES - 1, BLOCK_VALUES, 2 * BLOCK_VALUES + 1, 20_000]),
    seed=st.integers(0, 1 << 32),
    exponent=st.floats(0, 30),
)
@settings(max_examples=40, deadline=None)
def test_the_error_of_vectors_over_many_magnitudes_is_within_gamma(
    name: str, numel: int, seed: int, exponent: float
) -> None:
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.uniform(-exponent, exponent, numel)
    assert_within_gamma(name, (rng.standard_normal(numel) * scales).astype(np.float32))


ADVERSARIAL = {
    "zeros": np.zeros,
    "denormals": lambda numel: np.full(numel, DENORMAL),
    "denormals of both signs": lambda numel: DENORMAL * (-1.0) ** np.arange(numel),
    "one huge value": lambda numel: np.eye(1, numel, numel // 2)[0] * LARGEST,
    "one huge value among small ones": lambda numel: np.eye(1, numel)[0] * LARGEST + 1e-3,
    "huge values": lambda numel: np.full(numel, LARGEST),
    "huge values of both signs": lambda numel: LARGEST * (-1.0) ** np.arange(numel),
    "alternating": lambda numel: (-1.0) ** np.arange(numel),
    "alternating with the period of the sample": lambda numel: np.arange(numel) % 3 == 0,
    "one denormal": lambda numel: np.eye(1, numel)[0] * DENORMAL,
    "one positive": lambda numel: np.eye(1, numel)[0] * 2 - 1,
    "ascending": np.arange,
}


@codecs
@pytest.mark.parametrize("kind", ADVERSARIAL)
@pytest.mark.parametrize("numel", [1, 2, 100, BLOCK_VALUES, BLOCK_VALUES + 1, 50_000])
def test_the_error_of_an_adversarial_vector_is_within_gamma(name: str, kind: str, numel: int) -> None:
    assert_within_gamma(name, ADVERSARIAL[kind](numel).astype(np.float32))


@pytest.mark.parametrize("name", ["onebit", "topk:0.01", "topk:0.5"])
def test_gamma_is_reached_by_some_vector_so_it_is_not_too_large(name: str) -> None:
    """One-bit: a single negative value among zeros. Top-k: values of one magnitude."""
    numel = 1000
    values = np.ones(numel, np.float32) if name.startswith("topk") else -np.eye(1, numel, dtype=np.float32)[0]
    codec = codec_of(name)
    lost = codec.decode(codec.encode(values), numel).astype(np.float64) - values
    assert lost @ lost == pytest.approx(codec.gamma(numel) * (values @ values), rel=1e-6)


@codecs
def test_a_vector_without_values_loses_none(name: str) -> None:
    codec = codec_of(name)
    assert 0 <= codec.gamma(0) < 1 and codec.encoded_bytes(0) == 0
    assert len(codec.encode(np.empty(0, np.float32))) == 0 and len(codec.decode(b"", 0)) == 0
