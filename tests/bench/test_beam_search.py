from __future__ import annotations

import statistics

import pytest

from colab_swarm.bench.beam_search import PUBLISHED_MS, find_experts
from colab_swarm.sim import PAPER_CLOUD, run_virtual


@pytest.mark.slow
def test_a_trainer_finds_its_experts_faster_than_published() -> None:
    found = run_virtual(find_experts(100, 4, PAPER_CLOUD, standing=True))
    assert statistics.median(found["cold_ms"]) < PUBLISHED_MS[100]
    assert found["look_ups"] == [5] * 4 and statistics.mean(found["hops"]) < 2
