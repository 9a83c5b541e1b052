"""Progress in a kept peer's folder: new steps only, nothing of a branch that was left, and no end to training."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from colab_swarm.errors import StateError
from colab_swarm.events import Fault
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.replica import UpdateRule
from colab_swarm.training.saving import SAVE_S
from colab_swarm.training.settings import TrainingSettings
from colab_swarm.training.state import CheckpointFolder
from tests.training.toy import alone


def kept_in(swarm: Swarm, folder: Path, net: torch.nn.Module | None = None) -> SwarmOptimizer:
    settings = TrainingSettings(f"{swarm.run_id}/model", 10.0)
    rule = UpdateRule(torch.optim.SGD((net or torch.nn.Linear(3, 1)).parameters(), lr=0.1))
    kept = CheckpointFolder(folder, keep=2)
    return SwarmOptimizer(swarm.runtime, swarm.services, settings, rule, swarm.name, kept)


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.stem.partition("-")[2]) for path in CheckpointFolder(folder).paths())


def test_only_new_steps_are_written_and_the_last_two_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    write = CheckpointFolder.write

    def counted(folder: CheckpointFolder, step: int, parts: Sequence[memoryview]) -> Path:
        saved.append(step)
        return write(folder, step, parts)

    def train(swarm: Swarm) -> None:
        optimizer = kept_in(swarm, tmp_path / "kept", net := torch.nn.Linear(3, 1))

        def wait_for_saving() -> None:
            swarm.runtime.call(asyncio.sleep(SAVE_S + 1))

        def train_on() -> None:
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step(samples=10)
            wait_for_saving()

        train_on()
        wait_for_saving()
        optimizer.save(tmp_path / "first")
        train_on()
        train_on()
        assert steps_in(tmp_path / "kept") == [2, 3] and saved == [1, 2, 3]
        optimizer.load(tmp_path / "first")
        wait_for_saving()
        assert steps_in(tmp_path / "kept") == [1]  # the others were of a branch that the swarm left

    monkeypatch.setattr(CheckpointFolder, "write", counted)
    alone(train)


def test_a_full_disk_is_reported_and_saving_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StateError("no room")

    def save(swarm: Swarm) -> None:
        kept_in(swarm, tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(CheckpointFolder, "write", full)
            swarm.runtime.call(asyncio.sleep(SAVE_S + 1))
        [fault] = swarm.events.recent(Fault)
        assert (fault.where, fault.text) == ("saving progress", "no room") and not steps_in(tmp_path)
        swarm.runtime.call(asyncio.sleep(SAVE_S + 1))

    alone(save)
    assert steps_in(tmp_path) == [0]


def test_saved_progress_is_loaded_unless_it_is_of_another_model(tmp_path: Path) -> None:
    net, other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

    def resume(swarm: Swarm) -> None:
        first = kept_in(swarm, tmp_path, net)
        net(torch.ones(1, 3)).sum().backward()
        first.step(samples=10)
        first.close()
        assert kept_in(swarm, tmp_path, other).global_step == 1
        torch.testing.assert_close(other.weight, net.weight)
        with pytest.raises(StateError, match=f"another model.*{tmp_path}"):
            kept_in(swarm, tmp_path, torch.nn.Linear(5, 1))

    alone(resume)
