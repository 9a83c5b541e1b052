"""Probes of this machine: cores, memory, graphics card, versions, internet, and the speed of a model.

Everything but `calibrate` works without torch.
"""

from __future__ import annotations

import os
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from colab_swarm.notebook.checks import Subject

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

HOSTS = (("pypi.org", 443), ("huggingface.co", 443))
"""Hosts that installing the package or loading a data set contacts anyway."""
CONNECT_TIMEOUT_S = 3.0
PACKAGES = ("torch", "transformers", "cryptography", "aiohttp", "colab-swarm")
FLOOR = re.compile(r"([A-Za-z0-9_-]+)[^;]*>=([0-9.]+)")
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
CALIBRATION_S = 2.0
MIN_PASSES = 3


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_ram_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Return the available main memory within the limit of a container, or None if the system does not report it."""
    try:
        available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    except OSError:  # macOS and Windows
        return None
    if available is None:
        return None
    free_bytes = 1024 * int(available[1])
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = (cgroup / "memory.current").read_text().strip()
    except OSError:
        return free_bytes
    return min(free_bytes, max(0, int(limit) - int(used))) if limit.isdigit() else free_bytes


def gpu() -> tuple[str, int, int] | None:
    """Return name, free and total bytes of the card that torch uses."""
    if find_spec("torch") is None:
        return None
    import torch

    return (torch.cuda.get_device_name(), *torch.cuda.mem_get_info()) if torch.cuda.is_available() else None


def versions() -> dict[str, tuple[str | None, str]]:
    """Return the installed version, or None, beside the lowest one that works, by package."""
    floors = wanted(requires("colab-swarm") or ())
    found: dict[str, tuple[str | None, str]] = {"python": (".".join(map(str, sys.version_info[:3])), "3.11")}
    for name in PACKAGES:
        try:
            found[name] = version(name), floors.get(name, "0")
        except PackageNotFoundError:
            found[name] = None, floors.get(name, "0")
    return found


def wanted(requirements: Iterable[str]) -> dict[str, str]:
    """Return the lowest versions in requirements such as ``torch>=2.9; extra == "train"``, by name."""
    return {match[1]: match[2] for line in requirements if (match := FLOOR.match(line))}


def internet(
    connect: Callable[[tuple[str, int], float], socket.socket] = socket.create_connection,
) -> bool:
    """Return True if any of `HOSTS` accepts a connection within 3 s."""
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def try_host(host: tuple[str, int]) -> None:
        try:
            connect(host, CONNECT_TIMEOUT_S).close()
            answers.put(True)
        except OSError:
            answers.put(False)

    for host in HOSTS:  # in threads, because a name lookup has no timeout
        threading.Thread(target=try_host, args=(host,), daemon=True).start()
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    try:
        return any(answers.get(timeout=max(0.0, deadline - time.monotonic())) for _ in HOSTS)
    except queue.Empty:
        return False


def calibrate(
    model: Module, batches: Iterable[Mapping[str, Tensor]], *, seconds: float = CALIBRATION_S
) -> Subject:
    """Run ``model(**batch).loss.backward()`` for about ``seconds`` after a short warm-up.

    Afterwards parameters, gradients, buffers and torch's random state are as before; the used batches are gone.

    Raises:
        ValueError: there are not enough batches.
    """
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = 0 if storage.data_ptr() in own else storage.nbytes()
        return tensor

    with _restored(model, trained):
        passes = _train(model, batches)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            micro_batch = next(passes)
        _measure(passes, seconds / 4, 1)  # the first passes are slow
        samples_per_s = _measure(passes, seconds, MIN_PASSES)
    numel = sum(parameter.numel() for parameter in trained)
    sample_bytes = sum(saved.values()) / micro_batch
    return Subject(type(model).__name__, numel, sample_bytes, micro_batch, samples_per_s)


def _train(model: Module, batches: Iterable[Mapping[str, Tensor]]) -> Iterator[int]:
    """Compute the gradients of each batch and forget them; yield its number of samples."""
    device = next(model.parameters()).device
    for batch in batches:
        model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss.backward()
        model.zero_grad(set_to_none=True)
        yield len(next(iter(batch.values())))
    raise ValueError("the batches ran out during the calibration: pass an endless iterable, or more of them")


def _measure(passes: Iterator[int], seconds: float, least: int) -> float:
    """Return the samples per second of as many passes as fit, at least ``least``."""
    import torch

    samples, began_at = 0, time.perf_counter()
    while least > 0 or time.perf_counter() - began_at < seconds:
        samples, least = samples + next(passes), least - 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # kernels run asynchronously
    return samples / (time.perf_counter() - began_at)


@contextmanager
def _restored(model: Module, trained: list[Parameter]) -> Iterator[None]:
    """Restore gradients, buffers, mode and random state afterwards, also after an interrupt."""
    import torch

    gradients = [parameter.grad for parameter in trained]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    was_training = model.training
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            model.train()
            model.zero_grad(set_to_none=True)
            yield
        finally:
            model.train(was_training)
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
