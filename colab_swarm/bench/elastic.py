"""Elastic consistency: its cost in accuracy, whether its bounds hold, and the speed that it gains.

The first two are emulated (`elastic_consistency`). Speed is measured with two processes that learn digits, in network
namespaces with 5 ms (+-0.2 ms) of latency: by every scheduler, by torch's `DistributedDataParallel` over gloo, and
alone, in turn and with several seeds, so that all meet the same load. A beta above 0 gains less than 0: the first
bucket of the same step, which is sent early in backward, still takes its 5 ms, and backward here ends before.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import colab_swarm as cs
from colab_swarm.bench import elastic_consistency
from colab_swarm.bench.elastic_consistency import Part, tensors
from colab_swarm.bench.harness import BenchReport, Crew, Parent, call_all, python_command
from colab_swarm.bench.slow_link import ADDRESSES, DEVICE, SlowLink, missing
from colab_swarm.elastic import schedulers
from colab_swarm.elastic.optimizer import ElasticOptimizer
from colab_swarm.recipes.classify import classification_job
from colab_swarm.swarm.swarm import Swarm

plot = elastic_consistency.plot
DELAY_S, JITTER_S = 0.005, 0.0002
WAYS: dict[str, Callable[[], schedulers.Scheduler]] = {
    "synchronous": schedulers.Synchronous,
    "norm_0.5": partial(schedulers.NormBounded, 0.5),
    "norm_0.1": partial(schedulers.NormBounded, 0.1),
    "norm_0": partial(schedulers.NormBounded, 0.0),
    "variance": partial(schedulers.VarianceBounded, 0.001),
    "stale_1": partial(schedulers.BoundedStaleness, 1),
    "crash_1": partial(schedulers.CrashTolerant, 1, 0.001),
}
HEADLINE = "norm_0"
OTHERS = ("alone", "ddp")
PEERS = 2
HIDDEN, LAYERS, BATCH, LR, MOMENTUM = 64, 10, 1024, 0.02, 0.9
PORT = 29_500
WARM_UP, WINDOW = 20, 10


def run(quick: bool = False, data: str = "digits") -> BenchReport:
    """Run all three experiments; ``data`` is an ``.npz`` of images of 32 x 32 where accuracy is compared."""
    report = elastic_consistency.run(quick, data)
    add_speed(report, *((1, 100) if quick else (3, 300)))
    return report


def add_speed(report: BenchReport, seeds: int, steps: int) -> None:
    """Measure step times over ``seeds`` runs of ``steps`` steps; if that is impossible, add a row with the reason."""
    if reason := missing():
        report.add("speed_measured", 0, "", f"step times need two network namespaces: {reason}")
        return
    runs = _measure(seeds, steps)
    step_s = {way: statistics.median(figures["step_s"]) for way, figures in runs.items()}
    synchronous_s, norm_s = step_s["synchronous"], step_s[HEADLINE]
    for way, seconds in step_s.items():
        accuracy = statistics.mean(runs[way]["accuracy"])
        report.add(f"step_ms_{way}", 1e3 * seconds, "ms", f"accuracy {accuracy:.1%}")
    share = 1 - statistics.median(runs["alone"]["cpu_s"]) / synchronous_s
    lost = statistics.mean(runs["synchronous"]["accuracy"]) - statistics.mean(runs[HEADLINE]["accuracy"])
    report.add("communication_share", share, "", f"of a synchronous step, {1e3 * DELAY_S:g} ms of latency")
    report.add("step_time_vs_synchronous", norm_s / synchronous_s, "", f"{HEADLINE}; <= 0.8 wanted")
    report.add("speed_accuracy_drop", 100 * lost, "points", f"of it, mean of {seeds} seeds; <= 1 wanted")
    ratio = synchronous_s / step_s["ddp"]
    report.add("synchronous_vs_ddp", ratio, "", "over gloo, not encrypted; <= 1.15 wanted")


def _measure(seeds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    runs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with SlowLink(delay_s=DELAY_S, jitter_s=JITTER_S) as link, Crew() as crew:
        invite = ""
        for rank in range(PEERS):
            command = ["nice", "-n", "-10", *python_command(train, rank, invite)]
            invite = crew.start(link.command(rank, *command)).receive()["invite"]
        for seed in range(seeds):
            for way in (*OTHERS, *WAYS):
                found = call_all(crew, way=way, seed=seed, steps=steps)
                for key, combine in (("step_s", max), ("cpu_s", max), ("accuracy", statistics.mean)):
                    runs[way][key].append(combine(one[key] for one in found))
    return runs


# --- one of the two peers ---------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A residual layer, (n, HIDDEN) -> (n, HIDDEN)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.relu(self.inner(hidden))


def train(parent: Parent, rank: int, invite: str) -> None:
    """Worker: learn digits step by step, for each message ``{"way": …, "seed": …, "steps": …}``.

    A way is a name of `WAYS`, ``alone`` (no other peer), or ``ddp``: torch's `DistributedDataParallel` over gloo.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    options = cs.NetworkOptions(lan=False, use_relays=False)
    swarm = cs.join(invite, options=options) if invite else cs.create("bench", options=options)
    parent.send(invite=invite or str(swarm.invite()))
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:{PORT}", rank=rank, world_size=PEERS)
    job = classification_job()
    parts = map(tensors, (job.data(), job.validation()))
    data = [((images / 255).flatten(1), labels) for images, labels in parts]
    while True:
        parent.send(**_train_one(swarm, rank, *data, **parent.receive()))


def _train_one(
    swarm: Swarm, rank: int, learned: Part, unseen: Part, *, way: str, seed: int, steps: int
) -> dict[str, float]:
    torch.manual_seed(seed)
    layers = (Layer() for _ in range(LAYERS))
    model = nn.Sequential(nn.Linear(64, HIDDEN), *layers, nn.Linear(HIDDEN, 10))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    forward: nn.Module = DistributedDataParallel(model) if way == "ddp" else model
    if way in WAYS:
        name = f"{way}-{seed}"
        optimizer = swarm.elastic_optimizer(optimizer, peers=PEERS, scheduler=WAYS[way](), name=name)
    rng, (images, labels) = torch.Generator().manual_seed(PEERS * seed + rank), learned
    drawn = [torch.randint(0, len(labels), (BATCH,), generator=rng) for _ in range(steps)]
    ends, computed = [], []
    for inputs, wanted in [(images[rows], labels[rows]) for rows in drawn]:
        F.cross_entropy(forward(inputs), wanted).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
        computed.append(time.thread_time())
    if isinstance(optimizer, ElasticOptimizer):
        optimizer.close()
    with torch.no_grad():
        right = float((model(unseen[0]).argmax(1) == unseen[1]).float().mean())
    return {"step_s": typical(ends), "cpu_s": typical(computed), "accuracy": right}


def typical(ends: list[float]) -> float:
    """Return the lower quartile of a step's time, over windows of steps; other programs only add to it."""
    windows = zip(ends[WARM_UP:], ends[WARM_UP + WINDOW :], strict=False)
    return statistics.quantiles(((end - begin) / WINDOW for begin, end in windows), n=4)[0]
