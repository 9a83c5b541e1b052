"""Uploads on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from colab_swarm.workunits.messages import Refused
from colab_swarm.workunits.web import UploadBuffer

ONE, OTHER = "0" * 32, "f" * 32


def test_pieces_that_follow_one_another_make_the_whole(tmp_path: Path) -> None:
    spool = UploadBuffer(tmp_path, size_bytes=6)
    assert spool.received(ONE) == 0
    assert (spool.add(ONE, 0, b"abc"), spool.add(ONE, 3, b"def")) == (3, 6)
    assert spool.read(ONE) == b"abcdef" and spool.received(OTHER) == 0


def test_a_piece_elsewhere_or_beyond_the_end_changes_nothing(tmp_path: Path) -> None:
    spool = UploadBuffer(tmp_path, size_bytes=6)
    spool.add(ONE, 0, b"abc")
    for start in (0, 2, 4):
        with pytest.raises(Refused) as caught:
            spool.add(ONE, start, b"x")
        assert caught.value.received == 3
    with pytest.raises(ValueError, match="a result has 6"):
        spool.add(ONE, 3, b"defg")
    assert spool.read(ONE) == b"abc"


def test_a_restart_keeps_partial_uploads_and_deletes_complete_ones(tmp_path: Path) -> None:
    spool = UploadBuffer(tmp_path, size_bytes=6)
    spool.add(ONE, 0, b"abcdef")
    spool.add(OTHER, 0, b"abc")
    again = UploadBuffer(tmp_path, size_bytes=6)
    assert (again.received(ONE), again.received(OTHER)) == (0, 3)


def test_uploads_that_are_not_awaited_are_deleted(tmp_path: Path) -> None:
    spool = UploadBuffer(tmp_path, size_bytes=6)
    spool.add(ONE, 0, b"abc")
    spool.add(OTHER, 0, b"abc")
    spool.sweep(lambda assignment: assignment == OTHER)
    assert [file.name for file in tmp_path.iterdir()] == [OTHER]


def test_an_upload_can_be_cut_and_dropped(tmp_path: Path) -> None:
    spool = UploadBuffer(tmp_path, size_bytes=6)
    spool.add(ONE, 0, b"abcdef")
    spool.cut(ONE, 2)
    assert spool.received(ONE) == 2
    spool.drop(ONE)
    spool.drop(ONE)
    spool.cut(ONE, 2)
    assert spool.received(ONE) == 0


@pytest.mark.parametrize(
    "name", ["", "../" + "0" * 29, "0" * 31, "0" * 33, "F" * 32, "0" * 31 + "/", "٠" * 32]
)
def test_no_text_but_an_assignment_becomes_a_path(tmp_path: Path, name: str) -> None:
    spool = UploadBuffer(tmp_path / "inner", size_bytes=6)
    for act in (spool.received, spool.read, spool.drop, lambda given: spool.add(given, 0, b"a")):
        with pytest.raises(ValueError, match="no assignment"):
            act(name)
    assert [*tmp_path.rglob("*")] == [tmp_path / "inner"]
