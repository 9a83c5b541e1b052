"""The weights that a peer began with, to compare with what came of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from colab_swarm.markup import size

MAX_BYTES = 200_000_000


class Beginning:
    """A copy of the parameters, in half precision and main memory.

    Args:
        parameters: those that are trained, as this peer found them.
        step: the global step that they are of.

    Attributes:
        why_not: why there is no copy; empty if there is one.
    """

    def __init__(self, parameters: Iterable[Tensor], *, step: int) -> None:
        self._parameters = list(parameters)
        self.step = step
        self.why_not = ""
        self._copies: list[Tensor] = []
        size_bytes = 2 * sum(parameter.numel() for parameter in self._parameters)
        if size_bytes > MAX_BYTES:
            copy = f"a copy of the weights that you began with would take {size(size_bytes)}"
            self.why_not = f"{copy}, more than {size(MAX_BYTES)}"
            return
        self._copies = [
            parameter.detach().to("cpu", torch.float16, copy=True) for parameter in self._parameters
        ]

    def is_of(self, model: nn.Module) -> bool:
        """Whether the model is trained here."""
        mine = set(map(id, self._parameters))
        return any(id(parameter) in mine for parameter in model.parameters())

    def weights_of(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's trained parameters as they were, by name; empty if there is no copy."""
        copies = dict(zip(map(id, self._parameters), self._copies, strict=False))
        named = model.named_parameters()
        return {name: copies[id(parameter)] for name, parameter in named if id(parameter) in copies}
