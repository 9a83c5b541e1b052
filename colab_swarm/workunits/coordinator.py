"""`cs.workunits.coordinate`: hand a job out to volunteers in work units. The answers to them are in `desk`."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypedDict, Unpack
from urllib.parse import urlsplit

from filelock import FileLock, Timeout
from torch import nn

from colab_swarm.errors import StoreError
from colab_swarm.events import EventLog
from colab_swarm.invite import Access, Invite
from colab_swarm.net.addresses import host_of, is_local, reachable_addresses
from colab_swarm.net.identity import Identity
from colab_swarm.net.peers import Peers, Role
from colab_swarm.net.tunnels import Tunnel, TunnelSettings, settings_of
from colab_swarm.notebook.coordinator_view import draw, summary
from colab_swarm.notebook.invitation import Invitation
from colab_swarm.notebook.panel import Panel, Views
from colab_swarm.notebook.platforms import require_terms
from colab_swarm.runtime import Runtime
from colab_swarm.trust.access import RunAccess
from colab_swarm.trust.authority import make_grant
from colab_swarm.workunits.desk import (
    Desk,
    ProcessWorker,
    Staffing,
    ThreadWorker,
    WorkerPool,
)
from colab_swarm.workunits.job import Job
from colab_swarm.workunits.messages import RequestGate, Token, WorkLink
from colab_swarm.workunits.state import AnyEntry, JobStatus
from colab_swarm.workunits.store import ParameterStore, open_store
from colab_swarm.workunits.web import CoordinatorServer

logger = logging.getLogger(__name__)
LOCAL_ONLY = (
    "Only volunteers in the same local network can use this link, because the coordinator's address is private: "
    "give it a public one by tunnel='cloudflared' or tunnel='ngrok'."
)
LINK_HOURS = 7 * 24.0
VIEWS: Views[JobStatus] = Views(
    draw,
    summary,
    lambda status: bool(status.overview.finished),
    "coordinator",
    ("Stop", "Stopped"),
)
_coordinators: set[Coordinator] = set()


class CoordinatorOptions(TypedDict, total=False):
    """Options of a coordinator; everything has a default.

    Attributes:
        folder: for its key, its store, data and uploads; the same folder resumes the job. By
            default the job's name with ``-work`` appended, in the working directory.
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


class Coordinator(Desk, contextlib.AbstractContextManager["Coordinator"]):
    """A coordinator that works in the background. Send its ``link`` to volunteers; show it, `watch` it, `wait` for it.

    On an event loop use `start`, `wait_finished`, `status` and `close`; from other threads the rest.

    ``access`` is of the run of ``token``'s peer, ``tick_s`` the interval of the check for passed
    deadlines, ``clock`` gives seconds since the epoch. The caller closes the store.

    Attributes:
        link: lets volunteers in for a week; a secret. In a notebook it shows itself with a QR code and badges.
        url: address of the status page, which is public.
        stopped: True after `stop`.
    """

    link: Invitation

    def __init__(
        self,
        job: Job,
        store: ParameterStore,
        token: Token,
        access: RunAccess,
        folder: Path,
        *,
        servers: int | Literal["auto"] = "auto",
        tick_s: float = 0.5,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(job, store, folder, clock)
        self.url, self.stopped, self.servers = "", False, servers
        self._token, self._access = token, access
        self._tick_s, self._since = tick_s, clock()
        self.server = CoordinatorServer(self, RequestGate(access.admission), self.status)
        self._staffing, self._pool = Staffing(), WorkerPool(self._start_server)
        self._upkeep: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._tunnel: Tunnel | None = None
        self._held = contextlib.ExitStack()  # lock and store, until `stop`

    @property
    def servers(self) -> int | Literal["auto"]:
        """Number of parameter servers; may be set at any time."""
        return self._servers

    @servers.setter
    def servers(self, servers: int | Literal["auto"]) -> None:
        if servers != "auto" and servers < 1:
            raise ValueError(f"servers={servers}: it must be 1 at least, or 'auto'")
        self._servers = servers

    # -- for users

    def invite(self, *, hours: float = LINK_HOURS) -> Invitation:
        """Return a link that lets volunteers in for ``hours``; those who used it stay a week longer.

        Only the authority of a run issues links. A peer that joined a swarm passes its own invitation on. With an
        allowlist a link admits nobody by itself: volunteers join the swarm first.
        """
        if self._access.invitation is not None:
            return shown(WorkLink(self.url, self._access.invitation))
        return shown(issue(self.url, self._access, self._token.identity, hours=hours))

    def snapshot(self) -> JobStatus:
        """Return the job's progress."""

        async def look() -> JobStatus:
            return self.status()

        return Runtime.shared().call(look())

    def log(self) -> list[AnyEntry]:
        """Return all that happened to the job, in order: see `colab_swarm.workunits.state`."""
        return [entry for _, entry in self.store.entries()]

    def model(self) -> nn.Module:
        """Return the job's model with the newest parameters."""
        model = self.job.first_model()
        self.schema.load(model, self.store.parameters().values)
        return model

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the job is done, ``seconds`` at most; return True if it is."""

        async def waiting() -> bool:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.wait_finished()
            return self.finished.is_set()

        return Runtime.shared().call(waiting())

    def stop(self) -> None:
        """Stop coordinating; `coordinate` with the same folder resumes the job. Idempotent."""
        if not self.stopped:
            self.stopped = True
            _coordinators.discard(self)
            with self._held:
                Runtime.shared().call(self.close())

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

    # -- life

    async def start(self, options: CoordinatorOptions, tunnel: TunnelSettings | None = None) -> None:
        """Begin the job, or resume it where its log ends, and let volunteers in. All parts start, or none."""
        try:
            await self.open(self._token, self._access.run_id)
            self._upkeep = asyncio.create_task(self._keep_up(), name="coordinate")
            host, self.url = options.get("host", ""), options.get("url", "")
            port = await self._listen(host, options.get("port", 0))
            if tunnel is not None:
                self._tunnel = await Tunnel(
                    tunnel, port, on_change=self._on_tunnel, events=EventLog(), sent_bytes=float
                ).open()
                self._on_tunnel(self._tunnel.address)
            elif not self.url:
                found = reachable_addresses(host or "0.0.0.0", port)
                self.url = f"http{found[min(1, len(found) - 1)].removeprefix('ws')}/"  # the first is loopback
        except BaseException:
            await self.close()
            raise

    async def _listen(self, host: str, wanted: int) -> int:
        """Return the port. That of last time is tried first, so that links stay valid."""
        saved = self.folder / "port"
        if not wanted and saved.exists():
            with contextlib.suppress(OSError, ValueError):
                await self.server.start(host, int(saved.read_text()))
                return int(saved.read_text())
        await self.server.start(host, wanted)
        port = urlsplit(self.server.url).port or 0
        saved.write_text(str(port))
        return port

    def _on_tunnel(self, address: str | None) -> None:
        if address is not None:
            self.url = f"http{address.removeprefix('ws')}/"
            logger.info("volunteers reach this coordinator at %s", self.url)

    async def close(self) -> None:
        """Stop coordinating; the job can be resumed later. Idempotent."""
        if self._tunnel is not None:
            await self._tunnel.close()
        await self.server.close()
        upkeep, self._upkeep = self._upkeep, None
        if upkeep is not None:
            self._stopping.set()
            await upkeep  # not cancelled: its threads use the store, and start servers
            await asyncio.to_thread(self._pool.close)

    async def wait_finished(self) -> None:
        """Wait until the job is done."""
        await self.finished.wait()

    # -- upkeep

    async def _keep_up(self) -> None:
        while not self._stopping.is_set():
            try:
                async with self._lock:
                    await self._settle()
                wanted, now = self.servers, self._clock()
                if self.finished.is_set():
                    wanted = 0
                elif wanted == "auto":
                    wanted = self._staffing.on_backlog(
                        self.dispatcher.state.backlog, self._pool.size, now=now
                    )
                await asyncio.to_thread(self._pool.keep, wanted, now=now)
            except StoreError:
                pass  # the log has reported it, and the next round retries
            except Exception as error:  # volunteers are answered all the same
                if self.fault != str(error):
                    logger.exception("upkeep of the job failed")
                    self.fault = str(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s):
                    await self._stopping.wait()

    def _start_server(self, name: str) -> ThreadWorker | ProcessWorker:
        if not self.store.shared or not self.job.code:
            return ThreadWorker(self.store, self.job, name)
        return ProcessWorker(self.store.url, self.job.name, self.folder / "job.py", name)

    def status(self) -> JobStatus:
        """Return the job's progress."""
        now = self._clock()
        return JobStatus(
            name=self.job.name,
            at=now,
            since=self._since,
            target_accuracy=self.job.plan.target_accuracy,
            rows=tuple(subset.rows for subset in self.card.subsets),
            local_epochs=self.job.plan.local_epochs,
            numel=self.schema.numel,
            version=self.version,
            servers=self._pool.size,
            server_deaths=self._pool.deaths,
            backlog=self.dispatcher.state.backlog,
            fault=self.fault,
            overview=self.dispatcher.overview(now=now),
        )


def issue(url: str, access: RunAccess, identity: Identity | Peers, *, hours: float) -> WorkLink:
    """Issue a link as the authority of the run, valid for ``hours``. With an allowlist it admits nobody by itself."""
    until = time.time() + 3600 * hours
    if access.admission is None:
        return WorkLink(url, Invite(access.run_id, (), until))
    grant, secret = make_grant(
        access.run_id, Role.WORKER, identity.sign, join_until=until, allow=access.allow
    )
    return WorkLink(url, Invite.issue(grant, secret, (), access=access.access, authority=identity.public_key))


def shown(link: WorkLink) -> Invitation:
    """Return a link as an invitation that displays itself."""
    return Invitation(
        str(link),
        run=link.invite.name,
        role="volunteer",
        expires_at=link.invite.expires_at,
        purpose="volunteer",
        warning=LOCAL_ONLY if is_local(host_of(link.url)) else "",
    )


def coordinate(
    job: Job | str | Path,
    *,
    access: Access = "invite",
    accept_terms: bool = False,
    **options: Unpack[CoordinatorOptions],
) -> Coordinator:
    """Hand a job out to volunteers and merge their results into the model (VC-ASGD).

    A coordinator that died or was stopped resumes from its folder, and its link stays valid.
    Calling this again while it works returns the same coordinator, so you can re-run cells freely.

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
        if other.folder == folder:
            return other
    tunnel = settings_of(options["tunnel"]) if "tunnel" in options else None
    folder.mkdir(parents=True, exist_ok=True)
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
        coordinator = Coordinator(job, store, token, access, folder, servers=servers)
        Runtime.shared().call(coordinator.start(options, tunnel))
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
