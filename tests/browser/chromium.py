"""The browser that pages are tried in, and what is missing where there is none."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
ARTIFACTS = Path(__file__).parent / "artifacts"
"""Screenshots, and what scripts complained of: a folder for each test."""


def needs(*packages: str) -> list[pytest.MarkDecorator]:
    missing = [name for name in ("playwright", *packages) if find_spec(name) is None]
    missing += [] if CHROMIUM else ["chromium"]
    reason = f"not installed here: {', '.join(missing)}"
    return [pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=reason)]


@contextmanager
def browsing() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=QUIET)
        yield browser
        browser.close()


class Window:
    """Pages of the browser, and what their scripts complain of; ``look`` is for Playwright."""

    def __init__(self, browser: Any, artifacts: Path, **look: Any) -> None:
        self.complaints: list[str] = []
        self._artifacts = artifacts
        self._context = browser.new_context(**look)
        self._context.on("weberror", lambda caught: self.complaints.append(str(caught.error)))
        self._context.on("console", self._listen)

    def _listen(self, said: Any) -> None:
        if said.type == "error":
            self.complaints.append(f"{said.text} ({said.location.get('url', '')})")

    def new_page(self, **size: int) -> Any:
        page = self._context.new_page()
        if size:
            page.set_viewport_size(size)
        return page

    def complaints_but(self, *known: str) -> list[str]:
        return [one for one in self.complaints if not any(text in one for text in known)]

    def close(self) -> None:
        for number, page in enumerate(self._context.pages):
            page.screenshot(path=self._artifacts / f"end-{number}.png", full_page=True)
        (self._artifacts / "console.log").write_text("\n".join(self.complaints))
        self._context.close()


class Notebook:
    """A notebook in a page; each front-end has names of its own for the parts."""

    cell: str  # selectors
    output_area: str
    button: str
    first_s: float = 90.0  # time limit for what a cell shows, imports of torch on a busy machine included

    def __init__(self, page: Any) -> None:
        self.page = page

    def start(self, cell: int) -> None:
        """Run a cell and do not wait for its end."""
        raise NotImplementedError

    def wait_end(self, cell: int) -> None:
        raise NotImplementedError

    def run(self, cell: int, says: str = "") -> str:
        self.start(cell)
        output = self.finish(cell, says)
        assert "Traceback (most recent call last)" not in output, output
        return output

    def finish(self, cell: int, says: str = "") -> str:
        """Wait for a cell's end, and for ``says``: outputs are drawn a moment later. Returns all that stands there."""
        self.wait_end(cell)
        if says:
            here = self.page.locator(f"{self.cell} >> nth={cell}")
            here.filter(has_text=re.compile(f"{re.escape(says)}|Traceback")).first.wait_for(timeout=10_000)
        return self.output(cell)

    def output(self, cell: int) -> str:
        outputs = self.page.locator(f"{self.cell} >> nth={cell} >> {self.output_area}")
        return "\n".join(outputs.all_inner_texts())

    def wait_output(self, text: str | re.Pattern[str]) -> None:
        from playwright.sync_api import TimeoutError as NotYet

        outputs = self.page.locator(self.output_area)
        try:
            outputs.filter(has_text=text).first.wait_for(timeout=1000 * self.first_s)
        except NotYet:
            raise AssertionError(f"{text} is not in {outputs.all_inner_texts()}") from None

    def click(self, button: str) -> None:
        self.page.click(f'{self.button}:has-text("{button}")')

    def connect(self, name: str, invitation: str = "") -> None:
        """Fill in the form of `cs.connect`, and press its button."""
        for field, value in {"Invitation": invitation, "Your name": name}.items():
            box = self.page.locator(".widget-text", has_text=field).locator("input")
            box.fill(value)
            box.blur()
        self.page.locator('.widget-checkbox input[type="checkbox"]').first.check()
        self.click("Start / Join")

    def invitation(self) -> str:
        """The one that a started run shows."""
        text: str = self.page.locator(".cs-view code", has_text="swarm://").inner_text()
        return text.strip()
