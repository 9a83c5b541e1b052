"""How far a peer's view is from the global parameter, measured while it trains.

The global parameter x_t has applied every gradient of the steps before t; the view v_t^i of peer i lacks what has not
arrived, and what compression keeps back as residuals eps_j until later. With plain SGD at a learning rate alpha::

    (x_t - v_t^i) / alpha  =  1/p  sum (missing values - their stand-ins)  +  1/p  sum_j eps_j

All here is in the unit of gradients, so alpha is not asked for, and another optimizer has a figure too. Second
moments, the variance and the squared distance are averages over recent steps, all with the same weights, so that
they can be compared. M is that of the peer with the largest.
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
    """The mean of recent values; of nothing: 0."""

    def __init__(self) -> None:
        self._total = self._weight = 0.0

    def add(self, value: float) -> None:
        """One more."""
        self._total = DECAY * self._total + value
        self._weight = DECAY * self._weight + 1

    @property
    def value(self) -> float:
        """The mean so far, later values weighing more."""
        return self._total / self._weight if self._weight else 0.0


class Moments:
    """M and sigma from the gradients of a group.

    Args:
        peers: p.
    """

    def __init__(self, peers: int) -> None:
        self._peers = peers
        self._squares = [Recent() for _ in range(peers)]
        self._variance = Recent()
        self._largest = 0.0

    def on_norm(self, peer: int, squares: float) -> None:
        """The squared norm of one gradient."""
        self._squares[peer].add(squares)
        self._largest = max(self._largest, squares)

    def on_step(self, count: int, squares: float, squared_sum: float) -> None:
        """``count`` gradients of one step: the sum of their squared norms, and the squared norm of their sum."""
        if count > 1:
            self._variance.add(max(0.0, squares - squared_sum / count) / (count - 1))

    def facts(self, gamma: float | None, crashed: int) -> StepFacts:
        """For a scheduler's `bound`."""
        m = math.sqrt(max(recent.value for recent in self._squares))
        sigma, largest = math.sqrt(self._variance.value), math.sqrt(self._largest)
        return StepFacts(self._peers, m, sigma, gamma, crashed, largest)


@dataclass
class _Sum:
    """Vectors, added up bucket by bucket."""

    buckets: dict[int, Floats]
    squares: float = 0.0
    count: int = 0

    def add(self, bucket: int, values: Floats) -> None:
        self.squares += float(np.dot(values, values))
        self.count += 1
        so_far = self.buckets.get(bucket)
        self.buckets[bucket] = values if so_far is None else so_far + values

    @property
    def squared_norm(self) -> float:
        return sum(float(np.dot(values, values)) for values in self.buckets.values())


@dataclass
class _View:
    """What a view lacked when it was opened: still missing, and the sum of what has arrived since."""

    missing: set[Piece]
    arrived: _Sum
    residual: float
    guess: float


class Meter:
    """A peer's own distance: estimated at once, exact but for residuals when what is missing has arrived.

    Of residuals only norms are known; they count as if all had the same direction, so the distance is never
    underestimated by them. Pieces of a lost peer never arrive; each counts for good with what such a piece has been
    worth.

    Args:
        buckets: of a gradient.
        peers: p.

    Attributes:
        estimate: of the newest view.
    """

    def __init__(self, buckets: int, peers: int) -> None:
        self.estimate = 0.0
        self._buckets, self._peers = buckets, peers
        self._moments, self._measured = Moments(peers), Recent()
        self._told: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        self._residuals = [0.0] * peers
        self._changes = [Recent() for _ in range(buckets)]  # squared norms of what arrived late
        self._found, self._guessed = Recent(), Recent()  # squares of what views lacked
        self._views: list[_View] = []
        self._sums: dict[int, _Sum] = {}
        self._gone = 0.0

    def on_told(self, peer: int, step: int, squares: float, residual_squares: float) -> None:
        """With each bucket its sender, one self too, tells its part of ``||g||^2`` and of ``||eps||^2``."""
        told = self._told[peer, step]
        told.append((squares, residual_squares))
        if len(told) == self._buckets:
            self._moments.on_norm(peer, sum(one for one, _ in told))
            self._residuals[peer] = math.sqrt(sum(residual for _, residual in told))
            del self._told[peer, step]

    def on_closed(self, closed: Closed) -> list[float]:
        """A step ended, and with it a view is opened: returns the distances of views that have become known."""
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
        self._views.append(_View(set(closed.missing), _Sum({}), residual, guess))
        distances = self._settle()
        right = self._found.value / self._guessed.value if self._guessed.value else 1.0
        self.estimate = math.sqrt(right) * guess + residual
        return distances

    def _add_to_sums(self, closed: Closed) -> None:
        self._sums[closed.step] = _Sum({})
        for peer_buckets in closed.arrived.values():
            for bucket, values in peer_buckets.items():
                self._sums[closed.step].add(bucket, values)
        for late in closed.late:
            self._sums[late.step].add(late.bucket, late.values)
        for step in self._sums.keys() - {step for _, step, _ in closed.missing}:
            total = self._sums.pop(step)
            whole, parts = divmod(total.count, self._buckets)
            if not parts:  # else a peer was lost in the midst
                self._moments.on_step(whole, total.squares, total.squared_norm)

    def _give_up_lost(self, closed: Closed) -> None:
        """What views still waited for, and nobody owes any more, belongs to lost peers."""
        gone = {piece for view in self._views for piece in view.missing} - closed.missing
        for peer, buckets in closed.arrived.items():
            if buckets:  # of this step something came, so there was a gradient
                rest = {
                    (peer, closed.step, bucket) for bucket in range(self._buckets) if bucket not in buckets
                }
                gone |= rest - closed.missing
        self._gone += self._worth(gone, closed)
        for view in self._views:
            view.residual += self._worth(view.missing & gone, closed)
            view.missing -= gone

    def _worth(self, pieces: Iterable[Piece], closed: Closed) -> float:
        """What missing pieces may be worth: as much as those before them, all of one direction.

        Before any has come late, as much as the same bucket of the gradients that are there.
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
            lacked = math.sqrt(view.arrived.squared_norm) / self._peers
            self._found.add(lacked**2)
            self._guessed.add(view.guess**2)
            self._measured.add((lacked + view.residual) ** 2)
            distances.append(lacked + view.residual)
        return distances

    @property
    def measured(self) -> float:
        """The root mean square distance of recent views: what B bounds."""
        return math.sqrt(self._measured.value)

    def facts(self, *, gamma: float | None = 0.0, crashed: int = 0) -> StepFacts:
        """For a scheduler's `bound`."""
        return self._moments.facts(gamma, crashed)


class ExactMeter:
    """All distances of a group, from its gradients and parameters: for experiments in one process.

    Args:
        start: the parameters at step 0, the same at all peers.
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
        """What ``peer`` computes its gradient of ``step`` on."""
        self._views[step][peer] = parameters.copy()
        self._compare()

    def on_gradient(self, peer: int, step: int, values: Floats) -> None:
        """A gradient, before any compression."""
        self._gradients[step][peer] = values
        self._moments.on_norm(peer, float(np.dot(values, values)))
        self._advance()

    def on_lost(self, peer: int) -> None:
        """No more gradients come of this one."""
        self._lost.add(peer)
        self._advance()

    def _advance(self) -> None:
        """Apply all steps of which every gradient is there."""
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
        """The root mean square distance of recent views, of the peer that is furthest off."""
        return math.sqrt(max(recent.value for recent in self._measured))

    def facts(self, *, gamma: float | None = 0.0) -> StepFacts:
        """For a scheduler's `bound`."""
        return self._moments.facts(gamma, len(self._lost))
