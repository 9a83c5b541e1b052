"""What the codecs share: types, checks, blocks of a vector, packed small integers, and the 2-bit quantiser."""

import math
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from colab_swarm.errors import require

Floats: TypeAlias = npt.NDArray[np.float32]
Codes: TypeAlias = npt.NDArray[np.uint8]
Buffer: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T", bound=np.generic)

# Number of values that share one scale or a few means; chunks begin at multiples of it.
BLOCK_VALUES = 4096
MAX_BLOCKS = 64  # maximum number of blocks encoded together: one mebibyte of float32, which fits in a message


def all_finite(values: Floats) -> bool:
    return bool(np.isfinite(values).all())


def require_finite(values: Floats, codec: str) -> None:
    require(all_finite(values), f"values that are not finite cannot travel as {codec}: drop this vector")


def root_mean_square(values: Floats) -> float:
    with np.errstate(over="ignore"):
        squares = float(np.dot(values, values))
    if not math.isfinite(squares):  # too large for float32, or not finite
        squares = float(np.square(values, dtype=np.float64).sum())
    return math.sqrt(squares / len(values))


def checked(buffer: Buffer, size_bytes: int) -> Buffer:
    require(len(buffer) == size_bytes, f"{len(buffer)} encoded bytes, {size_bytes} expected")
    return buffer


def target(numel: int, scratch: Floats | None) -> Floats:
    if scratch is None:
        return np.empty(numel, np.float32)
    return scratch[:numel]


def block_rows(values: npt.NDArray[T]) -> Iterator[tuple[slice, npt.NDArray[T]]]:
    """Yield views of all complete blocks (k, 4096), then of a shorter last block, each with the slice of its blocks."""
    whole = len(values) // BLOCK_VALUES
    cut = whole * BLOCK_VALUES
    yield slice(whole), values[:cut].reshape(-1, BLOCK_VALUES)
    if cut < len(values):
        yield slice(whole, whole + 1), values[None, cut:]


def block_count(numel: int) -> int:
    return -(-numel // BLOCK_VALUES)


CODE_BITS = 2
BINS = 1 << CODE_BITS  # number of codes
RANGE = 6.0  # number of standard deviations that the codes span
CODES_PER_BYTE = 8 // CODE_BITS
_SHIFTS = np.arange(0, 8, CODE_BITS, dtype=np.uint8)[:, None]


def pack_codes(codes: Codes) -> bytes:
    """Pack codes of 2 bits, four per byte. The first quarter of them fills the lowest bits of all bytes, and so on."""
    planes = np.zeros((CODES_PER_BYTE, -(-len(codes) // CODES_PER_BYTE)), np.uint8)
    planes.ravel()[: len(codes)] = codes
    return bytes(np.bitwise_or.reduce(planes << _SHIFTS, axis=0))


def unpack_codes(packed: Codes, count: int) -> Codes:
    planes = (packed >> _SHIFTS) & np.uint8(BINS - 1)
    return planes.ravel()[:count]


def quantised(values: npt.NDArray[np.floating[Any]]) -> tuple[Codes, Floats]:
    """Return a code for each of the finite ``values``, and the means that the codes stand for.

    Subtract the mean of all n values, and let sigma be their standard deviation. Code b stands for the differences that
    are nearest to ``(b - 2) sigma RANGE / BINS``. The lowest and the highest code also stand for all values beyond. A
    code decodes as the mean of its values, so the sum is kept (SparseLoCo, arXiv 2508.15706). For sigma, the paper
    divides by n - 1. This function divides by n, so that the two values of a vector of length 2 never share a code.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        shift = values.mean()
        offsets = values - shift
        sigma = np.sqrt(np.einsum("i,i->", offsets, offsets) / len(values))
    if values.dtype == np.float32 and not 1e-15 < sigma < 1e15:
        return quantised(values.astype(np.float64))  # the squares are beyond the range of float32
    width = RANGE / BINS * sigma if sigma else 1.0
    places = np.rint(offsets / values.dtype.type(width) + values.dtype.type(BINS / 2))
    codes = np.clip(places, 0, BINS - 1).astype(np.uint8)
    means = np.empty(BINS)
    for code in range(BINS):
        members = (codes == code).astype(values.dtype)
        means[code] = np.einsum("i,i->", members, offsets) / max(members.sum(), 1)
    return codes, (means + shift).astype(np.float32)


def quantiser_gamma(numel: int) -> float:
    """Return an upper bound on the fraction of the energy of ``numel`` values that `quantised` loses.

    Let x be a value's distance from the mean, in units of sigma. The values with |x| over 0.75 have separate codes on
    either side. They have at least 1 - 0.75^2 of the energy, and none has |x| over sqrt(n). So S, the sum of their |x|
    divided by n, is at least 0.4375 / sqrt(n), and by Cauchy-Schwarz the codes keep at least 0.75 S.
    """
    return 1 - 0.75 * (1 - 0.75**2) / math.sqrt(max(numel, 1))
