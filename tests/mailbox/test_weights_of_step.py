"""Who joins or returns holds the weights of the step that it reports, before its first batch."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.state import CheckpointFolder
from tests.training.toy import join_training, model, parameters_of, take

LOCAL = {"local_steps": 2, "target_batch_size": 20}
AUTO: dict[str, Any] = {"communication": "auto", "target_batch_size": 20}
Weights = dict[int, torch.Tensor]
"""A peer's weights by step, as its round left them."""


def train_on(optimizer: SwarmOptimizer, net: torch.nn.Module, rounds: int, weights: Weights) -> None:
    while optimizer.global_step < rounds:
        if take(optimizer, net, optimizer.global_step) is not None:
            weights[optimizer.global_step] = parameters_of(net)


def holds_its_step(optimizer: SwarmOptimizer, net: torch.nn.Module, weights: Weights) -> bool:
    return torch.equal(parameters_of(net), weights[optimizer.global_step])


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["float32", "int8", "sparseloco"])
@pytest.mark.parametrize(
    "theirs", [AUTO, {**LOCAL, "overlap": True}, LOCAL], ids=["auto", "overlap", "plain"]
)
def test_a_late_joiner_of_a_folder_run(compression: str, theirs: dict[str, Any], tmp_path: Path) -> None:
    box = f"file://{tmp_path}/box"
    weights: Weights = {}
    options = dict(theirs)
    if options != AUTO:
        options["compression"] = compression
    with cs.create("late", mailbox=box) as alice:
        mine = join_training(alice, net := model(), **LOCAL, compression=compression)
        train_on(mine, net, 3, weights)
        with cs.join(str(alice.invite()), mailbox=box) as bob:
            optimizer = join_training(bob, other := model(seed=1), **options)
            assert optimizer.global_step == 3
            assert holds_its_step(optimizer, other, weights)


@pytest.mark.slow
@pytest.mark.parametrize("saved", [False, True], ids=["without a checkpoint", "with an old one"])
@pytest.mark.parametrize("settings", [AUTO, LOCAL], ids=["auto", "plain"])
def test_a_member_that_was_killed_and_returns_to_a_folder_run(
    settings: dict[str, Any], saved: bool, tmp_path: Path
) -> None:
    box = f"file://{tmp_path}/box"
    weights: Weights = {}
    with cs.create("killed", mailbox=box) as alice:
        mine = join_training(alice, net := model(), **LOCAL)
        train_on(mine, net, 2, weights)
        with cs.join(str(alice.invite()), mailbox=box, state_dir=tmp_path / "bob") as bob:
            optimizer = join_training(bob, other := model(seed=1), **settings)
            take(optimizer, other, 0)
            if saved:
                optimizer.save(CheckpointFolder(tmp_path / "bob/checkpoints/model"))
            # as a kill leaves it
            shutil.copytree(tmp_path / "bob", tmp_path / "killed", ignore=shutil.ignore_patterns("in-use*"))
        train_on(mine, net, 4, weights)
        with cs.resume(tmp_path / "killed") as bob:
            optimizer = join_training(bob, other := model(seed=2), **settings)
            assert optimizer.global_step == 4
            assert holds_its_step(optimizer, other, weights)
