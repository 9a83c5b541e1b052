"""The training of one work unit, a batch at a time: it can be saved between any two and gone on with elsewhere."""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from colab_swarm.workunits.job import Indices, Job, Rows
from colab_swarm.workunits.messages import Subset
from colab_swarm.workunits.weights import Floats, Schema


@dataclass(frozen=True)
class UnitConfig:
    """How a unit is trained.

    Attributes:
        local_epochs: how often through the data.
        batch_size: samples of one step.
        seed: of the order of samples and of all chance in the model, so that replicas agree.
    """

    local_epochs: int
    batch_size: int
    seed: int


class UnitTraining:
    """Trains a copy of the server's parameters on one subset.

    Attributes:
        done: batches trained so far.
        batches: of the whole unit.
    """

    def __init__(
        self,
        job: Job,
        rows: Rows,
        lesson: UnitConfig,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | None = None,
    ) -> None:
        """``model``: with the parameters to begin with, trained in place. ``optimizer``: of it; None: a new one."""
        self._job, self._rows, self.lesson = job, rows, lesson
        self._device = device or torch.device("cpu")
        self.model = model.to(self._device)
        self._optimizer = optimizer or job.optimizer(self.model.parameters())
        self._per_epoch = math.ceil(len(rows) / lesson.batch_size)
        self.done, self.batches = 0, self._per_epoch * lesson.local_epochs
        self._order: tuple[int, Indices] | None = None  # of the samples in the local epoch

    def step(self) -> float:
        """Train on the next batch; returns its loss.

        Raises:
            IndexError: the unit is done.
        """
        if self.done >= self.batches:
            raise IndexError("the unit is done")
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # the user's own random numbers stay as they are
            torch.manual_seed((self.lesson.seed * 1_000_003 + self.done) % (1 << 63))
            self.model.train()
            self._optimizer.zero_grad(set_to_none=True)
            loss = self._job.loss(self.model, self._rows.batch(self._indices(), self._device))
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        self.done += 1
        return float(loss.detach())

    def _indices(self) -> Indices:
        epoch, place = divmod(self.done, self._per_epoch)
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng((self.lesson.seed, epoch))
            self._order = epoch, rng.permutation(len(self._rows))
        size = self.lesson.batch_size
        return self._order[1][place * size : (place + 1) * size]

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs to go on from here."""
        return {
            "done": self.done,
            "seed": self.lesson.seed,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state of the same unit.

        Raises:
            ValueError: it is of another unit.
        """
        if state.get("seed") != self.lesson.seed or not 0 <= state.get("done", -1) <= self.batches:
            raise ValueError("this was saved in another unit")
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]


def unit_seed(seed: int, epoch: int, subset: int) -> int:
    """The seed of a unit: other for each, the same for its replicas and after a restart."""
    return int(np.random.SeedSequence((seed, epoch, subset)).generate_state(1, np.uint32)[0])


def measure(job: Job, model: nn.Module, rows: Rows, *, batch_size: int = 256) -> float:
    """Accuracy of ``model`` on ``rows``, between 0 and 1: mean over the samples."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    was_training, total = model.training, 0.0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(rows), batch_size):
            indices = np.arange(start, min(start + batch_size, len(rows)))
            total += float(job.accuracy(model, rows.batch(indices, device))) * len(indices)
    model.train(was_training)
    return total / len(rows)


def try_out(job: Job, rows: Rows) -> None:
    """Train a batch of ``rows`` and measure the accuracy, so that faults are found before volunteers find them.

    Raises:
        ValueError: the job's code fails; the text says where.
    """
    doing = "one batch could not be trained"
    try:
        UnitTraining(job, rows, UnitConfig(1, job.plan.batch_size, 0), model=job.first_model()).step()
        doing = "the accuracy could not be measured"
        accuracy = measure(job, job.first_model(), job.validation_rows().sample(job.plan.batch_size, seed=0))
    except Exception as error:  # whatever it is, with its traceback
        raise ValueError(f"{doing}: {traceback.format_exception_only(error)[-1].strip()}") from error
    if not 0 <= accuracy <= 1:
        raise ValueError(f"the accuracy is {accuracy:g}: it must be between 0 and 1")


class Evaluator:
    """Measures parameters on the job's validation data."""

    def __init__(self, job: Job) -> None:
        self._job, self._model, self.rows = job, job.first_model(), job.validation_rows()
        self.schema = Schema.of(self._model)

    def accuracy(self, values: Floats) -> float:
        """Of a model with these parameters (numel,)."""
        self.schema.load(self._model, values)
        return measure(self._job, self._model, self.rows)


@dataclass(frozen=True)
class SerialResult:
    """How serial training went: accuracy after each epoch, and the last parameters (numel,)."""

    accuracies: tuple[float, ...]
    parameters: Floats


def train_serially(job: Job, *, on_epoch: Callable[[int, float], None] | None = None) -> SerialResult:
    """Train ``job`` on all its data in one place, with one optimizer from beginning to end.

    An epoch of a plan with ``local_epochs`` goes through the data as often. The job's alpha and subsets play no part.

    Args:
        job: what to train.
        on_epoch: told each epoch, from 1, and its accuracy.
    """
    plan, model = job.plan, job.first_model()
    rows, validation = job.rows(), job.validation_rows()
    optimizer, accuracies = job.optimizer(model.parameters()), []
    for epoch in range(1, plan.max_epochs + 1):
        lesson = UnitConfig(plan.local_epochs, plan.batch_size, unit_seed(plan.seed, epoch, 0))
        training = UnitTraining(job, rows.cut(1, seed=plan.seed)[0], lesson, model=model, optimizer=optimizer)
        while training.done < training.batches:
            training.step()
        accuracies.append(measure(job, model, validation))
        if on_epoch is not None:
            on_epoch(epoch, accuracies[-1])
        if plan.target_accuracy is not None and accuracies[-1] >= plan.target_accuracy:
            break
    return SerialResult(tuple(accuracies), Schema.of(model).flatten(model))


def lay_out(job: Job, folder: Path) -> tuple[Subset, ...]:
    """Cut the data into subsets and write each to ``folder``; what else lies there goes.

    The same data make the same files, so that volunteers need not fetch them again after a restart.

    Raises:
        ValueError, TypeError: the data cannot be cut, or the job cannot learn from them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = job.rows()
    parts = rows.cut(job.plan.subsets_of(len(rows), rows.size_bytes), seed=job.plan.seed)
    subsets = []
    try_out(job, Rows.decode(parts[0].encode()))  # as volunteers get them
    for part in parts:
        data = part.encode()
        subsets.append(Subset(sha256(data).hexdigest(), len(data), len(part)))
        _write(folder / subsets[-1].sha256, data)
    for name in {file.name for file in folder.iterdir()} - {subset.sha256 for subset in subsets}:
        (folder / name).unlink()
    return tuple(subsets)


def _write(path: Path, data: bytes) -> None:
    half = path.with_suffix(".half")
    half.write_bytes(data)
    os.replace(half, path)  # whole or not at all, whatever a crash left there
