"""The panel in classic Notebook with ipywidgets 7, Colab's generation."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Window, needs
from tests.browser.classic import ENVIRONMENT, Classic
from tests.notebooks.cells import code_cells
from tests.notebooks.kernel import NOTEBOOKS

absent = not (ENVIRONMENT / "installed").exists()
pytestmark = [*needs(), pytest.mark.skipif(absent, reason="make classic installs what is missing")]
KNOWN_COMPLAINTS = ("favicon",)


@pytest.fixture(scope="module")
def classic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Classic]:
    with Classic(tmp_path_factory.mktemp("classic")) as server:
        yield server


def test_friends_start_and_join_by_the_four_cells(classic: Classic, window: Window, artifacts: Path) -> None:
    cells = list(code_cells(NOTEBOOKS / "swarm.ipynb"))
    alice, bob = (classic.open(window, f"swarm-{name}", cells) for name in ("alice", "bob"))
    for friend in (alice, bob):
        friend.run(0)
        friend.run(1)
    alice.page.screenshot(path=artifacts / "connect.png")
    alice.connect("alice")
    alice.wait_output("others reach you")
    line = alice.invitation()
    bob.connect("bob", f'  "{line[:40]}\n{line[40:]}" ')  # as a chat program breaks it
    bob.wait_output("reached")
    for friend in (alice, bob):
        friend.start(2)
    for friend in (alice, bob):
        friend.wait_output("my-swarm: training, step")
    for friend in (alice, bob):
        friend.interrupt()
        friend.wait_end(2)
    alice.run(1)  # the cell again: the same peer, and no form
    assert alice.page.locator('button:has-text("Start / Join")').count() == 0
    for page in ("rounds", "map", "swarm"):
        alice.click(page)
        alice.page.locator(f'.cs-view[aria-label*="{page}"]').wait_for()
        alice.page.screenshot(path=artifacts / f"{page}.png")
    bob.run(3)
    alice.wait_output("bob is gone: the peer left")
    alice.click("Leave")
    alice.click("Click again")
    alice.page.locator("button", has_text="Left").wait_for()
    assert window.complaints_but(*KNOWN_COMPLAINTS) == []
