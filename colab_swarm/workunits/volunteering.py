"""`cs.workunits.volunteer`: train units of another person's job on this machine."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import re
import socket
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from colab_swarm.errors import JoinError, PeerError
from colab_swarm.net.identity import Identity
from colab_swarm.notebook.panel import Panel, Views
from colab_swarm.notebook.platforms import require_terms
from colab_swarm.notebook.volunteer_view import render_html, render_text, summary
from colab_swarm.runtime import PauseGate, Runtime
from colab_swarm.workunits.client import CoordinatorClient
from colab_swarm.workunits.coordinator import WorkLink
from colab_swarm.workunits.job import Job
from colab_swarm.workunits.messages import JobCard
from colab_swarm.workunits.resume import VolunteerSnapshot
from colab_swarm.workunits.work_loop import Volunteering, VolunteerSettings

FIRST_ANSWER_S, FINISH_S = 30.0, 30.0
MAX_FOLDERS = 64
"""Volunteers of one name on one machine."""
VIEWS = Views(
    render_html, render_text, summary, lambda snapshot: snapshot.over, "volunteer", ("Stop", "Stopped")
)
_volunteers: set[Volunteer] = set()


class Volunteer:
    """A volunteer that works in the background. Show it, `watch` it, `stop` it.

    Attributes:
        url: of the coordinator, whose page shows the job's progress.
        folder: its own, for data and unfinished units.
    """

    def __init__(
        self, runtime: Runtime, client: CoordinatorClient, work: Volunteering, folder: Path, lock: FileLock
    ) -> None:
        self.url, self.folder = client.url, folder
        self._runtime, self._client, self._work, self._lock = runtime, client, work, lock
        self._stopped = False

    def snapshot(self) -> VolunteerSnapshot:
        """Return its progress. Thread-safe."""
        return self._work.snapshot()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, ``seconds`` at most; return True if it has."""

        async def waiting() -> bool:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._work.wait_over()
            return self.snapshot().over

        return self._runtime.call(waiting())

    def stop(self, *, finish_s: float = FINISH_S) -> None:
        """Finish the units that ``finish_s`` is enough for, give the others back, and end. Idempotent."""
        if self._stopped:
            return
        self._stopped = True

        async def leave() -> None:
            await self._work.leave(finish_s=finish_s)
            await self._client.close()

        try:
            self._runtime.call(leave())
        finally:
            self._lock.release()
            _volunteers.discard(self)

    def panel(self) -> Panel[VolunteerSnapshot]:
        """Return a live view: widgets in a notebook, text elsewhere."""
        return Panel(self.snapshot, self.stop, views=VIEWS)

    def watch(self, seconds: float | None = None) -> None:
        """Show its progress for ``seconds``, or until it ends or you interrupt. It continues afterwards."""
        self.panel().watch(seconds)

    def __repr__(self) -> str:
        return f"Volunteer({summary(self.snapshot())})"

    def _repr_html_(self) -> str:
        return render_html(self.snapshot())


def volunteer(
    link: str,
    *,
    job: Job | None = None,
    trust_code: bool = False,
    units: int = 1,
    name: str = "",
    folder: str | Path | None = None,
    device: str | torch.device | None = None,
    accept_terms: bool = False,
) -> Volunteer:
    """Train units of a job on this machine, by outgoing HTTP(S) requests only.

    Units in hand when the kernel died are resumed if you call this with the same ``name`` and ``folder`` before their
    deadline. Calling it again while it works returns the same volunteer, so you can re-run cells freely.

    Args:
        link: shown by the coordinator.
        job: your own copy of the job; its code then runs instead of the coordinator's.
        trust_code: run the code that the coordinator sends; read it first.
        units: trained at a time.
        name: shown to others; by default this machine's name.
        folder: for data and unfinished units; by default in your home.
        device: to train on; by default a GPU if there is one.
        accept_terms: True if the platform's terms allow this; needed on Colab.

    Raises:
        InviteError: the link is mistyped, expired, or no link to a coordinator.
        JoinError: the coordinator does not answer, or does not admit this peer.
        TermsError: the platform's terms are not accepted.
        ValueError: the code is not trusted yet (the message says where to read it), or ``job`` is another job.
    """
    parsed, name = WorkLink.parse(link), name or socket.gethostname()
    for other in list(_volunteers):
        if other.url == parsed.url.rstrip("/") and other.folder.name == _plain(name):
            if not other.snapshot().over:
                return other
            other.stop()  # which releases its folder
    require_terms(accept_terms)

    def client(own: Path) -> CoordinatorClient:
        token = parsed.token(Identity.load_or_create(own / "volunteer.key"))
        return CoordinatorClient(parsed.url, token, run_id=parsed.invite.run_id, authority=parsed.authority)

    return open_volunteer(
        client, name=name, job=job, trust_code=trust_code, units=units, folder=folder, device=device
    )


def open_volunteer(
    client_in: Callable[[Path], CoordinatorClient],
    *,
    name: str,
    job: Job | None,
    trust_code: bool,
    units: int,
    folder: str | Path | None,
    device: str | torch.device | None,
    gate: PauseGate | None = None,
) -> Volunteer:
    """Work for the coordinator of a client, while the gate is open; see `volunteer`.

    Args:
        client_in: returns the client; it may keep a key in the folder that it gets.
        gate: closed while the machine is needed for something else.
    """
    runtime = Runtime.shared()
    own, lock = take_folder(folder, name)
    with contextlib.ExitStack() as undo:
        undo.callback(lock.release)
        client = client_in(own)
        undo.callback(lambda: runtime.call(client.close()))
        card, code = runtime.call(_first_answers(client, with_code=job is None))
        if job is None:
            job = _trusted(card, code, own, trust_code=trust_code)
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        settings = VolunteerSettings(own, units, name, torch.device(kind), gate=gate or PauseGate())
        work = Volunteering(client, job, card, settings)
        runtime.call(work.begin())
        undo.pop_all()
    volunteer = Volunteer(runtime, client, work, own, lock)
    _volunteers.add(volunteer)
    return volunteer


async def _first_answers(client: CoordinatorClient, *, with_code: bool) -> tuple[JobCard, str]:
    try:
        async with asyncio.timeout(FIRST_ANSWER_S):
            card = await client.card()
            return card, await client.code(card) if with_code else ""
    except PeerError as error:
        raise JoinError(str(error)) from error
    except TimeoutError as error:
        raise JoinError(
            f"no coordinator answers at {client.url} ({client.trouble or 'silence'}): is it still running? "
            "Ask its organizer for the newest link"
        ) from error


def _trusted(card: JobCard, code: str, folder: Path, *, trust_code: bool) -> Job:
    if not code:
        raise ValueError(
            f"the job {card.name!r} was made in a notebook and has no file of code: run the cell that makes it here "
            "too, and give it as job=; or its organizer puts it into a file (%%writefile job.py, cs.workunits.Job.load)"
        )
    path = folder / "jobs" / f"{card.name}-{card.code_sha256[:12]}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(code, encoding="utf-8")
    if not trust_code:
        raise ValueError(
            f"the job {card.name!r} runs its organizer's code on this machine ({len(code.splitlines())} lines): "
            f"read {path}, and if you trust it, volunteer with trust_code=True"
        )
    return Job.from_code(code, str(path))


def take_folder(folder: str | Path | None, name: str) -> tuple[Path, FileLock]:
    """Lock the first free folder of ``name``, ``name-2`` … below ``folder``: two volunteers need two folders."""
    base = Path.home() / ".cache" / "colab_swarm" / "volunteers" if folder is None else Path(folder)
    for number in range(1, MAX_FOLDERS + 1):
        own = base / (_plain(name) if number == 1 else f"{_plain(name)}-{number}")
        own.mkdir(parents=True, exist_ok=True)
        lock = FileLock(own / "lock", thread_local=False)
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=0)
            return own, lock
    raise ValueError(f"{MAX_FOLDERS} volunteers called {name!r} work in {base}: give another name=")


def _plain(name: str) -> str:
    """The name as that of a folder."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


@atexit.register
def _stop_all() -> None:
    for volunteer in list(_volunteers):
        with contextlib.suppress(Exception):
            volunteer.stop(finish_s=0.0)
