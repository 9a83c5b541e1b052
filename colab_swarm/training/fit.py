"""Whether peers can step an optimizer together, and whether a peer's state fits it. No state is trusted."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler

from colab_swarm.errors import StateError, require
from colab_swarm.training.names import state_by_position
from colab_swarm.training.schedule import steps_with

_MAX_SETTING = 1e6  # bound on a learning rate and the like in a state


def check_steppable(optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
    """Raise ValueError if peers cannot step the optimizer together, or the scheduler neither."""
    kind = type(optimizer).__name__
    text = f"{kind} computes the loss again within its step, which peers take together: pass another, such as AdamW"
    require(steps_with(optimizer), text)
    text = "SparseAdam takes no dense gradients, and a mean is dense: pass torch.optim.Adam"
    require(not isinstance(optimizer, SparseAdam), text)
    if scheduler is not None:
        name = f"scheduler={type(scheduler).__name__}"
        text = f"{name}: its step() needs more than a loss: choose one that steps with the swarm's loss, or without"
        require(steps_with(scheduler) or steps_with(scheduler, 0.0), text)
        is_ours = getattr(scheduler, "optimizer", optimizer) is optimizer
        require(is_ours, f"{name} is over another optimizer: make it over the {kind} that you pass here")


def tensors_in(state: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a peer's parameters, buffers and changed frozen parameters, by name; raises `StateError` without them."""
    match state:
        case {
            "step": int(),
            "lineage": bytes(),
            "parameters": dict(parameters),
            "buffers": dict(buffers),
            "frozen": dict(frozen),
            "optimizer": _,
            "scheduler": _,
        }:
            return parameters, buffers, frozen
    raise StateError("this is not the state of a collaboration")


def check_options(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ValueError if settings of an optimizer are missing, or would ruin the model."""
    missing = own.keys() - theirs.keys()
    if missing:
        text = f"it lacks the settings {', '.join(sorted(missing))}"
        more = theirs.keys() - own.keys()
        if more:
            text += f" and has {', '.join(sorted(more))}"
        raise ValueError(text)
    for name, value in theirs.items():
        if not isinstance(value, int | float) or value == own.get(name):
            continue
        least = -_MAX_SETTING
        if name == "lr":
            least = 0
        require(least <= value <= _MAX_SETTING, f"it has {name}={value}, which nobody trains with")


def load_optimizers(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    local: Optimizer,
    scheduler: LRScheduler | None,
    names: Mapping[int, str],
) -> None:
    """Load the optimizer that takes the swarm's steps, that of local steps if the state has it, and the scheduler.

    ``names``: of the parameters of both, by their ``id``.

    Raises `StateError`, with both optimizers unchanged, if the state is another's, or would ruin the model.
    """
    before = optimizer.state_dict()
    local_before = local.state_dict()
    try:
        optimizer.load_state_dict(state_by_position(state["optimizer"], optimizer, names))
        if "local" in state:
            local.load_state_dict(state_by_position(state["local"], local, names))
        for own, theirs in zip(before["param_groups"], optimizer.param_groups, strict=True):
            check_options(own, theirs)
        if scheduler is not None and state["scheduler"] is not None:
            scheduler.load_state_dict(state["scheduler"])
        for loaded in {optimizer, local}:
            _stride_state(loaded)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        optimizer.load_state_dict(before)
        local.load_state_dict(local_before)
        raise StateError(f"the state belongs to another optimizer: {error}") from error


def _stride_state(optimizer: Optimizer) -> None:
    """Lay state out as its parameters, whose strides fused optimizers take it to have."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if alike and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
