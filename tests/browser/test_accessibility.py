"""Views and panels for those who see little or nothing: contrast in both themes, names of controls, narrow pages."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colab_swarm.notebook import lessons, meters, units_view, views
from colab_swarm.snapshot import ContributionRow, PeerRow, SessionTime
from tests.browser import looks
from tests.browser.chromium import Window, needs
from tests.browser.lab import Lab
from tests.notebook import test_lesson, test_meters, test_rounds
from tests.notebook.test_units_view import MARKS
from tests.notebook.test_units_view import SNAPSHOT as VOLUNTEER
from tests.swarm import test_checks
from tests.workunits.statuses import status

pytestmark = needs("jupyterlab", "ipywidgets")
PAPER = {"light": "#fff", "dark": "#111"}
"""Of the page around a view; a view brings its own."""
NARROW = 800
FRAME = 440
"""What JupyterLab has around a cell's output, in pixels."""
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
TRAINED = """import torch, colab_swarm as cs
swarm = cs.create("accessible", peer_name="alice")
bob = cs.join(swarm.invite(), peer_name="bob")
model = torch.nn.Linear(500, 500)
optimizer = swarm.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), target_batch_size=16)
while optimizer.global_step < 9:
    loss = model(torch.randn(8, 500)).square().mean()
    loss.backward()
    optimizer.step(samples=8, loss=loss.item())
swarm.panel()"""
PANEL = ".jp-OutputArea-output .widget-vbox"


def check_looks(page: Any, selector: str) -> None:
    found = looks.texts(page, selector)
    assert len(found) >= 5, "there is hardly anything to see"
    assert looks.pale(found) == [] and looks.overlapping(found) == []
    assert looks.sticking_out(page, selector) == []


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
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_readable_in_both_themes(window: Window, artifacts: Path, name: str, theme: str) -> None:
    page = window.new_page(width=NARROW, height=2000)
    is_light = str(theme == "light").lower()
    page.set_content(
        f'<body data-jp-theme-light="{is_light}" style="background:{PAPER[theme]}">{VIEWS[name]}</body>'
    )
    page.screenshot(path=artifacts / "view.png", full_page=True)
    check_looks(page, ".cs-view")
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW


@pytest.fixture(params=["Light", pytest.param("Dark", marks=pytest.mark.ordeal)])
def themed(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Lab]:
    lab.choose("apputils-extension:themes", {"theme": f"JupyterLab {request.param}"})
    yield lab
    lab.choose("apputils-extension:themes", {})


def test_a_live_panel_can_be_read_and_its_controls_have_names(
    themed: Lab, window: Window, artifacts: Path
) -> None:
    notebook = themed.open(window, "accessible", [TRAINED])
    notebook.run(0)
    notebook.page.set_viewport_size({"width": NARROW + FRAME, "height": 2000})
    for page in ("rounds", "map", "swarm"):
        notebook.click(page)
        notebook.page.locator(f'.cs-view[aria-label*="{page}"]').wait_for()
        notebook.page.screenshot(path=artifacts / f"{page}.png")
        check_looks(notebook.page, PANEL)
        height = notebook.page.locator(PANEL).first.bounding_box()["height"]
        assert height <= 600, "its controls and its view do not fit a screen"
        names = looks.controls(notebook.page, PANEL)
        assert {role for role, _ in names} >= {"button"}
        nameless = {role for role, name in names if not name.strip()}
        assert nameless <= {"slider"}  # ipywidgets gives its handle no name; its label stands beside it
        sliders = notebook.page.locator(f"{PANEL} .widget-slider:visible")
        assert all(sliders.locator(".widget-label").all_inner_texts())
    assert window.complaints == []
