"""A small model whose gradient depends on the global step and on which of the batch's rows a peer takes."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from blake3 import blake3

import colab_swarm as cs
from colab_swarm.averaging.result import RoundResult
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.vector import HostVector
from colab_swarm.training.layerwise import Lamb
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.records import Mean

T = TypeVar("T")
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
    chosen = {"target_batch_size": BATCH, **exchanged(settings)}
    return swarm.optimizer(Lamb(net.parameters(), lr=0.01), **chosen)


def exchanged(settings: dict[str, Any]) -> dict[str, Any]:
    """Options of `Swarm.optimizer`, where those of `cs.Communication` stand beside the others."""
    parts = {field.name for field in fields(cs.Communication)}
    communication = {name: value for name, value in settings.items() if name in parts}
    others = {name: value for name, value in settings.items() if name not in parts}
    if communication:
        others["communication"] = cs.Communication(**communication)
    return others


def wait_for_peers(swarm: Swarm, optimizer: SwarmOptimizer, count: int) -> None:
    """Until this peer has seen the records of ``count`` peers, itself included."""
    while len(optimizer.rounds.view.all) < count:
        swarm.runtime.call(optimizer.rounds.refresh())


def take(
    optimizer: SwarmOptimizer, net: torch.nn.Module, step: int, rows: slice = slice(0, BATCH)
) -> RoundResult | None:
    """A micro-batch of these rows of a step's batch."""
    loss_of(net, step, rows).backward()
    return optimizer.step(samples=rows.stop - rows.start)


def train_to(
    step: int, optimizer: SwarmOptimizer, net: torch.nn.Module, rows: slice = slice(0, BATCH)
) -> None:
    """Take these rows of each step's batch until that step, as often as it takes."""
    while optimizer.global_step < step:
        take(optimizer, net, optimizer.global_step, rows)


def mean_of(values: Any, loss: float | None = None) -> Mean:
    return Mean(HostVector(values), blake3(values.tobytes()).digest(), loss=loss)


def alone(train: Callable[[Swarm], T]) -> T:
    """What a simulated peer without others gets."""
    with cs.simulate(1) as sim:
        return sim.run(train)["alice"]


def train_rows(optimizer: SwarmOptimizer, net: torch.nn.Module, rows: slice, steps: int) -> None:
    """Take these rows of each step's batch, once, and wait for the others, until ``steps``."""
    while (step := optimizer.global_step) < steps:
        loss = loss_of(net, step, rows)
        loss.backward()
        optimizer.step(samples=rows.stop - rows.start, loss=loss.item())
        if optimizer.global_step == step:
            optimizer.wait_step()


def train_own_rows(
    swarm: Swarm, steps: int, meet: Callable[[], object] = lambda: None
) -> tuple[torch.Tensor, bytes]:
    """Each peer takes its own rows of each step's batch; begins when all are there."""
    # all rows are needed, however busy the machine
    optimizer = join_training(swarm, net := model(), min_peers=len(ROWS))
    wait_for_peers(swarm, optimizer, len(ROWS))
    meet()
    train_rows(optimizer, net, ROWS[swarm.name], steps)
    return parameters_of(net), optimizer.lineage


def train_freely(swarm: Swarm, steps: int, samples: int = 2, **settings: Any) -> tuple[torch.Tensor, bytes]:
    """Micro-batches at one's own pace, as volunteers do."""
    optimizer = join_training(swarm, net := model(), **settings)
    while optimizer.global_step < steps:
        loss = loss_of(net, optimizer.global_step, slice(0, samples))
        loss.backward()
        optimizer.step(samples=samples, loss=loss.item())
    return parameters_of(net), optimizer.lineage


def lineages(results: Mapping[str, tuple[torch.Tensor, bytes] | None]) -> set[bytes]:
    """Of all peers that trained."""
    return {result[1] for result in results.values() if result is not None}


def run_ranks(
    module: str,
    scenario: str,
    folder: Path,
    meanwhile: Callable[[Callable[[], bool]], None] = lambda alive: None,
) -> list[int]:
    """Exit statuses of two ranks, in order; ``meanwhile`` can ask whether they still run."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, scenario, str(rank), str(folder)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        meanwhile(lambda: all(rank.poll() is None for rank in ranks))
        return [rank.wait(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
