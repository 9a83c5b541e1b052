"""Which vectors a trainer's gradients are in, and that none is lost or changed while others may read it."""

import math

import numpy as np
import pytest
import torch

from colab_swarm.tensors.vector import HostVector
from colab_swarm.training.gradients import Gradients, MeanLoss
from colab_swarm.training.replica import Replica, UpdateRule
from colab_swarm.training.settings import RoundInput


class Trainer:
    """Accumulates gradients of two values; the averager holds the vectors ``held``."""

    def __init__(self, *, delayed: bool = False, local: bool = False) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.held: list[HostVector] = []
        sgd = torch.optim.SGD([self.weight], lr=1.0)
        rule = UpdateRule(sgd, delayed=delayed, local=local)
        self.gradients = Gradients(Replica(rule), self.holds)

    def holds(self, vector: HostVector) -> bool:
        return any(vector is one for one in self.held)

    def add(self, *values: float, weight: float = 1.0) -> None:
        self.weight.grad = torch.tensor(values)
        self.gradients.add(weight, weight, None)
        assert not self.gradients.dropped

    def give(self) -> RoundInput:
        given = self.gradients.contribution()
        assert not self.holds(given.vector)
        return given


def test_two_vectors_are_enough_for_rounds_that_a_trainer_waits_for() -> None:
    trainer, used = Trainer(), set()
    for step in range(6):
        trainer.add(1.0, step)
        trainer.add(3.0, step)
        given = trainer.give()
        assert given.vector.values.tolist() == [2.0, step]
        trainer.held = [given.vector]  # as the round before has ended
        trainer.gradients.on_delivered(given)
        trainer.gradients.forget()
        used.add(id(given.vector))
    assert len(used) == 2


def test_a_delayed_update_takes_a_third_vector_which_no_sum_is_in() -> None:
    trainer, used = Trainer(delayed=True), set()
    trainer.add(0.0, 1.0)
    for step in range(1, 7):
        given = trainer.give()
        trainer.gradients.forget()  # the round forms, and its vector is not held yet
        trainer.add(step, 1.0)
        assert given.vector.values.tolist() == [step - 1, 1.0]
        trainer.held = [given.vector]
        trainer.gradients.on_delivered(given)
        used.add(id(given.vector))
    assert len(used) <= 3


@pytest.mark.parametrize("read", [False, True])
def test_a_contribution_without_a_round_counts_with_what_is_added_then_and_stays_while_it_is_read(
    read: bool,
) -> None:
    trainer = Trainer()
    trainer.add(1.0, 2.0, weight=3.0)
    trainer.give()
    again = trainer.give()
    assert (again.weight, again.vector.values.tolist()) == (3.0, [1.0, 2.0])
    if read:
        trainer.held = [again.vector]  # an interrupt ended the round
    trainer.add(5.0, 2.0)
    assert trainer.give().vector.values.tolist() == [2.0, 2.0]
    assert not read or again.vector.values.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("begun", [False, True])
def test_a_delayed_contribution_is_added_to_the_sum_that_has_begun_or_becomes_it(begun: bool) -> None:
    trainer = Trainer(delayed=True)
    trainer.add(1.0, 2.0, weight=3.0)
    trainer.gradients.loss.add(4.0, 3.0)
    given = trainer.give()
    assert given.loss == 4.0
    trainer.gradients.forget()
    if begun:
        trainer.add(9.0, 2.0)
        trainer.gradients.loss.add(1.0, 1.0)
    trainer.gradients.on_returned(given)
    again = trainer.give()
    assert (again.weight, again.loss) == ((4.0, 3.25) if begun else (3.0, 4.0))
    assert again.vector.values.tolist() == [3.0 if begun else 1.0, 2.0]


def test_a_delayed_contribution_of_local_steps_brings_its_loss_back() -> None:
    trainer = Trainer(delayed=True, local=True)
    trainer.add(1.0, 2.0, weight=3.0)
    trainer.gradients.loss.add(4.0, 3.0)
    given = trainer.give()
    trainer.gradients.forget()
    trainer.gradients.on_returned(given)
    assert trainer.give().loss == 4.0


@pytest.mark.parametrize("losses", [[math.nan], [math.inf, -math.inf], [3e38, 3e38], []], ids=str)
def test_a_mean_loss_is_finite_or_none(losses: list[float]) -> None:
    mean = MeanLoss()
    for loss in losses:
        mean.add(loss, 2.0)
    assert mean.value is None


def test_after_local_steps_a_contribution_without_a_round_is_computed_again() -> None:
    trainer = Trainer(local=True)
    trainer.add(1.0, 2.0)
    for _ in range(2):
        assert trainer.give().vector.values.tolist() == [1.0, 2.0]
    trainer.add(1.0, 0.0)
    assert trainer.give().vector.values.tolist() == [2.0, 2.0] and trainer.gradients.weight == 2.0


def test_large_gradients_count_though_their_squares_overflow() -> None:
    trainer = Trainer()
    trainer.add(1e30, 1.0)
    assert trainer.give().vector.values.tolist() == [np.float32(1e30), 1.0]
