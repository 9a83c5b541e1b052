"""Two people with a copy of `notebooks/swarm.ipynb` each: one starts a run, the other joins it."""

from pathlib import Path

from tests.browser.classic import ClassicNotebook
from tests.browser.lab import Notebook


def connect(alice: Notebook | ClassicNotebook, bob: Notebook | ClassicNotebook, artifacts: Path) -> None:
    """Run the first two cells of both and fill in the forms; bob gets the invitation as a chat program breaks it."""
    for friend in (alice, bob):
        friend.run(0)
        friend.run(1)
    alice.fill("Your name", "alice")
    alice.tick_first_box()
    alice.page.screenshot(path=artifacts / "connect.png")
    alice.click("Start / Join")
    alice.wait_output("others reach you")
    line = alice.page.locator(".cs-view code", has_text="swarm://").inner_text().strip()
    bob.fill("Invitation", f'  "{line[:40]}\n{line[40:]}" ')
    bob.fill("Your name", "bob")
    bob.tick_first_box()
    bob.click("Start / Join")
    bob.wait_output("reached")
    alice.page.screenshot(path=artifacts / "started.png")
