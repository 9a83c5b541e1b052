"""The number of experts that a peer hosts, and requests that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colab_swarm.moe.expert import ExpertRule, FeedForward, TransformerBlock
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.host import plan_host
from tests.moe.hosts import GRID, make


def test_experts_that_ship_know_their_samples_and_others_need_sample() -> None:
    assert plan_host(GRID, lambda: FeedForward(8)).sample == (8,)
    assert plan_host(GRID, lambda: TransformerBlock(8, 2)).sample == (-1, 8)
    with pytest.raises(ValueError, match=r"unknown samples of Linear\. Say sample=\(512,\)"):
        plan_host(GRID, lambda: nn.Linear(4, 4))


def test_the_count_follows_from_memory_and_leaves_room_for_experts_of_dead_hosts() -> None:
    plan = plan_host(Grid("ffn", (4, 4)), make)
    assert (plan.count, plan.capacity) == (12, 16)
    assert plan.arithmetic.startswith(
        "hosting 12 experts, and up to 16 when other hosts die; 16 of ffn[4 x 4] fit"
    )
    plan = plan_host(Grid("ffn", (4, 4)), make, count=3)
    assert (plan.count, plan.capacity) == (3, 7)
    plan = plan_host(GRID, make, count=["ffn.0.1", "ffn.1.1"])
    assert (plan.count, plan.capacity, plan.uids) == (2, 2, ("ffn.0.1", "ffn.1.1"))


@pytest.mark.parametrize("wrong", [{"count": 0}, {"count": ["ffn.9.9"]}, {"sample": (5,)}])
def test_impossible_hosts_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        plan_host(GRID, make, **wrong)


def test_an_optimizer_whose_state_cannot_be_saved_is_refused_at_once() -> None:
    class Odd(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"state": object()}

    with pytest.raises(TypeError, match="cannot be saved without pickle"):
        plan_host(GRID, make, rule=ExpertRule(lambda parameters: Odd(parameters, lr=0.1)))


@pytest.mark.parametrize("wrong", [{"copies": -1}, {"copies": 99}, {"spare": -1}, {"save_s": 0.0}])
def test_invalid_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        plan_host(GRID, make, **wrong)


def test_none_fits_is_an_error_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.moe.host.free_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"0 of ffn\[2 x 3\] fit: 80% of .* give count=1 to try"):
        plan_host(GRID, make)
    assert plan_host(GRID, make, count=1).count == 1
