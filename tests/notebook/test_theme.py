"""The style sheet of all views: readable in both themes, small, and of well-formed pieces."""

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.notebook import theme
from colab_swarm.notebook.theme import MAX_POINTS, Document, curve, ticks

TEXT_CONTRAST = 4.5
PAPERS, INKS = ("--paper", "--card"), ("--ink", *(f"--{hue}" for hue in theme.HUES))


def themes_in_use() -> list[dict[str, str]]:
    rules = re.findall(r"{([^{}]*)", theme.STYLE)
    found = [dict(re.findall(r"(--\w+):(#[0-9a-f]{3,6})", rule)) for rule in rules]
    base, *others = [colours for colours in found if colours]
    return [base, *({**base, **colours} for colours in others)]


def luminance(colour: str) -> float:
    """Relative, 0 to 1 (WCAG 2.2)."""
    digits = colour.removeprefix("#")
    digits = "".join(digit * 2 for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_every_ink_can_be_read_on_every_paper_in_every_theme() -> None:
    themes = themes_in_use()
    assert len(themes) == 3  # light, dark as the page says, dark as the browser says
    for colours, ink, paper in itertools.product(themes, INKS, PAPERS):
        assert contrast(colours[ink], colours[paper]) >= TEXT_CONTRAST, (ink, paper, colours[paper])
    assert themes[1] == themes[2]


def test_the_style_sheet_is_small_loads_nothing_and_no_rule_has_a_colour_of_its_own() -> None:
    assert len(theme.STYLE) < 2800 and not re.search(r"url\(|@import|<", theme.STYLE)
    rules = theme.STYLE.replace(theme.LIGHT, "").replace(theme.DARK, "")
    assert not re.search(r"#[0-9a-f]{3}|rgb|opacity", rules)


EVIL = "<script>x</script>\x1b[2J"


def a_document(words: str) -> Document:
    document = Document(words, words, label=words)
    document.warn(words)
    document.note(words, words, title="log")
    document.bar(0.5, words, title="part")
    document.figures({"speed": f"{words}\nsamples/s"})
    document.code([words])
    document.table(("peer", "steps"), [words], lambda one: (one, theme.mark("red", "✖", one)), what="peers")
    return document


def test_each_block_has_the_same_words_in_html_and_in_text_escaped_and_bounded() -> None:
    peace = a_document("peace")
    shown = " ".join(ElementTree.fromstring(peace.html().replace("<br>", "<br/>")).itertext())
    words = peace.text().replace("[##########..........]", "").replace("speed:", "speed").split()
    assert [word for word in words if word not in shown.split()] == []
    hostile = a_document(EVIL)
    assert "<script" not in hostile.html() and "\x1b" not in hostile.text() + hostile.html()
    assert len(hostile.text().splitlines()) == len(peace.text().splitlines())
    assert len(a_document("x" * 10_000).html()) < 20_000


def test_a_view_is_one_element_with_a_name_and_loads_nothing() -> None:
    view = ElementTree.fromstring(theme.Document("inside", label='the "swarm"').html())
    assert view.attrib == {"class": "cs-view", "role": "group", "aria-label": 'the "swarm"'}
    assert not re.search(r"<script|https?:|src=|url\(| on\w+=", a_document("peace").html())


def test_a_table_names_its_columns_and_rows() -> None:
    drawn = theme.table(["peer", "steps"], [["alice", "3"], ["bob", "4"]], numbers=[1], label="peers")
    head, body = ElementTree.fromstring(drawn)
    assert [cell.attrib["scope"] for cell in head.iter("th")] == ["col", "col"]
    assert [[cell.text for cell in row] for row in body] == [["alice", "3"], ["bob", "4"]]
    assert [cell.attrib["scope"] for cell in body.iter("th")] == ["row", "row"]
    assert [cell.attrib["class"] for cell in body.iter("td")] == ["n", "n"]


@pytest.mark.parametrize(
    ("part", "width"),
    [(0.25, "25.0%"), (7.0, "100.0%"), (-1.0, "0.0%"), (math.nan, "0.0%"), (math.inf, "100.0%")],
)
def test_a_bar_stays_within_its_place(part: float, width: str) -> None:
    drawn = ElementTree.fromstring(theme.bar(part, "64 of 256"))
    assert drawn.attrib["aria-label"] == "64 of 256"
    assert drawn[0].attrib["style"] == f"width:{width}"


def test_a_document_cuts_and_counts_rows_in_html_and_in_text() -> None:
    shown = theme.Document("peers", "many", label="peers")
    shown.table(("name", "step"), range(theme.MAX_ROWS + 7), lambda i: (f"<b>{i}", "3"), what="peers")
    rows = list(ElementTree.fromstring(shown.html()).iter("tr"))
    assert len(rows) == theme.MAX_ROWS + 1 and "<b>19" in "".join(rows[-1].itertext())
    assert all("… and 7 more peers" in drawn for drawn in (shown.html(), shown.text()))


def test_the_picture_has_the_curve_and_the_limit() -> None:
    drawn = curve([(0, 2.0), (900, 1.0)], limit=[(0, 4.0), (900, 4.0)])
    assert [element.tag for element in ElementTree.fromstring(drawn)].count("polyline") == 2
    assert "stroke-dasharray" in drawn and "1 at step 900" in drawn
    axes = [text.text for text in ElementTree.fromstring(drawn).iter("text")][:2]
    assert axes == ["loss", "global step"]


def test_fewer_than_two_points_give_no_picture_and_many_points_are_thinned() -> None:
    assert curve([]) == curve([(0, 1.0)]) == curve([(0, 1.0), (1, math.nan)]) == ""
    (line,) = ElementTree.fromstring(curve([(step, 1.0) for step in range(10_000)])).findall("polyline")
    assert len(line.attrib["points"].split()) <= MAX_POINTS + 1


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(st.integers(0, 10**7), numbers), max_size=30))
def test_any_history_can_be_drawn(history: list[tuple[int, float]]) -> None:
    svg = curve(sorted(history), limit=history[:5])
    if svg:
        ElementTree.fromstring(svg)
        assert "nan" not in svg and "inf" not in svg


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 8))
def test_ticks_are_a_few_and_within(low: float, width: float, count: int) -> None:
    found = ticks(low, low + width, count)
    assert len(found) <= count + 2 and all(low - 1e-6 <= one <= low + width + 1e-6 for one in found)
