"""What an expert did lately, for panels and dashboards."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from colab_swarm.moe.batching import Waiting

LATENCIES = 1000


@dataclass(frozen=True)
class ExpertStatistics:
    """Of one expert since it is hosted here.

    Attributes:
        step: updates in its weights.
        forward_samples, backward_samples: answered.
        calls, batches: how many calls were answered, in how many batches.
        queued: samples that wait now.
        p50_s, p99_s: from a call's arrival until its answer could be sent, of the last calls; None before the first.
    """

    step: int
    forward_samples: int
    backward_samples: int
    calls: int
    batches: int
    queued: int
    p50_s: float | None
    p99_s: float | None


class Tally:
    """Counts what one expert answered."""

    def __init__(self) -> None:
        self._samples = {False: 0, True: 0}
        self._calls = self._batches = 0
        self._latencies_s: deque[float] = deque(maxlen=LATENCIES)

    def add(self, batch: Sequence[Waiting], now: float) -> None:
        """Calls were answered together; ``now`` on the clock of their arrival."""
        self._batches += bool(batch)
        self._calls += len(batch)
        for call in batch:
            self._samples[call.key.backward] += call.samples
            self._latencies_s.append(now - call.arrived_at)

    def statistics(self, *, step: int, queued: int) -> ExpertStatistics:
        """As they stand."""
        p50_s, p99_s = None, None
        if self._latencies_s:
            p50_s, p99_s = map(float, np.percentile(self._latencies_s, (50, 99)))
        return ExpertStatistics(
            step, self._samples[False], self._samples[True], self._calls, self._batches, queued, p50_s, p99_s
        )
