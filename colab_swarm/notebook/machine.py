"""Probes of this machine: cores, memory, disk, graphics card, versions, internet. None needs torch to be installed."""

from __future__ import annotations

import os
import queue
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colab_swarm.notebook.checks import Gpu, Machine, Version

HOSTS = (("pypi.org", 443), ("huggingface.co", 443))

"""Whoever installs the package or loads a data set talks to these anyway."""

CONNECT_TIMEOUT_S = 3.0

TOLD = ("python", "torch", "transformers", "cryptography", "aiohttp", "colab-swarm")

FLOOR = re.compile(r"([A-Za-z0-9_-]+)[^;]*>=([0-9.]+)")

MEMINFO = Path("/proc/meminfo")

CGROUP = Path("/sys/fs/cgroup")


def machine() -> Machine:
    """This machine, as this process may use it."""
    return Machine(
        cores=_cores(),
        free_ram_bytes=free_ram_bytes(),
        free_disk_bytes=shutil.disk_usage(".").free,
        open_files=_open_files(),
        gpu=_gpu(),
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_ram_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Main memory still to be had: what the machine has free, or less where a container bounds it."""
    try:
        told = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    except OSError:
        return None  # neither macOS nor Windows tells it without a package of its own
    if told is None:
        return None
    free_bytes = 1024 * int(told[1])
    try:
        bound = (cgroup / "memory.max").read_text().strip()
        used = (cgroup / "memory.current").read_text().strip()
    except OSError:
        return free_bytes
    return min(free_bytes, max(0, int(bound) - int(used))) if bound.isdigit() else free_bytes


def _open_files() -> int | None:
    if find_spec("resource") is None:
        return None  # Windows has no such bound
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _gpu() -> Gpu | None:
    if find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return Gpu(torch.cuda.get_device_name(), free_bytes, total_bytes)


def versions() -> tuple[Version, ...]:
    """What is installed, beside the least that this package asks for."""
    floors = wanted(requires("colab-swarm") or ())
    python = ".".join(map(str, sys.version_info[:3]))
    found = {"python": python} | {name: _version(name) for name in TOLD[1:]}
    return tuple(
        Version(name, found[name], {"python": "3.11"}.get(name, floors.get(name, "0"))) for name in TOLD
    )


def wanted(requirements: Iterable[str]) -> dict[str, str]:
    """The least versions in requirements such as ``torch>=2.9; extra == "train"``, by name."""
    return {match[1]: match[2] for line in requirements if (match := FLOOR.match(line))}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def internet(connect: Callable[[tuple[str, int], float], object] = socket.create_connection) -> bool:
    """Whether any of `HOSTS` accepts a connection within 3 s."""
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    for host in HOSTS:  # in threads, because looking up a name cannot be bounded
        threading.Thread(target=lambda host=host: answers.put(_answers(connect, host)), daemon=True).start()
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    try:
        return any(answers.get(timeout=max(0.0, deadline - time.monotonic())) for _ in HOSTS)
    except queue.Empty:
        return False


def _answers(connect: Callable[[tuple[str, int], float], object], host: tuple[str, int]) -> bool:
    try:
        connection = connect(host, CONNECT_TIMEOUT_S)
    except OSError:
        return False
    if isinstance(connection, socket.socket):
        connection.close()
    return True


SECONDS = 2.0

LEAST_PASSES = 3


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        samples_per_s: forward and backward, the making of the batches included.
        micro_batch: samples of a batch.
        parameters: count of trained values.
        sample_bytes: kept for the backward pass of one sample, on average.
    """

    samples_per_s: float
    micro_batch: int
    parameters: int
    sample_bytes: float


def calibrate(
    model: torch.nn.Module, batches: Iterable[Mapping[str, Tensor]], *, seconds: float = SECONDS
) -> Calibration:
    """Run ``model(**batch).loss.backward()`` for about ``seconds`` after a warm-up of a quarter of it.

    Parameters, gradients, buffers and the random state of torch are afterwards as they were; of ``batches``, those
    used are gone.

    Raises:
        ValueError: there are no batches.
    """
    source = iter(batches)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with _untouched(model, trained):
        saved_bytes, micro_batch = _saved_bytes(model, _next(source))
        _train(model, source, seconds / 4, 1)  # the first passes are slow
        samples, took_s = _train(model, source, seconds, LEAST_PASSES)
    numel = sum(parameter.numel() for parameter in trained)
    return Calibration(samples / took_s, micro_batch, numel, saved_bytes / micro_batch)


def _next(source: Iterator[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    batch = next(source, None)
    if batch is None:
        raise ValueError(
            "the batches ran out during the calibration: pass an endless iterable, or more of them"
        )
    return batch


def _train(
    model: torch.nn.Module, source: Iterator[Mapping[str, Tensor]], seconds: float, passes: int
) -> tuple[int, float]:
    """Samples and seconds of as many passes as fit, and at least ``passes``."""
    samples, began_at = 0, time.perf_counter()
    while passes > 0 or time.perf_counter() - began_at < seconds:
        batch = _next(source)
        _loss(model, batch).backward()
        model.zero_grad(set_to_none=True)
        samples, passes = samples + _size(batch), passes - 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # kernels run behind
    return samples, time.perf_counter() - began_at


def _loss(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Any:
    device = next(model.parameters()).device
    return model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss


def _size(batch: Mapping[str, Tensor]) -> int:
    return len(next(iter(batch.values())))


def _saved_bytes(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> tuple[int, int]:
    """What one pass keeps for its backward half beside the parameters, bytes, and its samples."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = _loss(model, batch)
    del loss  # it kept all of them alive, so that no address was used twice
    return sum(saved.values()), _size(batch)


@contextmanager
def _untouched(model: torch.nn.Module, trained: list[torch.nn.Parameter]) -> Iterator[None]:
    """Put gradients, buffers, mode and the random state back afterwards, also after an interrupt."""
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
