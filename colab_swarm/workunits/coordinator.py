"""`cs.workunits.coordinate`: hand a job out to volunteers in work units.

A `Coordinator` owns the job's log, the web server for the volunteers (`web`), and the parameter servers
(`servers`), which merge accepted results into the parameters.
"""

import asyncio
import atexit
import contextlib
import logging
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypedDict, Unpack
from urllib.parse import urlsplit

from filelock import FileLock, Timeout
from torch import nn

from colab_swarm.errors import StoreError, require
from colab_swarm.events import EventLog
from colab_swarm.invite import Access, Invite
from colab_swarm.net.addresses import host_of, is_local, reachable_addresses
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Role
from colab_swarm.net.tunnels import Tunnel, TunnelSettings, settings_of
from colab_swarm.notebook.invitation import Invitation
from colab_swarm.notebook.panel import Panel
from colab_swarm.notebook.platforms import Consent, require_terms, require_tunnels
from colab_swarm.notebook.units_view import JOB_VIEWS, draw_job
from colab_swarm.runtime import Runtime, on_loop
from colab_swarm.trust.access import RunAccess
from colab_swarm.trust.authority import make_grant
from colab_swarm.workunits.dispatcher import Dispatcher, JobLog
from colab_swarm.workunits.job import Job, lay_out
from colab_swarm.workunits.messages import JobCard, RequestGate, Subset, Token, waited
from colab_swarm.workunits.servers import ParameterServer, ServerPool, ServerProcess
from colab_swarm.workunits.state import MARKS, MAX_MARKS, AnyEntry, JobStatus, Unit
from colab_swarm.workunits.store import ParameterStore, open_store
from colab_swarm.workunits.web import CoordinatorServer
from colab_swarm.workunits.weights import Schema

logger = logging.getLogger(__name__)
LOCAL_ONLY = (
    "Only volunteers in the same local network can use this link, because the coordinator's address is private: "
    "give it a public one by tunnel='cloudflared' or tunnel='ngrok'."
)
_coordinators: "set[Coordinator]" = set()


class CoordinatorOptions(TypedDict, total=False):
    """Options of a coordinator. All of them have defaults.

    Attributes:
        folder: folder of the coordinator's key, its store and the data. A coordinator with the same folder resumes
            the job. By default JOB-work.
        store: address of the job's state for `open_store`. By default an SQLite file in the folder.
        servers: number of parameter servers. With ``auto``, the default, it depends on how many results wait.
        host, port: where to listen. By default on all interfaces, and on the same port as last time or a free port.
        url: if a proxy forwards to the coordinator, the address at which volunteers reach it, such as
            ``https://train.example.org``.
        tunnel: ``ngrok`` or ``cloudflared``, to open a public https address for the coordinator.
        accept_terms: True if the platform's terms allow coordinating, as Colab requires. "tunnels" if the terms also
            allow the tunnel, as Colab, Kaggle and Binder require for a tunnel.
    """

    folder: str | Path
    store: str
    servers: int | Literal["auto"]
    host: str
    port: int
    url: str
    tunnel: Literal["ngrok", "cloudflared"]
    accept_terms: Consent


class Coordinator(contextlib.AbstractContextManager["Coordinator"]):
    """A coordinator in the background. Volunteers can join with its ``link``, a secret, for a week.

    On an event loop use `start`, ``finished``, `status` and `shut_down`. From other threads use the other methods.
    ``access`` checks who belongs to the run, and ``token`` signs for this peer. The coordinator checks for passed
    deadlines every ``tick_s`` seconds. The caller closes the store. ``url`` is the address of the public status page.
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
    ) -> None:
        self.job = job
        self.store = store
        self.folder = folder
        text = f"servers={servers!r}: it must be a whole number, 1 at least, or 'auto'"
        require(servers == "auto" or (isinstance(servers, int) and servers >= 1), text)
        # may be set at any time
        self.servers = servers
        self.url = ""
        self.stopped = False
        self._tick_s = tick_s
        self._since = time.time()
        self._token = token
        self._access = access
        model = job.first_model()
        self.schema = Schema.of(model)
        subsets, most = lay_out(job, folder / "data")
        store.begin(self.schema.flatten(model))
        self._write_code()
        self.card = self._signed_card(subsets)
        self.dispatcher = Dispatcher(job.plan, len(subsets), random.SystemRandom())
        self._log = JobLog(self.dispatcher, store)
        self.finished = self._log.finished
        gate = RequestGate(access.admission)
        self.server = CoordinatorServer(job, self.card, most, self._log, folder, gate, self.status)
        self._pool = ServerPool(self._start_server)
        self._upkeep: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._tunnel: Tunnel | None = None
        # holds the lock and the store until `close`
        self._held = contextlib.ExitStack()

    def _write_code(self) -> None:
        """Write the job's file for the server processes, which measure the accuracy with this job's settings."""
        plan = self.job.plan
        settings = f"seed={plan.seed}, validation_samples={plan.validation_samples}"
        code = f"{self.job.code}\njob = job.with_plan({settings})\n"
        (self.folder / "job.py").write_text(code, encoding="utf-8")

    def _signed_card(self, subsets: tuple[Subset, ...]) -> JobCard:
        identity = self._token.identity
        card = JobCard(
            run_id=self._access.run_id,
            name=self.job.name,
            key=identity.public_key,
            membership=self._token.membership(),
            code=self.job.code,
            local_epochs=self.job.plan.local_epochs,
            batch_size=self.job.plan.batch_size,
            schema=self.schema.head(),
            subsets=subsets,
        )
        return card.signed(identity.sign)

    def invite(self, *, hours: float = 7 * 24.0) -> Invitation:
        """Return a link with which volunteers can join for ``hours``. They may stay a week longer.

        If the run has an allowlist, volunteers must join the swarm first. If this peer has joined the run of another
        peer, the link contains the invitation with which this peer joined, and ``hours`` has no effect.
        """
        invite = self._access.invitation or issue(self._access, self._token.identity, hours=hours)
        return invitation_at(self.url, invite)

    def snapshot(self) -> JobStatus:
        return Runtime.shared().call(on_loop(self.status))

    def log(self) -> list[AnyEntry]:
        """Return all entries of the job's log, in order. `colab_swarm.workunits.state` describes them."""
        return [entry for _, entry in self.store.entries()]

    def model(self) -> nn.Module:
        """Return the job's model with the newest parameters."""
        model = self.job.first_model()
        self.schema.load(model, self.store.parameters().values)
        return model

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the job is done, or for ``seconds``; return True if the job is done."""
        Runtime.shared().call(waited(self.finished.wait(), seconds))
        return self.finished.is_set()

    def close(self) -> None:
        """Stop coordinating. `coordinate` with the same folder resumes the job. Idempotent."""
        if not self.stopped:
            self.stopped = True
            _coordinators.discard(self)
            atexit.unregister(self.close)
            with self._held:
                Runtime.shared().call(self.shut_down())

    def panel(self) -> Panel[JobStatus]:
        """Return a live view: widgets in a notebook, text elsewhere."""
        return Panel(self.snapshot, self.close, views=JOB_VIEWS)

    def watch(self, seconds: float | None = None) -> None:
        """Show the job for ``seconds``, or until the job is done or you interrupt. The job continues afterwards."""
        self.panel().watch(seconds)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Coordinator({draw_job(self.snapshot()).line})"

    def _repr_html_(self) -> str:
        return draw_job(self.snapshot()).html()

    async def start(self, options: CoordinatorOptions, tunnel: TunnelSettings | None = None) -> None:
        """Begin the job, or resume it where its log ends. If one part cannot start, stop all parts and raise."""
        host = options.get("host", "")
        self.url = options.get("url", "")
        try:
            await self._log.begin()
            self._upkeep = asyncio.create_task(self._keep_up(), name="coordinate")
            port = await self._listen(host, options.get("port", 0))
            if tunnel is not None:
                self._tunnel = Tunnel(
                    tunnel, port, on_change=self._set_url, events=EventLog(), sent_bytes=float
                )
                relayed = await self._tunnel.open()
                self._set_url(relayed.address)
            if not self.url:
                addresses = reachable_addresses(host or "0.0.0.0", port)
                # the first address is loopback
                self._set_url(addresses[min(1, len(addresses) - 1)])
        except BaseException:
            await self.shut_down()
            raise

    async def _listen(self, host: str, port: int) -> int:
        """Listen on ``port``; return the port. If ``port`` is 0, use the port of last time, or a free port."""
        saved = self.folder / "port"
        if not port:
            with contextlib.suppress(OSError, ValueError):
                await self.server.start(host, int(saved.read_text()))
        if not self.server.url:
            await self.server.start(host, port)
            saved.write_text(str(urlsplit(self.server.url).port))
        return urlsplit(self.server.url).port or 0

    def _set_url(self, address: str | None) -> None:
        if address is not None:
            self.url = f"http{address.removeprefix('ws')}/"
            logger.info("volunteers reach this coordinator at %s", self.url)

    async def shut_down(self) -> None:
        if self._tunnel is not None:
            await self._tunnel.close()
        await self.server.close()
        if self._upkeep is not None:
            self._stopping.set()
            # wait for this task and do not cancel it, because its threads use the store and start servers
            await self._upkeep
            await asyncio.to_thread(self._pool.close)

    async def _keep_up(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._keep_servers()
            except StoreError:
                # the log has reported the error, and the next tick retries
                pass
            except Exception as error:
                # the coordinator still answers volunteers
                if self._log.fault != str(error):
                    logger.exception("upkeep of the job failed")
                    self._log.fault = str(error)
            await waited(self._stopping.wait(), self._tick_s)

    async def _keep_servers(self) -> None:
        async with self._log.deciding() as now:
            backlog = self.dispatcher.state.backlog
        wanted = self.servers
        if wanted == "auto":
            wanted = self._pool.wanted(backlog, now=now)
        if self.finished.is_set():
            wanted = 0
        await asyncio.to_thread(self._pool.keep, wanted, now=now)

    def _start_server(self, name: str) -> ParameterServer | ServerProcess:
        if self.store.shared and self.job.code:
            return ServerProcess(self.store.url, self.job.name, self.folder / "job.py", name)
        server = ParameterServer(self.store, self.job, name)
        server.start()
        return server

    def status(self) -> JobStatus:
        now = time.time()
        plan = self.job.plan
        state = self.dispatcher.state
        epoch = self.dispatcher.epoch
        units = [state.units[Unit(epoch, subset)] for subset in range(state.subsets)]
        marks = [unit.mark for unit in units]
        # units that failed wait again
        counts = dict.fromkeys(("waiting", "training", "queued", "assimilated"), 0)
        for mark in marks:
            counted_as = "waiting" if mark in MARKS.values() else mark
            counts[counted_as] += 1
        # copies of the records, sorted by accepted units
        volunteers = [replace(record) for record in state.volunteers.values()]
        volunteers.sort(key=lambda record: -record.accepted)
        staleness = [unit.staleness for unit in units if unit.staleness is not None]
        rows = tuple(subset.rows for subset in self.card.subsets)
        units_per_s = self._units_per_s(now)
        return JobStatus(
            name=self.job.name,
            at=now,
            since=self._since,
            target_accuracy=plan.target_accuracy,
            rows=rows,
            numel=self.schema.numel,
            version=state.version,
            servers=self._pool.size,
            server_deaths=self._pool.deaths,
            backlog=state.backlog,
            fault=self._log.fault,
            epoch=epoch,
            max_epochs=plan.max_epochs,
            finished=state.finished,
            volunteers=tuple(volunteers),
            epochs=tuple(state.epochs),
            units=counts,
            marks=tuple(marks[:MAX_MARKS]),
            staleness=sum(staleness) / len(staleness) if staleness else None,
            update_s=tuple(sorted(state.update_s)),
            units_per_s=units_per_s,
            samples_per_s=units_per_s * plan.local_epochs * sum(rows) / len(rows),
        )

    def _units_per_s(self, now: float) -> float:
        """Return the rate of the latest assimilations, in units per second."""
        state = self.dispatcher.state
        times = state.assimilated_at
        if state.finished or not times or now <= times[0]:
            return 0.0
        return len(times) / (now - times[0])


def issue(access: RunAccess, identity: Identity | Node, *, hours: float) -> Invite:
    """Issue an invitation as the run's authority, valid for ``hours``.

    In a run with an allowlist, the authority must also admit each peer.
    """
    end = time.time() + 3600 * hours
    if access.admission is None:
        return Invite(access.run_id, (), end)
    grant, secret = make_grant(access.run_id, Role.WORKER, identity.sign, join_until=end, allow=access.allow)
    return Invite.issue(grant, secret, (), access=access.access, authority=identity.public_key)


def invitation_at(url: str, invite: Invite) -> Invitation:
    """Return the link of a coordinator at ``url``. `parse_link` reads the link."""
    return Invitation(
        f"{url}#{invite.code}",
        run=invite.name,
        role="volunteer",
        expires_at=invite.expires_at,
        notebook="volunteer",
        warning=LOCAL_ONLY if is_local(host_of(url)) else "",
    )


def coordinate(
    job: Job | str | Path,
    *,
    access: Access = "invite",
    **options: Unpack[CoordinatorOptions],
) -> Coordinator:
    """Hand a job out to volunteers and merge their results into the model (VC-ASGD).

    A coordinator that died or was stopped resumes from its folder, and its link stays valid. A second call while
    the coordinator works returns the same coordinator. Raises FileNotFoundError, ValueError or TypeError if the job
    or an option is not usable. Raises StoreError or OSError if the store or the port cannot be used, and TunnelError or
    SecretError if the tunnel cannot be used. Raises TermsError if the platform's terms are not accepted.

    Args:
        job: a `Job`, or the path of a file that defines one.
        access: ``invite`` admits everyone with the link, ``open`` admits everyone.
        **options: see `CoordinatorOptions`.
    """
    if not isinstance(job, Job):
        job = Job.load(job)
    require(access != "allowlist", "access='allowlist' needs a swarm: use swarm.work.coordinate(job)")
    require_terms(options.get("accept_terms", False))
    key_file = _folder(job, options) / "organizer.key"
    key_file.parent.mkdir(parents=True, exist_ok=True)
    identity = Identity.load_or_create(key_file)
    entrance = RunAccess.create(job.name, identity, access=access, allow=None, key_file=key_file)
    return open_coordinator(job, entrance, Token(identity), options)


def open_coordinator(job: Job, access: RunAccess, token: Token, options: CoordinatorOptions) -> Coordinator:
    """Coordinate ``job`` in the run of ``access``, as the peer of ``token``. Raises the errors of `coordinate`."""
    folder = _folder(job, options)
    for running in _coordinators:
        if running.folder == folder:
            return running
    require_tunnels(options.get("accept_terms", False), options.get("tunnel", ""))
    tunnel = settings_of(options["tunnel"]) if "tunnel" in options else None
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        lock = FileLock(folder / "lock", thread_local=False)
        try:
            # two coordinators would not know each other's decisions
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(f"another coordinator works in {folder}: stop it first") from error
        held.callback(lock.release)
        store = open_store(options.get("store", str(folder / "job.db")), job.name)
        held.callback(store.close)
        coordinator = Coordinator(job, store, token, access, folder, servers=options.get("servers", "auto"))
        Runtime.shared().call(coordinator.start(options, tunnel))
        coordinator.link = coordinator.invite()
        coordinator._held = held.pop_all()
    _coordinators.add(coordinator)
    atexit.register(coordinator.close)
    return coordinator


def _folder(job: Job, options: CoordinatorOptions) -> Path:
    return Path(options.get("folder", f"{job.name}-work")).resolve()
