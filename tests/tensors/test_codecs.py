"""Codecs in main memory and on a device write equal bytes, read equal bits and refuse alike.

The CPU plays the device.
"""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.tensors import codecs as module
from colab_swarm.tensors import device_codecs
from colab_swarm.tensors.codecs import BLOCK_VALUES, MAX_BLOCKS, Floats, codec_of
from colab_swarm.tensors.device import Flag
from colab_swarm.tensors.sparse import pack_12
from colab_swarm.tensors.vectors import BINS, block_count

CASTS = ("float32", "float16", "bfloat16")
NAMES = (*module.CODECS, "topk:0.0001", "topk:0.01", "topk:0.3")
names = pytest.mark.parametrize("name", NAMES)
LENGTHS = (0, 1, 63, 4096, 3 * BLOCK_VALUES + 100)
LARGEST = float(np.finfo(np.float32).max)
DENORMAL = 1e-45
ODD = (np.nan, np.inf, -np.inf)
Vectors: TypeAlias = Callable[[int], npt.NDArray[Any]]


def normal(numel: int) -> Floats:
    return np.random.default_rng(numel).standard_normal(numel, dtype=np.float32)


def times(scale: float) -> Vectors:
    return lambda numel: np.clip(normal(numel) * np.float64(scale), -LARGEST, LARGEST)


def one_value(value: float, rest: float = 0.0) -> Vectors:
    return lambda numel: np.where(np.arange(numel) == numel // 2, value, rest)


def many_scales(numel: int) -> npt.NDArray[Any]:
    return normal(numel) * 10.0 ** np.random.default_rng(numel).uniform(-44, 38, numel)


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
    **{f"times {scale:g}": times(scale) for scale in (1e-38, 1.0, 3e4, 1e38)},
    "few kinds": lambda numel: np.random.default_rng(numel).integers(-2, 3, numel),
    "many scales": many_scales,
    "halfway": halfway,
    "around halfway": around_halfway,
    "zeros of both signs": lambda numel: normal(numel) * 0.0,
    "denormals": lambda numel: np.rint(normal(numel) * 3) * DENORMAL,
    "the largest": lambda numel: np.full(numel, LARGEST),
    "the largest of both signs": lambda numel: LARGEST * (-1.0) ** np.arange(numel),
    "one large value at the end": lambda numel: np.arange(numel) // max(numel - 1, 1) * 1e30,
    "the largest among small ones": one_value(LARGEST, 1e-3),
    "one positive": one_value(1.0, -1.0),
    "alternating": lambda numel: (-1.0) ** np.arange(numel),
    "all negative": lambda numel: -np.abs(normal(numel)) - 1,
}
kinds = pytest.mark.parametrize("kind", KINDS)


def host_encode(name: str, values: Floats) -> bytes:
    encoded = bytes(codec_of(name).encode(values))
    assert len(encoded) == codec_of(name).encoded_bytes(len(values))
    return encoded


def host_decode(name: str, encoded: bytes, numel: int) -> Floats:
    """Decode to a new array; the values are the same in memory that was used before."""
    decoded = codec_of(name).decode(encoded, numel)
    again = codec_of(name).decode(encoded, numel, scratch=np.full(numel + 9, 7.0, np.float32))
    assert decoded.dtype == np.float32
    assert_same_bits(again, decoded)
    return decoded


def device_encode(name: str, values: Floats) -> bytes:
    tensor = torch.from_numpy(values.copy())
    encoded = device_codecs.encode(name, tensor)
    assert encoded.dtype == torch.uint8 and encoded.is_contiguous()
    assert_same_bits(tensor.numpy(), values)
    return encoded.numpy().tobytes()


def device_decode(name: str, encoded: bytes, numel: int) -> Floats:
    tensor = torch.from_numpy(np.frombuffer(bytearray(encoded), np.uint8))
    decoded = device_codecs.decode(name, tensor, numel)
    assert decoded.dtype == torch.float32 and decoded.is_contiguous() and decoded.shape == (numel,)
    assert tensor.numpy().tobytes() == encoded
    values: Floats = decoded.numpy()
    return values


PLACES = {"host": (host_encode, host_decode), "device": (device_encode, device_decode)}
places = pytest.mark.parametrize("place", PLACES)


def assert_same_bits(got: Floats, expected: Floats) -> None:
    np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))


def assert_device_is_numpys(name: str, values: Floats) -> None:
    """All bytes are equal but those of means, which round sums."""
    got = device_encode(name, values)
    expected = host_encode(name, values)
    means = 0
    if len(values) and name == "onebit":
        means = 2 * block_count(len(values))
        np.testing.assert_array_max_ulp(floats_in(got, means), floats_in(expected, means), maxulp=1)
    if len(values) and name == "sparseloco":
        means = BINS
        most = 1e-5 * np.abs(values).max()
        np.testing.assert_allclose(floats_in(got, means), floats_in(expected, means), atol=most)
    assert got[4 * means :] == expected[4 * means :]
    assert_same_bits(device_decode(name, expected, len(values)), host_decode(name, expected, len(values)))


def floats_in(encoded: bytes, count: int) -> Floats:
    return np.frombuffer(encoded, np.float32, count)


@names
@kinds
def test_a_device_writes_the_bytes_of_numpy_and_reads_its_bits(name: str, kind: str) -> None:
    for numel in LENGTHS:
        assert_device_is_numpys(name, KINDS[kind](numel).astype(np.float32))


@pytest.mark.slow
def test_a_whole_chunk_is_written_and_read_as_by_numpy() -> None:
    values = many_scales(MAX_BLOCKS * BLOCK_VALUES).astype(np.float32)
    for name in NAMES:
        assert_device_is_numpys(name, values)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_all_patterns_of_16_bits_are_read_as_by_numpy(name: str) -> None:
    encoded = np.arange(1 << 16, dtype=np.uint16).tobytes()
    assert_same_bits(device_decode(name, encoded, 1 << 16), host_decode(name, encoded, 1 << 16))


def test_zeros_of_onebit_have_the_sign_that_numpy_gives_them() -> None:
    for over in (0.0, -0.0, DENORMAL, 1.0):
        for rest in (0.0, -0.0, -DENORMAL, -1.0):
            encoded = floats(over, rest) + bytes([0b10100000])
            assert_same_bits(device_decode("onebit", encoded, 3), host_decode("onebit", encoded, 3))


NUMEL = 40 * BLOCK_VALUES + 1000


def random_floats(rng: np.random.Generator, count: int = NUMEL) -> Floats:
    return (rng.random(count, np.float32) - np.float32(0.5)) * np.float32(1000)


def sixteen_bits(rng: np.random.Generator, *, exponent: int) -> bytes:
    """Any bits but those whose exponent means infinity or NaN."""
    bits = rng.integers(0, 1 << 16, NUMEL, dtype=np.uint16)
    return np.where(bits & exponent == exponent, 0, bits).astype(np.uint16).tobytes()


def int8_bytes(rng: np.random.Generator) -> bytes:
    scales = rng.random(NUMEL // BLOCK_VALUES + 1, np.float32)
    levels = rng.integers(-127, 128, NUMEL, dtype=np.int8)
    return scales.tobytes() + levels.tobytes()


def onebit_bytes(rng: np.random.Generator) -> bytes:
    means = rng.random((NUMEL // BLOCK_VALUES + 1, 2), np.float32) * np.float32([1, -1])
    return means.tobytes() + rng.bytes(-(-NUMEL // 8))


def sparseloco_bytes(rng: np.random.Generator) -> bytes:
    blocks = [BLOCK_VALUES] * (NUMEL // BLOCK_VALUES) + [NUMEL % BLOCK_VALUES]
    kept = [size // 64 if size == BLOCK_VALUES else size // 128 * 2 for size in blocks]
    chosen = [
        np.sort(rng.choice(size, count, replace=False)) for size, count in zip(blocks, kept, strict=True)
    ]
    return random_floats(rng, 4).tobytes() + rng.bytes(-(-sum(kept) // 4)) + pack_12(np.concatenate(chosen))


ENCODED = {
    "float32": (lambda rng: random_floats(rng).tobytes(), "2eef620964558d1c"),
    "float16": (lambda rng: sixteen_bits(rng, exponent=0x7C00), "c67141e0ae41a802"),
    "bfloat16": (lambda rng: sixteen_bits(rng, exponent=0x7F80), "bcded0c1e15c6893"),
    "int8": (int8_bytes, "cb05e284274e3e4c"),
    "onebit": (onebit_bytes, "c5499b64244274bb"),
    "sparseloco": (sparseloco_bytes, "7374024a6f4c71cf"),
    # the choice of the largest compares integers: it is equal on all processors too
    "topk:0.01": (lambda rng: host_encode("topk:0.01", random_floats(rng)), "578e1db79bd4aea9"),
}


@places
@pytest.mark.parametrize("name", ENCODED)
def test_decoded_bits_are_the_same_on_every_processor(name: str, place: str) -> None:
    """So equal means are equal parameters. Encoding rounds sums, which differ in the last bit by processor."""
    make, digest = ENCODED[name]
    _, decode = PLACES[place]
    decoded = decode(name, make(np.random.default_rng(0)), NUMEL)
    assert hashlib.blake2b(decoded.tobytes(), digest_size=8).hexdigest() == digest


def outcome(
    decode: Callable[[str, bytes, int], Floats], name: str, encoded: bytes, numel: int
) -> Floats | None:
    try:
        return decode(name, encoded, numel)
    except ValueError:
        return None


@names
@given(data=st.binary(max_size=300), numel=st.integers(1, 300), seed=st.integers(0, 1 << 32))
@settings(max_examples=50)
def test_any_bytes_are_refused_or_decoded_alike(name: str, data: bytes, numel: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    damaged = bytearray(host_encode(name, rng.standard_normal(numel, dtype=np.float32)))
    for _ in range(seed % 10):
        damaged[rng.integers(len(damaged))] = rng.integers(256)
    for encoded in (data, bytes(damaged), (300 * data)[: len(damaged)]):
        decoded = outcome(host_decode, name, encoded, numel)
        fits = len(encoded) == codec_of(name).encoded_bytes(numel)
        if decoded is None:
            assert not fits or name not in CASTS
            assert outcome(device_decode, name, encoded, numel) is None
        else:
            assert fits and decoded.shape == (numel,)
            assert module.all_finite(decoded) or name in CASTS
            assert_same_bits(device_decode(name, encoded, numel), decoded)


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def sparseloco_with(begin: int, wrong: bytes) -> bytes:
    """64 + 4 values of a vector of 4396: 16 bytes of means, 17 of codes, 102 of places; some are wrong."""
    encoded = bytearray(host_encode("sparseloco", normal(SPARSE_VALUES)))
    encoded[begin : begin + len(wrong)] = wrong
    return bytes(encoded)


SPARSE_VALUES = BLOCK_VALUES + 300
REFUSED: dict[str, list[tuple[str, int, bytes]]] = {
    "scale": [("int8", 1, floats(scale) + b"1") for scale in (*ODD, -1e38, 3e38)],
    "not finite, or of the wrong sign": [
        ("onebit", 8, floats(*means) + b"1")
        for means in ((np.nan, 0), (np.inf, 0), (1, -np.inf), (-1, 0), (0, 1))
    ],
    "not finite": [
        *(("topk:0.3", 1, floats(odd) + b"\x80") for odd in ODD),
        *(("sparseloco", SPARSE_VALUES, sparseloco_with(12, floats(odd))) for odd in ODD),
    ],
    "indices": [  # 3 of 10 values: a low bit of each, then a string of 7 bits
        ("topk:0.3", numel, floats(1, 1, 1) + bytes([lows << 5, highs << 1]))
        for lows, highs, numel in (
            *((0b101, 0b1100001, 10), (0b111, 0b1100001, 10), (0b011, 0b1100001, 9)),
            *((0b011, 0b1110001, 10), (0b011, 0b1000001, 10), (0b011, 0b0000000, 10)),
        )
    ],
    "not ascending, or beyond its end": [
        ("sparseloco", SPARSE_VALUES, sparseloco_with(33, bytes(3))),  # twice place 0
        ("sparseloco", SPARSE_VALUES, sparseloco_with(132, pack_12(np.array([299, 300])))),
    ],
}
"""By reason: codec, number of values, and bytes that no encoder writes."""


@places
@pytest.mark.parametrize("words", REFUSED)
def test_bytes_that_no_encoder_writes_are_refused(words: str, place: str) -> None:
    _, decode = PLACES[place]
    if place == "device":
        words_there = r"scale|not finite|not ascending"
    else:
        words_there = words
    for name, numel, encoded in REFUSED[words]:
        assert len(encoded) == codec_of(name).encoded_bytes(numel)
        with pytest.raises(ValueError, match=words_there):
            decode(name, encoded, numel)
    topk = decode("topk:0.3", floats(1, 1, 1) + bytes([0b011 << 5, 0b1100001 << 1]), 10)
    np.testing.assert_array_equal(np.flatnonzero(topk), [0, 1, 9])


@places
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["onebit", "sparseloco", "topk:0.01", "topk:0.3"])
def test_values_that_a_codec_would_spread_over_a_block_are_refused(name: str, odd: float, place: str) -> None:
    encode, _ = PLACES[place]
    for numel in (1, 9000):
        for at in (0, numel // 2, numel - 1):
            values = normal(numel)
            values[at] = odd
            with pytest.raises(ValueError, match=rf"not finite cannot travel as {name[:4]}"):
                encode(name, values)


@places
@pytest.mark.parametrize("odd", ODD)
def test_values_that_are_not_finite_stay_or_are_refused_by_the_decoder(odd: float, place: str) -> None:
    encode, decode = PLACES[place]
    values = normal(3 * BLOCK_VALUES + 5)
    values[BLOCK_VALUES + 7] = odd
    assert not module.all_finite(values)
    for name in CASTS:
        assert encode(name, values) == host_encode(name, values)
        np.testing.assert_array_equal(
            np.isnan(decode(name, encode(name, values), len(values))), np.isnan(values)
        )
    encoded = encode("int8", values)
    np.testing.assert_array_equal(np.isnan(floats_in(encoded, 4)), [False, True, False, False])
    others = np.r_[:BLOCK_VALUES, 2 * BLOCK_VALUES : len(values)]  # steps of that block mean nothing
    steps, expected = (
        np.frombuffer(data, np.int8, offset=16)[others] for data in (encoded, host_encode("int8", values))
    )
    np.testing.assert_array_equal(steps, expected)
    with pytest.raises(ValueError, match="scale"):
        decode("int8", encoded, len(values))


def test_large_values_are_finite_though_their_sum_is_not() -> None:
    assert module.all_finite(np.array([3e38, 3e38], np.float32))


@names
def test_nothing_waits_for_the_device_but_one_flag_where_a_codec_refuses(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device has no values to wait for."""
    numel = 3 * BLOCK_VALUES + 100
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


@pytest.mark.slow
def test_casts_without_torch_agree_with_those_through_torch() -> None:
    code = (
        "import sys, numpy as np; from colab_swarm.tensors.codecs import CODECS;"
        "assert 'torch' not in sys.modules;"
        "v = np.random.default_rng(3).standard_normal(60_000, dtype=np.float32) * 1e5;"
        "print(*(bytes(CODECS[c].encode(v)).hex() for c in ('float16', 'bfloat16')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    values = np.random.default_rng(3).standard_normal(60_000, dtype=np.float32) * np.float32(1e5)
    assert done.stdout.split() == [host_encode(name, values).hex() for name in ("float16", "bfloat16")]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["topk:0.0", "topk:0.00001", "topk:0.6", "topk:0.51"], r"values to send must be 0\.0001 to 0\.5"),
        (
            ["topk:", "topk:0", "topk:nan", "topk:.01", "topk:1e-2"],
            r"unknown codec 'topk:.*float16.* topk:0\.01",
        ),
        (
            ["topk: 0.01", "topk:0.01\n", "zip", "int4", "topk", "top:0.1"],
            r"unknown codec '.*float16.* topk:0\.01",
        ),
        (["topk:0.010"], r"as 'topk:0\.01': all peers must use the same name"),
    ],
)
def test_an_unknown_codec_is_named_with_the_choices(names: list[str], words: str) -> None:
    for name in names:
        with pytest.raises(ValueError, match=words):
            codec_of(name)
    assert codec_of("topk:0.01").name == "topk:0.01"
