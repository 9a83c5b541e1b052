"""Whom to leave out for a while: each failure in a row twice as long as the one before."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class BanSettings:
    """How long who failed is left out.

    Attributes:
        first_s: after the first failure, seconds.
        longest_s: however often it fails; who has been quiet as long after its ban begins anew.
    """

    first_s: float = 5.0
    longest_s: float = 300.0


@dataclass
class _Record:
    failures: int
    until: float


class Bans:
    """Free of I/O; ``now`` is monotonic seconds.

    Attributes:
        version: changes with each ban that begins or is lifted.
    """

    def __init__(self, settings: BanSettings) -> None:
        self._settings = settings
        self._records: dict[Hashable, _Record] = {}
        self.version = 0

    def fail(self, who: Hashable, now: float) -> float | None:
        """``who`` failed; returns for how many seconds it is left out, None if it is already.

        Calls that were under way when a host died all fail: they count once.
        """
        longest_s = self._settings.longest_s
        self._records = {key: r for key, r in self._records.items() if now < r.until + longest_s}
        record = self._records.setdefault(who, _Record(0, -math.inf))
        if now < record.until:
            return None
        seconds = min(longest_s, self._settings.first_s * 2.0**record.failures)
        record.failures, record.until = min(record.failures + 1, 64), now + seconds
        self.version += 1
        return seconds

    def succeed(self, who: Hashable) -> None:
        """``who`` did well: its failures are forgiven."""
        if self._records.pop(who, None) is not None:
            self.version += 1

    def banned(self, who: Hashable, now: float) -> bool:
        """Whether ``who`` is left out."""
        return who in self._records and now < self._records[who].until

    def ends(self, now: float) -> dict[Hashable, float]:
        """Who is left out, and until when."""
        return {who: record.until for who, record in self._records.items() if now < record.until}

    def next_end(self, now: float) -> float:
        """When the next ban ends; infinite if there is none."""
        return min(self.ends(now).values(), default=math.inf)
