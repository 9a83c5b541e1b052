"""What a trainer has accumulated for the next round: gradients, their weight, samples and loss."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from colab_swarm.averaging.exchange import UploadEncoding
from colab_swarm.errors import require
from colab_swarm.tensors.codecs import ErrorFeedback, Floats
from colab_swarm.training.replica import Replica, parts
from colab_swarm.training.settings import RoundInput


class MeanLoss:
    """The weighted mean of losses that are finite; tensors stay where they are until it is shown."""

    def __init__(self) -> None:
        self._state: tuple[float | torch.Tensor, float | torch.Tensor] = 0.0, 0.0  # sum by weight, weight

    def add(self, loss: float | torch.Tensor, weight: float) -> None:
        value = torch.as_tensor(loss, dtype=torch.float32).detach().mean()
        (total, of), counted = self._state, value.isfinite() * weight
        self._state = total + torch.where(value.isfinite(), value, 0.0) * weight, of + counted

    @property
    def value(self) -> float | None:
        """The mean, or None without any; waits for a GPU. Thread-safe."""
        total, weight = map(float, self._state)
        return total / weight if weight else None


def finite_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether no gradient has a NaN or Inf."""
    gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    return bool(torch.nn.utils.get_total_norm(gradients, math.inf).isfinite())


def require_gradient(parameters: Iterable[torch.Tensor]) -> None:
    """Raise `RuntimeError` if no parameter has a gradient."""
    require(
        any(parameter.grad is not None for parameter in parameters),
        "no parameter has a gradient since the last step(): call loss.backward() before optimizer.step()",
        RuntimeError,
    )


class Gradients:
    """A sum of gradients, each times its weight. *Samples* fill the batch, *weight* weighs the mean.

    With local steps (DiLoCo, Douillard et al. 2023) the contribution is the *pseudo-gradient*: the
    parameters of the last round minus the present ones. In front of either is the change of the
    model's buffers. ``feedback`` is what compression cut off the last contribution, times its weight.
    """

    def __init__(self, replica: Replica, *, error_feedback: bool = False) -> None:
        self._replica, self._trainable = replica, replica.trainable()
        self._sum: Floats = np.zeros(replica.numel, np.float32)
        self._values, self._spare = np.zeros_like(self._sum), np.zeros_like(self._sum)
        self.feedback = ErrorFeedback(replica.numel) if error_feedback else None
        self.samples = self.weight = 0.0
        self._since = 0.0  # weight since the last local step
        self.loss = MeanLoss()

    def check(self) -> None:
        """Raise `RuntimeError` if parameters were frozen or unfrozen, or there is no gradient to count."""
        require(
            self._trainable == self._replica.trainable(),
            "parameters were frozen or unfrozen: make a new optimizer over the trainable ones, and pass it to "
            "swarm.optimizer(…) again, at all peers",
            RuntimeError,
        )
        require_gradient(self._replica.model)

    def add(self, samples: float, weight: float, loss: float | torch.Tensor | None) -> str | None:
        """Add the model's gradient, a mean by ``weight``; return the reason if it is dropped."""
        finite = finite_gradients(self._replica.model)
        for parameter, part in parts(self._replica.model, self._gradients) if finite and weight else ():
            if parameter.grad is not None:
                part.add_(parameter.grad.detach().to(part), alpha=weight)
        self._replica.zero_grad()
        if not finite:
            return f"a gradient of {samples:g} samples was not finite (NaN or Inf)"
        self.samples += samples
        self.weight += weight
        self._since += weight
        if loss is not None:
            self.loss.add(loss, weight)
        return None

    @property
    def _gradients(self) -> Floats:
        return self._sum[self._replica.front :]

    def step(self) -> None:
        if self._since:
            gradient = self._gradients
            gradient *= np.float32(1 / self._since)
            self._replica.step_alone(gradient)
            gradient.fill(0.0)
            self._since = 0.0

    def contribution(self, held: Callable[[Floats], bool]) -> RoundInput:
        """Return what to average; ``held(vector)``: another peer may still recover chunks from it."""
        values = self._spare if held(self._values) else self._values
        front = self._replica.front
        if self._replica.rule.local:
            self.step()
            self._replica.pseudo_gradient(values[front:])
        else:
            np.multiply(self._sum, np.float32(1 / self.weight if self.weight else 0.0), out=values)
        self._replica.change_of_buffers(values[:front])
        if self.feedback is not None:
            if self.weight:
                torch.from_numpy(values).add_(torch.from_numpy(self.feedback.residual), alpha=1 / self.weight)
            self.feedback.begin()
        encoding = UploadEncoding(fine=self._replica.fine, feedback=self.feedback)
        return RoundInput(values, self.weight, self.samples, encoding, self.loss.value)

    def state(self) -> dict[str, Any]:
        return {} if self.feedback is None else {"feedback": self.feedback.state_dict()}

    def feedback_of(self, state: Mapping[str, Any]) -> ErrorFeedback | None:
        """Return the error feedback of a checkpoint; raises `StateError` if it does not fit."""
        return None if self.feedback is None else ErrorFeedback(len(self._sum), state.get("feedback"))

    def forget(self) -> None:
        """Start a new sum; the error feedback stays."""
        self._sum.fill(0.0)
        self.samples = self.weight = self._since = 0.0
        self.loss = MeanLoss()
        if self._replica.rule.local:
            self._replica.show()

    def on_delivered(self, contribution: RoundInput) -> None:
        if self.feedback is not None and contribution.weight:
            self.feedback.settle(contribution.weight)

    def on_returned(self, contribution: RoundInput) -> None:
        """Take back a contribution that found no round."""
        weight, front, gradient = contribution.weight, self._replica.front, self._gradients
        gradient += np.float32(weight) * contribution.values[front:]
        if self.feedback is not None and weight:
            gradient -= self.feedback.residual[front:]  # the next contribution adds it again
        self.samples += contribution.samples
        self.weight += weight
