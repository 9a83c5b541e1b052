"""A group of elastic peers in one process, on virtual time: real ledgers and schedulers, scripted delays, plain SGD."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, count

import numpy as np

from colab_swarm.elastic.ledger import GradientLedger
from colab_swarm.elastic.meter import ExactMeter, Meter
from colab_swarm.elastic.schedulers import AdaptiveBeta, Scheduler
from colab_swarm.tensors.codecs import Codec, Floats, codec_of
from colab_swarm.tensors.feedback import ErrorFeedback

Gradient = Callable[[int, int, Floats], Floats]
"""(peer, step, parameters) -> gradient."""
Delay = Callable[[int, int, int, int], float]
"""(sender, receiver, step, bucket) -> seconds."""


def no_delay(sender: int, receiver: int, step: int, bucket: int) -> float:
    """All arrives at once."""
    return 0.0


@dataclass(frozen=True)
class Crash:
    """A peer computes its gradient of ``step``, sends it to those in ``reached`` only, and is gone."""

    step: int
    reached: frozenset[int]


@dataclass(frozen=True)
class Scene:
    """A run to emulate.

    Attributes:
        sizes: values per bucket; a gradient is all buckets, one after the other.
        scheduler: makes one for each peer.
        alpha, momentum: of SGD.
        decay: alpha falls linearly to 0.
        delay: of a bucket on its way; no bucket overtakes another.
        backward_s: seconds of a (peer, step); buckets become ready evenly.
        codec, feedback: how gradients travel, and whether what is lost by it is sent later.
        crashes: by peer.
        noticed_s: how long after a crash the others know.
    """

    sizes: tuple[int, ...]
    scheduler: Callable[[], Scheduler]
    peers: int = 2
    steps: int = 50
    alpha: float = 0.1
    momentum: float = 0.0
    decay: bool = False
    delay: Delay = no_delay
    backward_s: Callable[[int, int], float] = lambda peer, step: 1.0
    codec: str = "float32"
    feedback: bool = True
    crashes: Mapping[int, Crash] = field(default_factory=dict)
    noticed_s: float = 0.5


@dataclass
class Member:
    """One peer.

    Attributes:
        parameters: its view.
        history: its view at the beginning of each step, and after the last.
        estimates, found: distances of its views as its `Meter` estimated them at once, and found them later.
        betas: of each step, if they change.
        waited_s: of all steps together.
        missing: share of the others' values that came late, or never.
    """

    scheduler: Scheduler
    ledger: GradientLedger
    meter: Meter
    feedback: ErrorFeedback
    parameters: Floats
    velocity: Floats
    history: list[Floats] = field(default_factory=list)
    estimates: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)
    waited_s: float = 0.0
    missing: float = 0.0
    finished_at: float = 0.0


class Emulation:
    """Runs a scene; same scene and gradients, same result.

    Attributes:
        members: by number.
        exact: the distances of all.
        gamma: the largest loss that the codec has caused, ``||Q(w) - w||^2 / ||w||^2``.
        ratios: measured over bound, after each step, with the gamma that the codec states.
        tight_ratios: the same with the gamma found.
        fired: crashes that happened.
    """

    def __init__(self, scene: Scene, start: Floats, gradient: Gradient) -> None:
        self._scene, self._gradient = scene, gradient
        self._codec: Codec = codec_of(scene.codec)
        self._ends = list(accumulate(scene.sizes))
        self.members = [self._member(index, start) for index in range(scene.peers)]
        self.exact = ExactMeter(start, scene.alpha, scene.peers)
        self.gamma, self._stated = 0.0, max(map(self._codec.gamma, scene.sizes))
        self.ratios: list[float] = []
        self.tight_ratios: list[float] = []
        self.fired: list[int] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._arrivals: dict[tuple[int, int], float] = {}
        self._now = 0.0

    def _member(self, index: int, start: Floats) -> Member:
        scene, scheduler = self._scene, self._scene.scheduler()
        return Member(
            scheduler,
            GradientLedger(scene.sizes, scene.peers, index, scheduler),
            Meter(len(scene.sizes), scene.peers),
            ErrorFeedback(len(start)),
            start.copy(),
            np.zeros_like(start),
        )

    def run(self) -> Emulation:
        """To the end; returns itself.

        Raises:
            RuntimeError: a peer waits for something that never comes.
        """
        for peer in range(self._scene.peers):
            self._begin(peer)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        for peer, member in enumerate(self.members):
            member.ledger.check_invariants()
            if peer not in self.fired and member.ledger.step < self._scene.steps:
                raise RuntimeError(f"peer {peer} waits at step {member.ledger.step} for ever")
        return self

    def _at(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def _begin(self, peer: int) -> None:
        member = self.members[peer]
        step = member.ledger.step
        member.history.append(member.parameters.copy())
        self.exact.on_view(peer, step, member.parameters)
        if step == self._scene.steps:
            member.finished_at = self._now
            return
        member.feedback.begin()
        gradient = self._gradient(peer, step, member.parameters)
        self.exact.on_gradient(peer, step, gradient)
        seconds, buckets = self._scene.backward_s(peer, step), len(self._scene.sizes)
        for bucket in range(buckets):
            ready = self._now + seconds * (bucket + 1) / buckets
            self._at(ready, lambda bucket=bucket: self._produce(peer, step, bucket, gradient))  # type: ignore[misc]

    def _produce(self, peer: int, step: int, bucket: int, gradient: Floats) -> None:
        """A bucket is ready: it is encoded, and goes to all."""
        member, crash = self.members[peer], self._scene.crashes.get(peer)
        part = slice(self._ends[bucket] - self._scene.sizes[bucket], self._ends[bucket])
        sent, residual_squares = self._encode(member, part.start, gradient[part])
        told = (_square(gradient[part]), residual_squares)
        member.ledger.on_own(step, bucket, sent, now=self._now)
        member.meter.on_norms(peer, step, *told)
        crashes = crash is not None and crash.step == step
        for other in range(self._scene.peers):
            if other != peer and not (crashes and other not in crash.reached):  # type: ignore[union-attr]
                self._send(peer, other, step, bucket, sent, told)
        if bucket == len(self._scene.sizes) - 1:
            member.feedback.settle()
            self._crash(peer) if crashes else self._ask(peer)

    def _encode(self, member: Member, start: int, values: Floats) -> tuple[Floats, float]:
        """What the others will decode, and the squared norm of what is kept back for later."""
        if not self._scene.feedback:
            return self._codec.decode(self._codec.encode(values), len(values)).copy(), 0.0
        wanted = values + member.feedback.residual[start : start + len(values)]
        sent = member.feedback.encode(self._codec, start, values)[1].copy()
        lost = _square(wanted - sent)
        self.gamma = max(self.gamma, lost / (_square(wanted) or 1))
        return sent, lost

    def _send(
        self, peer: int, other: int, step: int, bucket: int, sent: Floats, told: tuple[float, float]
    ) -> None:
        at = self._now + self._scene.delay(peer, other, step, bucket)
        self._arrivals[peer, other] = at = max(at, self._arrivals.get((peer, other), 0.0))

        def arrive() -> None:
            member = self.members[other]
            if member.ledger.on_received(peer, step, bucket, sent):
                member.meter.on_norms(peer, step, *told)
                self._ask(other)

        self._at(at, arrive)

    def _crash(self, peer: int) -> None:
        self.fired.append(peer)
        self.exact.on_lost(peer)

        def notice(other: int) -> None:
            self.members[other].ledger.on_lost(peer)
            self._ask(other)

        for other in range(self._scene.peers):
            if other != peer and other not in self.fired:
                at = max(self._now + self._scene.noticed_s, self._arrivals.get((peer, other), 0.0))
                self._at(at, lambda other=other: notice(other))  # type: ignore[misc]

    def _ask(self, peer: int) -> None:
        """End the step if its own gradient is whole and the scheduler agrees."""
        member = self.members[peer]
        if peer in self.fired or not member.ledger.ready:
            return
        standing = member.ledger.standing(self._now)
        if member.scheduler.may_go_on(standing):
            member.waited_s += standing.waited_s
            member.missing += standing.missing / self._scene.steps
            self._close(peer)
        elif (seconds := member.scheduler.ask_again_s(standing)) is not None:
            self._at(self._now + seconds, lambda: self._ask(peer))

    def _close(self, peer: int) -> None:
        member, scene = self.members[peer], self._scene
        closed = member.ledger.close_step()
        distances = member.meter.on_closed(closed)
        member.estimates.append(member.meter.estimate)
        member.found += distances
        if isinstance(member.scheduler, AdaptiveBeta):
            member.betas.append(member.scheduler.beta)
            for distance in distances:
                member.scheduler.on_measured(distance)
        member.velocity = scene.momentum * member.velocity + np.concatenate(closed.gradients)
        alpha = scene.alpha * (1 - closed.step / scene.steps if scene.decay else 1)
        member.parameters = member.parameters - np.float32(alpha) * member.velocity
        if not scene.momentum and not scene.decay:  # else x_t is not a plain sum of gradients
            self._compare(member.scheduler)
        self._at(self._now, lambda: self._begin(peer))

    def _compare(self, scheduler: Scheduler) -> None:
        for ratios, gamma in ((self.ratios, self._stated), (self.tight_ratios, self.gamma)):
            bound = scheduler.bound(self.exact.facts(gamma=gamma))
            if bound:
                ratios.append(self.exact.measured / bound)


def _square(values: Floats) -> float:
    return float(np.dot(values, values))
