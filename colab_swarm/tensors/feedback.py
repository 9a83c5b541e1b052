"""Error feedback: what compression cut off one vector travels with the next.

``w = residual + g; send Q(w); residual <- w - Q(w)`` (Seide et al. 2014; Stich et al. 2018; Elastic Consistency,
section 5.2). The sum of all that was sent so stays within one residual of the sum of all that was meant, whatever Q
cuts off: without it topk and onebit are biased, and training ends elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from colab_swarm.errors import StateError
from colab_swarm.tensors.codecs import Buffer, Codec, Floats, all_finite

if TYPE_CHECKING:
    import torch


class ErrorFeedback:
    """What one peer still owes the others, value by value; its vectors may go in pieces, and may fail.

    The residual changes only when a vector is settled. So whoever saves it meanwhile, or finds that nobody took the
    vector, has what belongs to the last one that arrived.

    Args:
        numel: values of the vector.
        state: of `state_dict`, to go on from; None: nothing is owed.

    Raises:
        StateError: the state is not one of so many values.

    Attributes:
        residual: is to be added to the next vector.
    """

    def __init__(self, numel: int, state: Mapping[str, Any] | None = None) -> None:
        self.residual: Floats = np.zeros(numel, np.float32)
        self._cut = np.zeros_like(self.residual)
        if state is not None:
            self.residual[:] = _checked_residual(state, numel)

    def begin(self) -> None:
        """A vector goes out, or goes out again: pieces of it that are not told of lose nothing."""
        self._cut.fill(0.0)

    def cut_off(self, start: int, wanted: Floats, arrived: Floats) -> None:
        """Of the piece at ``start``, residual included, ``wanted`` was sent, and ``arrived`` is what others get."""
        np.subtract(wanted, arrived, out=self._cut[start : start + len(wanted)])

    def encode(self, codec: Codec, start: int, values: Floats) -> tuple[Buffer, Floats]:
        """The piece at ``start`` with the residual added, encoded; and what others will decode.

        Raises:
            ValueError: the values are not finite, and the codec refuses that.
        """
        wanted = values + self.residual[start : start + len(values)]
        encoded = codec.encode(wanted)
        arrived = codec.decode(encoded, len(wanted))
        self.cut_off(start, wanted, arrived)
        return encoded, arrived

    def settle(self, weight: float = 1.0) -> None:
        """The vector has arrived: what it lost, ``weight`` times, is owed from now on."""
        np.multiply(self._cut, np.float32(weight), out=self.residual)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The residual, for a checkpoint; it shares the memory of the live one."""
        import torch  # those who save have it; those who only reduce do without

        return {"residual": torch.from_numpy(self.residual)}


def _checked_residual(state: Mapping[str, Any], numel: int) -> Floats:
    try:
        residual: Floats = np.asarray(state["residual"], np.float32)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"this is not the state of error feedback: {error!r}") from error
    if residual.shape != (numel,) or not all_finite(residual):
        raise StateError(
            f"error feedback of {numel} finite values is needed, the state has shape {residual.shape}: "
            "it belongs to another model"
        )
    return residual
