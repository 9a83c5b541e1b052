"""The papers' experiments as notebooks, from top to bottom with their quick presets; tutorials are nbval's business."""

from __future__ import annotations

from pathlib import Path

import pytest

from colab_swarm.bench.join import code_cells
from tests.notebooks.kernel import opened
from tests.notebooks.regenerate import REPRODUCED

EVERY_EXPERIMENT = pytest.mark.parametrize("path", REPRODUCED, ids=lambda path: path.stem)


@EVERY_EXPERIMENT
def test_it_is_stored_with_its_quick_preset(path: Path) -> None:
    assert "QUICK = True" in "\n".join(code_cells(path)).splitlines()


@pytest.mark.slow
@EVERY_EXPERIMENT
def test_an_experiment_runs_to_its_end_and_draws_its_figure(path: Path, tmp_path: Path) -> None:
    with opened(f"reproduce/{path.stem}", tmp_path) as kernel:
        shown = kernel.run_all()
    assert any("iVBORw0KGgo" in output for output in shown)  # a PNG
