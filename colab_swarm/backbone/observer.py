"""What the peers of one collaboration tell, collected: progress, losses, who is there, how rounds went.

The loss of the whole swarm from what single trainers tell of theirs. A pure core.

A trainer's record says the mean loss of its samples since the last global step. Of each step the curve takes the
median over the trainers, weighted by their speeds, of which none counts for more than the median one: a liar, or a
minority of them, cannot move it, and a peer that saw few samples moves it little.
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
from typing import Generic, TypeVar

import msgspec

from colab_swarm.net.peers import PeerId, short
from colab_swarm.training.assistant import AssistedRound
from colab_swarm.training.progress import (
    AssistantRecord,
    Assistants,
    Branch,
    Progress,
    ProgressRecord,
    read_assistants,
    read_progress,
)
from colab_swarm.training.settings import PeerServices

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=msgspec.Struct)


class Journal(Generic[S]):
    """The records of one file."""

    def __init__(self, path: Path, kind: type[S]) -> None:
        self.path = path
        self._decoder = msgspec.json.Decoder(kind)

    def append(self, *records: S) -> None:
        """Write records at the end; if the disk is full they are lost, with a warning."""
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                if file.tell() and not self._ends_with_a_line():
                    lines = b"\n" + lines
                file.write(lines)
        except OSError as error:
            logger.warning("%s could not be written: %s", self.path, error)

    def _ends_with_a_line(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) == b"\n"

    def read(self) -> Iterator[S]:
        """The records that can be read, oldest first."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for line in file:
                try:
                    yield self._decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    logger.info("a line of %s is cut off", self.path)


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


MAX_PEERS = 256

MAX_SPANS = 64

"""Of one peer."""

MAX_NAME_CHARS = 40


class PeerSpan(msgspec.Struct, frozen=True):
    """A peer was there as ``role`` from ``since`` to ``until``, seconds since the epoch."""

    role: str
    since: float
    until: float


class PeerLine(msgspec.Struct, frozen=True):
    """A peer and when it was there.

    Attributes:
        name: what it calls itself; not to be trusted.
        id: in hex.
        here: whether it is there now.
        step, samples_per_s: what it told last.
        spans: oldest first.
    """

    name: str
    id: str
    here: bool
    step: int
    samples_per_s: float
    spans: tuple[PeerSpan, ...]


class Roster:
    """The peers that were seen, by what they told."""

    def __init__(self) -> None:
        self._lines: dict[PeerId, PeerLine] = {}  # who was seen last is last
        self._stayed: set[PeerId] = set()  # here at the last look and at this one

    def on_records(
        self,
        trainers: Mapping[PeerId, ProgressRecord],
        assistants: Mapping[PeerId, AssistantRecord],
        *,
        at: float,
    ) -> None:
        """Take the live records; who has none is not here now. ``at``: seconds since the epoch."""
        before = {peer for peer, line in self._lines.items() if line.here}
        for peer in before:
            self._lines[peer] = msgspec.structs.replace(self._lines[peer], here=False, samples_per_s=0.0)
        self._stayed = before & (trainers.keys() | assistants.keys())
        for peer, assistant in assistants.items():
            if peer not in trainers:
                self._see(peer, assistant.name, "assistant", at)
        for peer, record in trainers.items():
            role = "catching up" if record.syncing else "trainer"
            self._see(peer, record.name, role, at, record.step, record.samples_per_s)
        while len(self._lines) > MAX_PEERS:
            del self._lines[next(iter(self._lines))]

    def _see(
        self, peer: PeerId, name: str, role: str, at: float, step: int = 0, samples_per_s: float = 0.0
    ) -> None:
        known = self._lines.pop(peer, None)
        spans = known.spans if known is not None else ()
        if spans and spans[-1].role == role and peer in self._stayed:
            spans = (*spans[:-1], msgspec.structs.replace(spans[-1], until=at))
        else:
            spans = (*spans[1 - MAX_SPANS :], PeerSpan(role, at, at))
        shown = name[:MAX_NAME_CHARS] or short(peer)
        self._lines[peer] = PeerLine(shown, peer.hex(), True, step, samples_per_s, spans)

    def name_of(self, peer: PeerId) -> str | None:
        """What a peer called itself; None if it was never seen."""
        return self._lines[peer].name if peer in self._lines else None

    def lines(self) -> tuple[PeerLine, ...]:
        """The peers, those that are here first, by when they came."""
        return tuple(sorted(self._lines.values(), key=lambda line: (not line.here, line.spans[0].since)))


MAX_ROUNDS = 40

SILENCE_S = 6.0

"""After which trainers that are not linked here count as gone; to be wrong costs nothing, see `keeper`."""

OnPoints = Callable[[Sequence[LossPoint]], None]


class RoundRow(msgspec.Struct, frozen=True):
    """A round that the backbone reduced in.

    Attributes:
        step: global step.
        at: when its group began to form, seconds since the epoch.
        forming_s, exchange_s, recovery_s: how long each phase took.
        peers, contributors: members, and those whose values are in the mean.
        samples: of the contributors.
        spans_lost: parts of the vector whose reducer was lost.
        moved_bytes: received and sent by the backbone.
    """

    step: int
    at: float
    forming_s: float
    exchange_s: float
    recovery_s: float
    peers: int
    contributors: int
    samples: float
    spans_lost: int
    moved_bytes: int


class Observer:
    """Watches one collaboration.

    Args:
        prefix: of the collaboration.
        folder: where its ``losses.jsonl`` is: the curve goes on after a restart.
        on_points: hears of new points of the curve.
    """

    def __init__(
        self,
        services: PeerServices,
        prefix: str,
        folder: Path,
        on_points: OnPoints = lambda points: None,
    ) -> None:
        self._services = services
        self._prefix = prefix
        self._journal = Journal(folder / "losses.jsonl", LossPoint)
        self._on_points = on_points
        self.curve = LossCurve(self._journal.read())
        self.roster = Roster()
        self.rounds: deque[RoundRow] = deque(maxlen=MAX_ROUNDS)
        self.round_count = 0
        self.assistants = Assistants(prefix)
        nobody = ProgressRecord(0, b"", 0.0, 0.0, syncing=True, reduces=False, name="")
        self._progress = Progress(services.peers.id, nobody, target_batch_size=0.0)
        self._on_branch: Branch | None = None
        self._heard_at = float("-inf")
        self._stop_listening = services.peers.on_lost(self._on_lost)

    def close(self) -> None:
        """Watch no more."""
        self._stop_listening()

    def _on_lost(self, peer: PeerId) -> None:
        self._progress.on_lost(peer, now=asyncio.get_running_loop().time())
        self.assistants.on_lost(peer)

    async def refresh(self) -> None:
        """Read the records of all peers.

        Raises:
            PeerError: the swarm's records cannot be read now.
        """
        peers, dht = self._services.peers, self._services.dht
        told, assistants = await asyncio.gather(
            read_progress(dht, peers, self._prefix), read_assistants(dht, peers, self._prefix)
        )
        now, at = asyncio.get_running_loop().time(), time.time()
        self._progress.on_records(told, linked=peers.linked(), now=now)
        self.assistants.on_records(assistants)
        self.roster.on_records(self.trainers, self.assistants.records, at=at)
        branch = self.branch
        if branch != self._on_branch or (branch is not None and branch.peers & peers.linked()):
            self._on_branch, self._heard_at = branch, now
        points = self.curve.on_records(self.trainers, branch, at=at)
        if points:
            self._journal.append(*points)
            self._on_points(points)

    @property
    def trainers(self) -> dict[PeerId, ProgressRecord]:
        """The live records of all trainers; what this peer tells itself is left out."""
        me = self._services.peers.id
        return {peer: record for peer, record in self._progress.records.items() if peer != me}

    @property
    def branch(self) -> Branch | None:
        """Where the swarm is; None while nobody trains."""
        branch = self._progress.branch()
        return branch if branch.peers else None

    @property
    def alive(self) -> bool:
        """Whether somebody on the branch is linked here, or moved it on lately; records outlive their writers."""
        heard_s = asyncio.get_running_loop().time() - self._heard_at
        return self.branch is not None and heard_s < SILENCE_S

    def on_round(self, helped: AssistedRound) -> None:
        """This peer reduced in a round."""
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
