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
    for friend in (alice, bob):
        friend.run(3)
    bob.page.screenshot(path=artifacts / "left.png")
    assert window.complaints_but(*KNOWN_COMPLAINTS) == []
