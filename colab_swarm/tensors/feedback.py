"""Error feedback: send what compression cut off one vector with the next.

``w = residual + g; send Q(w); residual <- w - Q(w)`` (Seide et al. 2014; Stich et al. 2018; Elastic
Consistency, section 5.2). So the sum of the sent vectors stays within one residual of the sum of
the true ones. Without it, topk and onebit are biased, and training converges elsewhere.
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
    """The residual of one peer. Its vectors may be sent in pieces, and sending may fail.

    The residual changes only in `settle`. So a checkpoint taken meanwhile, or a failed round, keeps
    the residual of the last vector that arrived.

    Args:
        numel: values of the vector.
        state: a `state_dict` to resume from; None: no residual.

    Raises:
        StateError: the state does not hold ``numel`` finite values.

    Attributes:
        residual: added to the next vector.
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
        if residual.shape != (numel,) or not all_finite(residual):
            raise StateError(
                f"error feedback needs {numel} finite values, the state has shape {residual.shape}: "
                "it belongs to another model"
            )
        self.residual[:] = residual

    def begin(self) -> None:
        """Start sending a vector, or start again: pieces without a `cut_off` lose nothing."""
        self._cut.fill(0.0)

    def cut_off(self, start: int, wanted: Floats, arrived: Floats) -> None:
        """Record the loss of the piece at ``start``: ``wanted``, residual included, decodes as ``arrived``."""
        np.subtract(wanted, arrived, out=self._cut[start : start + len(wanted)])

    def encode(self, codec: Codec, start: int, values: Floats) -> tuple[Buffer, Floats]:
        """Add the residual to the piece at ``start``; return it encoded, and as others decode it.

        Raises:
            ValueError: the values are not finite, and the codec refuses that.
        """
        wanted = values + self.residual[start : start + len(values)]
        encoded = codec.encode(wanted)
        arrived = codec.decode(encoded, len(wanted))
        self.cut_off(start, wanted, arrived)
        return encoded, arrived

    def settle(self, weight: float = 1.0) -> None:
        """Keep the loss of a vector that arrived, times ``weight``, as the new residual."""
        np.multiply(self._cut, np.float32(weight), out=self.residual)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the residual for a checkpoint, without a copy."""
        import torch  # here: a peer that only reduces runs without it

        return {"residual": torch.from_numpy(self.residual)}
