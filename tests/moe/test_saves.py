"""Saves on disk: complete, checked, bounded, and gone when nobody needs them."""

from pathlib import Path

import numpy as np
import pytest

from colab_swarm.errors import StateError
from colab_swarm.moe.saves import ReplicaStore, Save
from colab_swarm.tensors.chunks import Snapshot, digest_of

ALICE, BOB = b"a" * 32, b"b" * 32


def put(store: ReplicaStore, data: bytes, *, owner: bytes = BOB, step: int = 1, at: float = 0.0) -> Save:
    snapshot = Snapshot.of(b"ffn.0", step, np.frombuffer(data, np.uint8))
    save = Save(owner, snapshot.manifest, at)
    store.add(save, snapshot.blob)
    return save


def files(folder: Path) -> int:
    return len([*folder.rglob("*.*")])


def test_the_newest_two_saves_of_an_owner_are_kept_until_they_expire(tmp_path: Path) -> None:
    store = ReplicaStore(tmp_path, me=ALICE)
    first, second, third = (put(store, b"state", step=step, at=10.0 * step) for step in (1, 2, 3))
    mine = put(store, b"state", owner=ALICE, step=0)
    assert store.saves("ffn.0") == [third, second, mine] and not store.saves("ffn.1")
    digest = digest_of(b"state")
    assert store.read(third.manifest.root, digest) == b"state" and store.manifest(first.manifest.root) is None
    assert (
        store.read(first.manifest.root, digest) is None and store.read(third.manifest.root, b"other") is None
    )
    renewed = put(store, b"state", step=2, at=40.0)
    store.expire(40.0)
    assert store.saves() == [renewed] and files(tmp_path) == 2


def test_the_quota_bounds_saves_of_others_and_not_our_own(tmp_path: Path) -> None:
    store = ReplicaStore(tmp_path, me=ALICE, quota_bytes=20)
    put(store, b"15 bytes of his")
    put(store, b"15 bytes of his", at=1.0)
    assert [save.at for save in store.saves()] == [1.0], "renewed"
    with pytest.raises(StateError, match="5 bytes are left here, 6 are needed"):
        put(store, b"6 more")
    put(store, b"but my own are as long as I want", owner=ALICE)
    put(store, b"5 fit")
    assert len(store.saves()) == 3


def test_saves_outlive_the_process_and_what_it_left_half_written_does_not(tmp_path: Path) -> None:
    save = put(ReplicaStore(tmp_path, me=ALICE), b"state")
    (record,) = tmp_path.rglob("*.save")
    for name in ("half.safetensors.partial", "lost.safetensors", "garbled.save"):
        record.with_name(name).write_bytes(b"\xff" * 9)
    record.with_name("no state.save").write_bytes(record.read_bytes())
    assert ReplicaStore(tmp_path, me=ALICE).saves() == [save] and files(tmp_path) == 2
