"""Top-k: exactly the largest values arrive, whatever the sample suggested; indices are written tight and checked."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.tensors.codecs import SAMPLE_VALUES, TopK, codec_of

shares = st.sampled_from([0.0001, 0.001, 0.01, 0.07, 0.25, 0.5])


@given(shares, st.integers(1, 3 * SAMPLE_VALUES), st.integers(0, 1 << 32), st.sampled_from([1, 3, 1000]))
@settings(max_examples=60, deadline=None)
def test_exactly_the_largest_values_arrive_unchanged(share: float, numel: int, seed: int, kinds: int) -> None:
    codec, rng = TopK(share), np.random.default_rng(seed)
    values = (rng.integers(-kinds, kinds, numel) * rng.random()).astype(np.float32)  # with many equal ones
    decoded = codec.decode(codec.encode(values), numel)
    sent, count = decoded != 0, math.ceil(share * numel)
    np.testing.assert_array_equal(decoded[sent], values[sent])
    largest = np.sort(np.abs(values))[numel - count :]
    np.testing.assert_array_equal(np.sort(np.abs(decoded))[numel - count :], largest)
    assert sent.sum() <= count


@pytest.mark.parametrize("where", [slice(0, None, 7), slice(0, 2000), slice(-2000, None)])
def test_a_sample_that_misses_the_large_values_costs_only_time(where: slice) -> None:
    numel = 7 * SAMPLE_VALUES
    values = np.full(numel, 1e-3, np.float32)
    values[where] = 1 + np.arange(len(values[where]), dtype=np.float32)
    decoded = TopK(0.01).decode(TopK(0.01).encode(values), numel)
    np.testing.assert_array_equal(
        np.flatnonzero(decoded), np.sort(np.argsort(values)[-TopK(0.01).kept(numel) :])
    )


@given(shares, st.integers(1, 1 << 40))
def test_the_size_is_known_without_the_values_and_near_the_minimum(share: float, numel: int) -> None:
    codec = TopK(share)
    kept = codec.kept(numel)
    index_bits = 8 * (codec.encoded_bytes(numel) - 4 * kept)
    assert index_bits <= kept * (math.log2(numel / kept) + 2) + 16


@given(st.sampled_from([0.01, 0.3]), st.integers(1, 2000), st.integers(0, 1 << 32))
@settings(max_examples=200, deadline=None)
def test_random_bits_for_indices_are_refused_or_ascend_within_the_vector(
    share: float, numel: int, seed: int
) -> None:
    codec, rng = TopK(share), np.random.default_rng(seed)
    kept = codec.kept(numel)
    garbage = np.ones(kept, np.float32).tobytes() + rng.bytes(codec.encoded_bytes(numel) - 4 * kept)
    try:
        decoded = codec.decode(garbage, numel)
    except ValueError as error:
        assert "indices" in str(error)
    else:
        assert np.count_nonzero(decoded) == kept  # no index twice


def test_indices_out_of_order_and_beyond_the_end_are_refused() -> None:
    codec = TopK(0.3)  # 3 of 10 values: 1 low bit, then a string of 7 bits
    ones = np.ones(3, np.float32).tobytes()
    np.testing.assert_array_equal(
        np.flatnonzero(codec.decode(ones + bytes([0b011 << 5, 0b1100001 << 1]), 10)), [0, 1, 9]
    )
    with pytest.raises(ValueError, match="not ascending"):
        codec.decode(ones + bytes([0b101 << 5, 0b1100001 << 1]), 10)
    with pytest.raises(ValueError, match="names 4 indices, 3 expected"):
        codec.decode(ones + bytes([0b011 << 5, 0b1110001 << 1]), 10)
    with pytest.raises(ValueError, match="beyond its end"):
        codec.decode(np.ones(3, np.float32).tobytes() + bytes([0b011 << 5, 0b1100001 << 1]), 9)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused_by_the_decoder(odd: float) -> None:
    encoded = bytearray(TopK(0.3).encode(np.ones(10, np.float32)))
    encoded[:4] = np.float32(odd).tobytes()
    with pytest.raises(ValueError, match="not finite"):
        TopK(0.3).decode(encoded, 10)


@pytest.mark.parametrize("share", ["0.0", "0.00001", "0.6", "0.51"])
def test_a_share_out_of_range_is_refused(share: str) -> None:
    with pytest.raises(ValueError, match=r"the share of values to send must be 0\.0001 to 0\.5"):
        codec_of(f"topk:{share}")


@pytest.mark.parametrize(
    "name",
    ["topk", "topk:", "topk:0", "topk:nan", "topk:.01", "topk:1e-2", "topk: 0.01", "topk:0.01\n", "top:0.1"],
)
def test_a_malformed_share_is_no_codec(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown codec .* topk:0\.01"):
        codec_of(name)


def test_a_share_has_one_spelling() -> None:
    with pytest.raises(ValueError, match=r"as 'topk:0\.01': all peers must use the same name"):
        codec_of("topk:0.010")
    assert codec_of("topk:0.01").name == "topk:0.01"
