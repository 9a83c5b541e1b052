"""What one peer has gathered for the next round: its own gradients, or the way that its own steps went."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from colab_swarm.averaging.exchange import Sending
from colab_swarm.tensors.feedback import ErrorFeedback
from colab_swarm.training.catch_up import Values
from colab_swarm.training.replica import Replica


class Gradients:
    """A sum of gradients, each times its samples.

    Attributes:
        samples: how many are in it: the weight of this peer's next contribution.
        feedback: what compression cut off the last contribution, times its samples; None: that is not fed back.
    """

    def __init__(self, replica: Replica, *, error_feedback: bool = False) -> None:
        self._replica = replica
        self._sum: Values = np.zeros(replica.flat.numel, np.float32)
        self._values, self._spare = np.zeros_like(self._sum), np.zeros_like(self._sum)
        self.feedback = ErrorFeedback(replica.flat.numel) if error_feedback else None
        self.samples = 0.0
        self._loss_sum, self._loss_samples = 0.0, 0.0

    def add(self, samples: float, loss: float | None) -> str | None:
        """Add the model's gradient, a mean over ``samples``; returns why not if it had to be dropped."""
        finite = self._replica.flat.accumulate(self._sum, samples)
        self._replica.zero_grad()
        if not finite:
            return f"a gradient of {samples:g} samples was not finite (NaN or Inf)"
        self.samples += samples
        if loss is not None and math.isfinite(loss):
            self._loss_sum += float(loss) * samples
            self._loss_samples += samples
        return None

    @property
    def mean_loss(self) -> float | None:
        """Of the samples for which it was told."""
        return self._loss_sum / self._loss_samples if self._loss_samples else None

    def contribution(self, held: Callable[[Values], bool]) -> Values:
        """What to average with the others; ``held(vector)``: whether the swarm may still want a vector of ours."""
        values = self._spare if held(self._values) else self._values
        self._contribute(values)
        return values

    def _contribute(self, values: Values) -> None:
        total = self._sum
        if self.feedback is not None:
            total = np.add(self._sum, self.feedback.residual, out=values)
        np.multiply(total, np.float32(1 / self.samples if self.samples else 0.0), out=values)

    def sending(self) -> Sending:
        """How the contribution travels."""
        if self.feedback is not None:
            self.feedback.begin()
        return Sending(fine=self._replica.flat.fine, feedback=self.feedback)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the replica's state."""
        return {} if self.feedback is None else {"feedback": self.feedback.state_dict()}

    def feedback_of(self, state: Mapping[str, Any]) -> ErrorFeedback | None:
        """As a checkpoint tells it; nothing is owed if it was written without.

        Raises:
            StateError: it belongs to another model.
        """
        return None if self.feedback is None else ErrorFeedback(len(self._sum), state.get("feedback"))

    def forget(self) -> None:
        """Begin anew; what compression cut off is still owed."""
        self._sum.fill(0.0)
        self.samples = 0.0
        self._loss_sum, self._loss_samples = 0.0, 0.0

    def on_delivered(self, weight: float) -> None:
        """A contribution of ``weight`` is in the swarm's mean: what compression cut off goes into the next."""
        if self.feedback is not None and weight:
            self.feedback.settle(weight)

    def on_returned(self, values: Values, weight: float) -> None:
        """A contribution found no round: it is part of the next."""
        self._sum += np.float32(weight) * values
        if self.feedback is not None and weight:
            self._sum -= self.feedback.residual  # which is added to the next as well
        self.samples += weight


class LocalSteps(Gradients):
    """Steps that a peer takes alone between two rounds (DiLoCo, Douillard et al. 2023).

    Its contribution is the *pseudo-gradient*: the parameters of the last round less those it has come to.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._since = 0.0  # samples since the last step

    def add(self, samples: float, loss: float | None) -> str | None:
        dropped = super().add(samples, loss)
        self._since += samples if dropped is None else 0.0
        return dropped

    def step(self) -> None:
        """Take a step with the own gradients since the last."""
        if self._since:
            self._sum *= np.float32(1 / self._since)
            self._replica.step_alone(self._sum)
            self._sum.fill(0.0)
            self._since = 0.0

    def _contribute(self, values: Values) -> None:
        self.step()
        self._replica.pseudo_gradient(values)

    def forget(self) -> None:
        super().forget()
        self._since = 0.0
        self._replica.show()
