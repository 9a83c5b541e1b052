"""Copies between a device, such as a GPU, and main memory.

Gradients go through `copy_out` and `copy_in`, which wait for the copy. `carry_in` and `Arrival` copy while the device
computes.

A flag is one bit that a device computes. Reading a flag waits for work that was enqueued before the flag, but not for
later work.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from colab_swarm.runtime import free_ram_bytes
from colab_swarm.tensors.vectors import Buffer, Floats

_MAIN_MEMORY: tuple[str, ...] = ("cpu",)  # types of devices whose tensors are in main memory
_MOST_STAGED_BYTES = 1 << 22
# The part of free main memory that three vectors may pin. A GPU reads and writes pinned memory several times as fast.
_PINNED_SHARE = 1 / 8
_SPARE_SHARE = 1 / 16  # part of a device's memory that is kept free, for example for a longer text in a batch


def in_main_memory(device: torch.device) -> bool:
    """Return True if the CPU reads tensors of this device directly, without a copy and without waiting for flags."""
    return device.type in _MAIN_MEMORY


@dataclass
class Copied:
    """Counts the bytes that this process has copied out of devices and into devices."""

    out_bytes: int = 0
    in_bytes: int = 0


copied = Copied()


def copy_out(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor to a tensor in main memory, and wait until the copy is complete."""
    if not in_main_memory(source.device):
        copied.out_bytes += source.nbytes
    target.copy_(source)


def copy_in(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor in main memory to a tensor that may be on a device; afterwards the source may be changed."""
    if not in_main_memory(target.device):
        copied.in_bytes += source.nbytes
    target.copy_(source)


def host_copy(tensor: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
    """Return a copy in main memory."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    copy_out(tensor, copy)
    return copy


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is in main memory, else a copy there for short-term use.

    A short copy from a GPU is in pinned memory, which torch reuses for the next copy.
    """
    if in_main_memory(tensor.device):
        return tensor
    is_short = tensor.nbytes <= _MOST_STAGED_BYTES
    return host_copy(tensor, pinned=is_short and tensor.device.type == "cuda")


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor in main memory itself if the device can read it there, else a copy on the device."""
    if in_main_memory(device):
        return tensor
    copy = torch.empty_like(tensor, device=device)
    copy_in(tensor, copy)
    return copy


def moved(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return the tensor on a device or, with None, in main memory; if it is there already, the tensor itself."""
    target = device or torch.device("cpu")
    if tensor.device == target:
        return tensor
    if device is None or in_main_memory(device):
        return host_copy(tensor)
    return to_device(to_host(tensor), device)


def from_buffer(payload: Buffer, device: torch.device) -> torch.Tensor:
    """Return received bytes as a uint8 tensor on a device."""
    is_pinned = device.type == "cuda"
    staged = torch.empty(len(payload), dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    staged.numpy()[:] = np.frombuffer(payload, np.uint8)
    return to_device(staged, device)


def floats_of(values: torch.Tensor) -> Floats:
    """Return float32 values in main memory; a view if they are there already."""
    floats: Floats = to_host(values).numpy()
    return floats


def host_values(numel: int, device: torch.device) -> Floats:
    """Return new main memory for values that are copied to and from this device."""
    # For pinned memory, torch allocates a power of two.
    pinned_bytes = 1 << (4 * numel).bit_length()
    if device.type == "cuda" and 3 * pinned_bytes <= _PINNED_SHARE * (free_ram_bytes() or 0):
        pinned: Floats = torch.empty(numel, dtype=torch.float32, device="cpu", pin_memory=True).numpy()
        return pinned
    return np.empty(numel, np.float32)


def hand_over(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until these tensors are computed, because another thread will use them, perhaps on another GPU stream."""
    for device in {tensor.device for tensor in tensors}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


@contextmanager
def beside(devices: Iterable[torch.device]) -> Iterator[None]:
    """Run the ``with`` block on separate streams, beside other work of these devices, and wait for it at the end."""
    streams = [_beside(device, "round") for device in devices if device.type == "cuda"]
    with ExitStack() as entered:
        for stream in streams:
            entered.enter_context(torch.cuda.stream(stream))
        yield
        for stream in streams:
            stream.synchronize()


def spare_bytes(device: torch.device) -> float:
    """Return how much of a device's memory is free even at the highest use so far; infinite if not known."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        returned = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
        return free - returned - _SPARE_SHARE * total
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return math.inf


@functools.cache
def _beside(device: torch.device, way: str) -> torch.cuda.Stream:
    # One stream for each direction, so that the next batch's input does not wait for this batch's output.
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def carry_in(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return these values on the device; if their memory is pinned, they are copied while the device computes."""
    if device.type != "cuda":
        return values.to(device)
    beside = _beside(device, "in")
    with torch.cuda.stream(beside):
        carried = values.to(device, non_blocking=True)
    now = torch.cuda.current_stream(device)
    now.wait_stream(beside)
    carried.record_stream(now)
    return carried


def carry_numbers(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return these numbers as a float32 tensor on the device, without waiting for the copy."""
    is_pinned = device.type == "cuda"
    return carry_in(torch.tensor(numbers, dtype=torch.float32, device="cpu", pin_memory=is_pinned), device)


class Arrival:
    """A tensor that is being copied to main memory while its device computes on. `read` waits for the copy."""

    def __init__(self, value: torch.Tensor) -> None:
        self._copy = value
        self._event: torch.cuda.Event | None = None
        if value.device.type == "cuda":
            self._copy = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
            beside = _beside(value.device, "out")
            beside.wait_stream(torch.cuda.current_stream(value.device))
            with torch.cuda.stream(beside):
                self._copy.copy_(value, non_blocking=True)
            value.record_stream(beside)
            self._event = beside.record_event()

    def read(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._copy


class DeviceTimestamp:
    """The present moment; on a GPU, the moment at which it finishes the work that is enqueued now."""

    def __init__(self, device: torch.device, now: float) -> None:
        self._at = now
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    @property
    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def since(self, earlier: "DeviceTimestamp") -> float:
        """Return the seconds from ``earlier`` to this moment; both must have passed."""
        if self._event is None:
            return self._at - earlier._at
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Flag:
    """A bit that a device computes: ``value`` is its bool of shape ``()``."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self._arrival = Arrival(value)

    def read(self) -> bool:
        """Return the bit, and wait for it."""
        return bool(self._arrival.read())


def all_finite(tensors: Sequence[torch.Tensor]) -> Flag:
    """Return a flag that is True if no value of these tensors is NaN or Inf."""
    if not tensors:
        return Flag(torch.tensor(True, device="cpu"))
    if in_main_memory(tensors[0].device):
        # In main memory this norm is twenty times faster than the maximum norm, but its squares may overflow.
        squares = Flag(torch.nn.utils.get_total_norm(tensors, 2.0).isfinite())
        if squares.read():
            return squares
    if tensors[0].device.type == "mps":
        # On MPS the largest value may be finite although one of the values is NaN.
        return Flag(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())
    return Flag(torch.nn.utils.get_total_norm(tensors, math.inf).isfinite())
