"""Progress in a kept peer's folder: new steps only, nothing of a branch that was left, and no end to training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from colab_swarm.errors import StateError
from colab_swarm.events import EventLog, Fault
from colab_swarm.training.optimizer import ProgressSaver
from colab_swarm.training.replica import Gradients, Replica, UpdateRule
from colab_swarm.training.state import CheckpointFolder


class Optimizer:
    """As much of one as is kept."""

    def __init__(self, *, full_disk: bool = False) -> None:
        self.global_step, self.saves, self.full_disk = 0, 0, full_disk

    def save(self, target: CheckpointFolder) -> None:
        if self.full_disk:
            raise StateError("no room")
        self.saves += 1
        target.save(self.global_step, {"step": self.global_step})


def kept_in(folder: Path, events: EventLog | None = None) -> ProgressSaver:
    return ProgressSaver(CheckpointFolder(folder, keep=2), events or EventLog(), lambda: 7.0)


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.stem.partition("-")[2]) for path in folder.iterdir())


def test_only_new_steps_are_written_and_the_last_two_stay(tmp_path: Path) -> None:
    kept, optimizer = kept_in(tmp_path), Optimizer()
    for step in (1, 1, 2, 3):
        optimizer.global_step = step
        kept.save(optimizer)
    assert optimizer.saves == 3 and steps_in(tmp_path) == [2, 3]


def test_steps_of_a_branch_that_the_swarm_left_are_deleted(tmp_path: Path) -> None:
    kept, optimizer = kept_in(tmp_path), Optimizer()
    for step in (8, 9, 5):
        optimizer.global_step = step
        kept.save(optimizer)
    assert steps_in(tmp_path) == [5]


def test_a_full_disk_is_reported_and_saving_is_tried_again(tmp_path: Path) -> None:
    events, optimizer = EventLog(), Optimizer(full_disk=True)
    kept = kept_in(tmp_path, events)
    kept.save(optimizer)
    assert events.recent() == [Fault(7.0, "saving progress", "no room")]
    optimizer.full_disk = False
    kept.save(optimizer)
    assert steps_in(tmp_path) == [0]


def sgd_over(net: torch.nn.Module) -> tuple[Replica, Gradients]:
    replica = Replica(UpdateRule(torch.optim.SGD(net.parameters(), lr=0.1)))
    return replica, Gradients(replica)


def test_saved_progress_is_loaded_unless_it_is_of_another_model(tmp_path: Path) -> None:
    kept = kept_in(tmp_path)
    replica, gathered = sgd_over(net := torch.nn.Linear(3, 1))
    assert not kept.load_into(replica, gathered)
    state: dict[str, Any] = {**replica.state(), "step": 4}
    CheckpointFolder(tmp_path).save(4, state)
    replica, gathered = sgd_over(other := torch.nn.Linear(3, 1))
    assert kept.load_into(replica, gathered) and replica.step == 4
    torch.testing.assert_close(other.weight, net.weight)
    with pytest.raises(StateError, match=f"another model.*{tmp_path}"):
        kept.load_into(*sgd_over(torch.nn.Linear(5, 1)))
