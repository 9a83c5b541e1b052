from __future__ import annotations

import pytest

from colab_swarm.bench.ordeal import run_experts


@pytest.mark.slow
@pytest.mark.ordeal
def test_training_through_experts_continues_while_their_hosts_are_killed() -> None:
    figures = run_experts(minutes=0.11, kill_every_s=3.0).figures
    assert figures["ordeal_killed"] >= 2 and figures["ordeal_steps"] > 20
