"""A trainer's accumulated gradients for the next round, with their weight, samples and loss."""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from colab_swarm.averaging.group import bits_of, flags_of
from colab_swarm.averaging.member import UploadEncoding
from colab_swarm.errors import NoGradientError, require
from colab_swarm.tensors.codecs import ErrorFeedback, Floats
from colab_swarm.tensors.vector import HostVector
from colab_swarm.training.fit import names_of
from colab_swarm.training.flat import parts, reals
from colab_swarm.training.replica import Replica
from colab_swarm.training.settings import RoundInput

logger = logging.getLogger(__name__)

_FEEDBACK_DECAY = 0.95  # a round, of SparseLoCo
_USUAL_ROUNDS = 5  # whose pseudo-gradients say what is usual
_LOOK_STEPS = 10  # in which another optimizer has taken a step


class MeanLoss:
    """The weighted mean of losses that are finite; tensors stay where they are until it is shown."""

    def __init__(self) -> None:
        self._state: tuple[float | torch.Tensor, float | torch.Tensor] = 0.0, 0.0  # sum by weight, weight

    def add(self, loss: float | torch.Tensor, weight: float) -> None:
        value = torch.as_tensor(loss, dtype=torch.float32).detach().mean()
        finite = value.isfinite()
        total, counted = self._state
        # One assignment: another thread may read both.
        self._state = total + torch.where(finite, value, 0.0) * weight, counted + finite * weight

    @property
    def value(self) -> float | None:
        """The mean, or None without any; waits for a GPU. Thread-safe."""
        total, weight = map(float, self._state)
        if not weight or not math.isfinite(total):
            return None
        return total / weight


def finite_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether no gradient has a NaN or Inf."""
    gradients = [p.grad.to_dense() for p in parameters if p.grad is not None and p.grad.numel()]
    # The norm of squares is twenty times faster, but overflows; then the other one decides.
    norms = (torch.nn.utils.get_total_norm(gradients, order) for order in (2.0, math.inf))
    return any(norm.isfinite() for norm in norms)


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
    return [
        (one, one._version) for one in _parameters(replica) if one.requires_grad and id(one) not in trained
    ]


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
        self, replica: Replica, held: Callable[[HostVector], bool], *, error_feedback: bool = False
    ) -> None:
        self._replica = replica
        self._trainable = _trainable(replica)
        # When to look whether another optimizer trains them, and which; none: it is done.
        self._bystanders = replica.step + _LOOK_STEPS, _bystanders(replica)
        self._held = held
        self._vectors: list[HostVector] = []
        self._sum: HostVector | None = None  # of gradients; None: it is 0, or given
        self._given: RoundInput | None = None  # the contribution, until it is averaged or taken back
        self._aside: HostVector | None = None  # the contribution of a delayed update
        self.feedback: ErrorFeedback | None = None
        if error_feedback:
            self.feedback = ErrorFeedback(replica.numel)
        self.samples = 0.0
        self.weight = 0.0
        self._since = 0.0  # weight since the last local step
        # Of each parameter, whether no gradient came since the last round; with local steps, since the last of them.
        self._unused = self._all_unused()
        self.loss = MeanLoss()
        self._norms: deque[float] = deque(maxlen=_USUAL_ROUNDS)  # of the last pseudo-gradients

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
            left = [one for one, version in bystanders if one.grad is not None and one._version == version]
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
    ) -> str | None:
        """Add the model's gradient, a mean by ``weight`` times ``scale``; return the reason if it is dropped."""
        finite = finite_gradients(self._replica.model)
        divisor = 1.0
        if scale is not None:
            divisor = float(scale)
        self._take_back(self._given)
        if finite and weight:
            for parameter, part in parts(self._replica.model, self._total()[self._replica.front :]):
                if parameter.grad is not None:
                    part.add_(reals(parameter.grad.detach()).to(part), alpha=weight / divisor)
            for index, parameter in enumerate(self._replica.model):
                if parameter.grad is not None:
                    self._unused[index] = False
        self._replica.zero_grad()
        if not finite:
            return f"a gradient of {samples:g} samples was not finite (NaN or Inf)"
        self.samples += samples
        self.weight += weight
        self._since += weight
        if loss is not None:
            self.loss.add(loss, weight)
        return None

    def _total(self) -> Floats:
        """Return the sum; a new one takes a vector that no round reads."""
        if self._sum is None:
            self._sum = self._free_vector()
            self._sum.values.fill(0.0)
        return self._sum.values

    def _free_vector(self) -> HostVector:
        for vector in self._vectors:
            if vector is not self._aside and not self._held(vector):
                return vector
        vector = HostVector(np.empty(self._replica.numel, np.float32))
        self._vectors.append(vector)
        return vector

    def step(self) -> None:
        if self._since:
            gradient = self._total()[self._replica.front :]
            gradient *= np.float32(1 / self._since)
            self._replica.step_alone(gradient, self._unused)
            self._sum = None
            self._since = 0.0
            self._unused = self._all_unused()

    def contribution(self) -> RoundInput:
        """Return what to average."""
        self._take_back(self._given)
        front = self._replica.front
        if self._replica.rule.local:
            self.step()
            self._replica.pseudo_gradient(self._total()[front:])
        values = self._total()
        times_usual = self._times_usual(values[front:])
        vector = self._sum
        assert vector is not None
        self._sum = None
        if self.weight and not self._replica.rule.local:
            values[front:] *= np.float32(1 / self.weight)
        with self._replica.lock:
            self._replica.buffers.write_change(values[:front])
        if self.feedback is not None:
            if self.weight:
                values += self.feedback.residual
            self.feedback.begin()
        vector.feedback = self.feedback
        encoding = UploadEncoding(fine=self._replica.fine)
        unused = b""
        if self.weight and not self._replica.rule.local:
            unused = bits_of(self._unused)
        self._given = RoundInput(
            vector, self.weight, self.samples, encoding, self.loss.value, unused, times_usual
        )
        return self._given

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
            self._aside = self._given.vector
        self._sum = None
        self._given = None
        self.samples = 0.0
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
        values = torch.from_numpy(given.vector.values)
        if self._sum is None and not self._held(given.vector):
            self._sum = given.vector
            values.mul_(given.weight)
        else:
            torch.from_numpy(self._total()).add_(values, alpha=given.weight)
        if self.feedback is not None:
            # The next contribution adds it again.
            torch.from_numpy(self._total()).sub_(torch.from_numpy(self.feedback.residual), alpha=given.weight)
