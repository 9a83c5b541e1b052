from __future__ import annotations

import copy
from typing import cast

import pytest
import torch

from colab_swarm.moe.layer import Usage, balance_loss
from colab_swarm.net.peers import Peers
from tests.moe.local import calls_of


def test_the_loss_is_the_squared_coefficient_of_variation() -> None:
    importance = torch.tensor([3.0, 1.0, 2.0])
    everyone = torch.tensor([3.0, 1.0, 2.0, 0.0, 0.0])
    expected = everyone.var(correction=0) / everyone.mean() ** 2
    assert torch.allclose(balance_loss(importance, 2), expected)


def test_equal_importance_or_no_expert_costs_nothing() -> None:
    assert balance_loss(torch.full((4,), 2.5), 0) == 0
    assert balance_loss(torch.zeros(0), 3) == 0


def test_minimizing_the_loss_balances_the_importance() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0], requires_grad=True)
    for _ in range(200):
        (grad,) = torch.autograd.grad(balance_loss(logits.softmax(0), 0), logits)
        logits = (logits - 0.2 * grad).detach().requires_grad_()
    assert torch.allclose(logits.softmax(0), torch.full((3,), 1 / 3), atol=0.02)


def test_shares_follow_the_work_and_sum_to_one() -> None:
    usage = Usage()
    for _ in range(300):
        usage.on_batch({"a": 3.0, "b": 1.0})
    assert usage.shares == pytest.approx({"a": 0.75, "b": 0.25})
    assert usage.on_batch({"c": 1.0}) == 2  # a and b were idle
    assert usage.on_batch({}) == 3
    assert sum(usage.shares.values()) == pytest.approx(1)


def test_an_expert_unused_for_a_thousand_batches_is_forgotten() -> None:
    usage = Usage()
    usage.on_batch({"gone": 1.0})
    for _ in range(1000):
        usage.on_batch({"a": 1.0})
    assert list(usage.shares) == ["a"]


def test_copies_count_together() -> None:
    usage = Usage()
    copy.deepcopy(usage).count(batches=2, lost_gradients=1)
    usage.count(batches=1)
    counted = usage.statistics(calls_of(cast(Peers, None)))
    assert counted.batches == 3 and counted.lost_gradients == 1
