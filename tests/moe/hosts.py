"""Simulated peers that host small experts, for these tests."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from colab_swarm.moe.blocks import FeedForward
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import ExpertRule
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.host import ExpertHost, HostResources
from colab_swarm.runtime import on_loop
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm

GRID = Grid("ffn", (2, 3))
RULE = ExpertRule(lambda parameters: torch.optim.Adam(parameters, lr=0.1))
SAVE_S = 30.0


def make() -> FeedForward:
    return FeedForward(4, 8)


def peer(sim: Simulation, name: str) -> Swarm:
    """Return this peer, which joins if it is not there."""
    if name not in sim.swarms:
        sim.join(name)
    return sim.swarms[name]


def host(
    sim: Simulation,
    name: str,
    count: int | list[str] = 1,
    *,
    maker: Callable[[], torch.nn.Module] = make,
    **settings: Any,
) -> ExpertHost:
    """Let a peer host experts, and take over at most ``spare`` more."""
    usual = {"grid": GRID.sides, "rule": RULE, "save_s": SAVE_S, "takeover_s": 10.0, "spare": 0}
    return peer(sim, name).experts.host("ffn", maker, count=count, **{**usual, **settings})


def resources_of(swarm: Swarm, folder: Path) -> HostResources:
    """What this peer's hosts would share, for a peer that hosts nothing."""
    directory = swarm.runtime.call(on_loop(partial(Directory, swarm.services)))
    return swarm.runtime.call(on_loop(partial(HostResources, swarm.services, directory, folder)))


def train(hosting: ExpertHost, steps: int = 1) -> None:
    for expert in hosting.experts.values():
        for _ in range(steps):
            expert.backward(torch.rand(2, 4), torch.rand(2, 4))
