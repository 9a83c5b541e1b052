"""LAMB and LARS, optimizers for large batches, which the recipes for ALBERT and SwAV use."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from colab_swarm.errors import require


class _Layerwise(torch.optim.Optimizer):
    """Updates one tensor at a time, as fast as updates of lists of tensors, with temporary memory for one tensor."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient; return the closure's loss, if one is given.

        Raises `RuntimeError`, with nothing changed, if a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        weights = []
        for group in self.param_groups:
            weights += [(weight, group) for weight in group["params"] if weight.grad is not None]
        # All gradients are checked before the first parameter is changed.
        text = f"{type(self).__name__} does not support sparse gradients: use sparse=False in the embedding"
        require(not any(weight.grad.is_sparse for weight, _ in weights), text, RuntimeError)
        for weight, group in weights:
            self._step_tensor(weight, weight.grad, group)
        return loss

    def _step_tensor(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(_Layerwise):
    """Adam whose step is scaled, for each tensor, by the ratio of the weight's norm to the step's norm.

    For each parameter tensor w, with its gradient g and the step t = 1, 2, … (You et al. 2020, Algorithm 2)::

        m <- b1 m + (1 - b1) g            v <- b2 v + (1 - b2) g^2
        r  = m^ / (sqrt(v^) + eps) + weight_decay w        with m^ = m / (1 - b1^t), v^ = v / (1 - b2^t)
        w <- w - lr min(|w|, clamp) / |r| r                a ratio with a zero norm is taken as 1

    Usual values for ALBERT-large are ``lr=1.76e-3`` at batch 4096, and no ``weight_decay`` for biases and
    layer norms. Raises `ValueError` if an argument is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clamp: float = 1e4,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay), ("clamp", clamp)):
            require(value >= 0 and (not math.isinf(value)), f"{name}={value} must be a finite number >= 0")
        text = f"betas={betas} must be two numbers in [0, 1)"
        require(len(betas) == 2 and all(0 <= beta < 1 for beta in betas), text)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clamp": clamp}
        super().__init__(params, defaults)

    def _step_tensor(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"]
        square = state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step = state["step"].item()
        root = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        update = mean.div(root).div_(1 - beta1**step).add_(weight, alpha=group["weight_decay"])
        weight_norm = _norm(weight).clamp(max=group["clamp"])
        update_norm = _norm(update)
        # Computed on the device: reading the norms here would make the host wait at every tensor.
        trust = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        weight.sub_(update.mul_(trust * group["lr"]))


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm


class Lars(_Layerwise):
    """SGD with momentum; each tensor's gradient is scaled by the ratio of the weight's norm to the gradient's norm.

    For each parameter tensor w with its gradient g (You, Gitman and Ginsburg 2017; LARC as in NVIDIA's apex)::

        r = trust |w| / (|g| + weight_decay |w| + 1e-8)      LARC ("clip"):  r = min(r / lr, 1)
        m <- momentum m + r (g + weight_decay w)             if |w| or |g| is 0:  m <- momentum m + g
        w <- w - lr m

    A group whose ``lr`` is 0 is frozen: its momentum does not change until the scheduler raises ``lr``.
    With ``clip`` the ratio only lowers the learning rate. A usual value is ``lr=4.8`` at batch 4096 (SwAV).
    Raises `ValueError` if an argument is out of its range.
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
            require(value >= 0 and (not math.isinf(value)), f"{name}={value} must be a finite number >= 0")
        require(0 <= momentum < 1, f"momentum={momentum} must be in [0, 1)")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"trust": trust, "clip": clip})

    def _step_tensor(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        lr = group["lr"]
        decay = group["weight_decay"]
        if not lr:
            return
        weight_norm = _norm(weight)
        gradient_norm = _norm(gradient)
        adapts = (weight_norm > 0) & (gradient_norm > 0)
        ratio = group["trust"] * weight_norm / (gradient_norm + decay * weight_norm + 1e-8)
        if group["clip"]:
            ratio = (ratio / lr).clamp(max=1.0)
        update = gradient.add(weight * adapts, alpha=decay)
        update.mul_(torch.where(adapts, ratio, 1.0))
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        weight.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(update), alpha=lr)
