"""`cs.workunits.volunteer`: give this machine's time to somebody's job."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import re
import socket
from dataclasses import dataclass
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
PLACES = 64
"""Volunteers of one name on one machine."""
VIEWS = Views(
    render_html, render_text, summary, lambda snapshot: snapshot.over, "volunteer", ("Stop", "Stopped")
)
_volunteers: set[Volunteer] = set()


class Volunteer:
    """A volunteer at work in the background. Show it, `watch` it, `stop` it."""

    def __init__(
        self, runtime: Runtime, client: CoordinatorClient, work: Volunteering, place: VolunteerFolder
    ) -> None:
        self._runtime, self._client, self._work, self._place = runtime, client, work, place
        self._stopped = False

    @property
    def url(self) -> str:
        """Of the coordinator, whose page shows how the job goes."""
        return self._client.url

    def snapshot(self) -> VolunteerSnapshot:
        """What it does; safe from any thread."""
        return self._work.snapshot()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the job is done, or nothing more can be; returns whether it has ended within ``seconds``."""

        async def waiting() -> bool:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._work.wait_over()
            return self.snapshot().over

        return self._runtime.call(waiting())

    def stop(self, *, finish_s: float = FINISH_S) -> None:
        """Finish what can be within ``finish_s``, give the rest back, and end. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        try:
            self._runtime.call(self._leave(finish_s))
        finally:
            self._place.lock.release()
            _volunteers.discard(self)

    async def _leave(self, finish_s: float) -> None:
        await self._work.leave(finish_s=finish_s)
        await self._client.close()

    def panel(self) -> Panel[VolunteerSnapshot]:
        """A live view: widgets in a notebook, text elsewhere."""
        return Panel(self.snapshot, self.stop, views=VIEWS)

    def watch(self, seconds: float | None = None) -> None:
        """Show what it does for ``seconds``, or until it ends or you interrupt; it goes on afterwards."""
        self.panel().watch(seconds)

    def __repr__(self) -> str:
        return f"Volunteer({summary(self.snapshot())})"

    def _repr_html_(self) -> str:
        return render_html(self.snapshot())


@dataclass(frozen=True)
class VolunteerFolder:
    """A folder for one volunteer, locked while it works: two of them would train the same units."""

    folder: Path
    lock: FileLock

    @classmethod
    def take(cls, folder: Path, name: str) -> VolunteerFolder:
        """The first of ``name``, ``name-2`` … below ``folder`` that nobody uses."""
        plain = _plain(name)
        for number in range(1, PLACES + 1):
            own = folder / (plain if number == 1 else f"{plain}-{number}")
            own.mkdir(parents=True, exist_ok=True)
            lock = FileLock(own / "lock", thread_local=False)
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=0)
                return cls(own, lock)
        raise ValueError(f"{PLACES} volunteers called {name!r} work in {folder}: give another name=")


def _plain(name: str) -> str:
    """As the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


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
    """Train units of somebody's job on this machine, by nothing but outgoing HTTP(S) requests.

    What was in hand when the kernel died goes on if the same ``name`` and ``folder`` come back before the deadline.
    Calling it again while it works gives the same volunteer (re-run cells freely).

    Args:
        link: that the coordinator shows.
        job: your own copy of the job, whose code then runs instead of the coordinator's.
        trust_code: run the code that the coordinator sends; read it first.
        units: trained at a time.
        name: what others see; this machine's name by default.
        folder: for data and unfinished units; in your home by default.
        device: to train on; a GPU where there is one.
        accept_terms: that the platform's terms allow this; asked for on Colab.

    Raises:
        InviteError: the link is mistyped, expired, or no link to a coordinator.
        JoinError: the coordinator does not answer, or does not let this peer take part.
        TermsError: the platform's terms have not been read.
        ValueError: the code is not trusted yet (the text says where to read it), or ``job`` is another job.
    """
    parsed, name = WorkLink.parse(link), name or socket.gethostname()
    for other in list(_volunteers):
        if other.url == parsed.url.rstrip("/") and other._place.folder.name == _plain(name):
            if not other.snapshot().over:
                return other
            other.stop()  # and leaves its place
    require_terms(accept_terms)
    place = VolunteerFolder.take(default_folder(folder), name)
    try:
        identity = Identity.load_or_create(place.folder / "volunteer.key")
        client = CoordinatorClient(
            parsed.url, parsed.token(identity), run_id=parsed.invite.run_id, authority=parsed.authority
        )
        return open_volunteer(
            client, place, job=job, trust_code=trust_code, units=units, name=name, device=device
        )
    except BaseException:
        place.lock.release()
        raise


def open_volunteer(
    client: CoordinatorClient,
    place: VolunteerFolder,
    *,
    job: Job | None,
    trust_code: bool,
    units: int,
    name: str,
    device: str | torch.device | None,
    gate: PauseGate | None = None,
) -> Volunteer:
    """Begin to work for the coordinator that ``client`` speaks to, while the gate is open; see `volunteer`."""
    runtime = Runtime.shared()
    try:
        card, code = runtime.call(_first_answers(client, with_code=job is None))
        if job is None:
            job = _trusted(card, code, place.folder, trust_code=trust_code)
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        settings = VolunteerSettings(place.folder, units, name, torch.device(kind), gate=gate or PauseGate())
        work = Volunteering(client, job, card, settings)
        runtime.call(_begin(work))
    except BaseException:
        runtime.call(client.close())
        raise
    volunteer = Volunteer(runtime, client, work, place)
    _volunteers.add(volunteer)
    return volunteer


async def _begin(work: Volunteering) -> None:
    work.start()


async def _first_answers(client: CoordinatorClient, *, with_code: bool) -> tuple[JobCard, str]:
    try:
        async with asyncio.timeout(FIRST_ANSWER_S):
            card = await client.card()
            return card, await client.code(card) if with_code and card.code_sha256 else ""
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


def default_folder(folder: str | Path | None) -> Path:
    """Where volunteers keep what they need, if nobody says."""
    return Path.home() / ".cache" / "colab_swarm" / "volunteers" if folder is None else Path(folder)


@atexit.register
def _stop_all() -> None:
    for volunteer in list(_volunteers):
        with contextlib.suppress(Exception):
            volunteer.stop(finish_s=0.0)
