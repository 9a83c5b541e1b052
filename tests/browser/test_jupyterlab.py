"""Notebooks in a real JupyterLab: joining by one pasted line, the panel, interrupts, leaving, restarting; and ours."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.browser.chromium import Window, needs
from tests.browser.lab import KNOWN_COMPLAINTS, Lab
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
    """The processes below the server: one for each kernel, if peers start none."""
    return set(psutil.Process(lab.process.pid).children(recursive=True))


def test_two_notebooks_meet_are_interrupted_and_leave(lab: Lab, window: Window, artifacts: Path) -> None:
    alice = lab.open(window, "alice", ALICE)
    invite = alice.run(0).strip()
    assert "lab-run: joined, 1 peer" in alice.run(1)

    bob = lab.open(window, "bob", [cell.format(invite=invite) for cell in BOB])
    assert "lab-run: joined, 2 peers" in bob.run(0)
    bob.page.screenshot(path=artifacts / "bob.png")
    alice.page.click(".widget-play button")
    alice.wait_output("lab-run: joined, 2 peers")  # the play button repaints the panel

    assert "ready" in alice.run(2)
    for cell, says in ((3, "waiting"), (4, "watching")):
        alice.start(cell)
        alice.wait_output(says)
        alice.interrupt()
        alice.finish(cell)
    assert "Stopped watching; the peer goes on" in alice.output(4)
    assert "1 peer linked" in alice.run(5)
    alice.page.screenshot(path=artifacts / "alice.png")

    alice.click("Leave")
    alice.wait_button("Left")
    assert "Swarm(lab-run, alice, left)" in alice.run(5)
    assert "alone" in bob.run(1)

    before = kernels(lab)
    assert len(before) == 2
    alice.restart()
    bob.restart()
    _, alive = psutil.wait_procs(before, timeout=20)
    assert not alive
    assert window.complaints_but(*KNOWN_COMPLAINTS) == []


def test_the_line_that_the_organizer_shows_is_all_that_the_join_notebook_wants(
    lab: Lab, window: Window, artifacts: Path
) -> None:
    organizer = lab.open_ours(window, NOTEBOOKS / "organizer.ipynb")
    for cell in range(5):
        organizer.run(cell)
    line = organizer.page.locator(".jp-OutputArea code", has_text="https://").inner_text().strip()
    form = {"MY_NAME": "carol", "I_HAVE_READ_THE_TERMS": True, "MICRO_BATCH": 8, "MINUTES": 0.2}
    carol = lab.open_ours(window, NOTEBOOKS / "join_colab.ipynb", INVITATION=line, **form)
    carol.run(0)
    assert "Swarm(my-first-swarm, carol, 1 peer linked)" in carol.run(1)
    assert "'target_batch_size': 256" in carol.run(2)
    assert "prediction" in carol.run(3)
    assert "from step 0" in carol.run(4)
    carol.start(5)
    carol.wait_output("my-first-swarm: training, step 1")
    carol.finish(5)
    for cell in (5, 6, 7):
        organizer.run(cell)
    assert "2 peers" in organizer.output(6)
    carol.page.screenshot(path=artifacts / "join.png")
    organizer.page.screenshot(path=artifacts / "organizer.png")
    carol.run(6)
    assert window.complaints_but(*KNOWN_COMPLAINTS) == []
