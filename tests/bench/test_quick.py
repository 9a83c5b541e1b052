"""Each benchmark runs with its quick preset and reports plausible figures, whatever the machine."""

import importlib
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colab_swarm.bench import averaging, dedloc, dht, link, mailbox, moe, ordeal, overhead, scale, vc_asgd
from colab_swarm.bench import elastic_consistency as elastic
from colab_swarm.bench.__main__ import BENCHMARKS, main
from colab_swarm.bench.dht import PUBLISHED_MS, find_experts
from colab_swarm.bench.harness import BenchReport
from colab_swarm.bench.vc_asgd import Epoch, train_by_volunteers
from colab_swarm.moe.expert import FeedForward
from colab_swarm.sim import run_virtual
from colab_swarm.workunits.job import Job
from tests.workunits.digits import digits_job


def whole(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that runs a benchmark whole."""
    return pytest.mark.slow(pytest.mark.ordeal(test))


@pytest.mark.parametrize("place", sorted(BENCHMARKS.values()))
def test_every_benchmark_has_its_function(place: str) -> None:
    module, _, name = place.partition(":")
    assert callable(getattr(importlib.import_module(f"colab_swarm.bench.{module}"), name))


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
    figures = moe.run_experts(quick=True).figures
    assert figures.keys() == {"vs_local", "batching_gain", "nop_calls_per_s", "samples_per_s"}
    assert all(value > 0 for value in figures.values())
    assert figures["vs_local"] > 0.1  # far below the usual figure: catches a lost fast path


@pytest.mark.slow
def test_the_link_benchmark_reports_every_figure() -> None:
    figures = link.run(quick=True).figures
    assert figures.keys() >= {"vs_raw", "cpu_s_per_gb", "mb_s", "raw_mb_s", "calls_per_s"}
    assert figures.keys() >= {"rtt_ms_p50", "rtt_ms_p99", "rtt32_ms_p50", "rtt32_ms_p99"}
    assert all(value > 0 for value in figures.values())
    assert figures["rtt_ms_p99"] >= figures["rtt_ms_p50"]
    assert figures["vs_raw"] > 0.1  # catches a fast path that is gone, not a busy machine


@whole
def test_the_relay_benchmark_reports_every_figure() -> None:
    report = link.run_relay(quick=True)
    figures = report.figures
    assert set(figures) == {"vs_direct", "mb_s", "direct_mb_s", "cpu_s_per_gb", "idle_mb", "idle_cpu_percent"}
    assert {row.note for row in report.rows if row.key.startswith("relay.idle")} == {"100 idle circuits"}
    assert figures["vs_direct"] > 0.1 and figures["idle_mb"] < 50


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
    report = vc_asgd.run_ordeal(quick=True)
    figures = report.figures
    assert figures["coordinator_kills"] == 3 and figures["volunteer_kills"] >= 1
    assert any("all 3 epochs are done" in row.note for row in report.rows)
    assert figures["once"] == figures["units"] == 36 and figures["versions_in_order"]


@whole
def test_an_epoch_among_processes_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vc_asgd, "SUBSETS", 6)
    assert 0 < vc_asgd.epoch_seconds(tmp_path, 2, 2, 2, epochs=2) < 60


def test_the_group_chosen_for_sixteen_falls_from_all_to_pairs() -> None:
    assert [dedloc.chosen_size(16, failing) for failing in (0.0, 0.1, 0.3)] == [16, 4, 2]


SETUPS = {name: dedloc.SETUPS[name] for name in ("heterogeneous", "load_balancing", "auxiliary")}


@whole
def test_the_report_has_plausible_figures_and_can_be_drawn(tmp_path: Path) -> None:
    report = dedloc.run_groups(quick=True)
    figures = report.figures
    assert figures["error_16"] < 1e-6 and figures["error_13"] < 1e-6
    assert figures["error_kept_m4"] < 1 and 0 < figures["undisturbed_m2"] <= 1
    assert max(value for key, value in figures.items() if "slowest" in key) < 10
    dedloc.plot_groups(report, str(tmp_path / "groups.png"))
    assert (tmp_path / "groups.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_balanced_shares_and_peers_that_only_reduce_speed_steps_up_as_published() -> None:
    step_s = {name: dedloc.simulate_round(*setup, dedloc.ALBERT_LARGE, 8) for name, setup in SETUPS.items()}
    batch_s = step_s["heterogeneous"] / dedloc.SLOWDOWN  # computing, which hides a shorter averaging
    naive, balanced, assisted = (max(batch_s, step_s[name]) for name in SETUPS)
    assert 1.2 < naive / balanced < naive / assisted < 1.9


@pytest.mark.slow
def test_many_batches_in_flight_do_not_feel_a_delay_that_stops_one(monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"make": lambda: FeedForward(8), "sample": (8,), "blocks": 2, "in_flight": 8}
    monkeypatch.setattr(moe, "CHAINS", [replace(chain, **small) for chain in moe.CHAINS])
    values = moe.run_throughput(quick=True).figures
    assert values["vs_model_parallel_at_200ms"] > 2 and values["retained_at_200ms"] > 0
    assert values["ffn_0ms_samples_per_s"] > values["ffn_200ms_samples_per_s"]


def absent() -> AbstractContextManager[str]:
    raise FileNotFoundError("redis-server is not installed")


@whole
def test_an_update_is_timed_in_redis_and_in_sql_and_absent_programs_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vc_asgd, "NUMEL", 100_000)
    figures = vc_asgd.run_stores(quick=True).figures
    assert "redis_ms" not in figures or "sql_ms" not in figures or figures["sql_to_redis"] > 0.5
    monkeypatch.setattr(vc_asgd, "STORES", {"mariadb": vc_asgd.STORES["sqlite"], "redis": (absent, "")})
    figures = vc_asgd.run_stores(quick=True).figures
    assert figures.keys() == {"mariadb_ms", "sql_ms"}
    assert 0 < figures["sql_ms"] == figures["mariadb_ms"] < 1000
    assert "redis is left out: redis-server is not installed" in capsys.readouterr().out


def small_job(alpha: float) -> Job:
    return digits_job(rows=160, subsets=8, max_epochs=3, alpha=alpha, local_epochs=4, batch_size=8)


@whole
def test_a_larger_alpha_learns_later_and_spreads_less() -> None:
    """And a run depends on its seeds alone."""
    runs = [(0.5, 0), (0.5, 0), (0.5, 1), (0.95, 0)]
    small, again, other, large = (train_by_volunteers(small_job(alpha), seed=seed) for alpha, seed in runs)
    assert small == again != other and small[-1].mean > max(small[0].mean, large[-1].mean)
    assert all(one.low <= one.mean <= one.high for one in small)
    assert vc_asgd.spread([small]) > vc_asgd.spread([large])


def test_only_the_code_of_a_notebook_is_run(tmp_path: Path) -> None:
    sources = {"markdown": ["# Title"], "code": ["a = 1\n", "b = 2"]}
    cells = [{"cell_type": kind, "source": source} for kind, source in sources.items()]
    notebook = tmp_path / "some.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    assert overhead.code_cells(notebook) == ["a = 1\nb = 2"]


def test_an_absent_notebook_raises_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="copy of the repository"):
        overhead.code_cells(tmp_path / "absent.ipynb")


def test_form_fields_are_filled_in() -> None:
    cell = 'NAME = ""  # @param {type:"string"}\nNAMES = 1\nprint(NAME)'
    assert overhead.filled_in(cell, NAME=r"a\1'b") == 'NAME = "a\\\\1\'b"\nNAMES = 1\nprint(NAME)'


@whole
def test_a_late_joiner_is_counted_within_fifteen_seconds_of_pasting_the_invitation() -> None:
    figures = overhead.run_join(quick=True).figures
    assert figures["counted_s"] < 15 * 2  # the goal is for a machine that does nothing else


def test_the_stand_in_for_colab_is_found_like_an_installed_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("google.colab", "google.colab.userdata"):
        monkeypatch.setitem(sys.modules, name, None)  # and is put back at the end
    overhead.stand_in_for_colab(HF_TOKEN="hush")
    assert importlib.util.find_spec("google.colab") and importlib.util.find_spec("google.colab.userdata")


def drawn_reports() -> Iterator[tuple[Callable[[BenchReport, str], None], BenchReport]]:
    epochs, curve = [Epoch(0.5, 0.4, 0.6), Epoch(0.7, 0.6, 0.8)], [0.1, 0.5]
    yield vc_asgd.plot, BenchReport("vc_asgd", True, curves={"0.7": [epochs], "serial": [epochs]})
    curves: dict[str, Any] = {"ffn_low": [curve], "e16_high": [curve, curve]}
    yield moe.plot_convergence, BenchReport("moe", True, curves=curves)
    report = BenchReport("elastic", True)
    for name in [*(f"beta_{beta:g}" for beta in elastic.BETAS), "variance"]:
        report.add_all({f"accuracy_mlp_{name}": 90.0, f"distance_mlp_{name}": 0.1})
    yield elastic.plot, report


@pytest.mark.parametrize(("plot", "report"), list(drawn_reports()))
def test_the_curves_are_drawn(
    tmp_path: Path, plot: Callable[[BenchReport, str], None], report: BenchReport
) -> None:
    pytest.importorskip("matplotlib", reason="the extra [notebook] installs matplotlib")
    plot(report, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
