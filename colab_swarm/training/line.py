"""What the rounds that a peer took part in tell of its own line. Pure."""

from __future__ import annotations

from colab_swarm.averaging.round import RoundResult

SAYS_SOMETHING_BYTES = 1 << 18
"""A round that moved less says nothing about a line."""
KEPT_PER_ROUND = 0.98
ROUNDS = 4
"""The best of so many is believed: a single round may have waited for anything."""


class Rate:
    """What one direction carried, bits per second: rounds are often shorter than the second by which links measure.

    A good round is believed for long, but not for ever: lines change.
    """

    def __init__(self) -> None:
        self._best_bps = 0.0
        self._rounds = 0

    def on_round(self, size_bytes: int, seconds: float) -> None:
        """A round moved so much."""
        self._best_bps *= KEPT_PER_ROUND
        if size_bytes >= SAYS_SOMETHING_BYTES and seconds > 0:
            self._best_bps = max(self._best_bps, 8 * size_bytes / seconds)
            self._rounds += 1

    def known(self, measured_bps: float | None, most_bps: float | None = None) -> float | None:
        """The best that was seen, by links or in rounds, as far as it may be used; None if nothing was."""
        seen_bps = self._best_bps if self._rounds >= ROUNDS else 0.0
        best_bps = max(measured_bps or 0.0, seen_bps)
        return min(best_bps, most_bps or best_bps) if best_bps else most_bps


class Line:
    """Both directions."""

    def __init__(self) -> None:
        self.upload, self.download = Rate(), Rate()

    def on_round(self, result: RoundResult) -> None:
        """A round ended."""
        seconds = result.seconds["exchange"]
        self.upload.on_round(result.sent_bytes, seconds)
        self.download.on_round(result.received_bytes, seconds)
