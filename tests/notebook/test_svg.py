"""Curves over steps."""

from __future__ import annotations

import math
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.notebook.svg import MAX_POINTS, curve, ticks


def test_the_picture_has_the_curve_and_the_limit() -> None:
    drawn = curve([(0, 2.0), (900, 1.0)], limit=[(0, 4.0), (900, 4.0)])
    kinds = [element.tag for element in ElementTree.fromstring(drawn)]
    assert kinds.count("polyline") == 2
    assert "stroke-dasharray" in drawn and "loss 1 at step 900" in drawn


def test_fewer_than_two_points_give_no_picture_and_many_points_are_thinned() -> None:
    assert curve([]) == curve([(0, 1.0)]) == curve([(0, 1.0), (1, math.nan)]) == ""
    (line,) = ElementTree.fromstring(curve([(step, 1.0) for step in range(10_000)])).findall("polyline")
    assert len(line.attrib["points"].split()) <= MAX_POINTS + 1


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(st.integers(0, 10**7), numbers), max_size=30), st.booleans())
def test_any_history_gives_a_picture_that_can_be_parsed(
    history: list[tuple[int, float]], from_zero: bool
) -> None:
    svg = curve(sorted(history), limit=history[:5], from_zero=from_zero)
    if svg:
        ElementTree.fromstring(svg)
        assert "nan" not in svg and "inf" not in svg


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 8))
def test_ticks_are_a_few_and_within(low: float, width: float, count: int) -> None:
    found = ticks(low, low + width, count)
    assert len(found) <= count + 2 and all(low - 1e-6 <= one <= low + width + 1e-6 for one in found)
