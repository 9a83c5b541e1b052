"""Chunks on disk: complete, checked, bounded, and deleted when unreferenced."""

from __future__ import annotations

from pathlib import Path

import pytest

from colab_swarm.errors import StateError
from colab_swarm.moe.saves import ReplicaStore, Save, digest_of

ALICE, BOB = b"a" * 32, b"b" * 32


def save_of(*chunks: bytes, owner: bytes = BOB, step: int = 1, at: float = 0.0) -> Save:
    return Save(owner, "ffn.0", step, tuple(map(digest_of, chunks)), sum(map(len, chunks)), at)


def put(shelf: ReplicaStore, *chunks: bytes, owner: bytes = BOB, step: int = 1, at: float = 0.0) -> Save:
    save = save_of(*chunks, owner=owner, step=step, at=at)
    with shelf.adding(save):
        for chunk in chunks:
            shelf.put(chunk)
    return save


def files(folder: Path) -> int:
    return sum(path.is_file() for path in (folder / "chunks").rglob("*"))


def test_a_chunk_is_read_unchanged(tmp_path: Path) -> None:
    store = ReplicaStore(tmp_path, me=ALICE)
    digest = store.put(b"weights")
    assert store.get(digest) == b"weights" and digest in store and store.get(digest_of(b"others")) is None


def test_a_damaged_chunk_is_detected_and_dropped(tmp_path: Path) -> None:
    store = ReplicaStore(tmp_path, me=ALICE)
    digest = store.put(b"weights")
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    path.write_bytes(b"wEights")
    assert store.get(digest) is None and digest not in store


def test_a_full_disk_is_an_error_and_leaves_no_partial_file(tmp_path: Path) -> None:
    (tmp_path / "chunks").write_text("a file where the folder should be: nothing can be written")
    with pytest.raises(StateError, match=r"cannot write .* name another folder"):
        ReplicaStore(tmp_path, me=ALICE).put(b"weights")
    assert not [*tmp_path.rglob("*.partial")]


def test_saves_share_chunks_and_unreferenced_chunks_are_deleted(tmp_path: Path) -> None:
    shelf = ReplicaStore(tmp_path, me=ALICE, quota_bytes=1000)
    first = put(shelf, b"manifest 1", b"same", b"old")
    second = put(shelf, b"manifest 2", b"same", b"new", step=2, at=1.0)
    assert files(tmp_path) == 5 and shelf.saves("ffn.0") == [second, first]
    shelf.settle(BOB, "ffn.0", second.manifest)
    assert files(tmp_path) == 3 and shelf.saves() == [second]


def test_an_owner_has_two_saves_of_an_expert_at_most(tmp_path: Path) -> None:
    shelf = ReplicaStore(tmp_path, me=ALICE, quota_bytes=1000)
    saves = [put(shelf, b"manifest %d" % step, step=step, at=float(step)) for step in range(4)]
    assert shelf.saves() == [saves[3], saves[2]] and files(tmp_path) == 2


def test_the_quota_bounds_saves_of_others_and_not_our_own(tmp_path: Path) -> None:
    shelf = ReplicaStore(tmp_path, me=ALICE, quota_bytes=20)
    put(shelf, b"15 bytes of his")
    with pytest.raises(StateError, match="5 bytes are left here, 6 are needed"):
        put(shelf, b"6 more")
    put(shelf, b"but my own are as long as I want", owner=ALICE)
    assert len(shelf.saves()) == 2 and shelf.kept_bytes == 15


def test_a_renewed_save_needs_no_more_space(tmp_path: Path) -> None:
    shelf = ReplicaStore(tmp_path, me=ALICE, quota_bytes=20)
    put(shelf, b"15 bytes of his")
    put(shelf, b"15 bytes of his", at=1.0)
    assert [save.at for save in shelf.saves()] == [1.0] and shelf.room_bytes == 5


def test_an_incomplete_save_leaves_no_files(tmp_path: Path) -> None:
    shelf = ReplicaStore(tmp_path, me=ALICE, quota_bytes=1000)
    with pytest.raises(RuntimeError), shelf.adding(save_of(b"manifest", b"chunk")):
        shelf.put(b"manifest")
        raise RuntimeError("the sender vanished")
    assert files(tmp_path) == 0 and shelf.room_bytes == 1000


def test_saves_outlive_the_process_and_partial_files_do_not(tmp_path: Path) -> None:
    save = put(ReplicaStore(tmp_path, me=ALICE, quota_bytes=1000), b"manifest", b"chunk")
    (tmp_path / "chunks" / "ab").mkdir(exist_ok=True)
    (tmp_path / "chunks" / "ab" / "half-written.partial").write_bytes(b"x")
    (tmp_path / "saves" / "garbled.save").write_bytes(b"\xff" * 9)
    again = ReplicaStore(tmp_path, me=ALICE, quota_bytes=1000)
    assert again.saves() == [save] and files(tmp_path) == 2
    assert not (tmp_path / "saves" / "garbled.save").exists()


def test_saves_that_are_not_renewed_expire(tmp_path: Path) -> None:
    shelf = ReplicaStore(tmp_path, me=ALICE, quota_bytes=1000)
    put(shelf, b"manifest", at=5.0)
    shelf.expire(5.0)
    assert len(shelf.saves()) == 1
    put(shelf, b"manifest", at=9.0)  # its owner wants it still
    shelf.expire(8.0)
    assert [save.at for save in shelf.saves()] == [9.0]
    shelf.expire(10.0)
    assert files(tmp_path) == 0 and not shelf.saves()
