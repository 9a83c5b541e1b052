"""Elastic consistency: what it costs in accuracy, whether its bounds hold, and the speed that it buys.

The first two are emulated (`elastic_consistency`). Speed is measured with two processes in network namespaces, 5 ms of
latency (give or take 0.2) apart, that learn digits: by every scheduler, by torch's `DistributedDataParallel` over gloo,
and alone, in turn and with several seeds, so that all had the same weather. A beta above 0 gains less than 0: the first
bucket of the same step, which is sent early in backward, still takes its 5 ms, and backward here ends before.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass

from colab_swarm.bench import elastic_consistency
from colab_swarm.bench.elastic_consistency import ImageRows
from colab_swarm.bench.elastic_worker import HEADLINE, OTHERS, WAYS
from colab_swarm.bench.full_step import StepWorker
from colab_swarm.bench.report import BenchReport
from colab_swarm.bench.slow_link import SlowLink, missing

DELAY_S, JITTER_S = 0.005, 0.0002
WORKER = ("nice", "-n", "-10", sys.executable, "-m", "colab_swarm.bench.elastic_worker")
"""What else runs on the machine should not count."""


@dataclass(frozen=True)
class ElasticPlan:
    """How many runs of each way, of how many steps."""

    seeds: int
    steps: int


FULL, QUICK = ElasticPlan(seeds=3, steps=300), ElasticPlan(seeds=1, steps=100)


@dataclass
class ElasticRuns:
    """What the runs of one way came to, one figure each: seconds of a step, those that it computed, and accuracy."""

    step_s: list[float]
    cpu_s: list[float]
    accuracy: list[float]

    @property
    def typical_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def mean_accuracy(self) -> float:
        return statistics.mean(self.accuracy)


def run(quick: bool = False, data: str | None = None) -> BenchReport:
    """All three experiments.

    Args:
        data: ``.npz`` of images of 32 x 32 to learn instead of digits, where accuracy is compared.
    """
    images = ImageRows(data, (3, 32, 32), "resnet") if data else None
    report = elastic_consistency.run(quick, images)
    report.name = "elastic"
    add_speed(report, QUICK if quick else FULL)
    return report


def plot(report: BenchReport, path: str) -> None:
    """Accuracy against beta; needs matplotlib."""
    elastic_consistency.plot(report, path)


def add_speed(report: BenchReport, plan: ElasticPlan) -> None:
    """Measure step times; a row says so where that cannot be."""
    if reason := missing():
        report.add("elastic.speed_measured", 0, "", f"step times need two network namespaces: {reason}")
        return
    runs = measure(plan)
    alone, synchronous, ddp, norm = (runs[way] for way in ("alone", "synchronous", "ddp", HEADLINE))
    for way, one in runs.items():
        against = [one.typical_s / other.typical_s for other in (synchronous, ddp)]
        what = f"{against[0]:.2f} of synchronous, {against[1]:.2f} of DDP; accuracy {100 * one.mean_accuracy:.1f} %"
        report.add(f"elastic.step_ms_{way}", 1e3 * one.typical_s, "ms", what)
    share = 1 - statistics.median(alone.cpu_s) / synchronous.typical_s
    what = f"of a synchronous step, over {1e3 * DELAY_S:g} ms of latency; the rest is computed alone, too"
    report.add("elastic.communication_share", share, "", what)
    what = f"{WAYS[HEADLINE]()!r}: waits for the step before, not for this one; <= 0.8 wanted"
    report.add("elastic.step_time_vs_synchronous", norm.typical_s / synchronous.typical_s, "", what)
    lost = 100 * (synchronous.mean_accuracy - norm.mean_accuracy)
    report.add(
        "elastic.speed_accuracy_drop", lost, "points", f"of it, mean of {plan.seeds} seeds; <= 1 wanted"
    )
    what = "torch's DistributedDataParallel over gloo, not encrypted; <= 1.15 wanted"
    report.add("elastic.synchronous_vs_ddp", synchronous.typical_s / ddp.typical_s, "", what)


def measure(plan: ElasticPlan) -> dict[str, ElasticRuns]:
    """All ways in turn, seed by seed."""
    runs: dict[str, ElasticRuns] = defaultdict(lambda: ElasticRuns([], [], []))
    with SlowLink(delay_s=DELAY_S, jitter_s=JITTER_S) as link, ExitStack() as stack:
        first = stack.enter_context(StepWorker(link.command(0, *WORKER, 0)))
        invite = first.hear()["invite"]
        second = stack.enter_context(StepWorker(link.command(1, *WORKER, 1, invite)))
        second.hear()
        for seed in range(plan.seeds):
            for way in (*OTHERS, *WAYS):
                for worker in (first, second):
                    worker.say(way=way, seed=seed, steps=plan.steps)
                told = [worker.hear() for worker in (first, second)]
                runs[way].step_s.append(max(one["step_s"] for one in told))
                runs[way].cpu_s.append(max(one["cpu_s"] for one in told))
                runs[way].accuracy.append(statistics.mean(one["accuracy"] for one in told))
    return dict(runs)
