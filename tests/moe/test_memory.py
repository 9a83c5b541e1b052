"""How many experts fit: the arithmetic, and measurements of real modules."""

from __future__ import annotations

import torch
from torch import nn

from colab_swarm.moe.expert import MOST, ExpertModel, ExpertRule, free_bytes, measure

MODEL = ExpertModel(module=10_000_000, optimizer=20_000_000, gradients=10_000_000, sample=10_000)


def test_memory_of_one_batch_is_subtracted_and_the_rest_divided() -> None:
    # 0.8 * 1 GB - (10 MB + 30 MB + 1000 * 10 kB) = 750 MB: 25 experts of 30 MB
    assert MODEL.experts_that_fit(1_000_000_000, max_batch_size=1000)[0] == 25


def test_a_larger_batch_leaves_room_for_fewer() -> None:
    assert MODEL.experts_that_fit(1_000_000_000, max_batch_size=31_000)[0] == 15


def test_a_host_takes_no_more_experts_than_it_can_serve() -> None:
    assert ExpertModel(0, 0, 0, 0).experts_that_fit(1 << 40, max_batch_size=1)[0] == MOST


def test_no_expert_fits_if_a_batch_does_not() -> None:
    assert MODEL.experts_that_fit(50_000_000, max_batch_size=1000)[0] == 0


def test_the_arithmetic_is_one_sentence() -> None:
    assert MODEL.experts_that_fit(2_000_000_000, max_batch_size=1000)[1] == (
        "80% of 2.0 GB free, less 50.0 MB to compute a batch of 1,000, divided by 30.0 MB an expert "
        "(weights 10.0 MB, optimizer 20.0 MB)"
    )


def test_adam_takes_two_more_values_for_each_weight() -> None:
    model = measure(lambda: nn.Linear(64, 64), ExpertRule(torch.optim.Adam), (64,))
    weights = 4 * (64 * 64 + 64)
    assert model.module == model.gradients == weights
    assert 2 * weights <= model.optimizer <= 2 * weights + 16
    assert model.state["step"] == 1 and model.state_bytes >= 3 * weights


def test_the_backward_pass_keeps_what_layers_of_it_keep() -> None:
    sgd = ExpertRule(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    shallow, deep = (
        measure(lambda n=n: nn.Sequential(*(nn.Linear(32, 32) for _ in range(n))), sgd, (32,)).sample
        for n in (1, 9)
    )
    assert deep - shallow == 8 * 32 * 4  # each layer keeps its input


def test_this_machine_reports_its_free_memory() -> None:
    assert 1 << 20 < free_bytes() < 1 << 50
