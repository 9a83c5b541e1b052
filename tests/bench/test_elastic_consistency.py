import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from colab_swarm.bench import elastic_consistency as elastic
from colab_swarm.bench.elastic_consistency import ADDRESSES, ConsistencyTask, Scene, add_speed, emulate
from colab_swarm.bench.harness import BenchReport, Crew
from colab_swarm.bench.moe import ConvergenceEmulation, ConvergenceScene
from colab_swarm.bench.vc_asgd import _job
from colab_swarm.elastic.schedulers import BoundedStaleness
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
    assert emulation._trunk.stem.in_features == 72 and len(run_virtual(emulation.run())) == 1


@pytest.mark.slow
@pytest.mark.ordeal
def test_every_measured_distance_is_within_its_bound() -> None:
    report = BenchReport("elastic", True)
    elastic.ratios(report, steps=10, peers=3)
    found = report.figures
    assert len([key for key in found if key.startswith("bound_ratio_")]) == 6 * len(elastic.CODECS) - 1
    assert 0.2 < found["max_bound_ratio"] <= 1


@pytest.mark.slow
@pytest.mark.ordeal
def test_topk_loses_accuracy_without_error_feedback() -> None:
    report = BenchReport("elastic", True)
    elastic.compressions(report, seeds=1)
    assert report.figures["topk_feedback_drop"] < 1 < report.figures["topk_alone_drop"]


needs_root = pytest.mark.skipif(elastic.missing() is not None, reason=str(elastic.missing()))
LISTEN = "import socket; s = socket.create_server(('{}', 7)); print(flush=True); input()"
DIAL = """
import socket, time
began = time.monotonic()
socket.create_connection(('{}', 7), 10)
print(time.monotonic() - began)
"""


@needs_root
@pytest.mark.slow
def test_a_round_trip_over_a_slow_link_takes_twice_its_delay() -> None:
    with elastic.slow_link(delay_s=0.1, jitter_s=0.01) as command, Crew() as crew:
        crew.start(command(0, sys.executable, "-c", LISTEN.format(ADDRESSES[0])))
        assert crew[0].process.stdout is not None and crew[0].process.stdout.readline()
        words = map(str, command(1, sys.executable, "-c", DIAL.format(ADDRESSES[0])))
        client = subprocess.run(list(words), capture_output=True, text=True, check=True)
    assert 0.18 <= float(client.stdout) < 1.0


@needs_root
@pytest.mark.slow
@pytest.mark.ordeal
def test_steps_of_every_scheduler_and_of_ddp_are_timed() -> None:
    report = BenchReport("elastic", True)
    add_speed(report, seeds=1, steps=35)
    found = report.figures
    assert all(found[f"step_ms_{way}"] > 0 for way in ("ddp", *elastic.WAYS))
    assert found["step_ms_synchronous"] > 1e3 * elastic.DELAY_S
    assert found.keys() >= {"step_time_vs_synchronous", "synchronous_vs_ddp", "speed_accuracy_drop"}


def test_without_root_a_row_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "missing", lambda: "needs Linux and root")
    report = BenchReport("elastic", True)
    add_speed(report, seeds=1, steps=35)
    assert [row.key for row in report.rows] == ["elastic.speed_measured"]
    assert "needs Linux and root" in report.rows[0].note
