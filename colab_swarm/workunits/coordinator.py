"""`cs.workunits.coordinate`: hand a job out to volunteers in work units.

`Coordinator` owns the job's log and what follows it: the web server (`web`), and parameter servers,
which merge accepted results into the parameters. Any number of these work on one store, each on a
thread or in a process of its own. They know nothing of each other, and hold no state.
"""

import asyncio
import atexit
import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TypedDict, Unpack
from urllib.parse import urlsplit

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import nn

from colab_swarm.dht.service import on_loop
from colab_swarm.errors import StoreError, require
from colab_swarm.events import EventLog
from colab_swarm.invite import Access, Invite
from colab_swarm.net.addresses import host_of, is_local, reachable_addresses
from colab_swarm.net.identity import Identity
from colab_swarm.net.peers import Peers, Role
from colab_swarm.net.tunnels import Tunnel, TunnelSettings, settings_of
from colab_swarm.notebook.invitation import Invitation
from colab_swarm.notebook.panel import Panel, Views
from colab_swarm.notebook.platforms import require_terms
from colab_swarm.notebook.units_view import draw_job, job_line
from colab_swarm.runtime import Runtime
from colab_swarm.trust.access import RunAccess
from colab_swarm.trust.authority import make_grant
from colab_swarm.workunits.dispatcher import Dispatcher, JobLog
from colab_swarm.workunits.job import Job, Rows, lay_out, measure
from colab_swarm.workunits.messages import JobCard, RequestGate, Token, backoff, waited
from colab_swarm.workunits.state import MARKS, MAX_MARKS, AnyEntry, JobStatus, Measured, Unit
from colab_swarm.workunits.store import KEEP_MEMORY, ParameterStore
from colab_swarm.workunits.stores import open_store
from colab_swarm.workunits.web import CoordinatorServer
from colab_swarm.workunits.weights import Floats, Schema, assimilate

logger = logging.getLogger(__name__)
LOCAL_ONLY = (
    "Only volunteers in the same local network can use this link, because the coordinator's address is private: "
    "give it a public one by tunnel='cloudflared' or tunnel='ngrok'."
)
VIEWS = Views(draw_job, job_line, lambda status: bool(status.finished), "coordinator", ("Stop", "Stopped"))
_coordinators: "set[Coordinator]" = set()
CROWD, GROW_S, SHRINK_S = 2.0, 2.0, 30.0
LEASE_S = 120.0  # a result whose server died goes to another after this time
IDLE_S, FAREWELL_S, LONGEST_PAUSE_S = 0.05, 30.0, 60.0
RETRY_S = 0.1, 30.0
STORE = "COLAB_SWARM_STORE"  # variable of a server process that holds the store's address


class CoordinatorOptions(TypedDict, total=False):
    """Options of a coordinator; everything has a default.

    Attributes:
        folder: for its key, its store and data; the same folder resumes the job. By default JOB-work.
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
    """A coordinator in the background. Its ``link``, a secret, lets volunteers in for a week.

    On an event loop use `start`, ``finished``, `status` and `close`; from other threads the rest.
    ``access`` is of the run of ``token``'s peer, ``tick_s`` the interval of the check for passed
    deadlines. The caller closes the store. ``url`` is the address of the public status page.
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
        self.job, self.store, self.folder, self.servers = job, store, folder, servers
        self.url, self.stopped, self._tick_s, self._since = "", False, tick_s, time.time()
        self._token, self._access = token, access
        self.schema, plan = Schema.of(model := job.first_model()), job.plan
        subsets, most = lay_out(job, folder / "data")
        store.begin(self.schema.flatten(model))
        measured = f"seed={plan.seed}, validation_samples={plan.validation_samples}"  # by server processes
        (folder / "job.py").write_text(f"{job.code}\njob = job.with_plan({measured})\n", encoding="utf-8")
        self.card = JobCard(
            run_id=access.run_id,
            name=job.name,
            key=token.identity.public_key,
            membership=token.membership(),
            code=job.code,
            local_epochs=plan.local_epochs,
            batch_size=plan.batch_size,
            schema=self.schema.head(),
            subsets=subsets,
        ).signed(token.identity.sign)
        self.dispatcher = Dispatcher(plan, [subset.sha256 for subset in subsets], random.SystemRandom())
        self._log = JobLog(self.dispatcher, store)
        self.finished, gate = self._log.finished, RequestGate(access.admission)
        self.server = CoordinatorServer(job, self.card, most, self._log, folder, gate, self.status)
        self._pool = WorkerPool(self._start_server)
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
        require(
            servers == "auto" or (isinstance(servers, int) and servers >= 1),
            f"servers={servers!r}: it must be a whole number, 1 at least, or 'auto'",
        )
        self._servers = servers

    def invite(self, *, hours: float = 7 * 24.0) -> Invitation:
        """Return a link that lets volunteers in for ``hours``; those who used it stay a week longer.

        With an allowlist they join the swarm first. A peer that joined passes its own invitation on.
        """
        given = self._access.invitation or issue(self._access, self._token.identity, hours=hours)
        return shown(self.url, given)

    def snapshot(self) -> JobStatus:
        return Runtime.shared().call(on_loop(self.status))

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
        Runtime.shared().call(waited(self.finished.wait(), seconds))
        return self.finished.is_set()

    def stop(self) -> None:
        """Stop coordinating; `coordinate` with the same folder resumes the job. Idempotent."""
        if not self.stopped:
            self.stopped = True
            _coordinators.discard(self)
            atexit.unregister(self.stop)
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
        return f"Coordinator({job_line(self.snapshot())})"

    def _repr_html_(self) -> str:
        return draw_job(self.snapshot()).html()

    async def start(self, options: CoordinatorOptions, tunnel: TunnelSettings | None = None) -> None:
        """Begin the job, or resume it where its log ends. All parts start, or none."""
        try:
            async with self._log.deciding():
                pass
            self._upkeep = asyncio.create_task(self._keep_up(), name="coordinate")
            host, self.url = options.get("host", ""), options.get("url", "")
            port = await self._listen(host, options.get("port", 0))
            if tunnel is not None:
                self._tunnel = Tunnel(
                    tunnel, port, on_change=self._set_url, events=EventLog(), sent_bytes=float
                )
                self._set_url((await self._tunnel.open()).address)
            elif not self.url:
                found = reachable_addresses(host or "0.0.0.0", port)
                self._set_url(found[min(1, len(found) - 1)])  # the first is loopback
        except BaseException:
            await self.close()
            raise

    async def _listen(self, host: str, wanted: int) -> int:
        saved = self.folder / "port"
        if not wanted:
            with contextlib.suppress(OSError, ValueError):
                await self.server.start(host, int(saved.read_text()))
        if not self.server.url:
            await self.server.start(host, wanted)
            saved.write_text(str(urlsplit(self.server.url).port))
        return urlsplit(self.server.url).port or 0

    def _set_url(self, address: str | None) -> None:
        if address is not None:
            self.url = f"http{address.removeprefix('ws')}/"
            logger.info("volunteers reach this coordinator at %s", self.url)

    async def close(self) -> None:
        if self._tunnel is not None:
            await self._tunnel.close()
        await self.server.close()
        if self._upkeep is not None:
            self._stopping.set()
            await self._upkeep  # not cancelled: its threads use the store, and start servers
            await asyncio.to_thread(self._pool.close)

    async def _keep_up(self) -> None:
        while not self._stopping.is_set():
            try:
                async with self._log.deciding() as now:
                    backlog = self.dispatcher.state.backlog
                wanted = self._pool.wanted(backlog, now=now) if self.servers == "auto" else self.servers
                await asyncio.to_thread(self._pool.keep, 0 if self.finished.is_set() else wanted, now=now)
            except StoreError:
                pass  # the log has reported it, and the next round retries
            except Exception as error:  # volunteers are answered all the same
                if self._log.fault != str(error):
                    logger.exception("upkeep of the job failed")
                    self._log.fault = str(error)
            await waited(self._stopping.wait(), self._tick_s)

    def _start_server(self, name: str) -> "ParameterServer | ProcessWorker":
        if self.store.shared and self.job.code:
            return ProcessWorker(self.store.url, self.job.name, self.folder / "job.py", name)
        server = ParameterServer(self.store, self.job, name)
        server.start()
        return server

    def status(self) -> JobStatus:
        now, plan, state, epoch = time.time(), self.job.plan, self.dispatcher.state, self.dispatcher.epoch
        units = [state.units[Unit(epoch, subset)] for subset in range(state.subsets)]
        counts = dict.fromkeys(("waiting", "training", "queued", "assimilated"), 0)
        counts |= Counter("waiting" if unit.mark in MARKS.values() else unit.mark for unit in units)
        stale = [unit.staleness for unit in units if unit.staleness is not None]
        rows, latest = tuple(subset.rows for subset in self.card.subsets), state.assimilated_at
        running = latest and now > latest[0] and not state.finished
        units_per_s = len(latest) / (now - latest[0]) if running else 0.0
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
            volunteers=tuple(sorted(map(replace, state.volunteers.values()), key=lambda one: -one.accepted)),
            epochs=tuple(state.epochs),
            units=counts,
            marks=tuple(unit.mark for unit in units[:MAX_MARKS]),
            staleness=sum(stale) / len(stale) if stale else None,
            update_s=tuple(sorted(state.update_s)),
            units_per_s=units_per_s,
            samples_per_s=units_per_s * plan.local_epochs * sum(rows) / len(rows),
        )


def issue(access: RunAccess, identity: Identity | Peers, *, hours: float) -> Invite:
    """Issue an invitation as the run's authority, valid for ``hours``. With an allowlist it admits nobody by itself."""
    end = time.time() + 3600 * hours
    if access.admission is None:
        return Invite(access.run_id, (), end)
    grant, secret = make_grant(access.run_id, Role.WORKER, identity.sign, join_until=end, allow=access.allow)
    return Invite.issue(grant, secret, (), access=access.access, authority=identity.public_key)


def shown(url: str, invite: Invite) -> Invitation:
    """Return the link of a coordinator at ``url``; `parse_link` reads it."""
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
    accept_terms: bool = False,
    **options: Unpack[CoordinatorOptions],
) -> Coordinator:
    """Hand a job out to volunteers and merge their results into the model (VC-ASGD).

    A coordinator that died or was stopped resumes from its folder, and its link stays valid.
    Calling this again while it works returns the same coordinator. Raises FileNotFoundError,
    ValueError or TypeError if the job or an option is not usable, StoreError or OSError if the
    store or the port is not, TunnelError or SecretError if the tunnel is not, and TermsError if the
    platform's terms are not accepted.

    Args:
        job: a `Job`, or the file that defines one.
        access: who may volunteer: everyone with the link (``invite``), or everyone (``open``).
        accept_terms: True if the platform's terms allow this; needed on Colab.
        **options: see `CoordinatorOptions`.
    """
    job = job if isinstance(job, Job) else Job.load(job)
    require(access != "allowlist", "access='allowlist' needs a swarm: use swarm.coordinate(job)")
    require_terms(accept_terms)
    key_file = _folder(job, options) / "organizer.key"
    key_file.parent.mkdir(parents=True, exist_ok=True)
    identity = Identity.load_or_create(key_file)
    entrance = RunAccess.found(job.name, identity, access=access, allow=None, key_file=key_file)
    return open_coordinator(job, entrance, Token(identity), options)


def open_coordinator(job: Job, access: RunAccess, token: Token, options: CoordinatorOptions) -> Coordinator:
    """Coordinate ``job`` in the run of ``access``, as the peer of ``token``; see `coordinate`."""
    folder = _folder(job, options)
    if running := next((one for one in _coordinators if one.folder == folder), None):
        return running
    tunnel = settings_of(options["tunnel"]) if "tunnel" in options else None
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        lock = FileLock(folder / "lock", thread_local=False)
        try:
            lock.acquire(timeout=0)  # two coordinators would not know of each other's decisions
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
    atexit.register(coordinator.stop)
    return coordinator


def _folder(job: Job, options: CoordinatorOptions) -> Path:
    return Path(options.get("folder", f"{job.name}-work")).resolve()


# -- parameter servers


class ParameterServer(threading.Thread):
    """Assimilate results of the store until stopped; measure the accuracy after each.

    A thread, for stores that other processes cannot open; in a process of its own only `run` is
    called. It loads model and validation data itself: a failure there is a server's death.
    """

    def __init__(self, store: ParameterStore, job: Job, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._store, self._job, self._end = store, job, threading.Event()
        self._measured: list[Measured] = []  # not in the log yet

    @cached_property
    def _loaded(self) -> "tuple[nn.Module, Schema, Rows]":
        model = self._job.first_model()
        return model, Schema.of(model), self._job.validation_rows()

    def stop(self) -> None:
        """Let `run` end after the current update."""
        self._end.set()

    def run(self) -> None:
        """Serve until stopped. Store errors are retried."""
        waits_s, wait_s = backoff(random.Random(), *RETRY_S), 0.0
        while not self._end.wait(wait_s):
            try:
                wait_s = 0.0 if self.run_once(time.time()) else IDLE_S
                waits_s = backoff(random.Random(), *RETRY_S)
            except StoreError as error:
                wait_s = next(waits_s)
                logger.warning("%s retries the store in %.1f s: %s", self.name, wait_s, error)

    def run_once(self, now: float) -> bool:
        """Assimilate one result; return False if none waits. After a StoreError the next call continues it."""
        model, schema, rows = self._loaded
        if not self._measured:
            if (accepted := self._store.claim(self.name, now=now, lease_s=LEASE_S)) is None:
                return False
            try:
                result = np.frombuffer(self._store.blob(accepted.result), "<f4")
            except KeyError:
                return True  # another server has assimilated it after our lease ended
            updated = list[Floats]()

            def update(server: Floats) -> Floats:
                updated.append(assimilate(server, result, accepted.alpha))
                return updated[-1]

            if self._store.assimilate(accepted, update, server=self.name, now=now) is None:
                return True
            schema.load(model, updated[-1])
            self._measured = [Measured(at=now, unit=accepted.unit, accuracy=measure(self._job, model, rows))]
        self._store.append(self._measured)
        self._measured = []
        return True


class ProcessWorker:
    """A parameter server in a process: ``store`` is an address, ``job`` a name, ``code`` a file.

    The address is in the process's environment: it may hold a password, and all users see
    arguments. When its input closes, this process is dead, and the server exits at once.
    """

    def __init__(self, store: str, job: str, code: Path, name: str) -> None:
        with code.with_name("parameter-servers.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve()", job, str(code), name],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | KEEP_MEMORY | {STORE: store},
                start_new_session=True,
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.terminate()

    def join(self, timeout_s: float) -> None:
        with self._process:  # closes its input at last
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()


def serve() -> None:
    """Serve in a process of a `ProcessWorker`, until SIGTERM, or until its input closes."""
    job, code, name = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    threading.Thread(target=_exit_with_parent, name="parent watch", daemon=True).start()
    torch.set_num_threads(1)  # the coordinator adds servers until all processors are busy
    with contextlib.closing(open_store(os.environ.pop(STORE), job)) as store:
        server = ParameterServer(store, Job.load(code), name)
        stop_at_sigterm(server)
        server.run()


def stop_at_sigterm(server: ParameterServer) -> None:
    """Stop the server at SIGTERM, from another thread: in this one the handler could deadlock on its event's lock."""
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.stop).start())


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


class WorkerPool:
    """Parameter servers, as many as wanted; ``deaths`` counts those that ended by themselves."""

    def __init__(self, start: Callable[[str], ParameterServer | ProcessWorker]) -> None:
        self._start, self.deaths = start, 0
        self._most = max(1, (os.cpu_count() or 1) - 1)  # one processor is the coordinator's
        self._running: list[ParameterServer | ProcessWorker] = []
        self._stopping: list[ParameterServer | ProcessWorker] = []
        self._started, self._pause_until = 0, 0.0
        self._trend, self._since = 0, 0.0  # which way the number has to change, since when

    @property
    def size(self) -> int:
        return sum(one.is_alive() for one in self._running)

    def wanted(self, waiting: int, *, now: float) -> int:
        """Return how many servers to run: one more if for `GROW_S` more than `CROWD` results per
        server are ``waiting``, one less if for `SHRINK_S` none is.
        """
        size, trend = self.size, -1 if waiting == 0 else 0
        trend = 1 if waiting > CROWD * size else trend
        if trend != self._trend:
            self._trend, self._since = trend, now
        if now - self._since >= (GROW_S if trend > 0 else SHRINK_S):
            size, self._since = size + trend, now
        return max(1, min(self._most, size))

    def keep(self, wanted: int, *, now: float) -> None:
        """Run ``wanted`` servers; dead ones are replaced after ever longer pauses."""
        alive = [one for one in self._running if one.is_alive()]
        if died := len(self._running) - len(alive):
            self.deaths += died
            self._pause_until = now + min(LONGEST_PAUSE_S, 2.0 ** min(self.deaths, 16))
            logger.warning("%d parameter servers died, %d so far", died, self.deaths)
        self._running, surplus = alive[:wanted], alive[wanted:]
        for one in surplus:
            one.stop()
        self._stopping = [one for one in self._stopping + surplus if one.is_alive()]
        while len(self._running) < wanted and now >= self._pause_until:
            self._started += 1
            self._running.append(self._start(f"server-{self._started}"))

    def close(self) -> None:
        workers, self._running = self._running + self._stopping, []
        for one in workers:
            one.stop()
        for one in workers:
            one.join(FAREWELL_S)
