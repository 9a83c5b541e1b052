"""Trains one model with many batches in flight, which hides the latency of experts and networks.

Each thread computes the gradients of a batch with a copy of the parameters, and applies them immediately. Between the
copy and the update, the other threads apply about ``concurrency - 1`` updates. So the gradients are *stale* by about
this number of updates (Learning@home, sections 3.1 and 4.2).
"""

import copy
import inspect
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from statistics import fmean
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from colab_swarm.errors import NoExpertsError, PeerError, require
from colab_swarm.tensors.samples import samples_of

logger = logging.getLogger(__name__)
Batch = TypeVar("Batch")
POLL_S = 0.5
PAUSE_S = 1.0  # before a batch is retried after a peer's failure


@dataclass(frozen=True)
class TrainerResult:
    """Progress of a `fit`."""

    updates: int = 0  # of the model's local parameters
    samples: int = 0  # in the batches of these updates; a batch of unknown size counts as 1
    loss: float = math.nan  # mean of the last hundred batches; NaN before the first batch
    mean_staleness: float = 0.0  # mean number of other updates while a gradient was computed
    retries: int = 0  # batches retried because peers failed
    dropped: int = 0  # gradients that were not finite and not applied
    seconds: float = 0.0  # since `fit` started

    def __str__(self) -> str:
        samples_per_s = self.samples / self.seconds if self.seconds else 0.0
        return (
            f"{self.updates} updates · loss {self.loss:.4g} · {samples_per_s:.3g} samples/s · "
            f"staleness {self.mean_staleness:.1f} · {self.retries} retries · {self.dropped} dropped"
        )


class _Run(Generic[Batch]):
    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._taking = threading.Lock()  # only one thread at a time may use an iterator
        self.stopped = threading.Event()
        self.error: BaseException | None = None
        self.result = TrainerResult()
        self.losses: deque[float] = deque(maxlen=100)
        self.began = self.last_success = time.monotonic()

    def take(self) -> Iterator[Batch]:
        while not self.stopped.is_set():
            with self._taking:
                try:
                    batch = next(self._batches)
                except StopIteration:
                    return
            yield batch

    def count(self, **changes: Any) -> None:
        """Change the result, under the trainer's lock."""
        self.result = replace(self.result, **changes, seconds=time.monotonic() - self.began)


@dataclass(repr=False, eq=False)
class AsyncTrainer(Generic[Batch]):
    """Applies the gradients of many batches to one model, each as soon as it is ready.

    If a peer fails, the trainer retries the batch. `fit` raises the error of a peer only if no batch succeeds
    for ``patience_s``. It raises exceptions of your code immediately.

    Args:
        loss: a function that returns the mean loss of a copy of the model over a batch: ``lambda model, batch: …``.
            It runs on many threads and must be thread-safe.
        optimizer: steps the model's local parameters. A `SwarmOptimizer` synchronizes several trainers.
        concurrency: number of batches in flight, each with a copy of the model's local parameters. To hide the
            latency, divide the duration of a batch, including waits, by its computing time.
        max_grad_norm: largest 2-norm of a batch's gradients; larger gradients are clipped.
        progress: print progress twice a second.
        on_update: a function to call after each update, while no other thread uses model and optimizer.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Optimizer
    _: KW_ONLY
    concurrency: int = 8
    max_grad_norm: float | None = None
    patience_s: float = 300.0
    progress: bool = True
    on_update: Callable[[TrainerResult], object] | None = None
    # the result of the last `fit`, also after an interrupt
    result: TrainerResult = field(default=TrainerResult(), init=False)

    def __post_init__(self) -> None:
        text = f"concurrency={self.concurrency}: at least one batch must be in flight"
        require(self.concurrency >= 1, text)
        self._counts_samples = "samples" in inspect.signature(self.optimizer.step).parameters
        self._lock = threading.Lock()  # protects the model, the optimizer and the result

    def __repr__(self) -> str:
        return f"AsyncTrainer({self.concurrency} batches in flight; {self.result})"

    def fit(self, batches: Iterable[Batch]) -> TrainerResult:
        """Train on every batch once.

        Ctrl-C drops the batches in flight and leaves the model after its last complete update.
        """
        run = _Run(iter(batches))
        threads = []
        for _ in range(self.concurrency):
            replica = copy.deepcopy(self.model)
            thread = threading.Thread(target=self._work, args=(run, replica), name="trainer", daemon=True)
            threads.append(thread)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive() and run.error is None:
                    thread.join(POLL_S)
                    if self.progress:
                        print(f"\r{run.result}", end=" ", flush=True)
            if self.progress:
                print(f"\r{run.result}")
        finally:
            with self._lock:  # an update that runs finishes, and no other starts
                run.stopped.set()
                run.count()
                self.result = run.result
        if run.error is not None:
            raise run.error
        return self.result

    def _work(self, run: _Run[Batch], replica: nn.Module) -> None:
        try:
            for batch in run.take():
                self._learn(run, replica, batch)
        except BaseException as error:  # raised by `fit`
            run.error = run.error or error
            run.stopped.set()

    def _learn(self, run: _Run[Batch], replica: nn.Module, batch: Batch) -> None:
        tried_at = time.monotonic()
        while not run.stopped.is_set():
            replica.zero_grad(set_to_none=True)
            with self._lock, torch.no_grad():
                theirs, ours = (chain(m.parameters(), m.buffers()) for m in (replica, self.model))
                for there, here in zip(theirs, ours, strict=True):
                    there.copy_(here)
                version = run.result.updates
            try:
                loss = self.loss(replica, batch)
                loss.backward()  # type: ignore[no-untyped-call]
            except (PeerError, NoExpertsError) as error:
                if time.monotonic() - max(tried_at, run.last_success) > self.patience_s:
                    raise
                logger.info("retrying a batch: %s", error)
                with self._lock:
                    run.count(retries=run.result.retries + 1)
                run.stopped.wait(PAUSE_S)
                continue
            self._apply(run, replica, version, samples_of(batch), loss.item())
            return

    def _apply(
        self, run: _Run[Batch], replica: nn.Module, version: int, samples: int | None, loss: float
    ) -> None:
        norm = clip_grad_norm_(
            replica.parameters(), math.inf if self.max_grad_norm is None else self.max_grad_norm
        )
        with self._lock:
            if run.stopped.is_set():
                return
            if not math.isfinite(norm):
                run.count(dropped=run.result.dropped + 1)
                return
            for here, there in zip(self.model.parameters(), replica.parameters(), strict=True):
                here.grad = there.grad
                there.grad = None
            with torch.no_grad():
                for buffer, newer in zip(self.model.buffers(), replica.buffers(), strict=True):
                    buffer.copy_(newer)
            more: dict[str, Any] = {}
            if self._counts_samples:
                more["loss"] = loss
                # If the number is unknown, the optimizer's error says what to pass.
                if samples is not None:
                    more["samples"] = samples
            self.optimizer.step(**more)
            self.optimizer.zero_grad(set_to_none=True)
            run.losses.append(loss)
            run.last_success = time.monotonic()
            last = run.result
            staleness = run.result.updates - version
            run.count(
                updates=last.updates + 1,
                samples=last.samples + (samples or 1),
                loss=fmean(run.losses),
                mean_staleness=(last.mean_staleness * last.updates + staleness) / (last.updates + 1),
            )
            if self.on_update is not None:
                self.on_update(run.result)
