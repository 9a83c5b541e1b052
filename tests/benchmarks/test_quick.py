"""Each benchmark runs with its quick preset and reports plausible figures, whatever the machine."""

import importlib
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from colab_swarm.experiments.report import Report
from colab_swarm.sim import run_virtual
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


@whole
@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("averaging", {"success": (1, 1), "seconds": (0, 10), "vs_gloo": (0, 1e3)}),
        ("mailbox", {"s3_beyond_s": (0, 60), "folder_requests": (5, 20)}),
        # the buffers of links count as much at this size
        ("scale", {"step_over_round_2m": (1, 1e3), "memory_vectors_2m": (1, 7)}),
        ("scale", {"step_over_round_2m_bfloat16": (1, 1e3), "memory_vectors_2m_bfloat16": (1, 7)}),
        ("dht", {"found_10k": (0.98, 1), "hops_10k": (0, 6.6), "ops_success": (1, 1), "ops_per_s": (0, 1e6)}),
        # far below the usual figure: notices a fast path that is lost
        ("experts", {"vs_local": (0.1, 10), "batching_gain": (0, 1e3), "samples_per_s": (0, 1e7)}),
        (
            "link",
            {"vs_raw": (0, 2), "cpu_s_per_gb": (0, 1e3), "rtt_ms_p99": (0, 1e3), "calls_per_s": (0, 1e6)},
        ),
        ("relay", {"vs_direct": (0, 2), "idle_mb": (0, 50), "idle_cpu_percent": (0, 100)}),
        # a step that blocks, not a busy machine
        ("overhead", {"processes": (0, 0), "memory_mib": (0, 80), "throughput_ratio": (0.3, 2)}),
        ("soak", {"stuck_peers": (0, 0), "caught_up": (1, 1e6), "step_share": (0.9, 1.1)}),
        (
            "panel",
            {
                "throughput_ratio": (0.5, 2),
                "memory_mb": (-50, 5),
                "notebook_kb": (0, 100),
                "core_share": (0, 0.2),
            },
        ),
        ("expert-ordeal", {"ordeal_killed": (2, 1e3), "ordeal_steps": (20, 1e6)}),
        (
            "work-ordeal",
            {
                "coordinator_kills": (3, 3),
                "volunteer_kills": (1, 99),
                "once": (36, 36),
                "versions_in_order": (1, 1),
            },
        ),
        ("parameter-store", {"sql_ms": (0, 1e4)}),
        # the goal of fifteen seconds is for a machine that does nothing else
        ("join", {"counted_s": (0, 30)}),
        ("elastic", {"step_time_vs_synchronous": (0, 2), "synchronous_vs_ddp": (0, 1e3)}),
    ],
)
def test_a_benchmark_reports_figures_within_their_limits(
    name: str, limits: dict[str, tuple[float, float]]
) -> None:
    figures = quick(name).figures
    found = {key: figures[key] for key in limits}
    assert all(least <= found[key] <= most for key, (least, most) in limits.items()), found


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
