"""Patience and back-off: how long to wait for peers, which peers to leave out, and how often each may ask.

All classes are pure cores: the time is an argument.
"""

import math
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, TypeVar

from colab_swarm.net.peers import remember

K = TypeVar("K")
# Number of times that `Patience` remembers for each key.
_REMEMBERED_TIMES = 32
# Maximum number of keys of a `Patience`; beyond that, the key whose last time is oldest is forgotten.
MAX_KEYS = 4096
_MOST_ALLOWANCE_S = 5.0
# Maximum number of entries of a `LeftOut`; beyond that, the oldest failure is forgotten.
MAX_LEFT_OUT = 4096
# Failures in a row are counted up to this number, so that a power with this exponent does not overflow.
_MAX_FAILURES = 64
# Maximum number of sources of a `VisitLimit`; beyond that, the source that was quiet for longest is forgotten.
MAX_SOURCES = 4096


def allowance_s(rtt_s: float | None) -> float:
    """Return how much longer to wait for a peer on a slow line: four round trips, but at most 5 s."""
    return min(4 * (rtt_s or 0.0), _MOST_ALLOWANCE_S)


def backoff(rng: random.Random, first_s: float, most_s: float) -> Iterator[float]:
    """Yield how long to wait after each failure, in seconds.

    The longest possible wait doubles each time, up to ``most_s``; each wait is drawn between half of it and all of it.
    """
    while True:
        yield first_s * rng.uniform(0.5, 1.0)
        first_s = min(2 * first_s, most_s)


class LeftOut(Generic[K]):
    """Exponential back-off per key, for example for organizers, experts and donors that failed.

    After the first failure, a key is left out for ``first_s``. After each further failure in a row, it is left out
    twice as long, at most for ``longest_s``. While a key is left out, further failures do not count, because all calls
    that are open when a host dies fail together. After ``longest_s`` without a failure, the count starts again.
    ``now`` is monotonic seconds. ``version`` changes whenever a key is left out or forgiven.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        # For each key the number of its failures in a row, and the time until which it is left out.
        self._records: dict[K, tuple[int, float]] = {}
        self.version = 0

    def fail(self, key: K, now: float) -> float | None:
        """Count a failure; return for how many seconds the key is left out now, or None if it was left out already."""
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
        """Return the keys that are left out now, each with the time until which it is left out."""
        return {key: until for key, (_, until) in self._records.items() if now < until}


class Patience(Generic[K]):
    """How long to wait for each key, which usually stands for a peer, and which late keys to leave out.

    The limit of a key depends on the times that the key took before. A key that exceeds its limit is *left out*: for
    ``left_out_s``, this peer does not wait for it. Each further time the key is left out twice as long, at most for
    ``longest_s``. Its contributions still count if they are in time, and a contribution that counts ends the exclusion.
    ``now`` is monotonic seconds.

    Args:
        left_out_s: seconds for which a key is left out the first time.
        first_s: the limit of a key whose times are not known.
        least_s: the minimum limit of a key.
        longest_s: the maximum time for which a key is left out.
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
        """Return how long to wait for ``key``: the median of its times plus five median deviations.

        The limit is at least twice the median, because equal times have no deviation. A few very long times among many
        change it little.
        """
        times_s = self._times_s.get(key)
        if times_s is None:
            return self._first_s
        median_s = statistics.median(times_s)
        deviation_s = statistics.median(abs(time_s - median_s) for time_s in times_s)
        return max(median_s + 5 * deviation_s, 2 * median_s, self._least_s)

    def on_late(self, late: Collection[K], awaited: Collection[K], now: float) -> dict[K, float]:
        """Leave out the keys that were ``late``; return those left out from now on, and for how many seconds.

        If more than half of the ``awaited`` keys are late, this peer's own line is the likely cause, so none is left
        out; ``awaited`` includes this peer. Do not call this if this peer's own timer was late, because then its
        process was stopped.
        """
        for key in late:
            # Its old times are forgotten, so that a peer whose line has become slow is not late forever.
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
        """Await ``key`` again, because one of its contributions counted."""
        self._left_out.forgive(key)


class VisitLimit:
    """Limits each source (a peer, or a network of `source_of`) to ``most`` requests in ``window_s``. No I/O."""

    def __init__(self, most: int, window_s: float = 1.0) -> None:
        self._most = most
        self._window_s = window_s
        # For each source the beginning of its window, and the number of its requests since.
        self._visits: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def admit(self, source: Hashable, now: float) -> bool:
        """Count a request at ``now`` (monotonic seconds); return True if it is allowed."""
        began_at, count = self._visits.get(source, (now, 0))
        if now - began_at >= self._window_s:
            began_at = now
            count = 0
        remember(self._visits, source, (began_at, count + 1), MAX_SOURCES)
        return count < self._most

    def forgive(self, source: Hashable) -> None:
        self._visits.pop(source, None)
