import dataclasses
import io
import itertools
import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ipywidgets
import pytest

from colab_swarm.notebook import panel as panels
from colab_swarm.notebook.panel import SWARM, Page, Panel, update_button
from colab_swarm.notebook.theme import Document
from colab_swarm.notebook.views import draw, draw_map, draw_rounds
from colab_swarm.snapshot import SwarmSnapshot
from tests.net.swarm import until
from tests.notebook.test_views import SNAPSHOT

VIEW = "application/vnd.jupyter.widget-view+json"
LEFT = dataclasses.replace(SNAPSHOT, state="left")


def steps(last: SwarmSnapshot = LEFT, *, count: int = 3) -> Callable[[], SwarmSnapshot]:
    numbered = (dataclasses.replace(SNAPSHOT, step=step) for step in range(1, count + 1))
    snapshots = itertools.chain(numbered, itertools.repeat(last))
    return lambda: next(snapshots)


def nothing() -> None:
    return None


def everything(snapshot: SwarmSnapshot) -> str:
    return "\n\n".join(page(snapshot).text() for page in (draw, draw_rounds, draw_map))


@pytest.mark.parametrize("live", [False, True])
def test_a_panel_is_text_and_html_and_with_a_front_end_a_widget(live: bool) -> None:
    panel, first = Panel(lambda: SNAPSHOT, nothing, live=live), draw(SNAPSHOT)
    bundle = panel._repr_mimebundle_()
    widget = bundle.pop(VIEW, None)
    assert repr(panel) == f"Panel({first.line})"
    assert bundle == {"text/plain": first.text(), "text/html": first.html()}
    assert (widget is None) is (panel.widget() is None) is not live
    if live:
        assert widget == {"model_id": panel.widget().model_id, "version_major": 2, "version_minor": 0}
        assert shown(panel) == first.html()


def shown(panel: Panel[SwarmSnapshot]) -> str:
    """The HTML of the page, below the controls."""
    return str(panel.widget().children[-1].value)


def control(panel: Panel[SwarmSnapshot], kind: str, description: str = "") -> Any:
    row = [*panel.widget().children, *panel.widget().children[0].children]
    found = (one for one in row if type(one).__name__ == kind)
    return next(one for one in found if not description or one.description.startswith(description))


@pytest.mark.parametrize(("every_s", "step"), [(0.0, 51), (60.0, 1)])
def test_the_play_button_refreshes_the_view_once_for_requests_queued_while_a_cell_ran(
    monkeypatch: pytest.MonkeyPatch, every_s: float, step: int
) -> None:
    monkeypatch.setattr(panels, "SHOW_EVERY_S", every_s)
    panel = Panel(steps(count=100), nothing, live=True)
    clock = control(panel, "Play")
    assert "cs-live" in clock._dom_classes and "training, step 1," in shown(panel)
    for _ in range(50):
        clock.value += 1
    assert f"training, step {step}," in shown(panel)


async def test_a_shown_panel_starts_the_browsers_clock_until_it_is_switched_off_or_its_peer_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(panels, "BEAT_S", 0.001)
    now = SNAPSHOT
    panel = Panel(lambda: now, nothing, live=True)
    clock, switched = control(panel, "Play"), list[bool]()
    clock.observe(lambda change: switched.append(change["new"]), names="playing")
    assert clock.playing and panel.widget() is panel.widget() and not switched
    await until(lambda: len(switched) >= 4)
    assert switched[:4] == [False, True, False, True] and clock.playing  # a page hears it, once it is there
    clock.value += 1  # it runs
    panel.widget()
    clock.playing = False  # by the user
    told = len(switched)
    panel.widget()
    assert switched[told:] == []
    now = LEFT
    panel.refresh()
    await until(lambda: panel._beat is None)


def test_the_leave_button_needs_two_clicks_and_does_not_block_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, go_on = threading.Event(), threading.Event()

    def leave() -> None:
        go_on.wait(10)
        left.set()

    panel = Panel(lambda: SNAPSHOT, leave, live=True)
    button = control(panel, "Button", "Leave")
    button.click()
    assert button.description == "Leave swarm? Click again" and not button.disabled
    panel.refresh()
    assert button.description == "Leave swarm? Click again"
    with monkeypatch.context() as later:
        later.setattr(panels, "CONFIRM_S", -1.0)  # as if the time were up
        panel.refresh()
        assert button.description == "Leave swarm"
        button.click()
        assert button.description == "Leave swarm? Click again"
    button.click()
    assert button.description == "Left" and button.disabled and not left.is_set()
    go_on.set()
    assert left.wait(10)


def test_the_pause_button_toggles() -> None:
    asked: queue.Queue[bool] = queue.Queue()
    paused = False
    panel = Panel(lambda: dataclasses.replace(SNAPSHOT, paused=paused), nothing, pause=asked.put, live=True)
    button = control(panel, "Button", "Pause")
    button.click()
    assert asked.get(timeout=10) is True and button.description == "Resume peer"
    paused = True
    panel.refresh()
    assert button.description == "Resume peer"
    button.click()
    assert asked.get(timeout=10) is False and button.description == "Pause peer"


def test_the_stop_button_interrupts_a_busy_cell_from_another_thread_and_nothing_else() -> None:
    button = control(Panel(lambda: SNAPSHOT, nothing, live=True), "Button", "Stop")
    button.click()  # on the main thread: the cell is over
    clicker = threading.Thread(target=button.click)
    with pytest.raises(KeyboardInterrupt):
        clicker.start()
        threading.Event().wait(10)
    clicker.join(10)


def test_every_button_has_a_tooltip_and_a_panel_that_cannot_pause_no_such_button() -> None:
    panel = Panel(lambda: SNAPSHOT, nothing, pause=lambda wanted: None, live=True)
    assert all(control(panel, "Button", name).tooltip for name in ("Pause", "Stop", "Leave"))
    assert len(control(panel, "ToggleButtons").tooltips) == 3
    bare = Panel(lambda: SNAPSHOT, nothing, controls=lambda: [ipywidgets.Text("more")], live=True)
    assert (
        bare.widget().children[1].value == "more" and shown(bare) == draw(SNAPSHOT).html()
    )  # controls are on top
    assert [one.description for one in bare.widget().children[0].children[3:]] == ["Stop cell", "Leave swarm"]
    left = Panel(lambda: LEFT, nothing, pause=lambda wanted: None, live=True)
    assert control(left, "Button", "Left").disabled and control(left, "Button", "Pause").disabled


def test_only_the_visible_page_is_drawn() -> None:
    drawn: list[str] = []

    def page(name: str) -> Callable[..., Document]:
        def draw(snapshot: SwarmSnapshot, *chosen: int) -> Document:
            drawn.append(name)
            return Document(f"{name} {snapshot.step}", str(chosen), label=name)

        return draw

    pages = {"second": Page(page("second"), slider=("back", 3))}
    views = dataclasses.replace(SWARM, draw=page("swarm"), pages=pages)
    panel = Panel(lambda: SNAPSHOT, nothing, views=views, live=True)
    control(panel, "ToggleButtons").value = "second"
    assert drawn == ["swarm", "second"]
    slider = control(panel, "IntSlider")
    assert (slider.description, slider.max, slider.layout.display) == ("back", 3, "")
    slider.value = 2
    assert "(2,)" in shown(panel)
    assert panel._repr_mimebundle_()["text/plain"] == "second 12: (2,)"
    control(panel, "ToggleButtons").value = "swarm"
    assert slider.layout.display == "none" and "swarm 12" in shown(panel)


def test_a_view_that_cannot_be_drawn_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    def read() -> SwarmSnapshot:
        raise RuntimeError("no snapshot")

    panel = Panel(read, nothing, live=False)
    panel.tick()
    panel.tick()
    assert [record.message for record in caplog.records] == ["cannot draw the panel; training continues"]


def test_an_ascii_terminal_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    crowd = dataclasses.replace(SNAPSHOT, peers=SNAPSHOT.peers * 30, me="zoë")
    Panel(lambda: crowd, nothing, live=False).watch(seconds=0)
    out.seek(0)
    shown = out.read()
    assert "zo?" in shown and "~ and 40 more peers" in shown and "\x1b" not in shown


def test_watching_repaints_and_ends_in_time_or_when_its_peer_left(capsys: pytest.CaptureFixture[str]) -> None:
    Panel(steps(), nothing, live=False).watch(every_s=0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == draw(dataclasses.replace(SNAPSHOT, step=1)).line
    assert "\n".join(lines[1:]) == everything(LEFT)
    Panel(lambda: SNAPSHOT, nothing, live=False).watch(seconds=0)
    assert capsys.readouterr().out == everything(SNAPSHOT) + "\n"
    panel = Panel(steps(count=4), nothing, live=True)
    panel.watch(every_s=0)
    assert shown(panel) == draw(LEFT).html()


def test_an_interrupt_stops_watching_but_not_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    reads, stopped = itertools.count(), threading.Event()

    def read() -> SwarmSnapshot:
        if next(reads) == 2:
            raise KeyboardInterrupt
        return SNAPSHOT

    Panel(read, stopped.set, live=False).watch(every_s=0)
    assert "Stopped watching; the peer continues" in capsys.readouterr().out
    assert not stopped.is_set()


def test_tick_in_a_training_loop_reads_few_snapshots(capsys: pytest.CaptureFixture[str]) -> None:
    reads = 0

    def read() -> SwarmSnapshot:
        nonlocal reads
        reads += 1
        return SNAPSHOT

    panel = Panel(read, nothing, live=False)
    for _ in range(1000):
        panel.tick()
    assert reads < 10  # one, unless the machine stops for half a second
    assert capsys.readouterr().out == draw(SNAPSHOT).line + "\n"


def test_an_updated_button_stays_responsive_while_the_cell_is_busy() -> None:
    comm = SimpleNamespace(_reply_subshell_id=None, comm_id="7")  # the note of ipykernel 7.4
    button = SimpleNamespace(description="Pause", comm=comm)
    update_button(button, description="Resume")
    assert button.description == "Resume" and vars(comm) == {"comm_id": "7"}
