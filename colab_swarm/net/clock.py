"""Swarm time: the own clock moved by the median offset of the linked peers, the own zero included.

With zero among them, two peers whose clocks differ meet in the middle, and one liar among honest peers moves
nothing. The own clock is never moved by more than `MAX_OFFSET_S`: whoever is all that a newcomer sees could
otherwise make what has expired valid again.
"""

from __future__ import annotations

from collections.abc import Hashable
from statistics import median

MAX_OFFSET_S = 600.0


class SwarmClock:
    """Collects clock offsets, one per peer. Free of I/O."""

    def __init__(self) -> None:
        self._offsets_s: dict[Hashable, float] = {}

    def observe(self, peer: Hashable, *, theirs: float, ours: float, rtt_s: float) -> None:
        """A peer's clock said ``theirs`` half a round trip before our clock said ``ours`` (seconds)."""
        self._offsets_s[peer] = theirs + rtt_s / 2 - ours

    def forget(self, peer: Hashable) -> None:
        """The peer is gone; its clock no longer counts."""
        self._offsets_s.pop(peer, None)

    @property
    def offset_s(self) -> float:
        """Seconds to add to the own clock, 10 minutes at most."""
        return max(-MAX_OFFSET_S, min(MAX_OFFSET_S, median([0.0, *self._offsets_s.values()])))

    @property
    def behind_s(self) -> float:
        """How far the own clock is behind the linked peers' median; negative if it is ahead."""
        return median(self._offsets_s.values() or [0.0])
