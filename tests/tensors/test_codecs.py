"""Codecs: sizes, errors, hostile input; and error feedback."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from colab_swarm.errors import StateError
from colab_swarm.tensors import codecs as module
from colab_swarm.tensors.codecs import BLOCK_VALUES, ErrorFeedback, Floats, codec_of
from colab_swarm.tensors.sparse import pack_12

finite = hnp.arrays(
    np.float32, st.integers(0, 300), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)
names = pytest.mark.parametrize("name", [*module.CODECS, "topk:0.01", "topk:0.3"])


def vectors(seed: int, steps: int, numel: int) -> Floats:
    return np.random.default_rng(seed).standard_normal((steps, numel), dtype=np.float32)


def round_trip(name: str, values: Floats) -> Floats:
    codec = codec_of(name)
    encoded = bytes(codec.encode(values))
    assert len(encoded) == codec.encoded_bytes(len(values))
    return codec.decode(encoded, len(values))


@pytest.mark.parametrize(
    ("name", "most", "relative", "least"),
    [
        ("float32", math.inf, 0.0, 0.0),
        ("float16", module.FLOAT16_MAX, 2.0**-11, 2.0**-25),
        ("bfloat16", module.BFLOAT16_MAX, 2.0**-8, 2.0**-134),
    ],
)
@given(values=finite)
@settings(max_examples=100)
def test_casts_stay_within_their_bounds_and_clamp(
    name: str, most: float, relative: float, least: float, values: Floats
) -> None:
    clamped = np.clip(values, -most, most).astype(np.float64)
    lost = np.abs(round_trip(name, values) - clamped)
    assert (lost <= np.maximum(relative * np.abs(clamped), least)).all()


@given(finite, st.sampled_from([0, BLOCK_VALUES - 3, BLOCK_VALUES, 2 * BLOCK_VALUES + 1]))
@settings(max_examples=100)
def test_int8_stays_within_its_bound_in_every_block(values: Floats, padding: int) -> None:
    values = np.concatenate([np.full(padding, 1e-3, np.float32), values])
    decoded = round_trip("int8", values)
    for start in range(0, len(values), BLOCK_VALUES):
        block = values[start : start + BLOCK_VALUES].astype(np.float64)
        got = decoded[start : start + BLOCK_VALUES]
        assert np.isfinite(got).all()
        assert np.abs(got - block).max() <= max(np.abs(block).max() / 250, 1e-35)


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def sparseloco_with(begin: int, wrong: bytes) -> bytes:
    """64 + 4 values of a vector of 4396: 16 bytes of means, 17 of codes, 102 of places; some are wrong."""
    encoded = bytearray(codec_of("sparseloco").encode(vectors(0, 1, SPARSE_VALUES)[0]))
    encoded[begin : begin + len(wrong)] = wrong
    return bytes(encoded)


SPARSE_VALUES = BLOCK_VALUES + 300
CASTS = ("float32", "float16", "bfloat16")
ODD = (np.nan, np.inf, -np.inf)
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
NOT_FINITE = [
    (name, odd, numel)
    for name in ("onebit", "sparseloco", "topk:0.01", "topk:0.3")
    for odd in ODD
    for numel in (1, 4097, 20_000)
]
"""Values that a codec would spread over a whole block: it refuses them."""


@names
@given(data=st.binary(max_size=300), numel=st.integers(0, 300), seed=st.integers(0, 1 << 32))
@settings(max_examples=100)
def test_any_bytes_are_decoded_or_refused(name: str, data: bytes, numel: int, seed: int) -> None:
    codec, rng = codec_of(name), np.random.default_rng(seed)
    damaged = bytearray(codec.encode(rng.standard_normal(numel, dtype=np.float32)))
    for _ in range(seed % 10 if numel else 0):
        damaged[rng.integers(len(damaged))] = rng.integers(256)
    for encoded in (data, damaged):
        fits = len(encoded) == codec.encoded_bytes(numel)
        try:
            decoded = codec.decode(encoded, numel)
        except ValueError:
            assert not fits or name not in CASTS
        else:
            assert fits and decoded.shape == (numel,) and decoded.dtype == np.float32
            assert module.all_finite(decoded) or name in CASTS


@pytest.mark.parametrize("words", REFUSED)
def test_bytes_that_no_encoder_writes_are_refused(words: str) -> None:
    for name, numel, encoded in REFUSED[words]:
        assert len(encoded) == codec_of(name).encoded_bytes(numel)
        with pytest.raises(ValueError, match=words):
            codec_of(name).decode(encoded, numel)
    topk = codec_of("topk:0.3").decode(floats(1, 1, 1) + bytes([0b011 << 5, 0b1100001 << 1]), 10)
    np.testing.assert_array_equal(np.flatnonzero(topk), [0, 1, 9])


@pytest.mark.parametrize(("name", "odd", "numel"), NOT_FINITE)
def test_values_that_a_codec_would_spread_are_refused(name: str, odd: float, numel: int) -> None:
    values = vectors(numel, 1, numel)[0]
    values[numel // 2] = odd
    with pytest.raises(ValueError, match=rf"not finite cannot travel as {name[:4]}"):
        codec_of(name).encode(values)


def test_nan_stays_nan_or_is_refused_and_is_noticed() -> None:
    values = np.array([1.0, np.nan, -2.0], np.float32)
    for name in CASTS:
        np.testing.assert_array_equal(np.isnan(round_trip(name, values)), [False, True, False])
    for odd in ODD:
        with pytest.raises(ValueError, match="scale"):
            round_trip("int8", np.array([1.0, odd], np.float32))
    assert not module.all_finite(values) and not module.all_finite(np.array([np.inf, -np.inf], np.float32))
    assert module.all_finite(np.array([3e38, 3e38], np.float32))  # the sum is not


@names
def test_decoding_into_scratch_gives_the_same_values(name: str) -> None:
    values = np.random.default_rng(1).standard_normal(5000, dtype=np.float32)
    codec = codec_of(name)
    encoded, scratch = bytes(codec.encode(values)), np.full(6000, 7.0, np.float32)
    np.testing.assert_array_equal(codec.decode(encoded, 5000, scratch=scratch), round_trip(name, values))


def test_onebit_sends_the_means_of_positive_values_and_of_the_rest_of_every_block() -> None:
    decoded = round_trip("onebit", np.array([1, -2, 3, 0, -4], np.float32))
    np.testing.assert_array_equal(decoded, [2, -2, 2, -2, -2])
    values = np.repeat(np.array([3.0, -5.0], np.float32), BLOCK_VALUES)
    np.testing.assert_array_equal(round_trip("onebit", values), values)


@pytest.mark.slow
def test_casts_without_torch_agree_with_those_through_torch() -> None:
    import torch  # noqa: F401  (loaded: this process casts through it)

    code = (
        "import sys, numpy as np; from colab_swarm.tensors.codecs import CODECS;"
        "assert 'torch' not in sys.modules;"
        "v = np.random.default_rng(3).standard_normal(60_000, dtype=np.float32) * 1e5;"
        "print(*(bytes(CODECS[c].encode(v)).hex() for c in ('float16', 'bfloat16')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    values = np.random.default_rng(3).standard_normal(60_000, dtype=np.float32) * np.float32(1e5)
    assert done.stdout.split() == [
        bytes(module.CODECS[name].encode(values)).hex() for name in ("float16", "bfloat16")
    ]


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        (["0.0", "0.00001", "0.6", "0.51"], r"the share of values to send must be 0\.0001 to 0\.5"),
        (["", "0", "nan", ".01", "1e-2", " 0.01", "0.01\n"], r"unknown codec 'topk:.*float16.* topk:0\.01"),
        (["0.010"], r"as 'topk:0\.01': all peers must use the same name"),
    ],
)
def test_an_unknown_codec_is_named_with_the_choices(shares: list[str], words: str) -> None:
    for share in shares:
        with pytest.raises(ValueError, match=words):
            codec_of(f"topk:{share}")
    for name in ("zip", "int4", "topk", "top:0.1"):
        with pytest.raises(ValueError, match=rf"unknown codec '{name}'.*float16.* topk:0\.01"):
            codec_of(name)
    assert codec_of("topk:0.01").name == "topk:0.01"


def test_adaptive_sends_the_small_tensors_at_the_front_as_float16() -> None:
    assert [module.Precision("adaptive", fine=10).at(start).name for start in (9, 10)] == ["float16", "int8"]
    assert (
        module.Precision("adaptive").at(1 << 30) is module.Precision("adaptive").widest is codec_of("float16")
    )
    assert module.Precision("int8").at(0) is module.Precision("int8").widest is codec_of("int8")
    with pytest.raises(ValueError, match="unknown codec"):
        module.Precision("zip")


DENORMAL = np.float32(1e-45)
LARGEST = np.float32(np.finfo(np.float32).max)
RANGES: dict[str, tuple[float, float]] = {
    "float16": (2.0**-25, module.FLOAT16_MAX),
    "bfloat16": (2.0**-134, 3.3e38),
    "int8": (1e-35, float(LARGEST)),
    **dict.fromkeys(("onebit", "sparseloco"), (2.0**-149, float(LARGEST))),
    **dict.fromkeys(("float32", "topk:0.0001", "topk:0.01", "topk:0.5"), (0.0, float(LARGEST))),
}
"""By codec: the largest value that may become 0, and the largest value that it can represent."""
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


def wide_vector(numel: int, seed: int, exponent: float) -> Floats:
    """Values over many magnitudes."""
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.uniform(-exponent, exponent, numel)
    return (rng.standard_normal(numel) * scales).astype(np.float32)


lengths = st.sampled_from([1, 2, BLOCK_VALUES - 1, BLOCK_VALUES, 2 * BLOCK_VALUES + 1, 20_000])


@codecs
@given(values=finite | st.builds(wide_vector, lengths, st.integers(0, 1 << 32), st.floats(0, 30)))
@settings(max_examples=180)
def test_the_error_of_any_vector_is_within_gamma(name: str, values: Floats) -> None:
    assert_within_gamma(name, values)


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


biased = pytest.mark.parametrize("name", ["int8", "onebit", "sparseloco", "topk:0.1"])


@biased
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


def test_a_vector_that_was_not_received_changes_nothing() -> None:
    feedback, first, second = ErrorFeedback(10), *vectors(0, 2, 10)
    feedback.encode(codec_of("onebit"), 0, first)
    feedback.settle()
    owed = feedback.residual.copy()
    feedback.encode(codec_of("onebit"), 0, second)
    np.testing.assert_array_equal(feedback.residual, owed)
    feedback.begin()
    feedback.cut_off(2, np.array([3, 4], np.float32), np.array([1, 1], np.float32))
    feedback.settle(2.0)  # pieces without a record lost nothing
    np.testing.assert_array_equal(feedback.residual, [0, 0, 4, 6, 0, 0, 0, 0, 0, 0])


def test_a_saved_state_is_restored_and_an_invalid_one_refused() -> None:
    feedback = ErrorFeedback(10)
    feedback.encode(codec_of("onebit"), 0, vectors(0, 1, 10)[0])
    feedback.settle()
    restored = ErrorFeedback(10, feedback.state_dict())
    np.testing.assert_array_equal(restored.residual, feedback.residual)
    assert restored.residual is not feedback.residual and restored.residual.any()
    for residual in (np.zeros(9), np.zeros((2, 5)), np.full(10, np.nan), "none"):
        with pytest.raises(StateError, match="error feedback"):
            ErrorFeedback(10, {"residual": residual})
    with pytest.raises(StateError, match="error feedback"):
        ErrorFeedback(10, {})


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8", "onebit"])
@given(st.integers(0, 2**32 - 1), st.integers(1, 3 * BLOCK_VALUES), st.floats(-30, 30))
@settings(max_examples=25, deadline=None)
def test_what_a_codec_decodes_it_encodes_to_the_same_bytes(
    name: str, seed: int, numel: int, exponent: float
) -> None:
    """So a mean that another member passes on is known by the digest of its reducer's encoding."""
    codec = codec_of(name)
    values = np.random.default_rng(seed).standard_normal(numel).astype(np.float32) * np.float32(2.0**exponent)
    encoded = bytes(codec.encode(values))
    assert bytes(codec.encode(codec.decode(encoded, numel).copy())) == encoded
