"""A model's gradients as one flat vector, cut into buckets that are full one by one while backward goes on.

The vector begins with the last parameters, which have their gradients first. Buckets are of equal size, whatever the
sizes of the layers: a bucket is full when all parameters that reach into it have their gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from colab_swarm.tensors.codecs import BLOCK_VALUES, Floats

FEWEST = 4
"""Buckets of a model, if it is not tiny: so that most are on their way before backward ends."""


class Buckets:
    """The buckets of one model.

    Args:
        parameters: in the order of the model's layers.
        most: values of a bucket, at most; a multiple of `BLOCK_VALUES`.
        on_full: ``on_full(bucket, values)``: a bucket of this step is full; on the thread that runs backward. The
            values are a view of `vector` and do not change any more.

    Attributes:
        sizes: values of each bucket.
        vector: the gradient of this step, as far as it is there.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], *, most: int, on_full: Callable[[int, Floats], None]
    ) -> None:
        self._on_full = on_full
        self._lock = threading.Lock()  # a model on several devices gets gradients on several threads
        self._starts: dict[torch.Tensor, int] = {}
        numel = 0
        for parameter in reversed(parameters):
            self._starts[parameter] = numel
            numel += parameter.numel()
        self._size = min(most, max(1, numel // (FEWEST * BLOCK_VALUES)) * BLOCK_VALUES)
        self.sizes = [min(self._size, numel - at) for at in range(0, numel, self._size)]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]
        self.begin()

    def begin(self) -> None:
        """A new step: no gradient is there."""
        self.vector: Floats = np.empty(sum(self.sizes), np.float32)
        self._tensor = torch.from_numpy(self.vector)
        self._absent = dict.fromkeys(self._starts)  # in order
        self._open_parts = [0] * len(self.sizes)
        for parameter in self._starts:
            for bucket in self._reached_by(parameter):
                self._open_parts[bucket] += 1

    @property
    def lacking(self) -> bool:
        """Whether a parameter has no gradient yet."""
        return bool(self._absent)

    def flush(self) -> None:
        """Backward is over: parameters that got no gradient have a zero one."""
        for parameter in list(self._absent):
            self._take(parameter, None)

    def span(self, bucket: int) -> slice:
        """Where a bucket lies in the vector."""
        return slice(bucket * self._size, bucket * self._size + self.sizes[bucket])

    @torch.no_grad()
    def to_gradients(self, gradients: Sequence[Floats]) -> None:
        """Set the parameters' gradients."""
        flat = torch.from_numpy(gradients[0] if len(gradients) == 1 else np.concatenate(gradients))
        for parameter, start in self._starts.items():
            part = flat[start : start + parameter.numel()].view(parameter.shape)
            if parameter.device.type == "cpu" and parameter.dtype == torch.float32:
                parameter.grad = part
            else:
                parameter.grad = part.to(parameter)

    def close(self) -> None:
        """Take no more gradients."""
        for hook in self._hooks:
            hook.remove()

    def _reached_by(self, parameter: torch.Tensor) -> range:
        start = self._starts[parameter]
        return range(start // self._size, -(-(start + parameter.numel()) // self._size))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        with self._lock:
            if parameter not in self._absent:
                raise RuntimeError(
                    "the gradients of this step are on their way already: call optimizer.step() after each backward()"
                )
            self._take(parameter, parameter.grad)

    def _take(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        del self._absent[parameter]
        start = self._starts[parameter]
        part = self._tensor[start : start + parameter.numel()].view(parameter.shape)
        if gradient is None:
            part.zero_()
        else:
            part.copy_(gradient.detach())
        for bucket in self._reached_by(parameter):
            self._open_parts[bucket] -= 1
            if not self._open_parts[bucket]:
                self._on_full(bucket, self.vector[self.span(bucket)])
