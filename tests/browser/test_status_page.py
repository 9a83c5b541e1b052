"""The coordinator's page in Chromium: it draws, keeps itself up to date, and runs nobody else's script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from colab_swarm.notebook.page import StatusPage
from colab_swarm.notebook.units_view import status_page
from colab_swarm.workunits.state import JobStatus
from tests.browser.chromium import Window, needs
from tests.browser.site import Site
from tests.workunits.statuses import EVIL, status

pytestmark = needs()


async def serve(look: Callable[[], JobStatus]) -> StatusPage[JobStatus]:
    page = status_page(look)
    await page.start("127.0.0.1", 0)
    return page


@pytest.fixture
def site() -> Iterator[Site[JobStatus]]:
    site = Site(status(), serve)
    yield site
    site.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.ordeal)])
def test_the_page_draws_updates_itself_and_runs_no_script_of_a_volunteer(
    site: Site[JobStatus], browser: Any, artifacts: Path, scheme: str
) -> None:
    window = Window(browser, artifacts, color_scheme=scheme)
    page = window.new_page(width=800, height=1000)
    page.goto(site.server.url)
    page.screenshot(path=artifacts / "status.png", full_page=True)
    assert page.title() == "digits-resnet" and EVIL[:20] in page.inner_text("#live")
    assert page.locator("svg polygon").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 800

    site.shown = status(epochs=7, name="later")
    page.locator("h1", has_text="later").wait_for(timeout=15_000)
    assert page.title() == "digits-resnet" and page.locator("img").count() == 0
    assert window.complaints_but("favicon") == []

    site.close()
    page.wait_for_selector("#lost", state="visible", timeout=15_000)
    window.close()
