"""Notebooks in a real JupyterLab: joining by one pasted line, the panel, interrupts, leaving, restarting; and ours."""

from pathlib import Path

import psutil
import pytest

from tests.browser.chromium import Window, needs
from tests.browser.lab import Lab
from tests.notebooks.kernel import NOTEBOOKS

pytestmark = needs("jupyterlab", "ipywidgets")
ALICE = [
    'import colab_swarm as cs\nswarm = cs.create("lab-run", peer_name="alice")\nprint(swarm.invite())',
    "swarm.panel()",
    "import torch\n"
    "sgd = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)\n"
    "optimizer = swarm.optimizer(sgd, target_batch_size=8)\n"
    'print("ready")',
    'print("waiting")\noptimizer.wait_step()',
    'print("watching")\nswarm.watch()',
    "print(swarm, optimizer)",
]
BOB = [
    "import colab_swarm as cs\nswarm = cs.join({invite!r})\nswarm",
    "import time\nwhile '0 peers' not in repr(swarm):\n    time.sleep(0.1)\nprint('alone')",
]


def kernels(lab: Lab) -> set[psutil.Process]:
    return set(psutil.Process(lab.process.pid).children(recursive=True))


@pytest.mark.ordeal
def test_two_notebooks_meet_are_interrupted_and_leave(lab: Lab, window: Window, artifacts: Path) -> None:
    alice = lab.open(window, "alice", ALICE)
    invite = alice.run(0).strip()
    alice.run(1, says="lab-run: joined, 1 peer")
    bob = lab.open(window, "bob", [cell.format(invite=invite) for cell in BOB])
    bob.run(0, says="lab-run: joined, 2 peers")
    bob.page.screenshot(path=artifacts / "bob.png")
    alice.page.click(".widget-play button")
    alice.wait_output("lab-run: joined, 2 peers")  # the play button repaints the panel
    alice.run(2, says="ready")
    for cell, says in ((3, "waiting"), (4, "watching")):
        alice.start(cell)
        alice.wait_output(says)
        alice.interrupt()
        alice.finish(cell)
    assert "Stopped watching; the peer continues" in alice.output(4)
    alice.run(5, says="1 peer linked")
    alice.page.screenshot(path=artifacts / "alice.png")
    alice.click("Leave")
    alice.click("Click again")
    alice.wait_button("Left")
    alice.run(5, says="Swarm(lab-run, alice, left)")
    bob.run(1, says="alone")
    before = kernels(lab)
    assert len(before) == 2
    alice.restart()
    bob.restart()
    _, alive = psutil.wait_procs(before, timeout=20)
    assert not alive and window.complaints == []


@pytest.mark.ordeal
def test_the_line_that_the_organizer_shows_is_all_that_the_join_notebook_wants(
    lab: Lab, window: Window, artifacts: Path
) -> None:
    organizer = lab.open_ours(window, NOTEBOOKS / "organizer.ipynb")
    for cell in range(5):
        organizer.run(cell)
    line = organizer.page.locator(".jp-OutputArea code", has_text="https://").inner_text().strip()
    form = {"MY_NAME": "carol", "I_HAVE_READ_THE_TERMS": True, "MICRO_BATCH": 8, "MINUTES": 0.2}
    carol = lab.open_ours(window, NOTEBOOKS / "join_colab.ipynb", INVITATION=line, **form)
    for cell in range(2):
        carol.run(cell)
    carol.run(2, says="Swarm(my-first-swarm, carol, 1 peer linked)")
    carol.run(3, says="'target_batch_size': 256")
    carol.run(4, says="prediction")
    carol.run(5, says="from step 0")
    carol.start(6)
    carol.wait_output("my-first-swarm: training, step 1")
    carol.finish(6)
    organizer.run(7, says="2 peers")
    organizer.run(8)
    carol.page.screenshot(path=artifacts / "join.png")
    organizer.page.screenshot(path=artifacts / "organizer.png")
    carol.run(10)
    assert window.complaints == []
