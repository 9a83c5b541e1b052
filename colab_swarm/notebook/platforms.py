"""Where this process runs: notebook, Colab, Kaggle, Binder; what the platform's terms say; who sees widgets there.

How long this session may last: by the platform's rules, or as the user says; and when it is time to leave.

Platforms end a session without a word. A peer that leaves some minutes earlier hands over what it has accumulated,
saves its experts and gives back its work units, so that nothing has to be found out by timeouts.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from colab_swarm.errors import TermsError
from colab_swarm.events import EventLog, SessionEnding
from colab_swarm.snapshot import SessionTime


@dataclass(frozen=True)
class Platform:
    """Where this process runs, and what that means for a swarm.

    Attributes:
        name: for people.
        terms: what the platform's terms are reported to say about swarms; empty if nothing is known.
        limits: how long a session lasts and what it gets; empty if nothing is known.
        internet_help: how to switch the internet on; empty where there is no switch.
        must_agree: whether training here wants `require_terms`.
        limit_s: a session's longest life; None if nothing is known.
        lasting: the folder whose contents outlive a session; empty if all do, or none.
    """

    name: str
    terms: str = ""
    limits: str = ""
    internet_help: str = ""
    must_agree: bool = False
    limit_s: float | None = None
    lasting: str = ""


COLAB = Platform(
    "Google Colab",
    terms=(
        "Colab's FAQ is reported to forbid running distributed computing workers on runtimes without paid compute "
        "units, and peer-to-peer file-sharing and connecting to remote proxies on all of them; whether you have "
        "units cannot be seen from here. Read https://research.google.com/colaboratory/faq.html"
    ),
    limits="free runtimes end after 12 hours at most, and earlier when nobody is at the page",
    must_agree=True,
    limit_s=12 * 3600.0,
    lasting="/content/drive",
)

KAGGLE = Platform(
    "Kaggle",
    terms="Read https://www.kaggle.com/terms: it is on you whether what you train is allowed there.",
    limits="12 hours a session, about 30 GPU hours a week",
    internet_help="open Settings at the right of the notebook, switch Internet on (it wants a verified phone number)",
    limit_s=12 * 3600.0,
    lasting="/kaggle/working",
)

KAGGLE_TPU = replace(KAGGLE, limits="9 hours a session, about 20 TPU hours a week", limit_s=9 * 3600.0)

BINDER = Platform(
    "Binder",
    limits="2 GB of memory, 1 core, 1 Mbit/s, outgoing to port 443 and few others; ends after 10 idle minutes",
    limit_s=6 * 3600.0,
)

VS_CODE = Platform("VS Code")

JUPYTER = Platform("Jupyter")

PLAIN = Platform("a Python process")


def in_notebook() -> bool:
    """Whether this is a Jupyter kernel, of whatever front-end, and not a terminal or a script."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it long before
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def in_colab() -> bool:
    """Whether this is Google Colab."""
    return "google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ


def in_kaggle() -> bool:
    """Whether this is a Kaggle notebook."""
    return "KAGGLE_KERNEL_RUN_TYPE" in os.environ


def has_frontend() -> bool:
    """Whether somebody sees widgets; ``jupyter execute`` and Kaggle's "Save & Run All" are kernels without a page.

    Who runs a notebook without a page says with each cell that nobody can be asked for input.
    """
    if not in_notebook() or find_spec("ipywidgets") is None:
        return False
    batch = os.environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch"
    kernel = sys.modules["IPython"].get_ipython().kernel
    return not batch and (in_colab() or getattr(kernel, "_allow_stdin", True))


def platform() -> Platform:
    """Where this process runs."""
    if in_kaggle():  # before Colab: Kaggle's image is made from Colab's
        return KAGGLE_TPU if any(name.startswith("TPU_") for name in os.environ) else KAGGLE
    if in_colab():
        return COLAB
    if "BINDER_SERVICE_HOST" in os.environ or "BINDER_LAUNCH_HOST" in os.environ:
        return BINDER
    if not in_notebook():
        return PLAIN
    return VS_CODE if "VSCODE_PID" in os.environ or "VSCODE_CWD" in os.environ else JUPYTER


def require_terms(agreed: bool) -> None:
    """Let nobody open a worker where the platform's terms may forbid it without having read them.

    Simulating, viewing and driving a run from the notebook's page want no agreement: do not call it for these.

    Args:
        agreed: the user said ``accept_terms=True``.

    Raises:
        TermsError: not agreed, on a platform whose terms may forbid it.
    """
    here = platform()
    if here.must_agree and not agreed:
        raise TermsError(
            f"this notebook runs on {here.name}. {here.terms}. If they allow you this, pass "
            "accept_terms=True; cs.simulate(…) and viewing a run need no permission"
        )


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
