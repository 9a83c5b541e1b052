"""A backbone in simulated runs: it saves the state, serves it when no trainer is left, and collects figures."""

import statistics
from pathlib import Path

import pytest

import colab_swarm as cs
from colab_swarm.backbone.keeper import read_losses
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.state import CheckpointFolder
from tests.backbone.run import Scene
from tests.training.toy import join_training, loss_of, model, parameters_of

pytestmark = pytest.mark.slow


def test_checkpoints_are_saved_while_others_train_and_a_trainer_continues_from_them(tmp_path: Path) -> None:
    scene = Scene(tmp_path, keep=2)
    with cs.simulate(1, seed=1) as sim:
        sim.join("bob")
        sim.join("carol")
        scene.run(sim, 60, bob=24, carol=24)
    assert scene.keeper.standing_in is None  # their optimizers are still there
    steps = [kept.step for kept in scene.keeper.vault.checkpoints]
    assert len(steps) == 2 and steps[0] >= 10 and steps[1] - steps[0] >= 5
    with cs.simulate(1, seed=2) as sim:
        resumed = sim.run(lambda swarm: resume(swarm, tmp_path / "model"))
    assert resumed["alice"] == (steps[-1], steps[-1] + 2)


def resume(swarm: Swarm, folder: Path) -> tuple[int, int]:
    optimizer = join_training(swarm, net := model(), target_batch_size=2)
    optimizer.load(CheckpointFolder(folder))
    began_at = optimizer.global_step
    while optimizer.global_step < began_at + 2:
        loss_of(net, 0, slice(0, 2)).backward()
        optimizer.step(samples=2)
    assert parameters_of(net).isfinite().all()
    return began_at, optimizer.global_step


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
        (shown,) = scene.backbone.snapshots()  # type: ignore[union-attr]
    points = scene.keeper.curve.points
    assert len(points) >= 5 and statistics.median(point.peers for point in points) == 2
    assert shown.loss_history == tuple((point.step, point.loss) for point in points)
    assert {peer.name for peer in shown.peers} >= {"bob", "carol"} and shown.step == 20
    again = read_losses(tmp_path / "model" / "losses.jsonl")
    assert [point.step for point in again] == [point.step for point in points]
