"""A trainer's accumulated gradients for the next round, with their weight, samples and loss."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from colab_swarm.averaging.group import bits_of, flags_of
from colab_swarm.errors import StepError, require
from colab_swarm.tensors.codecs import ErrorFeedback
from colab_swarm.tensors.device import Flag, all_finite, hand_over, in_main_memory
from colab_swarm.tensors.device_vector import DeviceFeedback, DeviceVector
from colab_swarm.tensors.vector import HostVector, Vector
from colab_swarm.training.flat import GradientSum, clear_gradients
from colab_swarm.training.placement import ModelVector, Placement
from colab_swarm.training.replica import Replica
from colab_swarm.training.settings import RoundInput, StepOffer
from colab_swarm.training.watch import TrainedParameters

logger = logging.getLogger(__name__)

_FEEDBACK_DECAY = 0.95  # what SparseLoCo's error feedback is multiplied by after each round


def _brought(value: float | torch.Tensor, device: torch.device) -> float | torch.Tensor:
    """Return a number as it is, and a tensor on this ``device``; a model may be on several devices."""
    return value.to(device) if isinstance(value, torch.Tensor) else value


class MeanLoss:
    """The weighted mean of the finite losses; tensors stay on their devices until `value` reads the mean.

    ``sums`` has the sum of the losses times their weights, and the sum of these weights.
    """

    def __init__(self) -> None:
        self.sums: tuple[float | torch.Tensor, float | torch.Tensor] = 0.0, 0.0

    def add(self, loss: float | torch.Tensor, weight: float, counts: torch.Tensor | bool = True) -> None:
        """Add a loss, if the loss is finite and ``counts`` is True; ``counts`` may be a bool tensor on a device."""
        value = torch.as_tensor(loss, dtype=torch.float32).detach().mean()
        if isinstance(counts, torch.Tensor) and in_main_memory(value.device):
            # The loss goes to the flag's device, because moving the flag here would wait for the device.
            value = torch.full((), float(value), dtype=torch.float32, device=counts.device)
        finite = value.isfinite() & _brought(counts, value.device)
        total = _brought(self.sums[0], value.device) + torch.where(finite, value, 0.0) * weight
        counted = _brought(self.sums[1], value.device) + finite * weight
        # One assignment sets both, because another thread may read them.
        self.sums = total, counted

    @property
    def value(self) -> float | None:
        """The mean, or None if no loss was added; may wait for a GPU. Thread-safe."""
        total, weight = map(float, self.sums)
        if not weight or not math.isfinite(total):
            return None
        return total / weight


def finite_gradients(parameters: Iterable[torch.Tensor]) -> Flag:
    """Return a flag that is True if no gradient has a NaN or Inf."""
    return all_finite([p.grad.to_dense() for p in parameters if p.grad is not None and p.grad.numel()])


def require_gradient(parameters: Iterable[torch.Tensor]) -> None:
    """Raise `StepError` if no parameter has a gradient."""
    require(
        any(parameter.grad is not None for parameter in parameters),
        "no parameter has a gradient since the last step(): call loss.backward() before optimizer.step()",
        StepError,
    )


@dataclass(frozen=True)
class GradientCheck:
    """A flag that tells if a gradient is ``finite``, its samples and weight, and the indices of its parameters."""

    finite: Flag
    samples: float
    weight: float
    used: list[int]


def _less(total: float, part: float) -> float:
    """Return a ``total`` without a ``part`` of it; 0 if only a rounding error is left."""
    left = total - part
    return left if left > 1e-9 * part else 0.0


def _own(vector: Vector) -> ModelVector:
    """Return the vector, which `Gradients` made, with its exact type."""
    assert isinstance(vector, HostVector | DeviceVector)
    return vector


class Gradients:
    """A sum of gradients, each times its weight. *Samples* fill the batch; *weight* is the weight in the mean.

    With local steps (DiLoCo, Douillard et al. 2023) the contribution is the *pseudo-gradient*: the parameters of the
    last round minus the present parameters. In the vector, the change of the model's buffers comes first.

    ``feedback`` is the part of the last contribution that compression cut off. It is added to the next contribution
    without regard to weights: if it were multiplied by the ratio of the two weights, the feedback of a long round would
    ruin a short round. With SparseLoCo the feedback decays, and replaces the outer momentum.

    Memory limits the size of the model, so the sum itself is scaled and becomes the contribution, and the mean
    overwrites the contribution. ``held(vector)`` is True while another peer may still recover chunks from a vector. So
    two vectors take turns. If a round runs while the next sum begins, there is a third vector. If a round gave no mean,
    the contribution becomes the sum again: see `_take_back`. ``placement`` decides where vectors lie, with at most
    ``device_memory`` bytes on devices; None allows all free memory. An interrupt within a round may leave means of
    the group in the vector. These then count as this peer's gradients.
    """

    def __init__(
        self,
        replica: Replica,
        held: Callable[[Vector], bool],
        *,
        error_feedback: bool = False,
        device_memory: float | None = None,
    ) -> None:
        self._replica = replica
        self._trained = TrainedParameters(replica)
        self.placement = Placement(replica, held, error_feedback=error_feedback, limit_bytes=device_memory)
        self.feedback: ErrorFeedback | DeviceFeedback | None = None
        if error_feedback:
            self.feedback = ErrorFeedback(replica.numel)
        self.dropped_in_row = 0  # how many gradients in a row, up to the last one, were not finite
        self._begin()

    def _begin(self) -> None:
        # The sum of gradients since the last local step. None if the sum is 0, or became the contribution.
        self._sum: GradientSum | None = None
        self._checks: list[GradientCheck] = []  # of gradients in the sum that were not checked yet
        self._given: RoundInput | None = None  # the contribution, until it is averaged or taken back
        self.samples = 0.0
        self.dropped = 0.0  # samples whose gradients were not finite, until they are reported
        self.weight = 0.0
        self._since = 0.0  # weight since the last local step
        # For each parameter, True if it got no gradient since the last round; with local steps, since the last step.
        self._unused = [True] * len(self._replica.model)
        self.loss = MeanLoss()

    def check(self) -> list[str]:
        """Return new sentences for the user.

        Raises `RuntimeError` if the trained parameters changed, and `StepError` if no parameter has a gradient.
        """
        sentences = self._trained.check()
        require_gradient(self._replica.model)
        return sentences

    def add(
        self,
        samples: float,
        weight: float,
        loss: float | torch.Tensor | None,
        *,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Add the model's gradient, which is a mean over ``weight``, multiplied by ``scale``.

        A gradient that is not finite does not count. In main memory `add` checks this immediately. On a device the next
        `add` checks it, so that nothing waits for the device.
        """
        model = self._replica.model
        finite = finite_gradients(model)
        used = [index for index, parameter in enumerate(model) if weight and parameter.grad is not None]
        self._take_back(self._given)
        if weight and (self.placement.on_devices or finite.read()):
            counts = finite.value if self.placement.on_devices else None
            self._total().add_gradients(model, weight=weight, scale=scale, counts=counts)
        self._checks.append(GradientCheck(finite, samples, weight, used))
        clear_gradients(model)
        self.samples += samples
        self.weight += weight
        self._since += weight
        if loss is not None:
            self.loss.add(loss, weight, finite.value)
        self.read_checks(newest=not self.placement.on_devices)

    def read_checks(self, *, newest: bool = True) -> None:
        """Read which gradients were finite, and uncount the others; the ``newest`` gradient may be left unread."""
        while len(self._checks) > (not newest):
            check = self._checks.pop(0)
            if check.finite.read():
                self.dropped_in_row = 0
                for index in check.used:
                    self._unused[index] = False
            else:
                self.dropped_in_row += 1
                self.dropped += check.samples
                self.samples = _less(self.samples, check.samples)
                self.weight = _less(self.weight, check.weight)
                self._since = _less(self._since, check.weight)

    def _total(self) -> GradientSum:
        """Return the sum; if the model moved to another device, the sum moves, too."""
        before = self._sum
        if before is not None and before.values.lies_with(self._replica.model):
            return before
        total = GradientSum(self.placement.new_sum())
        if before is not None and before.factor is not None:
            total.add(before.values, before.factor)
        self._sum = total
        return total

    def step(self) -> None:
        if self._since:
            total = self._total()
            self._replica.step_alone(total.mean(self._since), self._unused)
            # The next sum uses the same memory.
            total.factor = None
            self._since = 0.0
            self._unused = [True] * len(self._replica.model)

    def offer(self) -> StepOffer:
        """Check all gradients, and return a description of the contribution that they will give."""
        self.read_checks()
        unused = b""
        if self.weight and not self._replica.rule.local:
            unused = bits_of(self._unused)
        digests = self._replica.digests
        return StepOffer(self.weight, self.loss.value, unused, digests.rates, digests.changed)

    def contribution(self) -> RoundInput:
        """Return this peer's contribution to a round; call this after `offer`, which checks all gradients."""
        self._take_back(self._given)
        if self._replica.rule.local:
            # The step comes before the decision where vectors lie, because it takes memory.
            self.step()
            self._sum = None
        try:
            self.placement.decide()
            vector, feedback = self._new_contribution()
        except torch.OutOfMemoryError as error:
            if not self.placement.leave_devices(error):
                raise
            vector, feedback = self._new_contribution()
        # From here on nothing allocates memory on a device, so the sum cannot be lost.
        self._sum = None
        if feedback is not None:
            self.feedback = feedback
            vector.begin(feedback, adds=self.weight > 0)
        if isinstance(vector, DeviceVector):
            hand_over(vector.body)
        unused = bits_of(self._unused) if self.weight and not self._replica.rule.local else b""
        self._given = RoundInput(
            vector, self.weight, self.samples, self._replica.fine, self.loss.value, unused
        )
        return self._given

    def _new_contribution(self) -> tuple[ModelVector, Any]:
        """Return a vector with the pseudo-gradient or the sum, and the error feedback, moved to the vector's place."""
        if self._replica.rule.local:
            vector = self.placement.new_vector()
            self._replica.pseudo_gradient(self.placement.values_of(vector))
        else:
            vector = self.placement.vector_of(self._total().mean(self.weight))
        with self._replica.lock:
            self._replica.buffers.write_change(vector.front_of(self._replica.front))
        feedback = self.feedback
        if feedback is None:
            return vector, None
        if isinstance(feedback, DeviceFeedback) and not feedback.lies_with(vector):
            feedback = ErrorFeedback(self._replica.numel, feedback.state_dict())
        if isinstance(feedback, ErrorFeedback) and isinstance(vector, DeviceVector):
            feedback = DeviceFeedback(vector, feedback)
        feedback.begin()
        return vector, feedback

    def state(self) -> dict[str, Any]:
        if self.feedback is None:
            return {}
        return {"feedback": self.feedback.state_dict()}

    def feedback_of(self, state: Mapping[str, Any]) -> ErrorFeedback | None:
        """Return the error feedback of a checkpoint; raises `StateError` if it does not fit."""
        if self.feedback is None:
            return None
        return ErrorFeedback(self._replica.numel, state.get("feedback"))

    def forget(self) -> None:
        """Start a new sum; the error feedback stays."""
        if self._given is not None and self._replica.rule.delayed:
            self.placement.aside = _own(self._given.vector)
        self._begin()
        if self._replica.rule.local and not self._replica.rule.delayed:
            self._replica.show()

    def on_delivered(self, contribution: RoundInput) -> None:
        if self.feedback is not None and contribution.weight:
            self.feedback.settle(_FEEDBACK_DECAY if self._replica.rule.sparse else 1.0)
            if isinstance(self.feedback, DeviceFeedback):
                hand_over(self.feedback.body)

    def on_returned(self, contribution: RoundInput) -> None:
        """Take back the contribution of a delayed update that found no round."""
        self.placement.aside = None
        self._replica.stay()
        self._take_back(contribution)
        self.samples += contribution.samples
        self.weight += contribution.weight
        if contribution.loss is not None:
            self.loss.add(contribution.loss, contribution.weight)

    def _take_back(self, given: RoundInput | None) -> None:
        self._given = None
        if given is None or not given.weight or self._replica.rule.local:
            return
        flags = flags_of(given.unused, len(self._unused))
        self._unused = [unused and flag for unused, flag in zip(self._unused, flags, strict=True)]
        vector = _own(given.vector)
        values = self.placement.sum_from(vector) if self._sum is None else None
        if values is not None:
            self._sum = GradientSum(values, given.weight)
        else:
            # The new sum must not be placed in this vector's memory.
            self.placement.aside = vector
            self._total().add(self.placement.values_of(vector), given.weight)
            self.placement.aside = None
        if self.feedback is not None:
            # Subtracted here, because the next contribution adds it again.
            self._total().add(self.placement.values_of(self.feedback), -given.weight)
