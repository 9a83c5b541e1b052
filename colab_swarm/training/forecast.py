"""How fast this trainer computes, when the batch of the swarm is full, and what others' figures count for. Pure.

The batch is full when the samples of the peers on the branch reach the target (DeDLOC, section
3.1), with those of the micro-batches that they compute now: all peers finish theirs before a round.
Records are a moment old, so counts are extrapolated at the peers' speed, for 3 s at most: a peer
that is gone must not fill the batch.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping

from colab_swarm.net.peers import PeerId
from colab_swarm.training.known import KnownRecords
from colab_swarm.training.records import PLAUSIBLE, ProgressRecord

MAX_REPORT_S = 60.0  # between two records of a peer; it is forgotten after four times as long
_LATE_BATCHES = 3.0  # micro-batches of silence after which a trainer joins no round soon
# Silence that makes a trainer idle: in micro-batches, and in seconds; the last while its speed is unknown.
_IDLE_BATCHES = 10.0
_IDLE_S = 2 * MAX_REPORT_S
_UNKNOWN_IDLE_S = 10 * MAX_REPORT_S
_EXTRAPOLATE_S = 3.0
_JUST_ENDED = 0.25  # of a micro-batch
# Part of its announced samples that a peer must have contributed; else a micro-batch that still runs does not count.
_RELIABLE = 0.9
_SHORT_ROUND = 0.5  # of the time in which all peers compute a batch
_SHORT = 0.8  # a round that is less full makes early calls suspect
_RECENT_ROUNDS = 10  # rounds in which a short one counts
_FIRST_PROMISE_S = 2.0  # before any micro-batch is known
_MIN_PROMISE_S = 0.25


class BatchForecast:
    """Counts the samples of the ``known`` peers towards ``round_samples``, those of one round."""

    def __init__(self, known: KnownRecords, round_samples: float) -> None:
        self._known = known
        self.round_samples = round_samples  # of all peers together from one round to the next
        self.last_round_s = 0.0  # what the last round of this peer took; 0 before the first
        # Medians of the records, at the last reading.
        self._usual_speed = math.inf
        self._usual_batch_s = 0.0
        # By rounds: the part of its announced samples that a peer contributed, and of the batch that they had.
        self._kept: dict[PeerId, float] = {}
        self._filled: deque[float] = deque(maxlen=_RECENT_ROUNDS)

    def on_records(self) -> None:
        """Take the medians of the records just read."""
        records = self._known.all.values()
        speeds = [record.samples_per_s for record in records if record.samples_per_s]
        batches_s = [record.batch_s for record in records if record.batch_s]
        self._usual_speed = statistics.median_low(speeds or [math.inf])
        self._usual_batch_s = statistics.median_low(batches_s or [0.0])

    def forget_absent(self, records: Mapping[PeerId, ProgressRecord]) -> None:
        """Forget the peers that have no record any more."""
        for peer in self._kept.keys() - records.keys():
            del self._kept[peer]

    def on_round(self, samples: Mapping[PeerId, float], step: int, *, now: float) -> None:
        """Compare the ``samples`` by contributor of the round to ``step`` with those that were announced."""
        self._filled.append(sum(samples.values()) / self.round_samples)
        if not samples:
            return
        for peer, record in self._known.others.items():
            announced = min(record.samples, self._believed_samples(peer, record, now))
            if announced and record.step == step - 1:
                kept = min(1.0, samples.get(peer, 0.0) / announced)
                self._kept[peer] = (self._kept.get(peer, 1.0) + kept) / 2

    def samples(self, now: float) -> float:
        """Return the samples of all peers on the own branch for the next step. Thread-safe."""
        own = self._known.own
        counted = 0.0 if own.syncing else own.samples
        for peer, record in list(self._known.others.items()):  # a copy: panels call this too
            if record.computes and (record.step, record.lineage) == (own.step, own.lineage):
                counted += self._believed_samples(peer, record, now) * self._kept.get(peer, 1.0)
        return counted

    def batch_full(self, now: float, swarm_now: float) -> bool:
        """Return True if a round that is called now has a full batch: the others finish their micro-batches first.

        Peers receive the means of a long round at different times. The batch may be full before the last one
        has them, and a round that is called even earlier would be formed without it. So only what has been
        computed counts then.
        """
        if self.last_round_s > _SHORT_ROUND * self.step_s:
            return self.samples(now) >= self.round_samples
        own = self._known.own
        counted = 0.0 if own.syncing else own.samples
        # In one order: the last bit of the sum decides.
        for peer in sorted(self._known.waiting(own.step, own.lineage)):
            record = self._known.others[peer]
            samples = self._believed_samples(peer, record, now)
            kept = self._kept.get(peer, 1.0)
            if kept > _RELIABLE:
                finished = min(self._finished_samples(record, swarm_now), self._computable(peer, record, now))
                samples = max(samples, finished)
            counted += samples * kept
        return counted >= self.round_samples

    def _finished_samples(self, record: ProgressRecord, swarm_now: float) -> float:
        """Return a peer's samples when it has finished the micro-batch that it computes."""
        since_s = swarm_now - record.counted_at
        if not record.counted_at or since_s > record.batch_s + _EXTRAPOLATE_S:
            return record.samples
        if not record.batch_s:
            # It has finished its first one, and computes another like it.
            return 2 * record.samples
        # One that just ended is the last: that peer knows as well that the batch is full.
        batches = max(1, math.ceil(since_s / record.batch_s - _JUST_ENDED))
        return record.samples + batches * record.samples_per_s * record.batch_s

    def seconds_to_batch(self, now: float) -> float:
        """Return when the batch will be full; infinite while no speed is known."""
        return self._seconds_for(self.round_samples - self.samples(now))

    @property
    def step_s(self) -> float:
        """Seconds in which all peers together compute a whole round's samples."""
        return self._seconds_for(self.round_samples)

    def _seconds_for(self, missing: float) -> float:
        if missing <= 0:
            return 0.0
        most = max(PLAUSIBLE * self._usual_speed, self._known.own.samples_per_s)
        speed = self.samples_per_s(most=most)
        return missing / speed if speed > 0 else math.inf

    def samples_per_s(self, *, most: float = math.inf) -> float:
        """Return the speed of all peers together, of each at most ``most``."""
        return sum(min(record.samples_per_s, most) for record in self._known.all.values() if record.computes)

    def early_s(self, now: float) -> float:
        """Return how long a call comes too early, because the batch cannot be full yet.

        It is 0 unless a recent round was short: records may be old, and the caller may know more.
        """
        own = self._known.own
        others = self._known.waiting(own.step, own.lineage)
        most_samples = sum(self._computable(peer, self._known.others[peer], now) for peer in sorted(others))
        early_s = self._seconds_for(self.round_samples - own.samples - most_samples)
        if not early_s or min(self._filled, default=1.0) >= _SHORT:
            return 0.0
        return early_s + own.batch_s

    def longest_s(self) -> float:
        """Return how long the slowest peers that are believed take for a micro-batch."""
        return PLAUSIBLE * self._usual_batch_s

    def believed_s(self, peer: PeerId) -> float:
        """Return how long a round may wait for a peer: two of its micro-batches, at most `PLAUSIBLE` median ones."""
        if not self._usual_batch_s:
            return _FIRST_PROMISE_S
        record = self._known.all.get(peer)
        two_batches_s = 2 * record.batch_s if record else 0.0
        return max(_MIN_PROMISE_S, min(two_batches_s or math.inf, self.longest_s()))

    def _believed_samples(self, peer: PeerId, record: ProgressRecord, now: float) -> float:
        """Return a peer's samples now: as it says, but no more than it could compute since its last step."""
        updated_at = self._known.updated_at.get(peer, now)
        old_s = min(max(now - updated_at, 0.0), _EXTRAPOLATE_S)
        return min(record.samples + old_s * record.samples_per_s, self._computable(peer, record, now))

    def _computable(self, peer: PeerId, record: ProgressRecord, now: float) -> float:
        """Return the most samples that a peer can have computed since it reached its step."""
        usual = PLAUSIBLE * self._usual_speed
        speed = min(record.samples_per_s or usual, usual)
        if not math.isfinite(speed):
            return math.inf
        _, reached_at = self._known.step_at.get(peer, (0, -math.inf))
        batch_s = min(record.batch_s, PLAUSIBLE * self._usual_batch_s)
        return speed * (now - reached_at + 2 * batch_s)


class ThroughputEstimator:
    """Measures the trainer's micro-batches: ``samples_per_s`` and ``batch_s`` are moving averages, 0 until known."""

    def __init__(self, now: float) -> None:
        self.samples_per_s = self.batch_s = 0.0
        self._computing_since: float | None = None
        self.active_at = now  # the trainer's last sign of work

    @property
    def waiting(self) -> bool:
        """True from `wait` to `work`."""
        return self._computing_since is None

    def wait(self) -> None:
        """The trainer stops computing, and is ready for a round."""
        self._computing_since = None
        self.active_at = math.inf

    def work(self, now: float) -> None:
        self._computing_since = self.active_at = now

    def on_batch(self, samples: float, now: float) -> None:
        if self._computing_since is not None:
            took_s = max(now - self._computing_since, 1e-6)
            speed = samples / took_s
            self.batch_s = _moved(self.batch_s, took_s, 0.7, 0.3)
            self.samples_per_s = _moved(self.samples_per_s, speed, 0.8, 0.2)
        self.work(now)

    def ready_in_s(self, now: float, *, patience_s: float) -> float | None:
        """Return when the micro-batch will be done; None if it is overdue by more than ``patience_s``."""
        if self._computing_since is None:
            return 0.0
        ready_in_s = self._computing_since + self.batch_s - now
        late = ready_in_s < -max(_LATE_BATCHES * self.batch_s, patience_s)
        return None if late else max(0.0, ready_in_s)

    def idle(self, now: float) -> bool:
        silent_s = now - self.active_at
        if not self.batch_s:
            return silent_s > _UNKNOWN_IDLE_S
        return silent_s > max(_IDLE_BATCHES * self.batch_s, _IDLE_S)


def _moved(average: float, value: float, old: float, new: float) -> float:
    """Return the moving average with a new value; it is the first one while the average is 0."""
    if not average:
        return value
    return old * average + new * value
