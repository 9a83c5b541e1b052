"""A backbone in a simulated run, with trainers of the toy model."""

import asyncio
from pathlib import Path

from colab_swarm.backbone.backbone import Backbone
from colab_swarm.backbone.config import CollaborationFile, Dashboard, RunFile
from colab_swarm.backbone.keeper import Keeper
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import join_training, loss_of, model

PREFIX = "simulation-0/model"


def file(folder: Path, **settings: object) -> RunFile:
    kept = CollaborationFile(**{"every_steps": 5, **settings})  # type: ignore[arg-type]
    page = Dashboard(enabled=False)
    return RunFile(name="simulation", folder=str(folder), dashboard=page, collaborations=(kept,))


class Scene:
    def __init__(self, folder: Path, **settings: object) -> None:
        self.file = file(folder, **settings)
        self.backbone: Backbone | None = None

    @property
    def keeper(self) -> Keeper:
        assert self.backbone is not None
        return self.backbone.keepers[PREFIX]

    def run(self, sim: Simulation, seconds: float, **steps: int) -> dict[str, tuple[int, int, bytes]]:
        async def keep(swarm: Swarm) -> None:
            self.backbone = Backbone(swarm, self.file)
            await self.backbone.start()
            await asyncio.sleep(seconds)

        return sim.run(
            lambda swarm: (
                train(swarm, steps[swarm.name]) if swarm.name in steps else swarm.runtime.call(keep(swarm))
            )
        )


def train(swarm: Swarm, steps: int) -> tuple[int, int, bytes]:
    net = model(seed=len(swarm.name))  # late joiners differ until they download the state
    optimizer = join_training(swarm, net)
    began_at = optimizer.global_step
    while optimizer.global_step < steps:
        loss = loss_of(net, optimizer.global_step, slice(0, 2))
        loss.backward()
        optimizer.step(samples=2, loss=loss.item())
    return began_at, optimizer.global_step, optimizer.lineage
