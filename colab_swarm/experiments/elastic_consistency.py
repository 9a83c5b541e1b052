"""The effects of inconsistency: accuracy by beta, measured distances compared with Table 1, and error feedback.

Groups are emulated on virtual time, with the package's ledgers, schedulers, meters and codecs, and with real
gradients. A backward pass takes a second (+-0.2). A gradient takes as long to arrive, and some of its buckets longer.

Accuracy depends on beta only if the learning rate is so high that training is almost unstable: an MLP at 4 peers with
a high rate loses 1.7 points at beta 0. The bounds for delays and crashes are 1.4 to 4.2 times the measured distance;
those for compression are 24 times (int8) to 10,000 times (onebit) the measured distance.
"""

import heapq
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count, pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from colab_swarm.elastic import schedulers
from colab_swarm.elastic.ledger import Closed, GradientLedger, Meter, Recent
from colab_swarm.experiments.report import Report, draw, reports
from colab_swarm.recipes.classify import classification_job, shape_of
from colab_swarm.tensors.codecs import ErrorFeedback, Floats, codec_of
from colab_swarm.workunits.job import Array

NOTICED_S = 0.5
Gradient = Callable[[int, int, Floats], Floats]  # (peer, step, parameters) -> gradient
Delay = Callable[[int, int, int, int], float]  # (sender, receiver, step, bucket) -> seconds


@dataclass(frozen=True)
class Crash:
    """A peer sends its gradient of ``step`` only to the peers in ``reached``, and then crashes."""

    step: int
    reached: frozenset[int]


@dataclass(frozen=True)
class Scene:
    """A run to emulate. ``sizes`` are the numbers of values of the buckets, which together form a gradient.

    ``decay``: alpha falls linearly to 0. ``delay`` is the time that a bucket takes to arrive; no bucket
    overtakes another. ``feedback``: the residual of a compressed gradient is sent later.
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


class Member:
    """One peer: ``history`` is its view at each step, ``found`` the distances of these views by its `Meter`."""

    def __init__(self, scene: Scene, index: int, start: Floats) -> None:
        self.scheduler = scene.scheduler()
        self.ledger = GradientLedger(scene.sizes, scene.peers, index, self.scheduler)
        single = index if self.scheduler.single_steps else None
        self.meter = Meter(len(scene.sizes), scene.peers, single)
        self.feedback = ErrorFeedback(len(start))
        self.parameters = start.copy()
        self.velocity = np.zeros_like(start)
        self.history: list[Floats] = []
        self.found: list[float] = []
        self.betas: list[float] = []
        self.waited_s = 0.0


class Emulation:
    """Runs a scene as a queue of events; the same scene and gradients give the same result.

    Let x_t be the global parameter at step t, v_t^i the view of peer i, and alpha the learning rate. With plain SGD,
    ``distances`` are the exact ``||x_t - v_t^i|| / alpha`` by peer and step. ``moments`` measures the gradients of all
    peers. ``ratios`` are, for each step, the measured distance divided by its bound.
    """

    def __init__(self, scene: Scene, start: Floats, gradient: Gradient) -> None:
        self._scene = scene
        self._gradient = gradient
        self._codec = codec_of(scene.codec)
        self._parts = [slice(*ends) for ends in pairwise([0, *accumulate(scene.sizes)])]
        self.members = [Member(scene, index, start) for index in range(scene.peers)]
        self.distances: dict[tuple[int, int], float] = {}
        self.moments = Meter(1, scene.peers)
        self.measured = 0.0
        self._gradients: dict[int, dict[int, dict[int, Floats]]] = defaultdict(dict)  # as in `Closed.arrived`
        self._gamma = max(map(self._codec.gamma, scene.sizes))
        self.ratios: list[float] = []
        self.fired: list[int] = []
        self._events: list[tuple[float, int, partial[None]]] = []
        self._order = count()
        self._arrivals: dict[tuple[int, int], float] = {}
        self._now = 0.0

    def run(self) -> "Emulation":
        """Run to the end and return this emulation. Raises RuntimeError if a peer would wait forever."""
        for peer in range(self._scene.peers):
            self._begin(peer)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        for peer, member in enumerate(self.members):
            member.ledger.check_invariants()
            if peer not in self.fired and member.ledger.step < self._scene.steps:
                raise RuntimeError(f"peer {peer} waits indefinitely at step {member.ledger.step}")
        if (
            not self._scene.momentum and not self._scene.decay
        ):  # otherwise x_t is not a plain sum of gradients
            self._measure()
        return self

    def _measure(self) -> None:
        scene = self._scene
        recent = [Recent() for _ in self.members]
        exact = self.members[0].history[0].astype(np.float64)
        single = self.members[0].scheduler.single_steps
        rate = scene.alpha if single else scene.alpha / scene.peers
        for step in range(scene.steps + 1):
            gradients = self._gradients.pop(step, {})
            change = np.zeros_like(exact)
            for peer, member in enumerate(self.members):
                if step < len(member.history):
                    # with single steps, x_t also has the gradients of the peers before this one
                    view = member.history[step] - change if single else member.history[step]
                    distance = float(np.linalg.norm(exact - view)) / scene.alpha
                    self.distances[peer, step] = distance
                    recent[peer].add(distance**2)
                if peer in gradients:
                    change -= rate * gradients[peer][0].astype(np.float64)
            self.measured = max(mean.value for mean in recent) ** 0.5
            for peer, buckets in gradients.items():
                self.moments.on_norms(peer, step, float(np.dot(buckets[0], buckets[0])), 0.0)
            exact += change
            self.moments.on_closed(Closed(step, [], gradients, (), frozenset()))
            crashed = sum(crash.step < step for crash in scene.crashes.values())
            bound = self.members[0].scheduler.bound(self.moments.facts(gamma=self._gamma, crashed=crashed))
            if bound:
                self.ratios.append(self.measured / bound)

    def _at(self, at: float, event: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (at, next(self._order), partial(event, *arguments)))

    def _begin(self, peer: int) -> None:
        member = self.members[peer]
        scene = self._scene
        step = member.ledger.step
        member.history.append(member.parameters.copy())
        if step == scene.steps:
            return
        if not scene.feedback:
            member.feedback = ErrorFeedback(len(member.parameters))
        member.feedback.begin()
        gradient = self._gradient(peer, step, member.parameters)
        if not scene.momentum and not scene.decay:
            self._gradients[step][peer] = {0: gradient}
        bucket_s = scene.backward_s(peer, step) / len(scene.sizes)
        for bucket in range(len(scene.sizes)):
            self._at(self._now + bucket_s * (bucket + 1), self._produce, peer, step, bucket, gradient)

    def _produce(self, peer: int, step: int, bucket: int, gradient: Floats) -> None:
        member = self.members[peer]
        crash = self._scene.crashes.get(peer)
        part = self._parts[bucket]
        wanted = gradient[part] + member.feedback.residual[part]
        sent = member.feedback.encode(self._codec, part.start, gradient[part])[1].copy()
        own = gradient[part]
        lost = wanted - sent
        squares = float(np.dot(own, own)), float(np.dot(lost, lost))
        member.ledger.on_own(step, bucket, sent, now=self._now)
        member.meter.on_norms(peer, step, *squares)
        last_words = None
        receivers: Iterable[int] = range(self._scene.peers)
        if crash is not None and crash.step == step:
            last_words = crash
            receivers = crash.reached
        for other in receivers:
            if other != peer:
                at = self._now + self._scene.delay(peer, other, step, bucket)
                self._arrivals[peer, other] = at = max(at, self._arrivals.get((peer, other), 0.0))
                self._at(at, self._arrive, other, peer, step, bucket, sent, squares)
        if bucket == len(self._scene.sizes) - 1:
            member.feedback.settle()
            if last_words is None:
                self._end_step(peer)
            else:
                self._crash(peer)

    def _arrive(
        self, peer: int, sender: int, step: int, bucket: int, values: Floats, squares: tuple[float, float]
    ) -> None:
        member = self.members[peer]
        if member.ledger.on_received(sender, step, bucket, values):
            member.meter.on_norms(sender, step, *squares)
            self._end_step(peer)

    def _crash(self, peer: int) -> None:
        self.fired.append(peer)
        for other in range(self._scene.peers):
            if other != peer and other not in self.fired:
                at = max(self._now + NOTICED_S, self._arrivals.get((peer, other), 0.0))
                self._at(at, self._notice, other, peer)

    def _notice(self, peer: int, lost: int) -> None:
        self.members[peer].ledger.on_lost(lost)
        self._end_step(peer)

    def _end_step(self, peer: int) -> None:
        member = self.members[peer]
        if peer in self.fired or not member.ledger.ready:
            return
        status = member.ledger.standing(self._now)
        if member.scheduler.may_go_on(status):
            self._close_step(peer, status)
        elif (seconds := member.scheduler.ask_again_s(status)) is not None:
            self._at(self._now + seconds, self._end_step, peer)

    def _close_step(self, peer: int, status: schedulers.StepStatus) -> None:
        member = self.members[peer]
        scene = self._scene
        member.waited_s += status.waited_s
        closed = member.ledger.close_step()
        distances = member.meter.on_closed(closed)
        member.found += distances
        if isinstance(member.scheduler, schedulers.AdaptiveBeta):
            member.betas.append(member.scheduler.beta)
            for distance in distances:
                member.scheduler.on_measured(distance)
        alpha = scene.alpha * (1 - closed.step / scene.steps if scene.decay else 1)
        for update in closed.updates:
            member.velocity = scene.momentum * member.velocity + np.concatenate(update)
            member.parameters = member.parameters - np.float32(alpha) * member.velocity
        self._at(self._now, self._begin, peer)


Part = tuple[torch.Tensor, torch.Tensor]
Model = Literal["mlp", "resnet"]
BETAS = (0.0, 0.1, 0.3, 0.5, 0.8, 1.0)
CODECS = ("float32", "float16", "int8", "topk:0.01", "onebit")
SCHEDULERS: dict[str, Callable[[], schedulers.Scheduler]] = {
    "synchronous": schedulers.Synchronous,
    "norm_l2": partial(schedulers.NormBounded, 0.5),
    "norm_l0": partial(schedulers.NormBounded, 0.5, "l0"),
    "variance": partial(schedulers.VarianceBounded, 0.1),
    "stale_3": partial(schedulers.BoundedStaleness, 3),
    "stale_3_own": partial(schedulers.BoundedStaleness, 3, stand_in=True),
    "stale_3_single": partial(schedulers.BoundedStaleness, 3, single_steps=True),
    "crash_1": partial(schedulers.CrashTolerant, 1, 0.3),
    "crash_1_own": partial(schedulers.CrashTolerant, 1, 0.3, stand_in=True),
}
BATCH = 32
BUCKETS = 8
COMPRESSED = Scene((), schedulers.Synchronous, steps=400, momentum=0.9, decay=True)
_MLP = Scene((), schedulers.Synchronous, peers=4, steps=150, alpha=0.6, momentum=0.9, decay=True)
STRESS: dict[Model, Scene] = {"mlp": _MLP, "resnet": replace(_MLP, peers=2, steps=120, alpha=0.3)}
"""Runs with learning rates so high that consistency may matter; with usual rates all schedulers give equal results."""


class ConsistencyTask:
    """A task on images whose gradients form one flat vector, the last layer first."""

    def __init__(self, seed: int, model: Model = "mlp", data: str = "digits") -> None:
        job = classification_job(data, shape=shape_of(data), model=model)
        self._train = tensors(job.data())
        self._test = tensors(job.validation())
        self._model = job.with_plan(seed=seed).first_model()
        self._seed = seed
        self._parameters = list(self._model.parameters())[::-1]
        self.start: Floats = parameters_to_vector(self._parameters).detach().numpy()
        self.sizes = tuple(map(len, np.array_split(self.start, BUCKETS)))

    def gradient(self, peer: int, step: int, parameters: Floats) -> Floats:
        inputs, labels = self._train
        rng = torch.Generator().manual_seed((self._seed * 1000 + peer) * 100_000 + step)
        chosen = torch.randint(len(labels), (BATCH,), generator=rng)
        vector_to_parameters(torch.from_numpy(parameters), self._parameters)
        loss = nn.functional.cross_entropy(self._model.train()(inputs[chosen]), labels[chosen])
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, self._parameters)]).numpy()

    @torch.no_grad()
    def accuracy(self, parameters: Floats) -> float:
        inputs, labels = self._test
        vector_to_parameters(torch.from_numpy(parameters), self._parameters)
        guesses = [self._model.eval()(part).argmax(1) for part in torch.split(inputs, 1000)]
        return 100 * float((torch.cat(guesses) == labels).float().mean())


def tensors(part: Sequence[Array]) -> Part:
    return torch.from_numpy(part[0]), torch.from_numpy(part[1])


def emulate(task: ConsistencyTask, scene: Scene, seed: int) -> Emulation:
    """Emulate ``scene``, given without sizes: a gradient takes 1 s to arrive, a bucket on average 0.5 s more."""

    def delay(sender: int, receiver: int, step: int, bucket: int) -> float:
        chance = random.Random(f"{seed} {sender} {receiver} {step} {bucket}")
        return task.sizes[bucket] / len(task.start) + chance.expovariate(2)

    slow = replace(
        scene,
        sizes=task.sizes,
        backward_s=lambda peer, step: random.Random(f"{peer} {step}").uniform(0.8, 1.2),
        delay=delay,
    )
    return Emulation(slow, task.start, task.gradient).run()


def measure_schedulers(report: Report, data: str, model: Model, seeds: int) -> float:
    """Report the final accuracy for each scheduler; return the points of accuracy that beta 0.8 loses."""
    cases = {"variance": SCHEDULERS["variance"]}
    cases |= {f"beta_{beta:g}": partial(schedulers.NormBounded, beta) for beta in BETAS}
    for case, scheduler in cases.items():
        accuracies = []
        distances = []
        for seed in range(seeds):
            task = ConsistencyTask(seed, model, data)
            members = emulate(task, replace(STRESS[model], scheduler=scheduler), seed).members
            accuracies.append(statistics.mean(task.accuracy(member.parameters) for member in members))
            distances.append(statistics.mean(member.meter.measured for member in members))
        report.add_seeds(f"accuracy_{model}_{case}", accuracies, "%")
        report.add_seeds(f"distance_{model}_{case}", distances, "", "||x - v|| / alpha, rms")
    return report.figures[f"accuracy_{model}_beta_1"] - report.figures[f"accuracy_{model}_beta_0.8"]


def ratios(report: Report, steps: int, peers: int = 4, data: str = "digits") -> None:
    task = ConsistencyTask(0, data=data)
    largest = 0.0
    for name, scheduler in SCHEDULERS.items():
        if name.startswith("crash"):
            crashes = {peers - 1: Crash(steps // 2, frozenset({0}))}
        else:
            crashes = {}
        for codec in CODECS:
            scene = Scene((), scheduler, peers=peers, steps=steps, codec=codec, crashes=crashes)
            run = emulate(task, scene, 0)
            # without ratios the run is perfectly consistent, with a bound of 0
            if run.ratios:
                # np.max returns NaN if a run diverged
                ratio = float(np.max(run.ratios))
                largest = float(np.maximum(largest, ratio))
                report.add(f"bound_ratio_{name}_{codec}", ratio, "", "measured / bound")
    report.add("max_bound_ratio", largest, "", "largest measured / bound; <= 1 wanted")


def gammas(report: Report) -> None:
    """Report the largest ``||Q(w) - w||^2 / ||w||^2`` of gradients w, and the codec's bound (equation 25)."""
    task = ConsistencyTask(0)
    gradients = [task.gradient(0, step, task.start) for step in range(20)]
    for name in ("onebit", "topk:0.01"):
        codec = codec_of(name)
        lost = []
        for values in gradients:
            error = codec.decode(codec.encode(values), len(values)) - values
            lost.append(float(np.square(error).sum() / np.square(values).sum()))
        report.add(f"gamma_{name}", max(lost), "", "||Q(w) - w||^2 / ||w||^2, largest of 20 gradients")
        report.add(f"gamma_bound_{name}", codec.gamma(len(task.start)), "", "gamma of the codec")


def compressions(report: Report, data: str, seeds: int) -> None:
    topk = replace(COMPRESSED, codec="topk:0.01")
    drops: dict[str, list[float]] = {"topk_feedback_drop": [], "topk_alone_drop": []}
    for seed in range(seeds):
        task = ConsistencyTask(seed, data=data)
        accuracies = []
        for like in (COMPRESSED, topk, replace(topk, feedback=False)):
            run = Emulation(replace(like, sizes=task.sizes), task.start, task.gradient).run()
            accuracies.append(statistics.mean(task.accuracy(member.parameters) for member in run.members))
        whole, fed_back, alone = accuracies
        drops["topk_feedback_drop"].append(whole - fed_back)
        drops["topk_alone_drop"].append(whole - alone)
    for key, points in drops.items():
        report.add_seeds(key, points, "points", f"{seeds} seeds, against uncompressed gradients")


@reports("elastic")
def run_emulated(report: Report, data: str = "digits") -> None:
    """Run the experiments on virtual time; ``data`` may be an ``.npz`` file of images, see `classification_job`."""
    models = list(STRESS)
    seeds = 3
    if report.quick:
        models = models[:1]
        seeds = 1
    # tensors are tiny
    torch.set_num_threads(1)
    drops = [measure_schedulers(report, data, model, seeds) for model in models]
    report.add("accuracy_drop", max(drops), "points", "of beta 0.8 against 1; <= 1 wanted")
    ratios(report, steps=20 if report.quick else 150, data=data)
    compressions(report, data, seeds)
    gammas(report)


def plot(report: Report, path: str) -> None:
    figures = report.figures
    panels = []
    for kind in ("accuracy", "distance"):
        lines = dict[str, Any]()
        for model in STRESS:
            variance = figures.get(f"{kind}_{model}_variance")
            if variance:
                values = [figures[f"{kind}_{model}_beta_{beta:g}"] for beta in BETAS]
                lines[f"{model}, norm-bounded"] = BETAS, values, "o-"
                lines[f"{model}, variance-bounded"] = (0, 1), (variance, variance), "--"
        panels.append(({"xlabel": "beta", "ylabel": kind}, lines))
    draw(path, panels)
