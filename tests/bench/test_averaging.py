from __future__ import annotations

import pytest

from colab_swarm.bench import averaging


@pytest.mark.slow
@pytest.mark.ordeal
def test_the_averaging_benchmark_runs_and_every_round_succeeds() -> None:
    figures = {row.key: row.value for row in averaging.run(quick=True).rows}
    assert figures["averaging.success"] == 1
    assert figures["averaging.kill_success"] == 1
    assert 0 < figures["averaging.seconds"] < 10
    assert figures["averaging.vs_gloo"] == pytest.approx(
        figures["averaging.seconds"] / figures["averaging.gloo_seconds"]
    )
    assert figures["averaging.kill_extra_s"] < 3
