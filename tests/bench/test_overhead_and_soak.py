"""The benchmarks of overhead and of long runs: they run, tell every figure, and the figures are not absurd."""

from __future__ import annotations

import pytest

from colab_swarm.bench import overhead, soak


@pytest.mark.slow
@pytest.mark.ordeal
def test_the_overhead_benchmark_runs_and_tells_every_figure() -> None:
    figures = {row.key: row.value for row in overhead.run(quick=True).rows}
    assert figures.keys() >= {"overhead.throughput_ratio", "overhead.memory_mib", "join.first_sample_s"}
    assert figures["overhead.processes"] == 0 and figures["overhead.memory_mib"] < 80
    assert figures["overhead.throughput_ratio"] > 0.3  # catches a step that blocks, not a busy machine


@pytest.mark.slow
@pytest.mark.ordeal
def test_two_virtual_hours_of_churn_leave_nobody_stuck() -> None:
    figures = {row.key: row.value for row in soak.run(quick=True).rows}
    assert figures["soak.stuck_peers"] == 0 and figures["soak.caught_up"] > 0
    assert figures["soak.step_share"] >= 0.9
