from __future__ import annotations

import pytest

from colab_swarm.bench.expert_ordeal import run


@pytest.mark.slow
@pytest.mark.ordeal
def test_training_through_experts_goes_on_while_their_hosts_are_killed() -> None:
    report = run(minutes=0.11, kill_every_s=3.0)
    figures = {row.key: row.value for row in report.rows}
    assert figures["moe.ordeal_killed"] >= 2 and figures["moe.ordeal_steps"] > 20
