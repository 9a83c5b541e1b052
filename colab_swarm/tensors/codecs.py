"""How float32 values travel: four codecs that know the encoded size in advance and refuse anything odd.

==========  ===============  ==============================================  ===============================
codec       bytes a value    error of one value x                            not a number, too large
==========  ===============  ==============================================  ===============================
float32     4                none                                            as they are
float16     2                <= 2^-11 |x|, at least 2^-25                    NaN stays; beyond 65504 clamps
bfloat16    2                <= 2^-8 |x|                                     NaN stays; beyond 3.39e38 clamps
int8        1 + 1/1024       <= max|block| / 250; blocks under 1e-35 are 0   the decoder refuses the block
==========  ===============  ==============================================  ===============================

Everything is numpy and little-endian. Where the process has loaded torch, the 16-bit casts go through it
(ten times numpy's speed); a peer that only reduces never loads it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Buffer: TypeAlias = bytes | bytearray | memoryview

BLOCK_VALUES = 4096
"""Values that share one scale in the int8 codec; chunk offsets are multiples of it."""
FLOAT16_MAX = 65504.0
BFLOAT16_MAX = float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])
_SMALLEST_SCALED = np.float32(1e-35)  # below it 127 / max|block| would overflow
_LARGEST_SCALE = np.nextafter(np.float32(np.finfo(np.float32).max / 127), np.float32(0))


class Codec(Protocol):
    """One wire format of a flat float32 vector."""

    @property
    def name(self) -> str: ...

    def encoded_bytes(self, numel: int) -> int:
        """Exact size of ``numel`` encoded values."""

    def encode(self, values: Floats) -> Buffer:
        """Encode a contiguous vector; the result may be a view of ``values``."""

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        """Decode exactly ``numel`` values.

        Args:
            scratch: memory of at least ``numel`` values to decode into; saves an allocation.

        Returns:
            The values: a view of ``buffer`` (read-only), of ``scratch``, or a new array.

        Raises:
            ValueError: the buffer's length is not ``encoded_bytes(numel)``, or its content is not valid.
        """


def codec_of(name: str) -> Codec:
    """The codec called ``name``: float32, float16, bfloat16 or int8.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}: choose one of {', '.join(PRECISIONS)}")
    return CODECS[name]


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
            return CODECS[self.name]
        return CODECS["float16" if self.fine is None or start < self.fine else "int8"]

    @property
    def widest(self) -> Codec:
        """Of all that `at` returns, the one that needs most bytes."""
        return CODECS["float16"] if self.name == ADAPTIVE else CODECS[self.name]


def all_finite(values: Floats) -> bool:
    """Whether no value is NaN or infinite."""
    return bool(np.isfinite(values).all())


def _checked(buffer: Buffer, size: int) -> Buffer:
    if len(buffer) != size:
        raise ValueError(f"{len(buffer)} encoded bytes, {size} expected")
    return buffer


def _as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """The array's memory, not copied."""
    return array.view(np.uint8).data if array.size else memoryview(b"")


def _target(numel: int, scratch: Floats | None) -> Floats:
    return np.empty(numel, np.float32) if scratch is None else scratch[:numel]


def _torch() -> Any:
    """Torch if this process uses it anyway; loading it for a cast would cost seconds."""
    return sys.modules.get("torch")


class Float32:
    """Values as they are, without a copy either way."""

    name = "float32"

    def encoded_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: Floats) -> Buffer:
        return _as_bytes(values)

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        return np.frombuffer(_checked(buffer, 4 * numel), np.float32)


class Float16:
    """IEEE half precision; values beyond +-65504, infinities too, clamp to it."""

    name = "float16"

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Floats) -> Buffer:
        clamped: Any
        if torch := _torch():
            clamped = torch.from_numpy(values).clamp(-FLOAT16_MAX, FLOAT16_MAX).half().numpy()
        else:
            clamped = np.clip(values, -FLOAT16_MAX, FLOAT16_MAX).astype(np.float16)
        return _as_bytes(clamped)

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        halves = np.frombuffer(_checked(buffer, 2 * numel), np.int16)
        out = _target(numel, scratch)
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

    def encode(self, values: Floats) -> Buffer:
        bits = np.clip(values, -BFLOAT16_MAX, BFLOAT16_MAX).view(np.uint32)
        rounded = bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))
        rounded[np.isnan(values)] = 0x7FC00000
        upper = (rounded >> 16).astype(np.uint16)
        return _as_bytes(upper)

    def decode(self, buffer: Buffer, numel: int, *, scratch: Floats | None = None) -> Floats:
        upper = np.frombuffer(_checked(buffer, 2 * numel), np.uint16)
        out = _target(numel, scratch)
        np.left_shift(upper, 16, out=out.view(np.uint32), dtype=np.uint32)
        return out


class Int8:
    """Blocks of 4096 values, each as int8 multiples of max|block| / 127 (absmax scaling).

    Layout: one float32 scale per block, then one int8 per value; the last block may be short.
    """

    name = "int8"

    def encoded_bytes(self, numel: int) -> int:
        return 4 * _blocks(numel) + numel

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
        _checked(buffer, self.encoded_bytes(numel))
        scales = np.frombuffer(buffer, np.float32, count=blocks)
        if not bool(((scales >= 0) & (scales <= _LARGEST_SCALE)).all()):
            raise ValueError("an int8 block has a scale that is negative, infinite or not a number")
        levels = np.frombuffer(buffer, np.int8, offset=4 * blocks) if numel else np.empty(0, np.int8)
        out = _target(numel, scratch)
        cut = numel // BLOCK_VALUES * BLOCK_VALUES
        shape = (cut // BLOCK_VALUES, BLOCK_VALUES)
        np.multiply(levels[:cut].reshape(shape), scales[: shape[0], None], out=out[:cut].reshape(shape))
        if cut < numel:
            np.multiply(levels[cut:], scales[-1], out=out[cut:])
        return out


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


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Float32(), Float16(), BFloat16(), Int8())}
ADAPTIVE = "adaptive"
PRECISIONS = (*CODECS, ADAPTIVE)
"""What `Precision` takes."""
