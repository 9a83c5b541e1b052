"""The schedule of an optimizer's settings, such as learning rates: only a scheduler changes them, once per global step.

Peers compute different numbers of micro-batches for one step. If each peer stepped a scheduler in its own loop, or if
one peer set a learning rate itself, the peers' models would differ.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

HOW_TO_SCHEDULE = (
    "pass a scheduler of the wrapped optimizer as scheduler=… to swarm.optimizer(…), and do not step it yourself; a "
    "framework may step its twin, optimizer.scheduler"
)
NO_SCHEDULER_HERE = f"a scheduler here would count this peer's micro-batches: {HOW_TO_SCHEDULE}"


class Schedule:
    """Steps the scheduler of ``optimizer``, if there is one, and notices if anything else changes a setting.

    ``needs_loss`` is True if the scheduler steps with the swarm's loss, like `ReduceLROnPlateau`.
    """

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self.needs_loss = scheduler is not None and not steps_with(scheduler)
        self.accept()

    def accept(self) -> None:
        """Accept the present settings as right, after a state was loaded or the optimizer stepped."""
        self._settings = _settings_of(self._optimizer)
        self._state = copy.deepcopy(self.state_dict())
        self._position = repr(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state; empty without a scheduler."""
        if self._scheduler is None:
            return {}
        return self._scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state)
        self.accept()

    def check(self) -> None:
        """Raise ValueError, and undo the change, if something else stepped the scheduler or changed a setting."""
        changes = []
        for (group, name), value in self._changes().items():
            changes.append(f"{name} from {self._settings[group, name]} to {value}")
        if repr(self.state_dict()) != self._position:
            changes.append("the scheduler's state")
        if changes:
            self._restore()
            names = ", ".join(changes)
            raise ValueError(f"changed at this peer alone, and set back: {names}: {HOW_TO_SCHEDULE}")

    @contextmanager
    def advanced(self, loss: float | None) -> Iterator[None]:
        """Step the scheduler; the optimizer takes its step in the ``with`` block, still with the old settings.

        After an error, the settings and the scheduler are as before. A scheduler that goes by the swarm's ``loss`` does
        not step if no peer sent a loss.
        """
        self.check()
        try:
            # The scheduler comes first, because it may raise. Torch warns of this order unless this flag is set.
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
            scheduler: Any = self._scheduler
            if self.needs_loss and loss is not None:
                scheduler.step(loss)
            elif scheduler is not None and not self.needs_loss:
                scheduler.step()
            changes = self._changes()
            self._put(self._settings)
            yield
        except BaseException:
            self._restore()
            raise
        self._put(changes)
        self.accept()

    def _changes(self) -> dict[tuple[int, str], Any]:
        """Return the present settings that differ from the settings that `accept` took last."""
        right = self._settings
        present = _settings_of(self._optimizer)
        return {key: value for key, value in present.items() if right.get(key, value) != value}

    def _restore(self) -> None:
        if self._scheduler is not None:
            self._scheduler.load_state_dict(copy.deepcopy(self._state))
        self._put(self._settings)

    def _put(self, settings: dict[tuple[int, str], Any]) -> None:
        for (index, name), value in settings.items():
            group = self._optimizer.param_groups[index]
            if isinstance(group.get(name), torch.Tensor):
                group[name].copy_(torch.tensor(value, dtype=torch.float64))
            else:
                group[name] = value


def steps_with(stepping: Optimizer | LRScheduler, *values: float) -> bool:
    """Return True if the signature of ``step`` accepts ``step(*values)``."""
    try:
        # The class's method, because torch replaces the instance's by a function that also names ``self``.
        inspect.signature(type(stepping).step).bind(stepping, *values)
    except TypeError:
        return False
    return True


def _settings_of(optimizer: Optimizer) -> dict[tuple[int, str], Any]:
    """Return the numbers and tuples in each parameter group, by group and name; tensors are returned as numbers."""
    settings: dict[tuple[int, str], Any] = {}
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if isinstance(value, torch.Tensor):
                settings[index, name] = value.tolist()
            # A bool is not compared: schedule-free optimizers note in one whether they train or evaluate.
            elif isinstance(value, int | float | tuple) and not isinstance(value, bool):
                settings[index, name] = value
    return settings


class GlobalScheduler(LRScheduler):
    """Stands for the swarm's scheduler in a framework that must step a scheduler: its ``step()`` does nothing."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self.optimizer = optimizer
        self._schedule = schedule

    def get_last_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: object = None) -> None:
        """Do nothing: the scheduler given to `Swarm.optimizer` counts the swarm's steps."""

    def state_dict(self) -> dict[str, Any]:
        return self._schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the scheduler itself."""
        self._schedule.load_state_dict(state_dict)
