"""Estimate the distance between this peer's parameters and the global ones during training.

The global parameter x_t has applied every gradient of the steps before t. The view v_t^i of peer i lacks what has not
arrived, and the residuals eps_j that compression sends later. With plain SGD at a learning rate alpha::

    (x_t - v_t^i) / alpha  =  1/p  sum (missing values - their stand-ins)  +  1/p  sum_j eps_j

All figures are in the unit of gradients. So alpha need not be known, and other optimizers get a
figure too. Second moments, the variance and the squared distance are averages over recent steps
with equal weights, so they can be compared. M is that of the peer with the largest second moment.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from colab_swarm.elastic.ledger import Closed
from colab_swarm.elastic.schedulers import StepFacts
from colab_swarm.tensors.codecs import Floats

DECAY = 0.95
"""Weight of the past in an average: about 20 steps count."""

Array = npt.NDArray[np.float64]
Piece = tuple[int, int, int]
"""(peer, step, bucket)."""


class Recent:
    """Exponentially weighted mean of recent values; 0 without values."""

    def __init__(self) -> None:
        self._total = self._weight = 0.0

    def add(self, value: float) -> None:
        self._total = DECAY * self._total + value
        self._weight = DECAY * self._weight + 1

    @property
    def value(self) -> float:
        return self._total / self._weight if self._weight else 0.0


class Moments:
    """Estimates of M and sigma from the gradients of a group of ``peers``."""

    def __init__(self, peers: int) -> None:
        self._peers = peers
        self._squares = [Recent() for _ in range(peers)]
        self._variance = Recent()
        self._largest = 0.0

    def on_norm(self, peer: int, squares: float) -> None:
        """Add the squared norm of one gradient."""
        self._squares[peer].add(squares)
        self._largest = max(self._largest, squares)

    def on_step(self, count: int, squares: float, squared_sum: float) -> None:
        """Add a step of ``count`` gradients: the sum of their squared norms, and the squared norm of their sum."""
        if count > 1:
            self._variance.add(max(0.0, squares - squared_sum / count) / (count - 1))

    def facts(self, gamma: float | None, crashed: int) -> StepFacts:
        """Return the facts for a scheduler's `bound`."""
        m = math.sqrt(max(recent.value for recent in self._squares))
        sigma, largest = math.sqrt(self._variance.value), math.sqrt(self._largest)
        return StepFacts(self._peers, m, sigma, gamma, crashed, largest)


class _Sum:
    """Vectors summed bucket by bucket."""

    def __init__(self) -> None:
        self.buckets: dict[int, Floats] = {}
        self.squares, self.count = 0.0, 0

    def add(self, bucket: int, values: Floats) -> None:
        self.squares += float(np.dot(values, values))
        self.count += 1
        so_far = self.buckets.get(bucket)
        self.buckets[bucket] = values if so_far is None else so_far + values

    def squared_norm(self) -> float:
        return sum(float(np.dot(values, values)) for values in self.buckets.values())


@dataclass
class _View:
    """What a view lacked when it was opened: what is still missing, and the sum of what has arrived since."""

    missing: set[Piece]
    arrived: _Sum
    residual: float
    guess: float


class Meter:
    """A peer's own distance: estimated at once, and exact except for residuals once everything missing has arrived.

    Only the norms of residuals are known. They count as if all had the same direction, so they
    never make the distance too small. Pieces of a lost peer never arrive; each counts permanently
    with the typical size of such a piece.

    Args:
        buckets: of a gradient.
        peers: p.

    Attributes:
        estimate: distance of the newest view.
    """

    def __init__(self, buckets: int, peers: int) -> None:
        self.estimate = 0.0
        self._buckets, self._peers = buckets, peers
        self._moments, self._measured = Moments(peers), Recent()
        self._norms: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        self._residuals = [0.0] * peers
        self._changes = [Recent() for _ in range(buckets)]  # squared norms of late corrections
        self._found, self._guessed = Recent(), Recent()  # squares of what views lacked
        self._views: list[_View] = []
        self._sums: dict[int, _Sum] = defaultdict(_Sum)
        self._gone = 0.0

    def on_norms(self, peer: int, step: int, squares: float, residual_squares: float) -> None:
        """Add one bucket's part of ``||g||^2`` and ``||eps||^2``, sent with the bucket; own buckets count too."""
        norms = self._norms[peer, step]
        norms.append((squares, residual_squares))
        if len(norms) == self._buckets:
            self._moments.on_norm(peer, sum(one for one, _ in norms))
            self._residuals[peer] = math.sqrt(sum(residual for _, residual in norms))
            del self._norms[peer, step]

    def on_closed(self, closed: Closed) -> list[float]:
        """Close a step, which opens a view; return the distances of the views that became known."""
        self._add_to_sums(closed)
        for late in closed.late:
            self._changes[late.bucket].add(float(np.dot(late.change, late.change)))
            for view in self._views:
                if (piece := (late.peer, late.step, late.bucket)) in view.missing:
                    view.missing.remove(piece)
                    view.arrived.add(late.bucket, late.change)
        self._give_up_lost(closed)
        residual = sum(self._residuals) / self._peers + self._gone
        guess = self._worth(closed.missing, closed)
        self._views.append(_View(set(closed.missing), _Sum(), residual, guess))
        distances = self._settle()
        right = self._found.value / self._guessed.value if self._guessed.value else 1.0
        self.estimate = math.sqrt(right) * guess + residual
        return distances

    def _add_to_sums(self, closed: Closed) -> None:
        for peer_buckets in closed.arrived.values():
            for bucket, values in peer_buckets.items():
                self._sums[closed.step].add(bucket, values)
        for late in closed.late:
            self._sums[late.step].add(late.bucket, late.values)
        for step in self._sums.keys() - {step for _, step, _ in closed.missing}:
            total = self._sums.pop(step)
            whole, parts = divmod(total.count, self._buckets)
            if not parts:  # else a peer was lost in the middle of its gradient
                self._moments.on_step(whole, total.squares, total.squared_norm())

    def _give_up_lost(self, closed: Closed) -> None:
        """Settle the missing pieces that no peer owes any more: their peers are lost."""
        gone = {piece for view in self._views for piece in view.missing} - closed.missing
        for peer, buckets in closed.arrived.items():
            if buckets:  # part of a gradient arrived in this step, so there was a gradient
                lacking = set(range(self._buckets)) - buckets.keys()
                gone |= {(peer, closed.step, bucket) for bucket in lacking} - closed.missing
        self._gone += self._worth(gone, closed)
        for view in self._views:
            view.residual += self._worth(view.missing & gone, closed)
            view.missing -= gone

    def _worth(self, pieces: Iterable[Piece], closed: Closed) -> float:
        """Estimate the size of missing pieces from earlier late ones, as if all had the same direction.

        Before any piece was late, use the same bucket of the gradients that arrived.
        """
        squares: dict[int, float] = defaultdict(float)
        for peer, _, bucket in pieces:
            own = max(float(np.dot(of[bucket], of[bucket])) for of in closed.arrived.values() if bucket in of)
            squares[peer] += self._changes[bucket].value or own
        return sum(map(math.sqrt, squares.values())) / self._peers

    def _settle(self) -> list[float]:
        known = [view for view in self._views if not view.missing]
        self._views = [view for view in self._views if view.missing]
        distances = []
        for view in known:
            lacked = math.sqrt(view.arrived.squared_norm()) / self._peers
            self._found.add(lacked**2)
            self._guessed.add(view.guess**2)
            self._measured.add((lacked + view.residual) ** 2)
            distances.append(lacked + view.residual)
        return distances

    @property
    def measured(self) -> float:
        """The root mean square distance of recent views, which B bounds."""
        return math.sqrt(self._measured.value)

    def facts(self, *, gamma: float | None = 0.0, crashed: int = 0) -> StepFacts:
        """Return the facts for a scheduler's `bound`."""
        return self._moments.facts(gamma, crashed)


class ExactMeter:
    """Exact distances of a whole group in one process, from its gradients and parameters; for experiments.

    Args:
        start: the parameters at step 0, equal at all peers.
        alpha: learning rate of plain SGD.
        peers: p.

    Attributes:
        distances: ``||x_t - v_t^i|| / alpha`` by (peer, step).
    """

    def __init__(self, start: Floats, alpha: float, peers: int) -> None:
        self.distances: dict[tuple[int, int], float] = {}
        self._x: Array = start.astype(np.float64)
        self._alpha, self._peers, self._step = alpha, peers, 0
        self._gradients: dict[int, dict[int, Floats]] = defaultdict(dict)
        self._views: dict[int, dict[int, Floats]] = defaultdict(dict)
        self._lost: set[int] = set()
        self._moments = Moments(peers)
        self._measured = [Recent() for _ in range(peers)]

    def on_view(self, peer: int, step: int, parameters: Floats) -> None:
        """Add the parameters with which ``peer`` computes its gradient of ``step``."""
        self._views[step][peer] = parameters.copy()
        self._compare()

    def on_gradient(self, peer: int, step: int, values: Floats) -> None:
        """Add a gradient, before compression."""
        self._gradients[step][peer] = values
        self._moments.on_norm(peer, float(np.dot(values, values)))
        self._advance()

    def on_lost(self, peer: int) -> None:
        """Expect no more gradients of a lost peer."""
        self._lost.add(peer)
        self._advance()

    def _advance(self) -> None:
        """Apply all steps whose gradients are complete."""
        everyone = set(range(self._peers))
        while self._gradients[self._step] and self._gradients[self._step].keys() | self._lost >= everyone:
            gradients = self._gradients.pop(self._step).values()
            total = sum(values.astype(np.float64) for values in gradients)
            squares = sum(float(np.dot(values, values)) for values in gradients)
            self._moments.on_step(len(gradients), squares, float(np.dot(total, total)))
            self._x = self._x - self._alpha / self._peers * total
            self._step += 1
            self._compare()

    def _compare(self) -> None:
        for peer, parameters in self._views.pop(self._step, {}).items():
            distance = float(np.linalg.norm(self._x - parameters)) / self._alpha
            self.distances[peer, self._step] = distance
            self._measured[peer].add(distance**2)

    @property
    def measured(self) -> float:
        """The root mean square distance of recent views, at the peer with the largest."""
        return math.sqrt(max(recent.value for recent in self._measured))

    def facts(self, *, gamma: float | None = 0.0) -> StepFacts:
        """Return the facts for a scheduler's `bound`."""
        return self._moments.facts(gamma, len(self._lost))
