"""Each benchmark runs with its quick preset and reports plausible figures, whatever the machine."""

import importlib
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from colab_swarm.experiments.report import Report
from colab_swarm.sim import run_virtual
from tests.benchmarks import elastic
from tests.benchmarks.__main__ import BENCHMARKS, main


def module_of(name: str) -> Any:
    return importlib.import_module(BENCHMARKS[name].partition(":")[0])


def quick(name: str) -> Report:
    report: Report = getattr(module_of(name), BENCHMARKS[name].partition(":")[2])(quick=True)
    return report


def whole(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that runs a benchmark whole."""
    return pytest.mark.slow(pytest.mark.ordeal(test))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_its_function(name: str) -> None:
    assert callable(getattr(module_of(name), BENCHMARKS[name].partition(":")[2]))


@pytest.mark.parametrize(
    "line", ["link --plot x.png", "dht --python x", "link --vs hivemind", "all --faithful"]
)
def test_an_option_of_another_benchmark_is_refused(line: str) -> None:
    with pytest.raises(SystemExit):
        main(line.split())


# What is positive, and what is within limits.
FIGURES: dict[str, tuple[str, dict[str, tuple[float, float]]]] = {
    "averaging": ("vs_gloo", {"success": (1, 1), "seconds": (1e-9, 10)}),
    "mailbox": ("s3_beyond_s", {"folder_requests": (5.001, 20)}),
    # the buffers of links count as much at this size
    "scale": (
        "vs_gloo_2m vs_gloo_2m_bfloat16",
        {f"step_over_round_{case}": (1, 1e3) for case in ("2m", "2m_bfloat16")}
        | {f"memory_vectors_{case}": (1, 7) for case in ("2m", "2m_bfloat16")},
    ),
    "dht": (
        "store_ms get_ms ops_per_s latency_ms_10k",
        {"found_10k": (0.98, 1), "hops_10k": (0, 6.6), "ops_success": (1, 1)},
    ),
    # far below the usual figure: notices a fast path that is lost
    "experts": ("batching_gain nop_calls_per_s samples_per_s", {"vs_local": (0.1, 1e3)}),
    "link": (
        "vs_raw cpu_s_per_gb mb_s raw_mb_s calls_per_s rtt_ms_p50 rtt_ms_p99 rtt32_ms_p50 rtt32_ms_p99",
        {},
    ),
    "relay": (
        "vs_direct mb_s direct_mb_s cpu_s_per_gb",
        {"idle_mb": (-50, 50), "idle_cpu_percent": (0, 100)},
    ),
    # a step that blocks, not a busy machine
    "overhead": (
        "join_s",
        {"processes": (0, 0), "memory_mib": (-80, 80), "throughput_ratio": (0.3, 1e3)},
    ),
    "soak": ("caught_up", {"stuck_peers": (0, 0), "step_share": (0.9, 1e3)}),
    "panel": (
        "refresh_ms",
        {
            "throughput_ratio": (0.5, 1e3),
            "memory_mb": (-50, 5),
            "notebook_kb": (0, 100),
            "core_share": (0, 0.2),
        },
    ),
    "expert-ordeal": ("", {"ordeal_killed": (2, 1e3), "ordeal_steps": (21, 1e6)}),
    "work-ordeal": (
        "volunteer_kills",
        {"coordinator_kills": (3, 3), "units": (36, 36), "once": (36, 36), "versions_in_order": (1, 1)},
    ),
    "parameter-store": ("sql_ms", {}),
    # the goal of fifteen seconds is for a machine that does nothing else
    "join": ("", {"counted_s": (0, 30)}),
}


@whole
@pytest.mark.parametrize("name", FIGURES)
def test_a_benchmark_reports_figures_within_their_limits(name: str) -> None:
    positive, limits = FIGURES[name]
    figures = quick(name).figures
    assert [key for key in positive.split() if not figures[key] > 0] == []
    outside = {
        key: figures[key] for key, (least, most) in limits.items() if not least <= figures[key] <= most
    }
    assert outside == {}


@whole
def test_the_gpu_benchmark_runs_tiny_without_one_and_copies_nothing_but_rounds() -> None:
    gpu = module_of("gpu")
    figures = quick("gpu").figures
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
    dht = module_of("dht")
    cold_ms, _ = run_virtual(dht.find_experts(100, 4))
    assert statistics.median(cold_ms) < dht.PUBLISHED_MS[100]


@pytest.mark.slow
def test_a_thousand_virtual_peers_find_fresh_records_in_few_hops() -> None:
    lookups = run_virtual(module_of("dht").read_records(1000, 30, seed=3))
    assert sum(lookups["found"]) >= 29 and sorted(lookups["hops"])[15] <= 5


@whole
@pytest.mark.skipif(elastic.missing() is not None, reason=str(elastic.missing()))
def test_steps_of_every_scheduler_and_of_ddp_are_timed() -> None:
    found = quick("elastic").figures
    assert all(found[f"step_ms_{way}"] > 0 for way in ("ddp", *elastic.WAYS))
    assert found["step_ms_synchronous"] > 1e3 * elastic.DELAY_S
    assert found.keys() >= {"step_time_vs_synchronous", "synchronous_vs_ddp", "speed_accuracy_drop"}


def test_what_a_machine_lacks_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "missing", lambda: "needs Linux and root")
    report = Report("elastic", True)
    elastic.add_speed(report, seeds=1, steps=35)
    assert [row.key for row in report.rows] == ["elastic.speed_measured"]
    assert "needs Linux and root" in report.rows[0].note


def absent() -> AbstractContextManager[str]:
    raise FileNotFoundError("redis-server is not installed")


@whole
def test_a_store_whose_program_is_absent_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work_units = module_of("parameter-store")
    monkeypatch.setattr(work_units, "NUMEL", 100_000)
    monkeypatch.setattr(work_units, "STORES", {"mariadb": work_units.STORES["sqlite"], "redis": (absent, "")})
    figures = quick("parameter-store").figures
    assert figures.keys() == {"mariadb_ms", "sql_ms"}
    assert 0 < figures["sql_ms"] == figures["mariadb_ms"] < 1000
    assert "redis is left out: redis-server is not installed" in capsys.readouterr().out
