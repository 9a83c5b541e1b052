"""The gradients or values of a list of parameters as one flat float32 vector on the CPU."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from colab_swarm.tensors.codecs import Floats

SMALL_VALUES = 1 << 16  # tensors with fewer values are small: biases, normalization layers


class FlatVector:
    """Layout of parameters in a flat vector, small ones first. They may have any device and floating dtype.

    Attributes:
        numel: values of all parameters.
        fine: values of the small ones, at the front.
        schema: 16-byte digest of the shapes and dtypes in order; it differs between models.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        given = list(parameters)
        layout = [(tuple(parameter.shape), str(parameter.dtype)) for parameter in given]
        self._parameters: Sequence[torch.Tensor] = sorted(given, key=lambda one: one.numel() >= SMALL_VALUES)
        self.fine = sum(one.numel() for one in given if one.numel() < SMALL_VALUES)
        self.numel = sum(parameter.numel() for parameter in self._parameters)
        self.schema = hashlib.sha256(repr(layout).encode()).digest()[:16]

    def accumulate(self, total: Floats, weight: float) -> bool:
        """``total += weight * gradients``; a parameter without gradient counts as zero.

        Returns:
            False, with ``total`` unchanged, if a gradient is not finite.
        """
        largest = [  # a NaN or an infinity shows in the largest magnitude
            torch.linalg.vector_norm(p.grad.detach(), float("inf")).float().cpu()
            for p in self._parameters
            if p.grad is not None and p.grad.numel()
        ]
        if largest and not torch.stack(largest).isfinite().all():
            return False
        for parameter, part in self._parts(total):
            if parameter.grad is not None:
                part.add_(parameter.grad.detach().to(part), alpha=weight)
        return True

    def to_gradients(self, values: Floats) -> None:
        """Set every parameter's gradient from the flat vector."""
        for parameter, part in self._parts(values):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.detach().copy_(part)

    @torch.no_grad()
    def copy_to(self, values: Floats) -> None:
        """Copy the parameters' values into the flat vector."""
        for parameter, part in self._parts(values):
            part.copy_(parameter)

    @torch.no_grad()
    def subtract_from(self, values: Floats) -> None:
        """``values -= parameters``."""
        for parameter, part in self._parts(values):
            part.sub_(parameter.to(part))

    def _parts(self, values: Floats) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        if values.shape != (self.numel,):
            raise ValueError(f"expected a flat vector of {self.numel} values, got shape {values.shape}")
        flat = torch.from_numpy(values)
        parts = torch.split(flat, [parameter.numel() for parameter in self._parameters])
        return ((p, part.view(p.shape)) for p, part in zip(self._parameters, parts, strict=True))
