from __future__ import annotations

import pytest

from colab_swarm.bench.ordeal import run_experts


@pytest.mark.slow
@pytest.mark.ordeal
def test_training_through_experts_continues_while_their_hosts_are_killed() -> None:
    figures = {row.key: row.value for row in run_experts(minutes=0.11, kill_every_s=3.0).rows}
    assert figures["moe.ordeal_killed"] >= 2 and figures["moe.ordeal_steps"] > 20
