"""The public records of one collaboration, collected: progress, losses, present peers.

A trainer's record reports the mean loss of its samples since the last global step. Of each step the
curve takes the median over the trainers, weighted by their speeds. No weight exceeds the median
weight, so a lying minority cannot move the curve, and a peer with few samples moves it little.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from colab_swarm.backbone.config import Forward
from colab_swarm.net.peers import PeerId
from colab_swarm.training.progress import (
    Branch,
    Progress,
    ProgressRecord,
)
from colab_swarm.training.settings import PeerServices

logger = logging.getLogger(__name__)

MAX_POINTS = 2000
"""Points in the curve; beyond that every other one is left out, but never of the newest quarter."""
MAX_LOSS = 1e9
MAX_WAITING, FORWARD_S = 1000, 5.0
RESUMED_BY = {"wandb": "id", "trackio": "name"}
"""The argument of ``init`` by which each tracker finds a run again after a restart."""
SILENCE_S = 6.0
"""Trainers that are not linked here count as gone after this; an error costs nothing, see `keeper`."""


class LossPoint(msgspec.Struct, frozen=True):
    """The loss at a global step."""

    step: int  # updates of the parameters that it was measured with
    at: float  # seconds since the epoch
    loss: float  # weighted median over the peers
    peers: int  # how many reported a loss


class LossCurve:
    """The run's loss, oldest point first; bounded. A pure core."""

    def __init__(self, points: Iterable[LossPoint] = ()) -> None:
        self.points: list[LossPoint] = []
        self._reported: dict[int, dict[PeerId, tuple[float, float]]] = {}  # step -> peer -> (loss, weight)
        for point in points:
            self._add(point)

    def on_records(
        self, records: Mapping[PeerId, ProgressRecord], branch: Branch | None, *, at: float
    ) -> list[LossPoint]:
        """Take the trainers' live records; return the points of the steps that have ended since.

        Args:
            branch: where the swarm is; None while nobody trains.
            at: seconds since the epoch.
        """
        if branch is None:
            return []
        if self.points and branch.step < self.points[-1].step:  # the run went back to a checkpoint
            self._reported.clear()
            self.points = [point for point in self.points if point.step < branch.step]
        for peer, record in records.items():
            self._report(peer, record, branch.step)
        ended = sorted(step for step in self._reported if step < branch.step)
        points = [_loss_point(step, at, list(self._reported.pop(step).values())) for step in ended]
        for point in points:
            self._add(point)
        return points

    def _report(self, peer: PeerId, record: ProgressRecord, now: int) -> None:
        """Take the loss of one record, if it belongs to the swarm's step ``now`` or the one before."""
        step = record.step if record.samples else record.step - 1  # of the batch that has just ended
        first = max(self.points[-1].step + 1 if self.points else 0, now - 1)
        loss = math.nan if record.loss is None or record.syncing else record.loss
        if first <= step <= now and abs(loss) < MAX_LOSS:
            self._reported.setdefault(step, {})[peer] = (loss, record.samples_per_s)

    def loss_at(self, step: int) -> float | None:
        """Return the loss at a step, or the last one before it."""
        return next((point.loss for point in reversed(self.points) if point.step <= step), None)

    def _add(self, point: LossPoint) -> None:
        while self.points and self.points[-1].step >= point.step:
            self.points.pop()
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            old = len(self.points) * 3 // 4
            self.points = self.points[:old:2] + self.points[old:]


def _loss_point(step: int, at: float, reported: list[tuple[float, float]]) -> LossPoint:
    most = median(weight for _, weight in reported)
    middle = weighted_median([(loss, min(weight, most) or 1.0) for loss, weight in reported])
    return LossPoint(step, at, middle, len(reported))


def weighted_median(weighted: Sequence[tuple[float, float]]) -> float:
    """Return the least value with at least half of the weight at or below it; between two such values, their mean.

    Args:
        weighted: values and weights, > 0.
    """
    values = sorted(weighted)
    wanted, so_far = sum(weight for _, weight in values) / 2, 0.0
    for index, (value, weight) in enumerate(values):
        so_far += weight
        if math.isclose(so_far, wanted) and index + 1 < len(values):
            return (value + values[index + 1][0]) / 2
        if so_far >= wanted:
            return value
    return values[-1][0]


class Forwarder:
    """Logs points to a tracker from a thread of its own. If the tracker cannot be reached, points are lost.

    Raises:
        ValueError: the tracker's package is not installed.
    """

    def __init__(self, settings: Forward, prefix: str) -> None:
        if importlib.util.find_spec(settings.to) is None:
            raise ValueError(f"to forward to {settings.to}: pip install {settings.to}")
        self._settings, self._run_id = settings, prefix.replace("/", "-")
        self._waiting: queue.Queue[LossPoint | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="colab-swarm-forward", daemon=True)
        self._thread.start()

    def forward(self, points: Sequence[LossPoint]) -> None:
        """Log these points soon; returns at once."""
        for point in points:
            try:
                self._waiting.put_nowait(point)
            except queue.Full:
                logger.warning("%s is too slow: a point is lost", self._settings.to)

    def close(self) -> None:
        """Log the waiting points and finish, in `FORWARD_S` at most."""
        try:
            self._waiting.put(None, timeout=FORWARD_S)
            self._thread.join(FORWARD_S)
        except queue.Full:
            logger.warning("%s does not answer: points are lost", self._settings.to)

    def _run(self) -> None:
        tracker: Any = None
        while (point := self._waiting.get()) is not None:
            try:
                tracker = tracker or self._begin()
                tracker.log({"loss": point.loss, "trainers": float(point.peers)}, step=point.step)
            except Exception as error:  # a tracker's errors are its own
                logger.warning("step %d not forwarded to %s: %s", point.step, self._settings.to, error)
        if tracker is not None:
            tracker.finish()

    def _begin(self) -> Any:
        tracker = importlib.import_module(self._settings.to)
        run = {RESUMED_BY[self._settings.to]: self._run_id}
        tracker.init(project=self._settings.project, resume="allow", **run)
        return tracker


class Observer:
    """Watches one collaboration.

    Args:
        prefix: of the collaboration.
        folder: where its ``losses.jsonl`` is; the curve continues after a restart.
        forward: a tracker that gets the curve too.
    """

    def __init__(
        self, services: PeerServices, prefix: str, folder: Path, forward: Forward | None = None
    ) -> None:
        self._services = services
        self._forwarder = None if forward is None else Forwarder(forward, prefix)
        self._file = folder / "losses.jsonl"
        self.curve = LossCurve(read_losses(self._file))
        self.progress = Progress.of_watcher(services.peers.id, prefix)
        self._last_branch: Branch | None = None
        self._heard_at = float("-inf")
        self._stop_listening = services.peers.on_lost(self._on_lost)

    def close(self) -> None:
        """Stop watching."""
        self._stop_listening()
        if self._forwarder is not None:
            self._forwarder.close()

    def _on_lost(self, peer: PeerId) -> None:
        self.progress.on_lost(peer, now=asyncio.get_running_loop().time())

    async def refresh(self) -> None:
        """Read the records of all peers.

        Raises:
            PeerError: the swarm's records cannot be read now.
        """
        await self.progress.refresh(self._services.dht, self._services.peers)
        now, linked = asyncio.get_running_loop().time(), self._services.peers.linked()
        branch = self.branch
        if branch != self._last_branch or (branch is not None and branch.peers & linked):
            self._last_branch, self._heard_at = branch, now
        self._append(self.curve.on_records(self.trainers, branch, at=time.time()))

    def _append(self, points: Sequence[LossPoint]) -> None:
        """Append to the file; a newline goes first, because the last record may be cut off."""
        if not points:
            return
        if self._forwarder is not None:
            self._forwarder.forward(points)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab") as file:
                file.write(b"".join(b"\n" + msgspec.json.encode(point) for point in points))
        except OSError as error:
            logger.warning("%s could not be written: %s", self._file, error)

    @property
    def trainers(self) -> dict[PeerId, ProgressRecord]:
        """Return the live records of all trainers, without this peer's own."""
        me = self._services.peers.id
        return {peer: record for peer, record in self.progress.records.items() if peer != me}

    @property
    def branch(self) -> Branch | None:
        """Return the branch that the swarm is on, or None while nobody trains."""
        branch = self.progress.branch()
        return branch if branch.peers else None

    @property
    def alive(self) -> bool:
        """Return True if a trainer of the branch is linked here or advanced it lately; records outlive peers."""
        heard_s = asyncio.get_running_loop().time() - self._heard_at
        return self.branch is not None and heard_s < SILENCE_S


def read_losses(path: Path) -> Iterator[LossPoint]:
    """Yield the readable records of a ``losses.jsonl``, oldest first."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield msgspec.json.decode(line, type=LossPoint)
            except (msgspec.MsgspecError, UnicodeDecodeError):  # empty, or cut off
                continue
