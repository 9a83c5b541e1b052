"""The organizer's part of a step: it divides the batch among the peers, and says when the batch is full. Pure.

Each peer that stands at the organizer (has a stream open to it) has a *grant*: the number of samples that it should
compute for this step. The peer reports how many samples it has counted. When its grant is used up, it sends a ticket.
All grants together are the batch, rounded up once to whole micro-batches. So each batch becomes full at any speeds, and
all peers end at about the same time.

If a peer vanishes, pauses or is late, the grants of the others rise immediately by the samples that this peer had not
counted. Grants fall if the step would otherwise take half as long again. The organizer grants the samples that it takes
back from a peer to others once this peer has answered.
"""

import hashlib
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from colab_swarm.averaging.group import StepReport
from colab_swarm.net.patience import Patience
from colab_swarm.net.peers import PeerId

REPLAN_S = 0.25  # between two plans of one step that may take grants back
REPORT_S = 1.0  # maximum time between two reports of a peer that computes
_LONGER = 1.5  # if a step takes more than this many times its best time, grants are taken back
_EQUAL = 1.2  # times that differ by less than a fifth count as equal
_MOMENT_S = 0.02  # what the network's jitter may add to a time
_UNKNOWN_S = 1.0  # assumed time of a micro-batch while no peer's time is known
# Smaller figures of a peer for its micro-batches are raised to these limits, so that a plan can be computed.
_LEAST_S = 1e-6
_LEAST_PART = 1e-6  # part of the target


class Worker(NamedTuple):
    """A peer that can compute micro-batches of ``samples``, each in ``seconds``, from the time ``free_at`` on."""

    free_at: float
    seconds: float
    samples: float
    order: bytes = b""  # decides between equal workers


def plan(workers: Sequence[Worker], samples: float) -> list[int]:
    """Return how many micro-batches each worker computes, so that together they have these samples soonest.

    Bisection finds T, the earliest time at which ``sum(floor((T - free_at) / seconds) * worker.samples)`` over the
    workers is at least ``samples``. Then a worker gets at least one micro-batch if its first micro-batch ends at most a
    fifth later than T, counted from the earliest ``free_at``. Last, superfluous micro-batches are taken from the
    workers that have most, so the sum is rounded up only once.
    """
    if samples <= 0 or not workers:
        return [0] * len(workers)
    begin = min(worker.free_at for worker in workers)

    def counts(until: float) -> list[int]:
        return [max(0, int((until - free_at + 1e-9) / each)) for free_at, each, _, _ in workers]

    def computed(found: list[int]) -> float:
        return sum(count * worker.samples for count, worker in zip(found, workers, strict=True))

    low = begin
    most = math.ceil(samples / min(worker.samples for worker in workers)) + 1
    high = max(worker.free_at for worker in workers) + most * max(worker.seconds for worker in workers)
    while high - low > 1e-6 * (high - begin):
        middle = (low + high) / 2
        if computed(counts(middle)) >= samples:
            high = middle
        else:
            low = middle
    found = counts(high)
    reach = begin + _EQUAL * (high - begin) + _MOMENT_S
    for index, worker in enumerate(workers):
        if worker.free_at + worker.seconds <= reach:
            found[index] = max(found[index], 1)
    extra = computed(found) - samples
    while True:
        spare = [index for index, count in enumerate(found) if count and workers[index].samples <= extra]
        if not spare:
            return found
        index = max(spare, key=lambda one: (found[one], workers[one].order))
        each = workers[index].samples
        fewer = max(1, min(found[index], int(extra / each) // len(spare)))  # many if they are tiny
        found[index] -= fewer
        extra -= fewer * each


@dataclass
class Participant:
    """A peer that stands at the organizer, as its reports of this step describe it.

    Attributes:
        granted: samples that the peer may compute; it may not know the newest grant yet.
        obeys: the grant that the peer last confirmed. It is more than ``granted`` until the peer knows of a cut.
        report: the last report; None if the peer has not reported since the last group.
        holds: True if the peer holds the state of the branch; `Formation` sets this.
        late_at: the time at which the peer is late, because its count stood still for its limit.
        seconds: time of a micro-batch; 0 while not known.
        samples: number of samples in a micro-batch.
        begun_at: when the present micro-batch of the peer began.
    """

    peer: PeerId
    granted: float = 0.0
    obeys: float = 0.0
    report: StepReport | None = None
    holds: bool = True
    late_at: float = math.inf
    seconds: float = 0.0
    samples: float = 0.0
    begun_at: float = 0.0

    @property
    def counted(self) -> float:
        return self.report.counted if self.report else 0.0

    @property
    def ready(self) -> bool:
        """True if the peer has a valid ticket: it used its grant up, or computes nothing more for this step."""
        report = self.report
        if report is None or report.ticket is None or not self.holds:
            return False
        return report.final or report.away or report.counted >= self.granted

    @property
    def able(self) -> bool:
        """True if the peer can compute samples for this step."""
        report = self.report
        if report is None:
            return self.granted > 0
        return self.holds and not (report.away or report.final)

    @property
    def computes_on(self) -> bool:
        """True if the peer's ticket is final, and the peer already computes for the next step."""
        return self.holds and self.report is not None and self.report.final and not self.report.away

    @property
    def left(self) -> float:
        """Samples that the peer will still compute, by the larger of its old and its new grant."""
        return max(self.granted, self.obeys, self.counted) - self.counted


class Batch:
    """Divides the ``target`` samples of one step among the peers that stand here; ``key`` is the last group's id.

    ``patience`` knows how long the count of each peer may stand still. `Formation` decides which peers hold the state.
    """

    def __init__(self, target: float, key: bytes, patience: Patience[PeerId], now: float) -> None:
        self.target = target
        self.key = key
        self.patience = patience
        self.participants: dict[PeerId, Participant] = {}
        self.begun_at = now
        self._late: dict[PeerId, float] = {}  # the late peers, and for how long each was awaited
        self._replanned_at = -math.inf

    def on_report(self, peer: PeerId, report: StepReport, now: float) -> None:
        """Take a peer's report; with its first report, the peer becomes a participant."""
        one = self.participants.setdefault(peer, Participant(peer))
        before = one.report
        one.seconds = report.batch_s
        if report.batch_s:
            one.seconds = max(report.batch_s, _LEAST_S)
        if report.batch_samples:
            one.samples = max(report.batch_samples, _LEAST_PART * self.target)
        # The peer's micro-batch may have begun before this step, but not long before.
        age_s = min(report.age_s, now - self.begun_at + self.limit_s(one))
        report = msgspec.structs.replace(report, age_s=age_s)
        if report.batch_s and (before is None or report.counted > before.counted):
            self.patience.learn(peer, report.batch_s)
        went_on = report.counted > 0 if before is None else before.away or report.counted != before.counted
        if went_on or one.late_at == math.inf:
            one.late_at = now + self.limit_s(one)
        elif before is None:
            # Before this report, nothing was known of the time that this peer needs.
            one.late_at = max(one.late_at, now + self.limit_s(one))
        if before is None and not one.granted:
            # Another organizer made this grant; this organizer can take it back like its own grants.
            one.granted = report.granted
        one.begun_at = now - report.age_s
        one.obeys = report.granted
        one.report = report

    def excuse(self, peers: Iterable[PeerId], now: float) -> None:
        """Give these peers more time, because their round is not over, or because this process was stopped."""
        for peer in peers:
            one = self.participants.get(peer)
            if one is not None:
                one.late_at = max(one.late_at, now + self.limit_s(one))

    def on_lost(self, peer: PeerId) -> None:
        """Forget a peer whose stream has ended, so that the other peers compute its part."""
        self.participants.pop(peer, None)

    # Who is awaited.

    def limit_s(self, one: Participant) -> float:
        """Return how long a peer's count may stand still; this includes `REPORT_S`, the time between two reports."""
        return max(self.patience.limit_s(one.peer), 2 * one.seconds) + REPORT_S

    def awaited(self, now: float) -> list[Participant]:
        """Return the peers that compute or may get a higher grant, and are not late."""
        return [one for one in self.participants.values() if one.able and (one.ready or now < one.late_at)]

    @property
    def ready_samples(self) -> float:
        return sum(one.counted for one in self.participants.values() if one.ready)

    @property
    def full(self) -> bool:
        """True if the tickets together have the target, or if no peer computes for this step any more.

        In the second case the batch is short: peers that go on computing already do so for the next step.
        """
        if self.ready_samples >= self.target > 0:
            return True
        reports = [one.report for one in self.participants.values() if one.ready and one.report is not None]
        computes = any(one.able for one in self.participants.values())
        return not computes and any(report.final and report.counted for report in reports)

    def look_at(self, now: float) -> float:
        """Return when the next peer will be late if it does not report before; infinite if no peer can be late."""
        times = [one.late_at for one in self.awaited(now) if not one.ready]
        return min(times, default=math.inf)

    @property
    def late(self) -> dict[PeerId, float]:
        """The peers that were late, and the seconds for which each was awaited.

        Empty if most peers were late, because then all peers may evaluate at the same time.
        """
        return self._late if 2 * len(self._late) <= len(self.participants) else {}

    # The plan.

    def next_grants(self, now: float) -> dict[PeerId, float]:
        """Return the grants that change now, by peer."""
        changed = self._release(now)
        awaited = [one for one in self.awaited(now) if one.samples]
        if not awaited:
            return changed
        if now >= self._replanned_at + REPLAN_S:
            self._replanned_at = now
            changed |= self._take_back(awaited, now)
        missing = self.target - self._expected(awaited)
        if missing > 0:
            changed |= self._give(awaited, missing, now)
        return changed

    def _release(self, now: float) -> dict[PeerId, float]:
        """Lower the grants of peers that are not awaited any more to what they have counted."""
        awaited = {one.peer for one in self.awaited(now)}
        changed = {}
        for one in self.participants.values():
            if one.peer not in awaited and one.granted > one.counted:
                if one.able:
                    self._late[one.peer] = self.limit_s(one)
                one.granted = one.counted
                changed[one.peer] = one.granted
        return changed

    def _expected(self, awaited: Sequence[Participant]) -> float:
        """Return how many samples are counted, or are expected to be counted.

        Samples that a late or paused peer has counted are included while another peer still computes.
        """
        total = sum(one.counted + one.left for one in awaited)
        computes = any(not one.ready for one in awaited)
        peers = {one.peer for one in awaited}
        for one in self.participants.values():
            if one.peer not in peers and (one.ready or computes):
                total += one.counted
        return total

    def _worker(self, one: Participant, now: float) -> Worker:
        """Return the worker that stands for a peer; the worker's first micro-batch is the peer's present one."""
        seconds = one.seconds or self._usual_s(one)
        order = _order(self.key, one)
        report = one.report
        if report is None or report.ticket is not None:
            return Worker(now, seconds, one.samples, order)
        # If a peer has become slower, its present micro-batch is older than its usual time.
        return Worker(one.begun_at, max(seconds, report.age_s), one.samples, order)

    def _usual_s(self, one: Participant) -> float:
        """Return how long a micro-batch of this peer would take at the median speed of all peers."""
        known = [other.seconds / other.samples for other in self.participants.values() if other.seconds]
        return one.samples * statistics.median(known) if known else _UNKNOWN_S

    def _take_back(self, awaited: Sequence[Participant], now: float) -> dict[PeerId, float]:
        """Lower grants if the step would take half as long again as it must.

        Others get the samples that are taken back from a peer once this peer has answered.
        """
        workers = [self._worker(one, now) for one in awaited]
        counts = plan(workers, self.target - self._expected(awaited) + sum(one.left for one in awaited))
        must_end_at = max(_ends_at(worker, count, now) for worker, count in zip(workers, counts, strict=True))
        will_end_at = max(
            _ends_at(worker, math.ceil(one.left / one.samples), now)
            for one, worker in zip(awaited, workers, strict=True)
        )
        if will_end_at - self.begun_at <= _LONGER * (must_end_at - self.begun_at) + _MOMENT_S:
            return {}
        changed = {}
        for one, count in zip(awaited, counts, strict=True):
            # A peer that has not reported yet has begun its first micro-batch all the same.
            computes = one.left > 0 and (one.report is None or one.report.ticket is None)
            granted = one.counted + max(count, int(computes)) * one.samples
            if granted < one.granted:
                one.granted = granted
                changed[one.peer] = granted
        return changed

    def _give(self, awaited: Sequence[Participant], missing: float, now: float) -> dict[PeerId, float]:
        """Grant the missing samples; each peer computes its part of them after the rest of its present grant."""
        workers = []
        for one in awaited:
            worker = self._worker(one, now)
            left_s = math.ceil(one.left / one.samples - 1e-9) * worker.seconds
            workers.append(worker._replace(free_at=worker.free_at + left_s))
        changed = {}
        for one, more in zip(awaited, _shares(workers, missing), strict=True):
            if more:
                one.granted = one.obeys = one.counted + one.left + more
                changed[one.peer] = one.granted
                self._void_ticket(one, now)
        return changed

    def _void_ticket(self, one: Participant, now: float) -> None:
        """Treat a ready peer as computing again, because it got a higher grant."""
        report = one.report
        if report is not None and report.ticket is not None:
            one.report = msgspec.structs.replace(report, ticket=None, age_s=0.0)
            one.begun_at = now
            one.late_at = now + self.limit_s(one)

    def next_shares(self, now: float) -> dict[PeerId, float]:
        """Return the first grants of the next step, planned with the times of this step."""
        awaited = {one.peer for one in self.awaited(now)}
        able = []
        for one in self.participants.values():
            if one.samples and (one.peer in awaited or one.computes_on):
                able.append(one)
        workers = [
            Worker(0.0, one.seconds or self._usual_s(one), one.samples, _order(self.key, one)) for one in able
        ]
        shares = _shares(workers, self.target)
        return {one.peer: share for one, share in zip(able, shares, strict=True)}


def _shares(workers: Sequence[Worker], samples: float) -> list[float]:
    """Return the grants of a plan, which together are exactly ``samples``.

    The plan's surplus is subtracted from one grant, so this grant may end within a micro-batch.
    """
    shares = [count * worker.samples for count, worker in zip(plan(workers, samples), workers, strict=True)]
    extra = sum(shares) - samples
    for index, share in enumerate(shares):
        if share > extra:
            shares[index] -= extra
            break
    return shares


def _order(key: bytes, one: Participant) -> bytes:
    return hashlib.sha256(key + one.peer).digest()


def _ends_at(worker: Worker, count: int, now: float) -> float:
    return worker.free_at + count * worker.seconds if count else now
