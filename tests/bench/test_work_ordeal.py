"""Work units while processes are killed, for a short time."""

from __future__ import annotations

from pathlib import Path

import pytest

from colab_swarm.bench.harness import BenchReport
from colab_swarm.bench.workunits import ordeal


@pytest.mark.slow
@pytest.mark.ordeal
def test_every_unit_is_assimilated_exactly_once_despite_kills(tmp_path: Path) -> None:
    report = BenchReport("work-ordeal", True)
    ordeal(report, tmp_path, kills=3, epochs=3)
    figures = report.figures
    assert figures["coordinator_kills"] == 3 and figures["volunteer_kills"] >= 1
    assert any("all 3 epochs are done" in row.note for row in report.rows)
    assert figures["once"] == figures["units"] == 36 and figures["versions_in_order"]
