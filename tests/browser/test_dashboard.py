"""The backbone's dashboard in Chromium: it draws, keeps itself up to date, and runs nobody else's script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from colab_swarm.backbone.config import Dashboard
from colab_swarm.backbone.view import View
from colab_swarm.backbone.web import DashboardServer
from tests.backbone.views import EVIL, view
from tests.browser.site import Site
from tests.browser.test_jupyterlab import CHROMIUM, QUIET

MISSING = [] if find_spec("playwright") and CHROMIUM else ["playwright or chromium"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason="not installed here: playwright")]


async def serve(look: Callable[[], View]) -> DashboardServer:
    server = DashboardServer(look)
    await server.start(Dashboard(port=0))
    return server


@pytest.fixture
def site() -> Iterator[Site[View]]:
    site = Site(view(), serve)
    yield site
    site.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_draws_updates_itself_and_runs_no_script_of_a_peer(
    site: Site[View], tmp_path: Path, scheme: str
) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=QUIET)
        page = browser.new_page(viewport={"width": 800, "height": 1000}, color_scheme=scheme)
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.goto(site.server.url)
        page.screenshot(path=tmp_path / "dashboard.png", full_page=True)
        assert page.title() == "sahajbert" and EVIL[:20] in page.inner_text("#live")
        assert page.locator("svg polyline").count() == 2
        assert page.evaluate("document.documentElement.scrollWidth") <= 800

        site.shown = msgspec.structs.replace(view(steps=5000), run="later")
        page.locator("h1", has_text="later").wait_for(timeout=15_000)
        assert page.title() == "sahajbert" and page.locator("img").count() == 0
        assert [one for one in complaints if "favicon" not in one] == []

        site.close()
        page.wait_for_selector("#lost", state="visible", timeout=15_000)
        browser.close()
