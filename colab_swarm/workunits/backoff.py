"""How long to wait before the next try of something that failed."""

from __future__ import annotations

import random
from dataclasses import dataclass

MAX_ASKED_S = 900.0
"""The longest wait that another side may ask for."""


@dataclass(frozen=True)
class BackoffSettings:
    """Waits grow twofold from ``first_s`` to ``most_s``."""

    first_s: float = 1.0
    most_s: float = 60.0


class Backoff:
    """Counts failures in a row. A wait lies between half and the whole of its length, so that peers drift apart.

    Args:
        settings: its lengths.
        rng: chance.
    """

    def __init__(self, settings: BackoffSettings, rng: random.Random) -> None:
        self._settings, self._rng = settings, rng
        self._next_s = settings.first_s

    def failed(self, asked_s: float = 0.0) -> float:
        """Seconds to wait now; at least ``asked_s``, which the other side asked for."""
        wait_s = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._settings.most_s)
        return max(wait_s, min(asked_s, MAX_ASKED_S))

    def succeeded(self) -> None:
        """The next failure is a first one."""
        self._next_s = self._settings.first_s
