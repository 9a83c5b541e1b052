"""Each benchmark runs with its quick preset and reports plausible figures, whatever the machine."""

import importlib
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from colab_swarm.sim import run_virtual
from tests.benchmarks import averaging, dht, experts, gpu, link, mailbox, ordeal, overhead, scale, work_units
from tests.benchmarks.__main__ import BENCHMARKS, main
from tests.benchmarks.dht import PUBLISHED_MS, find_experts


def whole(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that runs a benchmark whole."""
    return pytest.mark.slow(pytest.mark.ordeal(test))


@pytest.mark.parametrize("place", sorted(BENCHMARKS.values()))
def test_every_benchmark_has_its_function(place: str) -> None:
    module, _, name = place.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    "line", ["link --plot x.png", "dht --python x", "link --vs hivemind", "all --faithful"]
)
def test_an_option_of_another_benchmark_is_refused(line: str) -> None:
    with pytest.raises(SystemExit):
        main(line.split())


@whole
def test_the_averaging_benchmark_runs_and_every_round_succeeds() -> None:
    figures = averaging.run(quick=True).figures
    assert figures["success"] == 1 and 0 < figures["seconds"] < 10
    assert figures["vs_gloo"] == pytest.approx(figures["seconds"] / figures["gloo_seconds"])


@whole
def test_the_mailbox_benchmark_counts_the_requests_of_whole_rounds() -> None:
    figures = mailbox.run(quick=True).figures
    assert figures["s3_beyond_s"] > 0 and 5 < figures["folder_requests"] <= 20


@whole
def test_the_scale_benchmark_reports_the_memory_and_the_step_of_peers() -> None:
    figures = scale.run(quick=True).figures
    for case in ("2m", "2m_bfloat16"):
        assert figures[f"step_over_round_{case}"] > 1 and figures[f"vs_gloo_{case}"] > 0
        assert 1 < figures[f"memory_vectors_{case}"] < 7  # the buffers of links count as much at this size


@whole
def test_the_gpu_benchmark_runs_tiny_without_one_and_copies_nothing_but_rounds() -> None:
    figures = gpu.run(quick=True).figures
    kinds = {
        "int8": "step_share",
        "lora": "round_vs_wire",
        "sparse": "local_vs_bare",
        "overlap": "idle_share",
    }
    for case in gpu.cases(gpu.models(True)):
        assert figures[f"{case.name}_{kinds[case.way]}"] >= 0
        assert figures[f"{case.name}_copied_vectors"] == 0 < figures[f"{case.name}_round_copied_vectors"]
        assert figures.get(f"{case.name}_equal", 1) == 1
    assert figures["stress_equal"] == 1


@pytest.mark.slow
def test_a_trainer_finds_its_experts_faster_than_published() -> None:
    cold_ms, _ = run_virtual(find_experts(100, 4))
    assert statistics.median(cold_ms) < PUBLISHED_MS[100]


@pytest.mark.slow
def test_a_thousand_virtual_peers_find_fresh_records_in_few_hops() -> None:
    lookups = run_virtual(dht.read_records(1000, 30, seed=3))
    assert sum(lookups["found"]) >= 29 and sorted(lookups["hops"])[15] <= 5


@whole
def test_the_dht_benchmark_reports_every_figure() -> None:
    figures = dht.run(quick=True).figures
    assert figures["found_10k"] >= 0.98 and figures["hops_10k"] <= 6.6
    assert figures["ops_success"] == 1
    assert {"store_ms", "get_ms", "ops_per_s", "latency_ms_10k"} <= figures.keys()


@whole
def test_the_experts_benchmark_reports_every_figure() -> None:
    figures = experts.run_experts(quick=True).figures
    assert figures.keys() == {"vs_local", "batching_gain", "nop_calls_per_s", "samples_per_s"}
    assert all(value > 0 for value in figures.values())
    assert figures["vs_local"] > 0.1  # far below the usual figure: catches a lost fast path


@whole
def test_the_link_benchmark_reports_every_figure() -> None:
    figures = link.run(quick=True).figures
    assert figures.keys() >= {"vs_raw", "cpu_s_per_gb", "mb_s", "raw_mb_s", "calls_per_s"}
    assert figures.keys() >= {"rtt_ms_p50", "rtt_ms_p99", "rtt32_ms_p50", "rtt32_ms_p99"}
    assert all(value > 0 for value in figures.values())
    assert figures["rtt_ms_p99"] >= figures["rtt_ms_p50"]


@whole
def test_the_relay_benchmark_reports_every_figure() -> None:
    report = link.run_relay(quick=True)
    figures = report.figures
    assert set(figures) == {"vs_direct", "mb_s", "direct_mb_s", "cpu_s_per_gb", "idle_mb", "idle_cpu_percent"}
    assert {row.note for row in report.rows if row.key.startswith("relay.idle")} == {"100 idle circuits"}
    assert figures["vs_direct"] > 0 and figures["idle_mb"] < 50


@whole
def test_the_overhead_benchmark_reports_every_figure() -> None:
    figures = overhead.run(quick=True).figures
    assert figures.keys() >= {"throughput_ratio", "memory_mib", "join_s"}
    assert figures["processes"] == 0 and figures["memory_mib"] < 80
    assert figures["throughput_ratio"] > 0.3  # catches a step that blocks, not a busy machine


@whole
def test_no_peer_is_stuck_after_two_virtual_hours_of_churn() -> None:
    figures = overhead.run_soak(quick=True).figures
    assert figures["stuck_peers"] == 0 and figures["caught_up"] > 0
    assert figures["step_share"] >= 0.9


@whole
def test_watching_costs_little_time_and_memory() -> None:
    pytest.importorskip("nbclient", reason="the extra [dev] installs nbclient")
    figures = overhead.run_panel(quick=True).figures
    assert figures.keys() == {"throughput_ratio", "memory_mb", "notebook_kb", "refresh_ms", "core_share"}
    assert figures["throughput_ratio"] > 0.5  # a busy machine, and few and short phases
    assert figures["memory_mb"] < 5 and figures["notebook_kb"] < 100
    assert figures["core_share"] < 0.2


@whole
def test_training_through_experts_continues_while_their_hosts_are_killed() -> None:
    figures = ordeal.run_experts(quick=True).figures
    assert figures["ordeal_killed"] >= 2 and figures["ordeal_steps"] > 20


@whole
def test_every_unit_is_assimilated_exactly_once_despite_kills() -> None:
    report = work_units.run_ordeal(quick=True)
    figures = report.figures
    assert figures["coordinator_kills"] == 3 and figures["volunteer_kills"] >= 1
    assert any("all 3 epochs are done" in row.note for row in report.rows)
    assert figures["once"] == figures["units"] == 36 and figures["versions_in_order"]


@whole
def test_an_epoch_among_processes_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_units, "SUBSETS", 6)
    assert 0 < work_units.epoch_seconds(tmp_path, 2, 2, 2, epochs=2) < 60


def absent() -> AbstractContextManager[str]:
    raise FileNotFoundError("redis-server is not installed")


@whole
def test_an_update_is_timed_in_redis_and_in_sql_and_absent_programs_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work_units, "NUMEL", 100_000)
    figures = work_units.run_stores(quick=True).figures
    assert "redis_ms" not in figures or "sql_ms" not in figures or figures["sql_to_redis"] > 0.5
    monkeypatch.setattr(work_units, "STORES", {"mariadb": work_units.STORES["sqlite"], "redis": (absent, "")})
    figures = work_units.run_stores(quick=True).figures
    assert figures.keys() == {"mariadb_ms", "sql_ms"}
    assert 0 < figures["sql_ms"] == figures["mariadb_ms"] < 1000
    assert "redis is left out: redis-server is not installed" in capsys.readouterr().out


@whole
def test_a_late_joiner_is_counted_within_fifteen_seconds_of_pasting_the_invitation() -> None:
    figures = overhead.run_join(quick=True).figures
    assert figures["counted_s"] < 15 * 2  # the goal is for a machine that does nothing else
