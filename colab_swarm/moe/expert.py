"""One expert, a module with its own optimizer and step counter, and how many experts fit on a host.

Forward has no side effect. Backward computes forward again, as gradient checkpointing does, and then immediately
takes an optimizer step (Learning@home, section 3.2). A merged batch gets one step on the sum of its gradients.
Avoid `BatchNorm`, because it would compute its statistics over merged calls. Avoid `nn.Dropout`, because backward would
draw another mask than forward. `PaperTransformerBlock` shows how to draw the same mask.

Weights are float32. Autocast computes in a lower precision. With float16, the expert scales a gradient so that its
largest value is about 1, far from the values that float16 rounds to zero or infinity. If the device's memory runs
out, the expert computes the batch in parts half as large. The outputs are the same, and the whole batch still gets one
step.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colab_swarm.errors import StateError, require
from colab_swarm.markup import settings, size
from colab_swarm.moe.blocks import PaperTransformerBlock
from colab_swarm.moe.grid import MAX_HOLDERS, Grid
from colab_swarm.runtime import free_ram_bytes
from colab_swarm.tensors.device import carry_in
from colab_swarm.tensors.statedict import flatten

logger = logging.getLogger(__name__)
T = TypeVar("T")
Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
ANY_LENGTH = -1
USABLE = 0.8  # fraction of the free memory to use: fragmentation and other programs take the rest
UNKNOWN_FREE_BYTES = 2 << 30
MEASURED_SAMPLES = 2  # a module with batch statistics raises an error for a single sample
_MOST_HEAD_BYTES = 1 << 20  # of the header of a save
MOST = 256  # experts per host: with more, their calls would queue
DTYPES = ("float32", "bfloat16", "float16")


def accelerators() -> tuple[torch.device, ...]:
    """Return this machine's GPUs; if it has none, return the CPU."""
    gpus = tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return gpus or (torch.device("cpu"),)


def devices_named(names: str | Sequence[str]) -> tuple[torch.device, ...]:
    """Return the devices of these names. "all" stands for `accelerators`. Raises ValueError for unknown names."""
    if names == "all":
        return accelerators()
    here = {str(device): device for device in (torch.device("cpu"), *accelerators())}
    known = not isinstance(names, str) and len(names) > 0 and here.keys() >= set(names)
    require(known, f'devices={names!r}: pass "all", or a list of some of {[*here]}')
    return tuple(here[name] for name in dict.fromkeys(names))


def dtype_named(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype in which experts compute on ``device``.

    "auto" stands for bfloat16 on a GPU that supports it, float16 on any other GPU, and float32 on a CPU. Raises
    ValueError for unknown names.
    """
    if name == "auto" and device.type == "cuda":
        with torch.cuda.device(device):
            is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
        name = "bfloat16" if is_fast else "float16"
    elif name == "auto":
        name = "float32"
    require(name in DTYPES, f'dtype={name!r}: pass "auto", or one of {DTYPES}')
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True)
class ExpertRule:
    """How an expert learns: functions that make its optimizer and its scheduler. Each step advances the scheduler."""

    optimizer: Callable[[Iterable[Parameter]], Optimizer]
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    max_grad_norm: float | None = None  # clip gradients of a batch to this 2-norm

    def __repr__(self) -> str:
        return settings(self)


ADAM = ExpertRule(partial(torch.optim.Adam, lr=1e-3), max_grad_norm=1.0)
"""How experts learn by default. The published rule, `PAPER_RULE`, does not clip gradients."""
PAPER_RULE = ExpertRule(partial(torch.optim.Adam, lr=1e-3, amsgrad=True))
"""How experts learn in the published code of Learning@home."""


class Expert:
    """A module that learns from its callers. After construction, only the thread of its device may use it.

    ``module`` maps a float32 tensor (n, *sample) to the same shape. A -1 in ``sample`` stands for any length. The
    expert moves the module to ``device``, by default the first of `accelerators`, and computes there in ``dtype``.
    """

    def __init__(
        self,
        uid: str,
        module: nn.Module,
        rule: ExpertRule,
        sample: tuple[int, ...],
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.uid = uid
        self.shape = tuple(sample)
        self.step = 0
        self.device = device or accelerators()[0]
        self._dtype = dtype
        self._autocast = torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)
        self._rule = rule
        self.module = module.to(self.device)
        for part in module.modules():
            if isinstance(part, PaperTransformerBlock):
                part.salt = uid.encode()
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._part_bytes = BatchLimits.max_batch_bytes
        # torch refuses an optimizer without parameters
        optimizer = rule.optimizer(self._parameters) if self._parameters else None
        scheduler = rule.scheduler(optimizer) if rule.scheduler and optimizer else None
        self._learning: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler}

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs for ``inputs`` (n, *shape), on the device. The module and its buffers do not change."""

        def outputs(samples: int, inputs: Tensor) -> Tensor:
            parts = torch.split(inputs, samples)
            return _joined([self._call(carry_in(part, self.device), self._buffers()) for part in parts])

        return self._in_parts(outputs, inputs)

    def backward(self, inputs: Tensor, grads: Tensor) -> Tensor:
        """Take one optimizer step, and return the loss's gradient w.r.t. ``inputs``, on the device.

        ``grads`` is the loss's gradient w.r.t. the outputs. Raises `FloatingPointError` if a gradient or a new buffer
        is not finite. After this error the expert is unchanged.
        """
        scale = self._loss_scale(grads)
        try:
            changes, buffers = self._in_parts(partial(self._gradients, scale), inputs.detach(), grads)
            norm = clip_grad_norm_(
                self._parameters, math.inf if self._rule.max_grad_norm is None else self._rule.max_grad_norm
            )
            # an infinity that a buffer already had, as in a constant mask, is no error
            olds = self.module.named_buffers()
            usable = [(buffers[name].isfinite() | (buffers[name] == old)).all() for name, old in olds]
            if not (norm.isfinite() and changes.isfinite().all() and all(usable)):
                raise FloatingPointError(f"{self.uid}: these tensors lead to values that are not finite")
            with torch.no_grad():
                for name, buffer in self.module.named_buffers():
                    buffer.copy_(buffers[name])
            for part in filter(None, self._learning.values()):
                part.step()
            self.step += 1
        finally:
            self._forget_gradients()
        return changes

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its tensors are the expert's own, not copies."""
        return {
            "module": self.module.state_dict(),
            **{key: part and part.state_dict() for key, part in self._learning.items()},
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. After a `StateError`, do not use this expert: it may be loaded only in part."""
        try:
            self.module.load_state_dict(state["module"])
            for key, part in self._learning.items():
                if part is not None:
                    part.load_state_dict(state[key])
            self.step = int(state["step"])
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"this state does not fit {self.uid}: {error}") from error

    def _in_parts(self, compute: Callable[..., T], *tensors: Tensor) -> T:
        """Return ``compute(samples, *tensors)``, where ``samples`` is the size of a part that fits into the memory."""
        each_bytes = max(1, tensors[0].nbytes // len(tensors[0]))
        while True:
            samples = min(len(tensors[0]), max(1, self._part_bytes // each_bytes))
            try:
                return compute(samples, *tensors)
            except torch.OutOfMemoryError:
                if samples == 1:
                    raise
            # not in the `except` block, where the error still holds the tensors that were computed
            self._part_bytes = samples // 2 * each_bytes
            torch.cuda.empty_cache()
            logger.warning("%s: no memory for %d samples at once, now half of it", self.uid, samples)

    def _gradients(
        self, scale: float, samples: int, inputs: Tensor, grads: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add up the gradients of the parameters; return the gradients w.r.t. the inputs, and the changed buffers."""
        self._forget_gradients()
        buffers = self._buffers()
        changes = []
        for values, grad in zip(torch.split(inputs, samples), torch.split(grads, samples), strict=True):
            leaf = carry_in(values, self.device).requires_grad_()
            with torch.enable_grad():
                outputs = self._call(leaf, buffers)
                torch.autograd.backward(outputs, carry_in(grad, self.device) * scale)
            if leaf.grad is None:
                raise ValueError(f"{self.uid}: its outputs do not depend on its inputs")
            changes.append(leaf.grad)
        joined = _joined(changes)
        if scale != 1:
            found = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            torch._foreach_div_([joined, *found], scale)
        return joined, buffers

    def _loss_scale(self, grads: Tensor) -> float:
        """Return the power of two that scales the largest gradient to between 0.5 and 1; without float16, return 1."""
        if self._dtype != torch.float16:
            return 1.0
        _, exponent = math.frexp(float(grads.abs().max()))
        # bounded so that float32 can represent the scale and its inverse
        return 2.0 ** max(-100, min(100, -exponent))

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    def _call(self, inputs: Tensor, buffers: dict[str, Tensor]) -> Tensor:
        with self._autocast:
            if buffers:
                outputs = functional_call(self.module, buffers, (inputs,))
            else:
                outputs = self.module(inputs)
        if isinstance(outputs, Tensor) and outputs.dtype == self._dtype:
            outputs = outputs.float()
        if not isinstance(outputs, Tensor) or outputs.shape != inputs.shape or outputs.dtype != inputs.dtype:
            found = type(outputs).__name__
            if isinstance(outputs, Tensor):
                found = f"{outputs.dtype} of shape {tuple(outputs.shape)}"
            raise ValueError(f"{self.uid}: {inputs.dtype} of shape {tuple(inputs.shape)} became {found}")
        return outputs


def _joined(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)


def kinds_of(state: Any) -> dict[str, Kind]:
    """Return the type and the shape of each tensor of a state; raise `TypeError` if the state cannot be saved."""
    tensors, _ = flatten(state)
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class ExpertModel:
    """The memory in bytes that experts of one kind need, and the tensors of their state."""

    each: int  # weights, buffers and optimizer state of one expert
    gradients: int  # of one expert
    sample: int  # activations that are kept for the backward pass of one sample
    state_bytes: int = 0  # upper bound of a save's size
    kinds: Mapping[str, Kind] = field(
        default_factory=dict
    )  # types and shapes of the state's tensors after one step

    def experts_that_fit(self, free_bytes: int, *, max_batch_size: int) -> tuple[int, str]:
        """Return how many experts fit into ``free_bytes``, 0 to `MOST`, and the calculation in words."""
        once = self.gradients + self.each + max_batch_size * self.sample
        fit = min(MOST, max(0, int((USABLE * free_bytes - once) // max(1, self.each))))
        return fit, (
            f"{USABLE:.0%} of {size(free_bytes)} free, less {size(once)} to compute a batch of {max_batch_size:,}, "
            f"divided by {size(self.each)} an expert"
        )


def _usual(sample: Sequence[int]) -> tuple[int, ...]:
    return tuple(128 if side == ANY_LENGTH else side for side in sample)


def measure(expert: Expert) -> ExpertModel:
    """Let an expert take a step, and measure the expert's memory.

    Raises `ValueError` if the module cannot process samples of its shape, and `TypeError` if the state cannot be saved.
    """
    module = expert.module
    known = {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    activations: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            activations[tensor.data_ptr()] = max(tensor.nbytes, activations.get(tensor.data_ptr(), 0))
        return tensor

    shape = MEASURED_SAMPLES, *_usual(expert.shape)
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            expert.backward(torch.rand(shape), torch.rand(shape))
    except Exception as error:  # the user's code may raise anything
        raise ValueError(
            f"{type(module).__name__} failed on a batch of shape {shape}: {error}; "
            "an expert maps (n, *sample) to the same shape, float32, and has gradients"
        ) from error
    state = expert.state_dict()
    kinds = kinds_of(state)  # raises now if the state cannot be saved
    each = sum(tensor.nbytes for tensor in flatten(state)[0].values())
    return ExpertModel(
        each=each,
        gradients=sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad),
        sample=(sum(activations.values()) + 4 * 4 * math.prod(shape)) // MEASURED_SAMPLES,
        state_bytes=each + _MOST_HEAD_BYTES,
        kinds=kinds,
    )


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device, or a low guess if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    ram_bytes = free_ram_bytes()
    return UNKNOWN_FREE_BYTES if ram_bytes is None else ram_bytes


@dataclass(frozen=True)
class BatchLimits:
    """Limits of one batch and of all calls together."""

    max_batch_size: int = 4096  # most samples in a batch of merged calls
    max_batch_bytes: int = 128 << 20  # most bytes of a batch's tensors as float32; also the limit of one call
    max_held_bytes: int = 512 << 20  # most received bytes of all admitted calls together


@dataclass(frozen=True)
class HostPlan:
    grid: Grid
    make: Callable[[], nn.Module]  # returns a new expert's module
    rule: ExpertRule
    sample: tuple[int, ...]  # shape of one sample
    model: ExpertModel
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)  # experts are spread over them
    dtype: str = "float32"  # the dtype in which the experts compute, or "auto"
    count: int = 1  # how many experts to host
    capacity: int = 1  # the most experts to host after other hosts died
    uids: tuple[str, ...] | None = None  # host only the experts of these names; None: any expert
    arithmetic: str = ""  # a sentence that explains the count
    copies: int = 2  # how many other peers keep each expert's saves
    spare: int = 4  # how many experts of dead hosts to take over beyond `count`, if memory allows
    save_s: float = 60.0  # between two saves
    takeover_s: float = 20.0  # between two checks for experts whose hosts died

    def __post_init__(self) -> None:
        require(
            0 <= self.copies <= MAX_HOLDERS and self.spare >= 0 and min(self.save_s, self.takeover_s) > 0,
            f"copies={self.copies}, spare={self.spare}, save_s={self.save_s}, takeover_s={self.takeover_s}: "
            f"give 0 to {MAX_HOLDERS}, 0 or more, and times above 0",
        )


def plan_host(
    grid: Grid,
    make_expert: Callable[[], nn.Module],
    *,
    sample: Sequence[int] | None = None,
    rule: ExpertRule | None = None,
    count: int | Sequence[str] | None = None,
    dtype: str = "auto",
    devices: str | Sequence[str] = "all",
    **settings: Any,
) -> HostPlan:
    """Build one expert, let it take a step, and compute how many experts these devices can host.

    By default, ``sample`` is the module's attribute ``sample``. ``count`` is the number of experts to host, or a list
    with the names of these experts. By default it is three quarters of the number that fits in the free memory. Raises
    `ValueError` if no expert fits or an argument is not usable, and `TypeError` if an expert's state cannot be saved.
    """
    chosen = devices_named(devices)
    module = make_expert()
    rule = rule or ADAM
    shape = getattr(module, "sample", None) if sample is None else sample
    if not isinstance(shape, Sequence):
        raise ValueError(
            f"unknown samples of {type(module).__name__}. Say sample=(512,), or sample=(-1, 512) for any length"
        )
    expert = Expert("the expert", module, rule, tuple(shape), chosen[0], dtype_named(dtype, chosen[0]))
    plan = HostPlan(grid, make_expert, rule, expert.shape, measure(expert), chosen, dtype, **settings)
    most = max(1, BatchLimits.max_batch_bytes // (4 * math.prod(_usual(shape))))
    most = min(BatchLimits.max_batch_size, most)
    fits = [plan.model.experts_that_fit(free_bytes(device), max_batch_size=most) for device in chosen]
    fit = min(sum(number for number, _ in fits), grid.size)
    why = f"{fit} of {grid} fit: {'; '.join(arithmetic for _, arithmetic in fits)}"
    if isinstance(count, Sequence):
        uids = tuple(dict.fromkeys(map(grid.uid, map(grid.index, count))))
        return replace(plan, count=len(uids), capacity=len(uids), uids=uids, arithmetic=why)
    require(count is not None or fit, f"{why}. Use smaller experts, or give count=1 to try")
    number = max(1, int(0.75 * fit)) if count is None else min(count, grid.size)
    require(number >= 1, f"count={count}: host at least one expert")
    capacity = max(number, min(number + plan.spare, fit))
    why = f"hosting {number} experts, and up to {capacity} when other hosts die; {why}"
    return replace(plan, count=number, capacity=capacity, arithmetic=why)
