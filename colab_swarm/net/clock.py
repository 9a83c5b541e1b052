"""Swarm time: this machine's clock, corrected by the median offset of the linked peers' clocks.

An offset of zero, for this peer itself, is included in the median. So two peers whose clocks differ meet in the middle,
and a single liar among honest peers has no effect. The clock is never corrected by more than `_MAX_OFFSET_S`, because
otherwise a late joiner's only peer could make expired records valid again. If this machine's clock agreed with the
others, and is then set more than `_MAX_OFFSET_S` forward or back, swarm time continues as if the clock were not set.
"""

from collections.abc import Hashable
from statistics import median

_MAX_OFFSET_S = 600.0
_STEP_S = 1.0  # a clock that jumps by more was set; by less, it was only adjusted


class SwarmClock:
    """Collects clock offsets, one per peer. Free of I/O.

    ``offset_s`` is to be added to `own`; it is at most 10 minutes in either direction. ``behind_s`` is how far the
    machine's clock is behind the median of the linked peers' clocks; it is negative if the clock is ahead.
    """

    def __init__(self) -> None:
        # A lead is how far a clock is ahead of this peer's monotonic clock.
        self._leads_s: dict[Hashable, float] = {}
        self._lead_s = 0.0  # lead of the machine's clock
        self._agreed_s: float | None = None  # lead of the machine's clock when it last agreed with the others
        self._followed_s = 0.0
        self.offset_s = 0.0
        self.behind_s = 0.0

    def own(self, wall: float, now: float) -> float:
        """Return this peer's time before correction; ``wall`` is the machine's clock at the monotonic time ``now``."""
        if abs(wall - now - self._lead_s) > _STEP_S:
            self._lead_s = wall - now
            self._compare()
        return wall + self._followed_s - self._lead_s

    def observe(self, peer: Hashable, *, theirs: float, ours: float, rtt_s: float) -> None:
        """Note that a peer's clock showed ``theirs`` seconds half a round trip before the machine's showed ``ours``."""
        self._leads_s[peer] = theirs + rtt_s / 2 - ours + self._lead_s
        self._compare()

    def forget(self, peer: Hashable) -> None:
        self._leads_s.pop(peer, None)
        self._compare()

    def _compare(self) -> None:
        leads_s = self._leads_s.values()
        others_s = median(leads_s or [self._lead_s])
        self.behind_s = others_s - self._lead_s
        if self._agreed_s is None or abs(self.behind_s) <= max(_MAX_OFFSET_S, abs(others_s - self._agreed_s)):
            self._followed_s = self._lead_s
        else:
            self._followed_s = self._agreed_s
        if leads_s and abs(self.behind_s) <= _MAX_OFFSET_S:
            self._agreed_s = self._lead_s
        offset_s = median([0.0, *(lead_s - self._followed_s for lead_s in leads_s)])
        self.offset_s = max(-_MAX_OFFSET_S, min(_MAX_OFFSET_S, offset_s))
