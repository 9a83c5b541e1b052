"""How float32 values travel: codecs that know the encoded size in advance and refuse anything odd.

    ==========  ===============  ==============================================  ===============================
    codec       bytes a value    error of one value x                            not a number, too large
    ==========  ===============  ==============================================  ===============================
    float32     4                none                                            as they are
    float16     2                <= 2^-11 |x|, at least 2^-25                    NaN stays; beyond 65504 clamps
    bfloat16    2                <= 2^-8 |x|                                     NaN stays; beyond 3.39e38 clamps
    int8        1 + 1/1024       <= max|block| / 250; blocks under 1e-35 are 0   the decoder refuses the block
    onebit      1/8 + 1/512      up to max|block|                                the encoder refuses the vector
    topk:0.01   0.051            |x|, where it is not among the largest 1 %      the encoder refuses the vector
    ==========  ===============  ==============================================  ===============================

Of onebit and topk little is left: what they cut off must travel later (`colab_swarm.tensors.feedback`).
Each codec states gamma, which bounds the error of a whole vector.

Everything is numpy and little-endian. Where the process has loaded torch, the 16-bit casts go through it
(ten times numpy's speed); a peer that only reduces never loads it.

Only the largest values travel, and where they stand: the topk codec.

Layout of K of d values: the values as float32; then their indices, ascending, in the code of Elias and Fano. Of each
index the lowest ``l = floor(log2(d / K))`` bits are written as they are; the rest, h, as a one at place ``h + i`` of a
string of ``K + ((d - 1) >> l)`` bits, for the i-th index. That is ``log2(d / K) + 2`` bits an index at most, half a bit
over the least possible, and the size depends on d and K alone: a receiver knows it before anything arrives. At 1 % a
value costs 5.07 bytes where it travels, 0.051 overall.

Who looks for the K largest need not sort. A threshold is estimated from a sample, a little too low; what exceeds it is
found in one pass, and among those few the K largest are picked: the exact result, at the speed of the estimate. On one
core 1 % of 4 M values is encoded at 3.3 GB/s and decoded at 12; ``torch.topk`` alone finds it at 0.24.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]

Buffer: TypeAlias = bytes | bytearray | memoryview

BLOCK_VALUES = 4096

"""Values that share one scale in the int8 and onebit codecs; chunk offsets are multiples of it."""

MAX_BLOCKS = 64

"""Encoded at once, at most, however few bytes they need: a mebibyte of float32, which a message can carry."""


class Codec(Protocol):
    """One wire format of a flat float32 vector."""

    @property
    def name(self) -> str: ...

    def encoded_bytes(self, numel: int) -> int:
        """Exact size of ``numel`` encoded values."""

    def gamma(self, numel: int) -> float:
        """The least known number, 0 to 1, with ``||Q(w) - w||^2 <= gamma ||w||^2`` for all w of ``numel`` values.

        Q(w) is what `decode` makes of the encoded w. Values beyond the codec's range, or so small that it cannot tell
        them from 0, are left out of account (Elastic Consistency, equation 25).
        """

    def encode(self, values: Floats) -> Buffer:
        """Encode a contiguous vector; the result may be a view of ``values``.

        Raises:
            ValueError: ``values`` are not finite, and the codec (onebit, topk) has no place for that.
        """

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        """Decode exactly ``numel`` values.

        Args:
            scratch: memory of at least ``numel`` values to decode into; saves an allocation.

        Returns:
            The values: a view of ``buffer`` (read-only), of ``scratch``, or a new array.

        Raises:
            ValueError: the buffer's length is not ``encoded_bytes(numel)``, or its content is not valid.
        """


def all_finite(values: Floats) -> bool:
    """Whether no value is NaN or infinite."""
    return bool(np.isfinite(values).all())


def checked(buffer: Buffer, size_bytes: int) -> Buffer:
    """The buffer, if it is as long as it must be.

    Raises:
        ValueError: it is not.
    """
    if len(buffer) != size_bytes:
        raise ValueError(f"{len(buffer)} encoded bytes, {size_bytes} expected")
    return buffer


def target(numel: int, scratch: Floats | None) -> Floats:
    """Where ``numel`` decoded values go."""
    return np.empty(numel, np.float32) if scratch is None else scratch[:numel]


LEAST_SHARE, LARGEST_SHARE = 1e-4, 0.5

"""Below, a few bytes would claim a gibibyte of memory; above, float16 is both smaller and better."""

SAMPLE_VALUES = 1 << 14

MARGIN = 3.0

"""Standard deviations by which a sample's threshold is put lower, so that it is seldom too high."""

_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TopK:
    """The ``share`` of largest magnitude, exactly ``ceil(share * numel)`` values; all others arrive as 0.

    Biased: without error feedback, what is seldom large never arrives (`colab_swarm.tensors.feedback`).
    """

    share: float

    def __post_init__(self) -> None:
        if not LEAST_SHARE <= self.share <= LARGEST_SHARE:
            raise ValueError(
                f"topk:{self.share:g}: the share of values to send is {LEAST_SHARE:g} to {LARGEST_SHARE:g}, "
                "such as topk:0.01"
            )

    @property
    def name(self) -> str:
        return f"topk:{self.share:g}"

    def kept(self, numel: int) -> int:
        """How many of ``numel`` values travel."""
        return math.ceil(self.share * numel)

    def encoded_bytes(self, numel: int) -> int:
        return _Layout.of(numel, self.kept(numel)).size_bytes

    def gamma(self, numel: int) -> float:
        return (numel - self.kept(numel)) / numel if numel else 0.0

    def encode(self, values: Floats) -> Buffer:
        layout = _Layout.of(len(values), self.kept(len(values)))
        indices = _largest(values, layout.kept)
        return values[indices].tobytes() + layout.encode(indices)

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        layout = _Layout.of(numel, self.kept(numel))
        encoded = np.frombuffer(checked(buffer, layout.size_bytes), np.uint8)
        values = encoded[: 4 * layout.kept].view(np.float32)
        if not all_finite(values):
            raise ValueError("a topk vector has values that are not finite")
        indices = layout.decode(encoded[4 * layout.kept :])
        out = target(numel, scratch)
        out.fill(0.0)
        out[indices] = values
        return out


@dataclass(frozen=True)
class _Layout:
    """How ``kept`` ascending indices below ``numel`` are written.

    Attributes:
        low_bits: of each index, written as they are.
        high_bits: length of the string whose ones tell the rest.
    """

    numel: int
    kept: int
    low_bits: int
    high_bits: int

    @classmethod
    def of(cls, numel: int, kept: int) -> _Layout:
        low_bits = (numel // kept).bit_length() - 1 if kept else 0
        return cls(numel, kept, low_bits, kept + (max(numel - 1, 0) >> low_bits))

    @property
    def low_bytes(self) -> int:
        return -(-self.kept * self.low_bits // 8)

    @property
    def size_bytes(self) -> int:
        """Of values and indices together."""
        return 4 * self.kept + self.low_bytes + -(-self.high_bits // 8)

    def encode(self, indices: Indices) -> bytes:
        lows = (indices[:, None] >> np.arange(self.low_bits)) & 1
        highs = np.zeros(self.high_bits, np.uint8)
        highs[(indices >> self.low_bits) + np.arange(self.kept)] = 1
        return np.packbits(lows.astype(np.uint8)).tobytes() + np.packbits(highs).tobytes()

    def decode(self, encoded: npt.NDArray[np.uint8]) -> Indices:
        """The indices, below ``numel`` and strictly ascending.

        Raises:
            ValueError: they are not.
        """
        ones = np.flatnonzero(np.unpackbits(encoded[self.low_bytes :], count=self.high_bits))
        if len(ones) != self.kept:
            raise ValueError(f"a topk vector names {len(ones)} indices, {self.kept} expected")
        lows = np.unpackbits(encoded[: self.low_bytes], count=self.kept * self.low_bits)
        indices: Indices = (ones - np.arange(self.kept)) << self.low_bits
        indices |= lows.reshape(self.kept, self.low_bits) @ (1 << np.arange(self.low_bits))
        if self.kept and not ((np.diff(indices) > 0).all() and indices[-1] < self.numel):
            raise ValueError("the indices of a topk vector are not ascending, or beyond its end")
        return indices


def _largest(values: Floats, count: int) -> Indices:
    """Where the ``count`` values of largest magnitude stand, ascending; of equal ones the first.

    Raises:
        ValueError: a value is not finite.
    """
    if not count:
        return np.empty(0, np.int64)
    magnitudes = (
        values.view(np.int32) & _MAGNITUDE
    )  # as integers floats keep their order; infinity, NaN come last
    found = np.flatnonzero(magnitudes >= _threshold(magnitudes, count))
    if len(found) < count:  # the sample was not like the rest
        found = np.arange(len(values))
    sizes = magnitudes[found]
    if sizes.max() >= _INFINITY:
        raise ValueError("values that are not finite cannot travel as topk: drop this vector")
    least = np.partition(sizes, len(sizes) - count)[len(sizes) - count]
    chosen = sizes > least
    chosen[np.flatnonzero(sizes == least)[: count - np.count_nonzero(chosen)]] = True
    indices: Indices = found[chosen]
    return indices


def _threshold(magnitudes: npt.NDArray[np.int32], count: int) -> int:
    """What a little more than ``count`` values reach, by a sample of them; 0 if all must be looked at."""
    sample = magnitudes[:: len(magnitudes) // SAMPLE_VALUES | 1]  # an odd stride walks through all columns
    expected = len(sample) * count / len(magnitudes)
    rank = math.ceil(expected + MARGIN * math.sqrt(expected) + 1)
    if len(magnitudes) < SAMPLE_VALUES or rank > len(sample):
        return 0
    return int(np.partition(sample, len(sample) - rank)[len(sample) - rank])


T = TypeVar("T", bound=np.generic)

FLOAT16_MAX = 65504.0

BFLOAT16_MAX = float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])

MAX_MEAN_GAMMA = 0.1

_SMALLEST_SCALED = np.float32(1e-35)  # below it 127 / max|block| would overflow

_LARGEST_SCALE = np.nextafter(np.float32(np.finfo(np.float32).max / 127), np.float32(0))


def codec_of(name: str) -> Codec:
    """The codec called ``name``: float32, float16, bfloat16, int8, onebit, or topk and a share, as in topk:0.01.

    Raises:
        ValueError: there is none of this name; a share has one way only to be written.
    """
    if name in CODECS:
        return CODECS[name]
    share = re.fullmatch(r"topk:(0\.[0-9]+)", name)
    if share is None:
        raise ValueError(f"unknown codec {name!r}: choose one of {', '.join(PRECISIONS)} or topk:0.01")
    codec = TopK(float(share[1]))
    if codec.name != name:
        raise ValueError(f"codec {name!r} is to be written {codec.name!r}: all peers must name it alike")
    return codec


def mean_codec_for(codec: str) -> str:
    """How a mean travels if vectors travel as ``codec`` and nothing else is asked for.

    The same way, but as float16 where a codec cuts off so much that it needs error feedback: a reducer keeps none.
    """
    return codec if Precision(codec).widest.gamma(BLOCK_VALUES) <= MAX_MEAN_GAMMA else "float16"


@dataclass(frozen=True)
class Precision:
    """How a flat vector travels: by one codec, or ``adaptive``: small tensors as float16, the others as int8.

    Normalisation and biases are few values that matter much; large matrices bear 8 bits (hivemind's
    SizeAdaptiveCompression).

    Attributes:
        name: of a codec, or adaptive.
        fine: values at the front of the vector that belong to small tensors; None: not known here, all of them.
    """

    name: str
    fine: int | None = None

    def __post_init__(self) -> None:
        if self.name != ADAPTIVE:
            codec_of(self.name)

    def at(self, start: int) -> Codec:
        """The codec of the chunk that begins at ``start``."""
        if self.name != ADAPTIVE:
            return codec_of(self.name)
        return CODECS["float16" if self.fine is None or start < self.fine else "int8"]

    @property
    def widest(self) -> Codec:
        """Of all that `at` returns, the one that needs most bytes."""
        return CODECS["float16"] if self.name == ADAPTIVE else codec_of(self.name)


def _as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """The array's memory, not copied."""
    return array.view(np.uint8).data if array.size else memoryview(b"")


def _torch() -> Any:
    """Torch if this process uses it anyway; loading it for a cast would cost seconds."""
    return sys.modules.get("torch")


class Float32:
    """Values as they are, without a copy either way."""

    name = "float32"

    def encoded_bytes(self, numel: int) -> int:
        return 4 * numel

    def gamma(self, numel: int) -> float:
        return 0.0

    def encode(self, values: Floats) -> Buffer:
        return _as_bytes(values)

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        return np.frombuffer(checked(buffer, 4 * numel), np.float32)


class Float16:
    """IEEE half precision; values beyond +-65504, infinities too, clamp to it."""

    name = "float16"

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def gamma(self, numel: int) -> float:
        return 2.0**-22

    def encode(self, values: Floats) -> Buffer:
        clamped: Any
        if torch := _torch():
            clamped = torch.from_numpy(values).clamp(-FLOAT16_MAX, FLOAT16_MAX).half().numpy()
        else:
            clamped = np.clip(values, -FLOAT16_MAX, FLOAT16_MAX).astype(np.float16)
        return _as_bytes(clamped)

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        halves = np.frombuffer(checked(buffer, 2 * numel), np.int16)
        out = target(numel, scratch)
        if torch := _torch():
            torch.from_numpy(out).copy_(
                torch.frombuffer(bytearray(halves), dtype=torch.float16)
            ) if numel else None
        else:
            out[:] = halves.view(np.float16)
        return out


class BFloat16:
    """The upper half of a float32, rounded to nearest even; beyond 3.39e38, infinities too, values clamp."""

    name = "bfloat16"

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def gamma(self, numel: int) -> float:
        return 2.0**-16

    def encode(self, values: Floats) -> Buffer:
        bits = np.clip(values, -BFLOAT16_MAX, BFLOAT16_MAX).view(np.uint32)
        rounded = bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))
        rounded[np.isnan(values)] = 0x7FC00000
        upper = (rounded >> 16).astype(np.uint16)
        return _as_bytes(upper)

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        upper = np.frombuffer(checked(buffer, 2 * numel), np.uint16)
        out = target(numel, scratch)
        np.left_shift(upper, 16, out=out.view(np.uint32), dtype=np.uint32)
        return out


class Int8:
    """Blocks of 4096 values, each as int8 multiples of max|block| / 127 (absmax scaling).

    Layout: one float32 scale per block, then one int8 per value; the last block may be short.
    """

    name = "int8"

    def encoded_bytes(self, numel: int) -> int:
        return 4 * _blocks(numel) + numel

    def gamma(self, numel: int) -> float:
        return min(numel, BLOCK_VALUES) / 250**2

    def encode(self, values: Floats) -> Buffer:
        numel, blocks = len(values), _blocks(len(values))
        encoded = bytearray(self.encoded_bytes(numel))
        scales = np.frombuffer(encoded, np.float32, count=blocks)
        levels = np.frombuffer(encoded, np.int8, offset=4 * blocks)
        whole = numel // BLOCK_VALUES
        cut = whole * BLOCK_VALUES
        _quantize(
            values[:cut].reshape(whole, BLOCK_VALUES),
            scales[:whole],
            levels[:cut].reshape(whole, BLOCK_VALUES),
        )
        if cut < numel:
            _quantize(values[None, cut:], scales[whole:], levels[None, cut:])
        return encoded

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        blocks = _blocks(numel)
        checked(buffer, self.encoded_bytes(numel))
        scales = np.frombuffer(buffer, np.float32, count=blocks)
        if not bool(((scales >= 0) & (scales <= _LARGEST_SCALE)).all()):
            raise ValueError("an int8 block has a scale that is negative, infinite or not a number")
        levels = np.frombuffer(buffer, np.int8, offset=4 * blocks) if numel else np.empty(0, np.int8)
        out = target(numel, scratch)
        cut = numel // BLOCK_VALUES * BLOCK_VALUES
        shape = (cut // BLOCK_VALUES, BLOCK_VALUES)
        np.multiply(levels[:cut].reshape(shape), scales[: shape[0], None], out=out[:cut].reshape(shape))
        if cut < numel:
            np.multiply(levels[cut:], scales[-1], out=out[cut:])
        return out


class OneBit:
    """Blocks of 4096 values: where a value is over 0, the mean of those; elsewhere the mean of the others.

    (Elastic Consistency, section 5.2, there of a whole vector; by blocks it errs less.) Layout: two float32 means per
    block, then one bit per value. Biased: use it with error feedback.
    """

    name = "onebit"

    def encoded_bytes(self, numel: int) -> int:
        return 8 * _blocks(numel) + -(-numel // 8)

    def gamma(self, numel: int) -> float:
        return 1 - 1 / min(numel, BLOCK_VALUES) if numel else 0.0

    def encode(self, values: Floats) -> Buffer:
        means = [_means(rows) for rows in _rows(values)]
        return np.concatenate(means).tobytes() + np.packbits(values > 0).tobytes()

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        encoded = np.frombuffer(checked(buffer, self.encoded_bytes(numel)), np.uint8)
        means = encoded[: 8 * _blocks(numel)].view(np.float32).reshape(-1, 2)
        if not (all_finite(means) and (means[:, 0] >= 0).all() and (means[:, 1] <= 0).all()):
            raise ValueError("a onebit block has means that are not finite, or of the wrong sign")
        over = np.unpackbits(encoded[means.nbytes :], count=numel)
        out, block = target(numel, scratch), 0
        for rows, bits in zip(_rows(out), _rows(over), strict=True):
            high, low = means[block : block + len(rows), :1], means[block : block + len(rows), 1:]
            np.multiply(bits, high, out=rows)
            rows += (1 - bits) * low
            block += len(rows)
        return out


def _means(rows: Floats) -> Floats:
    """Of each row, of its values over 0 and of the others: (k, 2) from (k, block)."""
    over = np.count_nonzero(rows > 0, axis=1)
    sums = [part(rows, 0).sum(axis=1, dtype=np.float64) for part in (np.maximum, np.minimum)]
    counts = np.maximum([over, rows.shape[1] - over], 1)
    means: Floats = (np.array(sums) / counts).astype(np.float32).T
    if not all_finite(means):
        raise ValueError("values that are not finite cannot travel as onebit: drop this vector")
    return means


def _rows(values: npt.NDArray[T]) -> Iterator[npt.NDArray[T]]:
    """The whole blocks (k, 4096) and, if there is one, the shorter last (1, rest); views."""
    cut = len(values) // BLOCK_VALUES * BLOCK_VALUES
    yield values[:cut].reshape(-1, BLOCK_VALUES)
    if cut < len(values):
        yield values[None, cut:]


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK_VALUES)


def _quantize(values: Floats, scales: Floats, levels: npt.NDArray[np.int8]) -> None:
    """Fill ``scales`` (k) and ``levels`` (k, block) from ``values`` (k, block)."""
    if not values.size:
        return
    largest = np.maximum(values.max(axis=1), -values.min(axis=1))
    tiny = largest < _SMALLEST_SCALED
    with np.errstate(all="ignore"):  # a NaN or an infinity shows in its block's scale; the decoder refuses it
        scales[:] = np.where(
            tiny, 0, np.where(np.isfinite(largest), np.minimum(largest / 127, _LARGEST_SCALE), np.nan)
        )
        inverse = np.where(tiny, 0, 127 / largest).astype(np.float32)
        steps = values * inverse[:, None]
        np.rint(steps, out=steps)
        levels[:] = steps.astype(np.int8)


CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Float32(), Float16(), BFloat16(), Int8(), OneBit())
}

ADAPTIVE = "adaptive"

PRECISIONS = (*CODECS, ADAPTIVE)

"""What `Precision` takes, beside topk and a share."""
