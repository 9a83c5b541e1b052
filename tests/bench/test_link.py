from __future__ import annotations

import pytest

from colab_swarm.bench import link


@pytest.mark.slow
def test_the_link_benchmark_reports_every_figure() -> None:
    figures = link.run(quick=True).figures
    assert set(figures) >= {
        "vs_raw",
        "cpu_s_per_gb",
        "rtt_ms_p50",
        "rtt_ms_p99",
        "rtt32_ms_p50",
        "rtt32_ms_p99",
    }
    assert set(figures) >= {"mb_s", "ws_mb_s", "raw_mb_s", "calls_per_s"}
    assert all(value > 0 for value in figures.values())
    assert figures["rtt_ms_p99"] >= figures["rtt_ms_p50"]
    assert (
        figures["vs_raw"] > 0.1
    )  # far below what it should be: catches a fast path that is gone, not a busy machine
