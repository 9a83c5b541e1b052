"""The vector of a round as the averaging sees it: encoded for others, and overwritten by means, piece by piece."""

from typing import Protocol

import numpy as np

from colab_swarm.tensors.codecs import Buffer, Codec, ErrorFeedback, Floats


class Vector(Protocol):
    """A flat float32 vector of ``numel`` values, wherever it lies. ``stop`` is exclusive."""

    @property
    def numel(self) -> int: ...

    def encode(self, start: int, stop: int, codec: Codec) -> Buffer:
        """Return these values encoded, maybe as a view; raises ValueError if the codec refuses them.

        What the codec cuts off is kept as error feedback, if the vector has any.
        """

    def read(self, start: int, stop: int) -> Floats:
        """Return these values in main memory, maybe as a view."""

    def write(self, start: int, stop: int, values: Floats) -> None:
        """Replace these values by their mean."""


class HostVector:
    """A vector in main memory: ``values``, float32 and contiguous; `read` returns views of it.

    ``feedback`` records what codecs cut off; `Gradients` sets it for each contribution.
    """

    def __init__(self, values: Floats, feedback: ErrorFeedback | None = None) -> None:
        if values.ndim != 1 or values.dtype != np.float32 or not values.flags.c_contiguous:
            got = f"{values.dtype}{values.shape}"
            raise ValueError(f"float32 values are needed in one dimension and in one piece, got {got}")
        self.values = values
        self.feedback = feedback
        self._scratch = np.empty(0, np.float32)  # of one piece, to decode what was encoded

    @property
    def numel(self) -> int:
        return len(self.values)

    def encode(self, start: int, stop: int, codec: Codec) -> Buffer:
        values = self.values[start:stop]
        encoded = codec.encode(values)
        if self.feedback is not None and codec.name != "float32":
            if len(self._scratch) < len(values):
                self._scratch = np.empty(len(values), np.float32)
            self.feedback.cut_off(start, values, codec.decode(encoded, len(values), scratch=self._scratch))
        return encoded

    def read(self, start: int, stop: int) -> Floats:
        return self.values[start:stop]

    def write(self, start: int, stop: int, values: Floats) -> None:
        self.values[start:stop] = values
