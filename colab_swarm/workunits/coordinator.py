"""`cs.workunits.coordinate`: hand a job out to volunteers in work units.

A link lets volunteers in. It is the coordinator's address, and after ``#`` the content of an invitation:

    https://example.org/#NAME.PAYLOAD

In a browser it opens the status page; the part after ``#`` never reaches the server.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import time
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
from colab_swarm.net.membership import Grant, Membership
from colab_swarm.net.peers import Peers, Role
from colab_swarm.net.tunnels import Tunnel, TunnelSettings, settings_of
from colab_swarm.notebook.coordinator_view import draw, summary
from colab_swarm.notebook.invitation import Invitation
from colab_swarm.notebook.panel import Panel, Views
from colab_swarm.notebook.platforms import require_terms
from colab_swarm.runtime import Runtime
from colab_swarm.trust.access import RunAccess
from colab_swarm.trust.authority import AuthoritySettings
from colab_swarm.workunits.coordination import Coordination
from colab_swarm.workunits.job import Job
from colab_swarm.workunits.overview import JobStatus
from colab_swarm.workunits.state import AnyEntry
from colab_swarm.workunits.store import open_store
from colab_swarm.workunits.tokens import RequestGate, Token
from colab_swarm.workunits.web import CoordinatorServer

logger = logging.getLogger(__name__)
LOCAL_ONLY = (
    "Only volunteers in the same local network can use this link, because the coordinator's address is private: "
    "give it a public one by tunnel='cloudflared' or tunnel='ngrok'."
)
LINK_HOURS = 7 * 24.0
VIEWS = Views(
    draw,
    summary,
    lambda status: status.overview.finished is not None,
    "coordinator",
    ("Stop", "Stopped"),
)
_coordinators: set[Coordinator] = set()


@dataclass(frozen=True)
class WorkLink:
    """The content of a link: the coordinator's address, and the invitation to its run."""

    url: str
    invite: Invite

    @classmethod
    def issue(cls, url: str, entrance: RunAccess, identity: Identity | Peers, *, hours: float) -> WorkLink:
        """Issue a link as the authority of the run, valid for ``hours``."""
        until = time.time() + 3600 * hours
        if entrance.closed is None:
            return cls(url, Invite(entrance.run_id, (), until))
        secret = os.urandom(32)
        key, member_until = Identity(secret).public_key, until + AuthoritySettings.member_s
        grant = Grant(entrance.run_id, Role.WORKER, key, until, member_until).signed(identity.sign)
        return cls(url, Invite.issue(grant, secret, (), access="invite", authority=identity.public_key))

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
        """Public key of the run's authority; None in an open run."""
        return None if self.invite.access == "open" else self.invite.authority

    def token(self, identity: Identity) -> Token:
        """Return the token of the peer of this key; raise InviteError if the organizer must admit each peer."""
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
        """Return the link as an invitation that displays itself."""
        return Invitation(
            str(self),
            run=self.invite.name,
            role="volunteer",
            expires_at=self.invite.expires_at,
            purpose="volunteer",
            warning=LOCAL_ONLY if is_local(host_of(self.url)) else "",
        )

    def __str__(self) -> str:
        return f"{self.url}#{str(self.invite).partition('#')[2]}"

    def __repr__(self) -> str:
        return f"WorkLink({self.url}, {self.invite.name})"


class CoordinatorOptions(TypedDict, total=False):
    """Options of a coordinator; everything has a default.

    Attributes:
        folder: for its key, its store, data and uploads; the same folder resumes the job. By default the job's name
            with ``-work`` appended, in the working directory.
        store: address of the job's state, see `open_store`; by default an SQLite file in the folder.
        servers: number of parameter servers; ``auto``, the default, follows the waiting results.
        host, port: to listen on; by default all interfaces, and the same port as last time or a free one.
        url: where volunteers reach it, such as ``https://train.example.org``, if something forwards to it.
        tunnel: ``ngrok`` or ``cloudflared``: open a public https address for it.
    """

    folder: str | Path
    store: str
    servers: int | Literal["auto"]
    host: str
    port: int
    url: str
    tunnel: Literal["ngrok", "cloudflared"]


class Coordinator(contextlib.AbstractContextManager["Coordinator"]):
    """A coordinator that works in the background. Send its ``link`` to volunteers; show it, `watch` it, `wait` for it.

    Attributes:
        link: lets volunteers in for a week; a secret. In a notebook it shows itself with a QR code and badges.
        url: address of the status page, which is public.
        stopped: True after `stop`.
    """

    link: Invitation

    def __init__(self, runtime: Runtime, coordination: Coordination, access: RunAccess, token: Token) -> None:
        self.url, self.stopped = "", False
        self._runtime, self._coordination, self._access, self._token = runtime, coordination, access, token
        self._server = CoordinatorServer(coordination, RequestGate(access.admission))
        self._tunnel: Tunnel | None = None
        self._held = contextlib.ExitStack()  # lock and store, until `stop`

    async def _start(self, options: CoordinatorOptions, tunnel: TunnelSettings | None) -> None:
        """Start all parts, or none."""
        host, self.url = options.get("host", ""), options.get("url", "")
        try:
            await self._coordination.start()
            port = await self._listen(host, options.get("port", 0))
            if tunnel is not None:
                self._tunnel = await Tunnel(
                    tunnel, port, on_change=self._on_tunnel, events=EventLog(), sent_bytes=float
                ).open()
                self._on_tunnel(self._tunnel.address)
            elif not self.url:
                found = reachable_addresses(options.get("host", "0.0.0.0"), port)
                self.url = f"http{found[min(1, len(found) - 1)].removeprefix('ws')}/"  # the first is loopback
        except BaseException:
            await self._close()
            raise

    async def _listen(self, host: str, wanted: int) -> int:
        """Return the port. That of last time is tried first, so that links stay valid."""
        saved = self._coordination.folder / "port"
        if not wanted and saved.exists():
            with contextlib.suppress(OSError, ValueError):
                await self._server.start(host, int(saved.read_text()))
                return int(saved.read_text())
        await self._server.start(host, wanted)
        port = urlsplit(self._server.url).port or 0
        saved.write_text(str(port))
        return port

    def _on_tunnel(self, address: str | None) -> None:
        if address is not None:
            self.url = f"http{address.removeprefix('ws')}/"
            logger.info("volunteers reach this coordinator at %s", self.url)

    async def _close(self) -> None:
        if self._tunnel is not None:
            await self._tunnel.close()
        await self._server.close()
        await self._coordination.stop()

    def invite(self, *, hours: float = LINK_HOURS) -> Invitation:
        """Return a link that lets volunteers in for ``hours``; those who used it stay a week longer.

        Only the authority of a run issues links. A peer that joined a swarm passes its own invitation on.
        """
        if self._access.invitation is not None:
            return WorkLink(self.url, self._access.invitation).shown()
        return WorkLink.issue(self.url, self._access, self._token.identity, hours=hours).shown()

    @property
    def servers(self) -> int | Literal["auto"]:
        """Number of parameter servers; may be set at any time."""
        return self._coordination.servers

    @servers.setter
    def servers(self, servers: int | Literal["auto"]) -> None:
        self._coordination.servers = servers

    def snapshot(self) -> JobStatus:
        """Return the job's progress."""

        async def look() -> JobStatus:
            return self._coordination.status()

        return self._runtime.call(look())

    def log(self) -> list[AnyEntry]:
        """Return all that happened to the job, in order: see `colab_swarm.workunits.state`."""
        return [entry for _, entry in self._coordination.store.entries()]

    def model(self) -> nn.Module:
        """Return the job's model with the newest parameters."""
        model = self._coordination.job.first_model()
        self._coordination.schema.load(model, self._coordination.store.parameters().values)
        return model

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the job is done, ``seconds`` at most; return True if it is."""

        async def waiting() -> bool:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._coordination.wait_finished()
                    return True
            return False

        return self._runtime.call(waiting())

    def stop(self) -> None:
        """Stop coordinating; `coordinate` with the same folder resumes the job. Idempotent."""
        if not self.stopped:
            self.stopped = True
            _coordinators.discard(self)
            with self._held:
                self._runtime.call(self._close())

    def panel(self) -> Panel[JobStatus]:
        """Return a live view: widgets in a notebook, text elsewhere."""
        return Panel(self.snapshot, self.stop, views=VIEWS)

    def watch(self, seconds: float | None = None) -> None:
        """Show the job for ``seconds``, or until it is done or you interrupt. The job continues afterwards."""
        self.panel().watch(seconds)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Coordinator({summary(self.snapshot())})"

    def _repr_html_(self) -> str:
        return draw(self.snapshot()).html()


def coordinate(
    job: Job | str | Path,
    *,
    access: Access = "invite",
    accept_terms: bool = False,
    **options: Unpack[CoordinatorOptions],
) -> Coordinator:
    """Hand a job out to volunteers and merge their results into the model (VC-ASGD).

    A coordinator that died or was stopped resumes from its folder, and its link stays valid. Calling this again while
    it works returns the same coordinator, so you can re-run cells freely.

    Args:
        job: a `Job`, or the file that defines one.
        access: who may volunteer: everyone with the link (``invite``), or everyone (``open``).
        accept_terms: True if the platform's terms allow this; needed on Colab.
        **options: see `CoordinatorOptions`.

    Raises:
        FileNotFoundError, ValueError, TypeError: the job or an option is not usable.
        StoreError: the store cannot be used.
        TermsError: the platform's terms are not accepted.
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
    return open_coordinator(job, entrance, Token(identity), options)


def open_coordinator(job: Job, access: RunAccess, token: Token, options: CoordinatorOptions) -> Coordinator:
    """Coordinate ``job`` in the run of ``access``, as the peer of ``token``; see `coordinate`."""
    folder = _folder(job, options)
    for other in _coordinators:
        if other._coordination.folder == folder:
            return other
    tunnel = settings_of(options["tunnel"]) if "tunnel" in options else None
    folder.mkdir(parents=True, exist_ok=True)
    runtime = Runtime.shared()
    with contextlib.ExitStack() as held:
        lock = FileLock(folder / "lock", thread_local=False)
        try:
            lock.acquire(timeout=0)  # two coordinators would not know of each other's decisions
        except Timeout as error:
            raise ValueError(
                f"another coordinator works in {folder}: stop it first, or give another folder"
            ) from error
        held.callback(lock.release)
        store = open_store(options.get("store", str(folder / "job.db")), job.name)
        held.callback(store.close)
        servers = options.get("servers", "auto")
        coordination = Coordination(job, store, token, access.run_id, folder, servers=servers)
        coordinator = Coordinator(runtime, coordination, access, token)
        runtime.call(coordinator._start(options, tunnel))
        coordinator.link = coordinator.invite()
        coordinator._held = held.pop_all()
    _coordinators.add(coordinator)
    return coordinator


def _folder(job: Job, options: CoordinatorOptions) -> Path:
    return Path(options.get("folder", f"{job.name}-work")).resolve()


@atexit.register
def _stop_all() -> None:
    for coordinator in list(_coordinators):
        with contextlib.suppress(Exception):
            coordinator.stop()
