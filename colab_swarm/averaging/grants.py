"""The organizer's part of a step: it hands out the batch while the step is computed, and says when it is full. Pure.

Each peer that stands at the organizer has a *grant*: so many samples for this step. It reports how many it has
counted, and when its grant is used up it sends a ticket. The grants together are the batch, rounded up once to whole
micro-batches. So a batch is full whatever the speeds are, and all end at about the same time.

Grants rise at once: for what a peer that vanished, paused or is late had not counted. They fall where the step
would else take half as long again, and what is taken back is given on once its peer has answered.
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
REPORT_S = 1.0  # between two reports of a peer that computes, at most
_LONGER = 1.5  # times the best time of a step: then grants are taken back
_EQUAL = 1.2  # ends within a fifth are equal
_MOMENT_S = 0.02  # so is what the network's jitter adds
_UNKNOWN_S = 1.0  # of a micro-batch, while nobody's is known
# What a peer says of its micro-batches is believed within these bounds: a plan must be computed with it.
_LEAST_S = 1e-6
_LEAST_PART = 1e-6  # of the target


class Worker(NamedTuple):
    """Who can compute micro-batches of ``samples``, each in ``seconds``, from ``free_at`` on."""

    free_at: float
    seconds: float
    samples: float
    order: bytes = b""  # decides between equals


def plan(workers: Sequence[Worker], samples: float) -> list[int]:
    """Return the micro-batches of each worker that together have these samples soonest, rounded up once.

    The earliest time T at which ``sum(floor((T - free_at) / seconds) * samples)`` is enough, found by bisection. What
    is too much is taken from those that have most. Nobody is left out whose first one ends within a fifth of T.
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
        fewer = max(1, min(found[index], int(extra / each) // len(spare)))  # many, where they are tiny
        found[index] -= fewer
        extra -= fewer * each


@dataclass
class Participant:
    """A peer that stands at the organizer, by its reports of this step.

    Attributes:
        granted: samples that it may compute; it may not have heard of the newest yet.
        obeys: the grant by which it goes, as far as is known: more than ``granted`` until it has heard.
        report: the last one; None: it has said nothing since the last group.
        holds: its state is the one that counts; `Formation` sets it.
        late_at: when its count will have stood still for longer than it has shown.
        seconds: of a micro-batch, 0 while not known; ``samples`` are in it.
        begun_at: its present micro-batch.
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
        """Its ticket stands: it has all that was granted, or computes no more."""
        report = self.report
        if report is None or report.ticket is None or not self.holds:
            return False
        return report.final or report.away or report.counted >= self.granted

    @property
    def able(self) -> bool:
        """It can compute samples for this step."""
        report = self.report
        if report is None:
            return self.granted > 0
        return self.holds and not (report.away or report.final)

    @property
    def computes_on(self) -> bool:
        """Its ticket is final, and it computes for the next step."""
        return self.holds and self.report is not None and self.report.final and not self.report.away

    @property
    def left(self) -> float:
        """Samples that it will still compute as far as it knows, or as it will hear."""
        return max(self.granted, self.obeys, self.counted) - self.counted


class Batch:
    """Hands out the ``target`` samples of one step among those that stand here; ``key`` is the id of the last group.

    ``patience`` knows how long a count of each peer may stand still. `Formation` says whose state counts.
    """

    def __init__(self, target: float, key: bytes, patience: Patience[PeerId], now: float) -> None:
        self.target = target
        self.key = key
        self.patience = patience
        self.participants: dict[PeerId, Participant] = {}
        self.begun_at = now
        self._late: dict[PeerId, float] = {}  # who was, and for how long it was awaited
        self._replanned_at = -math.inf

    def on_report(self, peer: PeerId, report: StepReport, now: float) -> None:
        """Take what a peer says; it stands here from its first report on."""
        one = self.participants.setdefault(peer, Participant(peer))
        before = one.report
        one.seconds = report.batch_s
        if report.batch_s:
            one.seconds = max(report.batch_s, _LEAST_S)
        if report.batch_samples:
            one.samples = max(report.batch_samples, _LEAST_PART * self.target)
        # Its micro-batch may have begun before this step, but not long before.
        age_s = min(report.age_s, now - self.begun_at + self.limit_s(one))
        report = msgspec.structs.replace(report, age_s=age_s)
        if report.batch_s and (before is None or report.counted > before.counted):
            self.patience.learn(peer, report.batch_s)
        went_on = report.counted > 0 if before is None else before.away or report.counted != before.counted
        if went_on or one.late_at == math.inf:
            one.late_at = now + self.limit_s(one)
        elif before is None:
            # Nothing was known of the time that it needs.
            one.late_at = max(one.late_at, now + self.limit_s(one))
        if before is None and not one.granted:
            # By an organizer before this one: it can be taken back like the own grants.
            one.granted = report.granted
        one.begun_at = now - report.age_s
        one.obeys = report.granted
        one.report = report

    def excuse(self, peers: Iterable[PeerId], now: float) -> None:
        """Let the counts of these peers stand still until now: their round is not over, or this peer slept."""
        for peer in peers:
            one = self.participants.get(peer)
            if one is not None:
                one.late_at = max(one.late_at, now + self.limit_s(one))

    def on_lost(self, peer: PeerId) -> None:
        """Forget a peer whose stream has ended; the others compute its part."""
        self.participants.pop(peer, None)

    # Who is awaited.

    def limit_s(self, one: Participant) -> float:
        """Return how long a count may stand still; it is heard of once in `REPORT_S`."""
        return max(self.patience.limit_s(one.peer), 2 * one.seconds) + REPORT_S

    def awaited(self, now: float) -> list[Participant]:
        """Return those that compute, or may compute more, and are not late."""
        return [one for one in self.participants.values() if one.able and (one.ready or now < one.late_at)]

    @property
    def ready_samples(self) -> float:
        return sum(one.counted for one in self.participants.values() if one.ready)

    @property
    def full(self) -> bool:
        """The tickets together have the batch, or what they have is all: who computes on does so for the next step."""
        if self.ready_samples >= self.target > 0:
            return True
        reports = [one.report for one in self.participants.values() if one.ready and one.report is not None]
        computes = any(one.able for one in self.participants.values())
        return not computes and any(report.final and report.counted for report in reports)

    def look_at(self, now: float) -> float:
        """Return when to look again, if nothing happens until then: somebody will be late."""
        times = [one.late_at for one in self.awaited(now) if not one.ready]
        return min(times, default=math.inf)

    @property
    def late(self) -> dict[PeerId, float]:
        """Who was late, and for how long it was awaited; nobody where most were, as all may evaluate at once."""
        return self._late if 2 * len(self._late) <= len(self.participants) else {}

    # The plan.

    def next_grants(self, now: float) -> dict[PeerId, float]:
        """Return the grants that change now."""
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
        """Grant no more than they have counted to those that are not awaited any more."""
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
        """Return the samples that have come, or will as far as is known.

        What a late or paused peer has counted is expected for as long as somebody else computes.
        """
        total = sum(one.counted + one.left for one in awaited)
        computes = any(not one.ready for one in awaited)
        peers = {one.peer for one in awaited}
        for one in self.participants.values():
            if one.peer not in peers and (one.ready or computes):
                total += one.counted
        return total

    def _worker(self, one: Participant, now: float) -> Worker:
        """Return a peer for the plan: what it computes now counts as its first micro-batch."""
        seconds = one.seconds or self._usual_s(one)
        order = _order(self.key, one)
        report = one.report
        if report is None or report.ticket is not None:
            return Worker(now, seconds, one.samples, order)
        # A peer that is slower than it was shows it by the age of its micro-batch.
        return Worker(one.begun_at, max(seconds, report.age_s), one.samples, order)

    def _usual_s(self, one: Participant) -> float:
        """Return what a micro-batch takes a peer that is usual."""
        known = [other.seconds / other.samples for other in self.participants.values() if other.seconds]
        return one.samples * statistics.median(known) if known else _UNKNOWN_S

    def _take_back(self, awaited: Sequence[Participant], now: float) -> dict[PeerId, float]:
        """Lower grants if the step would take half as long again as it must.

        What is taken back is given on when its peer has answered.
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
            # Who has not reported yet has begun all the same.
            computes = one.left > 0 and (one.report is None or one.report.ticket is None)
            granted = one.counted + max(count, int(computes)) * one.samples
            if granted < one.granted:
                one.granted = granted
                changed[one.peer] = granted
        return changed

    def _give(self, awaited: Sequence[Participant], missing: float, now: float) -> dict[PeerId, float]:
        """Hand out what is missing: each peer's part comes after what it has left."""
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
        """A peer that was ready computes again, as soon as it hears of its grant."""
        report = one.report
        if report is not None and report.ticket is not None:
            one.report = msgspec.structs.replace(report, ticket=None, age_s=0.0)
            one.begun_at = now
            one.late_at = now + self.limit_s(one)

    def next_shares(self, now: float) -> dict[PeerId, float]:
        """Return the first grants of the next step, by what this one has shown."""
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
    """Return the grants of a plan, which together are exactly these samples: who has shorter ones computes more."""
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
