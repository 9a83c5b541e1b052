"""Views of an interactive run, and its controls."""

import dataclasses
from functools import partial
from typing import Any

import pytest

from colab_swarm.notebook import lessons
from colab_swarm.notebook.lessons import LessonControls, SimulationSnapshot
from colab_swarm.snapshot import PeerRow


def peer(name: str, state: str, step: int = 0, samples: float = 0.0, loss: float | None = None) -> PeerRow:
    return PeerRow(name, "", state, step, 8.0, samples, None, me=False, loss=loss, compute_samples_per_s=8.0)


PEERS = (peer("alice", "training", 4, 64.0, 0.5), peer("<b>bob", "crashed", loss=float("nan")))
STORY = ("  20.0 s  bob crashes",)
LESSON_NOW = SimulationSnapshot(61.0, "home", PEERS, STORY, ("90 s: x",), "playing", 10.0)


def test_a_run_shows_its_peers_and_what_happened() -> None:
    assert lessons.draw(LESSON_NOW).text().splitlines() == [
        "1 peer at step 4: playing after 61.0 s on home",
        "  virtual time: 61 s; run: 10× real time",
        "  peer    state       step  samples  samples/s  loss",
        "  alice   ▶ training  4     64       8.0        0.500",
        "  <b>bob  ✗ crashed   0     0        8.0",
        "    20.0 s  bob crashes",
        "  to come: 90 s: x",
    ]


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
    assert lessons.describe_fault(fault[0], fault[1:]) == words


class Run(list[tuple[Any, ...]]):
    def inject(self, *action: Any) -> None:
        self.append(action)


@pytest.mark.slow
def test_each_control_has_a_name_injects_its_action_and_follows_the_peers() -> None:
    run = Run()
    step, choose_speed = partial(run.inject, "step"), partial(run.inject, "playback")
    controls = LessonControls(LESSON_NOW, run.inject, step, choose_speed)
    made = {child.description: child for row in controls.rows for child in row.children}
    assert all(made)
    made["samples/s"].value = 2.0
    made["slower connection"].value = 20.0
    made["playback"].value = 50.0
    made["Step 1 s"].click()
    made["Add a peer"].click()
    kill, back, who = made["Kill this peer"], made["Bring it back"], made["this peer:"]
    assert (kill.disabled, back.disabled) == (False, True)
    kill.click()
    who.value = "<b>bob"
    assert (kill.disabled, back.disabled) == (True, False)
    back.click()
    assert run[:3] == [("speed", "alice", 2.0), ("slow", "alice", 20.0), ("playback", 50.0)]
    assert run[3:] == [("step",), ("join",), ("crash", "alice"), ("join", "<b>bob")]
    controls.update(dataclasses.replace(LESSON_NOW, peers=(*PEERS, peer("carol", "training", 4))))
    assert who.options == ("alice", "<b>bob", "carol") and who.value == "<b>bob" and len(run) == 7
    controls.update(dataclasses.replace(LESSON_NOW, state="finished"))
    assert all(widget.disabled for widget in made.values())
