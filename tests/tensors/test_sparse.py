"""Codecs of few values, the quantiser of 2 bits, and means without their zeros."""

import math

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.tensors import sparse as module
from colab_swarm.tensors import vectors
from colab_swarm.tensors.codecs import BLOCK_VALUES, Floats, codec_of
from colab_swarm.tensors.sparse import SparseLoCo, TopK
from tests.tensors.test_gamma import round_trip

lengths = st.sampled_from(
    [0, 1, 2, 3, 127, 300, BLOCK_VALUES - 1, BLOCK_VALUES, 2 * BLOCK_VALUES + 1, 20_000]
)


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


shares = st.sampled_from([0.0001, 0.001, 0.01, 0.07, 0.25, 0.5])


@given(shares, st.integers(1, 50_000), st.integers(0, 1 << 32), st.sampled_from([1, 3, 1000]))
@settings(max_examples=60)
def test_exactly_the_largest_values_arrive_unchanged(share: float, numel: int, seed: int, kinds: int) -> None:
    codec, rng = TopK(share), np.random.default_rng(seed)
    values = (rng.integers(-kinds, kinds, numel) * rng.random()).astype(np.float32)  # with many equal ones
    decoded = codec.decode(codec.encode(values), numel)
    sent, count = decoded != 0, math.ceil(share * numel)
    np.testing.assert_array_equal(decoded[sent], values[sent])
    largest = np.sort(np.abs(values))[numel - count :]
    np.testing.assert_array_equal(np.sort(np.abs(decoded))[numel - count :], largest)
    assert sent.sum() <= count


scales = st.sampled_from([1e-30, 1e-8, 1.0, 1e20, 1e37])


@given(st.integers(2, 500), scales, st.floats(-3, 3), st.integers(0, 1 << 32))
def test_the_quantiser_keeps_the_sum_and_uses_the_bins_of_the_paper(
    numel: int, scale: float, shift: float, seed: int
) -> None:
    values = ((normal(seed, numel) + np.float32(shift)) * np.float32(scale)).astype(np.float32)
    codes, means = vectors.quantised(values)
    exact = values.astype(np.float64)
    lost = (means[codes].astype(np.float64) - exact).sum()
    assert abs(lost) <= 1e-5 * np.abs(exact).sum()
    places = (exact - exact.mean()) / (6 * exact.std() / 4) + 2
    sure = np.abs(places % 1 - 0.5) > 1e-3  # float32 decides the others
    np.testing.assert_array_equal(codes[sure], np.clip(np.round(places[sure]), 0, 3))


@pytest.mark.parametrize("values", [[1.0, -1.0], [3.0, 3.0], [5.0, 1.0], [-7.5]])
def test_the_quantiser_keeps_what_has_no_more_than_two_values(values: list[float]) -> None:
    np.testing.assert_array_equal(round_trip("sparseloco", np.array(values, np.float32)), values)


@given(lengths, st.integers(0, 1 << 32), st.sampled_from([2, 1000]))
@settings(max_examples=60)
def test_sparseloco_sends_the_largest_of_every_block(numel: int, seed: int, kinds: int) -> None:
    values = np.random.default_rng(seed).integers(1, 1 + kinds, numel).astype(np.float32)
    values *= np.where(normal(seed, numel) > 0, 1, -1)
    codec, decoded = SparseLoCo(), round_trip("sparseloco", values)
    kept = 0
    for start in range(0, numel, BLOCK_VALUES):
        block = np.abs(values[start : start + BLOCK_VALUES])
        count = min(len(block), max(2, len(block) // 128 * 2))
        largest = np.sort(np.argsort(-block, kind="stable")[:count])
        sent = np.flatnonzero(decoded[start : start + BLOCK_VALUES])
        assert set(sent) <= set(largest)  # a mean may be 0
        kept += count
    assert codec.kept(numel) == kept
    size = 16 + math.ceil(kept / 4) + 3 * math.ceil(kept / 2) if numel else 0
    assert codec.encoded_bytes(numel) == len(codec.encode(values)) == size


@given(lengths, st.floats(0, 1), st.integers(0, 1 << 32))
@settings(max_examples=60)
def test_a_mean_without_its_zeros_is_bit_for_bit_the_same(numel: int, density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 16, numel).astype(np.uint16)  # also NaN, infinity and -0.0
    bits[rng.random(numel) >= density] = 0
    bits[:1] = 0x8000
    sparse = module.drop_zeros(bits.tobytes())
    exact_bytes = module.sparse16_bytes(int(np.count_nonzero(bits)), numel)
    assert len(sparse) <= exact_bytes if sparse else exact_bytes >= 2 * numel
    if sparse:
        assert bytes(module.restore_zeros(sparse, numel)) == bits.tobytes()


def mean_of(count: int) -> bytes:
    """A mean of sparse contributions as float16."""
    contributions = [round_trip("sparseloco", one) for one in normal(0, count, 15 * BLOCK_VALUES)]
    return bytes(codec_of("float16").encode(np.mean(contributions, axis=0, dtype=np.float32)))


LISTED = module.drop_zeros(mean_of(4))  # with a list of its different values
LISTED_VALUES = 15 * BLOCK_VALUES


@pytest.mark.parametrize(("count", "times"), [(1, 99), (8, 13)])
def test_means_of_sparse_contributions_are_many_times_smaller(count: int, times: float) -> None:
    halves = mean_of(count)
    sparse = module.drop_zeros(halves)
    assert times * len(sparse) < len(halves)
    assert bytes(module.restore_zeros(sparse, len(halves) // 2)) == halves
    for dense in normal(1, 5000), np.ones(5000, np.float32):
        assert not module.drop_zeros(codec_of("float16").encode(dense))  # at no cost


@given(st.integers(0, 300), st.binary(max_size=200), st.integers(0, 1 << 32))
@settings(max_examples=200)
def test_any_sparse_mean_is_refused_or_has_the_expected_length(numel: int, tail: bytes, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept = int(rng.integers(0, numel + 2))
    room = rng.bytes(max(0, module.sparse16_bytes(min(kept, numel), numel) - 4))
    damaged = bytearray(LISTED)
    damaged[seed % len(damaged)] ^= 1 + seed % 255
    of_garbage = [(tail, numel), (np.uint32(kept).tobytes() + room, numel)]
    of_damage = [(bytes(damaged), LISTED_VALUES), (LISTED[: seed % len(LISTED)], LISTED_VALUES)]
    for buffer, length in of_garbage + of_damage:
        try:
            assert len(module.restore_zeros(buffer, length)) == 2 * length
        except ValueError as error:
            assert "sparse" in str(error) or "encoded bytes" in str(error)


def test_a_sparse_mean_that_claims_too_much_is_refused_before_memory_is_taken() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    frame_at = LISTED.index(b"\x28\xb5\x2f\xfd")
    for buffer, words in (
        (b"\xff" * 4 + LISTED[4:], f"4294967295 values, at most {LISTED_VALUES}"),
        (LISTED[:frame_at] + bomb, "another length"),
    ):
        with pytest.raises(ValueError, match=words):
            module.restore_zeros(buffer, LISTED_VALUES)
