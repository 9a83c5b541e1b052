"""How fast and how large a model is, by training it for two seconds without changing it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
