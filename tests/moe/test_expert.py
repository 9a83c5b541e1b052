"""One expert by itself: what changes it, and what must not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colab_swarm.errors import StateError
from colab_swarm.moe.expert import Expert, ExpertRule, FeedForward
from colab_swarm.tensors.statedict import flatten, unflatten

ADAM = ExpertRule(
    partial(torch.optim.Adam, lr=0.01),
    scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
    max_grad_norm=0.5,
)


def expert(
    module: nn.Module | None = None, rule: ExpertRule = ADAM, sample: tuple[int, ...] = (4,)
) -> Expert:
    torch.manual_seed(0)
    return Expert("ffn.0", module or FeedForward(4, 8), rule, sample)


def batch(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (5, 4), generator=torch.Generator().manual_seed(seed))


def values(one: Expert) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in one.state_dict()["module"].items()}


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def test_backward_steps_as_a_training_loop_would() -> None:
    ours = expert()
    torch.manual_seed(0)
    module = FeedForward(4, 8)
    assert ADAM.scheduler
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    scheduler = ADAM.scheduler(optimizer)
    for step in range(5):
        inputs, grads = batch(step), batch(100 + step)
        leaf = inputs.clone().requires_grad_()
        module(leaf).backward(grads)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        got = ours.backward(inputs, grads)
        assert leaf.grad is not None and torch.equal(got, leaf.grad)
    assert ours.step == 5 and equal(values(ours), dict(module.state_dict()))


def test_forward_changes_nothing_not_even_batch_statistics() -> None:
    one = expert(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    before = values(one)
    one.forward(batch(0))
    assert equal(values(one), before) and one.step == 0
    one.backward(batch(0), batch(1))
    assert values(one)["1.num_batches_tracked"] == 1, "one backward is one batch"
    assert not torch.equal(values(one)["1.running_mean"], before["1.running_mean"])


@pytest.mark.parametrize(("inputs", "grads"), [(1e30, 1.0), (1.0, 3e38)])
def test_gradients_that_overflow_leave_the_expert_as_it_was(inputs: float, grads: float) -> None:
    one = expert(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
    before = values(one)
    with pytest.raises(FloatingPointError, match=r"ffn\.0: .* not finite"):
        one.backward(inputs * batch(0), grads * batch(1).sign())
    assert equal(values(one), before) and one.step == 0
    one.backward(batch(0), batch(1))
    assert one.step == 1 and all(value.isfinite().all() for value in values(one).values())


def test_an_expert_without_weights_passes_gradients_on() -> None:
    one = expert(nn.Identity())
    assert torch.equal(one.forward(batch(0)), batch(0))
    assert torch.equal(one.backward(batch(0), batch(1)), batch(1)) and one.step == 1


def test_an_expert_continues_from_another_experts_state() -> None:
    one, other = expert(), expert(FeedForward(4, 8))
    for step in range(3):
        one.backward(batch(step), batch(100 + step))
    tensors, skeleton = flatten(one.state_dict())
    saved = unflatten({name: tensor.clone() for name, tensor in tensors.items()}, skeleton)
    other.load_state_dict(saved)
    assert other.step == 3
    for one_or_other in (one, other):
        one_or_other.backward(batch(9), batch(109))
    assert equal(values(one), values(other))


@pytest.mark.parametrize("spoil", [lambda s: s.pop("step"), lambda s: s["module"].pop("layers.0.weight")])
def test_a_state_of_another_kind_is_refused(spoil: Any) -> None:
    one = expert()
    state = one.state_dict()
    spoil(state)
    with pytest.raises(StateError, match=r"does not fit Expert\(ffn.0"):
        one.load_state_dict(state)


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.expand_as(x)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (nn.Linear(4, 3), "became torch.float32 of shape \\(2, 3\\)"),
        (nn.Linear(5, 5), "failed on a batch of shape \\[2, 4\\]"),
        (nn.Linear(4, 4).double(), "failed on a batch"),
        (Pair(), "became tuple"),
        (Detached(), "failed on a batch"),
        (Constant(), "do not depend on its inputs"),
    ],
)
def test_a_module_that_cannot_be_an_expert_is_refused_at_once(module: nn.Module, why: str) -> None:
    with pytest.raises(ValueError, match=f"ffn.0.*{why}"):
        expert(module)
