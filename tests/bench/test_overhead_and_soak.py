"""The benchmarks of overhead and of long runs: they run, report every figure, and the figures are plausible."""

from __future__ import annotations

import pytest

from colab_swarm.bench import overhead, soak


@pytest.mark.slow
@pytest.mark.ordeal
def test_the_overhead_benchmark_reports_every_figure() -> None:
    figures = {row.key: row.value for row in overhead.run(quick=True).rows}
    assert figures.keys() >= {"overhead.throughput_ratio", "overhead.memory_mib", "join.first_sample_s"}
    assert figures["overhead.processes"] == 0 and figures["overhead.memory_mib"] < 80
    assert figures["overhead.throughput_ratio"] > 0.3  # catches a step that blocks, not a busy machine


@pytest.mark.slow
@pytest.mark.ordeal
def test_no_peer_is_stuck_after_two_virtual_hours_of_churn() -> None:
    figures = {row.key: row.value for row in soak.run(quick=True).rows}
    assert figures["soak.stuck_peers"] == 0 and figures["soak.caught_up"] > 0
    assert figures["soak.step_share"] >= 0.9
