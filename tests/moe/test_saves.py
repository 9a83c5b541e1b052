"""Chunks on disk: complete, checked, bounded, and deleted when unreferenced."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import StateError
from colab_swarm.moe.blocks import FeedForward
from colab_swarm.moe.expert import Expert, ExpertRule, check_fit
from colab_swarm.moe.saves import ReplicaStore, Save
from colab_swarm.tensors.chunks import Manifest, Snapshot, digest_of
from colab_swarm.tensors.statedict import pack, unpack

ALICE, BOB = b"a" * 32, b"b" * 32


def save_of(*chunks: bytes, owner: bytes = BOB, step: int = 1, at: float = 0.0) -> Save:
    return Save(owner, "ffn.0", step, tuple(map(digest_of, chunks)), sum(map(len, chunks)), at)


def put(shelf: ReplicaStore, *chunks: bytes, owner: bytes = BOB, step: int = 1, at: float = 0.0) -> Save:
    save = save_of(*chunks, owner=owner, step=step, at=at)
    with shelf.adding(save):
        for chunk in chunks:
            shelf.put(chunk)
    return save


@pytest.fixture
def shelf(tmp_path: Path) -> ReplicaStore:
    return ReplicaStore(tmp_path, me=ALICE, quota_bytes=1000)


def files(folder: Path) -> int:
    return sum(path.is_file() for path in (folder / "chunks").rglob("*"))


def test_a_full_disk_is_an_error_and_leaves_no_partial_file(tmp_path: Path) -> None:
    (tmp_path / "chunks").write_text("a file where the folder should be: nothing can be written")
    with pytest.raises(StateError, match=r"cannot write .* name another folder"):
        ReplicaStore(tmp_path, me=ALICE).put(b"weights")
    assert not [*tmp_path.rglob("*.partial")]


def test_saves_share_chunks_and_unreferenced_chunks_are_deleted(shelf: ReplicaStore, tmp_path: Path) -> None:
    first = put(shelf, b"manifest 1", b"same", b"old")
    second = put(shelf, b"manifest 2", b"same", b"new", step=2, at=1.0)
    assert files(tmp_path) == 5 and shelf.saves("ffn.0") == [second, first]
    third = put(shelf, b"manifest 3", b"same", step=3, at=2.0)
    assert files(tmp_path) == 4 and shelf.saves() == [third, second]


def test_the_quota_bounds_saves_of_others_and_not_our_own(tmp_path: Path) -> None:
    shelf = ReplicaStore(tmp_path, me=ALICE, quota_bytes=20)
    put(shelf, b"15 bytes of his")
    put(shelf, b"15 bytes of his", at=1.0)
    assert [save.at for save in shelf.saves()] == [1.0] and shelf.room_bytes == 5, "renewed"
    with pytest.raises(StateError, match="5 bytes are left here, 6 are needed"):
        put(shelf, b"6 more")
    put(shelf, b"but my own are as long as I want", owner=ALICE)
    put(shelf, b"5 fit")
    assert len(shelf.saves()) == 3 and shelf.room_bytes == 0


def test_an_incomplete_save_leaves_no_files(shelf: ReplicaStore, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), shelf.adding(save_of(b"manifest", b"chunk")):
        shelf.put(b"manifest")
        assert shelf.room_bytes == 1000 - len(b"manifest" + b"chunk")
        raise RuntimeError("the sender vanished")
    assert files(tmp_path) == 0 and shelf.room_bytes == 1000


def test_saves_outlive_the_process_and_partial_files_do_not(tmp_path: Path) -> None:
    save = put(ReplicaStore(tmp_path, me=ALICE), b"manifest", b"chunk")
    (tmp_path / "chunks" / "ab").mkdir(exist_ok=True)
    (tmp_path / "chunks" / "ab" / "half-written.partial").write_bytes(b"x")
    (tmp_path / "saves" / "garbled.save").write_bytes(b"\xff" * 9)
    assert ReplicaStore(tmp_path, me=ALICE).saves() == [save] and files(tmp_path) == 2
    assert not (tmp_path / "saves" / "garbled.save").exists()


def test_saves_that_are_not_renewed_expire(shelf: ReplicaStore, tmp_path: Path) -> None:
    put(shelf, b"manifest", at=5.0)
    shelf.expire(5.0)
    assert len(shelf.saves()) == 1
    put(shelf, b"manifest", at=9.0)  # its owner wants it still
    shelf.expire(8.0)
    assert [save.at for save in shelf.saves()] == [9.0]
    shelf.expire(10.0)
    assert files(tmp_path) == 0 and not shelf.saves()


RULE = ExpertRule(
    lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
)


def expert(*, steps: int = 0, dim: int = 8, hidden: int = 16) -> Expert:
    made = Expert("ffn.0", FeedForward(dim, hidden), RULE, (dim,))
    for _ in range(steps):
        made.backward(torch.rand(4, dim), torch.rand(4, dim))
    return made


def saved(state: Any, step: int = 3) -> Snapshot:
    return Snapshot.of(b"ffn.0", step, pack(state))


def loaded(saved: Snapshot) -> Any:
    return unpack(saved.blob)


def test_an_expert_continues_from_its_save_with_equal_results() -> None:
    old = expert(steps=3)
    new = expert()
    new.load_state_dict(loaded(saved(old.state_dict())))
    inputs, grads = torch.rand(4, 8), torch.rand(4, 8)
    assert torch.equal(old.backward(inputs, grads), new.backward(inputs, grads))
    assert torch.equal(old.forward(inputs), new.forward(inputs)) and new.step == 4


def test_a_frozen_state_does_not_change_while_the_expert_learns() -> None:
    learning = expert(steps=1)
    before = saved(learning.state_dict())
    learning.backward(torch.rand(4, 8), torch.rand(4, 8))
    assert digest_of(before.head) == before.root != saved(learning.state_dict()).root
    assert before.manifest == saved(loaded(before)).manifest


@given(st.binary(max_size=200))
def test_a_garbled_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(StateError, match="cannot be read"):
        Manifest.decode(data)


def test_a_manifest_in_another_spelling_is_refused() -> None:
    head = saved({"step": 1}).head
    assert Manifest.decode(head)
    with pytest.raises(StateError, match="not encoded as we do"):
        Manifest.decode(b"\xdc\x00" + bytes([head[0] & 15]) + head[1:])  # a longer form of the array's length


def test_a_state_of_other_shapes_or_with_more_in_it_does_not_fit() -> None:
    model = expert(steps=1).state_dict()
    for equal in (expert(), expert(steps=2)):  # before and after the first step
        check_fit(equal.state_dict(), model)
    with pytest.raises(StateError, match=r"does not fit this expert at '/module/layers.0.weight'"):
        check_fit(expert(hidden=17).state_dict(), model)
    twisted = expert(steps=1).state_dict()
    twisted["optimizer"]["state"][0]["exp_avg"] = torch.zeros(1 << 20)
    with pytest.raises(StateError, match="/optimizer/state/0/exp_avg"):
        check_fit(twisted, model)
    for wrong in (model | {"more": 1}, None):
        with pytest.raises(StateError):
            check_fit(wrong, model)
