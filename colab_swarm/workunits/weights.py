"""A model's parameters and buffers as one flat vector, and as the safetensors file that travels over the network."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import nn

from colab_swarm.errors import require
from colab_swarm.tensors.statedict import decode_head, encode_head

Floats: TypeAlias = npt.NDArray[np.float32]

MAX_WHOLE = 1 << 24
"""Integers up to this value are exact in float32."""
KNOWN = 5
"""After this many accepted results, the usual change of the parameters is known."""
MOST = 1e18
"""Largest absolute value. Means and squares of such values are finite in float32."""


def as_bytes(values: Floats) -> memoryview:
    """Return ``values`` as little-endian bytes, without a copy where possible."""
    return values.astype("<f4", copy=False).data.cast("B")


@dataclass(frozen=True)
class Schema:
    """The tensors of a model's state dict: ``entries`` are their names and shapes, in order."""

    entries: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, model: nn.Module) -> "Schema":
        """Return a model's schema; raise ValueError if the model has values that float32 cannot represent."""
        state = model.state_dict()
        for name, values in state.items():
            # results have the same limits
            most = MOST if values.is_floating_point() else MAX_WHOLE
            fits = not values.is_complex() and (values.cpu().double().abs() <= most).all()
            require(
                fits,
                f"{name} holds complex numbers, or some that are not finite, beyond {MOST:g}, or beyond "
                f"{MAX_WHOLE:,} as integers: exclude a mask from the state, by register_buffer(…, persistent=False)",
            )
        return cls(tuple((name, tuple(values.shape)) for name, values in state.items()))

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for _, shape in self.entries)

    @property
    def size_bytes(self) -> int:
        return len(self.head()) + 4 * self.numel

    def head(self) -> bytes:
        """Return the head of a safetensors file with these tensors as float32, in order."""
        return encode_head((name, "float32", shape) for name, shape in self.entries)

    def encode(self, values: Floats) -> bytes:
        """Return ``values`` (numel,) as a safetensors file."""
        return b"".join((self.head(), as_bytes(values)))

    def pack(self, file: bytes | memoryview) -> bytes:
        """Return a file of values, compressed without loss, or unchanged if compression makes it no smaller.

        zstd makes trained float32 values 8 % smaller. They become 8 to 14 % smaller if the file has the first bytes of
        all values together, then the second bytes, and so on, because only signs and exponents resemble each other.
        """
        head_bytes = len(self.head())
        places = np.frombuffer(file, np.uint8, offset=head_bytes).reshape(-1, 4).T
        packed = zstandard.ZstdCompressor(level=1).compress(bytes(file[:head_bytes]) + places.tobytes())
        return min(packed, bytes(file), key=len)

    def unpack(self, data: bytes) -> bytes:
        """Return the file that `pack` compressed, or an uncompressed file unchanged; raise ValueError if garbled."""
        if not data.startswith(zstandard.FRAME_HEADER):
            return data
        try:
            # a frame that announces a larger size would take that much memory
            size = zstandard.frame_content_size(data)
            require(size == self.size_bytes, f"a file of {size:,} bytes, {self.size_bytes:,} expected")
            plain = zstandard.ZstdDecompressor().decompress(data)
        except zstandard.ZstdError as error:
            raise ValueError(f"no compressed parameters: {error}") from error
        head_bytes = len(self.head())
        values = np.frombuffer(plain, np.uint8, offset=head_bytes).reshape(4, -1).T
        return plain[:head_bytes] + values.tobytes()

    def decode(self, data: bytes | memoryview) -> Floats:
        """Return a view of a file's values; raise ValueError if the file has other tensors."""
        head = self.head()
        if bytes(data[: len(head)]) != head:
            raise ValueError(self.difference(data))
        text = f"{len(data):,} bytes, {self.size_bytes:,} expected: cut off or too long"
        require(len(data) == self.size_bytes, text)
        return np.frombuffer(data, dtype="<f4", offset=len(head))

    def difference(self, data: bytes | memoryview) -> str:
        """Return how the head of a file differs from this schema.

        The text may quote the file of an unknown peer, so it is short and printable.
        """
        try:
            tensors, _, _ = decode_head(data)
        except ValueError:
            return "not a safetensors file"
        entries = {(name, entry.shape) for name, entry in tensors.items()}
        expected = set(self.entries)
        words = [f"lacks {name} {shape}" for name, shape in sorted(expected - entries)]
        words += [f"has {name} {shape}" for name, shape in sorted(entries - expected)]
        reason = ", ".join(words) or "other types or order than the model's"
        # the text is written to the log
        return reason[:300].encode("ascii", "backslashreplace")[:300].decode()

    def judge(
        self, data: bytes, base: Floats, changes: Sequence[float], max_change: float, most: float
    ) -> tuple[Floats, float]:
        """Return a result's values (numel,) and the L2 norm of its change from ``base``.

        Raises ValueError if the file is unusable, or if the norm is greater than ``most``. With at least `KNOWN`
        ``changes``, also raises ValueError if the norm is greater than ``max_change`` times their median.
        """
        values = self.decode(data)
        bad = len(values) - int(np.count_nonzero(np.abs(values) <= MOST))
        if bad:
            raise ValueError(
                f"{bad:,} of {len(values):,} values are not finite, or beyond {MOST:g}: a lower learning rate may help"
            )
        limit = f"over {most:.3g}"
        if len(changes) >= KNOWN:
            usual = statistics.median(changes)
            if max_change * usual < most:
                most = max_change * usual
                limit = f"usually it is {usual:.3g} and {max_change:g} times as much is allowed (max_change)"
        change = moved(values, base)
        require(change <= most, f"training moved the parameters by {change:.3g}, {limit}")
        return values, change

    def flatten(self, model: nn.Module) -> Floats:
        """Return a copy of all values of ``model`` (numel,)."""
        state = model.state_dict()
        parts = [state[name].detach().reshape(-1).to("cpu", torch.float32) for name, _ in self.entries]
        if not parts:
            return np.zeros(0, np.float32)
        return torch.cat(parts).numpy()

    def load(self, model: nn.Module, values: Floats) -> None:
        state = model.state_dict()
        ends = np.cumsum([math.prod(shape) for _, shape in self.entries])
        parts = np.split(np.array(values), ends[:-1])
        with torch.no_grad():
            for (name, shape), part in zip(self.entries, parts, strict=True):
                target = state[name]
                if not target.is_floating_point():
                    part = part.round()
                target.copy_(torch.from_numpy(part).reshape(shape))


PIECE = 1 << 16
"""How many values are processed at a time, so that they stay in the processor's cache."""


def assimilate(server: Floats, result: Floats, alpha: float) -> Floats:
    """Return the server's parameters after a result: ``W_s <- alpha W_s + (1 - alpha) W_c``.

    W_s are the server's parameters, and W_c is the result. Both are (numel,) in float32; ``alpha`` is in [0, 1). This
    is equation 1 of "Distributed Deep Learning Using Volunteer Computing-Like Paradigm". After n results in any order,
    the weight of the parameters before them is ``alpha^n``. Each repetition of equation 1 multiplies the weights of all
    earlier results by alpha. Equation 2 as printed, the sum after n results, lacks these powers of alpha.
    """
    # start from the vector with the larger weight: rounding is least, and zero if both agree or alpha is 0
    near = server
    far = result
    weight = 1 - alpha
    if alpha < 0.5:
        near = result
        far = server
        weight = alpha
    new = np.empty(server.shape, np.float32)
    for start in range(0, len(server), PIECE):
        piece = slice(start, start + PIECE)
        step = np.subtract(far[piece], near[piece], out=new[piece])
        np.multiply(step, np.float32(weight), out=step)
        np.add(step, near[piece], out=step)
    return new


def moved(values: Floats, base: Floats) -> float:
    """Return the L2 norm of ``values - base``, summed in float64; not finite if a value is not finite."""
    total = 0.0
    # the values of an unknown peer may overflow
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(values), PIECE):
            piece = slice(start, start + PIECE)
            change = np.subtract(values[piece], base[piece], dtype=np.float64)
            total += float(change @ change)
    return float(np.sqrt(total))
