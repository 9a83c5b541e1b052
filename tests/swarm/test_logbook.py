"""What a peer leaves on its machine for the command line."""

import logging
from pathlib import Path

import pytest

from colab_swarm.events import Notice, StepFinished
from colab_swarm.snapshot import PeerRow, SwarmSnapshot
from colab_swarm.swarm import logbook
from colab_swarm.swarm.logbook import SILENT_S, LastState, Logbook, last_states, log_of

ROW = PeerRow("alice", "01" * 4, "trainer", 7, 2.0, 0.0, None, True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def book(name: str = "alice", *, state: str = "left") -> Logbook:
    seen = SwarmSnapshot("digits", name, "", state, (ROW,))
    return Logbook("digits-01234567", name, lambda: seen)


def test_a_peer_that_worked_leaves_its_last_state_and_its_log() -> None:
    alice = book()
    for step in range(3):
        alice.on_event(StepFinished(0.0, step, 256.0, loss=0.5))
    alice.on_event(Notice(0.0, "the bucket\x1b[2J answers again"))
    alice.close()
    (folder, last), *none = last_states().items()
    assert not none and (last.run, last.me, last.state, last.peers) == ("digits", "alice", "left", (ROW,))
    first, last, end = log_of(folder).splitlines()
    # steps that follow at once have one line, and no word of a peer controls a terminal
    assert first.endswith("step 0: loss 0.5000, 256 samples") and "\x1b" not in last and "  left" in end
    assert folder.stat().st_mode & 0o077 == 0
    idle = book("bob")
    idle.on_event(Notice(0.0, "hello"))
    idle.close()
    assert list(last_states()) == [folder], "one that did nothing leaves nothing"


def test_a_process_that_writes_no_more_is_silent() -> None:
    last = LastState("digits-01234567", "alice", 1, 100.0, "training", (ROW,))
    assert last.state_now(100.0 + SILENT_S) == "training" and last.state_now(101.0 + SILENT_S) == "silent"


def test_a_disk_that_refuses_disturbs_nothing(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "colab_swarm").write_text("a file where the folder should be")
    alice = book()
    alice.on_event(StepFinished(0.0, 1, 256.0, loss=None))
    with caplog.at_level(logging.DEBUG, logbook.__name__):
        alice.close()
    assert "nothing is written" in caplog.text and not last_states()


def test_a_long_log_keeps_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logbook, "MAX_LOG_BYTES", 200)
    for session in range(6):
        alice = book()
        alice.on_event(StepFinished(0.0, session, 256.0, loss=None))
        alice.on_event(Notice(0.0, "x" * 100))
        alice.close()
    (folder,) = last_states()
    text = log_of(folder)
    assert "step 5: 256 samples" in text and "step 0:" not in text and len(text) < 800
