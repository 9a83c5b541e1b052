"""What a script prints: steps, and a line for each event."""

import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

import ipywidgets
import pytest
import torch

import colab_swarm as cs
from colab_swarm.events import BatchDropped, Event, Notice, PeerJoined, Waited
from colab_swarm.net.peers import PeerId
from colab_swarm.notebook.explanation import shorten_interrupts
from colab_swarm.notebook.panel import Panel
from colab_swarm.swarm import script
from colab_swarm.swarm.batches import BatchReader
from colab_swarm.swarm.script import Attendance, CellView, ScriptLines
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.records import ProgressRecord
from tests.training import toy

BOB, CAROL = (PeerId(bytes([n]) * 32) for n in (11, 12))
BOB_ONLY = {BOB: "bob"}
RECORD = ProgressRecord(0, b"", 0.0, 1.0, syncing=False, name="x")


@pytest.mark.parametrize(
    ("looks", "reason", "last"),
    [
        pytest.param([{}, BOB_ONLY], "", ["bob joined"], id="joined"),
        pytest.param([BOB_ONLY, BOB_ONLY], "", [], id="nothing new"),
        pytest.param([BOB_ONLY, {}], "the peer left", ["bob left"], id="left"),
        pytest.param([BOB_ONLY, {}], "silent for 45 s", ["bob is away: silent for 45 s"], id="frozen"),
        pytest.param([BOB_ONLY, {}], "", ["bob is away"], id="paused or stopped"),
        pytest.param([BOB_ONLY, {}, BOB_ONLY], "", ["bob is back"], id="back"),
        pytest.param(
            [BOB_ONLY, {CAROL: "carol"}], "the peer left", ["carol joined", "bob left"], id="in turn"
        ),
    ],
)
def test_a_look_tells_who_joined_left_and_came_back(
    looks: list[dict[PeerId, str]], reason: str, last: list[str]
) -> None:
    attendance = Attendance()
    *earlier, now = looks
    for look in earlier:
        attendance.look(look)
    if reason:
        attendance.reasons[BOB.hex()] = reason
    assert attendance.look(now) == last


def lines_of(
    *events: Event, there: dict[PeerId, Any] | None = None, now: float = 0.0, **more: Any
) -> ScriptLines:
    view = SimpleNamespace(me=CAROL, there={} if there is None else there)
    optimizer: Any = SimpleNamespace(global_step=0, rounds=SimpleNamespace(view=view))
    waited = next((event for event in events if isinstance(event, Waited)), None)
    overview: Any = SimpleNamespace(names=lambda: {BOB.hex()[:8]: "bob"}, unsaid=deque(events), silent=waited)
    return ScriptLines(optimizer, overview, lambda: now, name="carol", every_s=0.0, **more)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (Waited(0.0, BOB.hex(), "its part of a round", 4.4), "waited 4.4 s for bob: its part of a round"),
        (Waited(0.0, BOB.hex(), "its part of a round", 0.4), ""),
        (Notice(0.0, "adopted from the others: local_steps=30"), "adopted from the others: local_steps=30"),
        (Notice(0.0, "the first step waits until 2 peers train", logged=True), ""),
        (PeerJoined(0.0, BOB.hex()), ""),
        (BatchDropped(0.0, "a gradient was not finite"), "batch dropped: a gradient was not finite"),
    ],
)
def test_an_event_gets_its_line_once(event: Event, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(event)
    lines.tick()
    lines.tick()
    assert capsys.readouterr().out.strip() == line


def test_a_look_tells_once_for_whom_it_waits_and_how_others_join_without_the_creator(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "LOOK_EVERY_S", 0.0)
    there: dict[PeerId, Any] = {BOB: RECORD}
    waited = Waited(0.0, BOB.hex(), "its part of a round", 0.4)
    lines = lines_of(waited, there=there, now=11.0, creator=BOB, invite=lambda: "swarm://digits.abc")
    lines.on_batch(9)
    there.clear()
    lines.on_batch(9)
    lines.on_batch(9)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "x joined", "and not carol, whose lines they are"
    for line in (
        "waiting for bob still: its part of a round",
        "who created the run is away; new friends can join by swarm://digits.abc",
    ):
        assert told.count(line) == 1


@pytest.mark.parametrize(("every_s", "steps"), [(0.0, [1, 2, 3, 4, 5]), (1e6, [1, 5])])
def test_a_step_has_a_line_each_so_many_seconds_and_the_last_one_always(
    every_s: float, steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    def train(swarm: Swarm) -> None:
        net = toy.model()
        optimizer = toy.join_training(swarm, net, target_batch_size=4)
        with pytest.raises(ValueError, match="log_every_s=-1: pass seconds"):
            swarm.batches([], optimizer, max_steps=1, log_every_s=-1)
        for batch in swarm.batches([torch.zeros(4, 8)], optimizer, max_steps=5, log_every_s=every_s):
            net(batch).mean().backward()
            optimizer.step()

    toy.alone(train)
    lines = [line for line in capsys.readouterr().out.splitlines() if " of 5: " in line]
    assert [int(line.split()[2]) for line in lines] == steps


@pytest.mark.parametrize("ends", ["at the last step", "by an interrupt"])
def test_a_training_cell_has_a_line_that_is_saved_and_the_one_panel(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, lines, states = list[Any](), list[str](), list[str]()

    def display(what: Any, *, raw: bool = False, display_id: bool = False) -> Any:
        """What a front-end shows under a cell: objects, and lines that are written over."""
        if not raw:
            return shown.append(what)
        lines.append(what["text/plain"])
        return SimpleNamespace(update=lambda line, raw: lines.append(line["text/plain"]))

    monkeypatch.setattr("IPython.display.display", display)

    def train(swarm: Swarm) -> None:
        panel = Panel(swarm.snapshot, swarm.leave, live=True)
        form = panel.form = ipywidgets.VBox([panel.widget()])
        net = toy.model()
        optimizer = toy.join_training(swarm, net, target_batch_size=4)
        reader = BatchReader([torch.zeros(4, 8)], optimizer, peer=swarm.id, warn=print, time=lambda: 0.0)
        reading = reader.read(2, shows=CellView(optimizer, panel, run="digits"))
        for x_BI in reading:
            states.append(swarm.snapshot().state)
            net(x_BI).mean().backward()
            optimizer.step()
            if ends == "by an interrupt" and optimizer.global_step == 1:
                reading.close()
        states.append(swarm.snapshot().state)
        assert form.children == () and shown == [panel]

    toy.alone(train)
    assert lines[0].startswith("step 0 of 2: ") and "colab-swarm status digits" in lines[0]
    if ends == "by an interrupt":
        assert lines[-1].endswith("; stopped: run the cell again to go on") and states[-1] == "training"
    else:
        assert lines[-1].endswith("; step 2 of 2 is done: raise max_steps to train on")
        assert states[0] == "training" and states[-1] == "finished"


def test_ctrl_c_ends_a_script_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    shorten_interrupts()
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "Stopped by Ctrl-C: this peer leaves, and the others train on.\n"
    sys.excepthook(ValueError, ValueError("lr=None"), None)
    assert "ValueError: lr=None" in capsys.readouterr().err


@pytest.mark.slow
def test_a_peer_that_was_away_says_what_it_drops() -> None:
    """Bob trains alone for a while, then takes the others' state."""
    notices: list[str] = []

    def train(swarm: Swarm) -> None:
        net = toy.model()
        optimizer = toy.join_training(swarm, net, target_batch_size=12)
        while not notices:
            toy.loss_of(net, optimizer.global_step).backward()
            optimizer.step(samples=2)
            for notice in swarm.events.recent(Notice):
                if "took without the others" in notice.text:
                    notices.append(f"{swarm.name}: {notice.text}")

    with cs.simulate(peers=3, network="lan") as simulation:
        simulation.network.at(4.0).partition({"bob"}, {"alice", "carol"})
        simulation.network.at(40.0).heal()
        simulation.run(train, seconds=200.0)
        assert [fired.name for fired in simulation.network.fired] == ["partition", "heal"]
    assert notices[0].startswith("bob: this peer was behind: it goes on at step ")
    assert "; 0 steps" not in notices[0] and notices[0].endswith(" samples are dropped")
