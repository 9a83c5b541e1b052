"""What inconsistency costs: accuracy against beta, measured distances against Table 1, and error feedback.

Groups are emulated on virtual time, with the product's ledgers, schedulers, meters and codecs and with real gradients.
A backward pass takes a second (+-0.2); a gradient as long to travel, and single buckets longer.

Accuracy depends on beta only where training is on the edge: an MLP of 4 peers at a high rate loses 1.7 points at beta
0, and from 0.1 on nothing beyond the spread of seeds. The bounds for delays and crashes are 1.4 to 4.2 times the
measured distance, those for compression 24 (int8) to 10,000 times (onebit). Their gamma is that of the worst vector
possible; with the largest gamma of the run itself they are 3 to 14 times the measured distance.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from colab_swarm.bench.harness import BenchReport, drawn, torch_threads
from colab_swarm.elastic import schedulers
from colab_swarm.elastic.ledger import GradientLedger
from colab_swarm.elastic.meter import ExactMeter, Meter
from colab_swarm.recipes.classify import classification_job
from colab_swarm.tensors.codecs import Floats, codec_of
from colab_swarm.tensors.feedback import ErrorFeedback
from colab_swarm.workunits.job import Array, Job

Gradient = Callable[[int, int, Floats], Floats]
"""(peer, step, parameters) -> gradient."""
Delay = Callable[[int, int, int, int], float]
"""(sender, receiver, step, bucket) -> seconds."""


@dataclass(frozen=True)
class Crash:
    """A peer computes its gradient of ``step``, sends it only to the peers in ``reached``, and crashes."""

    step: int
    reached: frozenset[int]


@dataclass(frozen=True)
class Scene:
    """A run to emulate.

    Attributes:
        sizes: values per bucket; a gradient is all buckets, one after the other.
        alpha, momentum, decay: of SGD, and whether alpha falls linearly to 0.
        delay: of a bucket on its way; no bucket overtakes another.
        backward_s: seconds of a (peer, step); buckets become ready evenly.
        feedback: whether the residual of a compressed gradient is sent later.
        noticed_s: how long after a crash the other peers notice.
    """

    sizes: tuple[int, ...]
    scheduler: Callable[[], schedulers.Scheduler]
    peers: int = 2
    steps: int = 50
    alpha: float = 0.1
    momentum: float = 0.0
    decay: bool = False
    delay: Delay = lambda sender, receiver, step, bucket: 0.0
    backward_s: Callable[[int, int], float] = lambda peer, step: 1.0
    codec: str = "float32"
    feedback: bool = True
    crashes: Mapping[int, Crash] = field(default_factory=dict)
    noticed_s: float = 0.5


class Member:
    """One peer of an emulation.

    Attributes:
        history: its view at the start of each step, and after the last.
        estimates, found: distances of its views, as its `Meter` estimated them at once and found them later.
        betas: of each step, if they change.
        missing: share of the others' values that came late or never.
    """

    def __init__(self, scene: Scene, index: int, start: Floats) -> None:
        self.scheduler = scene.scheduler()
        self.ledger = GradientLedger(scene.sizes, scene.peers, index, self.scheduler)
        self.meter = Meter(len(scene.sizes), scene.peers)
        self.feedback = ErrorFeedback(len(start))
        self.parameters, self.velocity = start.copy(), np.zeros_like(start)
        self.history: list[Floats] = []
        self.estimates: list[float] = []
        self.found: list[float] = []
        self.betas: list[float] = []
        self.waited_s = self.missing = self.finished_at = 0.0


class Emulation:
    """Runs a scene as a queue of events; the same scene and gradients give the same result.

    Attributes:
        members: by number.
        exact: the distances of all.
        gamma: the largest loss that the codec has caused, ``||Q(w) - w||^2 / ||w||^2``.
        ratios: measured over bound, after each step, with the codec's stated gamma.
        tight_ratios: the same with the gamma found.
        fired: crashes that happened.
    """

    def __init__(self, scene: Scene, start: Floats, gradient: Gradient) -> None:
        self._scene, self._gradient = scene, gradient
        self._codec = codec_of(scene.codec)
        ends = [0, *accumulate(scene.sizes)]
        self._parts = [slice(*ends) for ends in pairwise(ends)]
        self.members = [Member(scene, index, start) for index in range(scene.peers)]
        self.exact = ExactMeter(start, scene.alpha, scene.peers)
        self.gamma, self._stated = 0.0, max(map(self._codec.gamma, scene.sizes))
        self.ratios: list[float] = []
        self.tight_ratios: list[float] = []
        self.fired: list[int] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._arrivals: dict[tuple[int, int], float] = {}
        self._now = 0.0

    def run(self) -> Emulation:
        """Run to the end; return itself.

        Raises:
            RuntimeError: a peer waits for a gradient that never comes.
        """
        for peer in range(self._scene.peers):
            self._begin(peer)
        while self._events:
            self._now, _, event, arguments = heapq.heappop(self._events)
            event(*arguments)
        for peer, member in enumerate(self.members):
            member.ledger.check_invariants()
            if peer not in self.fired and member.ledger.step < self._scene.steps:
                raise RuntimeError(f"peer {peer} waits indefinitely at step {member.ledger.step}")
        return self

    def _at(self, at: float, event: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (at, next(self._order), event, arguments))

    def _begin(self, peer: int) -> None:
        """Start a step: compute its gradient, whose buckets become ready one after the other."""
        member, scene = self.members[peer], self._scene
        step = member.ledger.step
        member.history.append(member.parameters.copy())
        self.exact.on_view(peer, step, member.parameters)
        if step == scene.steps:
            member.finished_at = self._now
            return
        member.feedback.begin()
        gradient = self._gradient(peer, step, member.parameters)
        self.exact.on_gradient(peer, step, gradient)
        bucket_s = scene.backward_s(peer, step) / len(scene.sizes)
        for bucket in range(len(scene.sizes)):
            self._at(self._now + bucket_s * (bucket + 1), self._produce, peer, step, bucket, gradient)

    def _produce(self, peer: int, step: int, bucket: int, gradient: Floats) -> None:
        """Encode a bucket that is ready and send it to all others."""
        member, crash, part = self.members[peer], self._scene.crashes.get(peer), self._parts[bucket]
        sent, lost = self._encode(member, part.start, gradient[part])
        squares = _square(gradient[part]), lost
        member.ledger.on_own(step, bucket, sent, now=self._now)
        member.meter.on_norms(peer, step, *squares)
        crashes = crash is not None and crash.step == step
        for other in range(self._scene.peers):
            if other != peer and not (crash is not None and crashes and other not in crash.reached):
                at = self._now + self._scene.delay(peer, other, step, bucket)
                self._arrivals[peer, other] = at = max(at, self._arrivals.get((peer, other), 0.0))
                self._at(at, self._arrive, other, peer, step, bucket, sent, squares)
        if bucket == len(self._scene.sizes) - 1:
            member.feedback.settle()
            self._crash(peer) if crashes else self._end_step(peer)

    def _encode(self, member: Member, start: int, values: Floats) -> tuple[Floats, float]:
        """Return what the others will decode, and the squared norm of the residual that is sent later."""
        if not self._scene.feedback:
            return self._codec.decode(self._codec.encode(values), len(values)).copy(), 0.0
        wanted = values + member.feedback.residual[start : start + len(values)]
        sent = member.feedback.encode(self._codec, start, values)[1].copy()
        lost = _square(wanted - sent)
        self.gamma = max(self.gamma, lost / (_square(wanted) or 1))
        return sent, lost

    def _arrive(
        self, peer: int, sender: int, step: int, bucket: int, values: Floats, squares: tuple[float, float]
    ) -> None:
        member = self.members[peer]
        if member.ledger.on_received(sender, step, bucket, values):
            member.meter.on_norms(sender, step, *squares)
            self._end_step(peer)

    def _crash(self, peer: int) -> None:
        self.fired.append(peer)
        self.exact.on_lost(peer)
        for other in range(self._scene.peers):
            if other != peer and other not in self.fired:
                at = max(self._now + self._scene.noticed_s, self._arrivals.get((peer, other), 0.0))
                self._at(at, self._notice, other, peer)

    def _notice(self, peer: int, lost: int) -> None:
        self.members[peer].ledger.on_lost(lost)
        self._end_step(peer)

    def _end_step(self, peer: int) -> None:
        """End the step if this peer's gradient is complete and the scheduler agrees."""
        member = self.members[peer]
        if peer in self.fired or not member.ledger.ready:
            return
        status = member.ledger.standing(self._now)
        if member.scheduler.may_go_on(status):
            self._close_step(peer, status)
        elif (seconds := member.scheduler.ask_again_s(status)) is not None:
            self._at(self._now + seconds, self._end_step, peer)

    def _close_step(self, peer: int, status: schedulers.StepStatus) -> None:
        member, scene = self.members[peer], self._scene
        member.waited_s += status.waited_s
        member.missing += status.missing / scene.steps
        closed = member.ledger.close_step()
        distances = member.meter.on_closed(closed)
        member.estimates.append(member.meter.estimate)
        member.found += distances
        if isinstance(member.scheduler, schedulers.AdaptiveBeta):
            member.betas.append(member.scheduler.beta)
            for distance in distances:
                member.scheduler.on_measured(distance)
        member.velocity = scene.momentum * member.velocity + np.concatenate(closed.gradients)
        alpha = scene.alpha * (1 - closed.step / scene.steps if scene.decay else 1)
        member.parameters = member.parameters - np.float32(alpha) * member.velocity
        if not scene.momentum and not scene.decay:  # else x_t is not a plain sum of gradients
            for ratios, gamma in ((self.ratios, self._stated), (self.tight_ratios, self.gamma)):
                if bound := member.scheduler.bound(self.exact.facts(gamma=gamma)):
                    ratios.append(self.exact.measured / bound)
        self._at(self._now, self._begin, peer)


def _square(values: Floats) -> float:
    return float(np.dot(values, values))


# --- the experiments --------------------------------------------------------------------------------------------------

Part = tuple[torch.Tensor, torch.Tensor]
"""Images and labels."""
BETAS = (0.0, 0.1, 0.3, 0.5, 0.8, 1.0)
CODECS = ("float32", "float16", "int8", "topk:0.01", "onebit")
SCHEDULERS: dict[str, Callable[[], schedulers.Scheduler]] = {
    "synchronous": schedulers.Synchronous,
    "norm_l2": partial(schedulers.NormBounded, 0.5),
    "norm_l0": partial(schedulers.NormBounded, 0.5, "l0"),
    "variance": partial(schedulers.VarianceBounded, 0.1),
    "stale_3": partial(schedulers.BoundedStaleness, 3),
    "crash_1": partial(schedulers.CrashTolerant, 1, 0.3),
}
BATCH, TEST_BATCH, BUCKETS = 32, 1000, 8
STAYS_AWAY_S = 0.5
COMPRESSED = Scene((), schedulers.Synchronous, steps=400, momentum=0.9, decay=True)
_MLP = Scene((), schedulers.Synchronous, peers=4, steps=150, alpha=0.6, momentum=0.9, decay=True)
STRESS = {"mlp": _MLP, "resnet": replace(_MLP, peers=2, steps=120, alpha=0.3)}
"""At rates so high that training may depend on consistency; at usual ones all schedulers end equal."""


@dataclass(frozen=True)
class ImageRows:
    """A task to learn, in the words of `classification_job`."""

    data: str | Path = "digits"
    shape: tuple[int, int, int] = (1, 8, 8)
    model: Literal["mlp", "resnet"] = "mlp"


class ConsistencyTask:
    """Images to classify, as gradients over one flat vector: ``start`` at first, the last layer at its begin."""

    def __init__(self, images: ImageRows, seed: int) -> None:
        job, self._train, self._test = _load(images)
        self._model, self._seed = job.with_plan(seed=seed).first_model(), seed
        self._parameters = list(self._model.parameters())[::-1]
        self.start: Floats = parameters_to_vector(self._parameters).detach().numpy()
        self.sizes = tuple(map(len, np.array_split(self.start, BUCKETS)))

    def gradient(self, peer: int, step: int, parameters: Floats) -> Floats:
        """Return the gradient of the mean loss of one batch, drawn by seed, peer and step."""
        inputs, labels = self._train
        rng = torch.Generator().manual_seed((self._seed * 1000 + peer) * 100_000 + step)
        chosen = torch.randint(len(labels), (BATCH,), generator=rng)
        vector_to_parameters(torch.from_numpy(parameters), self._parameters)
        loss = nn.functional.cross_entropy(self._model.train()(inputs[chosen]), labels[chosen])
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, self._parameters)]).numpy()

    @torch.no_grad()
    def accuracy(self, parameters: Floats) -> float:
        """Return the percentage of the test images that are classified right."""
        inputs, labels = self._test
        vector_to_parameters(torch.from_numpy(parameters), self._parameters)
        guesses = [self._model.eval()(part).argmax(1) for part in torch.split(inputs, TEST_BATCH)]
        return 100 * float((torch.cat(guesses) == labels).float().mean())


@lru_cache(maxsize=1)
def _load(images: ImageRows) -> tuple[Job, Part, Part]:
    job = classification_job(images.data, shape=images.shape, model=images.model)
    return job, tensors(job.data()), tensors(job.validation())


def tensors(part: Sequence[Array]) -> Part:
    """Return the images and labels of a job as tensors."""
    return torch.from_numpy(part[0]), torch.from_numpy(part[1])


def slow_network(sizes: tuple[int, ...], seed: int) -> Delay:
    """Return delays of a second for a whole gradient, plus a random time for each bucket."""

    def delay(sender: int, receiver: int, step: int, bucket: int) -> float:
        chance = random.Random(f"{seed} {sender} {receiver} {step} {bucket}")
        return sizes[bucket] / sum(sizes) + chance.expovariate(1 / STAYS_AWAY_S)

    return delay


def uneven(peer: int, step: int) -> float:
    """Return the seconds of a backward pass."""
    return random.Random(f"{peer} {step}").uniform(0.8, 1.2)


def emulate(
    images: ImageRows, scene: Scene, seed: int, *, delayed: bool = True
) -> tuple[ConsistencyTask, Emulation]:
    """Emulate one run of ``scene``, which has no sizes and delays yet."""
    task = ConsistencyTask(images, seed)
    scene = replace(scene, sizes=task.sizes, backward_s=uneven)
    if delayed:
        scene = replace(scene, delay=slow_network(task.sizes, seed))
    return task, Emulation(scene, task.start, task.gradient).run()


class Outcome(NamedTuple):
    """Percent right at the end, share of the values that came late, root mean square distance, seconds of a step."""

    accuracy: float
    missing: float
    distance: float
    step_s: float


def train(images: ImageRows, scene: Scene, seed: int, *, delayed: bool = True) -> Outcome:
    """Emulate one run and classify the test images; return the mean over its peers."""
    task, run = emulate(images, scene, seed, delayed=delayed)
    of_each = (
        (task.accuracy(one.parameters), one.missing, one.meter.measured, one.finished_at / scene.steps)
        for one in run.members
    )
    return Outcome(*map(statistics.mean, zip(*of_each, strict=True)))


def accuracies(report: BenchReport, images: ImageRows, like: Scene, seeds: int) -> float:
    """Report the final accuracy for each scheduler, over the seeds; return how much beta 0.8 loses, in points."""
    cases: dict[str, Callable[[], schedulers.Scheduler]] = {
        "variance": partial(schedulers.VarianceBounded, 0.1)
    }
    cases |= {f"beta_{beta:g}": partial(schedulers.NormBounded, beta) for beta in BETAS}
    accuracy = {}
    for case, scheduler in cases.items():
        outcomes = [train(images, replace(like, scheduler=scheduler), seed) for seed in range(seeds)]
        found = Outcome(*map(statistics.mean, zip(*outcomes, strict=True)))
        spread = statistics.stdev(one.accuracy for one in outcomes) if seeds > 1 else 0.0
        note = f"+- {spread:.2f}, {seeds} seeds; {found.missing:.0%} came late, {found.step_s:.2f} s a step"
        report.add(f"accuracy_{images.model}_{case}", found.accuracy, "%", note)
        report.add(f"distance_{images.model}_{case}", found.distance, "", "||x - v|| / alpha, rms")
        accuracy[case] = found.accuracy
    return accuracy["beta_1"] - accuracy["beta_0.8"]


def ratios(report: BenchReport, images: ImageRows, steps: int, peers: int = 4) -> None:
    """Report the largest measured distance over its bound; the note has the inverse: how loose the bound is."""
    worst = tightest = 0.0
    for name, scheduler in SCHEDULERS.items():
        crashes = {peers - 1: Crash(steps // 2, frozenset({0}))} if name == "crash_1" else {}
        for codec in CODECS:
            scene = Scene((), scheduler, peers=peers, steps=steps, codec=codec, crashes=crashes)
            _, run = emulate(images, scene, 0)
            if not run.ratios:
                continue  # perfectly consistent: the bound is 0
            worst, tightest = max(worst, *run.ratios), max(tightest, *run.tight_ratios)
            stated, found = 1 / max(run.ratios), 1 / max(run.tight_ratios)
            note = f"bound / measured = {stated:.3g}, {found:.3g} with gamma as found"
            report.add(f"bound_ratio_{name}_{codec}", max(run.ratios), "", note)
    report.add("max_bound_ratio", worst, "", "largest measured / bound; <= 1 wanted")
    report.add("max_bound_ratio_found_gamma", tightest, "", "the same, with the gamma of the run")


def compressions(report: BenchReport, images: ImageRows, like: Scene, seeds: int) -> None:
    """Report the accuracy with one value of a hundred, with and without error feedback, against all values."""
    topk = replace(like, codec="topk:0.01")
    found = [
        statistics.mean(train(images, scene, seed, delayed=False).accuracy for seed in range(seeds))
        for scene in (like, topk, replace(topk, feedback=False))
    ]
    note = f"of {found[0]:.2f} % uncompressed, {seeds} seeds, {like.steps} steps"
    report.add("topk_feedback_drop", found[0] - found[1], "points", note)
    report.add("topk_alone_drop", found[0] - found[2], "points", note)


def run(quick: bool = False, images: ImageRows | None = None) -> BenchReport:
    """Run all three experiments.

    Args:
        images: for the first: instead of digits, by an MLP and, unless ``quick``, by a residual network.
    """
    report, seeds = BenchReport("elastic", quick), 1 if quick else 3
    learnt = [images] if images else [ImageRows()] if quick else [ImageRows(), ImageRows(model="resnet")]
    with torch_threads(1):  # tensors are tiny
        drops = [accuracies(report, one, STRESS[one.model], seeds) for one in learnt]
        report.add("accuracy_drop", max(drops), "points", "of beta 0.8 against 1; <= 1 wanted")
        ratios(report, ImageRows(), steps=20 if quick else 150)
        compressions(report, ImageRows(), COMPRESSED, seeds)
    return report


def plot(report: BenchReport, path: str) -> None:
    """Draw accuracy and distance over beta; needs matplotlib."""
    figures = report.figures
    titles = {"accuracy": "accuracy on unseen images, %", "distance": "||x - v|| / learning rate"}
    with drawn(path, (10, 4), 2) as both:
        for axes, (kind, title) in zip(both, titles.items(), strict=True):
            axes.set(xlabel="beta", ylabel=title)
            for color, model in enumerate(model for model in STRESS if f"{kind}_{model}_variance" in figures):
                look: dict[str, Any] = {"color": f"C{color}"}
                values = [figures[f"{kind}_{model}_beta_{beta:g}"] for beta in BETAS]
                axes.plot(BETAS, values, marker="o", label=f"{model}, norm-bounded", **look)
                variance = figures[f"{kind}_{model}_variance"]
                axes.axhline(variance, linestyle="--", label=f"{model}, variance-bounded", **look)
