"""Two kernels that train together: stopped from the panel, killed by the system, and looked at again."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.browser.chromium import Window, needs
from tests.browser.lab import Lab, LabNotebook

pytestmark = needs("jupyterlab", "ipywidgets")
NOTICED_S = 5.0
"""So soon a panel shows that a peer was lost."""
CREATE = (
    'import colab_swarm as cs\nswarm = cs.create("two-kernels", peer_name="alice")\nprint(swarm.invite())'
)
JOIN = """import colab_swarm as cs
swarm = cs.join("{invite}", peer_name="bob", state_dir={folder!r})
print(swarm, swarm.id.hex())"""
RESUME = "import colab_swarm as cs\nswarm = cs.join(state_dir={folder!r})\nprint(swarm, swarm.id.hex())"
PREPARE = """import os, time, torch
torch.manual_seed(0)
model = torch.nn.Linear(1500, 1500)
optimizer = swarm.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), target_batch_size=16)
panel = swarm.panel()
print("kernel", os.getpid(), "at step", optimizer.global_step)
panel"""
DEFINE = """def train(steps):
    while optimizer.global_step < steps:
        loss = model(torch.randn(8, 1500)).square().mean()
        loss.backward()
        time.sleep(0.02)
        optimizer.step(samples=8, loss=loss.item())
        panel.tick()"""
TRAIN = 'train(5)\nprint("under way")\ntrain(10**6)'
GO_ON = 'train(optimizer.global_step + 2)\nprint("two steps further")'


@pytest.fixture
def pair(lab: Lab, window: Window, tmp_path: Path) -> tuple[LabNotebook, LabNotebook]:
    alice = lab.open(window, "alice", [CREATE, PREPARE, DEFINE, TRAIN, GO_ON])
    # a line may say that a slow machine imports torch
    invite = alice.run(0).strip().splitlines()[-1]
    join, resume = (cell.format(invite=invite, folder=str(tmp_path / "bob")) for cell in (JOIN, RESUME))
    bob = lab.open(window, "bob", [join, PREPARE, DEFINE, TRAIN, resume])
    bob.run(0, says="Swarm(two-kernels, bob, 1 peer linked)")
    for notebook in (alice, bob):
        notebook.run(1)
        notebook.run(2)
        notebook.start(3)
    for notebook in (alice, bob):
        notebook.wait_output("under way")
    return alice, bob


def test_a_kernel_that_is_killed_shows_in_the_others_panel_and_resumes_as_the_same_peer(
    pair: tuple[LabNotebook, LabNotebook], window: Window, artifacts: Path
) -> None:
    alice, bob = pair
    (kernel,) = re.findall(r"kernel (\d+)", bob.output(1))
    bob.save()
    os.kill(int(kernel), signal.SIGKILL)  # averaging takes most of their time: in a round, most probably
    killed_at = time.monotonic()
    alice.wait_output(re.compile(r"bob is gone: \S"))
    assert time.monotonic() - killed_at < NOTICED_S
    alice.page.screenshot(path=artifacts / "alice.png")
    alice.interrupt()
    alice.finish(3, says="KeyboardInterrupt")
    alice.run(4, says="two steps further")  # alone
    bob.reload()
    bob.page.screenshot(path=artifacts / "killed.png")
    assert bob.run(4).split()[-1] == bob.output(0).split()[-1]  # the same peer
    assert int(re.findall(r"at step (\d+)", bob.run(1))[0]) >= 5
    bob.run(2)
    bob.start(3)
    alice.run(4, says="two steps further")
    bob.wait_output("under way")
    bob.page.screenshot(path=artifacts / "resumed.png")
    assert window.complaints_but("widget model not found") == []


def test_the_stop_button_ends_the_cell_and_a_page_that_is_loaded_again_has_a_live_panel(
    pair: tuple[LabNotebook, LabNotebook], window: Window, artifacts: Path
) -> None:
    alice, bob = pair
    alice.click("Stop")
    alice.finish(3, says="KeyboardInterrupt")
    alice.run(4, says="two steps further")  # with bob, who trains all the time
    alice.page.screenshot(path=artifacts / "stopped.png")
    alice.save()
    alice.reload()
    alice.wait_output("two-kernels: training")
    bob.restart()
    alice.wait_output("bob is gone")
    alice.page.screenshot(path=artifacts / "reloaded.png")
    assert window.complaints == []
