"""Notebooks in a real JupyterLab: the form and its panel, two friends that train, a lesson that plays on its own."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import looks
from tests.browser.chromium import Window, needs
from tests.browser.lab import Lab
from tests.notebooks.cells import code_cells
from tests.notebooks.kernel import NOTEBOOKS

pytestmark = needs("jupyterlab", "ipywidgets")
FORM = [
    'import colab_swarm as cs\nform = cs.connect(run="form-run")',
    'bob = cs.join(form.invite(), peer_name="bob", options=cs.NetworkOptions(lan=False))\nprint(bob)',
    """
import torch
model = torch.nn.Linear(500, 500)
optimizer = form.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), target_batch_size=16)
while optimizer.global_step < 9:
    loss = model(torch.randn(8, 500)).square().mean()
    loss.backward()
    optimizer.step(samples=8, loss=loss.item())
""",
    "bob.leave()\nform.leave()",
]
PANEL = ".jp-OutputArea-output .widget-vbox .widget-vbox"
NARROW = 1240
"""A page in which JupyterLab leaves 800 pixels to the output of a cell."""


@pytest.fixture(params=["Light", pytest.param("Dark", marks=pytest.mark.ordeal)])
def themed(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Lab]:
    lab.choose("apputils-extension:themes", {"theme": f"JupyterLab {request.param}"})
    yield lab
    lab.choose("apputils-extension:themes", {})


def check_panel(page: Any) -> None:
    """It fits a screen, each text can be read, and each control has a name."""
    looks.check(page, PANEL)
    height = page.locator(PANEL).first.bounding_box()["height"]
    assert height <= 600, "its controls and its view do not fit a screen"
    names = looks.controls(page, PANEL)
    assert {role for role, _ in names} >= {"button"}
    nameless = {role for role, name in names if not name.strip()}
    assert nameless <= {"slider"}  # ipywidgets gives its handle no name; its label stands beside it
    sliders = page.locator(f"{PANEL} .widget-slider:visible")
    assert all(sliders.locator(".widget-label").all_inner_texts())


def test_the_form_becomes_an_invitation_and_a_live_panel(
    themed: Lab, window: Window, artifacts: Path
) -> None:
    alice = themed.open(window, "form", FORM)
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
    alice.run(2)
    alice.page.set_viewport_size({"width": NARROW, "height": 2000})
    for page in ("rounds", "map", "swarm"):
        alice.click(page)
        alice.page.locator(f'.cs-view[aria-label*="{page}"]').wait_for()
        alice.page.screenshot(path=artifacts / f"{page}.png")
        check_panel(alice.page)
    alice.run(3)
    assert window.complaints == []


LINE = re.compile(r"step [1-9]\d* of 100000: [\s\S]*colab-swarm status my-swarm --watch")
CONNECT = "swarm = cs.connect()"
ME = r"you are bob \((\w+)\)"


def endless(training: str) -> str:
    """Return the cell so that it trains until it is stopped, and leaves some time to the browser."""
    changes = {
        "max_steps=1000": "max_steps=100_000",
        "target_batch_size=2048": "target_batch_size=256",
        "loss.backward()": "loss.backward()\n    __import__('time').sleep(0.02)",
    }
    for shown, wanted in changes.items():
        assert shown in training
        training = training.replace(shown, wanted)
    return training


def test_friends_go_on_through_a_kill_a_reload_and_a_stop(
    lab: Lab, window: Window, artifacts: Path, tmp_path: Path
) -> None:
    own = code_cells(NOTEBOOKS / "swarm.ipynb")
    saved = f"swarm = cs.connect(state_dir={str(tmp_path / 'bob')!r})\nimport os\nos.getpid()"
    alice = lab.open(window, "alice", [*own[:2], endless(own[2]), own[3]])
    bob = lab.open(window, "bob", [own[0], own[1].replace(CONNECT, saved), endless(own[2]), own[3]])
    for friend in (alice, bob):
        friend.run(0)
        friend.run(1)
    alice.connect("alice")
    alice.wait_output("others reach you")
    bob.connect("bob", alice.invitation())
    bob.wait_output("reached")
    for friend in (alice, bob):
        friend.start(2)
    for friend in (alice, bob):
        friend.wait_output(LINE)
        friend.wait_output("my-swarm: training, step")
    alice.page.screenshot(path=artifacts / "training.png")
    # a kernel that the system kills
    bob.save()
    (kernel,) = re.findall(r"^\d+$", bob.output(1), re.MULTILINE)
    peer = re.findall(ME, bob.output(1))
    os.kill(int(kernel), signal.SIGKILL)
    alice.wait_output(re.compile(r"bob is gone: \S"))
    bob.accept_restart()
    bob.run(1)
    assert peer and re.findall(ME, bob.output(1)) == peer and "coming back" in bob.output(1)
    bob.start(2)
    bob.wait_output(re.compile("from 2 peers, at"))
    # a page that is loaded again while its kernel is busy has the line; the panel, when the cell has ended
    alice.save()
    alice.page.reload()
    alice.wait_output(LINE)
    alice.page.screenshot(path=artifacts / "reloaded-in-training.png")
    alice.interrupt()
    alice.wait_idle()
    alice.reload()
    alice.wait_output("my-swarm: training, step")
    bob.click("Stop")
    bob.finish(2, says="KeyboardInterrupt")
    bob.run(3)
    alice.wait_output("bob is gone: the peer left")
    alice.page.screenshot(path=artifacts / "left.png")
    assert window.complaints_but("widget model not found") == []


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
