"""How a volunteer sees its work."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

from colab_swarm.notebook.volunteer_view import draw, summary
from colab_swarm.workunits.client import UnitProgress, VolunteerSnapshot

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
    cache_hits=8,
    cache_misses=4,
)


def test_the_summary_has_job_state_and_units() -> None:
    assert summary(SNAPSHOT) == (
        "digits: training; epoch 3, accuracy 0.875 after the last; 12 units accepted, 1 refused"
    )


def test_the_text_has_a_bar_per_unit_in_hand_and_the_whole_contribution() -> None:
    lines = draw(SNAPSHOT).text().splitlines()
    assert lines[1:] == [
        "  [#####...............] epoch 3, subset 7: training 5 of 20 batches, loss 0.432, 12 s",
        "  [....................] epoch 3, subset 8: downloading, 0 s",
        "  contributed: 4,800 samples in 10 min; downloaded: 3.4 MB; uploaded: 1.2 MB; data found on disk: 8 of 12 "
        "times",
        "  ⚠ last refusal: its deadline passed <b>",
    ]


def test_the_html_is_sound_and_tells_screen_readers_how_far_units_are() -> None:
    root = ElementTree.fromstring(draw(SNAPSHOT).html())
    bars = root.findall(".//*[@role='img']")
    assert [bar[0].get("style") for bar in bars] == ["width:25.0%", "width:0.0%"]
    assert bars[0].get("aria-label", "").startswith("epoch 3, subset 7: training 5 of 20")


def test_texts_of_others_are_escaped() -> None:
    evil = "<script>x</script>\x1b[2J"
    snapshot = replace(SNAPSHOT, job=evil, state=evil, refusal=evil, fault="<script>")
    assert "<script" not in draw(snapshot).html()
    assert "\x1b" not in draw(snapshot).text() + draw(snapshot).html()


def test_a_fault_of_the_job_is_shown_at_its_end() -> None:
    snapshot = replace(SNAPSHOT, over=True, fault="x" * 9000 + "\nZeroDivisionError: division by zero")
    assert draw(snapshot).text().endswith("ZeroDivisionError: division by zero")
    assert len(draw(snapshot).text()) < 5000
    assert re.search(r"<pre[^>]*>x+\nZeroDivisionError: division by zero</pre>", draw(snapshot).html())
