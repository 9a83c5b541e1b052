"""Experts under load: one host and many callers, each a process, over encrypted links on loopback.

The limit is what the same expert computes on the same thread of the same process when nobody calls.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from colab_swarm.bench.experts_caller import Load
from colab_swarm.bench.full_step import StepWorker
from colab_swarm.bench.report import BenchReport

HOST = (sys.executable, "-m", "colab_swarm.bench.experts_host")
CALLER = (sys.executable, "-m", "colab_swarm.bench.experts_caller")
HIVEMIND_SAMPLES_PER_S = 2692.0
"""hivemind 1.1.12 on two cores: 4 experts ffn 256, 4 callers, batch 128, forward and backward."""
HIVEMIND_NOP_CALLS_PER_S = 86.0
NOP_BATCH, NOP_DIM = 32, 1024  # 128 KiB


@dataclass(frozen=True)
class ExpertsPlan:
    """How much is measured: width and batch of the large calls, callers, seconds and rounds of each measurement."""

    dim: int
    batch: int
    callers: int
    seconds: float
    rounds: int


FULL = ExpertsPlan(dim=1024, batch=2048, callers=8, seconds=15.0, rounds=3)
QUICK = ExpertsPlan(dim=256, batch=256, callers=4, seconds=1.0, rounds=2)


@dataclass(frozen=True)
class CallRates:
    """Of all callers together: samples and calls per second; seconds of the median call and of the slowest 1 %."""

    samples_per_s: float
    calls_per_s: float
    p50_s: float
    p99_s: float


class Bench:
    """One host and its callers."""

    def __init__(self, stack: ExitStack, callers: int) -> None:
        self._host = stack.enter_context(StepWorker(HOST))
        where = self._host.hear()
        command = (*CALLER, where["id"], where["address"])
        self._callers = [stack.enter_context(StepWorker(command)) for _ in range(callers)]

    def serve(self, uids: list[str], dim: int, **more: object) -> None:
        """Host these experts."""
        self._host.say(serve={"uids": uids, "dim": dim, **more})
        self._host.hear()

    def alone(self, batch: int, rounds: int, *, backward: bool = False) -> float:
        """Samples per second of the experts without callers."""
        self._host.say(alone={"batch": batch, "rounds": rounds, "backward": backward})
        return float(self._host.hear()["samples_per_s"])

    def under(self, load: Load, callers: int | None = None) -> CallRates:
        """What this load gets; a short one goes before, so that links are open and memory is warm."""
        workers = self._callers[:callers]
        for one in (Load(**{**asdict(load), "seconds": min(1.0, load.seconds)}), load):
            for worker in workers:
                worker.say(**asdict(one))
            told = [worker.hear() for worker in workers]
        took_s = sorted(seconds for one in told for seconds in one["took_s"])
        calls_per_s = sum(one["calls"] / one["seconds"] for one in told)
        p99_s = took_s[min(len(took_s) - 1, int(0.99 * len(took_s)))]
        return CallRates(load.batch * calls_per_s, calls_per_s, statistics.median(took_s), p99_s)


def run(quick: bool = False) -> BenchReport:
    """Large calls, calls without computation, many small calls merged or not, and hivemind's own setting."""
    report, plan = BenchReport("experts", quick), QUICK if quick else FULL
    with ExitStack() as stack:
        bench = Bench(stack, plan.callers)
        _large(report, bench, plan)
        _nop(report, bench, plan)
        _small(report, bench, plan)
        _learning(report, bench, plan)
    return report


def _latencies(report: BenchReport, what: str, rates: CallRates) -> None:
    report.add(f"experts.{what}_p50_ms", 1000 * rates.p50_s, "ms", "of a call")
    report.add(f"experts.{what}_p99_ms", 1000 * rates.p99_s, "ms")


def _large(report: BenchReport, bench: Bench, plan: ExpertsPlan) -> None:
    bench.serve(["ffn.0"], plan.dim)
    alone = bench.alone(plan.batch, plan.rounds)
    rates = bench.under(Load(["ffn.0"], plan.batch, plan.dim, plan.seconds))
    what = f"{plan.callers} callers, forward, batch {plan.batch}, feed-forward {plan.dim}"
    report.add("experts.forward_samples_per_s", rates.samples_per_s, "samples/s", what)
    report.add("experts.local_samples_per_s", alone, "samples/s", "the same expert, nobody calling")
    report.add("experts.vs_local", rates.samples_per_s / alone, "", "of local; >= 0.6 wanted")
    _latencies(report, "forward", rates)


def _nop(report: BenchReport, bench: Bench, plan: ExpertsPlan) -> None:
    bench.serve(["nop.0"], NOP_DIM, nop=True)
    rates = bench.under(Load(["nop.0"], NOP_BATCH, NOP_DIM, plan.seconds, in_flight=2))
    what = f"128 KiB each way; hivemind {HIVEMIND_NOP_CALLS_PER_S:g}; >= 600 wanted"
    report.add("experts.nop_calls_per_s", rates.calls_per_s, "calls/s", what)
    _latencies(report, "nop", rates)


def _small(report: BenchReport, bench: Bench, plan: ExpertsPlan) -> None:
    load = Load(["ffn.0"], 1, plan.dim, plan.seconds, in_flight=16)
    bench.serve(["ffn.0"], plan.dim)
    merged = bench.under(load)
    bench.serve(["ffn.0"], plan.dim, max_batch_size=1)
    single = bench.under(load)
    what = f"{plan.callers} callers, 16 calls of one sample in flight each"
    report.add("experts.merged_calls_per_s", merged.calls_per_s, "calls/s", what)
    report.add("experts.single_calls_per_s", single.calls_per_s, "calls/s", "the same, none merged")
    gain = merged.calls_per_s / single.calls_per_s
    report.add("experts.batching_gain", gain, "times", ">= 4 wanted")
    _latencies(report, "merged", merged)


def _learning(report: BenchReport, bench: Bench, plan: ExpertsPlan) -> None:
    uids = [f"ffn.{index}" for index in range(4)]
    bench.serve(uids, 256)
    alone = bench.alone(128, plan.rounds, backward=True)
    rates = bench.under(Load(uids, 128, 256, plan.seconds, backward=True), callers=4)
    what = "4 experts 256, 4 callers, batch 128, forward and backward"
    report.add("experts.samples_per_s", rates.samples_per_s, "samples/s", what)
    report.add("experts.learning_vs_local", rates.samples_per_s / alone, "", "of local; >= 0.8 wanted, or")
    against = rates.samples_per_s / HIVEMIND_SAMPLES_PER_S
    report.add(
        "experts.vs_hivemind", against, "times", f"its {HIVEMIND_SAMPLES_PER_S:g} samples/s; >= 3 wanted"
    )
    _latencies(report, "learning", rates)
