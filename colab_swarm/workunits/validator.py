"""Whether a result can be used: anybody may send one."""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np

from colab_swarm.workunits.job import WorkPlan
from colab_swarm.workunits.weights import Floats

LATEST = 100
KNOWN = 5
"""From so many accepted results on it is known how far training usually moves the parameters."""
FIRST_CHANGE = 1000.0
"""Until then it may move them so many times as far as they are from zero, or as if each were 1."""
MOST = 1e18
"""Of a value. No mean of such values is infinite, and no square."""
PIECE = 1 << 16


def moved(values: Floats, base: Floats) -> float:
    """L2 norm of ``values - base``, both (numel,), summed in float64; not finite if one of the values is not."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # it may be anything, and then says so
        for start in range(0, len(values), PIECE):
            piece = slice(start, start + PIECE)
            change = np.subtract(values[piece], base[piece], dtype=np.float64)
            total += float(change @ change)
    return float(np.sqrt(total))


class Validator:
    """Judges results one by one; replicas are compared by the dispatcher. ``plan``: of the job."""

    def __init__(self, plan: WorkPlan) -> None:
        self._max_change = plan.max_change
        self._changes: deque[float] = deque(maxlen=LATEST)

    def learn(self, change: float) -> None:
        """A result was accepted that had moved the parameters by ``change`` (L2 norm)."""
        self._changes.append(change)

    def judge(self, values: Floats, base: Floats) -> str | None:
        """Why a result is no use; None if it is good.

        Args:
            values: of the result.
            base: parameters of about the time when training began.
        """
        if len(values) != len(base):
            return f"{len(values):,} values, {len(base):,} expected"
        bad = len(values) - int(np.count_nonzero(np.abs(values) <= MOST))
        if bad:
            return (
                f"{bad:,} of {len(values):,} values are not finite, or beyond {MOST:g}: "
                "a lower learning rate may help"
            )
        change = moved(values, base)
        if len(self._changes) < KNOWN:
            most = FIRST_CHANGE * max(float(np.linalg.norm(base)), len(base) ** 0.5)
            return (
                None if change <= most else f"training moved the parameters by {change:.3g}, over {most:.3g}"
            )
        usual = statistics.median(self._changes)
        if change <= self._max_change * usual:
            return None
        return (
            f"training moved the parameters by {change:.3g}, usually it is {usual:.3g} "
            f"and {self._max_change:g} times as much is allowed (max_change)"
        )
