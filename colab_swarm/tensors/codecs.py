"""Codecs for float32 vectors on the wire. They know the encoded size in advance and reject invalid input.

    codec       bytes a value    error of one value x                            NaN, and values too large
    ==========  ===============  ==============================================  ===============================
    float32     4                none                                            unchanged
    float16     2                <= 2^-11 |x|, at least 2^-25                    NaN stays; beyond 65504 clamps
    bfloat16    2                <= 2^-8 |x|                                     NaN stays; beyond 3.39e38 clamps
    int8        1 + 1/1024       <= max|block| / 250; blocks under 1e-35 are 0   the decoder refuses the block
    onebit      1/8 + 1/512      up to max|block|                                the encoder refuses the vector
    sparseloco  0.027            |x|; 1.5 sigma for the largest 1 in 64          the encoder refuses the vector
    topk:0.01   0.051            |x| unless it is among the largest 1 %          the encoder refuses the vector

Use the codecs below int8 with error feedback (`ErrorFeedback`), which adds the lost part to the next vector. All
numbers are little-endian. If the process has loaded torch, casts to 16 bits use torch, at ten times numpy's speed.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from colab_swarm.errors import StateError, require
from colab_swarm.tensors.sparse import SparseLoCo, TopK
from colab_swarm.tensors.vectors import (
    BLOCK_VALUES,
    MAX_BLOCKS,
    Buffer,
    Floats,
    all_finite,
    block_count,
    block_rows,
    checked,
    require_finite,
    target,
)

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCK_VALUES", "CODECS", "MAX_BLOCKS", "Buffer", "Codec", "ErrorFeedback", "Floats", "Precision"]
__all__ += ["all_finite", "codec_of", "mean_codec_for"]


class Codec(Protocol):
    """One wire format of a flat float32 vector."""

    @property
    def name(self) -> str: ...

    def encoded_bytes(self, numel: int) -> int:
        """Return the exact size of ``numel`` encoded values."""

    def gamma(self, numel: int) -> float:
        """Return the smallest known gamma, from 0 to 1, for which ``||Q(w) - w||^2 <= gamma ||w||^2``.

        w has ``numel`` values, and Q(w) is the decoded encoding of w. Values beyond the codec's
        range, or too small to differ from 0, are excluded (Elastic Consistency, equation 25).
        """

    def encode(self, values: Floats) -> Buffer:
        """Return the encoded form of a contiguous vector, perhaps as a view.

        onebit, sparseloco and topk raise ValueError if a value is not finite.
        """

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        """Return ``numel`` decoded values: a read-only view of ``buffer``, a view of ``scratch``, or a new array.

        Raises ValueError if the length of the buffer is not `encoded_bytes`, or if its content is invalid.
        """


FLOAT16_MAX = 65504.0
BFLOAT16_MAX = float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])
_MAX_MEAN_GAMMA = 0.1
SMALLEST_SCALED = np.float32(1e-35)  # for smaller values, 127 / max|block| would overflow
LARGEST_SCALE = np.nextafter(np.float32(np.finfo(np.float32).max / 127), np.float32(0))
# Number of values in a cast. From 32,768 values on, torch wakes a thread for each core, which takes longer than the
# cast. Two peers on a machine with 16 cores were blocked by this.
_CAST_VALUES = 7 * BLOCK_VALUES


def codec_of(name: str) -> Codec:
    """Return the codec with a name in `CODECS`, or with a name such as topk:0.01 (any fraction).

    Raises ValueError if there is no such codec, or if the fraction is not written in its shortest form.
    """
    if name in CODECS:
        return CODECS[name]
    share = re.fullmatch(r"topk:(0\.[0-9]+)", name)
    if share is None:
        raise ValueError(f"unknown codec {name!r}: choose one of {', '.join(_PRECISIONS)} or topk:0.01")
    codec = TopK(float(share[1]))
    require(codec.name == name, f"write codec {name!r} as {codec.name!r}: all peers must use the same name")
    return codec


def mean_codec_for(codec: str) -> str:
    """Return the codec of the mean for contributions in ``codec``.

    A reducer keeps no residual, so the mean needs a codec that works without error feedback.
    """
    if Precision(codec).widest.gamma(BLOCK_VALUES) <= _MAX_MEAN_GAMMA:
        return codec
    return "float16"


@dataclass(frozen=True)
class Precision:
    """One codec, or ``adaptive``: small tensors as float16, the others as int8.

    Normalization layers and biases are few but sensitive (hivemind's SizeAdaptiveCompression).
    """

    name: str  # name of a codec, or adaptive
    # number of values of small tensors, at the front of the vector; if None, all values count as fine
    fine: int | None = None

    def __post_init__(self) -> None:
        if self.name != _ADAPTIVE:
            codec_of(self.name)

    def at(self, start: int) -> Codec:
        if self.name != _ADAPTIVE:
            return codec_of(self.name)
        return CODECS["float16" if self.fine is None or start < self.fine else "int8"]

    @property
    def widest(self) -> Codec:
        """The codec with the most bytes that `at` may return."""
        if self.name == _ADAPTIVE:
            return CODECS["float16"]
        return codec_of(self.name)


def _as_bytes(array: npt.NDArray[Any]) -> memoryview:
    return array.view(np.uint8).data if array.size else memoryview(b"")


class _Float32:
    """Unchanged values, without a copy in either direction."""

    name = "float32"

    def encoded_bytes(self, numel: int) -> int:
        return 4 * numel

    def gamma(self, numel: int) -> float:
        return 0.0

    def encode(self, values: Floats) -> Buffer:
        return _as_bytes(values)

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        return np.frombuffer(checked(buffer, 4 * numel), np.float32)


class _Float16:
    """IEEE half precision; larger values and infinities are clamped to +-65504."""

    name = "float16"

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def gamma(self, numel: int) -> float:
        return 2.0**-22

    def encode(self, values: Floats) -> Buffer:
        torch = sys.modules.get("torch")
        if torch is None:  # loading torch only for a cast would take seconds
            return _as_bytes(np.clip(values, -FLOAT16_MAX, FLOAT16_MAX).astype(np.float16))
        halves = torch.empty(len(values), dtype=torch.float16)
        pieces = zip(halves.split(_CAST_VALUES), torch.from_numpy(values).split(_CAST_VALUES), strict=True)
        for half, piece in pieces:
            half.copy_(piece.clamp(-FLOAT16_MAX, FLOAT16_MAX))
        return _as_bytes(halves.numpy())

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        halves = np.frombuffer(checked(buffer, 2 * numel), np.int16)
        out = target(numel, scratch)
        torch = sys.modules.get("torch")
        if torch is None or not numel:
            out[:] = halves.view(np.float16)
            return out
        encoded = torch.frombuffer(bytearray(halves), dtype=torch.float16)
        for piece, half in zip(
            torch.from_numpy(out).split(_CAST_VALUES), encoded.split(_CAST_VALUES), strict=True
        ):
            piece.copy_(half)
        return out


class _BFloat16:
    """The upper half of a float32, rounded to nearest even; values beyond 3.39e38 and infinities are clamped."""

    name = "bfloat16"

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def gamma(self, numel: int) -> float:
        return 2.0**-16

    def encode(self, values: Floats) -> Buffer:
        bits = np.clip(values, -BFLOAT16_MAX, BFLOAT16_MAX).view(np.uint32)
        rounded = bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))
        rounded[np.isnan(values)] = 0x7FC00000
        return _as_bytes((rounded >> 16).astype(np.uint16))

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        upper = np.frombuffer(checked(buffer, 2 * numel), np.uint16)
        out = target(numel, scratch)
        np.left_shift(upper, 16, out=out.view(np.uint32), dtype=np.uint32)
        return out


class _Int8:
    """Blocks of 4096 values, each as int8 multiples of max|block| / 127 (absmax scaling).

    Layout: one float32 scale per block, then one int8 per value; the last block may be short.
    """

    name = "int8"

    def encoded_bytes(self, numel: int) -> int:
        return 4 * block_count(numel) + numel

    def gamma(self, numel: int) -> float:
        return min(numel, BLOCK_VALUES) / 250**2

    def encode(self, values: Floats) -> Buffer:
        numel = len(values)
        blocks = block_count(len(values))
        encoded = bytearray(self.encoded_bytes(numel))
        scales = np.frombuffer(encoded, np.float32, count=blocks)
        levels = np.frombuffer(encoded, np.int8, offset=4 * blocks)
        for (here, rows), (_, out) in zip(block_rows(values), block_rows(levels), strict=True):
            largest = np.maximum(rows.max(axis=1), -rows.min(axis=1))
            tiny = largest < SMALLEST_SCALED
            with np.errstate(all="ignore"):  # NaN or infinity makes the scale NaN, which the decoder refuses
                scale = np.where(np.isfinite(largest), np.minimum(largest / 127, LARGEST_SCALE), np.nan)
                scales[here] = np.where(tiny, 0, scale)
                steps = rows * np.where(tiny, 0, 127 / largest).astype(np.float32)[:, None]
                np.rint(steps, out=steps)
                out[:] = steps.astype(np.int8)
        return encoded

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        blocks = block_count(numel)
        checked(buffer, self.encoded_bytes(numel))
        scales = np.frombuffer(buffer, np.float32, count=blocks)
        text = "an int8 block has a scale that is negative, infinite or not a number"
        require(bool(((scales >= 0) & (scales <= LARGEST_SCALE)).all()), text)
        if numel:
            levels = np.frombuffer(buffer, np.int8, offset=4 * blocks)
        else:
            levels = np.empty(0, np.int8)
        out = target(numel, scratch)
        for (here, rows), (_, steps) in zip(block_rows(out), block_rows(levels), strict=True):
            np.multiply(steps, scales[here, None], out=rows)
        return out


class _OneBit:
    """In each block of 4096 values, each value becomes the mean of the positive values, or of the other values.

    Layout: two float32 means per block, then one bit per value (Elastic Consistency, section 5.2).
    """

    name = "onebit"

    def encoded_bytes(self, numel: int) -> int:
        return 8 * block_count(numel) + -(-numel // 8)

    def gamma(self, numel: int) -> float:
        return 1 - 1 / min(numel, BLOCK_VALUES) if numel else 0.0

    def encode(self, values: Floats) -> Buffer:
        means = np.empty((block_count(len(values)), 2), np.float32)
        for here, rows in block_rows(values):
            over = np.count_nonzero(rows > 0, axis=1)
            sums = [part(rows, 0).sum(axis=1, dtype=np.float64) for part in (np.maximum, np.minimum)]
            means[here] = (np.array(sums) / np.maximum([over, rows.shape[1] - over], 1)).T
        require_finite(means, self.name)
        return means.tobytes() + np.packbits(values > 0).tobytes()

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        encoded = np.frombuffer(checked(buffer, self.encoded_bytes(numel)), np.uint8)
        means = encoded[: 8 * block_count(numel)].view(np.float32).reshape(-1, 2)
        text = "a onebit block has means that are not finite, or of the wrong sign"
        require(all_finite(means) and (means[:, 0] >= 0).all() and (means[:, 1] <= 0).all(), text)
        over = np.unpackbits(encoded[means.nbytes :], count=numel)
        out = target(numel, scratch)
        for (here, rows), (_, bits) in zip(block_rows(out), block_rows(over), strict=True):
            np.multiply(bits, means[here, :1], out=rows)
            rows += (1 - bits) * means[here, 1:]
        return out


_ALL = _Float32(), _Float16(), _BFloat16(), _Int8(), _OneBit(), SparseLoCo()
CODECS: dict[str, Codec] = {codec.name: codec for codec in _ALL}
_ADAPTIVE = "adaptive"
_PRECISIONS = (*CODECS, _ADAPTIVE)  # names for `Precision`, in addition to topk


class ErrorFeedback:
    """The residual of one peer: the part that compression cuts off a vector, which is sent with the next vector.

    ``w = residual + g; send Q(w); residual <- w - Q(w)`` (Seide et al. 2014; Stich et al. 2018;
    Elastic Consistency, section 5.2). A vector may be sent in pieces, and sending may fail, so the
    residual changes only in `settle`. ``state`` is a `state_dict` from which to resume; raises StateError if it does
    not contain ``numel`` finite values.
    """

    def __init__(self, numel: int, state: Mapping[str, Any] | None = None) -> None:
        self.residual: Floats = np.zeros(numel, np.float32)
        self._cut = np.zeros_like(self.residual)
        if state is None:
            return
        try:
            residual: Floats = np.asarray(state["residual"], np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"this is not a state of error feedback: {error!r}") from error
        require(
            residual.shape == (numel,) and all_finite(residual),
            f"error feedback needs {numel} finite values, the state has shape {residual.shape}: "
            "it belongs to another model",
            StateError,
        )
        self.residual[:] = residual

    def begin(self) -> None:
        """Start sending a vector, or start again. Pieces for which `cut_off` is not called lose nothing."""
        self._cut.fill(0.0)

    def cut_off(self, start: int, wanted: Floats, arrived: Floats) -> None:
        """Record the loss of the piece at ``start``: ``wanted`` includes the residual; others decode ``arrived``."""
        np.subtract(wanted, arrived, out=self._cut[start : start + len(wanted)])

    def encode(self, codec: Codec, start: int, values: Floats) -> tuple[Buffer, Floats]:
        """Add the residual to the piece at ``start``; return the encoded sum, and the values that others decode."""
        wanted = values + self.residual[start : start + len(values)]
        encoded = codec.encode(wanted)
        arrived = codec.decode(encoded, len(wanted))
        self.cut_off(start, wanted, arrived)
        return encoded, arrived

    def settle(self, decay: float = 1.0) -> None:
        """Make the loss of a vector that arrived, times ``decay``, the new residual."""
        np.multiply(self._cut, np.float32(decay), out=self.residual)

    def state_dict(self) -> "dict[str, torch.Tensor]":
        import torch  # imported here, because a peer that only reduces runs without torch

        return {"residual": torch.from_numpy(self.residual)}
