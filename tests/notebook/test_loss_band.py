"""The run's loss beside the published one's."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.notebook.loss_band import (
    judge,
    reference_for,
    render_html,
    render_svg,
    render_text,
    sahajbert,
    ticks,
)


def published(last: int) -> list[tuple[int, float]]:
    """A run that goes exactly as sahajBERT did."""
    return [(step, sahajbert().loss(step)) for step in range(0, last + 1, 10)]


def test_the_published_history_is_shipped() -> None:
    history = sahajbert().history
    assert history[0] == (29, 11.132) and history[-1] == (19519, 1.999) and len(history) == 17
    assert sahajbert().loss(989) == 10.078 and sahajbert().loss(0) == 11.132


@pytest.mark.parametrize("last", [0, 10, 400])
def test_a_flat_beginning_is_called_normal(last: int) -> None:
    verdict = judge(published(last), sahajbert())
    assert "flat until about step 500 is normal during warm-up" in verdict.text and not verdict.warning


@pytest.mark.parametrize("last", [1000, 2000, 4000, 6000, 12000, 19510])
def test_a_run_like_the_published_one_is_as_expected_all_the_way(last: int) -> None:
    verdict = judge(published(last), sahajbert())
    assert "is as expected: sahajBERT had" in verdict.text and not verdict.warning


def test_a_run_that_stays_flat_after_warm_up_is_warned_about() -> None:
    verdict = judge([(step, 11.05) for step in range(0, 3000, 100)], sahajbert())
    assert verdict.warning and "higher than expected" in verdict.text and "learning rate" in verdict.text


def test_one_bad_batch_is_no_warning() -> None:
    assert not judge([*published(1500), (1510, 12.0)], sahajbert()).warning


def test_a_loss_that_is_not_finite_is_warned_about() -> None:
    assert judge([(3, math.nan)], sahajbert()).warning
    assert judge([], sahajbert()).text == "no trainer has told a loss yet"


def test_after_the_end_of_the_published_history_nothing_is_claimed() -> None:
    verdict = judge([*published(19500), (30000, 5.0)], sahajbert())
    assert "ends at step 19,519" in verdict.text and not verdict.warning


def test_a_run_of_another_kind_has_no_band() -> None:
    other = [(0, 6.9), (10, 6.5)]
    assert reference_for(other) is None and render_text(other) == render_html(other) == ""
    assert reference_for([]) is None
    assert reference_for(published(100)) is sahajbert() and "normal" in render_html(published(100))


def test_the_picture_has_the_curve_over_the_band() -> None:
    svg = ElementTree.fromstring(render_svg(published(3000), sahajbert(), spread=[(0, 10, 11), (900, 9, 10)]))
    kinds = [element.tag for element in svg]
    assert kinds.count("polygon") == 2 and kinds.index("polyline") > kinds.index("polygon")


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(st.integers(0, 10**7), numbers), max_size=30), st.booleans())
def test_any_history_gives_a_picture_that_can_be_parsed(
    history: list[tuple[int, float]], banded: bool
) -> None:
    history = sorted(history)
    svg = render_svg(history, sahajbert() if banded else None)
    if svg:
        ElementTree.fromstring(svg)
        assert "nan" not in svg and "inf" not in svg
    judge(history, sahajbert())


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 8))
def test_ticks_are_a_few_and_within(low: float, width: float, count: int) -> None:
    found = ticks(low, low + width, count)
    assert len(found) <= count + 2 and all(low - 1e-6 <= one <= low + width + 1e-6 for one in found)
