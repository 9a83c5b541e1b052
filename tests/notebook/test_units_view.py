"""The views of a coordinator and of a volunteer in notebooks and terminals."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

from colab_swarm.notebook.units_view import draw_job, draw_volunteer, figures, volunteer_line
from colab_swarm.workunits.client import UnitProgress, VolunteerSnapshot
from colab_swarm.workunits.state import MAX_MARKS
from tests.workunits.statuses import EVIL, status

ROW = status().volunteers[0]
MARKS = ("assimilated", "queued", "training", "late", "rejected", "waiting")
UNITS = (
    UnitProgress("epoch 3, subset 7", "training", done=5, batches=20, loss=0.4321, seconds=12.0),
    UnitProgress("epoch 3, subset 8", "downloading", seconds=0.5),
    UnitProgress(phase="waiting"),
)
SNAPSHOT = VolunteerSnapshot(
    job="digits",
    state="training",
    over=False,
    fault="",
    epoch=3,
    accuracy=0.875,
    units=UNITS,
    accepted=12,
    refused=1,
    given_back=0,
    refusal="its deadline passed <b>",
    samples=4800,
    sent_bytes=1_200_000,
    received_bytes=3_400_000,
    seconds=600.0,
)


def test_names_of_volunteers_are_escaped() -> None:
    hostile = draw_job(
        status(volunteers=(replace(ROW, name="\x1b]0;owned\x07\nall is well"), replace(ROW, name=EVIL)))
    )
    calm = draw_job(status(volunteers=(ROW, ROW)))
    assert "\x1b" not in hostile.text() + hostile.html() and EVIL not in hostile.html()
    assert len(hostile.text().splitlines()) == len(calm.text().splitlines())


def test_units_of_the_epoch_have_a_character_each_and_words() -> None:
    shown = draw_job(status(marks=MARKS))
    assert "  #=>!x." in shown.text().splitlines() and "#=&gt;!x." in shown.html()
    for words in ("# done", "= to assimilate", "&gt; training", "! late", "x rejected", ". waits"):
        assert words in shown.html()


def test_figures_have_only_known_values() -> None:
    assert figures(status(staleness=2.0)) == {
        "accuracy, target 82.0%": "71.9%",
        "epoch done in": "5 min",
        "samples/s": "112",
        "staleness": "2.0 updates",
        "parameter servers": "2, 3 results wait",
    }
    assert figures(status(finished="done", epochs=0, units_per_s=0.0)) == {}
    assert "epoch done in" not in figures(status(units_per_s=0.0))


def test_many_units_are_cut_and_counted() -> None:
    crowd = draw_job(status(marks=MARKS[:1] * MAX_MARKS, rows=(10,) * (MAX_MARKS + 9)))
    for shown in (crowd.text(), crowd.html()):
        assert "and 9 more units" in shown
    assert len(crowd.html()) < 80_000


def test_a_finished_job_shows_its_reason_and_no_units() -> None:
    done = draw_job(status(finished="accuracy reached", marks=MARKS, fault="disk <full>"))
    assert "finished: accuracy reached" in done.text() and "#=>" not in done.text()
    assert "disk &lt;full&gt;" in done.html() and "#=&gt;" not in done.html()


def test_a_view_can_be_imported_first() -> None:
    subprocess.run([sys.executable, "-c", "import colab_swarm.notebook.units_view"], check=True)


def test_the_line_of_a_volunteer_has_job_state_and_units() -> None:
    assert volunteer_line(SNAPSHOT) == (
        "digits: training; epoch 3, accuracy 0.875 after the last; 12 units accepted, 1 refused"
    )


def test_the_text_has_a_bar_per_unit_in_hand_and_the_whole_contribution() -> None:
    assert draw_volunteer(SNAPSHOT).text().splitlines()[1:] == [
        "  [#####...............] epoch 3, subset 7: training 5 of 20 batches, loss 0.432, 12 s",
        "  [....................] epoch 3, subset 8: downloading, 0 s",
        "  contributed: 4,800 samples in 10 min; downloaded: 3.4 MB; uploaded: 1.2 MB",
        "  ⚠ last refusal: its deadline passed <b>",
    ]


def test_the_html_is_sound_and_tells_screen_readers_how_far_units_are() -> None:
    root = ElementTree.fromstring(draw_volunteer(SNAPSHOT).html())
    bars = root.findall(".//*[@role='img']")
    assert [bar[0].get("style") for bar in bars] == ["width:25.0%", "width:0.0%"]
    assert bars[0].get("aria-label", "").startswith("epoch 3, subset 7: training 5 of 20")


def test_texts_of_others_are_escaped() -> None:
    evil = "<script>x</script>\x1b[2J"
    shown = draw_volunteer(replace(SNAPSHOT, job=evil, state=evil, refusal=evil, fault="<script>"))
    assert "<script" not in shown.html()
    assert "\x1b" not in shown.text() + shown.html()


def test_a_fault_of_the_job_is_shown_at_its_end() -> None:
    fault = "x" * 9000 + "\nZeroDivisionError: division by zero"
    shown = draw_volunteer(replace(SNAPSHOT, over=True, fault=fault))
    assert shown.text().endswith("ZeroDivisionError: division by zero") and len(shown.text()) < 5000
    assert re.search(r"<pre[^>]*>x+\nZeroDivisionError: division by zero</pre>", shown.html())
