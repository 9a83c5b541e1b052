"""One of two peers that learn digits, step by step: of ``bench elastic``.

    python -m colab_swarm.bench.elastic_worker RANK [INVITATION]

Prints an invitation, then for each line ``{"way": …, "seed": …, "steps": …}`` on stdin the seconds of a step, those
that its thread computed, and the accuracy in the end. A way is a name of `WAYS`, ``alone`` (no other peer), or ``ddp``:
torch's `DistributedDataParallel` over gloo.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import colab_swarm as cs
from colab_swarm.bench.slow_link import ADDRESSES, DEVICE
from colab_swarm.elastic.optimizer import ElasticOptimizer
from colab_swarm.elastic.schedulers import (
    BoundedStaleness,
    CrashTolerant,
    NormBounded,
    Scheduler,
    Synchronous,
    VarianceBounded,
)
from colab_swarm.recipes.classify import classification_job
from colab_swarm.swarm.swarm import Swarm

WAYS: dict[str, Callable[[], Scheduler]] = {
    "synchronous": Synchronous,
    "norm_0.5": partial(NormBounded, 0.5),
    "norm_0.1": partial(NormBounded, 0.1),
    "norm_0": partial(NormBounded, 0.0),
    "variance": partial(VarianceBounded, 0.001),
    "stale_1": partial(BoundedStaleness, 1),
    "crash_1": partial(CrashTolerant, 1, 0.001),
}
HEADLINE = "norm_0"
OTHERS = ("alone", "ddp")
PEERS = 2
HIDDEN, LAYERS, BATCH, LR, MOMENTUM = 64, 10, 1024, 0.02, 0.9
PORT = 29_500
"""For gloo; the namespace is this benchmark's own."""
WARM_UP, WINDOW = 20, 10
"""Steps that are not counted; steps over which a time is the mean: single ones may be short and long in turn."""


class Digits:
    """The images, and one peer's random batches of them."""

    def __init__(self) -> None:
        job = classification_job()
        self.train, self.test = (
            [torch.from_numpy(part) for part in read()] for read in (job.data, job.validation)
        )

    def batches(self, steps: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """So many, prepared in advance."""
        rng = torch.Generator().manual_seed(seed)
        images, labels = self._ready(self.train)
        drawn = [torch.randint(0, len(labels), (BATCH,), generator=rng) for _ in range(steps)]
        return [(images[rows], labels[rows]) for rows in drawn]

    def accuracy(self, model: nn.Module) -> float:
        images, labels = self._ready(self.test)
        with torch.no_grad():
            return float((model(images).argmax(1) == labels).float().mean())

    @staticmethod
    def _ready(part: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return part[0].flatten(1).float() / 255, part[1]


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(n, HIDDEN) -> the same."""
        return hidden + F.relu(self.inner(hidden))


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, HIDDEN), *(Layer() for _ in range(LAYERS)), nn.Linear(HIDDEN, 10))


def measure(swarm: Swarm, digits: Digits, rank: int, *, way: str, seed: int, steps: int) -> dict[str, Any]:
    """Train one model; ends when this peer does, not the other."""
    model = network(seed)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    forward = model
    if way == "ddp":
        forward = DistributedDataParallel(model)
    elif way != "alone":
        optimizer = swarm.elastic_optimizer(
            optimizer, peers=PEERS, scheduler=WAYS[way](), name=f"{way}-{seed}"
        )
    ends, computed = [], []
    for images, labels in digits.batches(steps, PEERS * seed + rank):
        F.cross_entropy(forward(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
        computed.append(time.thread_time())
    if isinstance(optimizer, ElasticOptimizer):
        optimizer.close()
    return {"step_s": typical(ends), "cpu_s": typical(computed), "accuracy": digits.accuracy(model)}


def typical(ends: list[float]) -> float:
    """The lower quartile of a step's time, over windows of some; other programs only add to it."""
    windows = zip(ends[WARM_UP:], ends[WARM_UP + WINDOW :], strict=False)
    return statistics.quantiles(((end - begin) / WINDOW for begin, end in windows), n=4)[0]


def main(rank: int, invites: list[str]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    options = cs.NetworkOptions(lan=False, use_relays=False)
    swarm = cs.join(invites[0], options=options) if invites else cs.create("bench", options=options)
    print(json.dumps({"invite": "" if invites else str(swarm.invite())}), flush=True)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:{PORT}", rank=rank, world_size=PEERS)
    digits = Digits()
    for line in sys.stdin:
        print(json.dumps(measure(swarm, digits, rank, **json.loads(line))), flush=True)
    swarm.leave()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
