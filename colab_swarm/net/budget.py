"""Bandwidth budgets: a token bucket that may go into debt, and a meter of peak rates. Free of I/O."""

from __future__ import annotations

BURST_S = 0.1
MIN_BURST_BYTES = 1 << 16


class TokenBucket:
    """Keeps a flow at ``rate_bps`` bits per second on average, with bursts of 0.1 s (64 KiB at least).

    What has been sent is taken even if it exceeds the tokens; the debt shows as a `delay` before the next.
    """

    def __init__(self, rate_bps: float, now: float) -> None:
        if not rate_bps > 0:
            raise ValueError(f"rate_bps={rate_bps}: a bandwidth limit must be positive")
        self._bytes_per_s = rate_bps / 8
        self._burst_bytes = max(self._bytes_per_s * BURST_S, MIN_BURST_BYTES)
        self._tokens_bytes = self._burst_bytes
        self._at = now

    def take(self, size_bytes: int, now: float) -> None:
        """Account for bytes that went out (or came in)."""
        earned = (now - self._at) * self._bytes_per_s
        self._tokens_bytes = min(self._tokens_bytes + earned, self._burst_bytes) - size_bytes
        self._at = now

    def delay(self, now: float) -> float:
        """Seconds to wait before the next bytes may go; 0 while not in debt."""
        tokens_bytes = self._tokens_bytes + (now - self._at) * self._bytes_per_s
        return max(0.0, -tokens_bytes / self._bytes_per_s)


class RateMeter:
    """Counts bytes and remembers the best rate over a busy second."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.peak_bps: float | None = None
        self._window_bytes = 0
        self._window_at = float("-inf")

    def add(self, size_bytes: int, now: float) -> None:
        """Count bytes; windows of one to two seconds make a rate, longer ones were idle and make none."""
        self.total_bytes += size_bytes
        elapsed = now - self._window_at
        if elapsed >= 1.0:
            if elapsed < 2.0:
                self.peak_bps = max(self.peak_bps or 0.0, self._window_bytes * 8 / elapsed)
            self._window_bytes, self._window_at = 0, now
        self._window_bytes += size_bytes
