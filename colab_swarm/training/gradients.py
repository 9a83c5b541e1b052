"""A trainer's accumulated gradients for the next round, with their weight, samples and loss."""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from colab_swarm.averaging.group import bits_of, flags_of
from colab_swarm.averaging.member import UploadEncoding
from colab_swarm.errors import NoGradientError, require
from colab_swarm.tensors.codecs import ErrorFeedback, Floats
from colab_swarm.tensors.device import Flag, all_finite, hand_over, host_values, in_main_memory
from colab_swarm.tensors.device_vector import DeviceFeedback, DeviceVector
from colab_swarm.tensors.vector import HostVector, Vector
from colab_swarm.training.fit import names_of
from colab_swarm.training.flat import FlatValues
from colab_swarm.training.replica import Mode, Replica
from colab_swarm.training.settings import RoundInput

logger = logging.getLogger(__name__)

_FEEDBACK_DECAY = 0.95  # a round, of SparseLoCo
_USUAL_ROUNDS = 5  # whose pseudo-gradients say what is usual
_LOOK_STEPS = 10  # in which another optimizer has taken a step


def _brought(value: float | torch.Tensor, device: torch.device) -> float | torch.Tensor:
    """Return a number, or a tensor on this device: a model may span several."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return value


class MeanLoss:
    """The weighted mean of the finite losses; tensors stay where they are until it is shown."""

    def __init__(self) -> None:
        self._state: tuple[float | torch.Tensor, float | torch.Tensor] = 0.0, 0.0  # sum by weight, weight

    def add(self, loss: float | torch.Tensor, weight: float, counts: torch.Tensor | bool = True) -> None:
        """Add a loss if it is finite, and ``counts``, a bool that may be on a device."""
        value = torch.as_tensor(loss, dtype=torch.float32).detach().mean()
        finite = value.isfinite() & _brought(counts, value.device)
        total = _brought(self._state[0], value.device) + torch.where(finite, value, 0.0) * weight
        counted = _brought(self._state[1], value.device) + finite * weight
        # One assignment: another thread may read both.
        self._state = total, counted

    @property
    def value(self) -> float | None:
        """The mean, or None without any; waits for a GPU. Thread-safe."""
        total, weight = map(float, self._state)
        if not weight or not math.isfinite(total):
            return None
        return total / weight


def finite_gradients(parameters: Iterable[torch.Tensor]) -> Flag:
    """Return whether no gradient has a NaN or Inf."""
    return all_finite([p.grad.to_dense() for p in parameters if p.grad is not None and p.grad.numel()])


def require_gradient(parameters: Iterable[torch.Tensor]) -> None:
    """Raise `NoGradientError` if no parameter has a gradient."""
    require(
        any(parameter.grad is not None for parameter in parameters),
        "no parameter has a gradient since the last step(): call loss.backward() before optimizer.step()",
        NoGradientError,
    )


def _parameters(replica: Replica) -> Iterable[torch.Tensor]:
    """Return the model's parameters, as far as they are known."""
    if replica.rule.model is None:
        return replica.model
    return replica.rule.model.parameters()


def _trainable(replica: Replica) -> list[bool]:
    """Return which parameters take gradients now."""
    return [parameter.requires_grad for parameter in _parameters(replica)]


def _bystanders(replica: Replica) -> list[tuple[torch.Tensor, int]]:
    """Return the parameters that take gradients, but are not this optimizer's, and how often each was changed."""
    trained = set(map(id, replica.model))
    bystanders = []
    for parameter in _parameters(replica):
        if parameter.requires_grad and id(parameter) not in trained:
            bystanders.append((parameter, parameter._version))
    return bystanders


@dataclass(frozen=True)
class GradientCheck:
    """Whether a gradient is ``finite``, with its samples and weight, and which parameters it is of."""

    finite: Flag
    samples: float
    weight: float
    used: list[int]


def _less(total: float, part: float) -> float:
    """Return what is left of a sum without this part of it; nothing, if only rounding is left."""
    left = total - part
    return left if left > 1e-9 * part else 0.0


ModelVector: TypeAlias = HostVector | DeviceVector


def _own(vector: Vector) -> ModelVector:
    """Return a vector that `Gradients` made."""
    assert isinstance(vector, HostVector | DeviceVector)
    return vector


class Gradients:
    """A sum of gradients, each times its weight. *Samples* fill the batch, *weight* weighs the mean.

    With local steps (DiLoCo, Douillard et al. 2023) the contribution is the *pseudo-gradient*: the
    parameters of the last round minus the present ones. In front of either is the change of the
    model's buffers. ``feedback`` is what compression cut off the last contribution. It is added to the next one
    whatever that weighs: times the ratio of their weights, a long round's would ruin a short one. With SparseLoCo
    it decays, and is the outer momentum.

    Memory is what limits the model, so the contribution is the sum itself, scaled, and its mean replaces it.
    ``held(vector)``: another peer may still recover chunks from it. So there are two vectors in turn, and a third
    where a round runs while the next sum begins. If there was no mean, the sum is taken back: `_take_back`.
    An interrupt within a round may have left means of the group in it; they count as this peer's gradients.
    """

    def __init__(
        self, replica: Replica, held: Callable[[Vector], bool], *, error_feedback: bool = False
    ) -> None:
        self._replica = replica
        self._trainable = _trainable(replica)
        # When to look whether another optimizer trains them, and which; none: it is done.
        self._bystanders = replica.step + _LOOK_STEPS, _bystanders(replica)
        self._held = held
        self._vectors: list[HostVector] = []
        self._sum: FlatValues | None = None  # of gradients; None: it is 0, or given
        self._vector: ModelVector | None = None  # whose values the sum is; None: it must be copied
        self._checks: list[GradientCheck] = []  # of gradients in the sum
        self._given: RoundInput | None = None  # the contribution, until it is averaged or taken back
        self._aside: ModelVector | None = None  # the contribution of a delayed update
        self.feedback: ErrorFeedback | DeviceFeedback | None = None
        if error_feedback:
            self.feedback = ErrorFeedback(replica.numel)
        self.samples = 0.0
        self.dropped = 0.0  # samples that were not finite, until they are reported
        self.weight = 0.0
        self._since = 0.0  # weight since the last local step
        # Of each parameter, whether no gradient came since the last round; with local steps, since the last of them.
        self._unused = self._all_unused()
        self.loss = MeanLoss()
        self._norms: deque[float] = deque(maxlen=_USUAL_ROUNDS)  # of the last pseudo-gradients

    @property
    def _in_main_memory(self) -> bool:
        return all(in_main_memory(parameter.device) for parameter in self._replica.model)

    def _all_unused(self) -> list[bool]:
        return [True] * len(self._replica.model)

    def check(self) -> None:
        """Raise `RuntimeError` if parameters were frozen or unfrozen, or there is no gradient to count."""
        require(
            self._trainable == _trainable(self._replica),
            "parameters were frozen or unfrozen: make a new optimizer over the trainable ones, and pass it to "
            "swarm.optimizer(…) again, at all peers",
            RuntimeError,
        )
        require_gradient(self._replica.model)
        look_step, bystanders = self._bystanders
        if bystanders and self._replica.step >= look_step:
            self._bystanders = look_step, []
            left = []
            for parameter, version in bystanders:
                if parameter.grad is not None and parameter._version == version:
                    left.append(parameter)
            text = (
                "no optimizer trains %s of model=… (%d in all), nor are they compared: train or freeze them"
            )
            if left:
                logger.warning(text, names_of(self._replica.rule.model, left)[0], len(left))

    def add(
        self,
        samples: float,
        weight: float,
        loss: float | torch.Tensor | None,
        *,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Add the model's gradient, a mean by ``weight`` times ``scale``.

        If it is not finite it is taken out again: now or, on a device, with the next one, so that nothing waits for it.
        """
        model = self._replica.model
        finite = finite_gradients(model)
        used = [index for index, parameter in enumerate(model) if weight and parameter.grad is not None]
        self._take_back(self._given)
        if weight and not (self._in_main_memory and not finite.read()):
            counts = None if self._in_main_memory else finite.value
            self._total().add_gradients(model, weight=weight, scale=scale, counts=counts)
        self._checks.append(GradientCheck(finite, samples, weight, used))
        self._replica.zero_grad()
        self.samples += samples
        self.weight += weight
        self._since += weight
        if loss is not None:
            self.loss.add(loss, weight, finite.value)
        self.read_checks(newest=self._in_main_memory)

    def read_checks(self, *, newest: bool = True) -> None:
        """Read whether the gradients, the ``newest`` too, were finite; take out those that were not."""
        while len(self._checks) > (not newest):
            check = self._checks.pop(0)
            if check.finite.read():
                for index in check.used:
                    self._unused[index] = False
            else:
                self.dropped += check.samples
                self.samples = _less(self.samples, check.samples)
                self.weight = _less(self.weight, check.weight)
                self._since = _less(self._since, check.weight)

    def _total(self) -> FlatValues:
        """Return the sum; a new one takes a vector that no round reads, or memory of the device."""
        if self._sum is None:
            model = self._replica.model
            self._vector = None
            if self._in_main_memory:
                vector = self._free_vector()
                vector.values.fill(0.0)
                self._sum = FlatValues(model, vector.values[self._replica.front :])
                self._vector = vector
            else:
                self._sum = FlatValues(model)
                if self._replica.rule.mode is Mode.DIRECT:
                    front = np.zeros(self._replica.front, np.float32)
                    self._vector = DeviceVector(front, self._sum.segments)
        return self._sum

    def _free_vector(self) -> HostVector:
        for vector in self._vectors:
            if vector is not self._aside and not self._held(vector):
                return vector
        vector = HostVector(host_values(self._replica.numel, self._replica.model[0].device))
        self._vectors.append(vector)
        return vector

    def step(self) -> None:
        if self._since:
            total = self._total()
            total.multiply(1 / self._since)
            self._replica.step_alone(total, self._unused)
            self._sum = None
            self._since = 0.0
            self._unused = self._all_unused()

    def contribution(self) -> RoundInput:
        """Return what to average; all gradients are settled."""
        self._take_back(self._given)
        times_usual = 1.0
        vector: ModelVector
        if self._replica.rule.local:
            vector = self._pseudo_gradient()
            times_usual = self._times_usual(vector.values[self._replica.front :])
        else:
            vector = self._mean_gradient()
        with self._replica.lock:
            self._replica.buffers.write_change(vector.front_of(self._replica.front))
        if self.feedback is not None:
            self._begin(vector, self.feedback)
        if isinstance(vector, DeviceVector):
            hand_over(vector.body)
        encoding = UploadEncoding(fine=self._replica.fine)
        unused = b""
        if self.weight and not self._replica.rule.local:
            unused = bits_of(self._unused)
        self._given = RoundInput(
            vector, self.weight, self.samples, encoding, self.loss.value, unused, times_usual
        )
        return self._given

    def _begin(self, vector: ModelVector, feedback: ErrorFeedback | DeviceFeedback) -> None:
        adds = self.weight > 0
        if isinstance(vector, DeviceVector):
            self.feedback = vector.begin(feedback, adds=adds)
            return
        if isinstance(feedback, DeviceFeedback):
            # The model has left the device.
            feedback = ErrorFeedback(self._replica.numel, feedback.state_dict())
            self.feedback = feedback
        vector.begin(feedback, adds=adds)

    def _pseudo_gradient(self) -> HostVector:
        self.step()
        vector = self._free_vector()
        self._replica.pseudo_gradient(vector.values[self._replica.front :])
        return vector

    def _mean_gradient(self) -> ModelVector:
        total = self._total()
        if self.weight:
            total.multiply(1 / self.weight)
        vector = self._vector
        self._vector = None
        self._sum = None
        if vector is not None:
            return vector
        copy = self._free_vector()
        total.write_to(copy.values[self._replica.front :])
        return copy

    def _times_usual(self, pseudo_gradient: Floats) -> float:
        """Return how many times as long it is as those of the last rounds; 1 for gradients, and at the beginning."""
        if not (self._replica.rule.local and self.weight):
            return 1.0
        norm = float(np.linalg.norm(pseudo_gradient))
        usual = statistics.median(self._norms) if len(self._norms) == _USUAL_ROUNDS else norm
        self._norms.append(norm)
        return norm / usual if usual else 1.0

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
            self._aside = _own(self._given.vector)
        self._sum = None
        self._vector = None
        self._given = None
        self._checks = []
        self.samples = 0.0
        self.dropped = 0.0
        self.weight = 0.0
        self._since = 0.0
        self._unused = self._all_unused()
        self.loss = MeanLoss()
        if self._replica.rule.local and not self._replica.rule.delayed:
            self._replica.show()

    def on_delivered(self, contribution: RoundInput) -> None:
        if self.feedback is not None and contribution.weight:
            decay = 1.0
            if self._replica.rule.sparse:
                decay = _FEEDBACK_DECAY
            self.feedback.settle(decay)
            if isinstance(self.feedback, DeviceFeedback):
                hand_over(self.feedback.body)

    def on_returned(self, contribution: RoundInput) -> None:
        """Take back the contribution of a delayed update that found no round."""
        self._aside = None
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
        for index, flag in enumerate(flags):
            self._unused[index] = self._unused[index] and flag
        vector = _own(given.vector)
        if self._sum is None and not self._held(vector) and self._holds_sums(vector):
            self._vector = vector
            self._sum = self._flat_of(vector)
            self._sum.multiply(given.weight)
        else:
            self._total().add(self._flat_of(vector).segments, given.weight)
        if self.feedback is not None:
            # The next contribution adds it again.
            self._total().add(self._flat_of(self.feedback).segments, -given.weight)

    def _holds_sums(self, vector: ModelVector) -> bool:
        """Return True if the next sum may go on in this vector."""
        return self._in_main_memory or isinstance(vector, DeviceVector)

    def _flat_of(self, held: ModelVector | ErrorFeedback | DeviceFeedback) -> FlatValues:
        """Return the values of the parameters, where these are."""
        model = self._replica.model
        if isinstance(held, DeviceVector | DeviceFeedback):
            return FlatValues(model, segments=held.body)
        values = held.values if isinstance(held, HostVector) else held.residual
        flat = FlatValues(model, values[self._replica.front :])
        flat.read_from(values[self._replica.front :])
        return flat
