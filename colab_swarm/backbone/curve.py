"""The loss of the whole swarm from what single trainers tell of theirs. A pure core.

A trainer's record says the mean loss of its samples since the last global step. Of each step the curve takes the
median over the trainers, weighted by their speeds, of which none counts for more than the median one: a liar, or a
minority of them, cannot move it, and a peer that saw few samples moves it little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec

from colab_swarm.net.peers import PeerId
from colab_swarm.training.progress import Branch, ProgressRecord

MAX_POINTS = 2000
"""Held and shown; beyond that every other one is left out, the newest quarter never."""
MAX_LOSS = 1e9


class LossPoint(msgspec.Struct, frozen=True):
    """The loss at a global step.

    Attributes:
        step: updates of the parameters that it was measured with.
        at: seconds since the epoch.
        loss: weighted median over the peers.
        low, high: a quarter of them had less, a quarter more.
        peers: how many told theirs.
        samples_per_s: speed of all together.
    """

    step: int
    at: float
    loss: float
    low: float
    high: float
    peers: int
    samples_per_s: float


class LossCurve:
    """The run's loss, oldest point first; bounded."""

    def __init__(self, points: Iterable[LossPoint] = ()) -> None:
        self.points: list[LossPoint] = []
        self._told: dict[int, dict[PeerId, tuple[float, float]]] = {}  # step -> peer -> (loss, weight)
        for point in points:
            self._add(point)

    def on_records(
        self, records: Mapping[PeerId, ProgressRecord], branch: Branch | None, *, at: float
    ) -> list[LossPoint]:
        """Take the trainers' live records; returns the points of the steps that have ended since.

        Args:
            branch: where the swarm is; None while nobody trains.
            at: seconds since the epoch.
        """
        if branch is None:
            return []
        if self.points and branch.step < self.points[-1].step:  # the run went back to a checkpoint
            self._told.clear()
            self.points = [point for point in self.points if point.step < branch.step]
        for peer, record in records.items():
            step = record.step if record.samples else record.step - 1  # of the batch that has just ended
            if record.loss is not None and abs(record.loss) < MAX_LOSS and not record.syncing:
                known = self.points[-1].step if self.points else -1
                if max(known + 1, branch.step - 1) <= step <= branch.step:
                    self._told.setdefault(step, {})[peer] = (record.loss, record.samples_per_s)
        speed = sum(record.samples_per_s for record in records.values() if not record.syncing)
        ended = sorted(step for step in self._told if step < branch.step)
        points = [_point(step, self._told.pop(step), at, speed) for step in ended]
        for point in points:
            self._add(point)
        return points

    def loss_at(self, step: int) -> float | None:
        """The loss at a step, or the last one before it."""
        return next((point.loss for point in reversed(self.points) if point.step <= step), None)

    def _add(self, point: LossPoint) -> None:
        while self.points and self.points[-1].step >= point.step:
            self.points.pop()
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            old = len(self.points) * 3 // 4
            self.points = self.points[:old:2] + self.points[old:]


def _point(step: int, told: Mapping[PeerId, tuple[float, float]], at: float, speed: float) -> LossPoint:
    most = median(weight for _, weight in told.values())
    weighted = [(loss, min(weight, most) or 1.0) for loss, weight in told.values()]
    low, middle, high = (weighted_quantile(weighted, q) for q in (0.25, 0.5, 0.75))
    return LossPoint(step, at, middle, low, high, len(told), speed)


def weighted_quantile(weighted: Sequence[tuple[float, float]], q: float) -> float:
    """The least value with at least ``q`` of the weight at or below it; between two that divide it, their mean.

    Args:
        weighted: values and weights, > 0.
        q: between 0 and 1.
    """
    values = sorted(weighted)
    wanted, so_far = q * sum(weight for _, weight in values), 0.0
    for index, (value, weight) in enumerate(values):
        so_far += weight
        if math.isclose(so_far, wanted) and index + 1 < len(values):
            return (value + values[index + 1][0]) / 2
        if so_far >= wanted:
            return value
    return values[-1][0]
