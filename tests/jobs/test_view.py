"""The views of a coordinator in notebooks and terminals."""

from __future__ import annotations

from dataclasses import replace

from colab_swarm.jobs.view import MAX_ROWS, render_html, render_text
from tests.workunits.statuses import EVIL, status

ROW = status().overview.volunteers[0]


def test_names_of_volunteers_steer_neither_terminal_nor_page() -> None:
    hostile = status(volunteers=(replace(ROW, name="\x1b]0;owned\x07\nall is well"), replace(ROW, name=EVIL)))
    calm = status(volunteers=(ROW, ROW))
    assert "\x1b" not in render_text(hostile) + render_html(hostile) and EVIL not in render_html(hostile)
    assert len(render_text(hostile).splitlines()) == len(render_text(calm).splitlines())


def test_a_crowd_is_counted_not_listed() -> None:
    crowd = status(volunteers=(ROW,) * (MAX_ROWS + 7))
    for shown in (render_text(crowd), render_html(crowd)):
        assert shown.count("alice") == MAX_ROWS and "and 7 more" in shown
