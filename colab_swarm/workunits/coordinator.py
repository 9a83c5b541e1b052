"""`cs.workunits.coordinate`: hand a job out to volunteers in work units.

The line that lets volunteers in: the coordinator's address, and behind ``#`` what an invitation holds.

    https://example.org/#NAME.PAYLOAD

In a browser it opens the status page; what stands behind the ``#`` never reaches the server.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict, Unpack
from urllib.parse import urlsplit

from filelock import FileLock, Timeout
from torch import nn

from colab_swarm.errors import InviteError
from colab_swarm.events import EventLog
from colab_swarm.invite import PROJECT_URL, Access, Invite
from colab_swarm.net.addresses import host_of, is_local, reachable_addresses
from colab_swarm.net.identity import Identity
from colab_swarm.net.membership import Grant, Membership, MembershipAdmission
from colab_swarm.net.peers import Role
from colab_swarm.net.tunnels import Tunnel, TunnelSettings, settings_of
from colab_swarm.notebook.coordinator_view import render_html, render_text, summary
from colab_swarm.notebook.invitation import Invitation
from colab_swarm.notebook.panel import Panel, Views
from colab_swarm.notebook.platforms import require_terms
from colab_swarm.runtime import Runtime
from colab_swarm.trust.access import RunAccess
from colab_swarm.trust.authority import AuthoritySettings
from colab_swarm.workunits.coordination import Coordination, CoordinationSettings
from colab_swarm.workunits.job import Job
from colab_swarm.workunits.overview import JobStatus
from colab_swarm.workunits.state import AnyEntry
from colab_swarm.workunits.store import ParameterStore, open_store
from colab_swarm.workunits.tokens import RequestGate, Signs, Token
from colab_swarm.workunits.uploads import Uploads
from colab_swarm.workunits.web import CoordinatorServer

LOCAL_ONLY = (
    "Only volunteers in the same local network can use this link, because the coordinator's address is private: "
    "give it a public one by tunnel='cloudflared' or tunnel='ngrok'."
)


@dataclass(frozen=True)
class WorkLink:
    """What a link says: where the coordinator is, and the invitation to its run."""

    url: str
    invite: Invite

    @classmethod
    def issue(cls, url: str, entrance: RunAccess, identity: Signs, *, hours: float) -> WorkLink:
        """A new one, by the authority of the run, good for ``hours``."""
        until = time.time() + 3600 * hours
        if entrance.closed is None:
            return cls(url, Invite(entrance.run_id, (), until))
        secret = os.urandom(32)
        key, member_until = Identity(secret).public_key, until + AuthoritySettings.member_s
        grant = Grant(entrance.run_id, Role.WORKER, key, until, member_until).signed(identity.sign)
        invite = Invite.issue(grant, secret, (), access="invite", authority=identity.public_key)
        return cls(url, invite)

    @classmethod
    def parse(cls, text: str) -> WorkLink:
        """Read a link.

        Raises:
            InviteError: it is no link to a coordinator, or is mistyped, tampered with or expired.
        """
        url = text.strip().strip("'\"").partition("#")[0]
        if url.startswith(PROJECT_URL):
            raise InviteError(
                "this invites to a swarm, not to a coordinator: swarm = cs.join(link), then swarm.volunteer()"
            )
        if not url.startswith(("http://", "https://")) or "#" not in text:
            raise InviteError("this is no link to a coordinator: it looks like https://HOST/#NAME.PAYLOAD")
        return cls(url, Invite.parse(text))

    @property
    def authority(self) -> bytes | None:
        """Public key of the run's authority; None where everybody may join."""
        return None if self.invite.access == "open" else self.invite.authority

    def token(self, identity: Identity) -> Token:
        """What lets the peer with this key in.

        Raises:
            InviteError: the organizer has to be asked first.
        """
        grant = self.invite.grant
        if grant is None:
            return Token(identity)
        if not grant.offline:
            raise InviteError(
                "the organizer wants to admit each peer of this run: swarm = cs.join(invitation), "
                "then swarm.volunteer(link)"
            )
        membership = Membership.by_invitation(
            grant, self.invite.key, key=identity.public_key, now=time.time()
        )
        return Token(identity, membership.encode())

    def shown(self) -> Invitation:
        """As people meet it."""
        name, expires_at = self.invite.name, self.invite.expires_at
        return Invitation(
            str(self),
            run=name,
            role="volunteer",
            expires_at=expires_at,
            purpose="volunteer",
            warning=LOCAL_ONLY if is_local(host_of(self.url)) else "",
        )

    def __str__(self) -> str:
        return f"{self.url}#{str(self.invite).partition('#')[2]}"

    def __repr__(self) -> str:
        return f"WorkLink({self.url}, {self.invite.name})"


logger = logging.getLogger(__name__)

LINK_HOURS = 7 * 24.0

VIEWS = Views(
    render_html,
    render_text,
    summary,
    lambda status: status.overview.finished is not None,
    "coordinator",
    ("Stop", "Stopped"),
)

_coordinators: set[Coordinator] = set()


class CoordinatorOptions(TypedDict, total=False):
    """How a coordinator works; everything has a default.

    Attributes:
        folder: for its key, its store, data and uploads; the same folder goes on where it stopped. The job's name with
            ``-work`` behind it, in the working directory, by default.
        store: address of the job's state: a file of SQLite in the folder by default; see `open_store`.
        servers: parameter servers; ``auto``, the default, follows the results that wait.
        host, port: to listen on; all interfaces, and the port of last time or a free one.
        url: where volunteers reach it, such as ``https://train.example.org``, if something forwards to it.
        tunnel: ``ngrok`` or ``cloudflared``: lead a public https address to it.
    """

    folder: str | Path
    store: str
    servers: int | Literal["auto"]
    host: str
    port: int
    url: str
    tunnel: Literal["ngrok", "cloudflared"]


@dataclass(frozen=True)
class RunContext:
    """In which run a coordinator serves.

    Attributes:
        run_id: of it.
        token: of the peer that coordinates.
        admission: who may volunteer; None where everybody may.
        invite: makes the link to an address, good for so many hours.
    """

    run_id: str
    token: Token
    admission: MembershipAdmission | None
    invite: Callable[[str, float], WorkLink]


class CoordinatorRuntime:
    """All that runs for one coordinator, on the runtime's loop."""

    def __init__(
        self, job: Job, seat: RunContext, options: CoordinatorOptions, store: ParameterStore
    ) -> None:
        self.job, self.store = job, store
        self.folder, self._options = _folder(job, options), options
        settings = CoordinationSettings(self.folder, _store_url(job, options), options.get("servers", "auto"))
        self.coordination = Coordination(job, store, seat.token, seat.run_id, settings)
        self._gate = RequestGate(seat.admission)
        self._server: CoordinatorServer | None = None
        self._tunnel: Tunnel | None = None
        self.url = options.get("url", "")

    async def open(self, tunnel: TunnelSettings | None) -> None:
        """Start all of it, or nothing."""
        try:
            await self.coordination.start()
            self._server = CoordinatorServer(
                self.coordination, Uploads(self.coordination, self.folder / "uploads"), self._gate
            )
            port = await self._listen(self._server)
            if tunnel is not None:
                events = EventLog()
                self._tunnel = await Tunnel(
                    tunnel, port, on_change=self._on_tunnel, events=events, sent_bytes=float
                ).open()
                self._on_tunnel(self._tunnel.address)
            elif not self.url:
                found = reachable_addresses(self._options.get("host", "0.0.0.0"), port)
                self.url = f"http{found[min(1, len(found) - 1)].removeprefix('ws')}/"  # the first is loopback
        except BaseException:
            await self.close()
            raise

    async def _listen(self, server: CoordinatorServer) -> int:
        """The port of last time is tried first, so that links stay good."""
        host, kept = self._options.get("host", ""), self.folder / "port"
        wanted = self._options.get("port", 0)
        if not wanted and kept.exists():
            with contextlib.suppress(OSError, ValueError):
                await server.start(host, int(kept.read_text()))
                return int(kept.read_text())
        await server.start(host, wanted)
        port = urlsplit(server.url).port or 0
        kept.write_text(str(port))
        return port

    def _on_tunnel(self, address: str | None) -> None:
        if address is not None:
            self.url = f"http{address.removeprefix('ws')}/"
            logger.info("volunteers reach this coordinator at %s", self.url)

    async def close(self) -> None:
        """End all of it; the job can be gone on with from its folder."""
        if self._tunnel is not None:
            await self._tunnel.close()
        if self._server is not None:
            await self._server.close()
        await self.coordination.stop()


class Coordinator:
    """A coordinator at work in the background. Give its ``link`` to volunteers; show it, `watch` it, `wait` for it.

    Attributes:
        link: lets volunteers in, for a week; a secret. In a notebook it shows itself with a QR code and badges.
    """

    def __init__(
        self, runtime: Runtime, office: CoordinatorRuntime, seat: RunContext, taken: contextlib.ExitStack
    ) -> None:
        """``taken``: what is let go of at the end."""
        self._runtime, self._office, self._seat, self._taken = runtime, office, seat, taken
        self.link = self.invite()
        self.stopped = False

    @property
    def url(self) -> str:
        """Of the status page; anybody who can reach it may look."""
        return self._office.url

    def invite(self, *, hours: float = LINK_HOURS) -> Invitation:
        """A link that lets volunteers in for ``hours``; those who came by it stay a week longer."""
        return self._seat.invite(self.url, hours).shown()

    @property
    def servers(self) -> int | Literal["auto"]:
        """Parameter servers; may be set at any time."""
        return self._office.coordination.servers

    @servers.setter
    def servers(self, servers: int | Literal["auto"]) -> None:
        if servers != "auto" and servers < 1:
            raise ValueError(f"servers={servers}: it must be 1 at least, or 'auto'")
        self._office.coordination.servers = servers

    def snapshot(self) -> JobStatus:
        """Where the job stands."""

        async def look() -> JobStatus:
            return self._office.coordination.status()

        return self._runtime.call(look())

    def log(self) -> list[AnyEntry]:
        """All that happened to the job, in order: see `colab_swarm.workunits.state`."""
        return [entry for _, entry in self._office.store.entries()]

    def model(self) -> nn.Module:
        """The job's model with the newest parameters."""
        model = self._office.job.first_model()
        self._office.coordination.schema.load(model, self._office.store.parameters().values)
        return model

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the job is done; returns whether it is, after ``seconds`` at most."""

        async def waiting() -> bool:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._office.coordination.wait_finished()
                    return True
            return False

        return self._runtime.call(waiting())

    def stop(self) -> None:
        """Coordinate no more; `coordinate` with the same folder goes on. Idempotent."""
        if not self.stopped:
            self.stopped = True
            _coordinators.discard(self)
            with self._taken:
                self._runtime.call(self._office.close())

    def panel(self) -> Panel[JobStatus]:
        """A live view: widgets in a notebook, text elsewhere."""
        return Panel(self.snapshot, self.stop, views=VIEWS)

    def watch(self, seconds: float | None = None) -> None:
        """Show the job for ``seconds``, or until it is done or you interrupt; it goes on afterwards."""
        self.panel().watch(seconds)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Coordinator({summary(self.snapshot())})"

    def _repr_html_(self) -> str:
        return render_html(self.snapshot())


def coordinate(
    job: Job | str | Path,
    *,
    access: Access = "invite",
    accept_terms: bool = False,
    **options: Unpack[CoordinatorOptions],
) -> Coordinator:
    """Hand out a job to volunteers, and make their results part of the model (VC-ASGD).

    A coordinator that died, or was stopped, goes on from its folder; the link stays good. Calling it again while it
    works gives the same coordinator (re-run cells freely).

    Args:
        job: a `Job`, or the file that defines one.
        access: who may volunteer: whoever has the link (``invite``), or everybody (``open``).
        accept_terms: that the platform's terms allow this; asked for on Colab.
        **options: see `CoordinatorOptions`.

    Raises:
        FileNotFoundError, ValueError, TypeError: the job or an option is not usable.
        StoreError: the store cannot be used.
        TermsError: the platform's terms have not been read.
        TunnelError, SecretError: the tunnel cannot be opened.
        OSError: the port cannot be listened on.
    """
    job = job if isinstance(job, Job) else Job.load(job)
    if access == "allowlist":
        raise ValueError("access='allowlist' needs a swarm: cs.create(…, access='allowlist').coordinate(job)")
    require_terms(accept_terms)
    key_file = _folder(job, options) / "organizer.key"
    key_file.parent.mkdir(parents=True, exist_ok=True)
    identity = Identity.load_or_create(key_file)
    entrance = RunAccess.found(job.name, identity, access=access, allow=None, key_file=key_file)
    seat = RunContext(
        entrance.run_id,
        Token(identity),
        entrance.admission,
        lambda url, hours: WorkLink.issue(url, entrance, identity, hours=hours),
    )
    return open_coordinator(job, seat, options)


def open_coordinator(job: Job, seat: RunContext, options: CoordinatorOptions) -> Coordinator:
    """Begin to coordinate ``job`` in a run; see `coordinate`."""
    folder = _folder(job, options)
    for other in _coordinators:
        if other._office.folder == folder:
            return other
    tunnel = settings_of(options["tunnel"]) if "tunnel" in options else None
    folder.mkdir(parents=True, exist_ok=True)
    runtime = Runtime.shared()
    with contextlib.ExitStack() as taken:
        _take(folder, taken)
        store = open_store(_store_url(job, options), job.name)
        taken.callback(store.close)
        office = runtime.call(_opened(job, seat, options, store, tunnel))
        coordinator = Coordinator(runtime, office, seat, taken.pop_all())
    _coordinators.add(coordinator)
    return coordinator


def _take(folder: Path, taken: contextlib.ExitStack) -> None:
    """Lock a folder: two coordinators would not know of each other's decisions."""
    lock = FileLock(folder / "lock", thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        told = f"another coordinator works in {folder}: stop it first, or give another folder"
        raise ValueError(told) from error
    taken.callback(lock.release)


async def _opened(
    job: Job,
    seat: RunContext,
    options: CoordinatorOptions,
    store: ParameterStore,
    tunnel: TunnelSettings | None,
) -> CoordinatorRuntime:
    office = CoordinatorRuntime(job, seat, options, store)
    await office.open(tunnel)
    return office


def _folder(job: Job, options: CoordinatorOptions) -> Path:
    return Path(options.get("folder", f"{job.name}-work")).resolve()


def _store_url(job: Job, options: CoordinatorOptions) -> str:
    return options.get("store", str(_folder(job, options) / "job.db"))


@atexit.register
def _stop_all() -> None:
    for coordinator in list(_coordinators):
        with contextlib.suppress(Exception):
            coordinator.stop()
