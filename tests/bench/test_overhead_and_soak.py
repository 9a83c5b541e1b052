"""The benchmarks of overhead and of long runs: they run, report every figure, and the figures are plausible."""

from __future__ import annotations

import pytest

from colab_swarm.bench import overhead


@pytest.mark.slow
@pytest.mark.ordeal
def test_the_overhead_benchmark_reports_every_figure() -> None:
    figures = overhead.run(quick=True).figures
    assert figures.keys() >= {"throughput_ratio", "memory_mib", "join.first_sample_s"}
    assert figures["processes"] == 0 and figures["memory_mib"] < 80
    assert figures["throughput_ratio"] > 0.3  # catches a step that blocks, not a busy machine


@pytest.mark.slow
@pytest.mark.ordeal
def test_no_peer_is_stuck_after_two_virtual_hours_of_churn() -> None:
    figures = overhead.run_soak(quick=True).figures
    assert figures["stuck_peers"] == 0 and figures["caught_up"] > 0
    assert figures["step_share"] >= 0.9
