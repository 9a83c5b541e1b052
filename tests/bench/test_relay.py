from __future__ import annotations

import pytest

from colab_swarm.bench import link


@pytest.mark.slow
@pytest.mark.ordeal
def test_the_relay_benchmark_reports_every_figure() -> None:
    report = link.run_relay(quick=True)
    figures = report.figures
    assert set(figures) == {
        "vs_direct",
        "mb_s",
        "direct_mb_s",
        "cpu_s_per_gb",
        "idle_mb",
        "idle_cpu_percent",
    }
    assert {row.note for row in report.rows if row.key.startswith("relay.idle")} == {"100 idle circuits"}
    assert figures["vs_direct"] > 0.1 and figures["idle_mb"] < 50
