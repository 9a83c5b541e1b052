from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable

import pytest

from colab_swarm.snapshot import SwarmSnapshot
from colab_swarm.widgets.panel import Panel
from colab_swarm.widgets.render import render_html, render_text, summary
from tests.widgets.test_render import SNAPSHOT

VIEW = "application/vnd.jupyter.widget-view+json"
LEFT = dataclasses.replace(SNAPSHOT, state="left")


def steps(last: SwarmSnapshot = LEFT, *, count: int = 3) -> Callable[[], SwarmSnapshot]:
    """Read step 1, 2 …, and ``last`` from then on."""
    numbered = (dataclasses.replace(SNAPSHOT, step=step) for step in range(1, count + 1))
    snapshots = itertools.chain(numbered, itertools.repeat(last))
    return lambda: next(snapshots)


def nothing() -> None:
    return None


def test_without_a_front_end_a_panel_is_text_and_static_html() -> None:
    bundle = Panel(lambda: SNAPSHOT, nothing)._repr_mimebundle_()
    assert bundle == {"text/plain": render_text(SNAPSHOT), "text/html": render_html(SNAPSHOT)}


@pytest.mark.slow
def test_with_a_front_end_the_widget_comes_with_the_text_and_the_html() -> None:
    panel = Panel(lambda: SNAPSHOT, nothing, live=True)
    bundle = panel._repr_mimebundle_()
    assert bundle["text/plain"] == render_text(SNAPSHOT)
    assert bundle["text/html"] == render_html(SNAPSHOT) == panel._view.value
    assert bundle[VIEW] == {"model_id": panel._box.model_id, "version_major": 2, "version_minor": 0}


def test_the_play_button_refreshes_the_view() -> None:
    panel = Panel(steps(count=2), nothing, live=True)
    before = panel._view.value
    play, *_ = panel._box.children[1].children
    play.value += 1
    assert "step 1," in before
    assert "step 2," in panel._view.value


def test_the_stop_button_leaves_once_and_does_not_hold_up_the_kernel() -> None:
    left, go_on = threading.Event(), threading.Event()

    def leave() -> None:
        go_on.wait(10)
        left.set()

    panel = Panel(lambda: SNAPSHOT, leave, live=True)
    *_, button = panel._box.children[1].children
    button.click()
    assert button.disabled
    assert not left.is_set()
    go_on.set()
    assert left.wait(10)


def test_watching_ends_when_the_swarm_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    Panel(steps(), nothing, live=False).watch(every_s=0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == summary(dataclasses.replace(SNAPSHOT, step=1))
    assert lines[1:] == render_text(LEFT).splitlines()


def test_watching_ends_after_its_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    Panel(lambda: SNAPSHOT, nothing, live=False).watch(seconds=0)
    assert capsys.readouterr().out == render_text(SNAPSHOT) + "\n"


def test_an_interrupt_ends_the_watching_and_not_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    reads, stopped = itertools.count(), threading.Event()

    def read() -> SwarmSnapshot:
        if next(reads) == 2:
            raise KeyboardInterrupt
        return SNAPSHOT

    Panel(read, stopped.set, live=False).watch(every_s=0)
    assert "Stopped watching; the peer goes on" in capsys.readouterr().out
    assert not stopped.is_set()


def test_watching_with_widgets_repaints_the_view() -> None:
    panel = Panel(steps(count=4), nothing, live=True)
    panel.watch(every_s=0)
    assert panel._view.value == render_html(LEFT)


def test_repr_is_one_line() -> None:
    assert repr(Panel(lambda: SNAPSHOT, nothing)) == f"Panel({summary(SNAPSHOT)})"


def test_a_training_loop_keeps_the_view_live_without_being_slowed_down(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reads = 0

    def read() -> SwarmSnapshot:
        nonlocal reads
        reads += 1
        return SNAPSHOT

    panel = Panel(read, nothing, live=False)
    for _ in range(1000):
        panel.tick()
    assert reads < 10  # one, unless the machine stops for half a second
    assert capsys.readouterr().out == summary(SNAPSHOT) + "\n"
