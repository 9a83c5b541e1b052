"""Codecs on a device write NumPy's bytes, decode to NumPy's bits, and wait for nothing but a flag. The CPU plays it."""

import contextlib
import hashlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.tensors import device_codecs
from colab_swarm.tensors.codecs import BLOCK_VALUES, MAX_BLOCKS, Floats, codec_of
from colab_swarm.tensors.device import Flag
from colab_swarm.tensors.vectors import BINS, block_count
from tests.tensors.test_codecs import NOT_FINITE, REFUSED
from tests.tensors.test_decoding import ENCODED, NUMEL, RNG_SEED

CASTS = ("float32", "float16", "bfloat16")
NO_SUMS = (*CASTS, "int8", "topk:0.0001", "topk:0.01", "topk:0.5")
NAMES = (*NO_SUMS, "onebit", "sparseloco")
names = pytest.mark.parametrize("name", NAMES)
LENGTHS = (0, 1, 2, 63, 100, 4095, 4096, 4097, 3 * BLOCK_VALUES + 100)
CHUNK = MAX_BLOCKS * BLOCK_VALUES
Vectors: TypeAlias = Callable[[int], npt.NDArray[Any]]
LARGEST = float(np.finfo(np.float32).max)


def normal(numel: int) -> Floats:
    return np.random.default_rng(numel).standard_normal(numel, dtype=np.float32)


def times(scale: float) -> Vectors:
    return lambda numel: np.clip(normal(numel) * np.float64(scale), -LARGEST, LARGEST)


def few_kinds(numel: int) -> Floats:
    """Many values of equal magnitude, of both signs."""
    return np.random.default_rng(numel).integers(-2, 3, numel).astype(np.float32)


def many_scales(numel: int) -> Floats:
    rng = np.random.default_rng(numel)
    return (normal(numel) * 10.0 ** rng.uniform(-44, 38, numel)).astype(np.float32)


def halfway(numel: int) -> npt.NDArray[Any]:
    """Values halfway between two steps of int8, two of float16, or two of bfloat16; and the largest of a block."""
    rng = np.random.default_rng(numel)
    bits = rng.integers(0x40800000, 0x42000000, numel, dtype=np.uint32)
    bits &= rng.choice(np.array([0xFFFFF000, 0xFFFF8000], np.uint32), numel)
    steps = rng.integers(-127, 127, numel) + 0.5
    values = np.where(rng.random(numel) < 0.5, bits.view(np.float32), steps)
    values[::BLOCK_VALUES] = 127.0
    return values


def around_halfway(numel: int) -> npt.NDArray[Any]:
    """Values halfway between two steps of int8 but for the last bits: the last bit of a block's factor decides."""
    rng = np.random.default_rng(numel)
    largest = np.repeat(rng.uniform(1, 2, block_count(numel)), BLOCK_VALUES)[:numel].astype(np.float32)
    steps = rng.integers(-127, 127, numel) + 0.5
    values = (steps * largest / 127).astype(np.float32)
    values.view(np.int32)[:] += rng.integers(-2, 3, numel, dtype=np.int32)
    values[::BLOCK_VALUES] = largest[::BLOCK_VALUES]
    return values


KINDS: dict[str, Vectors] = {
    **{f"times {scale:g}": times(scale) for scale in (1e-38, 1e-35, 1e-20, 1.0, 3e4, 1e20, 1e38)},
    "few kinds": few_kinds,
    "many scales": many_scales,
    "halfway": halfway,
    "around halfway": around_halfway,
    "zeros": np.zeros,
    "negative zeros": lambda numel: -np.zeros(numel),
    "denormals": lambda numel: np.rint(normal(numel) * 3) * 1e-45,
    "zeros of both signs": lambda numel: normal(numel) * 0.0,
    "the largest": lambda numel: np.full(numel, LARGEST),
    "one large value at the end": lambda numel: np.arange(numel) // max(numel - 1, 1) * 1e30,
    "all positive": lambda numel: np.abs(normal(numel)) + 1,
    "all negative": lambda numel: -np.abs(normal(numel)) - 1,
}
kinds = pytest.mark.parametrize("kind", KINDS)


def on_device(encoded: bytes | bytearray | memoryview) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(encoded), np.uint8))


def device_encode(name: str, values: Floats) -> bytes:
    tensor = torch.from_numpy(values.copy())
    encoded = device_codecs.encode(name, tensor)
    assert encoded.dtype == torch.uint8 and encoded.is_contiguous()
    np.testing.assert_array_equal(tensor.numpy().view(np.int32), values.view(np.int32))
    return encoded.numpy().tobytes()


def device_decode(name: str, encoded: bytes | bytearray | memoryview, numel: int) -> Floats:
    tensor = on_device(encoded)
    decoded = device_codecs.decode(name, tensor, numel)
    assert decoded.dtype == torch.float32 and decoded.is_contiguous() and decoded.shape == (numel,)
    assert tensor.numpy().tobytes() == bytes(encoded)
    values: Floats = decoded.numpy()
    return values


def encoded_means(encoded: bytes, count: int) -> Floats:
    return np.frombuffer(encoded, np.float32, count)


def assert_same_bits(got: Floats, expected: Floats) -> None:
    np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("name", NO_SUMS)
@kinds
def test_codecs_without_sums_write_the_bytes_of_numpy(name: str, kind: str) -> None:
    for numel in LENGTHS:
        values = KINDS[kind](numel).astype(np.float32)
        assert device_encode(name, values) == bytes(codec_of(name).encode(values)), numel


@kinds
def test_onebit_writes_the_bits_of_numpy_and_its_means_but_for_the_last_bit(kind: str) -> None:
    for numel in LENGTHS:
        values = KINDS[kind](numel).astype(np.float32)
        got = device_encode("onebit", values)
        expected = bytes(codec_of("onebit").encode(values))
        count = 2 * block_count(numel)
        np.testing.assert_array_max_ulp(encoded_means(got, count), encoded_means(expected, count), maxulp=1)
        assert got[4 * count :] == expected[4 * count :]


def assert_sparseloco_is_numpys(values: Floats) -> None:
    """The codes and places are equal, and the means but for what float32 rounds."""
    got = device_encode("sparseloco", values)
    expected = bytes(codec_of("sparseloco").encode(values))
    assert got[4 * BINS :] == expected[4 * BINS :]
    tolerance = 1e-5 * np.abs(values).max()
    np.testing.assert_allclose(encoded_means(got, BINS), encoded_means(expected, BINS), atol=tolerance)


@kinds
def test_sparseloco_writes_the_codes_and_places_of_numpy_and_its_means_but_for_rounding(kind: str) -> None:
    assert device_encode("sparseloco", normal(0)) == b""
    for numel in LENGTHS[1:]:
        assert_sparseloco_is_numpys(KINDS[kind](numel).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["times 1", "few kinds", "many scales"])
def test_a_whole_chunk_is_encoded_and_decoded_as_by_numpy(kind: str) -> None:
    values = KINDS[kind](CHUNK).astype(np.float32)
    assert_sparseloco_is_numpys(values)
    for name in NAMES:
        encoded = bytes(codec_of(name).encode(values))
        assert_same_bits(device_decode(name, encoded, CHUNK), codec_of(name).decode(encoded, CHUNK))
        if name in NO_SUMS:
            assert device_encode(name, values) == encoded, name


@names
@kinds
def test_decoded_bits_are_those_of_numpy(name: str, kind: str) -> None:
    for numel in LENGTHS:
        encoded = bytes(codec_of(name).encode(KINDS[kind](numel).astype(np.float32)))
        assert_same_bits(device_decode(name, encoded, numel), codec_of(name).decode(encoded, numel))


@pytest.mark.parametrize("name", ENCODED)
def test_decoded_bits_are_those_of_every_processor(name: str) -> None:
    make, digest = ENCODED[name]
    decoded = device_decode(name, make(np.random.default_rng(RNG_SEED)), NUMEL)
    assert hashlib.blake2b(decoded.tobytes(), digest_size=8).hexdigest() == digest


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_all_patterns_of_16_bits_decode_as_by_numpy(name: str) -> None:
    encoded = np.arange(1 << 16, dtype=np.uint16).tobytes()
    assert_same_bits(device_decode(name, encoded, 1 << 16), codec_of(name).decode(encoded, 1 << 16))


def test_zeros_of_onebit_have_the_sign_that_numpy_gives_them() -> None:
    for over in (0.0, -0.0, 1e-45, 1.0):
        for rest in (0.0, -0.0, -1e-45, -1.0):
            encoded = np.array([over, rest], np.float32).tobytes() + bytes([0b10100000])
            assert_same_bits(device_decode("onebit", encoded, 3), codec_of("onebit").decode(encoded, 3))


def outcome(decode: Callable[[], Floats]) -> bytes | None:
    with contextlib.suppress(ValueError):
        return decode().tobytes()
    return None


def assert_same_outcome(name: str, encoded: bytes, numel: int) -> None:
    expected = outcome(lambda: codec_of(name).decode(encoded, numel))
    assert outcome(lambda: device_decode(name, encoded, numel)) == expected


@names
@given(data=st.binary(max_size=300), numel=st.integers(1, 300), seed=st.integers(0, 1 << 32))
@settings(max_examples=60)
def test_any_bytes_are_refused_as_by_numpy_or_decoded_to_its_bits(
    name: str, data: bytes, numel: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    damaged = bytearray(codec_of(name).encode(rng.standard_normal(numel, dtype=np.float32)))
    for _ in range(seed % 10):
        damaged[rng.integers(len(damaged))] = rng.integers(256)
    for encoded in (bytes(damaged), data, (300 * data)[: len(damaged)]):
        assert_same_outcome(name, encoded, numel)


@pytest.mark.parametrize("words", REFUSED)
def test_bytes_that_numpy_refuses_are_refused(words: str) -> None:
    for name, numel, encoded in REFUSED[words]:
        with pytest.raises(ValueError, match=r"scale|not finite|not ascending"):
            device_decode(name, encoded, numel)


@pytest.mark.parametrize(("name", "odd", "numel"), NOT_FINITE)
def test_values_that_numpy_refuses_are_refused(name: str, odd: float, numel: int) -> None:
    for place in (0, numel // 2, numel - 1):
        values = normal(numel)
        values[place] = odd
        with pytest.raises(ValueError, match=rf"not finite cannot travel as {name[:4]}"):
            device_encode(name, values)


@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf])
def test_codecs_that_refuse_nothing_write_what_numpy_writes(odd: float) -> None:
    values = normal(3 * BLOCK_VALUES + 5)
    values[BLOCK_VALUES + 7] = odd
    for name in CASTS:
        assert device_encode(name, values) == bytes(codec_of(name).encode(values)), name
    got, expected = device_encode("int8", values), bytes(codec_of("int8").encode(values))
    scales = np.frombuffer(got, np.float32, 4)
    np.testing.assert_array_equal(scales, np.frombuffer(expected, np.float32, 4))
    np.testing.assert_array_equal(np.isnan(scales), [False, True, False, False])
    steps, expected_steps = (np.frombuffer(encoded, np.int8, offset=16) for encoded in (got, expected))
    of_the_block = slice(BLOCK_VALUES, 2 * BLOCK_VALUES)
    np.testing.assert_array_equal(
        np.delete(steps, of_the_block), np.delete(expected_steps, of_the_block)
    )  # those of the block mean nothing
    with pytest.raises(ValueError, match="scale"):
        device_decode("int8", got, len(values))


@names
def test_a_part_of_a_vector_is_encoded_as_if_it_were_alone(name: str) -> None:
    values = torch.from_numpy(normal(20_000))
    part = device_codecs.encode(name, values[4097:12_345])
    assert torch.equal(part, device_codecs.encode(name, values[4097:12_345].clone()))


@names
@pytest.mark.parametrize("numel", [1, 3 * BLOCK_VALUES + 100])
def test_nothing_waits_for_the_device_but_one_flag_where_a_codec_refuses(
    name: str, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device has no values to wait for."""
    read: list[Flag] = []

    def read_flag(flag: Flag) -> bool:
        read.append(flag)
        return True

    monkeypatch.setattr(Flag, "read", read_flag)
    values = torch.empty(numel, device="meta")
    encoded = device_codecs.encode(name, values)
    assert (encoded.dtype, len(encoded)) == (torch.uint8, codec_of(name).encoded_bytes(numel))
    assert len(read) == (name not in (*CASTS, "int8"))
    decoded = device_codecs.decode(name, encoded, numel)
    assert (decoded.dtype, decoded.shape) == (torch.float32, values.shape)
    assert len(read) == (name not in (*CASTS, "int8")) + (name not in CASTS)


def test_a_device_without_float64_runs_casts_and_int8_only() -> None:
    mps, cuda = torch.device("mps"), torch.device("cuda")
    assert [name for name in NAMES if device_codecs.has_device_form(name, mps)] == [*CASTS, "int8"]
    assert all(device_codecs.has_device_form(name, cuda) for name in NAMES)
    with pytest.raises(ValueError, match="unknown codec"):
        device_codecs.encode("zip", torch.ones(3))
