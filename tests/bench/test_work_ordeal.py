"""Work units while processes are killed, for a short time."""

from __future__ import annotations

from pathlib import Path

import pytest

from colab_swarm.bench.work_ordeal import ordeal


@pytest.mark.slow
@pytest.mark.ordeal
def test_every_unit_is_assimilated_exactly_once_despite_kills(tmp_path: Path) -> None:
    endured = ordeal(tmp_path, kills=3, epochs=3)
    assert endured.coordinator_kills == 3
    assert endured.volunteer_kills >= 1
    assert endured.finished == "all 3 epochs are done"
    assert endured.once == endured.units == 36
    assert endured.versions_in_order
