"""The PnCnTn grid, smaller than any published."""

from __future__ import annotations

from pathlib import Path

import pytest

from colab_swarm.bench import workunits


@pytest.mark.slow
@pytest.mark.ordeal
def test_an_epoch_among_processes_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workunits, "SUBSETS", 6)
    assert 0 < workunits.epoch_seconds(tmp_path, 2, 2, 2, quick=True) < 60
