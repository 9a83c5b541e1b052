"""Whom to trust with a unit: an error rate per volunteer, and bans for those whose results are no use.

The error rate is BOINC's (its validator's ``update_error_rate``): an exponential average that begins at 0.1. It
forgets faster here, within some ten units instead of twenty, because a job of notebooks lasts hours, not months. Who
is often preempted is unreliable and gets few units; only who sends bad results is banned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY = 0.9
FIRST_ERROR_RATE = 0.1
RELIABLE = 0.5
"""Below this reliability a volunteer gets few units, and none that failed before if others are there."""
BAN_RATE = 0.25
"""A volunteer is banned if about so many of its latest results were bad: three in a row, or every fourth."""
FIRST_BAN_S = 600.0
LONGEST_BAN_S = 86_400.0
FREE_RETURNS = 3
"""Whoever gives units back more often, with no result in between, gets none for a while: each fills the log."""
LONGEST_REST_S = 600.0


@dataclass
class Reliability:
    """How one volunteer did so far.

    Attributes:
        error_rate: share of its latest units that came to nothing, for whatever reason.
        bad_rate: share of its latest results that were bad.
        accepted, rejected, expired: units.
        bans: so far; each is twice as long as the one before.
        banned_until: seconds since the epoch.
        returns: how often it gave units back since its last good result, last at ``returned_at``.
        rests_until: it gets nothing before.
    """

    error_rate: float = FIRST_ERROR_RATE
    bad_rate: float = 0.0
    accepted: int = 0
    rejected: int = 0
    expired: int = 0
    bans: int = 0
    banned_until: float = -math.inf
    returns: int = 0
    returned_at: float = -math.inf
    rests_until: float = -math.inf

    @property
    def reliability(self) -> float:
        """Between 0 and 1."""
        return 1 - self.error_rate

    @property
    def proven(self) -> bool:
        """Whether it may have as many units as the plan allows: it did one, and most come back."""
        return self.accepted > 0 and self.reliability >= RELIABLE

    def on_accepted(self) -> None:
        """One of its results was good."""
        self.accepted += 1
        self.returns = 0
        self.error_rate *= MEMORY
        self.bad_rate *= MEMORY

    def on_expired(self) -> None:
        """One of its units did not come back in time."""
        self.expired += 1
        self._err()

    def on_gave_back(self, now: float) -> None:
        """It gave back a unit; several at once count as one."""
        if now > self.returned_at:
            self.returned_at = now
            self.returns += 1
        if self.returns > FREE_RETURNS:
            self.rests_until = now + min(LONGEST_REST_S, 2.0 ** min(self.returns - FREE_RETURNS, 32))

    def on_rejected(self, now: float) -> None:
        """One of its results was bad."""
        self.rejected += 1
        self._err()
        self.bad_rate = MEMORY * self.bad_rate + 1 - MEMORY
        if self.bad_rate > BAN_RATE:
            self.banned_until = now + min(LONGEST_BAN_S, FIRST_BAN_S * 2.0 ** min(self.bans, 32))
            self.bans += 1

    def _err(self) -> None:
        self.error_rate = MEMORY * self.error_rate + 1 - MEMORY
