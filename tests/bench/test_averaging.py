from __future__ import annotations

import pytest

from colab_swarm.bench import averaging


@pytest.mark.slow
@pytest.mark.ordeal
def test_the_averaging_benchmark_runs_and_every_round_succeeds() -> None:
    figures = averaging.run(quick=True).figures
    assert figures["success"] == 1
    assert figures["kill_success"] == 1
    assert 0 < figures["seconds"] < 10
    assert figures["vs_gloo"] == pytest.approx(figures["seconds"] / figures["gloo_seconds"])
    assert figures["kill_extra_s"] < 3
