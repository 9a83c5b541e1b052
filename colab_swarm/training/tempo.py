"""How fast a trainer works, and when it will be ready for a round. Pure: ``now`` is an argument."""

from __future__ import annotations

IDLE_BATCHES = 3.0
"""A trainer that has been silent for the time of so many micro-batches does not come to a round soon."""


class Tempo:
    """The rhythm of one trainer's micro-batches.

    Attributes:
        samples_per_s: moving average; 0 until it is known.
    """

    def __init__(self) -> None:
        self.samples_per_s = 0.0
        self._batch_s = 0.0
        self._at_work_since: float | None = None

    def wait(self) -> None:
        """It computes nothing now: whoever calls finds it ready."""
        self._at_work_since = None

    def work(self, now: float) -> None:
        """It computes from now on."""
        self._at_work_since = now

    def on_batch(self, samples: float, now: float) -> None:
        """It finished a micro-batch and begins the next."""
        if self._at_work_since is not None:
            took_s = max(now - self._at_work_since, 1e-6)
            speed = samples / took_s
            self._batch_s = took_s if not self._batch_s else 0.7 * self._batch_s + 0.3 * took_s
            self.samples_per_s = speed if not self.samples_per_s else 0.8 * self.samples_per_s + 0.2 * speed
        self._at_work_since = now

    def ready_in_s(self, now: float, *, patience_s: float) -> float | None:
        """In how many seconds its micro-batch will be done; None if it has been silent too long, at least
        ``patience_s``."""
        if self._at_work_since is None:
            return 0.0
        ready_in_s = self._at_work_since + self._batch_s - now
        idle = ready_in_s < -max(IDLE_BATCHES * self._batch_s, patience_s)
        return None if idle else max(0.0, ready_in_s)
