"""The same job on one machine, without units: the baseline that volunteers are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from colab_swarm.workunits.job import Job
from colab_swarm.workunits.unit_training import Lesson, UnitTraining, measure, unit_seed
from colab_swarm.workunits.weights import Floats, Schema


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
        lesson = Lesson(plan.local_epochs, plan.batch_size, unit_seed(plan.seed, epoch, 0))
        training = UnitTraining(job, rows.cut(1, seed=plan.seed)[0], lesson, model=model, optimizer=optimizer)
        while training.done < training.batches:
            training.step()
        accuracies.append(measure(job, model, validation))
        if on_epoch is not None:
            on_epoch(epoch, accuracies[-1])
        if plan.target_accuracy is not None and accuracies[-1] >= plan.target_accuracy:
            break
    return SerialResult(tuple(accuracies), Schema.of(model).flatten(model))
