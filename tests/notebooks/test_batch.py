"""Where nobody looks: panels are text in notebooks that run as batch jobs, and in the plainest of terminals."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

SCRIPT = """
import torch
import colab_swarm as cs
swarm = cs.create("batch", peer_name="alice")
bob = cs.join(swarm.invite(), peer_name="bob")
model = torch.nn.Linear(10, 10)
optimizer = swarm.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), target_batch_size=16)
panel = swarm.panel()
while optimizer.global_step < 3:
    loss = model(torch.randn(8, 10)).square().mean()
    loss.backward()
    optimizer.step(samples=8, loss=loss.item())
    panel.tick()
swarm.panel().watch(seconds=0.2)
bob.leave()
swarm.leave()
"""
FACTS = ("batch: training, step 3", "alice (me)", "is linked", "round 2:", "links of batch: 1 link")


def run(*command: str, folder: Path, **environment: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.slow
def test_a_plain_terminal_gets_plain_lines(tmp_path: Path) -> None:
    shown = run(sys.executable, "-c", SCRIPT, folder=tmp_path, TERM="dumb", PYTHONIOENCODING="ascii")
    assert all(fact in shown for fact in FACTS), shown
    assert shown.isascii() and all(letter.isprintable() or letter == "\n" for letter in shown)  # no codes


@pytest.mark.slow
def test_a_notebook_that_runs_as_a_batch_job_keeps_its_panels_as_text(tmp_path: Path) -> None:
    path = tmp_path / "batch.ipynb"
    first, name, rest = SCRIPT.partition("swarm.panel().watch")
    cells = map(nbformat.v4.new_code_cell, (first, "panel", name + rest))
    nbformat.write(nbformat.v4.new_notebook(cells=list(cells)), path)
    run(sys.executable, "-m", "jupyter", "execute", "--inplace", str(path), folder=tmp_path)
    _, panel, watch = nbformat.read(path, as_version=4).cells
    (shown,) = panel.outputs
    assert "batch: training, step 3" in shown.data["text/plain"] and "cs-view" in shown.data["text/html"]
    assert "batch: training, step 3" in "".join(output.get("text", "") for output in watch.outputs)
