"""What codecs share: types, checks, blocks of a vector, packed small integers, and the quantiser of 2 bits."""

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

# values that share one scale or a few means; chunk offsets are multiples of it
BLOCK_VALUES = 4096
MAX_BLOCKS = 64  # most blocks encoded at once, for every codec: one mebibyte of float32, which fits a message


def all_finite(values: Floats) -> bool:
    return bool(np.isfinite(values).all())


def require_finite(values: Floats, codec: str) -> None:
    require(all_finite(values), f"values that are not finite cannot travel as {codec}: drop this vector")


def checked(buffer: Buffer, size_bytes: int) -> Buffer:
    require(len(buffer) == size_bytes, f"{len(buffer)} encoded bytes, {size_bytes} expected")
    return buffer


def target(numel: int, scratch: Floats | None) -> Floats:
    return np.empty(numel, np.float32) if scratch is None else scratch[:numel]


def block_rows(values: npt.NDArray[T]) -> Iterator[tuple[slice, npt.NDArray[T]]]:
    """Yield views of whole blocks (k, 4096), then of a shorter last one, and which these are."""
    whole = len(values) // BLOCK_VALUES
    cut = whole * BLOCK_VALUES
    yield slice(whole), values[:cut].reshape(-1, BLOCK_VALUES)
    if cut < len(values):
        yield slice(whole, whole + 1), values[None, cut:]


def block_count(numel: int) -> int:
    return -(-numel // BLOCK_VALUES)


def pack(codes: Codes, bits: int) -> bytes:
    """Pack codes of 2 or 4 bits: the first bits of all bytes, then the second ones of all, and so on."""
    planes = np.zeros((8 // bits, -(-len(codes) * bits // 8)), np.uint8)
    planes.ravel()[: len(codes)] = codes
    planes <<= np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return bytes(np.bitwise_or.reduce(planes, axis=0))


def unpack(packed: Codes, bits: int, count: int) -> Codes:
    planes = packed >> np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    planes &= (1 << bits) - 1
    return planes.ravel()[:count]


BINS, RANGE = 4, 6.0  # codes, and the standard deviations that they span


def quantised(rows: npt.NDArray[np.floating[Any]]) -> tuple[Codes, Floats]:
    """Return a code for each of the finite values of ``rows``, and for each row the means that its codes stand for.

    Code b has the values at ``(b - 2) sigma RANGE / BINS`` from the row's mean, to the nearest, and
    the lowest and highest code all beyond. So rows keep their sums (SparseLoCo, arXiv 2508.15706;
    MuLoCo, 2505.23725). Both divide by n - 1 in sigma; with n, two values never share a code.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        shift = rows.mean(axis=1, keepdims=True)
        offsets = rows - shift
        sigma = np.sqrt(np.einsum("ij,ij->i", offsets, offsets) / rows.shape[1])
    if rows.dtype == np.float32 and not ((sigma > 1e-15) & (sigma < 1e15)).all():
        return quantised(rows.astype(np.float64))  # squares beyond the range of float32
    places = offsets / np.where(sigma, RANGE / BINS * sigma, 1).astype(rows.dtype)[:, None]
    places += BINS / 2
    np.rint(places, out=places)
    codes = np.clip(places, 0, BINS - 1, out=places).astype(np.uint8)
    means = np.empty((len(rows), BINS))
    for code in range(BINS):
        those = (codes == code).astype(rows.dtype)
        means[:, code] = np.einsum("ij,ij->i", those, offsets) / np.maximum(those.sum(axis=1), 1)
    return codes, (means + shift).astype(np.float32)


def dequantised(codes: Codes, means: Floats) -> Floats:
    return np.take(means, codes + BINS * np.arange(len(codes))[:, None])


def quantiser_gamma(numel: int) -> float:
    """Return a bound on the share of a row's energy that `quantised` loses.

    In units of sigma, from the mean: the values x beyond 0.75, which have codes of their own on
    either side, hold 1 - 0.75^2 of the energy at least, and none is beyond sqrt(n). So their mean
    |x| over all, S, is at least 0.4375 / sqrt(n), and by Cauchy-Schwarz codes keep 0.75 S or more.
    """
    return 1 - 0.75 * (1 - 0.75**2) / math.sqrt(max(numel, 1))
