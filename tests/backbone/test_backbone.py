"""A backbone in simulated runs: it saves the state, serves it when no trainer is left, and collects figures."""

import asyncio
import statistics
from pathlib import Path

import pytest

import colab_swarm as cs
from colab_swarm.backbone.backbone import Backbone
from colab_swarm.backbone.config import CollaborationFile, Dashboard, RunFile
from colab_swarm.backbone.keeper import RETRY_S, Vault, read_losses
from colab_swarm.errors import StateError
from colab_swarm.events import Fault
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.training.state import CheckpointFolder
from tests.training.toy import join_training, loss_of, model, parameters_of

pytestmark = pytest.mark.slow
PREFIX = "simulation-0/model"


class Scene:
    """A backbone with a folder, and trainers of the toy model that leave at a step."""

    backbone: Backbone

    def __init__(self, folder: Path, *, keep: int = 3) -> None:
        kept = CollaborationFile(every_steps=5, keep=keep)
        page = Dashboard(enabled=False)
        self.file = RunFile(name="simulation", folder=str(folder), dashboard=page, collaborations=(kept,))

    def run(self, sim: Simulation, seconds: float, **steps: int) -> dict[str, tuple[int, int, bytes]]:
        async def keep(swarm: Swarm) -> None:
            self.backbone = Backbone(swarm, self.file)
            await self.backbone.start()
            await asyncio.sleep(seconds)

        def live(swarm: Swarm) -> tuple[int, int, bytes] | None:
            if swarm.name in steps:
                return train(swarm, steps[swarm.name])
            return swarm.runtime.call(keep(swarm))

        return sim.run(live)  # type: ignore[return-value]


def train(swarm: Swarm, steps: int) -> tuple[int, int, bytes]:
    net = model(seed=len(swarm.name))  # late joiners differ until they download the state
    optimizer = join_training(swarm, net)
    began_at = optimizer.global_step
    while optimizer.global_step < steps:
        loss = loss_of(net, optimizer.global_step, slice(0, 2))
        loss.backward()
        optimizer.step(samples=2, loss=loss.item())
    return began_at, optimizer.global_step, optimizer.lineage


def test_checkpoints_are_saved_while_others_train_and_a_trainer_continues_from_them(tmp_path: Path) -> None:
    scene = Scene(tmp_path, keep=2)
    with cs.simulate(1, seed=1) as sim:
        sim.join("bob")
        sim.join("carol")
        scene.run(sim, 60, bob=24, carol=24)
    keeper = scene.backbone.keepers[PREFIX]
    assert keeper.standing_in is None  # their optimizers are still there
    steps = [kept.step for kept in keeper.vault.checkpoints]
    assert len(steps) == 2 and steps[0] >= 10 and steps[1] - steps[0] >= 5

    def resume(swarm: Swarm) -> tuple[int, int]:
        optimizer = join_training(swarm, net := model(), target_batch_size=2)
        optimizer.load(CheckpointFolder(tmp_path / "model"))
        began_at = optimizer.global_step
        while optimizer.global_step < began_at + 2:
            loss_of(net, 0, slice(0, 2)).backward()
            optimizer.step(samples=2)
        assert parameters_of(net).isfinite().all()
        return began_at, optimizer.global_step

    with cs.simulate(1, seed=2) as sim:
        assert sim.run(resume)["alice"] == (steps[-1], steps[-1] + 2)


def test_a_save_that_fails_is_told_and_tried_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(vault: Vault, snapshot: Snapshot) -> Path:
        if next(full, False):
            raise StateError("the disk is full")
        return write(vault, snapshot)

    full = iter([True, True])
    write = Vault.save
    monkeypatch.setattr(Vault, "save", save)
    scene = Scene(tmp_path)
    with cs.simulate(1, seed=1) as sim:
        sim.join("bob")
        scene.run(sim, 120, bob=60)
        first, second = (event.at for event in sim.swarms["alice"].events.recent(Fault))
    assert RETRY_S <= second - first < 2 * RETRY_S
    assert scene.backbone.keepers[PREFIX].vault.checkpoints


@pytest.mark.parametrize("listen", [True, False])
def test_a_run_outlives_all_its_trainers(tmp_path: Path, listen: bool) -> None:
    scene = Scene(tmp_path)
    with cs.simulate(1, seed=3) as sim:
        sim.join("bob", listen=listen)
        sim.network.at(40.0).crash("bob")
        sim.join("carol", at=60.0, listen=listen)
        sim.join("dave", at=61.0, listen=listen)
        results = scene.run(sim, 200, bob=10_000, carol=60, dave=60)
        assert [fault.name for fault in sim.network.fired] == ["crash"]
    assert results["carol"][0] >= 5  # from the backbone's checkpoint, not from step 0
    assert results["carol"][1:] == results["dave"][1:]


def test_losses_and_peers_are_collected_and_the_curve_outlives_a_restart(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    # A step takes ten seconds, longer than from one record to the next.
    with cs.simulate(1, seed=5, samples_per_s=0.5) as sim:
        sim.join("bob", listen=False)
        sim.join("carol", listen=False)
        scene.run(sim, 300, bob=20, carol=20)
        (shown,) = scene.backbone.snapshots()
    points = scene.backbone.keepers[PREFIX].curve.points
    assert len(points) >= 5 and statistics.median(point.peers for point in points) == 2
    assert shown.loss_history == tuple((point.step, point.loss) for point in points)
    assert {peer.name for peer in shown.peers} >= {"bob", "carol"} and shown.step == 20
    again = read_losses(tmp_path / "model" / "losses.jsonl")
    assert [point.step for point in again] == [point.step for point in points]
