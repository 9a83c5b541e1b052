"""The panel in classic Notebook with ipywidgets 7, Colab's generation."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Window, needs
from tests.browser.classic import ENVIRONMENT, Classic

absent = not (ENVIRONMENT / "installed").exists()
pytestmark = [*needs(), pytest.mark.skipif(absent, reason="make classic installs what is missing")]
CELLS = [
    'import colab_swarm as cs\nalice = cs.create("classic-run", peer_name="alice")',
    "alice.panel()",
    'bob = cs.join(alice.invite(), peer_name="bob")\nprint(bob)',
    "bob.leave()\nprint(alice)",
]
KNOWN_COMPLAINTS = ("favicon",)


@pytest.fixture(scope="module")
def classic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Classic]:
    with Classic(tmp_path_factory.mktemp("classic")) as server:
        yield server


def test_a_panel_repaints_turns_pages_and_leaves(classic: Classic, window: Window, artifacts: Path) -> None:
    notebook = classic.open(window, "panel", CELLS)
    notebook.run(0)
    notebook.run(1, says="classic-run: joined")
    notebook.run(2, says="1 peer linked")
    notebook.wait_output("is linked")
    notebook.page.screenshot(path=artifacts / "swarm.png")
    for page in ("rounds", "map", "swarm"):
        notebook.click(page)
        notebook.page.locator(f'.cs-view[aria-label*="{page}"]').wait_for()
        notebook.page.screenshot(path=artifacts / f"{page}.png")
    notebook.click("Leave")
    notebook.click("Click again")
    notebook.page.locator("button", has_text="Left").wait_for()
    notebook.run(3, says="Swarm(classic-run, alice, left)")
    assert window.complaints_but(*KNOWN_COMPLAINTS) == []
