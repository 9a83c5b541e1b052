"""Checkpoints made of snapshots: a trainer loads them, and late joiners download them."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from colab_swarm.backbone import keeper
from colab_swarm.backbone.keeper import Vault
from colab_swarm.errors import StateError
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.training import state as states
from colab_swarm.training.layerwise import Lamb
from colab_swarm.training.replica import Replica, UpdateRule
from colab_swarm.training.state import save_checkpoint
from tests.tensors.test_statedict import forged, same
from tests.training.toy import loss_of, mean_of, model


def replica(steps: int, seed: int = 0) -> Replica:
    net = model(seed)
    optimizer = Lamb(net.parameters(), lr=0.01)
    trained = Replica(UpdateRule(optimizer, torch.optim.lr_scheduler.LinearLR(optimizer), 1.0))
    for step in range(steps):
        loss_of(net, step).backward()
        gradient = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        trained.apply(mean_of(gradient.numpy().astype(np.float32)))
    return trained


def test_trainers_continue_from_the_saved_state_as_from_their_own_and_late_joiners_download_it(
    tmp_path: Path,
) -> None:
    trained, resumed, joiner = replica(3), replica(0, seed=1), replica(0, seed=2)
    vault = Vault(tmp_path / "kept")
    assert vault.save(trained.snapshot()) == vault.file_of(3)
    resumed.load(states.CheckpointFolder(tmp_path / "kept").latest())
    save_checkpoint(tmp_path / "own", trained.state())
    assert (tmp_path / "own").read_bytes() == vault.file_of(3).read_bytes()
    latest = Vault(tmp_path / "kept").latest()
    assert latest is not None and latest.manifest.step == 3
    joiner.load_snapshot(latest)
    assert same(joiner.state(), trained.state()) and same(resumed.state(), trained.state())
    assert joiner.lineage == trained.lineage


async def test_assistants_are_asked_only_if_no_trainer_gives_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, failing, snapshot = list[list[str]](), [["alice", "bob"]], replica(0).snapshot()

    async def download(peers: Any, prefix: str, donors: list[str]) -> Snapshot:
        asked.append(sorted(donors))
        if asked[-1] in failing:
            raise StateError("no donor")
        return snapshot

    monkeypatch.setattr(keeper, "download_state", download)
    carol: Any = object.__new__(keeper.Keeper)
    carol._services = SimpleNamespace(peers=SimpleNamespace(id="carol"), rng=random.Random(0))
    carol._prefix, carol.vault, carol.curve, carol._hub = "run", Vault(tmp_path), keeper.LossCurve(()), None
    carol.view = SimpleNamespace(assistants={"carol": None, "dave": None})
    for _ in range(2):
        await carol._save(SimpleNamespace(peers={"alice", "bob"}, step=0))
        failing.clear()
    assert asked == [["alice", "bob"], ["dave"], ["alice", "bob"]] and len(carol.vault.paths()) == 1


def test_the_newest_files_remain_are_listed_and_a_damaged_one_is_skipped(tmp_path: Path) -> None:
    vault, trained = Vault(tmp_path, keep=2), replica(0)
    for _ in range(4):
        vault.save(trained.snapshot())
        trained.apply(mean_of(np.ones(trained.numel, np.float32)))
    assert [path.name[-15:] for path in vault.paths()] == ["003.safetensors", "002.safetensors"]
    listed = [(one.step, one.size_bytes) for one in Vault(tmp_path, keep=2).checkpoints]
    assert listed == [(step, vault.file_of(step).stat().st_size) for step in (2, 3)]
    assert vault.checkpoints == Vault(tmp_path, keep=2).checkpoints
    newest = vault.file_of(3)
    newest.write_bytes(newest.read_bytes()[:-9])
    latest = vault.latest()
    assert latest is not None and latest.manifest.step == 2


def test_an_unsound_state_is_not_saved(tmp_path: Path) -> None:
    net = model()
    with torch.no_grad():
        next(iter(net.parameters()))[0, 0] = float("nan")
    ruined = Replica(UpdateRule(torch.optim.SGD(net.parameters(), lr=0.1))).snapshot()
    whole = replica(2).snapshot()
    subject = whole.manifest.subject
    for unsound, reason in (
        (ruined, "NaN"),
        (Snapshot.of(subject, 9, whole.blob), "not of the step that it claims"),
        (Snapshot.of(b"another", 2, whole.blob), "not of the step that it claims"),
        (Snapshot.of(subject, 2, forged(skeleton='{"tensor":"v"}')), "lacks a tensor"),
    ):
        with pytest.raises(StateError, match=reason):
            Vault(tmp_path / "kept").save(unsound)
    assert not (tmp_path / "kept").exists()
