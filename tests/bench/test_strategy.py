"""The strategy's benchmark gives DeDLOC's Table 1, predicted and simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from colab_swarm.bench import strategy


@pytest.mark.slow
def test_the_quick_benchmark_gives_the_ratios_of_table_1(tmp_path: Path) -> None:
    report = strategy.run(quick=True)
    figures = {row.key.removeprefix("strategy."): row.value for row in report.rows}
    assert figures["speedup_c"] >= 1.9 and figures["speedup_c_simulated"] >= 1.65
    for homogeneous in ("a", "b"):
        assert figures[f"{homogeneous}_adaptive_s"] <= 1.03 * figures[f"{homogeneous}_all_reduce_s"]
    assert figures["d_adaptive_s"] <= 1.05 * figures["d_server_s"]
    assert figures["d_adaptive_simulated_s"] <= 1.05 * figures["d_server_simulated_s"]
    assert figures["prediction_error"] < 0.2
    strategy.plot(report, str(tmp_path / "table1.png"))
    assert (tmp_path / "table1.png").stat().st_size > 10_000
