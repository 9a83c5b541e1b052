"""Patience and back-off: how long to wait for others, whom to leave out and for how long, how often each may ask.

Pure cores: the time is an argument.
"""

import math
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, TypeVar

from colab_swarm.net.peers import remember

K = TypeVar("K")
# Times of a key that `Patience` remembers.
_REMEMBERED_TIMES = 32
# Keys of a `Patience`; beyond that the one that has learned nothing for longest is forgotten.
MAX_KEYS = 4096
_MOST_ALLOWANCE_S = 5.0
# Entries of a `LeftOut`; beyond that the oldest failure is forgotten.
MAX_LEFT_OUT = 4096
# Failures in a row are counted up to this number, so that a power of it does not overflow.
_MAX_FAILURES = 64
# Sources that a `VisitLimit` remembers; beyond that the one that has been quiet for longest is dropped.
MAX_SOURCES = 4096


def allowance_s(rtt_s: float | None) -> float:
    """Return how much longer to wait for a peer on a slow line: a few round trips, bounded."""
    return min(4 * (rtt_s or 0.0), _MOST_ALLOWANCE_S)


def backoff(rng: random.Random, first_s: float, most_s: float) -> Iterator[float]:
    """Yield waits after failures: they double up to ``most_s``, each drawn between half and all of it."""
    while True:
        yield first_s * rng.uniform(0.5, 1.0)
        first_s = min(2 * first_s, most_s)


class LeftOut(Generic[K]):
    """Exponential back-off per key: organizers, experts and claims of a state that failed this peer.

    The first failure counts for ``first_s``, each further one in a row twice as long, at most
    ``longest_s``. Failures while an entry is left out count once: calls that were open when a host
    died all fail. After ``longest_s`` without a failure the count restarts. ``now`` is monotonic
    seconds; ``version`` changes when an entry is left out or forgiven.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        # For each key its failures in a row, and the time until which it is left out.
        self._records: dict[K, tuple[int, float]] = {}
        self.version = 0

    def fail(self, key: K, now: float) -> float | None:
        """Count a failure; return for how long the entry is left out from now on, None if it is already."""
        self._records = {
            other: (failures, until)
            for other, (failures, until) in self._records.items()
            if now < until + self._longest_s
        }
        failures, until = self._records.get(key, (0, -math.inf))
        if now < until:
            return None
        left_out_s = min(self._longest_s, self._first_s * 2.0**failures)
        record = (min(failures + 1, _MAX_FAILURES), now + left_out_s)
        remember(self._records, key, record, MAX_LEFT_OUT)
        self.version += 1
        return left_out_s

    def forgive(self, key: K) -> None:
        if self._records.pop(key, None) is not None:
            self.version += 1

    def holds(self, key: K, now: float) -> bool:
        return key in self._records and now < self._records[key][1]

    def ends(self, now: float) -> dict[K, float]:
        """Return the keys that are left out now, and until when."""
        return {key: until for key, (_, until) in self._records.items() if now < until}


class Patience(Generic[K]):
    """How long to wait for each key, a peer as a rule, and whom to leave out for being late.

    The limit of a key follows what it has shown. A key that exceeds it is *left out*: nobody waits for it, for
    ``left_out_s``, twice as long each further time, at most ``longest_s``. What it gives in time counts, and one
    counted contribution ends it. ``now`` is monotonic seconds.

    Args:
        left_out_s: seconds for which a late key is not awaited at first.
        first_s: the limit of a key of which nothing is known.
        least_s: the smallest limit of a key.
        longest_s: bound on the time for which a key is not awaited.
    """

    def __init__(
        self, left_out_s: float, *, first_s: float = 5.0, least_s: float = 2.0, longest_s: float = 1800.0
    ) -> None:
        self._first_s = first_s
        self._least_s = least_s
        self._left_out = LeftOut[K](left_out_s, longest_s)
        self._times_s: dict[K, deque[float]] = {}

    def learn(self, key: K, seconds: float) -> None:
        """Remember how long ``key`` took."""
        times_s = self._times_s.get(key) or deque(maxlen=_REMEMBERED_TIMES)
        times_s.append(seconds)
        remember(self._times_s, key, times_s, MAX_KEYS)

    def limit_s(self, key: K) -> float:
        """Return how long to wait for ``key``: the median of its times and five median deviations.

        It is twice the median at least, as equal times have no deviation. A few stalls among many times change it
        little.
        """
        times_s = self._times_s.get(key)
        if times_s is None:
            return self._first_s
        median_s = statistics.median(times_s)
        deviation_s = statistics.median(abs(time_s - median_s) for time_s in times_s)
        return max(median_s + 5 * deviation_s, 2 * median_s, self._least_s)

    def on_late(self, late: Collection[K], awaited: Collection[K], now: float) -> dict[K, float]:
        """Leave the ``late`` out; return who is left out from now on, and for how many seconds.

        Where more than half of the ``awaited`` are late, this peer among them, its own line is the likely cause:
        nobody is left out. Do not call this where the own timer was late: this peer slept.
        """
        for key in late:
            # What it has shown no longer holds: a line that has become slow must not be late for good.
            self._times_s.pop(key, None)
        if 2 * len(late) > len(awaited):
            return {}
        left_out = {}
        for key in late:
            seconds = self._left_out.fail(key, now)
            if seconds is not None:
                left_out[key] = seconds
        return left_out

    def is_awaited(self, key: K, now: float) -> bool:
        return not self._left_out.holds(key, now)

    def on_counted(self, key: K) -> None:
        """Await ``key`` again: a contribution of it counted."""
        self._left_out.forgive(key)


class VisitLimit:
    """Limits each source, a peer or a `source_of`, to ``most`` requests in ``window_s``. No I/O."""

    def __init__(self, most: int, window_s: float = 1.0) -> None:
        self._most = most
        self._window_s = window_s
        # For each source the beginning of its window, and its requests since.
        self._visits: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def admit(self, source: Hashable, now: float) -> bool:
        """Count a request at ``now`` (monotonic seconds); return whether it is allowed."""
        began_at, count = self._visits.get(source, (now, 0))
        if now - began_at >= self._window_s:
            began_at = now
            count = 0
        remember(self._visits, source, (began_at, count + 1), MAX_SOURCES)
        return count < self._most

    def forgive(self, source: Hashable) -> None:
        self._visits.pop(source, None)
