"""Names of trained parameters: peers match tensors by name, even if their optimizers hold them in different orders.

A Python set of parameters has another order in each process. Without names, peers could average two different tensors
of equal shape. So the swarm's vector has the order of the model, and the training state contains the names. A peer
always checks a state that another peer sent.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colab_swarm.errors import StateError, require
from colab_swarm.training.flat import parameters_of
from colab_swarm.training.state import Kind

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_NAMED = 3  # maximum number of differing tensors that an error names
_MAX_SETTING = 1e6  # bound on a learning rate and the like in a state


class ModelNames:
    """The names of a model's tensors, without the parts that wrappers add.

    The path of modules that all names begin with is removed, too. So a model has the same names alone, compiled, and
    as a part of a `LightningModule`.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._names: dict[int, str] = {}
        self._shared = 0  # number of modules on the path that all names begin with
        if model is None:
            return
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        names = [*self._names.values(), *dict(model.named_buffers())]
        paths = [_path_of(name)[:-1] for name in names]
        if paths:
            # In sorted order, all paths share what the first and the last path share.
            pairs = zip(min(paths), max(paths), strict=False)
            self._shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

    def bare(self, name: str) -> str:
        """Return the name that all peers use for a name of ``model.named_parameters()`` or ``named_buffers()``."""
        return ".".join(_path_of(name)[self._shared :])

    def named(self, parameters: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return parameters by name, in the model's order; parameters outside the model come last, by number."""
        there = {id(parameter): parameter for parameter in parameters}
        named = {}
        for key, name in self._names.items():
            if key in there:
                named[self.bare(name)] = there.pop(key)
        for index, parameter in enumerate(parameters):
            if id(parameter) in there:
                named[f"parameter {index}"] = parameter
        return named

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._names


def _path_of(name: str) -> list[str]:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.split(".")


def kinds_of(tensors: Mapping[str, Any]) -> dict[str, Kind]:
    """Return the type and shape of each tensor by name; both are empty for a value that is no tensor."""
    kinds = {}
    for name, tensor in tensors.items():
        kind = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
        kinds[name] = kind, tuple(getattr(tensor, "shape", ()))
    return kinds


def differing_kinds(own: Mapping[str, Kind], theirs: Mapping[str, Kind]) -> str:
    """Return a text on the tensors that differ between two peers: up to three names, and the number of the others."""
    differing = []
    for name in dict.fromkeys((*own, *theirs)):
        here = own.get(name)
        there = theirs.get(name)
        if here == there:
            continue
        if here is None:
            differing.append(f"{name}: only there")
        elif there is None:
            differing.append(f"{name}: only here")
        elif here[1] == there[1]:
            differing.append(f"{name}: {there[0]} there, {here[0]} here")
        else:
            differing.append(f"{name}: {there[1]} there, {here[1]} here")
    text = "; ".join(differing[:_NAMED])
    if len(differing) > _NAMED:
        text += f"; and {len(differing) - _NAMED} more"
    return text


def named_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with names in place of the parameters' positions.

    ``names`` maps the ``id`` of a parameter to its name.
    """
    return _renamed(optimizer.state_dict(), dict(enumerate(_names_in(optimizer, names))))


def state_by_position(
    state: Mapping[str, Any], optimizer: Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    """Return a state of `named_state`, from any peer, in the form for this ``optimizer.load_state_dict``.

    Raises ValueError if a parameter group has other parameters in the state than in the optimizer.
    """
    loaded = _renamed(state, {name: position for position, name in enumerate(_names_in(optimizer, names))})
    positions = itertools.count()
    pairs = zip(optimizer.param_groups, loaded["param_groups"], strict=True)
    for number, (group, theirs) in enumerate(pairs):
        own = list(itertools.islice(positions, len(group["params"])))
        require(set(own) == set(theirs["params"]), f"its parameter group {number} has other parameters")
        theirs["params"] = own
    return loaded


def _names_in(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Return the parameters' names in order; a frozen parameter without a known name is named by its position."""
    parameters = parameters_of(optimizer)
    return [names.get(id(parameter), f"frozen {number}") for number, parameter in enumerate(parameters)]


def _renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state with new keys for its parameters; a key that is not in ``names`` stays."""
    groups = []
    for group in state["param_groups"]:
        groups.append({**group, "params": [names.get(key, key) for key in group["params"]]})
    renamed = {names.get(key, key): value for key, value in state["state"].items()}
    return {**state, "state": renamed, "param_groups": groups}


def tensors_in(state: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a state's parameters, buffers and changed frozen parameters by name; raises `StateError` without them."""
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
    """Raise ValueError if ``theirs`` lack a setting of ``own``, or have a value that would ruin the model."""
    missing = own.keys() - theirs.keys()
    if missing:
        text = f"it lacks the settings {', '.join(sorted(missing))}"
        more = theirs.keys() - own.keys()
        if more:
            text += f" and has {', '.join(sorted(more))}"
        raise ValueError(text)
    for name, value in theirs.items():
        if isinstance(value, int | float) and value != own.get(name):
            least = 0 if name == "lr" else -_MAX_SETTING
            require(least <= value <= _MAX_SETTING, f"it has {name}={value}, which nobody trains with")


def load_optimizers(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    local: Optimizer,
    scheduler: LRScheduler | None,
    names: Mapping[int, str],
) -> None:
    """Load the scheduler, the optimizer of the swarm's steps and, if the state has it, the optimizer of local steps.

    ``names`` maps the ``id`` of each parameter of both optimizers to its name.

    Raises `StateError`, with both optimizers unchanged, if the state belongs to another optimizer, or would ruin the
    model.
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
    """Give the state's tensors the strides of their parameters, because fused optimizers assume equal strides."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if alike and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
