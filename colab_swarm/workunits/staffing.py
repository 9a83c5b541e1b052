"""How many parameter servers a job needs, by the results that wait for them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class StaffingSettings:
    """When servers come and go.

    Attributes:
        most: servers at once; by default the processors of this machine, less one for the coordinator.
        crowd: results that wait, for each server, from which on there are too few servers.
        grow_s: how long there must be too few of them before another comes.
        shrink_s: how long nothing must have waited before one goes. Longer: to start a process takes seconds.
    """

    most: int = max(1, (os.cpu_count() or 1) - 1)
    crowd: float = 2.0
    grow_s: float = 2.0
    shrink_s: float = 30.0


class Staffing:
    """Follows the backlog, one server at a time. Free of I/O; ``now`` is in seconds."""

    def __init__(self, settings: StaffingSettings | None = None) -> None:
        self._settings = settings or StaffingSettings()
        self._few_since = self._idle_since = math.inf

    def on_backlog(self, waiting: int, servers: int, *, now: float) -> int:
        """How many servers there should be, if ``waiting`` results wait for the ``servers`` that there are."""
        settings = self._settings
        crowded = waiting > settings.crowd * servers
        self._few_since = min(self._few_since, now) if crowded else math.inf
        self._idle_since = min(self._idle_since, now) if waiting == 0 else math.inf
        wanted = servers
        if now - self._few_since >= settings.grow_s:
            wanted, self._few_since = servers + 1, now
        elif now - self._idle_since >= settings.shrink_s:
            wanted, self._idle_since = servers - 1, now
        return max(1, min(settings.most, wanted))
