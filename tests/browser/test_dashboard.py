"""The backbone's dashboard in Chromium: it draws, keeps itself up to date, and runs nobody else's script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from colab_swarm.backbone.backbone import status_page
from colab_swarm.notebook.page import StatusPage
from colab_swarm.snapshot import SwarmSnapshot
from tests.backbone.views import EVIL, view
from tests.browser.chromium import Window, needs
from tests.browser.site import Site

pytestmark = needs()
View: TypeAlias = tuple[SwarmSnapshot, ...]


async def serve(look: Callable[[], View]) -> StatusPage[View]:
    page = status_page(look)
    await page.start("127.0.0.1", 0)
    return page


@pytest.fixture
def site() -> Iterator[Site[View]]:
    site = Site(view(), serve)
    yield site
    site.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.ordeal)])
def test_the_page_draws_updates_itself_and_runs_no_script_of_a_peer(
    site: Site[View], browser: Any, artifacts: Path, scheme: str
) -> None:
    window = Window(browser, artifacts, color_scheme=scheme)
    page = window.new_page(width=800, height=1000)
    page.goto(site.server.url)
    page.screenshot(path=artifacts / "dashboard.png", full_page=True)
    assert page.title() == "sahajbert" and EVIL[:20] in page.inner_text("#live")
    assert page.locator("svg polyline").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 800

    site.shown = view(steps=5000, run="later")
    page.locator("h1", has_text="later").wait_for(timeout=15_000)
    assert page.title() == "sahajbert" and page.locator("img").count() == 0
    assert window.complaints_but("favicon") == []

    site.close()
    page.wait_for_selector("#lost", state="visible", timeout=15_000)
    window.close()
