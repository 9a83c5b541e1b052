from __future__ import annotations

import contextlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from colab_swarm.tensors.codecs import (
    BFLOAT16_MAX,
    BLOCK_VALUES,
    CODECS,
    FLOAT16_MAX,
    Floats,
    all_finite,
    codec_of,
)

finite = hnp.arrays(
    np.float32, st.integers(0, 200), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)
names = pytest.mark.parametrize("name", [*CODECS, "topk:0.01", "topk:0.3"])


def round_trip(name: str, values: Floats) -> Floats:
    codec = codec_of(name)
    encoded = bytes(codec.encode(values))
    assert len(encoded) == codec.encoded_bytes(len(values))
    return codec.decode(encoded, len(values))


@given(finite)
@settings(max_examples=100, deadline=None)
def test_float32_changes_no_bit(values: Floats) -> None:
    assert round_trip("float32", values).tobytes() == values.tobytes()


@given(finite)
@settings(max_examples=100, deadline=None)
def test_float16_stays_within_its_bound_and_clamps(values: Floats) -> None:
    clamped = np.clip(values, -FLOAT16_MAX, FLOAT16_MAX).astype(np.float64)
    assert (
        np.abs(round_trip("float16", values) - clamped) <= np.maximum(2.0**-11 * np.abs(clamped), 2.0**-25)
    ).all()


@given(finite)
@settings(max_examples=100, deadline=None)
def test_bfloat16_stays_within_its_bound_and_clamps(values: Floats) -> None:
    clamped = np.clip(values, -BFLOAT16_MAX, BFLOAT16_MAX).astype(np.float64)
    assert (
        np.abs(round_trip("bfloat16", values) - clamped) <= np.maximum(2.0**-8 * np.abs(clamped), 2.0**-134)
    ).all()


@given(finite, st.sampled_from([0, BLOCK_VALUES - 3, BLOCK_VALUES, 2 * BLOCK_VALUES + 1]))
@settings(max_examples=100, deadline=None)
def test_int8_stays_within_its_bound_in_every_block(values: Floats, padding: int) -> None:
    values = np.concatenate([np.full(padding, 1e-3, np.float32), values])
    decoded = round_trip("int8", values)
    for start in range(0, len(values), BLOCK_VALUES):
        block, got = (
            values[start : start + BLOCK_VALUES].astype(np.float64),
            decoded[start : start + BLOCK_VALUES],
        )
        assert np.isfinite(got).all()
        assert np.abs(got - block).max() <= max(np.abs(block).max() / 250, 1e-35)


@names
@given(data=st.binary(max_size=300), numel=st.integers(0, 300))
@settings(max_examples=100, deadline=None)
def test_decoders_take_the_right_length_or_raise_value_error(name: str, data: bytes, numel: int) -> None:
    codec = codec_of(name)
    try:
        assert codec.decode(data, numel).shape == (numel,)
    except ValueError:
        assert len(data) != codec.encoded_bytes(numel) or name in ("int8", "onebit", "topk:0.01", "topk:0.3")
    else:
        assert len(data) == codec.encoded_bytes(numel)


@names
@given(numel=st.integers(0, 300), seed=st.integers(0, 1 << 32), damaged=st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_garbage_of_the_right_length_is_decoded_or_refused(
    name: str, numel: int, seed: int, damaged: int
) -> None:
    codec, rng = codec_of(name), np.random.default_rng(seed)
    data = bytearray(codec.encode(rng.standard_normal(numel, dtype=np.float32)))
    for _ in range(damaged if data else 0):
        data[rng.integers(len(data))] = rng.integers(256)
    with contextlib.suppress(ValueError):
        decoded = codec.decode(data, numel)
        assert decoded.shape == (numel,) and decoded.dtype == np.float32
        assert all_finite(decoded) or name in ("float32", "float16", "bfloat16")


@names
def test_decoding_into_scratch_gives_the_same_values(name: str) -> None:
    values = np.random.default_rng(1).standard_normal(5000, dtype=np.float32)
    codec = codec_of(name)
    encoded, scratch = bytes(codec.encode(values)), np.full(6000, 7.0, np.float32)
    np.testing.assert_array_equal(codec.decode(encoded, 5000, scratch=scratch), round_trip(name, values))


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_nan_stays_nan(name: str) -> None:
    values = np.array([1.0, np.nan, -2.0], np.float32)
    np.testing.assert_array_equal(np.isnan(round_trip(name, values)), [False, True, False])


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_an_int8_block_that_is_not_finite_is_refused_by_the_decoder(odd: float) -> None:
    with pytest.raises(ValueError, match="scale"):
        round_trip("int8", np.array([1.0, odd], np.float32))


@pytest.mark.parametrize("name", ["onebit", "topk:0.01", "topk:0.3"])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("numel", [1, 4097, 100_000])
def test_values_that_are_not_finite_are_refused_by_codecs_that_would_spread_them(
    name: str, odd: float, numel: int
) -> None:
    values = np.random.default_rng(numel).standard_normal(numel, dtype=np.float32)
    values[numel // 2] = odd
    with pytest.raises(ValueError, match=rf"not finite cannot travel as {name[:4]}"):
        codec_of(name).encode(values)


def test_onebit_sends_the_means_of_positive_values_and_of_the_rest() -> None:
    np.testing.assert_array_equal(
        round_trip("onebit", np.array([1, -2, 3, 0, -4], np.float32)),
        np.array([2, -2, 2, -2, -2], np.float32),
    )


def test_onebit_scales_every_block_separately() -> None:
    values = np.repeat(np.array([3.0, -5.0], np.float32), BLOCK_VALUES)
    np.testing.assert_array_equal(round_trip("onebit", values), values)


@pytest.mark.parametrize("means", [(np.nan, 0), (np.inf, 0), (1, -np.inf), (-1, 0), (0, 1)])
def test_onebit_means_that_no_encoder_writes_are_refused(means: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="not finite, or of the wrong sign"):
        codec_of("onebit").decode(np.array(means, np.float32).tobytes() + bytes(1), 8)


def test_an_unknown_codec_is_named_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'zip'.*float16"):
        codec_of("zip")


def test_finiteness_is_detected_even_if_the_sum_overflows() -> None:
    assert all_finite(np.array([3e38, 3e38], np.float32))
    assert not all_finite(np.array([1, np.nan], np.float32))
    assert not all_finite(np.array([np.inf, -np.inf], np.float32))


@pytest.mark.slow
def test_casts_without_torch_agree_with_those_through_torch() -> None:
    import torch  # noqa: F401  (loaded: this process casts through it)

    code = (
        "import sys, numpy as np; from colab_swarm.tensors.codecs import CODECS;"
        "assert 'torch' not in sys.modules;"
        "v = np.random.default_rng(3).standard_normal(3000, dtype=np.float32) * 1e5;"
        "print(*(bytes(CODECS[c].encode(v)).hex() for c in ('float16', 'bfloat16')))"
    )
    without = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    values = np.random.default_rng(3).standard_normal(3000, dtype=np.float32) * np.float32(1e5)
    assert without == [bytes(CODECS[name].encode(values)).hex() for name in ("float16", "bfloat16")]
