"""Files that travel with an invitation."""

from pathlib import Path

import pytest

import colab_swarm as cs
from colab_swarm.errors import JoinError, StateError
from colab_swarm.net.peers import PeerId
from colab_swarm.swarm import shared_files
from colab_swarm.swarm.shared_files import DescribeFile, SharedFiles
from colab_swarm.tensors.chunks import Manifest

QUIET = cs.NetworkOptions(lan=False)
WORDS = b"tokens\n" * 100_000


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(WORDS)
    return path


def read(path: object) -> bytes:
    assert isinstance(path, Path)
    return path.read_bytes()


def test_a_file_of_the_settings_comes_from_whoever_has_read_it_and_stays(words: Path, tmp_path: Path) -> None:
    at = {"options": QUIET, "state_dir": tmp_path / "bob"}
    alice = cs.create("files", peer_name="alice", options=QUIET)
    line = str(alice.invite(settings={"size": "tiny", "tokenizer": words}))
    with cs.join(line, peer_name="bob", **at) as bob:
        assert bob.settings["size"] == "tiny" and read(bob.settings["tokenizer"]) == WORDS
    with cs.join(state_dir=tmp_path / "bob") as bob:
        passed_on = str(bob.invite())
        alice.leave()
        words.unlink()
        assert read(bob.settings["tokenizer"]) == WORDS, "it comes back with its file though nobody is there"
        home = tmp_path / "carol"
        with cs.join(passed_on, peer_name="carol", options=QUIET, state_dir=home) as carol:
            path = carol.settings["tokenizer"]
            assert isinstance(path, Path) and path.is_relative_to(home) and read(path) == WORDS


def test_a_false_file_is_refused_and_nobody_else_has_it(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def lie(_files: SharedFiles, peer: PeerId, _ask: DescribeFile) -> Manifest:
        asked.append(peer)
        return shared_files._snapshot(b"poison").manifest

    monkeypatch.setattr(SharedFiles, "_describe", lie)
    monkeypatch.setattr(shared_files, "FIND_S", 0.0)
    with cs.create("files", peer_name="alice", options=QUIET) as alice:
        line = str(alice.invite(settings={"tokenizer": words}))
        # in a folder of its own, for a cache on one machine is of both
        with cs.join(line, peer_name="bob", options=QUIET, state_dir=tmp_path / "bob") as bob:
            with pytest.raises(JoinError, match=r"no peer that is online has file:.*ask it to join"):
                _ = bob.settings
            assert asked == [bob.id]


def test_in_a_bucket_the_file_is_an_object(words: Path, tmp_path: Path) -> None:
    box = (tmp_path / "bucket").as_uri()
    (tmp_path / "bucket").mkdir()
    with cs.create("files", mailbox=box) as alice:
        line = str(alice.invite(settings={"tokenizer": words}))
    with cs.join(line, peer_name="bob", mailbox=box, state_dir=tmp_path / "bob") as bob:
        assert read(bob.settings["tokenizer"]) == WORDS


def test_too_large_a_file_and_a_missing_one_raise_at_once(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "MAX_BYTES", 10)
    with cs.create("files", peer_name="alice", options=QUIET) as alice:
        with pytest.raises(ValueError, match="too large to share"):
            alice.invite(settings={"tokenizer": words})
        with pytest.raises(FileNotFoundError):
            alice.invite(settings={"tokenizer": words.with_name("missing")})


def test_a_file_that_could_not_be_written_is_written_at_the_next_look(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def refuse(path: Path, *_: object) -> None:
        refused.append(path)
        raise StateError("no space left on device")

    with cs.create("files", peer_name="alice", options=QUIET) as alice:
        line = str(alice.invite(settings={"tokenizer": words}))
        with cs.join(line, peer_name="bob", options=QUIET, state_dir=tmp_path / "bob") as bob:
            with monkeypatch.context() as full:
                full.setattr(shared_files, "write_file", refuse)
                with pytest.raises(StateError, match="no space left"):
                    _ = bob.settings
            assert len(refused) == 1 and read(bob.settings["tokenizer"]) == WORDS
