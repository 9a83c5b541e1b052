"""Codecs that send only the largest values, and a format for their means: float16 without zeros.

**topk** sends K of d values as float32, then the ascending indices of these values in the Elias-Fano code. The
lowest ``l = floor(log2(d / K))`` bits of the indices are stored directly: first the same bit of all indices, then the
next bit. The remaining upper bits of the i-th index are a number h, which is stored as a one at place ``h + i`` of a
string of ``K + ((d - 1) >> l)`` bits.

**sparse16** is a vector of float16 values without its zeros: the number of other values as uint32, their
indices as above, and the values. A mean of sparseloco contributions has only few different values. Then the values are
stored as a list: the number of different values as uint16, these values, the most frequent first, and for each value
its place in this list. The places are uint16, compressed by zstd: first all lower bytes, then all upper bytes. If the
number of different values is given as 0, the values follow without a list. The size depends on the values, so sparse16
is no codec for contributions.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from colab_swarm.errors import require
from colab_swarm.tensors.vectors import (
    BINS,
    BLOCK_VALUES,
    Buffer,
    Codes,
    Floats,
    T,
    all_finite,
    block_rows,
    checked,
    pack_codes,
    quantised,
    quantiser_gamma,
    require_finite,
    target,
    unpack_codes,
)

# With a smaller share, a few bytes could claim a gibibyte of memory; with a larger one than the maximum, float16 is
# both smaller and better.
LEAST_SHARE = 1e-4
LARGEST_SHARE = 0.5
KEPT = BLOCK_VALUES // 64  # number of values that sparseloco sends of each block
SPARSE16 = "sparse16"

Indices: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TopK:
    """Sends the ``ceil(share * numel)`` values of largest magnitude, unchanged; all other values decode as 0."""

    share: float

    def __post_init__(self) -> None:
        require(
            LEAST_SHARE <= self.share <= LARGEST_SHARE,
            f"topk:{self.share:g}: the share of values to send must be {LEAST_SHARE:g} to {LARGEST_SHARE:g}, "
            "such as topk:0.01",
        )

    @property
    def name(self) -> str:
        return f"topk:{self.share:g}"

    def kept(self, numel: int) -> int:
        return math.ceil(self.share * numel)

    def encoded_bytes(self, numel: int) -> int:
        return 4 * self.kept(numel) + _index_bytes(self.kept(numel), numel)

    def gamma(self, numel: int) -> float:
        return (numel - self.kept(numel)) / numel if numel else 0.0

    def encode(self, values: Floats) -> Buffer:
        require_finite(values, "topk")
        indices = _largest(values[None], self.kept(len(values)))
        return values[indices].tobytes() + _pack_indices(indices, len(values))

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        encoded = np.frombuffer(checked(buffer, self.encoded_bytes(numel)), np.uint8)
        kept = self.kept(numel)
        values = encoded[: 4 * kept].view(np.float32)
        require(all_finite(values), "a topk vector has values that are not finite")
        indices = _unpack_indices(encoded[values.nbytes :], kept, numel)
        return _scattered(values, indices, target(numel, scratch))


class SparseLoCo:
    """Sends the 64 largest of every 4096 consecutive values, in 14 bits each (arXiv 2508.15706).

    2 bits are the value's code by `quantised`, which codes all sent values of a vector together; 12 bits are the
    value's place in the block. If the last block is shorter, with b values, the encoder sends b / 64 of them, rounded
    down to an even number, but at least 2 (1 if b is 1).
    Layout: the 4 means as float32, the codes, then the places, two in three bytes. In the paper, a block is a part of
    64 x 64 values of a matrix. Here its values are consecutive, because a reducer does not know the shapes.
    """

    name = "sparseloco"

    def kept(self, numel: int) -> int:
        whole, last = divmod(numel, BLOCK_VALUES)
        return whole * KEPT + min(last, max(2, last // 128 * 2))

    def encoded_bytes(self, numel: int) -> int:
        kept = self.kept(numel)
        return 4 * BINS + -(-kept // 4) + 3 * -(-kept // 2) if kept else 0

    def gamma(self, numel: int) -> float:
        blocks = {size for size in (min(numel, BLOCK_VALUES), numel % BLOCK_VALUES) if size}
        part = min((self.kept(size) / size for size in blocks), default=1.0)  # least part of a block's energy
        return 1 - part * (1 - quantiser_gamma(self.kept(numel)))

    def encode(self, values: Floats) -> Buffer:
        require_finite(values, self.name)
        if not len(values):
            return b""
        largest = [_largest(rows, self.kept(rows.shape[1])) for _, rows in block_rows(values)]
        places = np.concatenate(largest)
        codes, means = quantised(values[places + _starts(len(places))])
        return means.tobytes() + pack_codes(codes) + pack_12(places)

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        encoded = np.frombuffer(checked(buffer, self.encoded_bytes(numel)), np.uint8)
        kept = self.kept(numel)
        means, codes, places = np.split(encoded, [4 * BINS, 4 * BINS + -(-kept // 4)])
        require(all_finite(means.view(np.float32)), "a sparseloco vector has means that are not finite")
        values = means.view(np.float32)[unpack_codes(codes, kept)]
        return _scattered(values, unpack_12(places, kept) + _starts(kept), target(numel, scratch))


Sparse: TypeAlias = TopK | SparseLoCo


def _starts(kept: int) -> Indices:
    return np.arange(kept) // KEPT * BLOCK_VALUES


def pack_12(numbers: Indices) -> bytes:
    """Pack numbers of 12 bits, two in three bytes; the first of two is in the lower bits."""
    pairs = np.zeros(-(-len(numbers) // 2) * 2, np.uint32)
    pairs[: len(numbers)] = numbers
    joined = pairs[::2] | pairs[1::2] << 12
    return joined.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()


def unpack_12(packed: Codes, count: int) -> Indices:
    joined = np.zeros((len(packed) // 3, 4), np.uint8)
    joined[:, :3] = packed.reshape(-1, 3)
    pairs = joined.view(np.uint32)
    return np.hstack([pairs & 0xFFF, pairs >> 12]).ravel()[:count].astype(np.int64)


def drop_zeros(halves: Buffer) -> bytes:
    """Return encoded float16 values as sparse16 if this is shorter; else an empty result."""
    vector = np.frombuffer(halves, np.uint16)
    kept = np.flatnonzero(vector != 0)  # the bits of -0.0 are not 0, so it is kept
    if sparse16_bytes(len(kept), len(vector)) >= len(halves):
        return b""
    values = vector[kept]
    counts = np.bincount(values, minlength=1)
    different = np.flatnonzero(counts)
    different = different[np.argsort(-counts[different])].astype(np.uint16)
    packed = np.uint16(0).tobytes() + values.tobytes()
    if 4 * len(different) < len(values):
        places = np.empty(len(counts), np.uint16)
        places[different] = np.arange(len(different))
        planes = places[values].view(np.uint8).reshape(-1, 2).T.tobytes()  # nearly all upper bytes are 0
        listed = np.uint16(len(different)).tobytes() + different.tobytes()
        packed = min(packed, listed + zstandard.ZstdCompressor(level=1).compress(planes), key=len)
    return np.uint32(len(kept)).tobytes() + _pack_indices(kept, len(vector)) + packed


def restore_zeros(buffer: Buffer, numel: int) -> memoryview:
    """Return the ``numel`` float16 values of a sparse16 vector; raises ValueError if the vector is invalid."""
    kept = int.from_bytes(buffer[:4], "little")
    require(kept <= numel, f"a sparse16 vector has {kept} values, at most {numel} expected")
    begin = 4 + _index_bytes(kept, numel)
    require(len(buffer) >= begin + 2, f"a sparse16 vector has only {len(buffer)} bytes")
    indices = _unpack_indices(np.frombuffer(buffer[4:begin], np.uint8), kept, numel)
    values = _values_of(buffer[begin:], kept)
    return memoryview(_scattered(values, indices, np.empty(numel, np.uint16)).tobytes())


def _values_of(packed: Buffer, kept: int) -> npt.NDArray[np.uint16]:
    count = int.from_bytes(packed[:2], "little")
    if not count:
        return np.frombuffer(checked(packed, 2 + 2 * kept)[2:], np.uint16)
    require(len(packed) >= 2 + 2 * count, "a sparse16 vector lacks values")
    different = np.frombuffer(packed[2 : 2 + 2 * count], np.uint16)
    frame = bytes(packed[2 + 2 * count :])
    try:
        require(zstandard.frame_content_size(frame) == 2 * kept, "a sparse16 vector has another length")
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"a sparse16 vector is damaged: {error}") from error
    places = np.ascontiguousarray(planes.reshape(2, kept).T).view(np.uint16).ravel()
    require(not kept or places.max() < count, "a sparse16 vector names a value that is not listed")
    return different[places]


def sparse16_bytes(kept: int, numel: int, bits: float = 16.0) -> int:
    """Return the size of a sparse16 vector with ``kept`` values of ``bits`` bits each, in bytes."""
    return 6 + _index_bytes(kept, numel) + math.ceil(kept * bits / 8)


def _scattered(values: npt.NDArray[T], indices: Indices, out: npt.NDArray[T]) -> npt.NDArray[T]:
    text = "the indices of a sparse vector are not ascending, or beyond its end"
    require(not len(indices) or ((np.diff(indices) > 0).all() and indices[-1] < len(out)), text)
    out.fill(0)
    out[indices] = values
    return out


def _largest(rows: Floats, count: int) -> Indices:
    """Return the places of each row's ``count`` largest magnitudes, ascending; of equal ones, the first are taken."""
    if not rows.size:
        return np.empty(0, np.int64)
    magnitudes = rows.view(np.int32) & 0x7FFFFFFF  # as integers, they keep their order
    cut = rows.shape[1] - count
    least = np.partition(magnitudes, cut, axis=1)[:, cut, None]
    chosen = magnitudes >= least
    extra = np.count_nonzero(chosen, axis=1) - count
    for row in np.flatnonzero(extra):
        equal = np.flatnonzero(magnitudes[row] == least[row])
        chosen[row, equal[len(equal) - extra[row] :]] = False
    places: Indices = np.flatnonzero(chosen) % rows.shape[1]
    return places


def low_bits_of(kept: int, numel: int) -> int:
    return (numel // kept).bit_length() - 1 if kept else 0


def _index_bytes(kept: int, numel: int) -> int:
    low_bits = low_bits_of(kept, numel)
    return -(-kept * low_bits // 8) + -(-(kept + (max(numel - 1, 0) >> low_bits)) // 8)


def _pack_indices(indices: Indices, numel: int) -> bytes:
    low_bits = low_bits_of(len(indices), numel)
    lows = (indices >> np.arange(low_bits)[:, None]) & 1
    highs = np.zeros(len(indices) + (max(numel - 1, 0) >> low_bits), np.uint8)
    highs[(indices >> low_bits) + np.arange(len(indices))] = 1
    return np.packbits(lows.astype(np.uint8)).tobytes() + np.packbits(highs).tobytes()


def _unpack_indices(packed: Codes, kept: int, numel: int) -> Indices:
    low_bits = low_bits_of(kept, numel)
    lows, highs = np.split(packed, [-(-kept * low_bits // 8)])
    ones = np.flatnonzero(np.unpackbits(highs, count=kept + (max(numel - 1, 0) >> low_bits)).view(bool))
    require(len(ones) == kept, f"a sparse vector names {len(ones)} indices, {kept} expected")
    indices = (ones - np.arange(kept)) << low_bits
    planes = np.unpackbits(lows, count=kept * low_bits).reshape(low_bits, kept)
    indices |= np.bitwise_or.reduce(planes.astype(np.int64) << np.arange(low_bits)[:, None], axis=0)
    return indices
