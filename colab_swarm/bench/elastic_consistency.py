"""What inconsistency costs: accuracy against beta, measured distances against Table 1, and error feedback.

Groups are emulated (`elastic_emulation`): real ledgers, schedulers, codecs and gradients, on virtual time. A backward
pass takes a second, give or take a fifth; a gradient as long to travel, and single buckets stay away longer.

* `accuracies`: the norm-bounded scheduler for several beta, and the variance-bounded one; the paper's Figure 1 (left).
* `ratios`: measured over bound, for every scheduler and codec, with the M and sigma of the same run.
* `compressions`: topk at 1 % with and without error feedback.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from colab_swarm.bench.elastic_emulation import Crash, Delay, Emulation, Scene
from colab_swarm.bench.report import Report
from colab_swarm.elastic.schedulers import (
    BoundedStaleness,
    CrashTolerant,
    NormBounded,
    Scheduler,
    Synchronous,
    VarianceBounded,
)
from colab_swarm.recipes.classify import classification_job
from colab_swarm.tensors.codecs import Floats

BETAS = (0.0, 0.1, 0.3, 0.5, 0.8, 1.0)
CODECS = ("float32", "float16", "int8", "topk:0.01", "onebit")
SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "synchronous": Synchronous,
    "norm_l2": partial(NormBounded, 0.5),
    "norm_l0": partial(NormBounded, 0.5, "l0"),
    "variance": partial(VarianceBounded, 0.1),
    "stale_3": partial(BoundedStaleness, 3),
    "crash_1": partial(CrashTolerant, 1, 0.3),
}
BATCH, BUCKETS = 32, 8
STAYS_AWAY_S = 0.5


@dataclass(frozen=True)
class Images:
    """What is learnt.

    Attributes:
        data: ``digits``, or an ``.npz`` file as `classification_job` takes it.
        shape: channels, height, width.
        model: an MLP or a small residual network.
    """

    data: str | Path = "digits"
    shape: tuple[int, int, int] = (1, 8, 8)
    model: Literal["mlp", "resnet"] = "mlp"


class Task:
    """Images to classify, as gradients over one flat vector that begins with the last layer.

    Attributes:
        start: the first parameters.
        sizes: values of each bucket; they are of equal size.
    """

    def __init__(self, images: Images, seed: int) -> None:
        job = classification_job(images.data, shape=images.shape, model=images.model).with_plan(seed=seed)
        self._model, self._seed = job.first_model(), seed
        self._train, self._test = (
            tuple(map(torch.from_numpy, part())) for part in (job.data, job.validation)
        )
        self._parameters = list(self._model.parameters())[::-1]
        self.start: Floats = parameters_to_vector(self._parameters).detach().numpy()
        self.sizes = tuple(map(len, np.array_split(self.start, BUCKETS)))

    def gradient(self, peer: int, step: int, parameters: Floats) -> Floats:
        """Of the mean loss of one batch, drawn by seed, peer and step."""
        inputs, labels = self._train
        rng = torch.Generator().manual_seed((self._seed * 1000 + peer) * 100_000 + step)
        chosen = torch.randint(len(labels), (BATCH,), generator=rng)
        self._load(parameters)
        loss = nn.functional.cross_entropy(self._model.train()(inputs[chosen]), labels[chosen])
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, self._parameters)]).numpy()

    @torch.no_grad()
    def accuracy(self, parameters: Floats) -> float:
        """Share of the test images that are classified right, in percent."""
        inputs, labels = self._test
        self._load(parameters)
        guesses = [self._model.eval()(part).argmax(1) for part in inputs.split(1000)]
        return 100 * float((torch.cat(guesses) == labels).float().mean())

    def _load(self, parameters: Floats) -> None:
        vector_to_parameters(torch.from_numpy(parameters), self._parameters)


def slow_network(sizes: tuple[int, ...], seed: int) -> Delay:
    """A second for a whole gradient, and as chance has it more."""

    def delay(sender: int, receiver: int, step: int, bucket: int) -> float:
        chance = random.Random(f"{seed} {sender} {receiver} {step} {bucket}")
        return sizes[bucket] / sum(sizes) + chance.expovariate(1 / STAYS_AWAY_S)

    return delay


def uneven(peer: int, step: int) -> float:
    """Seconds of a backward pass."""
    return random.Random(f"{peer} {step}").uniform(0.8, 1.2)


def emulate(images: Images, scene: Scene, seed: int, *, delayed: bool = True) -> tuple[Task, Emulation]:
    """One run; ``scene`` without sizes and delays."""
    task = Task(images, seed)
    scene = replace(scene, sizes=task.sizes, backward_s=uneven)
    if delayed:
        scene = replace(scene, delay=slow_network(task.sizes, seed))
    return task, Emulation(scene, task.start, task.gradient).run()


@dataclass(frozen=True)
class Outcome:
    """Of one run: percent right at the end, mean of the peers; share of values that came late; the meter; seconds."""

    accuracy: float
    missing: float
    distance: float
    step_s: float


def train(images: Images, scene: Scene, seed: int, *, delayed: bool = True) -> Outcome:
    """Emulate, and classify the test images."""
    task, run = emulate(images, scene, seed, delayed=delayed)
    members = run.members

    def mean(of: Callable[[Any], float]) -> float:
        return statistics.mean(map(of, members))

    return Outcome(
        mean(lambda member: task.accuracy(member.parameters)),
        mean(lambda member: member.missing),
        mean(lambda member: member.meter.measured),
        mean(lambda member: member.finished_at) / scene.steps,
    )


def accuracies(report: Report, images: Images, like: Scene, seeds: int) -> None:
    """Accuracy at the end for each scheduler, over the seeds."""
    cases: dict[str, Callable[[], Scheduler]] = {
        f"beta_{beta:g}": partial(NormBounded, beta) for beta in BETAS
    }
    cases["variance"] = partial(VarianceBounded, 0.1)
    found = {}
    for name, scheduler in cases.items():
        outcomes = [train(images, replace(like, scheduler=scheduler), seed) for seed in range(seeds)]
        found[name] = statistics.mean(one.accuracy for one in outcomes)
        step_s, missing, distance = (
            statistics.mean(values)
            for values in zip(*((o.step_s, o.missing, o.distance) for o in outcomes), strict=True)
        )
        spread = statistics.stdev(one.accuracy for one in outcomes) if seeds > 1 else 0.0
        report.add(
            f"elastic.accuracy_{name}",
            found[name],
            "%",
            f"+- {spread:.2f}, {seeds} seeds; {missing:.0%} came late, distance {distance:.2f}, {step_s:.2f} s a step",
        )
        report.add(f"elastic.distance_{name}", distance, "", "||x - v|| / alpha, root mean square")
    drop = found["beta_1"] - found["beta_0.8"]
    report.add("elastic.accuracy_drop", drop, "points", "of beta 0.8 against 1; <= 1 wanted")


def ratios(report: Report, images: Images, steps: int, peers: int = 4) -> None:
    """Measured distance over its bound, at worst in the run; at the end of a note the reverse: what the bound wastes."""
    worst = tightest = 0.0
    for name, scheduler in SCHEDULERS.items():
        crashes = {peers - 1: Crash(steps // 2, frozenset({0}))} if name == "crash_1" else {}
        for codec in CODECS:
            scene = Scene((), scheduler, peers=peers, steps=steps, codec=codec, crashes=crashes)
            _, run = emulate(images, scene, 0)
            if not run.ratios:
                continue  # perfectly consistent: the bound is 0
            worst, tightest = max(worst, *run.ratios), max(tightest, *run.tight_ratios)
            wasted = f"bound / measured = {1 / max(run.ratios):.3g}, {1 / max(run.tight_ratios):.3g} with gamma as found"
            report.add(f"elastic.bound_ratio_{name}_{codec}", max(run.ratios), "", wasted)
    report.add("elastic.max_bound_ratio", worst, "", "largest measured / bound; <= 1 wanted")
    report.add("elastic.max_bound_ratio_found_gamma", tightest, "", "the same, with the gamma of the run")


def compressions(report: Report, images: Images, like: Scene, seeds: int) -> None:
    """Accuracy with one value of a hundred, its residual fed back or thrown away, against all values."""
    cases = {
        "float32": like,
        "topk_feedback": replace(like, codec="topk:0.01"),
        "topk_alone": replace(like, codec="topk:0.01", feedback=False),
    }
    found = {
        name: statistics.mean(train(images, scene, seed, delayed=False).accuracy for seed in range(seeds))
        for name, scene in cases.items()
    }
    for name in ("topk_feedback", "topk_alone"):
        note = f"of {found['float32']:.2f} % uncompressed, {seeds} seeds, {like.steps} steps"
        report.add(f"elastic.{name}_drop", found["float32"] - found[name], "points", note)
