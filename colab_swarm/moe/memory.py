"""How many experts fit into this device's memory.

What stays for each expert: parameters and buffers, and the state of its optimizer. What is needed once, because one
batch computes at a time: one expert's gradients, a copy of its state while it is saved, and what the largest batch
keeps for its backward pass. One expert is built and takes one step to tell: an optimizer has no state before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colab_swarm.moe.checkpoints import freeze
from colab_swarm.moe.device import accelerator
from colab_swarm.moe.expert import ANY_LENGTH, Expert, ExpertRule

USABLE = 0.8
"""Share of the free memory that fragmentation, and whoever else is there, leave."""
UNKNOWN_FREE_BYTES = 2 << 30
USUAL_LENGTH = 128
"""Of a sample of any length."""
SAMPLES = 2
MOST = 256
"""Experts of one host: with more of them its calls would queue."""


@dataclass(frozen=True)
class Footprint:
    """What experts of one kind take, bytes.

    Attributes:
        module: parameters and buffers of one.
        optimizer: the optimizer's state of one.
        gradients: of one.
        sample: what the backward pass keeps of one sample.
    """

    module: int
    optimizer: int
    gradients: int
    sample: int

    @property
    def expert(self) -> int:
        """What one more expert takes."""
        return self.module + self.optimizer

    def once(self, max_batch_size: int) -> int:
        """What is taken however many experts there are."""
        return self.gradients + self.expert + max_batch_size * self.sample


@dataclass(frozen=True)
class Model:
    """An expert as all of its kind are: what it takes, and its state, of which tensors have a shape but no values."""

    footprint: Footprint
    state: Mapping[str, Any]

    @property
    def state_bytes(self) -> int:
        """Of its tensors, each with some room beside it."""
        return sum(64 + tensor.nbytes for tensor in _tensors(self.state))


def measure(make_expert: Callable[[], nn.Module], rule: ExpertRule, sample: Sequence[int]) -> Model:
    """Build one expert and let it take a step.

    Raises:
        ValueError: it is no expert of such samples.
        TypeError: its state cannot be saved.
    """
    module = make_expert()
    expert = Expert("the expert", module, rule, tuple(sample))
    parameters = [*module.parameters()]
    known = {tensor.data_ptr() for tensor in (*parameters, *module.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            kept[tensor.data_ptr()] = max(tensor.nbytes, kept.get(tensor.data_ptr(), 0))
        return tensor

    shape = (SAMPLES, *(USUAL_LENGTH if side == ANY_LENGTH else side for side in sample))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        expert.backward(torch.rand(shape), torch.rand(shape))
    state = expert.state_dict()
    freeze(state)  # what cannot be saved is the user's to know now
    footprint = Footprint(
        module=sum(tensor.nbytes for tensor in _tensors(state["module"])),
        optimizer=sum(tensor.nbytes for tensor in _tensors(state["optimizer"])),
        gradients=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        sample=(sum(kept.values()) + 4 * torch.rand(shape).nbytes) // SAMPLES,
    )
    return Model(footprint, _outline(state))


def experts_that_fit(footprint: Footprint, free_bytes: int, *, max_batch_size: int) -> int:
    """How many experts a host of so much free memory takes, 0 to `MOST`."""
    room = USABLE * free_bytes - footprint.once(max_batch_size)
    return min(MOST, max(0, int(room // max(1, footprint.expert))))


def explain(footprint: Footprint, free_bytes: int, *, max_batch_size: int) -> str:
    """The arithmetic of `experts_that_fit` in a line."""
    return (
        f"{USABLE:.0%} of {_mb(free_bytes)} free, less {_mb(footprint.once(max_batch_size))} to compute a batch of "
        f"{max_batch_size:,}, divided by {_mb(footprint.expert)} an expert "
        f"(weights {_mb(footprint.module)}, optimizer {_mb(footprint.optimizer)})"
    )


def free_bytes() -> int:
    """Free memory of the device that experts live on; a cautious guess where nobody tells."""
    if accelerator().type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    found = [*_told_by_linux()]
    if not found:
        try:
            found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
        except (AttributeError, ValueError, OSError):  # Windows
            found = [UNKNOWN_FREE_BYTES]
    return min(found)


def _told_by_linux() -> Iterator[int]:
    """What the machine has left, and what the container has."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield from (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        folder = Path("/sys/fs/cgroup")
        limit, used = ((folder / name).read_text() for name in ("memory.max", "memory.current"))
        yield max(0, int(limit) - int(used))  # "max" is no number: no limit
    except (OSError, ValueError):
        return


def _outline(state: Any) -> Any:
    """The state without its values, which would take memory for nothing."""
    match state:
        case Tensor():
            return torch.empty_like(state, device="meta")
        case Mapping():
            return {key: _outline(value) for key, value in state.items()}
        case list() | tuple():
            return [*map(_outline, state)]
    return state


def _tensors(state: Any) -> Iterator[Tensor]:
    match state:
        case Tensor():
            yield state
        case Mapping():
            for value in state.values():
                yield from _tensors(value)
        case list() | tuple():
            for value in state:
                yield from _tensors(value)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes < 1e9 else f"{size_bytes / 1e9:,.1f} GB"
