"""Notebooks in a real JupyterLab: the form and its panel, a lesson that plays on its own."""

import re
from pathlib import Path

from tests.browser.chromium import Window, needs
from tests.browser.lab import Lab
from tests.notebooks.cells import code_cells
from tests.notebooks.kernel import NOTEBOOKS

pytestmark = needs("jupyterlab", "ipywidgets")
FORM = [
    'import colab_swarm as cs\nform = cs.connect(run="form-run")',
    'bob = cs.join(form.invite(), peer_name="bob", options=cs.NetworkOptions(lan=False))\nprint(bob)',
    "bob.leave()\nform.leave()",
]


def test_the_form_becomes_an_invitation_and_a_live_panel(lab: Lab, window: Window, artifacts: Path) -> None:
    alice = lab.open(window, "form", FORM)
    alice.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    alice.run(0)
    alice.connect("alice")
    alice.wait_output("form-run: joined, 1 peer")
    assert "waiting for the first other peer" in alice.output(0)
    alice.page.click('button:text-is("Copy")')
    alice.page.locator('button:text-is("Copied")').wait_for()
    copied = alice.page.evaluate("navigator.clipboard.readText()").strip()
    assert copied == alice.invitation() != ""
    alice.page.locator('.cs-view [aria-label="QR code of the invitation"]').wait_for()
    alice.run(1)
    alice.wait_output("form-run: joined, 2 peers")  # no click, and no cell, has refreshed it
    alice.page.screenshot(path=artifacts / "form.png")
    panel = alice.page.locator(".widget-vbox .widget-vbox").bounding_box()
    assert panel is not None and panel["height"] <= 600
    alice.run(2)
    assert window.complaints == []


def test_a_page_that_is_loaded_again_in_mid_training_has_the_line_of_the_cell(
    lab: Lab, window: Window, artifacts: Path
) -> None:
    alice = lab.open(window, "swarm", code_cells(NOTEBOOKS / "swarm.ipynb"))
    alice.run(0)
    alice.run(1)
    alice.connect("alice")
    alice.wait_output("others reach you")
    alice.start(2)
    line = re.compile(r"step [1-9]\d* of 1000: [\s\S]*colab-swarm status my-swarm --watch")
    alice.wait_output(line)
    alice.wait_output("my-swarm: training, step")
    alice.page.screenshot(path=artifacts / "training.png")
    alice.save()
    # the kernel is busy, and answers the page when the cell ends
    alice.page.reload()
    alice.wait_output(line)
    alice.page.screenshot(path=artifacts / "reloaded-in-training.png")


PLAY = [
    """
import torch
import colab_swarm as cs

def train(swarm):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = swarm.optimizer(sgd, target_batch_size=64)
    while True:
        loss = model(torch.rand(8, 8, 8)).square().mean()
        loss.backward()
        optimizer.step(samples=8, loss=loss.item())
""",
    "simulation = cs.simulate(4, samples_per_s=8)\nlesson = simulation.play(train, speed=5)\nlesson",
    "lesson.close()\nprint([fault.name for fault in simulation.network.fired], lesson)",
]


def test_a_peer_is_killed_and_brought_back(lab: Lab, window: Window, artifacts: Path) -> None:
    page = lab.open(window, "play", PLAY)
    page.run(0)
    page.run(1)
    page.wait_output("round 1: ")
    page.page.select_option(".widget-dropdown select", label="bob")
    page.click("Kill this peer")
    page.wait_output("bob crashes")
    page.page.screenshot(path=artifacts / "killed.png")
    page.click("Bring it back")
    page.wait_output("bob has joined")
    assert "['crash'] Lesson(4 peers at step" in page.run(2) and window.complaints == []
