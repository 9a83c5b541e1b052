"""LARS and LARC, the optimizers for large batches of images that the swarm's SwAV recipe uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

EPS = 1e-8
"""Added to the gradient's norm in the ratio."""


class Lars(torch.optim.Optimizer):
    """SGD with momentum whose gradient is scaled per tensor by the ratio of weight norm to gradient norm.

    With g the gradient, for each parameter tensor w (You, Gitman and Ginsburg 2017; LARC as in NVIDIA's apex)::

        r = trust |w| / (|g| + weight_decay |w| + eps)       LARC ("clip"):  r = min(r / lr, 1)
        m <- momentum m + r (g + weight_decay w)             a zero norm: g itself, without decay
        w <- w - lr m

    A group whose ``lr`` is 0 is frozen: nothing piles up in its momentum, so it begins calmly when the scheduler
    lets it.

    Args:
        params: parameters or parameter groups.
        lr: learning rate; 4.8 at batch 4096 for SwAV.
        momentum: in [0, 1).
        weight_decay: inside the ratio.
        trust: the ratio's factor, "trust coefficient".
        clip: LARC: the ratio only lowers the learning rate, it never raises it.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        clip: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("trust", trust)):
            if not value >= 0 or math.isinf(value):
                raise ValueError(f"{name}={value} must be a finite number >= 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} must be in [0, 1)")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"trust": trust, "clip": clip})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters that have a gradient; returns the closure's loss, if one is given.

        Raises:
            RuntimeError: a gradient is sparse; nothing is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [
            (w, w.grad, group)
            for group in self.param_groups
            if group["lr"]
            for w in group["params"]
            if w.grad is not None
        ]
        if any(gradient.is_sparse for _, gradient, _ in work):
            raise RuntimeError("Lars does not support sparse gradients: use sparse=False in the embedding")
        for weight, gradient, group in work:
            self._step_tensor(weight, gradient, group)
        return loss

    def _step_tensor(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        lr, decay = group["lr"], group["weight_decay"]
        weight_norm, gradient_norm = _norm(weight), _norm(gradient)
        # On the device: reading the norms here would make the host wait for it at every tensor.
        adapts = (weight_norm > 0) & (gradient_norm > 0)
        ratio = group["trust"] * weight_norm / (gradient_norm + decay * weight_norm + EPS)
        if group["clip"]:
            ratio = (ratio / lr).clamp(max=1.0)
        update = gradient.add(weight * adapts, alpha=decay)
        update.mul_(torch.where(adapts, ratio, 1.0))
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(update)
        weight.sub_(momentum, alpha=lr)


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm
