from pathlib import Path

import numpy as np
import pytest
import torch

from colab_swarm.elastic.schedulers import BoundedStaleness
from colab_swarm.experiments import elastic_consistency as elastic
from colab_swarm.experiments.elastic_consistency import ConsistencyTask, Scene, emulate
from colab_swarm.experiments.learning_at_home import ConvergenceEmulation, ConvergenceScene
from colab_swarm.experiments.report import Report
from colab_swarm.experiments.vc_asgd import _job
from colab_swarm.sim import run_virtual


@pytest.mark.slow
def test_a_group_on_a_slow_network_learns_digits() -> None:
    task = ConsistencyTask(seed=0)
    run = emulate(task, Scene((), lambda: BoundedStaleness(2), steps=30, alpha=0.5), seed=0)
    assert all(np.mean(member.found) > 0.1 for member in run.members), "hardly anything was late"
    assert task.accuracy(run.members[0].parameters) > task.accuracy(task.start) + 30


def test_the_model_can_be_a_residual_network() -> None:
    task = ConsistencyTask(seed=1, model="resnet")
    assert sum(task.sizes) == len(task.start) == len(task.gradient(0, 0, task.start))


def test_images_come_from_a_file_of_yours(tmp_path: Path) -> None:
    rng, file = np.random.default_rng(0), tmp_path / "images.npz"
    images, labels = rng.integers(0, 256, (500, 6, 4, 3), np.uint8), np.arange(500) % 10
    np.savez(file, x_train=images, y_train=labels, x_test=images, y_test=labels)
    task = ConsistencyTask(0, "resnet", str(file))
    assert sum(task.sizes) == len(task.gradient(0, 0, task.start))
    assert _job(str(file), 0, 0.95, quick=True).first_model()(torch.zeros(2, 3, 6, 4)).shape == (2, 10)
    emulation = ConvergenceEmulation(ConvergenceScene((), 2, 0.1, 0.1, 6, 1, data=str(file)), 0)
    assert len(run_virtual(emulation.run())) == 1


@pytest.mark.slow
@pytest.mark.ordeal
def test_every_measured_distance_is_within_its_bound() -> None:
    report = Report("elastic", True)
    elastic.ratios(report, steps=10, peers=3)
    found = report.figures
    assert (
        len([key for key in found if key.startswith("bound_ratio_")])
        == len(elastic.SCHEDULERS) * len(elastic.CODECS) - 1
    )
    assert 0.2 < found["max_bound_ratio"] <= 1


@pytest.mark.slow
@pytest.mark.ordeal
def test_topk_loses_accuracy_without_error_feedback() -> None:
    report = Report("elastic", True)
    elastic.compressions(report, "digits", seeds=1)
    assert report.figures["topk_feedback_drop"] < 1 < report.figures["topk_alone_drop"]
