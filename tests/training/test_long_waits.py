"""A round that takes very long ruins no model: few local steps are taken meanwhile, and none counts twice."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import colab_swarm as cs
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.rounds import RoundOutcome
from colab_swarm.training.settings import RoundInput

STEPS = 10
ROUNDS = 24
LATE = 4
SIZE = 32
SPEED = 32.0


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples of two classes, a tenth of them with the wrong label."""
    chance = torch.Generator().manual_seed(0)
    x_BI = torch.randn(512, 8, generator=chance)
    y_B = (x_BI.sum(1) > 0) ^ (torch.rand(512, generator=chance) < 0.1)
    return x_BI, y_B.long()


X, Y = data()


def classifier() -> nn.Module:
    chance = torch.Generator().manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=chance))
    return net


def loss_of(net: nn.Module, seed: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, len(X), (SIZE,), generator=chance)
    return nn.functional.cross_entropy(net(X[rows]), Y[rows])


@torch.no_grad()
def loss_on_all(net: nn.Module) -> float:
    return nn.functional.cross_entropy(net(X), Y).item()


def in_one_process(steps: int) -> float:
    net = classifier()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
    return loss_on_all(net)


def trainer(
    rounds_late: int, peers: int, settings: dict[str, Any]
) -> Callable[[Swarm], tuple[int, int, float]]:
    """Return a loop that returns all local steps, the most between two rounds, and the highest loss at the end."""

    def train(swarm: Swarm) -> tuple[int, int, float]:
        net = classifier()
        adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
        optimizer = swarm.optimizer(
            adam, target_batch_size=SIZE, batch_size=SIZE, model=net, local_steps=STEPS, **settings
        )
        rounds = optimizer.collaboration.rounds
        contribute = rounds.contribute

        async def late(contribution: RoundInput) -> AsyncGenerator[RoundOutcome, None]:
            if rounds.progress.known.own.step == LATE:
                delays.append(rounds_late * STEPS * SIZE / (peers * SPEED))
                await asyncio.sleep(delays[-1])
            async for outcome in contribute(contribution):
                yield outcome

        rounds.contribute = late  # type: ignore[method-assign]
        delays: list[float] = []
        losses = []
        steps = [0]
        while (step := optimizer.global_step) < ROUNDS:
            loss_of(net, 1000 * len(swarm.name) + 7 * step + steps[-1]).backward()
            optimizer.step()
            if optimizer.global_step != step:
                losses.append(loss_on_all(net))
                steps.append(max(int(state["step"]) for state in adam.state.values()))
        assert delays
        most = max(after - before for before, after in pairwise(steps))
        return steps[-1], most, max(losses[-5:])

    return train


@pytest.mark.parametrize(
    ("rounds_late", "peers", "codec", "feedback", "overlap"),
    [
        (100, 1, "float32", False, True),
        (100, 1, "sparseloco", True, True),
        (30, 2, "int8", True, True),
    ],
)
def test_the_loss_stays_below_twice_that_of_one_process(
    rounds_late: int, peers: int, codec: str, feedback: bool, overlap: bool
) -> None:
    settings = {"compression": codec, "error_feedback": feedback, "overlap": overlap}
    with cs.simulate(peers, network="lan", seed=1, samples_per_s=SPEED) as sim:
        results = sim.run(trainer(rounds_late, peers, settings))
    for steps, most, loss in results.values():
        assert most <= 2 * STEPS + 1
        assert loss < 2 * in_one_process(steps)
