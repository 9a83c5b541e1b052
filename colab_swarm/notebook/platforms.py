"""The platform of this process (Colab, Kaggle, …): its terms, front-end and end of session.

Platforms end a session without notice. A peer that leaves some minutes earlier can hand over its
gradients, save its experts and give back its work units, so the others need not wait for timeouts.
"""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from colab_swarm.errors import TermsError, require
from colab_swarm.events import EventLog, Notice
from colab_swarm.snapshot import SessionTime

LEAVE_BEFORE_S = 600.0  # time from leaving to the end of the session; less if the session ends soon
SLOW_IMPORT_S = 3.0
_WARN_BEFORE_S = 600.0  # time between the warning and leaving
Consent: TypeAlias = bool | Literal["tunnels"]
"""A user's consent: none (False), to train here (True), or also to tunnels and relays of other companies."""
WITHOUT_TUNNELS = (
    "No tunnel or relay is needed for a bucket, cs.create('my-run', mailbox='s3://bucket/folder', accept_terms=True), "
    "or for a friend who can be reached: `colab-swarm create my-run` there, and here "
    "cs.join('swarm://…', accept_terms=True)"
)


@dataclass(frozen=True)
class Platform:
    name: str  # for people
    terms: str = ""  # what its terms are reported to say about swarms; empty if unknown
    limits: str = ""  # duration and resources of a session; empty if unknown
    internet_help: str = ""  # how to switch the internet on; empty where there is no switch
    must_agree: bool = False  # whether training here needs `require_terms`
    tunnels_if: str = (
        ""  # what the user confirms before tunnels and relays open; empty on machines of one's own
    )
    alone: bool = False  # whether no other machine is in its local network
    limit_s: float | None = None  # longest duration of a session; None if unknown
    lasting: str = ""  # the folder that remains after a session; empty if all folders remain, or none

    def allows_tunnels(self, consent: Consent) -> bool:
        """Return True if the user has given the consent that tunnels and relays need on this platform."""
        return consent == "tunnels" or (bool(consent) and not self.tunnels_if)


_TERMS_ALLOW = "My terms allow tunnels and relays"

COLAB = Platform(
    "Google Colab",
    terms=(
        "Colab's FAQ, as quoted in November 2026, disallows “running distributed computing workers” on runtimes "
        "without paid compute units, and “peer-to-peer file-sharing” and “connecting to remote proxies” on all of "
        "them. colab_swarm cannot see your units: read https://research.google.com/colaboratory/faq.html"
    ),
    limits="free runtimes end after at most 12 hours, earlier without an open page",
    must_agree=True,
    tunnels_if="I use paid compute units, and my terms allow tunnels and relays",
    alone=True,
    limit_s=12 * 3600.0,
    lasting="/content/drive",
)
KAGGLE = Platform(
    "Kaggle",
    terms=(
        "Read https://www.kaggle.com/terms: you are responsible for what you train there. What Kaggle says about "
        "tunnels is not known to colab_swarm."
    ),
    tunnels_if=_TERMS_ALLOW,
    limits="12 hours a session, about 30 GPU hours a week",
    alone=True,
    internet_help="open Settings at the right of the notebook, switch Internet on (needs a verified phone number)",
    limit_s=12 * 3600.0,
    lasting="/kaggle/working",
)
KAGGLE_TPU = replace(KAGGLE, limits="9 hours a session, about 20 TPU hours a week", limit_s=9 * 3600.0)
BINDER = Platform(
    "Binder",
    limits="2 GB of memory, 1 core, 1 Mbit/s, outgoing to port 443 and few others; ends after 10 idle minutes",
    tunnels_if=_TERMS_ALLOW,
    alone=True,
    limit_s=6 * 3600.0,
)
JUPYTER = Platform("Jupyter")
PLAIN = Platform("a Python process")


def in_notebook() -> bool:
    """Return True in a Jupyter kernel of any front-end, False in a terminal or a script."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return False
    return hasattr(ipython.get_ipython(), "kernel")


def in_colab() -> bool:
    return "google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ


def in_kaggle() -> bool:
    return "KAGGLE_KERNEL_RUN_TYPE" in os.environ


def has_frontend() -> bool:
    """Return True if a page shows widgets. This is known because a kernel without a page forbids input."""
    if not in_notebook() or find_spec("ipywidgets") is None:
        return False
    if os.environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch":
        return False
    if in_colab():
        return True
    kernel = sys.modules["IPython"].get_ipython().kernel
    return bool(getattr(kernel, "_allow_stdin", True))


@contextlib.contextmanager
def notice_if_slow(text: str) -> Iterator[None]:
    """Tell the person who waits if the block takes longer than `SLOW_IMPORT_S`; importing torch can take half a minute.

    Programs that compare what is printed, such as nbval, get the same text from slow and from fast machines.
    """
    notice = threading.Timer(SLOW_IMPORT_S, _tell, [text])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def _tell(text: str) -> None:
    if sys.stderr.isatty() or has_frontend():
        print(text, file=sys.stderr)


def platform() -> Platform:
    # check Kaggle before Colab, because Kaggle's image is based on Colab's
    if in_kaggle():
        has_tpu = any(name.startswith("TPU_") for name in os.environ)
        return KAGGLE_TPU if has_tpu else KAGGLE
    if in_colab():
        return COLAB
    if "BINDER_SERVICE_HOST" in os.environ or "BINDER_LAUNCH_HOST" in os.environ:
        return BINDER
    return JUPYTER if in_notebook() else PLAIN


def require_terms(consent: Consent) -> None:
    """Raise TermsError unless the user agreed to train here; ValueError if ``consent`` is not known."""
    require(
        consent in (False, True, "tunnels"),
        f"accept_terms={consent!r} is unknown: pass True, or 'tunnels' if tunnels and relays are allowed too",
    )
    here = platform()
    require(
        not here.must_agree or consent,
        f"this notebook runs on {here.name}. {here.terms}. If they allow it, pass "
        "accept_terms=True; cs.simulate(…) and viewing a run need no permission",
        TermsError,
    )


def require_tunnels(consent: Consent, service: str) -> None:
    """Raise TermsError unless the user agreed to a tunnel or relay, the ``service``; "" needs no consent."""
    here = platform()
    require(
        not service or not here.tunnels_if or consent == "tunnels",
        f"this notebook runs on {here.name}, where {service} opens only if you pass accept_terms='tunnels': "
        f"“{here.tunnels_if}”. {WITHOUT_TUNNELS}",
        TermsError,
    )


def ways_out() -> str:
    """Return advice for a machine on which no other peer could reach a new run."""
    here = platform()
    text = f"No other machine reaches {here.name} by itself. {WITHOUT_TUNNELS}. "
    if here.tunnels_if:
        text += (
            f"If you can say “{here.tunnels_if}”: accept_terms='tunnels' uses iroh (pip install iroh), cloudflared or "
            "ngrok, whichever is installed. "
        )
    return f"{text}Or try a whole swarm in this notebook: cs.simulate(peers=4)"


@dataclass(frozen=True)
class SessionClock:
    """The time limit of a platform's session. Times are loop times of the runtime, in seconds."""

    platform: str  # for people
    began_at: float  # start of the session
    limit_s: float  # its longest duration
    leave_before_s: float = LEAVE_BEFORE_S  # time from leaving to the end of the session

    @classmethod
    def of(
        cls, here: Platform, session_hours: float | None, *, age_s: float, now: float
    ) -> "SessionClock | None":
        """Return a session's clock; None if its end is unknown. ``session_hours`` count from ``now``."""
        if session_hours is not None:
            require(0 < session_hours < 1e6, f"session_hours={session_hours}: pass hours > 0")
            here = Platform("this machine", limit_s=3600 * session_hours)
            age_s = 0.0
        # a session that is older than the limit runs on a paid runtime, which has a longer limit
        if here.limit_s is None or age_s >= here.limit_s:
            return None
        leave_before_s = min(LEAVE_BEFORE_S, (here.limit_s - age_s) / 2)
        return cls(here.name, now - age_s, here.limit_s, leave_before_s)

    @property
    def leaves_at(self) -> float:
        return self.began_at + self.limit_s - self.leave_before_s

    @property
    def reason(self) -> str:
        return f"a session on {self.platform} ends after {self.limit_s / 3600:.4g} h"

    def read(self, now: float) -> SessionTime:
        leaves_s = self.limit_s - self.leave_before_s
        return SessionTime(self.platform, now - self.began_at, self.limit_s, leaves_s)


async def wait_for_end(clock: SessionClock, events: EventLog) -> None:
    """Wait until it is time to leave; emit a `Notice` some minutes before it, and another one then."""
    loop = asyncio.get_running_loop()
    for warn_at in (clock.leaves_at - _WARN_BEFORE_S, clock.leaves_at):
        await asyncio.sleep(warn_at - loop.time())
        left_s = max(0.0, clock.began_at + clock.limit_s - loop.time())
        events.emit(Notice(loop.time(), f"this session ends in {left_s / 60:.0f} min: {clock.reason}"))


def session_age_s(proc: Path = Path("/proc")) -> float:
    """Return the age of the container's first process, or of this process if the first one is hidden."""
    for process in ("1", "self"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            uptime_s = float((proc / "uptime").read_text().split()[0])
            # field 22 of proc(5); field 2, a name in parentheses, may contain spaces
            fields = (proc / process / "stat").read_text().rpartition(")")[2].split()
            began_ticks = int(fields[19])
            return max(0.0, uptime_s - began_ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0
