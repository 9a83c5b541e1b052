import math
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from colab_swarm import events
from colab_swarm.events import EventLog, Fault, MemberTrace, RoundFinished, StepFinished
from colab_swarm.notebook import recorder
from colab_swarm.notebook.recorder import MAX_LINE_BYTES, Header, Recorder, replay

ALICE, BOB = "a11ce000" * 8, "b0b00000" * 8
NAMES = {"a11ce000": "alice", "b0b00000": "bob"}
HEADER = Header("mnist", "alice", ALICE, began=1.8e9, at=5.0)


def finished(step: int, *, dropped: str = "") -> RoundFinished:
    members = (
        MemberTrace(ALICE, 4.0, 0.5, means=(0.1, 0.2)),
        MemberTrace(BOB, 8.0, 0.5, (0.0, 0.1), (0.05, 0.15), None if dropped else (0.1, 0.2), dropped),
    )
    contributors = (ALICE,) if dropped else (ALICE, BOB)
    figures = (12.0, int(bool(dropped)), 0, 100, 100, 0.3, 0.0, 0.2)
    return RoundFinished(float(step), step, 2, contributors, *figures, members=members)


EVENTS = [
    events.PeerJoined(1.0, BOB),
    *(one for n in range(4) for one in (finished(n), StepFinished(n, n + 1, 12.0, 2.0 - n / 4))),
    finished(4, dropped="the link to b0b00000 is lost"),
    events.PeerLeft(9.0, BOB, "it was killed"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def record(path: Path, *events: object) -> Path:
    log = EventLog()
    with closing(Recorder(log, path, HEADER, lambda: NAMES)):
        for event in events:
            log.emit(event)  # type: ignore[arg-type]
    return path


def test_replay_returns_the_recorded_events(path: Path) -> None:
    found = replay(record(path, *EVENTS))
    assert found.events == EVENTS and found.headers == [HEADER] and not found.note
    assert found.names == NAMES


def test_a_second_session_continues_the_file(path: Path) -> None:
    record(path, EVENTS[0])
    found = replay(record(path, EVENTS[-1]))
    assert found.events == [EVENTS[0], EVENTS[-1]] and len(found.headers) == 2
    assert "2 sessions" in repr(found)


@pytest.mark.parametrize("again", [False, True])
def test_a_torn_line_is_left_out_with_a_note(path: Path, again: bool) -> None:
    record(path, *EVENTS)
    path.write_bytes(path.read_bytes()[:-20])
    if again:
        record(path, EVENTS[0])
    found = replay(path)
    assert found.events == [*EVENTS[:-1], *([EVENTS[0]] if again else [])]
    assert "1 line left out" in found.note and found.note.endswith(f"the first is line {len(EVENTS) + 2}")
    assert found.note in str(found)


def test_a_full_file_or_a_failing_disk_ends_the_recording_with_a_fault(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_BYTES", 2000)
    log = EventLog()
    writer = Recorder(log, path, HEADER)
    for number in range(100):
        log.emit(events.BatchDropped(float(number), "nan"))
    writer.close()
    assert path.stat().st_size <= 2000 and "limit of 2 kB" in repr(writer)
    (fault,) = log.recent(Fault)
    assert isinstance(fault, Fault) and "the recording has ended" in fault.text
    assert 10 < len(replay(path).events) < 100
    writer = Recorder(log, path, HEADER)
    writer._file.close()
    log.emit(EVENTS[0])
    writer.close()
    assert "cannot write" in log.recent(Fault)[-1].text  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["a" * (MAX_LINE_BYTES + 1), "/tmp/\udcff"])
def test_an_event_without_a_valid_line_is_left_out(path: Path, text: str) -> None:
    record(path, EVENTS[0], Fault(1.0, "here", text), EVENTS[-1])
    assert replay(path).events == [EVENTS[0], EVENTS[-1]]


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("Chapter 1\n")
    with pytest.raises(ValueError, match="choose another file"):
        Recorder(EventLog(), thesis, HEADER)
    assert thesis.read_text() == "Chapter 1\n"


GOOD = msgspec.json.encode({"kind": "Header", "data": HEADER}) + b"\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"Chapter 1\n", "line 1"),
        (b'{"kind":"PeerJoined","data":{"at":1.0,"peer":"b0b"}}\n', "line 1: .* starts with a header"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_its_line(path: Path, content: bytes, reason: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        replay(path)


NOT_READ = (b'{"kind":"PeerJoined","data":{"at":"x"}}', b'{"kind":"PeerMarried","data":{"at":1.0}}')


@pytest.mark.parametrize("bad", [b"nonsense", b"{}", b"\xff", *NOT_READ])
def test_a_line_that_cannot_be_read_costs_only_itself(path: Path, bad: bytes) -> None:
    record(path, *EVENTS)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], bad, *lines[2:]]))
    found = replay(path)
    assert found.events == EVENTS and found.note.endswith("the first is line 3")


numbers = st.none() | st.integers() | st.floats() | st.just("1e999") | st.text(max_size=5)
names = ["at", "step", "seconds", "samples", "loss", "members", "peer", "group_size", "explanation"]
fields = st.dictionaries(st.sampled_from(names), numbers | st.lists(numbers, max_size=3))
kinds = st.sampled_from(["RoundFinished", "StepFinished", "Names", "Header"])


@given(st.lists(st.binary(max_size=60) | st.tuples(kinds, fields), max_size=4))
@example([b'{"kind":"StepFinished","data":{"at":1.0,"step":' + b"7" * 5000 + b',"samples":1.0,"loss":1.0}}'])
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_arbitrary_file_is_drawn_or_refused(
    path: Path, lines: list[bytes | tuple[str, dict[str, object]]]
) -> None:
    whole = msgspec.to_builtins(finished(1))
    encoded = [
        line
        if isinstance(line, bytes)
        else msgspec.json.encode({"kind": line[0], "data": {**whole, "loss": 1.0, "name": "x", **line[1]}})
        for line in lines
    ]
    path.write_bytes(GOOD + b"\n".join(encoded))
    try:
        shown = replay(path)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        assert "members of the round" in shown.draw().html() or not (
            shown.rounds and shown.rounds[-1].members
        )


def test_a_replay_shows_the_run_in_one_line_and_in_full(path: Path) -> None:
    shown = replay(record(path, *EVENTS))
    assert repr(shown) == "Replay(mnist: recorded by alice, 5 rounds, 1 session, loss 2.000 to 1.250)"
    assert len(shown.events) == len(EVENTS) and len(shown.rounds) == 5
    assert shown.losses == [(1, 2.0), (2, 1.75), (3, 1.5), (4, 1.25)]
    assert all(word in str(shown) for word in ("round 4", "bob", "is lost"))
    assert "round 2" in shown.draw(2).text().splitlines()[1]
    assert shown._repr_mimebundle_() == {"text/plain": str(shown), "text/html": shown.draw().html()}


def test_a_recording_without_rounds_says_so_and_an_endless_loss_is_read_as_none(path: Path) -> None:
    found = replay(record(path, StepFinished(1.0, 1, 2.0, math.inf)))
    assert found.events == [StepFinished(1.0, 1, 2.0, None)] and "No averaging round" in str(found)


@pytest.mark.slow
def test_the_slider_chooses_the_round(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "has_frontend", lambda: True)
    shown = replay(record(path, *EVENTS))
    slider, view = shown._widget.children
    assert shown._repr_mimebundle_()["application/vnd.jupyter.widget-view+json"]["model_id"]
    slider.value = 1
    assert view.value == shown.draw(1).html() != shown.draw().html()
