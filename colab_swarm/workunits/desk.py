"""What volunteers get from a coordinator: the job, units and parameters; and what becomes of their results.

All state is the store's log. Requests are answered one at a time, in three steps: read the new entries of the log, let
the dispatcher decide, append the decision. What is not in the log has not happened, so a coordinator may be killed
between any two steps. When the store fails, the step is not done and the volunteer retries.

Parameter servers merge results into the parameters. Any number of them work on one store, each on a thread or in a
process of its own. They know nothing of each other or of the coordinator, and hold no state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch

from colab_swarm.errors import StoreError
from colab_swarm.net.peers import PeerId
from colab_swarm.workunits.dispatcher import Dispatcher
from colab_swarm.workunits.job import Evaluator, Job, WorkPlan, lay_out, unit_seed
from colab_swarm.workunits.messages import (
    AskForUnits,
    Backoff,
    GiveBack,
    GivenUnit,
    GivenUnits,
    JobCard,
    Refused,
    Token,
)
from colab_swarm.workunits.state import (
    Accepted,
    AnyEntry,
    Assigned,
    Assimilated,
    Measured,
    Met,
    Rejected,
    ServerEntry,
    Unit,
    UnitReplica,
    encode_entry,
)
from colab_swarm.workunits.store import KEEP_MEMORY, Blobs, ParameterStore, open_store
from colab_swarm.workunits.weights import Floats, Schema, assimilate, moved

logger = logging.getLogger(__name__)
T = TypeVar("T")
LATEST = 100
KNOWN = 5
"""After this many accepted results the usual change of the parameters is known."""
FIRST_CHANGE = 1000.0
"""Until then a change may be this many times the parameters' norm, or the norm if each were 1."""
MOST = 1e18
"""Of a value: no mean of such values is infinite, and no square."""
CROWD, GROW_S, SHRINK_S = 2.0, 2.0, 30.0
LEASE_S = 120.0
"""A result whose server died goes to another after this time."""
IDLE_S, FAREWELL_S, LONGEST_PAUSE_S = 0.05, 30.0, 60.0


class Validator:
    """Check results one by one; the dispatcher compares replicas."""

    def __init__(self, plan: WorkPlan) -> None:
        self._max_change = plan.max_change
        self._changes: deque[float] = deque(maxlen=LATEST)

    def learn(self, change: float) -> None:
        """Take note of the ``change`` (L2 norm) of an accepted result."""
        self._changes.append(change)

    def judge(self, values: Floats, base: Floats) -> float:
        """Return the L2 norm of a result's change; raise ValueError if the result is refused.

        ``base``: parameters of about its start.
        """
        if len(values) != len(base):
            raise ValueError(f"{len(values):,} values, {len(base):,} expected")
        if bad := len(values) - int(np.count_nonzero(np.abs(values) <= MOST)):
            raise ValueError(
                f"{bad:,} of {len(values):,} values are not finite, or beyond {MOST:g}: a lower learning rate may help"
            )
        change = moved(values, base)
        if len(self._changes) < KNOWN:
            most = FIRST_CHANGE * max(float(np.linalg.norm(base)), len(base) ** 0.5)
            limit = f"over {most:.3g}"
        else:
            usual = statistics.median(self._changes)
            most = self._max_change * usual
            limit = (
                f"usually it is {usual:.3g} and {self._max_change:g} times as much is allowed (max_change)"
            )
        if not change <= most:
            raise ValueError(f"training moved the parameters by {change:.3g}, {limit}")
        return change


class Desk:
    """Answer the volunteers of one job; the caller closes ``store``. ``clock``: seconds since the epoch.

    Attributes:
        folder: for the data of volunteers and for unfinished uploads.
        schema, card: of the job's parameters, and the job as volunteers see it.
        version: of the newest parameters.
        fault: the store's current error, for people; empty while it works.
        finished: set when the job is done.
    """

    def __init__(self, job: Job, store: ParameterStore, folder: Path, clock: Callable[[], float]) -> None:
        self.job, self.store, self.folder, self._clock = job, store, folder, clock
        self.schema, self._validator = Schema.of(job.first_model()), Validator(job.plan)
        self._newest_file = -1, memoryview(b"")  # version and file of the newest parameters: many fetch them
        self._loading = asyncio.Lock()
        self._lock, self.finished = asyncio.Lock(), asyncio.Event()
        self.version, self.fault = 0, ""
        self._position, self._up_to_date = 0, False
        self._mine: set[bytes] = set()  # entries written here and not read back yet

    async def open(self, token: Token, run_id: str) -> None:
        """Begin the job of the peer of ``token``, or resume it where its log ends."""
        plan, identity = self.job.plan, token.identity
        subsets = await asyncio.to_thread(lay_out, self.job, self.folder / "data")
        await asyncio.to_thread(self.store.begin, self.schema.flatten(self.job.first_model()))
        (self.folder / "job.py").write_text(code_of_servers(self.job), encoding="utf-8")
        self.dispatcher = Dispatcher(plan, [subset.sha256 for subset in subsets], random.SystemRandom())
        self.card = JobCard(
            run_id=run_id,
            name=self.job.name,
            key=identity.public_key,
            membership=token.membership,
            code_sha256=sha256(self.job.code.encode()).hexdigest() if self.job.code else "",
            local_epochs=plan.local_epochs,
            batch_size=plan.batch_size,
            schema=self.schema.head(),
            subsets=subsets,
        ).signed(identity.sign)
        async with self._lock:
            await self._settle()

    async def ask(self, volunteer: PeerId, request: AskForUnits) -> GivenUnits:
        """Assign units to a volunteer; raise Refused if it is banned."""
        me = volunteer.hex()
        async with self._lock:
            await self._settle()
            self.check_ban(volunteer)
            now = self._clock()
            again = self.dispatcher.unacknowledged(me, request.in_hand, now=now)[: request.count]
            count = request.count - len(again)
            units = self.dispatcher.assign(me, count, request.held, now=now, version=self.version)
            new = units and me not in self.dispatcher.state.volunteers
            met = [Met(at=now, volunteer=me, name=request.name)] if new else []
            units, put = await self._with_base(units)
            await self._write([*met, *units], put=put)
            return self._answer(me, [*again, *units], now)

    async def give_back(self, volunteer: PeerId, given: GiveBack) -> GivenUnits:
        """Take back units that a volunteer will not train."""
        async with self._lock:
            await self._settle()
            now = self._clock()
            await self._write(self.dispatcher.give_back(volunteer.hex(), given.assignments, now=now))
            return self._answer(volunteer.hex(), [], now)

    def _answer(self, volunteer: str, units: Sequence[Assigned | UnitReplica], now: float) -> GivenUnits:
        plan, epochs = self.job.plan, self.dispatcher.state.epochs
        given = [
            GivenUnit(
                assignment=one.assignment,
                epoch=one.unit.epoch,
                subset=one.unit.subset,
                data=self.card.subsets[one.unit.subset].sha256,
                parameters="parameters" if plan.replication == 1 else f"parameters/{one.unit}",
                deadline_s=one.deadline - now,
                seed=unit_seed(plan.seed, one.unit.epoch, one.unit.subset),
            )
            for one in units
        ]
        return GivenUnits(
            tuple(given),
            wait_s=0.0 if given else self.dispatcher.wait_s(volunteer, now=now),
            finished=self.dispatcher.state.finished is not None,
            epoch=self.dispatcher.epoch,
            accuracy=epochs[-1].accuracy if epochs else None,
        )

    def check_ban(self, volunteer: PeerId) -> None:
        if (ban := self.dispatcher.ban_of(volunteer.hex(), now=self._clock())) is not None:
            raise Refused("banned", ban)

    def check(self, volunteer: PeerId, assignment: str) -> None:
        """Raise Refused if a volunteer's result for an assignment is not wanted."""
        if refusal := self.dispatcher.refusal(assignment, volunteer.hex(), now=self._clock()):
            raise Refused(*refusal)

    def awaits(self, assignment: str) -> bool:
        """Return True if the result of an assignment is wanted from its volunteer."""
        replica = self.dispatcher.state.replicas.get(assignment)
        return replica is not None and not self.dispatcher.refusal(
            assignment, replica.volunteer, now=self._clock()
        )

    async def take(self, volunteer: PeerId, assignment: str, data: bytes) -> None:
        """Check a complete result, a file as `Schema.encode` makes it; raise Refused if it is invalid or not wanted."""
        self.check(volunteer, assignment)
        unit = self.dispatcher.state.replicas[assignment].unit
        _, file = await self.parameters_file(unit if self.job.plan.replication > 1 else None)
        base = self.schema.decode(file)
        values, change, fault = base, 0.0, None
        try:
            values, change = await asyncio.to_thread(self._judge, data, base)
        except ValueError as error:
            fault = str(error)
        async with self._lock:
            await self._settle()
            self.check(volunteer, assignment)
            if fault is not None:
                await self._write([Rejected(at=self._clock(), assignment=assignment, reason=fault)])
                raise Refused("invalid", fault)
            await self._save(assignment, values, change, base)

    def _judge(self, data: bytes, base: Floats) -> tuple[Floats, float]:
        values = self.schema.decode(data)
        return values, self._validator.judge(values, base)

    async def _save(self, assignment: str, values: Floats, change: float, base: Floats) -> None:
        """Save a valid result in the store, with all entries that follow from it."""
        name = f"result-{assignment}"
        known = {name: values}

        def distance(one: str, other: str) -> float:
            for result in {one, other} - known.keys():
                known[result] = np.frombuffer(self.store.blob(result), "<f4")
            a, b = known[one], known[other]
            return moved(a, b) / (max(moved(a, base), moved(b, base)) or 1.0)

        entries = await asyncio.to_thread(
            self.dispatcher.on_result, assignment, change, name, now=self._clock(), distance=distance
        )
        odd = [one for one in entries if isinstance(one, Rejected) and one.assignment == assignment]
        put = {} if odd else {name: values.astype("<f4", copy=False).tobytes()}
        await self._write(entries, put=put, drop=self._obsolete(entries))
        if odd:
            raise Refused("invalid", odd[0].reason)

    def _obsolete(self, entries: Sequence[AnyEntry]) -> set[str]:
        """Blobs that are no longer needed once ``entries`` are in the log."""
        state, names = self.dispatcher.state, set[str]()
        for entry in entries:
            if isinstance(entry, Rejected):
                names.add(state.replicas[entry.assignment].result)
            elif isinstance(entry, Accepted) and self.job.plan.replication > 1:
                waiting = [replica.result for replica in state.units[entry.unit].returned()]
                names |= {f"base-{entry.unit}", *waiting} - {entry.result}
        return names - {""}

    async def parameters_file(self, unit: Unit | None = None) -> tuple[int, memoryview]:
        """Return version and file (`Schema.encode`) of a unit's initial parameters; None: the newest ones.

        Raises Refused if the unit is not open, or has no replicas.
        """
        if unit is None:
            async with self._loading:
                if self._newest_file[0] < self.version:
                    found = await asyncio.to_thread(self.store.parameters)
                    file = await asyncio.to_thread(self.schema.encode, found.values)
                    self._newest_file = found.version, memoryview(file)
                return self._newest_file
        try:
            values = await asyncio.to_thread(self.store.blob, f"base-{unit}")
            version = self.dispatcher.state.units[unit].replicas[0].version
        except LookupError as error:
            raise Refused("stale", f"unit {unit} is not open: ask for other units") from error
        return version, memoryview(self.schema.head() + values)

    async def _with_base(self, units: list[Assigned]) -> tuple[list[Assigned], dict[str, bytes]]:
        """Give replicas of a unit the same initial parameters; the blobs are those of units without replicas so far."""
        put: dict[str, bytes] = {}
        if self.job.plan.replication == 1 or not units:
            return units, put
        newest = await asyncio.to_thread(self.store.parameters)
        blob = newest.values.astype("<f4", copy=False).tobytes()
        for place, one in enumerate(units):
            before = self.dispatcher.state.units[one.unit].replicas
            version = before[0].version if before else newest.version
            units[place] = msgspec.structs.replace(one, version=version)
            if not before:
                put[f"base-{one.unit}"] = blob
        return units, put

    # -- the log: hold the lock and settle before deciding

    async def _settle(self) -> None:
        """Read new entries, and write those that are due: passed deadlines, the end of an epoch."""
        await self._read()
        self._up_to_date = True
        await self._write(self.dispatcher.expired(now=self._clock()))
        while due := self.dispatcher.advance(now=self._clock()):
            await self._write(due)

    async def _write(
        self, entries: Sequence[AnyEntry], *, put: Blobs | None = None, drop: Collection[str] = ()
    ) -> None:
        """Append a decision, with blobs, and read it back; after a StoreError `_settle` shows what was written."""
        if entries:
            self._mine.update(map(encode_entry, entries))
            await self._call(lambda: self.store.append(entries, put=put, drop=drop))
            await self._read()

    async def _read(self) -> None:
        for position, entry in await self._call(lambda: self.store.entries(self._position)):
            if not isinstance(entry, ServerEntry):
                written = encode_entry(entry)
                if self._up_to_date and written not in self._mine:  # the coordinator that began later wins
                    self.fault = (
                        "another coordinator has taken over this job: stop this one, or rename its job"
                    )
                    raise StoreError(self.fault)
                self._mine.discard(written)
            self.dispatcher.state.apply(entry)
            self._position = position
            if isinstance(entry, Accepted):
                self._validator.learn(entry.change)
            elif isinstance(entry, Assimilated):
                self.version = max(self.version, entry.version)
        if self.dispatcher.state.finished is not None:
            self.finished.set()

    async def _call(self, method: Callable[[], T]) -> T:
        """Call the store on a thread, and note in `fault` whether it works."""
        try:
            answer = await asyncio.to_thread(method)
        except StoreError as error:
            if not self.fault:
                logger.warning("the store fails, volunteers wait: %s", error)
            self.fault = str(error)
            raise
        self.fault = ""
        return answer


class Staffing:
    """Choose how many parameter servers run, following the backlog one server at a time. Free of I/O.

    A server is added when for `GROW_S` more than `CROWD` results per server wait, up to ``most``;
    one is removed when for `SHRINK_S` none waits.
    """

    def __init__(self, most: int = max(1, (os.cpu_count() or 1) - 1)) -> None:
        self.most = most  # less one processor for the coordinator
        self._few_since = self._idle_since = math.inf

    def on_backlog(self, waiting: int, servers: int, *, now: float) -> int:
        """Return how many servers to run, if ``waiting`` results wait for ``servers``; ``now`` in seconds."""
        self._few_since = min(self._few_since, now) if waiting > CROWD * servers else math.inf
        self._idle_since = min(self._idle_since, now) if waiting == 0 else math.inf
        wanted = servers
        if now - self._few_since >= GROW_S:
            wanted, self._few_since = servers + 1, now
        elif now - self._idle_since >= SHRINK_S:
            wanted, self._idle_since = servers - 1, now
        return max(1, min(self.most, wanted))


class ParameterServer:
    """Assimilate results of the store until stopped; measure the accuracy after each. ``name`` is for the log."""

    def __init__(self, store: ParameterStore, evaluator: Evaluator, name: str) -> None:
        self._store, self._evaluator, self._name = store, evaluator, name
        self._measured: list[Measured] = []  # not in the log yet

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set, then finish the current update. Store errors are retried."""
        trouble, wait_s = Backoff(random.Random(), 0.1, 30.0), 0.0
        while not stop.wait(wait_s):
            try:
                wait_s = 0.0 if self.run_once(time.time()) else IDLE_S
                trouble.succeeded()
            except StoreError as error:
                wait_s = trouble.failed()
                logger.warning("%s retries the store in %.1f s: %s", self._name, wait_s, error)

    def run_once(self, now: float) -> bool:
        """Assimilate one result; return False if none waits. After a StoreError the result is claimed again."""
        self._log()
        accepted = self._store.claim(self._name, now=now, lease_s=LEASE_S)
        if accepted is None:
            return False
        try:
            result = np.frombuffer(self._store.blob(accepted.result), "<f4")
        except KeyError:
            return True  # another server has assimilated it after our lease ended
        updated = result

        def update(server: Floats) -> Floats:
            nonlocal updated
            updated = assimilate(server, result, accepted.alpha)
            return updated

        if self._store.assimilate(accepted, update, server=self._name, now=now) is not None:
            accuracy = self._evaluator.accuracy(updated)
            self._measured.append(Measured(at=now, unit=accepted.unit, accuracy=accuracy))
            self._log()
        return True

    def _log(self) -> None:
        if self._measured:
            self._store.append(self._measured)
            self._measured = []


class ThreadWorker(threading.Thread):
    """A parameter server on a thread, for stores that other processes cannot open."""

    def __init__(self, store: ParameterStore, job: Job, name: str) -> None:
        super().__init__(name=f"parameter server {name}", daemon=True)
        self._store, self._job, self._end = store, job, threading.Event()
        self.start()

    def run(self) -> None:
        try:
            ParameterServer(self._store, Evaluator(self._job), self.name.rpartition(" ")[2]).run(self._end)
        except Exception:  # the pool replaces it
            logger.exception("%s failed", self.name)

    def stop(self) -> None:
        self._end.set()


def code_of_servers(job: Job) -> str:
    """Return the job's code for servers in processes, with the settings of its plan that measuring needs."""
    plan = f"seed={job.plan.seed}, validation_samples={job.plan.validation_samples}"
    return f"{job.code}\njob = job.with_plan({plan})\n"


class ProcessWorker:
    """A parameter server in its own process; ``store`` is an address, ``job`` a name, ``code`` a file.

    The first line of the process's input is the store's address: it may hold a password, and arguments are visible to
    every user of the machine. When the input closes, this process is dead, and the server exits at once.
    """

    def __init__(self, store: str, job: str, code: Path, name: str) -> None:
        with code.with_name("parameter-servers.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve()", job, str(code), name],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | KEEP_MEMORY,
                start_new_session=True,
            )
        assert self._process.stdin is not None  # it is a pipe
        self._input = self._process.stdin
        with contextlib.suppress(OSError):  # it is dead already: the pool notices
            self._input.write(f"{store}\n".encode())
            self._input.flush()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.terminate()

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended; after ``timeout_s`` kill it."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            self._input.close()


def serve() -> None:
    """Serve in a process that a `ProcessWorker` started, until SIGTERM, or until its input closes."""
    job, code, name = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    url = sys.stdin.readline().strip()
    threading.Thread(target=_exit_with_parent, name="parent watch", daemon=True).start()
    torch.set_num_threads(1)  # the coordinator adds servers until all processors are busy
    store = open_store(url, job)
    ParameterServer(store, Evaluator(Job.load(code)), name).run(stop)
    store.close()


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


class WorkerPool:
    """Keep as many parameter servers running as wanted. Dead ones are replaced, after ever longer pauses.

    ``start`` starts a server with the name given; ``deaths`` counts servers that ended without being stopped.
    """

    def __init__(self, start: Callable[[str], ThreadWorker | ProcessWorker]) -> None:
        self._start, self.deaths = start, 0
        self._running: list[ThreadWorker | ProcessWorker] = []
        self._stopping: list[ThreadWorker | ProcessWorker] = []
        self._started, self._pause_until = 0, 0.0

    @property
    def size(self) -> int:
        return sum(one.is_alive() for one in self._running)

    def keep(self, wanted: int, *, now: float) -> None:
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
