"""The public records of one collaboration, collected: progress, losses, present peers, rounds.

A trainer's record reports the mean loss of its samples since the last global step. Of each step the curve takes the
median over the trainers, weighted by their speeds. No weight exceeds the median weight, so a lying minority cannot move
the curve, and a peer with few samples moves it little.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec

from colab_swarm.net.peers import PeerId, short
from colab_swarm.training.assistant import AssistedRound
from colab_swarm.training.progress import (
    Assistants,
    Branch,
    Progress,
    ProgressRecord,
    read_participants,
)
from colab_swarm.training.settings import PeerServices

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=msgspec.Struct)
MAX_POINTS = 2000
"""Points in the curve; beyond that every other one is left out, but never of the newest quarter."""
MAX_LOSS = 1e9
MAX_PEERS, MAX_SPANS, MAX_NAME_CHARS = 256, 64, 40
MAX_ROUNDS = 40
SILENCE_S = 6.0
"""Trainers that are not linked here count as gone after this; an error costs nothing, see `keeper`."""


def append_records(path: Path, *records: msgspec.Struct) -> None:
    """Append records to a file of JSON lines; if the disk is full they are lost, with a warning."""
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":  # the last record was cut off
                    lines = b"\n" + lines
            file.write(lines)
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error)


def read_records(path: Path, kind: type[S]) -> Iterator[S]:
    """Yield the readable records of a file of JSON lines, oldest first."""
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for line in file:
            try:
                yield decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                logger.info("a record of %s is cut off", path)


class LossPoint(msgspec.Struct, frozen=True):
    """The loss at a global step.

    Attributes:
        low, high: the lower and upper quartile.
    """

    step: int  # updates of the parameters that it was measured with
    at: float  # seconds since the epoch
    loss: float  # weighted median over the peers
    low: float
    high: float
    peers: int  # how many reported a loss
    samples_per_s: float  # speed of all together


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
        self._go_back(branch.step)
        trainers = {peer: record for peer, record in records.items() if not record.syncing}
        for peer, record in trainers.items():
            self._report(peer, record, branch.step)
        speed = sum(record.samples_per_s for record in trainers.values())
        ended = sorted(step for step in self._reported if step < branch.step)
        points = [_loss_point(step, at, list(self._reported.pop(step).values()), speed) for step in ended]
        for point in points:
            self._add(point)
        return points

    def _go_back(self, now: int) -> None:
        """Forget what came after the checkpoint that the run went back to, if it did."""
        if self.points and now < self.points[-1].step:
            self._reported.clear()
            self.points = [point for point in self.points if point.step < now]

    def _report(self, peer: PeerId, record: ProgressRecord, now: int) -> None:
        """Take the loss of one record, if it belongs to the swarm's step ``now`` or the one before."""
        step = record.step if record.samples else record.step - 1  # of the batch that has just ended
        first = max(self.points[-1].step + 1 if self.points else 0, now - 1)
        if first <= step <= now and record.loss is not None and abs(record.loss) < MAX_LOSS:
            self._reported.setdefault(step, {})[peer] = (record.loss, record.samples_per_s)

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


def _loss_point(step: int, at: float, reported: list[tuple[float, float]], speed: float) -> LossPoint:
    most = median(weight for _, weight in reported)
    weighted = [(loss, min(weight, most) or 1.0) for loss, weight in reported]
    low, middle, high = (weighted_quantile(weighted, q) for q in (0.25, 0.5, 0.75))
    return LossPoint(step, at, middle, low, high, len(weighted), speed)


def weighted_quantile(weighted: Sequence[tuple[float, float]], q: float) -> float:
    """Return the least value with at least ``q`` of the weight at or below it; between two such values, their mean.

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


class PeerSpan(msgspec.Struct, frozen=True):
    """A peer was present as ``role`` from ``since`` to ``until``, seconds since the epoch."""

    role: str
    since: float
    until: float


class PeerLine(msgspec.Struct, frozen=True):
    """A peer and the times when it was present.

    Attributes:
        step, samples_per_s: as it last reported.
    """

    name: str  # chosen by the peer; not to be trusted
    id: str  # in hex
    here: bool  # whether it is present now
    step: int
    samples_per_s: float
    spans: tuple[PeerSpan, ...]  # oldest first


class RoundRow(msgspec.Struct, frozen=True):
    """A round that the backbone reduced in.

    Attributes:
        forming_s, exchange_s, recovery_s: how long each phase took.
        peers, contributors: members, and those whose values are in the mean.
    """

    step: int  # global step
    at: float  # when its group began to form, seconds since the epoch
    forming_s: float
    exchange_s: float
    recovery_s: float
    peers: int
    contributors: int
    samples: float  # of the contributors
    spans_lost: int  # parts of the vector whose reducer was lost
    moved_bytes: int  # received and sent by the backbone


class Observer:
    """Watches one collaboration.

    Args:
        prefix: of the collaboration.
        folder: where its ``losses.jsonl`` is; the curve continues after a restart.

    Attributes:
        on_points: called with new points of the curve; may be set.
    """

    def __init__(self, services: PeerServices, prefix: str, folder: Path) -> None:
        self._services, self._prefix = services, prefix
        self._file = folder / "losses.jsonl"
        self.on_points: Callable[[Sequence[LossPoint]], None] | None = None
        self.curve = LossCurve(read_records(self._file, LossPoint))
        self.rounds: deque[RoundRow] = deque(maxlen=MAX_ROUNDS)
        self.round_count = 0
        self.assistants = Assistants(prefix)
        own = ProgressRecord(0, b"", 0.0, 0.0, syncing=True, reduces=False, name="")
        self._progress = Progress(services.peers.id, own, target_batch_size=0.0)
        self._peers: dict[PeerId, PeerLine] = {}  # the last seen are last
        self._last_branch: Branch | None = None
        self._heard_at = float("-inf")
        self.close = services.peers.on_lost(self._on_lost)

    def _on_lost(self, peer: PeerId) -> None:
        self._progress.on_lost(peer, now=asyncio.get_running_loop().time())
        self.assistants.on_lost(peer)

    async def refresh(self) -> None:
        """Read the records of all peers.

        Raises:
            PeerError: the swarm's records cannot be read now.
        """
        progress, assistants = await read_participants(self._services.dht, self._prefix)
        now, at = asyncio.get_running_loop().time(), time.time()
        self._progress.on_records(progress, linked=self._services.peers.linked(), now=now)
        self.assistants.on_records(assistants)
        self._see_peers(at)
        branch = self.branch
        if branch != self._last_branch or (
            branch is not None and branch.peers & self._services.peers.linked()
        ):
            self._last_branch, self._heard_at = branch, now
        points = self.curve.on_records(self.trainers, branch, at=at)
        if points:
            append_records(self._file, *points)
            if self.on_points is not None:
                self.on_points(points)

    def _see_peers(self, at: float) -> None:
        """Update the peers' lines from the live records; a peer without one is not present now."""
        seen = {
            peer: self._line(peer, record.name, "assistant", 0, 0.0, at)
            for peer, record in self.assistants.records.items()
        }
        for peer, one in self.trainers.items():
            role = "catching up" if one.syncing else "trainer"
            seen[peer] = self._line(peer, one.name, role, one.step, one.samples_per_s, at)
        gone = {
            peer: msgspec.structs.replace(line, here=False, samples_per_s=0.0)
            for peer, line in self._peers.items()
            if peer not in seen
        }
        self._peers = dict([*gone.items(), *seen.items()][-MAX_PEERS:])

    def _line(
        self, peer: PeerId, name: str, role: str, step: int, samples_per_s: float, at: float
    ) -> PeerLine:
        known = self._peers.get(peer)
        spans = known.spans if known is not None else ()
        if known is not None and known.here and spans[-1].role == role:
            spans = (*spans[:-1], msgspec.structs.replace(spans[-1], until=at))
        else:
            spans = (*spans[1 - MAX_SPANS :], PeerSpan(role, at, at))
        return PeerLine(name[:MAX_NAME_CHARS] or short(peer), peer.hex(), True, step, samples_per_s, spans)

    def name_of(self, peer: PeerId) -> str | None:
        """Return the name that a peer chose, or None if it was never seen."""
        return self._peers[peer].name if peer in self._peers else None

    def peers(self) -> tuple[PeerLine, ...]:
        """Return the peers, present ones first, by arrival."""
        return tuple(sorted(self._peers.values(), key=lambda line: (not line.here, line.spans[0].since)))

    @property
    def trainers(self) -> dict[PeerId, ProgressRecord]:
        """Return the live records of all trainers, without this peer's own."""
        me = self._services.peers.id
        return {peer: record for peer, record in self._progress.records.items() if peer != me}

    @property
    def branch(self) -> Branch | None:
        """Return the branch that the swarm is on, or None while nobody trains."""
        branch = self._progress.branch()
        return branch if branch.peers else None

    @property
    def alive(self) -> bool:
        """Return True if a trainer of the branch is linked here or advanced it lately; records outlive peers."""
        heard_s = asyncio.get_running_loop().time() - self._heard_at
        return self.branch is not None and heard_s < SILENCE_S

    def on_round(self, helped: AssistedRound) -> None:
        """Record a round that this peer reduced in."""
        result, group = helped.result, helped.result.group
        loop_to_epoch = time.time() - asyncio.get_running_loop().time()
        weights = {member.id: member.weight for member in group.members}
        self.round_count += 1
        self.rounds.append(
            RoundRow(
                step=group.step,
                at=helped.began_at + loop_to_epoch,
                forming_s=helped.formed_at - helped.began_at,
                exchange_s=result.seconds["exchange"],
                recovery_s=result.seconds["recovery"],
                peers=len(group.members),
                contributors=len(result.contributors),
                samples=sum(weights[peer] for peer in result.contributors),
                spans_lost=len(result.spans_lost),
                moved_bytes=result.sent_bytes + result.received_bytes,
            )
        )
