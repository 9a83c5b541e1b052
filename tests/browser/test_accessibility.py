"""Views for those who see little or nothing: contrast in both themes, narrow pages."""

import dataclasses
from pathlib import Path

import pytest

from colab_swarm.notebook import lessons, meters, units_view, views
from colab_swarm.snapshot import ContributionRow, PeerRow, SessionTime
from tests.browser import looks
from tests.browser.chromium import Window, needs
from tests.notebook import test_lesson, test_meters, test_rounds
from tests.notebook.test_units_view import MARKS
from tests.notebook.test_units_view import SNAPSHOT as VOLUNTEER
from tests.swarm import test_checks
from tests.workunits.statuses import status

pytestmark = needs()
PAPER = {"light": "#fff", "dark": "#111"}
"""Of the page around a view; a view brings its own."""
NARROW = 800
CROWD = tuple(
    PeerRow(
        name=f"volunteer-with-a-rather-long-name-{number}",
        id=f"{number:08x}",
        role="trainer" if number % 3 else "catching up",
        step=1200 + number,
        samples_per_s=1234.5 * number,
        samples=77.0,
        reachable=(True, False, None)[number % 3],
        me=number == 0,
        rtt_s=0.01 * number,
        connected="relayed by 00000001" if number % 4 == 2 else "direct",
        upload_bps=1e7 * number,
        download_bps=1e8 * number,
    )
    for number in range(14)
)
SWARM = dataclasses.replace(
    test_rounds.TOLD,
    peers=CROWD,
    loss_history=tuple((10 * step, 11.1 / (1 + step) + 1.5) for step in range(120)),
    log=tuple(f"volunteer-{number} is gone: its connection ended without a farewell" for number in range(8)),
    eta_s=75.0,
    last_share=0.125,
    leaderboard=tuple(ContributionRow(peer.name, peer.id, 1e6, 5e9, peer.me) for peer in CROWD[:9]),
    session=SessionTime("Colab", 11_400.0, 43_200.0, 42_600.0),
    paused=True,
)
VIEWS = {
    "swarm": views.draw(SWARM).html(),
    "rounds": views.draw_rounds(SWARM).html(),
    "map": views.draw_map(SWARM).html(),
    "experts": meters.draw_experts(test_meters.SNAPSHOT).html(),
    "experts-full": meters.draw_experts(test_meters.full(16, 16, share=0.004)).html(),
    "job": units_view.draw_job(status(marks=MARKS)).html(),
    "volunteer": units_view.draw_volunteer(VOLUNTEER).html(),
    "consistency": meters.draw_elastic(test_meters.elastic(0.2, 0.4, 1.3)).html(),
    "doctor": test_checks.html(test_checks.GOOD, test_checks.LOOK, test_checks.STOP),
    "lesson": lessons.draw(test_lesson.LESSON_NOW).html(),
}


BAD = """<body><div class="bad" style="background:#222;width:300px">
<p style="color:#555">pale</p> <p style="color:#eee">clear</p> <p style="width:400px">wide</p> <button></button>
<svg width="200" height="40"><rect width="200" height="40" fill="#eee"/><text y="20" fill="#eee">hidden</text>
<text x="90" y="20">one</text><text x="92" y="22">other</text></svg></div></body>"""


def test_the_script_sees_what_is_wrong(window: Window) -> None:
    page = window.new_page(width=NARROW, height=600)
    page.set_content(BAD)
    found = looks.texts(page, ".bad")
    assert [text.partition(":")[0] for text in looks.pale(found)] == ["pale", "wide", "hidden"]
    assert looks.overlapping(found) == ["one / other"]
    assert len(looks.sticking_out(page, ".bad")) == 1
    assert looks.controls(page, ".bad") == [("button", "")]


@pytest.mark.parametrize("theme", PAPER)
def test_views_are_readable_in_both_themes(window: Window, artifacts: Path, theme: str) -> None:
    page = window.new_page(width=NARROW, height=1000)
    is_light = str(theme == "light").lower()
    for name, view in VIEWS.items():
        page.set_content(
            f'<body data-jp-theme-light="{is_light}" style="background:{PAPER[theme]}">{view}</body>'
        )
        page.screenshot(path=artifacts / f"{name}.png", full_page=True)
        looks.check(page, ".cs-view")
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW, name
