"""How fast this trainer computes, when its micro-batch will be done, and when it counts as idle. Pure."""

import math

MAX_REPORT_S = 60.0  # between two records of a peer; it is forgotten after four times as long
_LATE_BATCHES = 3.0  # micro-batches of silence after which a trainer joins no round soon
# Silence that makes a trainer idle: in micro-batches, and in seconds; the last while its speed is unknown.
_IDLE_BATCHES = 10.0
_IDLE_S = 2 * MAX_REPORT_S
_UNKNOWN_IDLE_S = 10 * MAX_REPORT_S


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
