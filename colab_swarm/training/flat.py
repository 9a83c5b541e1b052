"""A model's trained tensors as one flat float32 vector, and an optimizer's step with such a vector.

Small tensors, such as biases, are at the front, where a codec may encode them finer. A complex value is two.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from colab_swarm.errors import require
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.layerwise import Lamb, Lars

SMALL_VALUES = 1 << 16  # smaller tensors are at the front
_READERS = (SGD, Adam, AdamW, Lamb, Lars)  # optimizers for `only_reads`
# Of the swarm's steps after local ones (DiLoCo, section 3).
_OUTER_LR = 0.7
_OUTER_MOMENTUM = 0.9
_NORM_SLACK = 1e-6  # as in `torch.nn.utils.clip_grad_norm_`


def parts(parameters: Iterable[torch.Tensor], values: Floats) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each parameter with its part of the flat vector, a view shaped as its `reals`; small ones come first."""
    ordered = sorted(parameters, key=_is_large)
    sizes = [reals(parameter).numel() for parameter in ordered]
    if values.shape != (sum(sizes),):
        raise ValueError(f"expected a flat vector of {sum(sizes)} values, got shape {values.shape}")
    flat = torch.split(torch.from_numpy(values), sizes)
    return [
        (parameter, part.view(reals(parameter).shape)) for parameter, part in zip(ordered, flat, strict=True)
    ]


def reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor's real values: one more dimension, of 2, if it is complex."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach())
    return tensor


def _is_large(tensor: torch.Tensor) -> bool:
    return reals(tensor).numel() >= SMALL_VALUES


def small_values(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many values the small tensors have together."""
    count = 0
    for tensor in tensors:
        if not _is_large(tensor):
            count += reals(tensor).numel()
    return count


def layout_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return shapes and types as text: equal at all peers with the same model."""
    return repr([(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors])


def tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trained_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the optimizer's trained parameters, in order; raises ValueError without any."""
    trained = [parameter for parameter in tensors_of(optimizer) if parameter.requires_grad]
    require(trained, "the optimizer has no parameter that requires a gradient: nothing to train")
    doubles = any(parameter.dtype == torch.complex128 for parameter in trained)
    require(not doubles, "complex128 parameters are not averaged: train the model in complex64")
    return trained


def copy_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a trainable copy in main memory."""
    return parameter.detach().to("cpu", copy=True).requires_grad_()


def move_to_copies(optimizer: Optimizer) -> list[torch.Tensor]:
    """Make the optimizer work on copies of its trained parameters in main memory; returns these."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if not parameter.requires_grad:
                continue
            copy = copy_of(parameter)
            group["params"][index] = copy
            if parameter in optimizer.state:
                optimizer.state[copy] = _in_main_memory(optimizer.state.pop(parameter))
    return trained_by(optimizer)


def _in_main_memory(state: dict[str, Any]) -> dict[str, Any]:
    """Move a parameter's state; ``load_state_dict`` would also cast it to the parameter's type."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            state[key] = value.cpu()
    return state


def outer_optimizer(parameters: list[torch.Tensor], *, sparse: bool) -> Optimizer:
    """Return the optimizer that takes the swarm's steps between local ones."""
    if sparse:
        return SGD(parameters, lr=1.0, momentum=0.0, nesterov=False)
    return SGD(parameters, lr=_OUTER_LR, momentum=_OUTER_MOMENTUM, nesterov=True)


def set_gradients(
    parameters: Sequence[torch.Tensor], values: Floats, unused: Sequence[bool] = (), *, shared: bool = False
) -> None:
    """Set the parameters' gradients to copies of ``values``; ``shared``: to views, where the type is the same.

    ``unused`` ones, by a flag for each parameter, get none.
    """
    skipped = {id(parameter) for parameter, flag in zip(parameters, unused, strict=False) if flag}
    for parameter, part in parts(parameters, values):
        if id(parameter) in skipped:
            continue
        if shared and (parameter.dtype, parameter.device) == (part.dtype, part.device):
            parameter.grad = part
        else:
            parameter.grad = torch.empty_like(parameter)
            reals(parameter.grad).copy_(part)


def take_step(
    optimizer: Optimizer,
    parameters: list[torch.Tensor],
    gradient: Floats,
    unused: Sequence[bool] = (),
    *,
    max_grad_norm: float | None,
    ours: bool,
) -> None:
    """Step with a flat gradient, clipped to ``max_grad_norm``; ``unused`` parameters, by flag, stay as they are.

    It is not changed, as other peers may be reading it, unless it is ``ours``.
    """
    try:
        set_gradients(parameters, gradient, unused, shared=ours or only_reads(optimizer))
        if max_grad_norm is not None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            if norm + _NORM_SLACK > max_grad_norm:
                set_gradients(parameters, gradient, unused, shared=ours)
                torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        optimizer.step()
    finally:
        # Else a backward pass would add to a mean.
        optimizer.zero_grad(set_to_none=True)


def only_reads(optimizer: Optimizer) -> bool:
    """Return True if a step is known to leave the gradients as they are.

    Others get copies: a hook, a subclass and lists of tensors ("foreach") may change them in place.
    """
    if type(optimizer) not in _READERS or optimizer._optimizer_step_pre_hooks:
        return False
    return not any(group.get("foreach") for group in optimizer.param_groups)
