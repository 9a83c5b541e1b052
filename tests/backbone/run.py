"""A backbone in a simulated run, with trainers of the toy model."""

from __future__ import annotations

import asyncio
from pathlib import Path

from colab_swarm.backbone.backbone import Backbone
from colab_swarm.backbone.config import CollaborationFile, Dashboard, RunFile
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import join_training, loss_of, model

PREFIX = "simulation-0/model"


def file(folder: Path, **settings: object) -> RunFile:
    """The contents of a ``run.toml``."""
    kept = CollaborationFile(**{"every_steps": 5, **settings})  # type: ignore[arg-type]
    return RunFile(
        name="simulation", folder=str(folder), dashboard=Dashboard(enabled=False), collaborations=(kept,)
    )


class Scene:
    """Alice is the backbone; the others train."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.file = file(folder, **settings)
        self.backbone: Backbone | None = None

    def keep(self, swarm: Swarm, seconds: float) -> Backbone:
        return swarm.runtime.call(self._keep(swarm, seconds))

    async def _keep(self, swarm: Swarm, seconds: float) -> Backbone:
        self.backbone = Backbone(swarm, self.file)
        await self.backbone.start()
        await asyncio.sleep(seconds)
        return self.backbone


def train(swarm: Swarm, steps: int) -> tuple[int, int, bytes]:
    """Train up to a global step; return its first step, its last step and the lineage."""
    net = model(seed=len(swarm.name))  # late joiners differ until they download the state
    optimizer = join_training(swarm, net)
    began_at = optimizer.global_step
    while optimizer.global_step < steps:
        loss = loss_of(net, optimizer.global_step, slice(0, 2))
        loss.backward()
        optimizer.step(samples=2, loss=loss.item())
    return began_at, optimizer.global_step, optimizer.lineage
