"""Views of an interactive run, and its controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from colab_swarm.events import BatchDropped, RoundFinished, StateReceived
from colab_swarm.notebook.lessons import (
    LESSON,
    LessonSnapshot,
    SimulatedPeer,
    SimulationSnapshot,
    describe_event,
    describe_fault,
    draw_lesson,
    draw_simulation,
    summary,
)
from colab_swarm.swarm.lesson import LessonControls
from tests.notebook.test_views import SNAPSHOT, parsed

PEERS = (
    SimulatedPeer("alice", "training", 4, 64.0, 8.0, 0.5),
    SimulatedPeer("<b>bob", "crashed", 0, 0.0, 8.0, float("nan")),
)
SIMULATION = SimulationSnapshot(61.0, "home", PEERS, 256.0, ("20 s: bob crashes",), ("90 s: x",), SNAPSHOT)
LESSON_NOW = LessonSnapshot(SIMULATION, "playing", 10.0, ("  20.0 s  bob crashes",))


def test_a_run_shows_its_peers_in_html_and_in_text() -> None:
    assert summary(LESSON_NOW) == "playing at 61.0 s: 1 peer at step 4"
    for shown in (draw_lesson(LESSON_NOW).html(), draw_simulation(SIMULATION).html()):
        texts = " ".join(parsed(shown).itertext())
        assert (
            "<b>bob" in texts and "✗ crashed" in texts and "to come: 90 s: x" in texts and "nan" not in texts
        )
    for text in (draw_lesson(LESSON_NOW).text(), draw_simulation(SIMULATION).text()):
        assert "crashed" in text and "bob crashes" in text and "nan" not in text


def test_pages_show_what_a_peer_sees_or_that_no_peer_is_online() -> None:
    deserted = dataclasses.replace(LESSON_NOW, simulation=dataclasses.replace(SIMULATION, seen=None))
    for page in LESSON.pages.values():
        assert parsed(page.draw(LESSON_NOW).html()) is not None and page.draw(LESSON_NOW).text()
        shown = page.draw(deserted)
        assert "No peer is online" in shown.html() and "No peer is online" in shown.text()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (("crash", "bob"), "bob crashes"),
        (("partition", {"bob"}, {"alice", "carol"}), "the network is partitioned: bob | alice, carol"),
        (("slow", "bob", 20), "bob's connection becomes 20 times slower than at first"),
        (("lose", 0.05), "5.0% of all messages are lost once"),
        (("odd", 1, "two"), "odd 1, two"),
    ],
)
def test_faults_are_described_in_words(fault: tuple[Any, ...], words: str) -> None:
    assert describe_fault(fault[0], fault[1:]) == words


def test_events_are_described_in_words() -> None:
    finished = RoundFinished(1.0, 3, 4, ("a", "b", "c"), 256.0, 0, 0, 1, 1, 0.5)
    assert (
        describe_event("bob", finished)
        == "step 4: 256 samples of 4 peers, averaged in 0.5 s; 1 of them missing"
    )
    received = StateReceived(1.0, 3, ("a",), 2000, 0.5)
    assert describe_event("bob", received) == "bob got the state of step 3, 2 kB from 1 peer"
    assert describe_event("bob", BatchDropped(1.0, "NaN")) == "bob drops a batch: NaN"


class RecordingRun:
    """A run that only records the injected actions."""

    def __init__(self) -> None:
        self.speed, self.steps = 10.0, 0
        self.actions: list[tuple[Any, ...]] = []

    def inject(self, verb: Any, *arguments: str | float) -> None:
        self.actions.append((verb, *arguments))

    def step(self) -> None:
        self.steps += 1


def widgets_of(rows: list[Any]) -> dict[str, Any]:
    return {child.description: child for row in rows for child in row.children}


@pytest.fixture
def run() -> RecordingRun:
    return RecordingRun()


@pytest.fixture
def controls(run: RecordingRun) -> LessonControls:
    return LessonControls(run, loss=0.005)  # type: ignore[arg-type]


@pytest.fixture
def made(controls: LessonControls) -> Iterator[dict[str, Any]]:
    yield widgets_of(controls.make(PEERS))


@pytest.mark.slow
def test_every_control_has_a_name_and_injects_its_action(run: RecordingRun, made: dict[str, Any]) -> None:
    assert all(made)
    made["peers"].value = 5
    made["latency"].value = 4.0
    made["bandwidth"].value = 0.25
    made["lost messages"].value = 0.1
    made["samples/s"].value = 2.0
    made["slower connection"].value = 20.0
    made["playback"].value = 50.0
    made["Step 1 s"].click()
    assert run.actions == [
        ("peers", 5),
        ("latency", 4.0),
        ("bandwidth", 0.25),
        ("lose", 0.1),
        ("speed", "alice", 2.0),
        ("slow", "alice", 20.0),
    ]
    assert (run.speed, run.steps) == (50.0, 1)


@pytest.mark.slow
def test_a_live_peer_can_be_killed_and_a_crashed_one_brought_back(
    run: RecordingRun, made: dict[str, Any]
) -> None:
    kill, back, who = made["Kill this peer"], made["Bring it back"], made["this peer:"]
    assert (kill.disabled, back.disabled) == (False, True)
    kill.click()
    who.value = "<b>bob"
    assert (kill.disabled, back.disabled) == (True, False)
    back.click()
    assert run.actions == [("crash", "alice"), ("join", "<b>bob")]


@pytest.mark.slow
def test_an_update_offers_new_peers_and_injects_nothing(
    run: RecordingRun, controls: LessonControls, made: dict[str, Any]
) -> None:
    carol = SimulatedPeer("carol", "training", 4, 0.0, 8.0, None)
    made["this peer:"].value = "<b>bob"
    more = dataclasses.replace(SIMULATION, peers=(*PEERS, carol))
    controls.update(dataclasses.replace(LESSON_NOW, simulation=more))
    assert made["this peer:"].options == ("alice", "<b>bob", "carol")
    assert made["this peer:"].value == "<b>bob" and run.actions == []
    controls.update(dataclasses.replace(LESSON_NOW, state="finished"))
    assert all(widget.disabled for widget in made.values())
