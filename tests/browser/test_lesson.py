"""The first tutorial in JupyterLab; and a lesson whose swarm lives while no cell runs."""

from pathlib import Path

import pytest

from colab_swarm.bench.overhead import code_cells
from tests.browser.chromium import Window, needs
from tests.browser.lab import CELL, Lab
from tests.notebooks.regenerate import TUTORIALS

pytestmark = needs("jupyterlab", "ipywidgets")


@pytest.mark.ordeal
def test_the_first_tutorial_runs_from_top_to_bottom(lab: Lab, window: Window, artifacts: Path) -> None:
    lesson = lab.open_ours(window, TUTORIALS[0])
    outputs = []
    for number in range(len(code_cells(TUTORIALS[0]))):
        outputs.append(lesson.run(number))
        lesson.page.locator(f"{CELL} >> nth={number}").screenshot(path=artifacts / f"{number + 1:02}.png")
    assert "Swarm(first-swarm, alice, left)" in "\n".join(outputs) and window.complaints == []


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
    "lesson.stop()\nprint([fault.name for fault in simulation.network.fired], lesson)",
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
    assert "['crash'] Lesson(stopped at" in page.run(2) and window.complaints == []
