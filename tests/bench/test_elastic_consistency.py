from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from colab_swarm.bench.elastic_consistency import (
    BETAS,
    CODECS,
    ConsistencyTask,
    Scene,
    compressions,
    emulate,
    plot,
    ratios,
)
from colab_swarm.bench.harness import BenchReport
from colab_swarm.elastic.schedulers import BoundedStaleness


@pytest.mark.slow
def test_a_group_on_a_slow_network_learns_digits() -> None:
    task = ConsistencyTask(seed=0)
    run = emulate(task, Scene((), lambda: BoundedStaleness(2), steps=30, alpha=0.5), seed=0)
    assert all(np.mean(member.found) > 0.1 for member in run.members), "hardly anything was late"
    assert task.accuracy(run.members[0].parameters) > task.accuracy(task.start) + 30


def test_the_model_can_be_a_residual_network() -> None:
    task = ConsistencyTask(seed=1, model="resnet")
    assert sum(task.sizes) == len(task.start) == len(task.gradient(0, 0, task.start))


@pytest.mark.slow
@pytest.mark.ordeal
def test_every_measured_distance_is_within_its_bound() -> None:
    report = BenchReport("elastic", True)
    ratios(report, steps=10, peers=3)
    found = report.figures
    assert len([key for key in found if key.startswith("bound_ratio_")]) == 6 * len(CODECS) - 1
    assert 0.2 < found["max_bound_ratio"] <= 1
    assert found["max_bound_ratio_found_gamma"] <= 1


@pytest.mark.slow
@pytest.mark.ordeal
def test_topk_loses_accuracy_without_error_feedback() -> None:
    report = BenchReport("elastic", True)
    compressions(report, seeds=1)
    found = report.figures
    assert found["topk_feedback_drop"] < 1 < found["topk_alone_drop"]


def test_accuracy_is_drawn_over_beta(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = BenchReport("elastic", True)
    for name in [*(f"beta_{beta:g}" for beta in BETAS), "variance"]:
        report.add(f"accuracy_mlp_{name}", 90.0)
        report.add(f"distance_mlp_{name}", 0.1)
    plot(report, str(tmp_path / "beta.png"))
    assert (tmp_path / "beta.png").read_bytes().startswith(b"\x89PNG")
