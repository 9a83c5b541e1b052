from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.notebook.checks import WIDTH, Check, Light, draw, summary
from tests.notebook.test_views import parsed

GOOD = Check("disk", Light.GREEN, "50.0 GB free here")
LOOK = Check("bandwidth", Light.YELLOW, "1 Mbit/s up: slow", "use a cable")
STOP = Check("versions", Light.RED, "torch 2.8 is older than 2.9", 'pip install -U "torch>=2.9"')


def test_text_shows_each_light_with_its_fix() -> None:
    assert draw([GOOD, LOOK, STOP]).text().splitlines() == [
        "fix the problems before you train: 1 ✔ good, 1 ▲ warning, 1 ✖ problem",
        " ✔ disk           50.0 GB free here",
        " ▲ bandwidth      1 Mbit/s up: slow",
        "                  → use a cable",
        " ✖ versions       torch 2.8 is older than 2.9",
        '                  → pip install -U "torch>=2.9"',
    ]


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ([GOOD], "ready to train: 1 ✔ good"),
        ([GOOD, LOOK], "ready to train, with warnings: 1 ✔ good, 1 ▲ warning"),
        ([STOP], "fix the problems before you train: 1 ✖ problem"),
    ],
)
def test_the_worst_light_decides(checks: list[Check], verdict: str) -> None:
    assert summary(checks) == verdict


def test_the_html_has_symbols_and_words_and_loads_nothing() -> None:
    page = draw([GOOD, LOOK, STOP]).html()
    text = " ".join(parsed(page).itertext())
    assert all(
        words in text for words in ("✔", "▲", "✖", "50.0 GB", "use a cable", 'pip install -U "torch>=2.9"')
    )
    marks = [span for span in parsed(page).iter("span") if span.text and span.text[0] in "✔▲✖"]
    assert [mark.text for mark in marks] == ["✔ good", "▲ warning", "✖ problem"]
    assert not re.search(r"<script|https?:|src=|url\(| on\w+=", page)


def test_the_name_of_a_check_stays_on_its_line() -> None:
    names = [name.attrib["style"] for name in parsed(draw([GOOD]).html()).iter("b") if name.text == "disk"]
    assert names == ["white-space:nowrap"]


def test_a_long_text_is_wrapped_under_its_beginning() -> None:
    lines = draw([Check("compute", Light.GREEN, "word " * 60)]).text().splitlines()
    assert len(lines) > 3
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[2].startswith(" " * 18 + "word")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80) | st.sampled_from(["<script>alert(1)</script>", '"><img src=x>', "a\x1b[2Jb\n"]))
def test_texts_are_escaped(words: str) -> None:
    hostile = [Check(words, Light.RED, words, words or "x")]
    usual = {element.tag for element in parsed(draw([STOP]).html()).iter()}
    assert {element.tag for element in parsed(draw(hostile).html()).iter()} <= usual
    assert "\x1b" not in draw(hostile).text()
