from __future__ import annotations

import pytest

from colab_swarm.bench import experts


@pytest.mark.slow
@pytest.mark.ordeal
def test_the_experts_benchmark_reports_every_figure() -> None:
    figures = experts.run(quick=True).figures
    assert set(figures) >= {
        "vs_local",
        "batching_gain",
        "nop_calls_per_s",
        "samples_per_s",
        "learning_vs_local",
    }
    assert all(value > 0 for value in figures.values())
    assert figures["forward_p99_ms"] >= figures["forward_p50_ms"]
    assert figures["vs_local"] > 0.1  # far below what it should be: catches a fast path that is gone
