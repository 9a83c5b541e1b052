"""This peer's copy of the training state: parameters, optimizer, scheduler, step and lineage. The torch side.

The user's thread applies updates, and the runtime's thread pool copies snapshots for late joiners.
One lock keeps a copy from seeing half an update. It is never held during network calls.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colab_swarm.averaging.exchange import UploadEncoding
from colab_swarm.errors import StateError
from colab_swarm.tensors.chunks import Snapshot, pack, unpack
from colab_swarm.tensors.codecs import ErrorFeedback, Floats
from colab_swarm.training.progress import LINEAGE_BYTES, next_lineage

T = TypeVar("T")

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""Of the swarm's steps if peers take local ones (DiLoCo, section 3)."""
MAX_SETTING = 1e6
"""Bound on a learning rate and the like in another peer's state."""


@dataclass(frozen=True)
class UpdateRule:
    """How a mean gradient becomes an update: clipping comes after averaging, the scheduler counts global steps.

    Attributes:
        delayed: the optimizer works on copies of the parameters in main memory, off the trainer's
            thread; `Replica.show` copies them to the model.
        local: the optimizer takes this peer's local steps, and Nesterov's SGD the swarm's (DiLoCo).
    """

    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    max_grad_norm: float | None = None
    delayed: bool = False
    local: bool = False


class Replica:
    """One peer's copy of the model's training state.

    Attributes:
        model: the parameters that the trainer computes with.
        parameters: those that the swarm's step updates: the same, or a copy. With delayed updates
            the copy is ahead, with local steps behind.
        lock: held during updates and copies.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self.rule = rule
        groups = rule.optimizer.param_groups
        self.model: list[torch.Tensor] = [p for group in groups for p in group["params"] if p.requires_grad]
        if not self.model:
            raise ValueError("the optimizer has no parameter that requires a gradient: nothing to train")
        self.parameters, self._optimizer = self.model, rule.optimizer
        if rule.local:
            self.parameters = [_copy(parameter) for parameter in self.model]
            self._optimizer = SGD(self.parameters, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        elif rule.delayed:
            self.parameters = _move_to_copies(rule.optimizer)
        self.flat = FlatVector(self.model)
        self._updated = FlatVector(self.parameters)
        self.step = 0
        digest = hashlib.sha256()
        for parameter in self.model:
            digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        self.lineage = digest.digest()[:LINEAGE_BYTES]
        self.lock = threading.RLock()

    @property
    def schema(self) -> bytes:
        """Digest of the averaged vector's layout: peers with another model, or other local steps, do not mix."""
        return hashlib.sha256(self.flat.schema + b"local" * self.rule.local).digest()[:16]

    def apply(self, mean: Floats) -> bytes:
        """Take one global step with the averaged gradient (flat, float32); returns the new lineage."""
        with self.lock:
            lineage = next_lineage(self.lineage, mean)
            self._updated.to_gradients(mean)
            self._update(self._optimizer, self.parameters, clip=not self.rule.local)
            if self.rule.scheduler is not None:
                self.rule.scheduler.step()
            self.step += 1
            self.lineage = lineage
            return lineage

    def _update(self, optimizer: Optimizer, parameters: list[torch.Tensor], *, clip: bool) -> None:
        if clip and self.rule.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.rule.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step_alone(self, gradient: Floats) -> None:
        """Take a local step with this peer's mean gradient."""
        with self.lock:
            self.flat.to_gradients(gradient)
            self._update(self.rule.optimizer, self.model, clip=True)

    def pseudo_gradient(self, out: Floats) -> None:
        """Write the swarm's parameters minus the model's to ``out``, for local steps."""
        with self.lock:
            self._updated.copy_to(out)
            self.flat.subtract_from(out)

    def show(self) -> None:
        """Copy the newest parameters to the model."""
        if self.parameters is not self.model:
            with self.lock, torch.no_grad():
                for mine, updated in zip(self.model, self.parameters, strict=True):
                    mine.copy_(updated)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the model's gradients."""
        for parameter in self.model:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups with the model's parameters; copies if updates are delayed."""
        groups = self.rule.optimizer.param_groups
        if not self.rule.delayed:
            return groups
        shown = dict(zip(map(id, self.parameters), self.model, strict=True))
        return [{**group, "params": [shown.get(id(p), p) for p in group["params"]]} for group in groups]

    def state(self) -> dict[str, Any]:
        """Return everything that is needed to continue training; tensors are shared with the live ones."""
        scheduler = self.rule.scheduler
        own = {"local": self.rule.optimizer.state_dict()} if self.rule.local else {}
        return {
            "step": self.step,
            "lineage": self.lineage,
            "parameters": [parameter.detach() for parameter in self.parameters],
            "optimizer": self._optimizer.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            **own,
        }

    def load(self, state: Any) -> None:
        """Continue from a state.

        Raises:
            StateError: it is the state of another model, optimizer or scheduler; nothing was changed.
        """
        parameters = _checked_parameters(state, self.parameters)
        if ("local" in state) != self.rule.local:
            raise StateError("in this swarm either all peers take local_steps, or none does")
        with self.lock:
            before = self._optimizer.state_dict(), self.rule.optimizer.state_dict()
            try:
                self._optimizer.load_state_dict(state["optimizer"])
                if self.rule.local:
                    self.rule.optimizer.load_state_dict(state["local"])
                if self.rule.scheduler is not None and state["scheduler"] is not None:
                    self.rule.scheduler.load_state_dict(state["scheduler"])
                # Torch accepts the options of any optimizer, and would fail in the next step.
                for own, given in zip(before[0]["param_groups"], self._optimizer.param_groups, strict=True):
                    if missing := own.keys() - given.keys():
                        raise ValueError(f"it has no {', '.join(sorted(missing))}")
            except (ValueError, LookupError, TypeError, AttributeError) as error:  # it is not trusted
                self._optimizer.load_state_dict(before[0])
                self.rule.optimizer.load_state_dict(before[1])
                raise StateError(f"the state belongs to another optimizer: {error}") from error
            with torch.no_grad():
                for mine, theirs in zip(self.parameters, parameters, strict=True):
                    mine.copy_(theirs)
            self.step, self.lineage = state["step"], state["lineage"]
        self.show()

    def snapshot(self) -> Snapshot:
        """Return a copy for late joiners. Thread-safe; training continues."""
        with self.lock:
            step, lineage = self.step, self.lineage
            layout, blob = pack(self.state())
        return Snapshot.of(lineage, step, layout, blob)

    def load_snapshot(self, snapshot: Snapshot) -> None:
        """Continue from a donor's snapshot.

        Raises:
            StateError: it does not fit this model, or would ruin it; nothing was changed.
        """
        state = unpack(snapshot.manifest.layout, snapshot.blob)
        _check_sane(state)
        self.load(state)
        self.step, self.lineage = snapshot.manifest.step, snapshot.manifest.subject


class WrappedOptimizer(Optimizer):
    """A torch optimizer whose step several peers take together; it shows the wrapped optimizer's attributes."""

    made_by: ClassVar[str]  # the call that makes one, for error messages
    _replica: Replica

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._replica.groups()

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._replica.rule.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._replica.rule.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported: the peers have agreed on the parameters."""
        raise TypeError(f"the peers have agreed on the parameters: add groups before {self.made_by}")

    @staticmethod
    def _refuse_closure(closure: object) -> None:
        if closure is not None:
            raise ValueError("a closure cannot be re-run by all peers: call loss.backward(), then step()")


def _move_to_copies(optimizer: Optimizer) -> list[torch.Tensor]:
    """Let the optimizer update copies in main memory from now on, and return them."""
    copies: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if parameter.requires_grad:
                copy = _copy(parameter)
                if parameter in optimizer.state:
                    state = optimizer.state.pop(parameter)
                    optimizer.state[copy] = {
                        key: value.cpu() if isinstance(value, torch.Tensor) else value
                        for key, value in state.items()
                    }
                group["params"][index] = copy
                copies.append(copy)
    return copies


def _copy(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to("cpu", copy=True).requires_grad_()


def _checked_parameters(state: Any, mine: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if (
        not isinstance(state, dict)
        or not {"step", "lineage", "parameters", "optimizer", "scheduler"} <= state.keys()
    ):
        raise StateError("this is not the state of a collaboration")
    theirs = state["parameters"] if isinstance(state["parameters"], list) else []
    fits = [getattr(tensor, "shape", None) for tensor in theirs] == [tensor.shape for tensor in mine]
    if not fits or not isinstance(state["step"], int) or not isinstance(state["lineage"], bytes):
        raise StateError(
            f"the state belongs to another model: {len(mine)} parameters of other shapes are trained here; "
            "build the model with the same settings as the swarm"
        )
    return theirs


def _check_sane(state: Any) -> None:
    """Refuse a donor's state with absurd settings."""
    try:
        settings = [item for group in state["optimizer"]["param_groups"] for item in group.items()]
    except (LookupError, TypeError, AttributeError) as error:
        raise StateError(f"this is not the state of a collaboration: {error!r}") from error
    for name, value in settings:
        least = 0 if name == "lr" else -MAX_SETTING
        if isinstance(value, int | float) and not least <= value <= MAX_SETTING:
            raise StateError(f"the donor's state has {name}={value}, which nobody trains with")


def uninterrupted(work: Callable[[], T]) -> T:
    """Run ``work`` to its end even if the user interrupts; the interrupt is raised afterwards.

    Python delivers an interrupt to the main thread only, so there another thread does the work.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    done: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(work())
        except Exception as error:  # handed to the caller below
            failed.append(error)

    thread = threading.Thread(target=run, name="colab-swarm-update", daemon=True)
    thread.start()
    interrupt: KeyboardInterrupt | None = None
    while thread.is_alive():
        try:
            thread.join(0.2)
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    if failed:
        raise failed[0]
    return done[0]


class Gradients:
    """A sum of gradients, each times its samples.

    Attributes:
        samples: the weight of this peer's next contribution.
        feedback: what compression cut off the last contribution, times its samples; None: no error feedback.
    """

    def __init__(self, replica: Replica, *, error_feedback: bool = False) -> None:
        self._replica = replica
        self._sum: Floats = np.zeros(replica.flat.numel, np.float32)
        self._values, self._spare = np.zeros_like(self._sum), np.zeros_like(self._sum)
        self.feedback = ErrorFeedback(replica.flat.numel) if error_feedback else None
        self.samples = 0.0
        self._loss_sum, self._loss_samples = 0.0, 0.0

    def add(self, samples: float, loss: float | None) -> str | None:
        """Add the model's gradient, a mean over ``samples``; returns the reason if it had to be dropped."""
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
        """Mean loss of the samples for which it was reported."""
        return self._loss_sum / self._loss_samples if self._loss_samples else None

    def contribution(self, held: Callable[[Floats], bool]) -> Floats:
        """Return the vector to average; ``held(vector)``: another peer may still recover chunks from it."""
        values = self._spare if held(self._values) else self._values
        self._contribute(values)
        return values

    def _contribute(self, values: Floats) -> None:
        total = self._sum
        if self.feedback is not None:
            total = np.add(self._sum, self.feedback.residual, out=values)
        np.multiply(total, np.float32(1 / self.samples if self.samples else 0.0), out=values)

    def encoding(self) -> UploadEncoding:
        """Return the encoding of the contribution, and reset what it cuts off."""
        if self.feedback is not None:
            self.feedback.begin()
        return UploadEncoding(fine=self._replica.flat.fine, feedback=self.feedback)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the replica's state."""
        return {} if self.feedback is None else {"feedback": self.feedback.state_dict()}

    def feedback_of(self, state: Mapping[str, Any]) -> ErrorFeedback | None:
        """Return the error feedback of a checkpoint; it starts empty if the checkpoint has none.

        Raises:
            StateError: it belongs to another model.
        """
        return None if self.feedback is None else ErrorFeedback(len(self._sum), state.get("feedback"))

    def forget(self) -> None:
        """Start a new sum; the error feedback stays."""
        self._sum.fill(0.0)
        self.samples = 0.0
        self._loss_sum, self._loss_samples = 0.0, 0.0

    def on_delivered(self, weight: float) -> None:
        """Add what compression cut off a contribution in the swarm's mean to the next one."""
        if self.feedback is not None and weight:
            self.feedback.settle(weight)

    def on_returned(self, values: Floats, weight: float) -> None:
        """Take back a contribution that found no round."""
        self._sum += np.float32(weight) * values
        if self.feedback is not None and weight:
            self._sum -= self.feedback.residual  # the next contribution adds it again
        self.samples += weight


class LocalSteps(Gradients):
    """Steps that a peer takes alone between two rounds (DiLoCo, Douillard et al. 2023).

    Its contribution is the *pseudo-gradient*: the parameters of the last round minus its present ones.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._since = 0.0  # samples since the last step

    def add(self, samples: float, loss: float | None) -> str | None:
        dropped = super().add(samples, loss)
        self._since += samples if dropped is None else 0.0
        return dropped

    def step(self) -> None:
        """Take a step with the own gradients since the last one."""
        if self._since:
            self._sum *= np.float32(1 / self._since)
            self._replica.step_alone(self._sum)
            self._sum.fill(0.0)
            self._since = 0.0

    def _contribute(self, values: Floats) -> None:
        self.step()
        self._replica.pseudo_gradient(values)

    def forget(self) -> None:
        super().forget()
        self._since = 0.0
        self._replica.show()


SMALL_VALUES = 1 << 16
"""Tensors with fewer values are small: biases, normalization layers."""


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
        """Each parameter with its part of the vector, a view in its shape."""
        if values.shape != (self.numel,):
            raise ValueError(f"expected a flat vector of {self.numel} values, got shape {values.shape}")
        flat = torch.from_numpy(values)
        parts = torch.split(flat, [parameter.numel() for parameter in self._parameters])
        return ((p, part.view(p.shape)) for p, part in zip(self._parameters, parts, strict=True))
