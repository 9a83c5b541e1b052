"""A small model whose gradient depends on the global step and on which of the batch's rows a peer takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.layerwise import Lamb
from colab_swarm.training.optimizer import SwarmOptimizer

ROWS = {"alice": slice(0, 1), "bob": slice(1, 3), "carol": slice(3, 6), "dave": slice(6, 10)}
BATCH = 10


def model(seed: int = 0) -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    generator = torch.Generator().manual_seed(seed)  # peers are threads here: they share the global one
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return net


def loss_of(net: torch.nn.Module, step: int, rows: slice = slice(0, BATCH)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    x_BI = torch.randn(BATCH, 8, generator=generator)[rows]
    y_BO = torch.randn(BATCH, 2, generator=generator)[rows]
    return ((net(x_BI) - y_BO) ** 2).mean()


def parameters_of(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def joint_reference(steps: int) -> torch.Tensor:
    """What one process with the joined batch gets."""
    net = model()
    optimizer = Lamb(net.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
    return parameters_of(net)


def join_training(swarm: Swarm, net: torch.nn.Module, **settings: Any) -> SwarmOptimizer:
    chosen = {"target_batch_size": BATCH, "matchmaking_timeout_s": 2.0, **settings}
    return swarm.optimizer(Lamb(net.parameters(), lr=0.01), **chosen)


def wait_for_peers(swarm: Swarm, optimizer: SwarmOptimizer, count: int) -> None:
    """Until this peer has seen the records of ``count`` peers, itself included."""
    while len(optimizer.collaboration.progress.records) < count:
        swarm.runtime.call(optimizer.collaboration.refresh())


def train_own_rows(
    swarm: Swarm, steps: int, meet: Callable[[], object] = lambda: None
) -> tuple[torch.Tensor, bytes]:
    """Each peer takes its own rows of each step's batch, once, and waits for the others; begins when all are there."""
    net = model()
    optimizer = join_training(
        swarm, net, matchmaking_timeout_s=20.0
    )  # all rows are needed, however busy the machine
    wait_for_peers(swarm, optimizer, len(ROWS))
    meet()
    rows = ROWS[swarm.name]
    while optimizer.global_step < steps:
        step = optimizer.global_step
        loss = loss_of(net, step, rows)
        loss.backward()
        optimizer.step(samples=rows.stop - rows.start, loss=loss.item())
        if optimizer.global_step == step:
            optimizer.wait_step()
    return parameters_of(net), optimizer.lineage


def train_freely(swarm: Swarm, steps: int, samples: int = 2, **settings: Any) -> tuple[torch.Tensor, bytes]:
    """Micro-batches at one's own pace, as volunteers do."""
    net = model()
    optimizer = join_training(swarm, net, **settings)
    while optimizer.global_step < steps:
        loss = loss_of(net, optimizer.global_step, slice(0, samples))
        loss.backward()
        optimizer.step(samples=samples, loss=loss.item())
    return parameters_of(net), optimizer.lineage
