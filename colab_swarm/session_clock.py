"""How long this session may last: by the platform's rules, or as the user says; and when it is time to leave.

Platforms end a session without a word. A peer that leaves some minutes earlier hands over what it has accumulated,
saves its experts and gives back its work units, so that nothing has to be found out by timeouts.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from colab_swarm.events import EventLog, SessionEnding
from colab_swarm.snapshot import SessionTime
from colab_swarm.widgets.environment import Platform

LEAVE_BEFORE_S = 600.0
"""How long before the end a peer leaves; the half of what is left, where that is less."""
WARN_BEFORE_S = 600.0
"""How long before it leaves it says so."""


@dataclass(frozen=True)
class SessionClock:
    """The life of one session. Times are those of the runtime's loop, seconds.

    Attributes:
        platform: where it runs, for people.
        began_at: when it began.
        limit_s: its longest life.
        leave_before_s: how long before its end this peer leaves.
    """

    platform: str
    began_at: float
    limit_s: float
    leave_before_s: float = LEAVE_BEFORE_S

    @classmethod
    def of(
        cls, here: Platform, session_hours: float | None, *, age_s: float, now: float
    ) -> SessionClock | None:
        """The clock of a session on ``here`` that is ``age_s`` old; None if its end is not known.

        Args:
            here: the platform.
            session_hours: from now on, as the user says; None: as the platform has it.
            age_s: of the session.
            now: loop time.

        Raises:
            ValueError: ``session_hours`` is not positive.
        """
        if session_hours is not None:
            if not 0 < session_hours < 1e6:
                raise ValueError(f"session_hours={session_hours}: say how many hours this peer may run, > 0")
            name, limit_s, age_s = "this machine", 3600 * session_hours, 0.0
        elif here.limit_s is not None and age_s < here.limit_s:
            name, limit_s = here.name, here.limit_s
        else:  # older than the platform's rule allows: a paid runtime lives longer
            return None
        return cls(name, now - age_s, limit_s, min(LEAVE_BEFORE_S, (limit_s - age_s) / 2))

    @property
    def leaves_at(self) -> float:
        """When this peer leaves."""
        return self.began_at + self.limit_s - self.leave_before_s

    @property
    def reason(self) -> str:
        """Why it leaves, in words."""
        return f"a session on {self.platform} is over after {self.limit_s / 3600:.4g} h"

    def seconds_left(self, now: float) -> float:
        """Until the platform ends the session."""
        return max(0.0, self.began_at + self.limit_s - now)

    def read(self, now: float) -> SessionTime:
        """For panels."""
        return SessionTime(
            self.platform, now - self.began_at, self.limit_s, self.limit_s - self.leave_before_s
        )


async def wait_for_end(clock: SessionClock, events: EventLog) -> None:
    """Return when it is time to leave; emits `SessionEnding` some minutes before, and then."""
    loop_time = asyncio.get_running_loop().time
    for tell_at in (clock.leaves_at - WARN_BEFORE_S, clock.leaves_at):
        await asyncio.sleep(tell_at - loop_time())
        now = loop_time()
        events.emit(SessionEnding(now, clock.seconds_left(now), clock.reason))


def session_age_s(proc: Path = Path("/proc")) -> float:
    """Seconds since this machine's first process began, which is a notebook's container on Colab, Kaggle and Binder.

    Where it cannot be told, seconds since this process began; 0 where there is no ``/proc``.
    """
    for process in ("1", "self"):
        try:
            uptime_s = float((proc / "uptime").read_text().split()[0])
            # field 22 of proc(5); the second one, a name in parentheses, may hold spaces
            began_ticks = int((proc / process / "stat").read_text().rpartition(")")[2].split()[19])
            return max(0.0, uptime_s - began_ticks / os.sysconf("SC_CLK_TCK"))
        except (OSError, ValueError, IndexError):
            continue
    return 0.0
