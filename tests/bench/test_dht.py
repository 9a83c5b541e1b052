"""The DHT's benchmark runs, and its figures hold where they do not depend on the machine."""

from __future__ import annotations

import pytest

from colab_swarm.bench import dht
from colab_swarm.sim import run_virtual


@pytest.mark.slow
def test_a_thousand_virtual_peers_find_fresh_records_in_few_hops() -> None:
    lookups = run_virtual(dht.read_records(1000, 30, seed=3))
    assert sum(one.found for one in lookups) >= 29 and sorted(one.hops for one in lookups)[15] <= 5


@pytest.mark.slow
@pytest.mark.ordeal
def test_the_quick_benchmark_gives_all_figures() -> None:
    figures = dht.run(quick=True).figures
    assert figures["found_10k"] >= 0.98 and figures["hops_10k"] <= 6.6
    assert figures["ops_success"] == figures["found_loopback_32"] == 1
    assert {"store_ms", "get_ms", "ops_per_s", "latency_ms_10k"} <= figures.keys()
