"""A browser for a module, a window for a test; screenshots stay in ``artifacts``, named after the test."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import ARTIFACTS, Window, browsing
from tests.browser.lab import Lab


@pytest.fixture
def artifacts(request: pytest.FixtureRequest) -> Path:
    """A folder that is empty when the test begins and stays when it ends."""
    folder = ARTIFACTS / re.sub(r"[^\w-]+", "_", request.node.name).strip("_")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """No longer than a module: while Playwright runs, its thread takes no `asyncio.run`."""
    with browsing() as browser:
        yield browser


@pytest.fixture
def window(browser: Any, artifacts: Path) -> Iterator[Window]:
    window = Window(browser, artifacts)
    yield window
    window.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def lab(server: Lab, artifacts: Path) -> Iterator[Lab]:
    yield server
    server.end_kernels()
    (artifacts / "server.log").write_bytes(server.log.read_bytes())
