"""This peer's copy of the training state: parameters, optimizer, scheduler, step. The torch side.

A pool thread applies a round's mean. The user's thread waits meanwhile or, with delayed updates, computes on. The
user's thread applies missed steps and loads states. The pool also copies snapshots for late joiners.
One lock ensures that a copy never contains half an update. No thread holds this lock during network calls.

There are up to two versions of the parameters: the model's own parameters, with which the trainer computes, and
the swarm's parameters, which the swarm's steps update. `Mode` explains how the two are related.
"""

import enum
import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler

from colab_swarm.averaging.group import flags_of
from colab_swarm.errors import StateError, require
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.codecs import Floats
from colab_swarm.tensors.device import copy_in, copy_out, hand_over, moved, to_host
from colab_swarm.tensors.device_vector import DeviceVector
from colab_swarm.tensors.statedict import pack, unpack
from colab_swarm.tensors.vector import Vector
from colab_swarm.training.buffers import Buffers
from colab_swarm.training.digests import (
    LOADED,
    StateDigests,
    WrittenWeights,
    digest_of_tensors,
    digest_with_optimizer,
)
from colab_swarm.training.flat import (
    FlatValues,
    clear_gradients,
    copy_of,
    move_state,
    move_to_copies,
    outer_optimizer,
    parameters_of,
    reals,
    small_values,
    take_step,
    trained_by,
    within,
)
from colab_swarm.training.names import (
    ModelNames,
    differing_kinds,
    kinds_of,
    load_optimizers,
    named_state,
    tensors_in,
)
from colab_swarm.training.records import LINEAGE_BYTES, Mean
from colab_swarm.training.schedule import Schedule, steps_with

_MOST_GRADIENT = 1e16  # for each value; the square of a larger one would stop LAMB or Adam for good


class Mode(enum.Enum):
    """Where the swarm's parameters are, and which optimizer updates them."""

    # The swarm's step updates the model itself, with the wrapped optimizer.
    DIRECT = "direct"
    # The wrapped optimizer works on copies, which are newer than the model's parameters until `Replica.show`.
    DELAYED = "delayed"
    # The wrapped optimizer takes this peer's own steps on the model. SGD takes the swarm's steps on copies, which are
    # older than the model's parameters, until `Replica.show` or, after `Replica.depart`, `Replica.land`.
    LOCAL = "local"


@dataclass(frozen=True)
class UpdateRule:
    """How a mean becomes an update: the averaged gradient is clipped, and the scheduler counts global steps.

    ``model`` is the module whose buffers, such as BatchNorm's statistics, are averaged, too.
    """

    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    max_grad_norm: float | None = None
    delayed: bool = False  # rounds run while the trainer computes
    local: bool = False  # the optimizer takes this peer's local steps, SGD takes the swarm's (DiLoCo)
    model: torch.nn.Module | None = None
    sparse: bool = False  # SparseLoCo: this SGD has no momentum; instead the error feedback decays

    def __post_init__(self) -> None:
        optimizer = self.optimizer
        kind = type(optimizer).__name__
        is_plain = isinstance(optimizer, Optimizer) and not isinstance(optimizer, WrappedOptimizer)
        text = f"{kind} is no torch optimizer: pass one, such as torch.optim.AdamW(model.parameters())"
        require(is_plain, text, TypeError)
        text = f"{kind} computes the loss again within its step, which peers take together: pass another, such as AdamW"
        require(steps_with(optimizer), text)
        text = "SparseAdam takes no dense gradients, and a mean is dense: pass torch.optim.Adam"
        require(not isinstance(optimizer, SparseAdam), text)
        if self.scheduler is not None:
            name = f"scheduler={type(self.scheduler).__name__}"
            text = f"{name}: its step() needs more than a loss: choose one that steps with the swarm's loss, or without"
            require(steps_with(self.scheduler) or steps_with(self.scheduler, 0.0), text)
            is_ours = getattr(self.scheduler, "optimizer", optimizer) is optimizer
            require(is_ours, f"{name} is over another optimizer: make it over the {kind} that you pass here")

    @property
    def mode(self) -> Mode:
        if self.local:
            return Mode.LOCAL
        if self.delayed:
            return Mode.DELAYED
        return Mode.DIRECT


class Replica:
    """One peer's copy of the model's training state.

    A round averages one flat vector of ``numel`` values: first the changes of the model's buffers (``front`` values),
    then the gradients. The first ``fine`` values are the buffers and the small parameters. ``schema`` is a digest of
    the model's layout, and of whether peers take local steps. All members of a round have the same ``schema``.

    Attributes:
        model: the trained parameters of the model. The trainer and `step_alone` change them; `show` and `land` copy
            the swarm's parameters to them.
        parameters: the swarm's parameters: ``model`` itself, or copies (see `Mode`). `apply` and loading a state change
            these.
        stepping: the optimizer that takes the swarm's steps.
        schedule: the settings of the wrapped optimizer, which change once per step.
        buffers: the model's buffers, and the swarm's copies of the buffers, which change with ``parameters``.
        names: the names of the parameters, in order.
        name_by_id: the names of ``model``, of ``parameters`` and of the optimizer's frozen parameters, by ``id``.
        kinds: types and shapes of parameters and buffers, by name.
        step, lineage: step and lineage of ``parameters``. Both change together, in `apply` and when a state is loaded.
        together: the last step at which this peer knows that its state was bit-equal to the swarm's, because it
            began the run there, or loaded another peer's state. Since then, processors may have rounded differently.
        digests: the data that other peers compare with their states.
        moved: frozen parameters that changed since the beginning, by name; `TrainedParameters` finds them.
        written: notices changes that the user makes to the model's weights.
        lock: held during updates and copies.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self.rule = rule
        names = ModelNames(rule.model)
        trained = trained_by(rule.optimizer)
        text = "model=… has none of the optimizer's parameters: pass the model that this optimizer trains"
        require(rule.model is None or any(parameter in names for parameter in trained), text)
        named = names.named(trained)
        self.names = list(named)
        self.model = list(named.values())
        self.name_by_id = {}
        for name, parameter in names.named(parameters_of(rule.optimizer)).items():
            if parameter in names:
                self.name_by_id[id(parameter)] = name
        self.parameters = self.model
        self.stepping = rule.optimizer
        if rule.mode is Mode.LOCAL:
            self.parameters = [copy_of(parameter) for parameter in self.model]
            self.stepping = outer_optimizer(self.parameters, sparse=rule.sparse)
        elif rule.mode is Mode.DELAYED:
            copies = dict(zip(map(id, trained), move_to_copies(rule.optimizer), strict=True))
            self.parameters = [copies[id(parameter)] for parameter in self.model]
        for parameters in (self.model, self.parameters):
            self.name_by_id |= zip(map(id, parameters), self.names, strict=True)
        self.schedule = Schedule(rule.optimizer, rule.scheduler)
        # In `Mode.LOCAL`, the model's parameters at the time when a delayed round began. `depart` stores them. The end
        # of the round (`land`, `stay`) and newer parameters for the model (`show`) delete them.
        self._departed: list[torch.Tensor] = []
        # True if the copies are on the model's devices; at first they are in main memory.
        self._beside_model = rule.mode is Mode.DIRECT
        self.buffers = Buffers(rule.model)
        self.front = self.buffers.numel
        self.numel = self.front + sum(reals(parameter).numel() for parameter in self.model)
        self.fine = self.front + small_values(self.model)
        self._buffer_names = [names.bare(name) for name in self.buffers.averaged]
        self.kinds = kinds_of({**named, **dict(zip(self._buffer_names, self.buffers.shared, strict=True))})
        self.schema = hashlib.sha256(f"({self.kinds}, {rule.local})".encode()).digest()[:16]
        self.step = 0
        self.together = 0
        self.lineage = digest_of_tensors((*self.model, *self.buffers.shared))
        self.lock = threading.RLock()
        self.digests = StateDigests(rule.optimizer, self.stepping, self.model, self.parameters)
        self.moved: dict[str, torch.Tensor] = {}
        # If the model's weights are the swarm's parameters, any change of them counts, so nothing is watched.
        self.written = WrittenWeights(self.model if rule.mode is not Mode.DIRECT else ())

    def begin(self) -> None:
        """Begin again from the model's present weights and buffers."""
        self.take_model()
        self.buffers.load(self.buffers.live)
        self.lineage = digest_of_tensors((*self.model, *self.buffers.shared))

    def place(self, *, beside_model: bool) -> None:
        """Move the swarm's copies, and the state of their optimizer, to the model's devices or to main memory."""
        if self.rule.mode is Mode.DIRECT:
            return
        with self.lock:
            self._beside_model = beside_model
            for mine, copy in zip(self.model, self.parameters, strict=True):
                values = moved(copy.detach(), mine.device if beside_model else None)
                if values.device != copy.device:
                    # Swapped in place, because the optimizer refers to this tensor object.
                    torch.utils.swap_tensors(copy, values.requires_grad_())  # type: ignore[no-untyped-call]
            move_state(self.stepping)

    # Steps of the swarm, and of this peer alone.

    def apply(self, mean: Mean) -> bytes:
        """Take one global step with the averaged gradient; return the new lineage.

        Parameters for which no peer had a gradient do not change, as in one process.
        """
        with self.lock:
            lineage = mean.lineage_after(self.lineage)
            gradient, front = self._gradient_of(mean.vector)
            began = False
            try:
                with self.schedule.advanced(mean.loss):
                    began = True
                    if within([torch.from_numpy(front), *gradient.segments], _MOST_GRADIENT):
                        self._update(gradient, flags_of(mean.unused, len(self.model)))
                        self.buffers.add(front)
            except BaseException:
                if began:
                    # Some parameters may have changed, and not the same ones at each peer. The lineage becomes a digest
                    # of the actual values, so that only equal states have equal lineages.
                    digest = digest_with_optimizer(self.parameters, self.stepping)
                    self.lineage = bytes.fromhex(digest)[:LINEAGE_BYTES]
                raise
            self.lineage = lineage
            self.step = self.step + 1
            self.digests.on_step()
            if self.rule.mode is Mode.DIRECT:
                self.show()
            hand_over(self.parameters)
            return lineage

    def _gradient_of(self, mean: Vector) -> tuple[FlatValues, Floats]:
        """Return a mean's values for the parameters, on the mean's device, and its values for the buffers."""
        if isinstance(mean, DeviceVector):
            return FlatValues(self.parameters, segments=mean.body), mean.front
        values = mean.read(0, self.numel)
        return FlatValues(self.parameters, values[self.front :]), values[: self.front]

    def _update(self, gradient: FlatValues, unused: Sequence[bool]) -> None:
        """Change the swarm's parameters by a mean; the mean stays unchanged, because other peers may read it."""
        # With local steps, each local step was clipped already.
        max_grad_norm = None if self.rule.local else self.rule.max_grad_norm
        take_step(self.stepping, self.parameters, gradient, unused, max_grad_norm=max_grad_norm, ours=False)

    def step_alone(self, gradient: FlatValues, unused: Sequence[bool]) -> None:
        """Take this peer's own step, which may change ``gradient``."""
        rule = self.rule
        with self.lock:
            take_step(
                rule.optimizer, self.model, gradient, unused, max_grad_norm=rule.max_grad_norm, ours=True
            )
            self.schedule.accept()
            self.written.on_written()

    @torch.no_grad()
    def pseudo_gradient(self, out: FlatValues) -> None:
        """Write the swarm's minus the model's parameters to ``out``, which is on the devices of the swarm's copies."""
        with self.lock:
            for part, swarms, mine in zip(out.parts, self.parameters, self.model, strict=True):
                part.copy_(reals(swarms))
                values = reals(mine)
                if not self._beside_model:
                    values = to_host(values)
                part.sub_(values.to(part))

    # The swarm's parameters come to the model.

    def _bring(self, swarms: torch.Tensor, target: torch.Tensor) -> None:
        """Copy one of the swarm's parameters to a tensor on the model's device."""
        if self._beside_model:
            target.copy_(swarms)
        else:
            copy_in(swarms, target)

    @torch.no_grad()
    def show(self) -> None:
        """Copy the newest parameters and buffers to the model."""
        with self.lock:
            if self.rule.mode is not Mode.DIRECT:
                for mine, updated in zip(self.model, self.parameters, strict=True):
                    self._bring(updated, mine)
                hand_over(self.model)
            self._departed = []
            self.buffers.show()
            self.written.on_written()

    def follow(self, means: Iterable[Mean]) -> None:
        """Take the steps that others took since a state was loaded, and copy the result to the model."""
        try:
            for mean in means:
                self.apply(mean)
        finally:
            # Even if a mean could not be read, the model gets the weights of the step that this peer reports.
            self.show()

    def refresh(self) -> None:
        """Call `show`, except with local steps: there the model would lose its steps since the last round."""
        if self.rule.mode is not Mode.LOCAL:
            self.show()

    def depart(self) -> None:
        """Remember the model's parameters as a delayed round begins; the model goes on with local steps."""
        self._departed = [parameter.detach().clone() for parameter in self.model]

    def stay(self) -> None:
        """Forget what `depart` remembered: the round gave no mean, so all local steps count for the next round."""
        self._departed = []

    @torch.no_grad()
    def land(self) -> None:
        """Copy the newest parameters to the model, and keep its steps since `depart` (Decoupled DiLoCo, "carry").

        If this peer has caught up since `depart`, the model already has newer parameters, and they stay as they are.
        """
        with self.lock:
            for mine, left, updated in zip(self.model, self._departed, self.parameters, strict=False):
                newest = torch.empty_like(left)
                self._bring(updated, newest)
                mine.add_(newest - left)
            self._departed = []
            self.buffers.show()
            self.written.on_written()

    def take_written(self) -> str:
        """Make weights that the user loaded into the model the swarm's; return a sentence for the user, or "".

        With local steps, smaller changes count as a part of these steps. With delayed updates, smaller changes are
        lost at the swarm's next step.
        """
        change = self.written.change()
        if change >= LOADED:
            self.take_model()
            self.digests.on_changed()
            return "weights were loaded into the model: they count from now on; load the same at all peers"
        if change > self.digests.tolerance and self.rule.mode is Mode.DELAYED:
            return (
                "parameters are changed outside optimizer.step(): with overlap=True that lasts until the next step of "
                "the swarm only"
            )
        return ""

    @torch.no_grad()
    def take_model(self) -> None:
        """Make the model's present weights the swarm's."""
        with self.lock:
            for copy, shown in zip(self.parameters, self.model, strict=True):
                if copy is shown:
                    continue
                if self._beside_model:
                    copy.copy_(shown)
                else:
                    copy_out(shown, copy)
            if self._departed:
                self.depart()
            self.written.on_written()

    # The optimizer, as its user sees it.

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups with the model's parameters; copies if updates are delayed."""
        if not self.rule.delayed:
            return self.rule.optimizer.param_groups
        shown = dict(zip(map(id, self.parameters), self.model, strict=True))
        groups = []
        for group in self.rule.optimizer.param_groups:
            parameters = [shown.get(id(parameter), parameter) for parameter in group["params"]]
            # A scheduler made over these copies reads "initial_lr" before this optimizer can refuse it.
            groups.append({"initial_lr": group.get("lr"), **group, "params": parameters})
        return groups

    def optimizer_state(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state; its key ``swarm`` has the step and a digest of the parameters."""
        with self.lock:
            mark = {
                "step": self.step,
                "together": self.together,
                "lineage": self.lineage.hex(),
                "digest": digest_with_optimizer(self.parameters, self.rule.optimizer),
                "buffers": [buffer.clone() for buffer in self.buffers.shared],
            }
            return {**self.rule.optimizer.state_dict(), "swarm": mark}

    @torch.no_grad()
    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load a state of `optimizer_state`; before, load the parameters that belong to it into the model.

        If parameters and state do not fit together, this replica gets a new lineage. Raises ValueError, with nothing
        changed, if the state belongs to another optimizer.
        """
        mark = state.get("swarm", {})
        inner = {name: value for name, value in state.items() if name != "swarm"}
        optimizer = self.rule.optimizer
        with self.lock:
            before = digest_with_optimizer(self.parameters, optimizer)
            optimizer.load_state_dict(inner)
            self.digests.on_loaded()
            self.schedule.accept()
            fits = mark.get("digest", before) == before
            if fits and digest_with_optimizer(self.parameters, optimizer) == before:
                return
            self.take_model()
            if mark.get("digest") == digest_with_optimizer(self.parameters, optimizer):
                self.step = mark["step"]
                self.together = mark.get("together", self.step)
                self.lineage = bytes.fromhex(mark["lineage"])
                for buffer, saved in zip(self.buffers.shared, mark["buffers"], strict=True):
                    buffer.copy_(saved)
            else:
                self.together = self.step
                self.lineage = Snapshot.of(b"", self.step, pack(self.state())).root[:LINEAGE_BYTES]

    # The state, as other peers and checkpoints have it.

    def state(self) -> dict[str, Any]:
        """Return the training state; its tensors share memory with the live tensors."""
        state: dict[str, Any] = {
            "step": self.step,
            "lineage": self.lineage,
            "parameters": {name: one.detach() for name, one in zip(self.names, self.parameters, strict=True)},
            "buffers": dict(zip(self._buffer_names, self.buffers.shared, strict=True)),
            "frozen": {name: parameter.detach() for name, parameter in self.moved.items()},
            "optimizer": named_state(self.stepping, self.name_by_id),
            "scheduler": None,
        }
        if self.rule.scheduler is not None:
            state["scheduler"] = self.rule.scheduler.state_dict()
        if self.rule.mode is Mode.LOCAL:
            state["local"] = named_state(self.rule.optimizer, self.name_by_id)
        return state

    def load(self, state: Any) -> None:
        """Load a training state, and copy it to the model.

        Raises `StateError`, with nothing changed, if the state does not fit or would ruin the model.
        """
        parameters, buffers, moved = tensors_in(state)
        differing = differing_kinds(self.kinds, kinds_of({**parameters, **buffers}))
        text = "build the model with the same settings as the swarm"
        require(not differing, f"the state belongs to another model: {differing}; {text}", StateError)
        problem = "in this swarm either all peers take local_steps, or none does"
        require(("local" in state) == self.rule.local, problem, StateError)
        with self.lock:
            load_optimizers(state, self.stepping, self.rule.optimizer, self.rule.scheduler, self.name_by_id)
            self.schedule.accept()
            with torch.no_grad():
                for name, mine in zip(self.names, self.parameters, strict=True):
                    mine.copy_(parameters[name])
                self._load_moved(moved)
            self.buffers.load(buffers[name] for name in self._buffer_names)
            self.step = state["step"]
            self.lineage = state["lineage"]
            self.digests.on_loaded()
        self.show()

    def _load_moved(self, moved: Mapping[str, torch.Tensor]) -> None:
        """Load the changed frozen parameters of another peer's state."""
        if not moved or self.rule.model is None:
            return
        named = ModelNames(self.rule.model).named([*self.rule.model.parameters()])
        for name, theirs in moved.items():
            mine = named.get(name)
            if mine is None or mine.requires_grad:
                continue
            # The state is not trusted: this may be no tensor, or have another type or shape.
            if kinds_of({name: mine}) == kinds_of({name: theirs}):
                copy_in(to_host(theirs), mine)

    def snapshot(self) -> Snapshot:
        """Return a copy of the state for late joiners. Thread-safe; training continues."""
        with self.lock:
            step = self.step
            lineage = self.lineage
            blob = pack(self.state())
        return Snapshot.of(lineage, step, blob)

    def load_snapshot(self, snapshot: Snapshot) -> None:
        self.load(unpack(snapshot.blob))
        self.step = snapshot.manifest.step
        self.together = self.step
        self.lineage = snapshot.manifest.subject


class WrappedOptimizer(Optimizer):
    """A torch optimizer whose step several peers take together; it shows the wrapped optimizer's attributes.

    Step hooks are called once per step of the swarm, with the optimizer that takes the step: the wrapped optimizer, or
    SGD after local steps. So a change by a hook happens at every peer that has this hook.
    """

    made_by: ClassVar[str]  # the call that makes one, for error messages

    def __init__(self, wrapped: Optimizer, stepping: Optimizer) -> None:
        """Show the ``wrapped`` optimizer's attributes, and share the step hooks of the ``stepping`` optimizer."""
        self._wrapped = wrapped
        hooks = {name: value for name, value in vars(stepping).items() if name.startswith("_optimizer_step_")}
        # This is how torch fills an optimizer whose parameter groups exist: ``__init__`` would make new groups.
        super().__setstate__(hooks)

    def _patch_step_function(self) -> None:
        """Leave ``step`` as it is: torch would call the step hooks at every micro-batch."""

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(f"a {type(self).__name__} cannot be copied: copy optimizer.state_dict() instead")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._wrapped.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._wrapped.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._wrapped.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the last ``backward()``; gradients that ``step()`` has counted stay in the sum."""
        clear_gradients(parameters_of(self), set_to_none=set_to_none)

    # Only a schedule-free optimizer has these two methods.
    train = property(lambda self: self._mode("train"))
    eval = property(lambda self: self._mode("eval"))

    def _mode(self, name: str) -> Any:
        text = f"the wrapped {type(self._wrapped).__name__} is not schedule-free: it has no {name}()"
        require(hasattr(self._wrapped, name), text, AttributeError)
        return getattr(self._wrapped, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise TypeError(f"the peers have agreed on the parameters: add groups before {self.made_by}")

    def _saved(self, state_of: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state of ``state_of``; torch's hooks for saving run before and after it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = state_of()
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def _load(self, state: Mapping[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
        """Load a state by ``load``; torch's hooks for loading run before and after it."""
        loaded = dict(state)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = before(self, loaded) or loaded
        load(loaded)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
