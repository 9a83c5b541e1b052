"""The pages of a backbone and of a coordinator in Chromium: they draw, update and run nobody else's script."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colab_swarm.backbone import backbone
from colab_swarm.notebook import units_view
from colab_swarm.runtime import Runtime
from tests.backbone import views
from tests.browser.chromium import Window, needs
from tests.workunits import statuses

pytestmark = needs()
FIRST = {"sahajbert": views.view(), "digits-resnet": statuses.status()}
STATUS = statuses.status(epochs=7, name="later")
LATER = {"sahajbert": views.view(steps=5000, run="later"), "digits-resnet": STATUS}
EVIL = {"sahajbert": views.EVIL, "digits-resnet": statuses.EVIL}
PAGES: dict[str, Any] = {"sahajbert": backbone.status_page, "digits-resnet": units_view.status_page}


class Site:
    def __init__(self, name: str) -> None:
        self.name, self.shown = name, FIRST[name]
        self.page = PAGES[name](lambda: self.shown)
        Runtime.shared().call(self.page.start("127.0.0.1", 0))

    def close(self) -> None:
        Runtime.shared().call(self.page.close())


@pytest.fixture(params=FIRST)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    site = Site(request.param)
    yield site
    site.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.ordeal)])
def test_the_page_draws_updates_itself_and_runs_no_script_of_others(
    site: Site, browser: Any, artifacts: Path, scheme: str
) -> None:
    window = Window(browser, artifacts, color_scheme=scheme)
    page = window.new_page(width=800, height=1000)
    page.goto(site.page.url)
    page.screenshot(path=artifacts / "page.png", full_page=True)
    assert page.title() == site.name and EVIL[site.name][:20] in page.inner_text("#live")
    assert page.locator("svg").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 800
    site.shown = LATER[site.name]
    page.locator("h1", has_text="later").wait_for(timeout=15_000)
    assert page.title() == site.name and page.locator("img").count() == 0
    assert window.complaints_but("favicon") == []
    site.close()
    page.wait_for_selector("#lost", state="visible", timeout=15_000)
    window.close()
