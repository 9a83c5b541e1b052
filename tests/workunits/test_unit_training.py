"""One unit's training: repeatable, and resumed where it was saved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from colab_swarm.workunits.job import Job, UnitTraining, unit_seed
from colab_swarm.workunits.weights import Schema
from tests.workunits.digits import digits_job


def training(job: Job, seed: int = 7) -> UnitTraining:
    return UnitTraining(job, job.rows(), local_epochs=2, batch_size=32, seed=seed, model=job.first_model())


def test_replicas_of_a_unit_agree_bit_for_bit_and_leave_the_users_random_numbers_alone() -> None:
    job = digits_job()
    before = torch.random.get_rng_state()
    results = []
    for _ in range(2):
        one = training(job)
        while one.done < one.batches:
            one.step()
        results.append(Schema.of(one.model).flatten(one.model))
    assert one.batches == 16
    np.testing.assert_array_equal(*results)
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(IndexError, match="done"):
        one.step()


def test_a_unit_saved_between_two_batches_ends_as_if_it_had_not_stopped() -> None:
    job = digits_job()
    whole, first, second = (training(job) for _ in range(3))
    for _ in range(16):
        whole.step()
    for _ in range(11):
        first.step()
    second.load_state_dict(first.state_dict())
    assert second.done == 11
    for _ in range(5):
        second.step()
    schema = Schema.of(whole.model)
    np.testing.assert_array_equal(schema.flatten(whole.model), schema.flatten(second.model))


def test_the_save_of_another_unit_is_refused() -> None:
    job = digits_job()
    with pytest.raises(ValueError, match="another unit"):
        training(job).load_state_dict(training(job, seed=8).state_dict())


def test_one_subset_and_alpha_0_is_serial_training_bit_for_bit() -> None:
    job = digits_job(max_epochs=3)
    serial = job.train_serially()
    model = job.first_model()
    schema = Schema.of(model)
    values = schema.flatten(model)
    for epoch in (1, 2, 3):
        schema.load(model, values)
        rows = job.rows().cut(1, seed=job.plan.seed)[0]
        seed = unit_seed(job.plan.seed, epoch, 0)
        unit = UnitTraining(job, rows, local_epochs=1, batch_size=32, seed=seed, model=model)
        while unit.done < unit.batches:
            unit.step()
        values = schema.flatten(model)
    np.testing.assert_array_equal(values, serial.parameters)
    assert len(serial.accuracies) == 3
    assert serial.accuracies[-1] > serial.accuracies[0]
