"""The first tutorial as its reader sees it, in JupyterLab."""

from __future__ import annotations

from pathlib import Path

from tests.browser.chromium import Window, needs
from tests.browser.lab import KNOWN_COMPLAINTS, Lab
from tests.browser.lesson import read, table
from tests.notebooks.regenerate import TUTORIALS

pytestmark = needs("jupyterlab", "ipywidgets")


def test_the_first_tutorial_runs_from_top_to_bottom(lab: Lab, window: Window, artifacts: Path) -> None:
    runs = read(lab, window, TUTORIALS[0], artifacts)
    (artifacts / "silence.txt").write_text(table(runs))  # no test: it is the machine's business, too
    assert "Swarm(first-swarm, alice, left)" in "\n".join(run.output for run in runs)
    assert window.complaints_but(*KNOWN_COMPLAINTS) == []
