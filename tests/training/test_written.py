"""What a user writes to the model's weights beside `step()`: loaded weights count, in every mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import colab_swarm as cs
from colab_swarm.events import Notice
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.optimizer import SwarmOptimizer
from tests.training import toy

MODES = [
    {},
    {"overlap": True},
    {"local_steps": 2},
    {"local_steps": 2, "overlap": True},
    {"local_steps": 2, "compression": "sparseloco"},
]
STEPS = 8
SMALL_LR = 1e-4


def notices(swarm: Swarm) -> list[str]:
    return [event.text for event in swarm.events.recent(Notice) if isinstance(event, Notice)]


def begin(swarm: Swarm, net: nn.Module, **options: Any) -> SwarmOptimizer:
    inner = torch.optim.SGD(net.parameters(), lr=SMALL_LR)
    return swarm.optimizer(inner, target_batch_size=2 * toy.BATCH, model=net, **toy.exchanged(options))


def distance(weights: torch.Tensor, net: nn.Module) -> float:
    return float((weights - toy.parameters_of(net)).abs().max())


@pytest.mark.parametrize(
    ("options", "after"), [*((mode, 4) for mode in MODES), ({}, 0), ({"local_steps": 2}, 0)], ids=str
)
def test_weights_that_all_peers_load_are_trained_on(options: dict[str, Any], after: int) -> None:
    def train(swarm: Swarm) -> torch.Tensor:
        net = toy.model()
        optimizer = begin(swarm, net, **options)
        loaded = False
        while optimizer.global_step < STEPS:
            if optimizer.global_step == after and not loaded:
                net.load_state_dict(toy.model(7).state_dict())
                loaded = True
            toy.take(optimizer, net, optimizer.global_step)
        return toy.parameters_of(net)

    with cs.simulate(2, seed=2) as simulation:
        weights = simulation.run(train)
    assert distance(toy.parameters_of(toy.model()), toy.model(7)) > 0.5
    for one in weights.values():
        assert distance(one, toy.model(7)) < 0.01


def perturb_and_restore(net: nn.Module) -> None:
    """As SAM does around its second pass."""
    with torch.no_grad():
        noise = [0.2 * torch.ones_like(parameter) for parameter in net.parameters()]
        for parameter, change in zip(net.parameters(), noise, strict=True):
            parameter.add_(change)
        for parameter, change in zip(net.parameters(), noise, strict=True):
            parameter.sub_(change)


def swap_and_swap_back(net: nn.Module) -> None:
    """As averaged weights are, to evaluate."""
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(toy.model(7).state_dict())
    net.load_state_dict(kept)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        *((mode, perturb_and_restore) for mode in MODES),
        ({}, swap_and_swap_back),
        ({"overlap": True}, swap_and_swap_back),
    ],
)
def test_what_is_put_back_changes_nothing_and_is_not_told(
    options: dict[str, Any], change: Callable[[nn.Module], None]
) -> None:
    def train(swarm: Swarm, *, disturbs: bool) -> torch.Tensor:
        net = toy.model()
        optimizer = begin(swarm, net, **options)
        while optimizer.global_step < STEPS:
            if disturbs:
                change(net)
            toy.take(optimizer, net, optimizer.global_step)
        assert not notices(swarm)
        return toy.parameters_of(net)

    quiet = toy.alone(lambda swarm: train(swarm, disturbs=False))
    disturbed = toy.alone(lambda swarm: train(swarm, disturbs=True))
    torch.testing.assert_close(disturbed, quiet, atol=1e-5, rtol=0.0)


def clip(net: nn.Module) -> None:
    """As the critic of a WGAN is."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.clamp_(-0.25, 0.25)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"local_steps": 2}], ids=str)
def test_weight_clipping_works_or_is_told(options: dict[str, Any]) -> None:
    def train(swarm: Swarm) -> tuple[torch.Tensor, list[str]]:
        net = toy.model()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = swarm.optimizer(inner, target_batch_size=toy.BATCH, model=net, **toy.exchanged(options))
        while optimizer.global_step < STEPS:
            toy.take(optimizer, net, optimizer.global_step)
            clip(net)
        return toy.parameters_of(net), notices(swarm)

    weights, told = toy.alone(train)
    assert float(weights.abs().max()) <= 0.25
    lasts = [text for text in told if "until the next step of the swarm only" in text]
    assert len(lasts) == options.get("overlap", False)


@pytest.mark.parametrize("options", [{}, {"local_steps": 2, "overlap": True}], ids=str)
def test_a_step_of_the_wrapped_optimizer_raises_until_the_peer_has_left(options: dict[str, Any]) -> None:
    with cs.simulate(1, seed=2) as simulation:
        (swarm,) = simulation.swarms.values()
        inner = torch.optim.SGD((net := toy.model()).parameters(), lr=SMALL_LR)
        optimizer = swarm.optimizer(
            inner, target_batch_size=2 * toy.BATCH, model=net, **toy.exchanged(options)
        )
        toy.take(optimizer, net, 0)
        before = toy.parameters_of(net)
        toy.loss_of(net, 1).backward()
        with pytest.raises(RuntimeError, match=r"SGD\.step\(\) would change this peer's model alone"):
            inner.step()
        assert torch.equal(before, toy.parameters_of(net))
        optimizer.close()
        inner.step()
