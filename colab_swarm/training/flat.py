"""A model's trained tensors as one flat float32 vector, and an optimizer's step with such a vector.

Small tensors, such as biases, are at the front of the vector, where a codec may encode them more exactly. A complex
value is stored as two values.
"""

import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from colab_swarm.errors import require
from colab_swarm.tensors.codecs import Floats
from colab_swarm.tensors.device import (
    Flag,
    copy_in,
    copy_out,
    host_copy,
    in_main_memory,
    moved,
    to_host,
)
from colab_swarm.training.layerwise import Lamb, Lars

SMALL_VALUES = 1 << 16  # tensors with fewer values are at the front
_READERS = (SGD, Adam, AdamW, Lamb, Lars)  # may leave the gradients unchanged: see `only_reads`
# Learning rate of the swarm's steps after local steps (DiLoCo, section 3).
_OUTER_LR = 0.7
_OUTER_MOMENTUM = 0.9
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their size in bytes
_STEPPING = threading.local()  # ``ours`` is True while this thread is in `take_step`
_NORM_SLACK = 1e-6  # as in `torch.nn.utils.clip_grad_norm_`


def reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor's real values; a complex tensor gets one more dimension, of size 2."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach())
    return tensor


def _is_large(tensor: torch.Tensor) -> bool:
    return reals(tensor).numel() >= SMALL_VALUES


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient itself, or a dense copy if the gradient is sparse or some of its values share memory."""
    if gradient.layout is not torch.strided:
        return gradient.to_dense()
    if 0 in gradient.stride():
        return gradient.contiguous()
    return gradient.resolve_conj()


def small_values(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many values the small tensors have together."""
    return sum(reals(tensor).numel() for tensor in tensors if not _is_large(tensor))


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trained_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the optimizer's trained parameters, in order; raises ValueError if it trains none."""
    trained = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
    require(trained, "the optimizer has no parameter that requires a gradient: nothing to train")
    doubles = any(parameter.dtype == torch.complex128 for parameter in trained)
    require(not doubles, "complex128 parameters are not averaged: train the model in complex64")
    return trained


def clear_gradients(parameters: Iterable[torch.Tensor], *, set_to_none: bool = True) -> None:
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.detach_().zero_()


def copy_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a trainable copy in main memory."""
    return host_copy(parameter.detach()).requires_grad_()


def move_to_copies(optimizer: Optimizer) -> list[torch.Tensor]:
    """Make the optimizer work on copies of its trained parameters in main memory; return the copies."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if not parameter.requires_grad:
                continue
            copy = copy_of(parameter)
            group["params"][index] = copy
            if parameter in optimizer.state:
                optimizer.state[copy] = optimizer.state.pop(parameter)
    move_state(optimizer)
    return trained_by(optimizer)


def move_state(optimizer: Optimizer) -> None:
    """Move the optimizer's state to its parameters' devices; ``load_state_dict`` would also change the data types."""
    for group in optimizer.param_groups:
        # Other optimizers count their steps in main memory.
        counts_there = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    counted_here = key == "step" and not counts_there
                    state[key] = moved(value, None if counted_here else parameter.device)


def outer_optimizer(parameters: list[torch.Tensor], *, sparse: bool) -> Optimizer:
    """Return the optimizer that takes the swarm's step after each round of local steps."""
    if sparse:
        return SGD(parameters, lr=1.0)
    return SGD(parameters, lr=_OUTER_LR, momentum=_OUTER_MOMENTUM, nesterov=True)


class FlatValues:
    """A float32 value for each value of some tensors, for example a sum of gradients on a GPU.

    Attributes:
        segments: the flat values, small tensors first. Neighbouring tensors on one device share a segment.
        parts: for each tensor, a view of its values that is shaped like its `reals`.
        in_main_memory: True if the values are in main memory, wherever the tensors are.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        values: Floats | None = None,
        segments: Sequence[torch.Tensor] = (),
    ) -> None:
        """Use ``values`` in main memory, or ``segments``; without both, allocate memory on the tensors' devices."""
        ordered = sorted(tensors, key=_is_large)
        sizes = [reals(tensor).numel() for tensor in ordered]
        self.in_main_memory = values is not None
        self.segments = list(segments)
        if values is not None:
            if values.shape != (sum(sizes),):
                raise ValueError(f"expected a flat vector of {sum(sizes)} values, got shape {values.shape}")
            self.segments = [torch.from_numpy(values)]
        elif not segments:
            for device, neighbours in itertools.groupby(ordered, key=lambda tensor: tensor.device):
                numel = sum(reals(tensor).numel() for tensor in neighbours)
                self.segments.append(torch.empty(numel, dtype=torch.float32, device=device))
        parts = {}
        segments_left = iter(self.segments)
        rest = torch.empty(0)
        for tensor, numel in zip(ordered, sizes, strict=True):
            while len(rest) < numel:
                rest = next(segments_left)
            parts[id(tensor)] = rest[:numel].view(reals(tensor).shape)
            rest = rest[numel:]
        self.parts = [parts[id(tensor)] for tensor in tensors]

    def clear(self) -> None:
        for segment in self.segments:
            segment.zero_()

    def multiply(self, factor: float) -> None:
        for segment in self.segments:
            segment.mul_(factor)

    def lies_with(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if gradients of these tensors can be added; False if the model has moved to another device."""
        if self.in_main_memory:
            return True
        pairs = zip(self.parts, tensors, strict=True)
        return all(part.device == tensor.device for part, tensor in pairs)

    def write_to(self, values: Floats) -> None:
        """Copy all values to main memory."""
        pieces = torch.split(torch.from_numpy(values), [len(segment) for segment in self.segments])
        for segment, piece in zip(self.segments, pieces, strict=True):
            copy_out(segment, piece)


@dataclass
class GradientSum:
    """A sum of gradients, each times its weight, in the memory of ``values``.

    The sum is ``factor`` times the values. So the first gradient is copied without a multiplication, and the mean of a
    single gradient needs no further work. If ``factor`` is None the sum is 0, and the memory may hold anything.
    """

    values: FlatValues
    factor: float | None = None

    def add_gradients(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        weight: float,
        scale: torch.Tensor | None,
        counts: torch.Tensor | None,
    ) -> None:
        """Add ``weight / scale`` times each gradient; if the bool ``counts`` is False, set the gradients to 0 first."""
        factor = self.factor
        groups: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for parameter, part in zip(parameters, self.values.parts, strict=True):
            if parameter.grad is not None:
                gradient = reals(_dense(parameter.grad.detach()))
                parts, gradients = groups.setdefault((gradient.device, gradient.dtype), ([], []))
                parts.append(part)
                gradients.append(gradient)
            elif factor is None:
                part.zero_()
        ratio = None if factor is None else weight / factor
        for parts, gradients in groups.values():
            if counts is not None:
                # Multiplied as integers, because a NaN times 0.0 is a NaN.
                kind = _INTEGERS[gradients[0].dtype.itemsize]
                mask = counts.to(gradients[0].device, kind)
                torch._foreach_mul_([gradient.view(kind) for gradient in gradients], mask)
            if self.values.in_main_memory:
                # Added one by one, because copies of all gradients would need the memory of a model.
                for part, gradient in zip(parts, gradients, strict=True):
                    _accumulate([part], [to_host(gradient)], ratio, scale)
            else:
                _accumulate(parts, gradients, ratio, scale)
        if factor is None:
            self.factor = weight

    def add(self, values: FlatValues, weight: float) -> None:
        """Add ``weight`` times these values."""
        if self.factor is None:
            self.values.clear()
            self.factor = weight
        for part, addend in zip(self.values.parts, values.parts, strict=True):
            if part.device == addend.device:
                part.add_(addend, alpha=weight / self.factor)
                continue
            # Added in main memory, because a device may lack memory for the addend, and the sum would stop half-way.
            total = to_host(part)
            total.add_(to_host(addend), alpha=weight / self.factor)
            copy_in(total, part)

    def mean(self, weight: float) -> FlatValues:
        """Return the sum divided by ``weight``, in the same memory."""
        if self.factor is None:
            self.values.clear()
        elif weight and weight != self.factor:
            self.values.multiply(self.factor / weight)
        self.factor = weight or 1.0
        return self.values


def _accumulate(
    parts: list[torch.Tensor],
    gradients: list[torch.Tensor],
    weight: float | None,
    scale: torch.Tensor | None,
) -> None:
    """Add ``weight / scale`` times the gradients; without a weight, overwrite the parts with gradients ``/ scale``."""
    factor = None if scale is None else scale.to(parts[0].device).reciprocal()
    if weight is None:
        torch._foreach_copy_(parts, gradients)
        if factor is not None:
            torch._foreach_mul_(parts, factor)
    elif factor is None:
        torch._foreach_add_(parts, gradients, alpha=weight)
    else:
        torch._foreach_addcmul_(parts, gradients, [factor] * len(parts), value=weight)


def within(tensors: Sequence[torch.Tensor], limit: float) -> bool:
    """Return True if the absolute values of all values are below ``limit``; False if there is a NaN."""
    bounds = [torch.aminmax(tensor) for tensor in tensors if len(tensor)]
    flags = [Flag((least > -limit) & (most < limit)) for least, most in bounds]
    return all(flag.read() for flag in flags)


def set_gradients(
    parameters: Sequence[torch.Tensor],
    gradient: FlatValues,
    unused: Sequence[bool] = (),
    *,
    shared: bool = False,
) -> None:
    """Set the parameters' gradients to copies of ``gradient``.

    With ``shared`` they are views instead, where type, device and strides are those of the parameter. ``unused`` has a
    flag for each parameter; a parameter whose flag is True gets no gradient.
    """
    flags = itertools.chain(unused, itertools.repeat(False))
    for parameter, part, skipped in zip(parameters, gradient.parts, flags, strict=False):
        if skipped:
            continue
        # Fused optimizers read the parameter and its gradient by the strides of one of them.
        kinds = [(tensor.dtype, tensor.device, tensor.stride()) for tensor in (parameter, part)]
        if shared and kinds[0] == kinds[1]:
            parameter.grad = part
            continue
        parameter.grad = torch.empty_like(parameter)
        if gradient.in_main_memory:
            copy_in(part, reals(parameter.grad))
        else:
            reals(parameter.grad).copy_(part)


def take_step(
    optimizer: Optimizer,
    parameters: list[torch.Tensor],
    gradient: FlatValues,
    unused: Sequence[bool] = (),
    *,
    max_grad_norm: float | None,
    ours: bool,
) -> None:
    """Step with a flat gradient, clipped to ``max_grad_norm``; parameters with a flag in ``unused`` do not change.

    Only if the gradient is ``ours``, it may be changed. Else other peers may be reading it.
    """
    try:
        set_gradients(parameters, gradient, unused, shared=ours or only_reads(optimizer))
        if max_grad_norm is not None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            # Our own gradient is always multiplied, if need be by 1: reading the norm would wait for the device.
            if ours or norm + _NORM_SLACK > max_grad_norm:
                set_gradients(parameters, gradient, unused, shared=ours)
                torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        _STEPPING.ours = True
        optimizer.step()
    finally:
        _STEPPING.ours = False
        # Otherwise the next backward pass would add to the mean.
        optimizer.zero_grad(set_to_none=True)


def refuse_stray_step(optimizer: Optimizer, *_: object) -> None:
    """As a step's pre-hook: raise RuntimeError unless `take_step` takes the step."""
    text = (
        f"{type(optimizer).__name__}.step() would change this peer's model alone, and the peers' models would differ: "
        "call step() of the optimizer that swarm.optimizer(…) returned"
    )
    require(getattr(_STEPPING, "ours", False), text, RuntimeError)


def only_reads(optimizer: Optimizer) -> bool:
    """Return True if a step of this optimizer is known not to change the gradients.

    Other optimizers get copies of the gradients, because hooks, subclasses and updates of lists of tensors ("foreach")
    may change them in place.
    """
    hooks = optimizer._optimizer_step_pre_hooks.values()
    if type(optimizer) not in _READERS or any(hook is not refuse_stray_step for hook in hooks):
        return False
    if any(group.get("foreach") for group in optimizer.param_groups):
        return False
    # On a GPU, updates of lists are the default, and those with Nesterov momentum change the gradients.
    has_nesterov = any(group.get("nesterov") for group in optimizer.param_groups)
    return not has_nesterov or all(in_main_memory(tensor.device) for tensor in parameters_of(optimizer))
