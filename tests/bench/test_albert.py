"""The ALBERT benchmark gives section 4.2's comparisons and draws them."""

from __future__ import annotations

from pathlib import Path

import pytest

from colab_swarm.bench import albert


@pytest.mark.slow
def test_the_quick_benchmark_orders_the_setups_as_the_paper_does(tmp_path: Path) -> None:
    report = albert.run(quick=True)
    figures = {row.key.removeprefix("albert."): row.value for row in report.rows}
    assert 1.2 < figures["load_balancing_gain"] < figures["auxiliary_gain"] < 1.9
    assert figures["part_time_share"] > 0.65  # coarser chunks than at full size
    assert figures["scaling_high_bandwidth_64_s"] < figures["scaling_high_bandwidth_8_s"] / 7
    assert figures["whole_peers_s"] < figures["whole_peers_sequential_s"]
    albert.plot(report, str(tmp_path / "albert.png"))
    assert (tmp_path / "albert.png").stat().st_size > 10_000
