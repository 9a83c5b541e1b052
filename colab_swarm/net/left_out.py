"""The one rule for leaving out, for a while, what has failed this peer: organizers, experts, claims of a state."""

from __future__ import annotations

import math
from typing import Generic, TypeVar

MAX_LEFT_OUT = 4096
"""Entries; beyond that the one that failed longest ago is forgotten."""

K = TypeVar("K")


class LeftOut(Generic[K]):
    """Who is left out, and until when. Free of I/O; ``now`` is monotonic seconds.

    The first failure counts for ``first_s``, each further one in a row twice as long as the one before, at most
    ``longest_s``. Failures while an entry is left out count once: calls that were open when a host died all fail.
    After ``longest_s`` without a failure the count restarts.

    Attributes:
        version: changes when an entry is left out or forgiven.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._records: dict[K, tuple[int, float]] = {}  # failures in a row, and until when it is left out
        self.version = 0

    def fail(self, key: K, now: float) -> float | None:
        """Count a failure; return for how long the entry is left out from now on, None if it is already."""
        self._records = {k: (n, end) for k, (n, end) in self._records.items() if now < end + self._longest_s}
        failures, until = self._records.get(key, (0, -math.inf))
        if now < until:
            return None
        self._records.pop(key, None)
        while len(self._records) >= MAX_LEFT_OUT:
            del self._records[next(iter(self._records))]
        seconds = min(self._longest_s, self._first_s * 2.0**failures)
        self._records[key] = min(failures + 1, 64), now + seconds
        self.version += 1
        return seconds

    def forgive(self, key: K) -> None:
        """Forget the failures of ``key``."""
        if self._records.pop(key, None) is not None:
            self.version += 1

    def holds(self, key: K, now: float) -> bool:
        """Return True while ``key`` is left out."""
        return key in self._records and now < self._records[key][1]

    def ends(self, now: float) -> dict[K, float]:
        """Return who is left out now, and until when."""
        return {key: until for key, (_, until) in self._records.items() if now < until}
