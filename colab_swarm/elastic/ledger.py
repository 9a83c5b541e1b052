"""One member's account of its group's gradients, and of the distance of its parameters. Free of I/O.

A step applies equation 11 or 10 of "Elastic Consistency", as in `ElasticOptimizer`. A stand-in takes the place of
a bucket that has not arrived. It is zero, or the peer's own values of the same bucket. A correction is the difference
between a late bucket and its stand-in. So a peer ends with the parameters of synchronous training, whatever the
delays are.

Invariants: a bucket is applied once. No bucket of a live peer is missing if it is older than the scheduler's
``max_delay``. Gradients are summed in peer order, so equal gradients give equal bits at all peers.

The global parameter x_t has applied each gradient of the steps before t. The view v_t^i of peer i is the peer's own
parameter. It lacks the gradients that have not arrived, and each peer j's residual eps_j, which compression sends
later. With plain SGD at a learning rate alpha, and p peers::

    (x_t - v_t^i) / alpha  =  1/p  sum (missing values - their stand-ins)  +  1/p  sum_j eps_j

With single steps (equation 10), t counts gradients, ordered by step and peer, and nothing is divided by p.
All figures are in the unit of gradients, so alpha need not be known. They are averages over recent steps. The distance
and M are averaged over the same steps with the same weights, so two peers that never wait reach their bound exactly.
M is taken from the peer with the largest second moment.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from colab_swarm.elastic.schedulers import Scheduler, StepFacts, StepStatus
from colab_swarm.tensors.codecs import Floats

DECAY = 0.95  # weight of the past in an average, so it covers about 20 steps

Missing = tuple[int, int, int]  # (peer, step, bucket)


@dataclass(frozen=True)
class Late:
    """A bucket that arrived after its step was closed."""

    peer: int
    step: int
    bucket: int
    values: Floats  # the received values
    change: Floats  # correction of the sum over peers: the values minus their stand-in


@dataclass(frozen=True)
class Closed:
    step: int
    # The updates that the optimizer applies one after another, each as a list of buckets: the mean over peers, with
    # stand-ins and corrections. With single steps, each gradient is one update, or each part of it that arrived.
    updates: list[list[Floats]]
    arrived: dict[int, dict[int, Floats]]  # buckets of this step by peer, including the peer's own
    late: tuple[Late, ...]  # buckets of earlier steps that arrived during this one, corrected here
    missing: frozenset[
        Missing
    ]  # (peer, step, bucket) that peers have not sent yet, without those of lost peers


class GradientLedger:
    """One peer's account of its group's gradients. It does not copy arrays, so do not change them afterwards.

    ``sizes`` has the number of values of each bucket. ``peers`` is p, the number of peers at the start, and ``me`` is
    this peer's number, 0 to p - 1.
    """

    def __init__(self, sizes: Sequence[int], peers: int, me: int, scheduler: Scheduler) -> None:
        self.step = 0  # t, the open step
        self.lost: set[int] = set()
        self.late: list[Late] = []  # late buckets, applied as corrections when the open step is closed
        self.ready = False  # whether this peer's gradient is complete, so that the step may end
        self._sizes = tuple(sizes)
        self._peers = peers
        self._me = me
        self._scheduler = scheduler
        # By (peer, step) of open steps: the buckets, and the squared norm of all of these buckets.
        self._gradients: dict[tuple[int, int], dict[int, Floats]] = defaultdict(dict)
        self._squares: dict[tuple[int, int], float] = defaultdict(float)
        self._owed: dict[tuple[int, int], set[int]] = {}  # (peer, step): missing buckets
        self._stood_in: dict[
            int, dict[int, Floats]
        ] = {}  # this peer's buckets of closed steps that lack others'
        self._ready_since = 0.0

    def on_own(self, step: int, bucket: int, values: Floats, *, now: float) -> None:
        """Add a bucket of this peer's gradient, as the other peers decode it, so that all peers apply equal values.

        Raises `ValueError` if the step is not open, or if the bucket is unknown or a duplicate.
        """
        own = self._gradients[self._me, self.step]
        if step != self.step or bucket in own or not self._fits(bucket, values):
            raise ValueError(f"bucket {bucket} with {values.size} values of step {step} in step {self.step}")
        self._add(self._me, step, bucket, values)
        if len(own) == len(self._sizes):
            self.ready = True
            self._ready_since = now

    def on_received(self, peer: int, step: int, bucket: int, values: Floats) -> bool:
        """Add a bucket of another peer; return False if it is refused.

        Refuses duplicates, buckets that do not exist, buckets of a lost peer, and buckets of a step that an
        honest peer cannot have reached. A peer that has ended step s has this peer's whole step s - max_delay.
        """
        stranger = peer == self._me or not 0 <= peer < self._peers or peer in self.lost
        if stranger or not self._fits(bucket, values):
            return False
        if step < self.step:
            return self._on_late(peer, step, bucket, values)
        if step > self.step + self._scheduler.max_delay + 1 or bucket in self._gradients[peer, step]:
            return False
        self._add(peer, step, bucket, values)
        return True

    def _on_late(self, peer: int, step: int, bucket: int, values: Floats) -> bool:
        owed = self._owed.get((peer, step), set())
        if bucket not in owed:
            return False
        owed.remove(bucket)
        if self._scheduler.stand_in:
            change = values - self._stood_in[step][bucket]
        else:
            change = values
        self.late.append(Late(peer, step, bucket, values, change))
        self._forget_settled()
        return True

    def on_lost(self, peer: int) -> None:
        self.lost.add(peer)  # buckets that it sent earlier are still applied
        self._owed = {key: buckets for key, buckets in self._owed.items() if key[0] != peer}
        self._forget_settled()

    def standing(self, now: float) -> StepStatus:
        oldest = self.step - self._scheduler.max_delay
        owed = set(self._owed)
        norms = []
        numels = []
        for peer in self._others():
            key = (peer, self.step)
            arrived = self._gradients[key]
            norms.append(math.sqrt(self._squares[key]))
            numels.append(sum(self._sizes[bucket] for bucket in arrived))
            if len(arrived) < len(self._sizes):
                owed.add(key)
        return StepStatus(
            own_norm=math.sqrt(self._squares[self._me, self.step]),
            own_numel=sum(self._sizes),
            norms=tuple(norms),
            numels=tuple(numels),
            overdue=len({peer for peer, step in owed if step <= oldest}),
            owed=len(owed),
            lost=len(self.lost),
            waited_s=now - self._ready_since if self.ready else 0.0,
        )

    def close_step(self) -> Closed:
        if not self.ready:
            raise ValueError(f"step {self.step} cannot end: this peer's own gradient is not complete")
        buckets = range(len(self._sizes))
        arrived = {}
        for peer in range(self._peers):
            arrived[peer] = self._gradients.pop((peer, self.step), {})
            self._squares.pop((peer, self.step), None)
        for peer in self._others():
            lacking = set(buckets) - arrived[peer].keys()
            if lacking:
                self._owed[peer, self.step] = lacking
        if self._scheduler.single_steps:
            updates = self._singly(arrived)
        else:
            updates = [self._jointly(arrived)]
        if self._scheduler.stand_in:
            self._stood_in[self.step] = arrived[self._me]
        closed = Closed(self.step, updates, arrived, tuple(self.late), self.missing)
        self.late = []
        self.ready = False
        self.step += 1
        self._forget_settled()
        return closed

    def _jointly(self, arrived: dict[int, dict[int, Floats]]) -> list[Floats]:
        """Return the update of a parallel step (equation 11)."""
        gradients = []
        for bucket, size in enumerate(self._sizes):
            total = np.zeros(size, np.float32)
            for peer in range(self._peers):
                if bucket in arrived[peer]:
                    total += arrived[peer][bucket]
                elif self._scheduler.stand_in and peer not in self.lost:
                    total += arrived[self._me][bucket]
            gradients.append(total / np.float32(self._peers))
        for late in self.late:
            gradients[late.bucket] += late.change / np.float32(self._peers)
        return gradients

    def _singly(self, arrived: dict[int, dict[int, Floats]]) -> list[list[Floats]]:
        """Return the updates of single steps (equation 10), in the order of steps and peers."""
        parts: dict[tuple[int, int], dict[int, Floats]] = defaultdict(dict)
        for late in self.late:
            parts[late.step, late.peer][late.bucket] = late.values
        for peer, buckets in arrived.items():
            if buckets:
                parts[self.step, peer] = buckets
        nothing = [np.zeros(size, np.float32) for size in self._sizes]
        return [
            [parts[key].get(bucket, zero) for bucket, zero in enumerate(nothing)] for key in sorted(parts)
        ]

    @property
    def missing(self) -> frozenset[Missing]:
        missing: set[tuple[int, int, int]] = set()
        for (peer, step), buckets in self._owed.items():
            missing.update((peer, step, bucket) for bucket in buckets)
        return frozenset(missing)

    def _others(self) -> list[int]:
        return [peer for peer in range(self._peers) if peer != self._me and peer not in self.lost]

    def _add(self, peer: int, step: int, bucket: int, values: Floats) -> None:
        self._gradients[peer, step][bucket] = values
        self._squares[peer, step] += float(np.dot(values, values))

    def _fits(self, bucket: int, values: Floats) -> bool:
        return 0 <= bucket < len(self._sizes) and values.shape == (self._sizes[bucket],)

    def _forget_settled(self) -> None:
        self._owed = {key: buckets for key, buckets in self._owed.items() if buckets}
        steps = {step for _, step in self._owed}
        self._stood_in = {step: own for step, own in self._stood_in.items() if step in steps}

    def check_invariants(self) -> None:
        assert all(step >= self.step for _, step in self._gradients), "a closed step still holds gradients"
        assert all(buckets and step < self.step for (_, step), buckets in self._owed.items())
        assert not self.lost & {peer for peer, _ in self._owed}, "a lost peer owes something"
        oldest = self.step - 1 - self._scheduler.max_delay
        assert all(step > oldest for _, step in self._owed), "a step ended: too old a bucket is missing"


class Recent:
    """Exponentially weighted mean of recent values. Without values, it is 0."""

    def __init__(self) -> None:
        self._total = self._weight = 0.0

    def add(self, value: float) -> None:
        self._total = DECAY * self._total + value
        self._weight = DECAY * self._weight + 1

    @property
    def value(self) -> float:
        return self._total / self._weight if self._weight else 0.0


class _Sum:
    def __init__(self) -> None:
        self.buckets: dict[int, Floats] = {}
        self.squares = 0.0
        self.count = 0

    def add(self, bucket: int, values: Floats) -> None:
        self.squares += float(np.dot(values, values))
        self.count += 1
        self.buckets[bucket] = self.buckets[bucket] + values if bucket in self.buckets else values

    def squared_norm(self) -> float:
        return sum(float(np.dot(values, values)) for values in self.buckets.values())


@dataclass
class _View:
    missing: frozenset[Missing]  # the buckets that the view still lacks
    arrived: _Sum  # the buckets that have arrived since
    residual: float


class Meter:
    """Measures a peer's distance from the global parameter, and M and sigma.

    When all gradients of a step have arrived, the step's distance is exact, except for residuals. The peer knows only
    the norms of residuals, and adds them as if all residuals were parallel. It does not count buckets that a lost peer
    did not send. With single steps, ``single`` is this peer's number. Its gradient of a step is applied after the
    gradients of peers with lower numbers, so its view also lacks their gradients.
    """

    def __init__(self, buckets: int, peers: int, single: int | None = None) -> None:
        self._buckets = buckets
        self._peers = peers
        self._divisor = peers if single is None else 1
        self._before = range(single or 0)
        self._variance = Recent()
        self._measured = Recent()
        self._largest = 0.0
        self._norms = [Recent() for _ in range(peers)]
        # ||g||^2 by step and peer, not counted yet
        self._totals: dict[int, dict[int, float]] = defaultdict(dict)
        self._parts: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        self._residuals = [0.0] * peers
        self._views: list[_View] = []
        self._sums: dict[int, _Sum] = defaultdict(_Sum)

    def on_norms(self, peer: int, step: int, squares: float, residual_squares: float) -> None:
        """Add a bucket's part of ``||g||^2`` and ``||eps||^2``. Call this for this peer's buckets, too."""
        norms = self._parts[peer, step]
        norms.append((squares, residual_squares))
        if len(norms) == self._buckets:
            total, residual_total = map(sum, zip(*norms, strict=True))
            self._totals[step][peer] = total
            self._largest = max(self._largest, total)
            self._residuals[peer] = math.sqrt(residual_total)
            del self._parts[peer, step]

    def on_closed(self, closed: Closed) -> list[float]:
        """Close a step, which opens a view; return the distances of the views that became known."""
        self._add_to_sums(closed)
        for late, view in product(closed.late, self._views):
            if (late.peer, late.step, late.bucket) in view.missing:
                view.arrived.add(late.bucket, late.change)
        for view in self._views:
            # only with single steps, a view lacks gradients of the step that it begins
            for peer, bucket in product(self._before, range(self._buckets)):
                if (peer, closed.step, bucket) in view.missing and bucket in closed.arrived[peer]:
                    view.arrived.add(bucket, closed.arrived[peer][bucket])
            view.missing &= closed.missing
        before = frozenset(product(self._before, (closed.step + 1,), range(self._buckets)))
        self._views.append(_View(closed.missing | before, _Sum(), sum(self._residuals) / self._divisor))
        known = [view for view in self._views if not view.missing]
        self._views = [view for view in self._views if view.missing]
        distances = []
        for view in known:
            distance = math.sqrt(view.arrived.squared_norm()) / self._divisor + view.residual
            distances.append(distance)
            self._measured.add(distance**2)
        # M is averaged over the same steps as the distances
        last = closed.step - len(self._views)
        for step in sorted(step for step in self._totals if step <= last):
            for peer, total in self._totals.pop(step).items():
                self._norms[peer].add(total)
        return distances

    def _add_to_sums(self, closed: Closed) -> None:
        for peer_buckets in closed.arrived.values():
            for bucket, values in peer_buckets.items():
                self._sums[closed.step].add(bucket, values)
        for late in closed.late:
            self._sums[late.step].add(late.bucket, late.values)
        for step in self._sums.keys() - {step for _, step, _ in closed.missing}:
            total = self._sums.pop(step)
            whole, rest = divmod(total.count, self._buckets)
            if whole > 1 and not rest:  # otherwise a peer was lost in the middle of its gradient
                self._variance.add(max(0.0, total.squares - total.squared_norm() / whole) / (whole - 1))

    def facts(self, *, gamma: float | None = 0.0, crashed: int = 0) -> StepFacts:
        m = math.sqrt(max(recent.value for recent in self._norms))
        sigma = math.sqrt(self._variance.value)
        largest = math.sqrt(self._largest)
        return StepFacts(self._peers, m, sigma, gamma, crashed, largest)

    @property
    def measured(self) -> float:
        """The root mean square of the distances of recent views. B is its bound."""
        return math.sqrt(self._measured.value)
