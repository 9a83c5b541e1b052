from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.snapshot import PeerRow, SwarmSnapshot
from colab_swarm.widgets.render import MAX_ROWS, render_html, render_text, summary

ALICE = PeerRow("alice", "a11ce000", "trainer", 12, 20.0, 64.0, reachable=True, me=True)
BOB = PeerRow("bob", "b0b00000", "catching up", 9, 0.0, 0.0, reachable=False, me=False)
SNAPSHOT = SwarmSnapshot(
    run="demo",
    me="alice",
    reached="accepts connections",
    state="training",
    peers=(ALICE, BOB),
    step=12,
    samples_per_s=20.0,
    target_batch_size=256.0,
    accumulated=64.0,
    loss_history=((1, 8.25), (6, 7.0), (12, 6.5)),
    sent_bytes=1_234_567,
    received_bytes=999,
    uptime_s=3_725.0,
    log=("bob joined",),
)


def parsed(markup: str) -> ElementTree.Element:
    return ElementTree.fromstring(markup.replace("<br>", "<br/>"))


def test_text_shows_the_facts_line_by_line() -> None:
    assert render_text(SNAPSHOT).splitlines() == [
        "alice: accepts connections, sent 1.23 MB, received 999 B, up 1 h 02 min",
        "demo: training, step 12, 20.0 samples/s from 1 of 2 peers, "
        "64 of 256 samples for the next step, loss 6.500 (first 8.250)",
        "  peer        id        role         step  samples/s  samples  reachable",
        "  alice (me)  a11ce000  trainer      12    20.0       64       yes",
        "  bob         b0b00000  catching up  9     0.0        0        outgoing only",
        "  bob joined",
    ]


def test_html_shows_the_same_facts_without_script_or_outside_resource() -> None:
    page = render_html(SNAPSHOT)
    text = " ".join(parsed(page).itertext())
    assert all(
        cell in text for cell in (summary(SNAPSHOT), "b0b00000", "outgoing only", "bob joined", "step 12")
    )
    assert not re.search(r"<script|https?:|src=|url\(| on\w+=", page)
    progress = parsed(page).find("progress")
    assert progress is not None
    assert progress.attrib == {"value": "64", "max": "256"}


@settings(max_examples=60, deadline=None)
@given(
    st.text(max_size=60)
    | st.sampled_from(["<script>alert(1)</script>", '"><img src=x>', "&lt;", "a\x1b[2Jb\n"])
)
def test_a_strangers_words_stay_words(words: str) -> None:
    bob = dataclasses.replace(BOB, name=words, role=words)
    hostile = dataclasses.replace(
        SNAPSHOT, run=words, me=words, peers=(ALICE, bob), log=(words,), state=words
    )
    usual = {element.tag for element in parsed(render_html(SNAPSHOT)).iter()}
    assert {element.tag for element in parsed(render_html(hostile)).iter()} <= usual
    assert len(render_text(hostile).splitlines()) == len(render_text(SNAPSHOT).splitlines())
    assert "\x1b" not in render_text(hostile)


def test_a_crowd_is_cut_short_and_counted() -> None:
    crowd = dataclasses.replace(SNAPSHOT, peers=(ALICE, *[BOB] * 100))
    assert "… and 81 more peers" in render_text(crowd)
    assert len(list(parsed(render_html(crowd)).iter("tr"))) == MAX_ROWS + 1


def test_before_training_there_is_no_progress_and_no_loss() -> None:
    fresh = dataclasses.replace(SNAPSHOT, target_batch_size=0.0, loss_history=(), state="joined")
    assert summary(fresh) == "demo: joined, 2 peers"
    assert "<progress" not in render_html(fresh)
