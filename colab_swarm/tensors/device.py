"""What passes between a device, such as a GPU, and main memory.

Gradients go through `copy_out` and `copy_in`, which wait; `carry_in` and `Arrival` copy beside computing.

A flag is one bit that a device computes. Its reader waits for the work before it, and for nothing that came later.
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

_MAIN_MEMORY: tuple[str, ...] = ("cpu",)  # types of devices whose tensors lie there
_MOST_STAGED_BYTES = 1 << 22
# Of free main memory, what three vectors may keep pinned, where a GPU reads and writes it several times as fast.
_PINNED_SHARE = 1 / 8
_SPARE_SHARE = 1 / 16  # of a device's memory, for what a longer text takes


def in_main_memory(device: torch.device) -> bool:
    """Return True if the CPU reads these tensors: nothing is copied then, and no flag is waited for."""
    return device.type in _MAIN_MEMORY


@dataclass
class Copied:
    """Bytes that this process has copied out of devices and into them."""

    out_bytes: int = 0
    in_bytes: int = 0


copied = Copied()


def copy_out(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor to one in main memory, and wait until it is there."""
    if not in_main_memory(source.device):
        copied.out_bytes += source.nbytes
    target.copy_(source)


def copy_in(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor in main memory to one that may be on a device; the source may be changed afterwards."""
    if not in_main_memory(target.device):
        copied.in_bytes += source.nbytes
    target.copy_(source)


def host_copy(tensor: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
    """Return a copy in main memory."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    copy_out(tensor, copy)
    return copy


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is in main memory, else a copy there that does not last.

    A short one of a GPU's is pinned: torch keeps such memory for the next.
    """
    if in_main_memory(tensor.device):
        return tensor
    is_short = tensor.nbytes <= _MOST_STAGED_BYTES
    return host_copy(tensor, pinned=is_short and tensor.device.type == "cuda")


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor in main memory itself if the device reads it there, else a copy."""
    if in_main_memory(device):
        return tensor
    copy = torch.empty_like(tensor, device=device)
    copy_in(tensor, copy)
    return copy


def moved(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return the tensor on a device, or, with None, in main memory; itself if it lies there."""
    target = device or torch.device("cpu")
    if tensor.device == target:
        return tensor
    if device is None or in_main_memory(device):
        return host_copy(tensor)
    return to_device(to_host(tensor), device)


def from_buffer(payload: Buffer, device: torch.device) -> torch.Tensor:
    """Return bytes (uint8) that arrived, on a device."""
    is_pinned = device.type == "cuda"
    staged = torch.empty(len(payload), dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    staged.numpy()[:] = np.frombuffer(payload, np.uint8)
    return to_device(staged, device)


def floats_of(values: torch.Tensor) -> Floats:
    """Return float32 values in main memory: a view if they are there."""
    floats: Floats = to_host(values).numpy()
    return floats


def host_values(numel: int, device: torch.device) -> Floats:
    """Return new main memory for values that go to and come from this device."""
    # Torch takes a power of two.
    pinned_bytes = 1 << (4 * numel).bit_length()
    if device.type == "cuda" and 3 * pinned_bytes <= _PINNED_SHARE * (free_ram_bytes() or 0):
        pinned: Floats = torch.empty(numel, dtype=torch.float32, device="cpu", pin_memory=True).numpy()
        return pinned
    return np.empty(numel, np.float32)


def hand_over(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until these are computed: another thread goes on with them, maybe on another stream of their GPU."""
    for device in {tensor.device for tensor in tensors}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


@contextmanager
def beside(devices: Iterable[torch.device]) -> Iterator[None]:
    """Let what follows run beside what these devices compute for others, and wait for it at the end."""
    streams = [_beside(device, "round") for device in devices if device.type == "cuda"]
    with ExitStack() as entered:
        for stream in streams:
            entered.enter_context(torch.cuda.stream(stream))
        yield
        for stream in streams:
            stream.synchronize()


def spare_bytes(device: torch.device) -> float:
    """Return how much of a device's memory is free though all is allocated that once was; infinite if not known."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        returned = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
        return free - returned - _SPARE_SHARE * total
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return math.inf


@functools.cache
def _beside(device: torch.device, way: str) -> torch.cuda.Stream:
    # one a way: what comes in for the next batch must not queue behind what goes out after this one
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def carry_in(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return these values on the device: copied beside what it computes now, if their memory is pinned."""
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
    """Return these numbers on the device, as float32; nothing waits for it."""
    is_pinned = device.type == "cuda"
    return carry_in(torch.tensor(numbers, dtype=torch.float32, device="cpu", pin_memory=is_pinned), device)


class Arrival:
    """A tensor on its way to main memory, beside what its device computes next. `read` waits for it."""

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
    """Now; on a GPU, when it has done what was enqueued until now."""

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
        """Return the seconds between two moments that have passed."""
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
    """Return whether no value of these tensors is NaN or Inf."""
    if not tensors:
        return Flag(torch.tensor(True, device="cpu"))
    if in_main_memory(tensors[0].device):
        # Twenty times faster there than the other norm, but squares overflow.
        squares = Flag(torch.nn.utils.get_total_norm(tensors, 2.0).isfinite())
        if squares.read():
            return squares
    if tensors[0].device.type == "mps":
        # A largest value there may not be NaN where one of the values is.
        return Flag(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())
    return Flag(torch.nn.utils.get_total_norm(tensors, math.inf).isfinite())
