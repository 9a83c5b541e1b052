from __future__ import annotations

from dataclasses import replace

import pytest

from colab_swarm.bench import moe_throughput as bench
from colab_swarm.bench.moe_throughput import CPU
from colab_swarm.moe.expert import FeedForward


@pytest.mark.slow
def test_many_batches_in_flight_do_not_feel_a_delay_that_stops_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = tuple(replace(kind, make=lambda: FeedForward(8), sample=(8,)) for kind in CPU.kinds)
    plan = replace(CPU, kinds=kinds, blocks=2, in_flight=8, delays_s=(0.0, 0.2), seconds=0.5)
    monkeypatch.setattr(bench, "CPU", plan)
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    values = bench.run().figures
    assert values["vs_model_parallel_at_200ms"] > 2
    assert values["retained_at_200ms"] > 0
    assert values["ffn_0ms_samples_per_s"] > values["ffn_200ms_samples_per_s"]
