"""Data on a volunteer's disk."""

from __future__ import annotations

import logging
import os
from hashlib import sha256
from pathlib import Path

import pytest

from colab_swarm.workunits import client as module
from colab_swarm.workunits.client import SubsetCache


def put(cache: SubsetCache, folder: Path, data: bytes, *, used_at: float) -> str:
    digest = sha256(data).hexdigest()
    cache.put(digest, data)
    os.utime(folder / f"{digest}.subset", (used_at, used_at))
    return digest


def test_a_saved_file_is_there_for_the_next_process(tmp_path: Path) -> None:
    digest = put(SubsetCache(tmp_path, 1000), tmp_path, b"alice", used_at=1)
    assert SubsetCache(tmp_path, 1000).get(digest) == b"alice"
    assert SubsetCache(tmp_path, 1000).held() == (digest,)


def test_nothing_is_there_before_the_folder_is(tmp_path: Path) -> None:
    cache = SubsetCache(tmp_path / "none", 1000)
    assert cache.get("0" * 64) is None and cache.held() == ()


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    cache = SubsetCache(tmp_path, 100)
    old, used, new = (put(cache, tmp_path, bytes([n]) * 40, used_at=n) for n in (1, 2, 3))
    assert cache.held() == (new, used)
    assert cache.get(old) is None
    assert cache.get(used) is not None
    assert cache.held() == (used, new)
    last = put(cache, tmp_path, b"x" * 50, used_at=2e9)
    assert set(cache.held()) == {used, last}


def test_a_file_that_a_killed_process_left_half_written_is_evicted_first(tmp_path: Path) -> None:
    half = tmp_path / "abc.partial"
    half.write_bytes(bytes(90))
    os.utime(half, (1, 1))
    cache = SubsetCache(tmp_path, 100)
    digest = put(cache, tmp_path, bytes(50), used_at=2)
    assert not half.exists() and cache.held() == (digest,)


def test_a_file_beyond_the_bound_is_not_saved_and_evicts_nothing(tmp_path: Path) -> None:
    cache = SubsetCache(tmp_path, 100)
    digest = put(cache, tmp_path, bytes(60), used_at=1)
    cache.put(sha256(bytes(101)).hexdigest(), bytes(101))
    assert cache.held() == (digest,)


def test_a_garbled_file_is_as_good_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = SubsetCache(tmp_path, 100)
    digest = put(cache, tmp_path, b"alice", used_at=1)
    (tmp_path / f"{digest}.subset").write_bytes(b"mallory")
    assert cache.get(digest) is None and cache.held() == ()
    assert "garbled" in caplog.text


def test_a_disk_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        SubsetCache(tmp_path / "file", 100).put("0" * 64, b"alice")
    assert "cannot save 5 bytes" in caplog.text


def test_no_more_digests_are_listed_than_fit_in_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HELD", 3)
    cache = SubsetCache(tmp_path, 100)
    digests = [put(cache, tmp_path, bytes([n]), used_at=n) for n in range(5)]
    assert cache.held() == tuple(digests[:1:-1])
