"""The page behind an invitation in Chromium: it copies the line, and no request carries the secret."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colab_swarm.backbone.backbone import Backbone
from tests.backbone.test_join_page import SHOWN, served
from tests.browser.chromium import Window, needs

pytestmark = needs()


@pytest.fixture
def backbone(tmp_path: Path) -> Iterator[Backbone]:
    with served(tmp_path, "wss://run.example.org", dashboard=SHOWN) as backbone:
        yield backbone


def opened(window: Window, backbone: Backbone, path: str) -> tuple[Any, list[str]]:
    """Open a path of the peer's own port, as a proxy would; return the page and the list of its requests."""
    network = backbone.swarm.network
    assert network is not None
    page, asked = window.new_page(width=700, height=800), []

    def note(request: Any) -> None:
        asked.append(f"{request.url.partition('#')[0]} {request.post_data} {request.all_headers()}")

    page.on("request", note)
    page.goto(f"http://127.0.0.1:{network.node.port}{path}")
    return page, asked


def test_the_copied_lines_secret_stays_in_the_page(backbone: Backbone, browser: Any, artifacts: Path) -> None:
    window = Window(browser, artifacts, permissions=["clipboard-read", "clipboard-write"])
    code = backbone.invite.partition("#")[2]
    page, asked = opened(window, backbone, f"/join#{code}")
    assert page.title() == "Join my-run" and not page.locator("#cut").is_visible()
    page.click("#copy")
    page.locator("button", has_text="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.inner_text("#line") == page.url and copied.endswith(f"/join#{code}")
    page.locator("#live .cs-view").first.wait_for(timeout=15_000)
    page.screenshot(path=artifacts / "join.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    secret = code.rpartition(".")[2]
    assert any(one.startswith(page.url.replace("/join", "/live").partition("#")[0]) for one in asked)
    assert not [one for one in asked if secret[:20] in one]
    assert window.complaints_but("favicon") == []
    window.close()


def test_a_link_without_its_end_says_so(backbone: Backbone, window: Window) -> None:
    page, _ = opened(window, backbone, "/join")
    assert "copy the whole line again" in page.inner_text("#cut") and not page.locator("#whole").is_visible()
