"""The views of a coordinator in notebooks and terminals."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from colab_swarm.notebook.coordinator_view import draw, figures
from colab_swarm.workunits.state import MAX_MARKS, UnitMark
from tests.workunits.statuses import EVIL, status

ROW = status().overview.volunteers[0]


def test_names_of_volunteers_are_escaped() -> None:
    hostile = status(volunteers=(replace(ROW, name="\x1b]0;owned\x07\nall is well"), replace(ROW, name=EVIL)))
    calm = status(volunteers=(ROW, ROW))
    assert "\x1b" not in draw(hostile).text() + draw(hostile).html() and EVIL not in draw(hostile).html()
    assert len(draw(hostile).text().splitlines()) == len(draw(calm).text().splitlines())


MARKS = (
    UnitMark("assimilated", "alice", 2),
    UnitMark("queued", "alice"),
    UnitMark("training", "bob"),
    UnitMark("late", "carol"),
    UnitMark("rejected", EVIL),
    UnitMark("waiting"),
)


def test_units_of_the_epoch_have_a_character_each_and_words() -> None:
    shown = status(marks=MARKS)
    assert "  #=>!x." in draw(shown).text().splitlines() and "#=&gt;!x." in draw(shown).html()
    for words in ("# done", "= to assimilate", "&gt; training", "! late", "x rejected", ". waits"):
        assert words in draw(shown).html()


def test_figures_have_only_known_values() -> None:
    assert figures(status(marks=MARKS)) == {
        "accuracy, target 82.0%": "71.9%",
        "epoch done in": "5 min",
        "samples/s": "112",
        "staleness": "2.0 updates",
        "parameter servers": "2, 3 results wait",
    }
    assert figures(status(finished="done", epochs=0)) == {}
    assert "epoch done in" not in figures(status(assimilated_at=()))


def test_many_units_are_cut_and_counted() -> None:
    crowd = status(marks=MARKS[:1] * MAX_MARKS, rows=(10,) * (MAX_MARKS + 9))
    for shown in (draw(crowd).text(), draw(crowd).html()):
        assert "and 9 more units" in shown
    assert len(draw(crowd).html()) < 80_000


def test_a_finished_job_shows_its_reason_and_no_units() -> None:
    done = status(finished="accuracy reached", marks=MARKS, fault="disk <full>")
    assert "finished: accuracy reached" in draw(done).text() and "#=>" not in draw(done).text()
    assert "disk &lt;full&gt;" in draw(done).html() and "#=&gt;" not in draw(done).html()


@pytest.mark.parametrize("module", ["coordinator_view", "volunteer_view"])
def test_a_view_can_be_imported_first(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import colab_swarm.notebook.{module}"], check=True)
