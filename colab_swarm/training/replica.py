"""This peer's copy of the training state: parameters, optimizer, scheduler, step. The torch side.

The user's thread applies updates, and the runtime's thread pool copies snapshots for late joiners.
One lock keeps a copy from seeing half an update. It is never held during network calls.
"""

import hashlib
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, ClassVar

import numpy as np
import torch
from blake3 import blake3
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colab_swarm.errors import StateError, require
from colab_swarm.tensors.chunks import Snapshot, pack, unpack
from colab_swarm.tensors.codecs import Floats
from colab_swarm.tensors.statedict import flatten
from colab_swarm.training.layerwise import Lamb, Lars
from colab_swarm.training.progress import next_lineage
from colab_swarm.training.records import LINEAGE_BYTES
from colab_swarm.training.sketch import PROJECTIONS, StateSketch

# Of the swarm's steps after local ones (DiLoCo, section 3).
_OUTER_LR = 0.7
_OUTER_MOMENTUM = 0.9
_MOST_GRADIENT = 1e16  # of a value; the squares of larger ones would freeze LAMB or Adam for good
_MAX_SETTING = 1e6  # bound on a learning rate and the like in a state
_SIGNS = 1 << 16  # random signs of a sketch; longer tensors are cut into blocks of _SIGNS values
_READERS = (SGD, Adam, AdamW, Lamb, Lars)  # optimizers for `only_reads`
_NAMED = 3  # tensors of other shapes that an error names
SMALL_VALUES = 1 << 16  # smaller tensors, such as biases, are at the front of a flat vector


@dataclass(frozen=True)
class UpdateRule:
    """How a mean becomes an update: clipped after averaging; the scheduler counts global steps.

    ``model`` is the module whose buffers, such as BatchNorm's statistics, are averaged too.
    """

    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    max_grad_norm: float | None = None
    delayed: bool = False  # the optimizer works on copies in main memory, see `Replica.show`
    local: bool = False  # it takes this peer's local steps, and SGD the swarm's (DiLoCo)
    model: torch.nn.Module | None = None
    sparse: bool = False  # SparseLoCo: that SGD has no momentum, but the error feedback has a decay


class Replica:
    """One peer's copy of the model's training state.

    The trainer computes with ``model``, and the swarm's step updates ``parameters``: the same, or a
    copy, which is ahead with delayed updates and behind with local steps. The model's ``buffers``
    change as it computes; a round averages what changed since the last, ``shared``. The flat vector of
    all has ``numel`` values: those of the buffers are the ``front``, and with small parameters ``fine``.
    ``schema`` is the digest of its layout: peers with another model, or other local steps, do not mix.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self.rule = rule
        self.model = trained_by(rule.optimizer)
        self.parameters = self.model
        self._optimizer = rule.optimizer
        if rule.local:
            self.parameters = [_copy(parameter) for parameter in self.model]
            lr, momentum = (1.0, 0.0) if rule.sparse else (_OUTER_LR, _OUTER_MOMENTUM)
            self._optimizer = SGD(self.parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)
        elif rule.delayed:
            self.parameters = _move_to_copies(rule.optimizer)
        self._left: list[
            torch.Tensor
        ] = []  # the model's parameters when a delayed round began; with local steps
        self._names: set[str] = set()  # of the buffers
        self.shared = [buffer.detach().to("cpu", copy=True) for buffer in self.buffers]
        self._new_buffers = False  # whether the model's buffers are older than the last step
        self.front = sum(buffer.numel() for buffer in self.shared)
        sizes = [parameter.numel() for parameter in self.model]
        self.numel = self.front + sum(sizes)
        self.fine = self.front + sum(size for size in sizes if size < SMALL_VALUES)
        layout = [(tuple(one.shape), str(one.dtype)) for one in (*self.model, *self.shared)]
        self.schema = hashlib.sha256(repr((layout, rule.local)).encode()).digest()[:16]
        self.step = 0
        self.lineage = digest_of((*self.model, *self.shared))
        self.lock = threading.RLock()  # held during updates and copies

    def apply(self, mean: Floats) -> bytes:
        """Take one global step with the averaged gradient (flat, float32); returns the new lineage."""
        with self.lock:
            lineage = next_lineage(self.lineage, mean)
            least, most = torch.aminmax(torch.from_numpy(mean))
            if least > -_MOST_GRADIENT and most < _MOST_GRADIENT:
                self._update(self._optimizer, self.parameters, mean[self.front :], clip=not self.rule.local)
                for buffer, part in parts(self.shared, mean[: self.front]):
                    buffer.add_(part if buffer.is_floating_point() else part.round().long().to(buffer.dtype))
                self._new_buffers = True
            if self.rule.scheduler is not None:
                self.rule.scheduler.step()
            self.step = self.step + 1
            self.lineage = lineage
            if self.parameters is self.model:
                self.show()
            return lineage

    def _update(
        self,
        optimizer: Optimizer,
        parameters: list[torch.Tensor],
        gradient: Floats,
        *,
        clip: bool,
        ours: bool = False,
    ) -> None:
        """Step with ``gradient``, which other peers may be reading unless it is ``ours``."""
        try:
            set_gradients(parameters, gradient, shared=ours or only_reads(optimizer))
            if clip and self.rule.max_grad_norm is not None:
                norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
                if norm + 1e-6 > self.rule.max_grad_norm:  # as in `torch.nn.utils.clip_grad_norm_`
                    set_gradients(parameters, gradient, shared=ours)
                    torch.nn.utils.clip_grads_with_norm_(parameters, self.rule.max_grad_norm, norm)
            optimizer.step()
        finally:  # else a backward pass would add to a mean
            optimizer.zero_grad(set_to_none=True)

    def step_alone(self, gradient: Floats) -> None:
        """Take this peer's own step; ``gradient`` may be changed by it."""
        with self.lock:
            self._update(self.rule.optimizer, self.model, gradient, clip=True, ours=True)

    def trainable(self) -> int:
        """Return how many parameters take gradients now."""
        every = self.model if self.rule.model is None else self.rule.model.parameters()
        return sum(parameter.requires_grad for parameter in every)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The model's saved buffers of numbers."""
        return buffers_of(self.rule.model, self._names)

    @torch.no_grad()
    def pseudo_gradient(self, out: Floats) -> None:
        """Write the swarm's parameters minus the model's to ``out``."""
        with self.lock:
            for parameter, part in parts(self.parameters, out):
                part.copy_(parameter)
            for parameter, part in parts(self.model, out):
                part.sub_(parameter.to(part))

    @torch.no_grad()
    def change_of_buffers(self, out: Floats) -> None:
        """Write the model's buffers minus the shared ones to ``out``; 0 where they are not finite."""
        with self.lock:
            for buffer, (shared, part) in zip(self.buffers, parts(self.shared, out), strict=True):
                torch.nan_to_num((buffer.to(shared) - shared).to(part), 0.0, 0.0, 0.0, out=part)

    @torch.no_grad()
    def depart(self) -> None:
        """Remember where a delayed round leaves the model, which takes local steps on from there."""
        self._left = [_copy(parameter).detach() for parameter in self.model]

    def stay(self) -> None:
        """Forget that: there was no mean, and all local steps count for the next round."""
        self._left = []

    @torch.no_grad()
    def land(self) -> None:
        """Copy the newest parameters to the model, and keep its steps since `depart` (Decoupled DiLoCo, "carry").

        Nothing happens where the model shows newer ones already: this peer caught up since then.
        """
        with self.lock:
            for mine, left, updated in zip(self.model, self._left, self.parameters, strict=False):
                mine.add_((updated.to(left) - left).to(mine))
            self._left = []
            self._show_buffers()

    @torch.no_grad()
    def show(self) -> None:
        """Copy the newest parameters and buffers to the model."""
        with self.lock:
            if self.parameters is not self.model:
                for mine, updated in zip(self.model, self.parameters, strict=True):
                    mine.copy_(updated)
            self._left = []
            self._show_buffers()

    def refresh(self) -> None:
        """`show`, unless the model takes local steps: it would lose those since the last round."""
        if not self.rule.local:
            self.show()

    def _show_buffers(self) -> None:
        if self._new_buffers:
            for mine, updated in zip(self.buffers, self.shared, strict=True):
                mine.copy_(updated)
        self._new_buffers = False

    def zero_grad(self, set_to_none: bool = True) -> None:
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
        """Return the training state; its tensors share memory with the live ones."""
        scheduler = self.rule.scheduler
        return {
            "step": self.step,
            "lineage": self.lineage,
            "parameters": [parameter.detach() for parameter in self.parameters],
            "buffers": self.shared,
            "optimizer": self._optimizer.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            **({"local": self.rule.optimizer.state_dict()} if self.rule.local else {}),
        }

    def differing(self, shapes: Sequence[tuple[int, ...]]) -> str:
        """Name the own tensors of other shapes than a peer's parameters and buffers: three, and how many more."""
        model = self.rule.model
        names = {} if model is None else {id(one): name for name, one in model.named_parameters()}
        own = [names.get(id(one), f"parameter {index}") for index, one in enumerate(self.model)]
        own += [] if model is None else [name for name, _ in model.named_buffers() if name in self._names]
        mine = [tuple(one.shape) for one in (*self.model, *self.shared)]
        found = [
            f"{name or 'one more tensor'}: {there} there, {here} here"
            for name, here, there in zip_longest(own, mine, shapes)
            if here != there
        ]
        return "; ".join(found[:_NAMED]) + (
            f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        )

    def _tensors_in(self, state: Any) -> list[torch.Tensor]:
        match state:
            case {
                "step": int(),
                "lineage": bytes(),
                "parameters": list(theirs),
                "optimizer": _,
                "scheduler": _,
            }:
                theirs = [*theirs, *state.get("buffers", ())]
                if differs := self.differing([tuple(getattr(one, "shape", ())) for one in theirs]):
                    text = "build the model with the same settings as the swarm"
                    raise StateError(f"the state belongs to another model: {differs}; {text}")
                return theirs
        raise StateError("this is not the state of a collaboration")

    def load(self, state: Any) -> None:
        """Raises `StateError`, with nothing changed, if the state does not fit or would ruin the model."""
        parameters = self._tensors_in(state)
        require(
            ("local" in state) == self.rule.local,
            "in this swarm either all peers take local_steps, or none does",
            StateError,
        )
        with self.lock:
            before = self._optimizer.state_dict(), self.rule.optimizer.state_dict()
            try:
                self._optimizer.load_state_dict(state["optimizer"])
                if self.rule.local:
                    self.rule.optimizer.load_state_dict(state["local"])
                for own, given in zip(before[0]["param_groups"], self._optimizer.param_groups, strict=True):
                    _check_options(own, given)
                if self.rule.scheduler is not None and state["scheduler"] is not None:
                    self.rule.scheduler.load_state_dict(state["scheduler"])
            except (ValueError, LookupError, TypeError, AttributeError) as error:  # it is not trusted
                self._optimizer.load_state_dict(before[0])
                self.rule.optimizer.load_state_dict(before[1])
                raise StateError(f"the state belongs to another optimizer: {error}") from error
            with torch.no_grad():
                for mine, theirs in zip((*self.parameters, *self.shared), parameters, strict=True):
                    mine.copy_(theirs)
            self.step = state["step"]
            self.lineage = state["lineage"]
            self._new_buffers = True
        self.show()

    def optimizer_state(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and under ``swarm`` the step and parameters that it belongs to."""
        with self.lock:
            mark = {
                "step": self.step,
                "lineage": self.lineage.hex(),
                "digest": self._digest(),
                "buffers": [buffer.clone() for buffer in self.shared],
            }
            return {**self.rule.optimizer.state_dict(), "swarm": mark}

    def _digest(self) -> str:
        """Return a digest of the parameters and of the wrapped optimizer's state."""
        tensors, layout = flatten(self.rule.optimizer.state_dict())
        return digest_of((*self.parameters, *tensors.values())).hex() + blake3(layout).hexdigest(8)

    @torch.no_grad()
    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load what `optimizer_state` gave, after its parameters were loaded into the model.

        What differs from it gets a lineage of its own. Raises ValueError, with nothing changed, if the state is
        another optimizer's.
        """
        mark = state.get("swarm", {})
        inner = {name: value for name, value in state.items() if name != "swarm"}
        with self.lock:
            before = self._digest()
            self.rule.optimizer.load_state_dict(inner)
            if mark.get("digest", before) == before == self._digest():
                return
            for copy, shown in zip(self.parameters, self.model, strict=True):
                copy.copy_(shown)
            if mark.get("digest") == self._digest():
                self.step = mark["step"]
                self.lineage = bytes.fromhex(mark["lineage"])
                for buffer, saved in zip(self.shared, mark["buffers"], strict=True):
                    buffer.copy_(saved)
            else:
                self.lineage = Snapshot.of(b"", self.step, *pack(self.state())).manifest.root[:LINEAGE_BYTES]

    def snapshot(self) -> Snapshot:
        """Return a copy for late joiners. Thread-safe; training continues."""
        with self.lock:
            step = self.step
            lineage = self.lineage
            layout, blob = pack(self.state())
        return Snapshot.of(lineage, step, layout, blob)

    @torch.no_grad()
    def sketch(self) -> StateSketch:
        """Return a sketch of parameters and optimizer state. Thread-safe; it holds up an update for a moment."""
        with self.lock:
            kinds = {"": [*self.parameters]}
            for parameter in self.parameters:
                for kind, value in self._optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        kinds.setdefault(kind, []).append(value)
            sketches = (_project(tensors, self.lineage) for _, tensors in sorted(kinds.items()))
            return StateSketch(self.step, self.lineage, tuple(chain.from_iterable(sketches)))

    def load_snapshot(self, snapshot: Snapshot) -> None:
        self.load(unpack(snapshot.manifest.layout, snapshot.blob))
        self.step = snapshot.manifest.step
        self.lineage = snapshot.manifest.subject


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
        raise TypeError(f"the peers have agreed on the parameters: add groups before {self.made_by}")


def buffers_of(model: torch.nn.Module | None, names: set[str]) -> list[torch.Tensor]:
    """Return the saved buffers of numbers; ``model.to(…)`` makes new ones. The first call fills in ``names``."""
    if model is None:
        return []
    if not names:
        saved = model.state_dict().keys()
        named = {name: one for name, one in model.named_buffers() if name in saved}
        names |= {n for n, one in named.items() if not (one.is_complex() or one.dtype == torch.bool)}
    return [one for name, one in model.named_buffers() if name in names]


def trained_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the optimizer's trained parameters, in order; raises ValueError without any."""
    found = [parameter for parameter in tensors_of(optimizer) if parameter.requires_grad]
    require(found, "the optimizer has no parameter that requires a gradient: nothing to train")
    return found


def tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def digest_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return a digest of the tensors' bytes, at over 1 GB/s."""
    found = blake3(max_threads=blake3.AUTO)
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.digest(LINEAGE_BYTES)


def _move_to_copies(optimizer: Optimizer) -> list[torch.Tensor]:
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if parameter.requires_grad:
                group["params"][index] = copy = _copy(parameter)
                if parameter in optimizer.state:
                    # load_state_dict would cast it to the parameter's type
                    state = optimizer.state.pop(parameter)
                    for key, value in state.items():
                        if isinstance(value, torch.Tensor):
                            state[key] = value.cpu()
                    optimizer.state[copy] = state
    return trained_by(optimizer)


def _copy(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to("cpu", copy=True).requires_grad_()


def _project(tensors: list[torch.Tensor], seed: bytes) -> list[float]:
    """Return the norm of all values, and their sums with `PROJECTIONS` random signs each, in norms."""
    blocks = [block for tensor in tensors for block in torch.split(tensor.flatten(), _SIGNS)]
    count = (_SIGNS + len(blocks)) * PROJECTIONS
    bits = np.unpackbits(np.frombuffer(blake3(seed).digest(count // 8 + 1), np.uint8))[:count]
    signs = torch.from_numpy(2 * bits.astype(np.float32) - 1).view(-1, PROJECTIONS)
    sums = torch.zeros(PROJECTIONS)
    for block, sign in zip(blocks, signs[_SIGNS:], strict=True):
        sums += sign * (block.float() @ signs[: len(block)].to(block.device)).cpu()
    norm = math.hypot(*(float(tensor.norm(dtype=torch.float32)) for tensor in tensors))
    return [norm, *(sums / (norm or 1.0)).tolist()]


def _check_options(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if missing := own.keys() - given.keys():
        more = ", ".join(sorted(given.keys() - own.keys()))
        raise ValueError(
            f"it lacks the settings {', '.join(sorted(missing))}" + (f" and has {more}" if more else "")
        )
    for name, value in given.items():
        least = 0 if name == "lr" else -_MAX_SETTING
        require(
            not isinstance(value, int | float) or value == own.get(name) or least <= value <= _MAX_SETTING,
            f"it has {name}={value}, which nobody trains with",
        )


def parts(parameters: Iterable[torch.Tensor], values: Floats) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each parameter with its part of the flat vector, a view; small ones come first."""
    ordered = sorted(parameters, key=lambda one: one.numel() >= SMALL_VALUES)
    sizes = [parameter.numel() for parameter in ordered]
    if values.shape != (sum(sizes),):
        raise ValueError(f"expected a flat vector of {sum(sizes)} values, got shape {values.shape}")
    flat = torch.split(torch.from_numpy(values), sizes)
    return [(parameter, part.view(parameter.shape)) for parameter, part in zip(ordered, flat, strict=True)]


def set_gradients(parameters: Iterable[torch.Tensor], values: Floats, *, shared: bool = False) -> None:
    """Set the parameters' gradients to copies of ``values``; ``shared``: to views, where the type is the same."""
    for parameter, part in parts(parameters, values):
        if shared and (parameter.dtype, parameter.device) == (part.dtype, part.device):
            parameter.grad = part
        else:
            parameter.grad = torch.empty_like(parameter).copy_(part)


def only_reads(optimizer: Optimizer) -> bool:
    """Return True if a step is known to leave the gradients as they are.

    Others get copies: a hook, a subclass and lists of tensors ("foreach") may change them in place.
    """
    changed = optimizer._optimizer_step_pre_hooks or any(one.get("foreach") for one in optimizer.param_groups)
    return type(optimizer) in _READERS and not changed
