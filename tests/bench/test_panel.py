"""The benchmark of the panel's cost: it runs, and its figures are plausible."""

from __future__ import annotations

import pytest


@pytest.mark.slow
@pytest.mark.ordeal
def test_watching_costs_little_time_and_memory() -> None:
    pytest.importorskip("nbclient")
    from colab_swarm.bench import panel

    figures = panel.run(quick=True).figures
    assert figures.keys() == {"throughput_ratio", "memory_mb", "notebook_kb", "refresh_ms", "core_share"}
    assert figures["throughput_ratio"] > 0.5  # a busy machine, and few and short phases
    assert figures["memory_mb"] < 5 and figures["notebook_kb"] < 100
    assert figures["core_share"] < 0.2
