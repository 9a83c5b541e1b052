"""What every codec promises, and what all of them are made with."""

from __future__ import annotations

from typing import Protocol, TypeAlias

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
