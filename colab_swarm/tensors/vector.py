"""The vector of a round as averaging uses it: its pieces are encoded for others, and are overwritten by means."""

import math
from typing import Protocol

import numpy as np

from colab_swarm.errors import require
from colab_swarm.tensors.codecs import Buffer, Codec, ErrorFeedback, Floats
from colab_swarm.tensors.vectors import root_mean_square


def require_credible(rms: float, most_rms: float) -> None:
    """Raise ValueError unless a mean's root mean square is below the limit; with a NaN, always raise it."""
    require(rms < most_rms, f"a mean is not finite, or far too large: {rms:.3g}")


class Vector(Protocol):
    """A flat float32 vector of ``numel`` values, in main memory or on devices. ``stop`` is exclusive."""

    @property
    def numel(self) -> int: ...

    def encode(self, start: int, stop: int, codec: Codec) -> Buffer:
        """Return these values encoded, perhaps as a view; raises ValueError if the codec refuses the values.

        If the vector has error feedback, it records what the codec cuts off.
        """

    def keep_loss(self, start: int, stop: int, codec: Codec, payload: Buffer) -> None:
        """Record in the error feedback, if there is one, the difference between these values and their encoded form.

        An empty ``payload`` stands for zeros.
        """

    def read(self, start: int, stop: int) -> Floats:
        """Return these values in main memory, perhaps as a view."""

    def take(
        self, start: int, stop: int, codec: Codec, payload: Buffer, *, most_rms: float = math.inf
    ) -> None:
        """Replace these values by an encoded mean.

        Raises ValueError, with nothing changed, if the codec refuses the mean, or if the root mean square of its values
        is NaN or not below ``most_rms``.
        """


class HostVector:
    """A vector in main memory, whose ``values`` are float32 and contiguous; `read` returns views of them.

    ``feedback`` records what codecs cut off; `begin` sets it for a contribution.
    """

    def __init__(self, values: Floats, feedback: ErrorFeedback | None = None) -> None:
        if values.ndim != 1 or values.dtype != np.float32 or not values.flags.c_contiguous:
            got = f"{values.dtype}{values.shape}"
            raise ValueError(f"float32 values are needed in one dimension and in one piece, got {got}")
        self.values = values
        self.feedback = feedback
        self._scratch = np.empty(0, np.float32)  # memory to decode one piece

    @property
    def numel(self) -> int:
        return len(self.values)

    def front_of(self, numel: int) -> Floats:
        """Return the first values, as a view."""
        return self.values[:numel]

    def begin(self, feedback: ErrorFeedback, *, adds: bool) -> None:
        """Start sending with this error feedback, after a call of its own `begin`; if ``adds``, add its residual."""
        if adds:
            self.values += feedback.residual
        self.feedback = feedback

    def encode(self, start: int, stop: int, codec: Codec) -> Buffer:
        encoded = codec.encode(self.values[start:stop])
        if codec.name != "float32":
            self.keep_loss(start, stop, codec, encoded)
        return encoded

    def keep_loss(self, start: int, stop: int, codec: Codec, payload: Buffer) -> None:
        if self.feedback is None:
            return
        values = self.values[start:stop]
        arrived = self._scratch_of(len(values))[: len(values)]
        if len(payload):
            arrived = codec.decode(payload, len(values), scratch=arrived)
        else:
            arrived.fill(0.0)
        self.feedback.cut_off(start, values, arrived)

    def read(self, start: int, stop: int) -> Floats:
        return self.values[start:stop]

    def take(
        self, start: int, stop: int, codec: Codec, payload: Buffer, *, most_rms: float = math.inf
    ) -> None:
        mean = codec.decode(payload, stop - start, scratch=self._scratch_of(stop - start))
        require_credible(root_mean_square(mean), most_rms)
        self.values[start:stop] = mean

    def _scratch_of(self, numel: int) -> Floats:
        if len(self._scratch) < numel:
            self._scratch = np.empty(numel, np.float32)
        return self._scratch
