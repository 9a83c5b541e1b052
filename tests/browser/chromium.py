"""The browser that pages are tried in, and what is missing where there is none."""

import shutil
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
