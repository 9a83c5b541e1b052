"""The core of a coordinator: the log in the store, the dispatcher that decides, the servers that assimilate.

All state is the store's log. Requests are answered one at a time, in three steps: read the new entries of the log, let
the dispatcher decide, append the decision. What is not in the log has not happened, so a coordinator may be killed
between any two steps. When the store fails, the step is not done and the volunteer retries.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np

from colab_swarm.errors import StoreError
from colab_swarm.net.peers import PeerId
from colab_swarm.workunits.assimilation import (
    ProcessWorker,
    Staffing,
    ThreadWorker,
    Validator,
    WorkerPool,
    code_of_servers,
    moved,
)
from colab_swarm.workunits.dispatcher import Dispatcher
from colab_swarm.workunits.job import Job, Rows, UnitTraining, measure, unit_seed
from colab_swarm.workunits.messages import (
    AskForUnits,
    GiveBack,
    GivenUnit,
    GivenUnits,
    JobCard,
    Problem,
    Subset,
)
from colab_swarm.workunits.overview import JobStatus
from colab_swarm.workunits.state import (
    Accepted,
    AnyEntry,
    Assigned,
    Assimilated,
    Measured,
    Met,
    Rejected,
    Unit,
    UnitReplica,
    encode_entry,
)
from colab_swarm.workunits.store import Blobs, ParameterStore
from colab_swarm.workunits.tokens import Token
from colab_swarm.workunits.weights import Floats, Schema

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Refused(Exception):
    """A request is refused; ``received``: bytes of an upload so far, if its piece does not continue it."""

    def __init__(self, code: str, text: str, *, received: int | None = None) -> None:
        super().__init__(text)
        self.problem, self.received = Problem(code, text), received


class Logbook:
    """The log as one coordinator reads and writes it, on one event loop.

    Before deciding, hold the `lock` and call `settle`.

    Attributes:
        lock: of the log and of the state made from it.
        version: of the newest parameters.
        fault: the store's current error, for people; empty while it works.
        finished: set when the job is done.
    """

    def __init__(
        self, store: ParameterStore, dispatcher: Dispatcher, validator: Validator, clock: Callable[[], float]
    ) -> None:
        self.lock, self.finished = asyncio.Lock(), asyncio.Event()
        self.version, self.fault = 0, ""
        self._store, self._dispatcher, self._validator, self._clock = store, dispatcher, validator, clock
        self._position = 0
        self._mine: set[bytes] = set()  # entries written here and not read back yet
        self._up_to_date = False

    async def settle(self) -> None:
        """Read new entries, and write those that are due: passed deadlines, the end of an epoch."""
        await self._read()
        self._up_to_date = True
        await self.write(self._dispatcher.expired(now=self._clock()))
        while due := self._dispatcher.advance(now=self._clock()):
            await self.write(due)

    async def write(
        self, entries: Sequence[AnyEntry], *, put: Blobs | None = None, drop: Collection[str] = ()
    ) -> None:
        """Append a decision, with blobs, and read it back. After a StoreError `settle` shows whether it was written."""
        if entries:
            self._mine.update(map(encode_entry, entries))
            await self.call(lambda: self._store.append(entries, put=put, drop=drop))
            await self._read()

    async def _read(self) -> None:
        for position, entry in await self.call(lambda: self._store.entries(self._position)):
            if not isinstance(entry, Assimilated | Measured):
                written = encode_entry(entry)
                if self._up_to_date and written not in self._mine:  # the coordinator that began later wins
                    self.fault = (
                        "another coordinator has taken over this job: stop this one, or rename its job"
                    )
                    raise StoreError(self.fault)
                self._mine.discard(written)
            self._dispatcher.apply(entry)
            self._position = position
            if isinstance(entry, Accepted):
                self._validator.learn(entry.change)
            elif isinstance(entry, Assimilated):
                self.version = max(self.version, entry.version)
        if self._dispatcher.finished is not None:
            self.finished.set()

    async def call(self, method: Callable[[], T]) -> T:
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


class Coordination:
    """Coordinate one job, on one event loop.

    Args:
        job: the job.
        store: its state; the caller closes it.
        token: of the peer that coordinates.
        run_id: the run.
        folder: for the data of volunteers and for unfinished uploads.
        servers: number of parameter servers; ``auto``: as many as the results need.
        tick_s: interval of the check for passed deadlines.
        clock: seconds since the epoch.

    Attributes:
        schema: of the job's parameters.
        card: the job as volunteers see it.
        dispatcher: its decisions.
    """

    def __init__(
        self,
        job: Job,
        store: ParameterStore,
        token: Token,
        run_id: str,
        folder: Path,
        *,
        servers: int | Literal["auto"] = "auto",
        tick_s: float = 0.5,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.servers, self.folder = servers, folder
        self._first = job.first_model()
        self.schema = Schema.of(self._first)
        self.job, self.store, self._token, self._run_id = job, store, token, run_id
        self._tick_s, self._clock, self._since = tick_s, clock, clock()
        self._validator, self._staffing, self._pool = (
            Validator(job.plan),
            Staffing(),
            WorkerPool(self._start_server),
        )
        self._backlog = 0
        self._newest_file = -1, memoryview(b"")  # version and file of the newest parameters: many fetch them
        self._loading = asyncio.Lock()
        self._upkeep: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    @property
    def servers(self) -> int | Literal["auto"]:
        """Number of parameter servers; may be set at any time."""
        return self._servers

    @servers.setter
    def servers(self, servers: int | Literal["auto"]) -> None:
        if servers != "auto" and servers < 1:
            raise ValueError(f"servers={servers}: it must be 1 at least, or 'auto'")
        self._servers = servers

    # -- life

    async def start(self) -> None:
        """Begin the job, or resume it where its log ends.

        Raises:
            ValueError, TypeError: the data cannot be cut, or the store holds another job of this name.
            StoreError: the store cannot be used.
        """
        subsets = await asyncio.to_thread(lay_out, self.job, self.folder / "data")
        await asyncio.to_thread(self.store.begin, self.schema.flatten(self._first))
        code = code_of_servers(self.job)
        await asyncio.to_thread((self.folder / "job.py").write_text, code, encoding="utf-8")
        names = [subset.sha256 for subset in subsets]
        self.dispatcher = Dispatcher(self.job.plan, names, random.SystemRandom())
        self._log = Logbook(self.store, self.dispatcher, self._validator, self._clock)
        self.card = JobCard(
            run_id=self._run_id,
            name=self.job.name,
            key=self._token.identity.public_key,
            membership=self._token.membership,
            code_sha256=sha256(self.job.code.encode()).hexdigest() if self.job.code else "",
            local_epochs=self.job.plan.local_epochs,
            batch_size=self.job.plan.batch_size,
            schema=self.schema.head(),
            subsets=subsets,
        ).signed(self._token.identity.sign)
        async with self._log.lock:
            await self._log.settle()
        self._upkeep = asyncio.create_task(self._keep_up(), name="coordinate")

    async def stop(self) -> None:
        """Stop coordinating; the job can be resumed later. Idempotent."""
        upkeep, self._upkeep = self._upkeep, None
        if upkeep is None:  # it could not start
            return
        self._stopping.set()
        await upkeep  # not cancelled: its threads use the store, and start servers
        await asyncio.to_thread(self._pool.close)

    async def wait_finished(self) -> None:
        """Wait until the job is done."""
        await self._log.finished.wait()

    # -- units

    async def ask(self, volunteer: PeerId, request: AskForUnits) -> GivenUnits:
        """Assign units to a volunteer; raise Refused if it is banned."""
        me = volunteer.hex()
        async with self._log.lock:
            await self._log.settle()
            self.check_ban(volunteer)
            now = self._clock()
            again = self.dispatcher.unacknowledged(me, request.in_hand, now=now)[: request.count]
            count = request.count - len(again)
            units = self.dispatcher.assign(me, count, request.held, now=now, version=self._log.version)
            new = units and me not in self.dispatcher.state.volunteers
            met = [Met(at=now, volunteer=me, name=request.name)] if new else []
            units, put = await self._with_base(units)
            await self._log.write([*met, *units], put=put)
            return self._answer(me, [*again, *units], now)

    async def give_back(self, volunteer: PeerId, given: GiveBack) -> GivenUnits:
        """Take back units that a volunteer will not train."""
        async with self._log.lock:
            await self._log.settle()
            now = self._clock()
            await self._log.write(self.dispatcher.give_back(volunteer.hex(), given.assignments, now=now))
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
            finished=self.dispatcher.finished is not None,
            epoch=self.dispatcher.epoch,
            accuracy=epochs[-1].accuracy if epochs else None,
        )

    def check_ban(self, volunteer: PeerId) -> None:
        """Raise Refused if a volunteer is banned."""
        if (ban := self.dispatcher.ban_of(volunteer.hex(), now=self._clock())) is not None:
            raise Refused("banned", ban)

    # -- results

    def check(self, volunteer: PeerId, assignment: str) -> None:
        """Raise Refused if a volunteer's result for an assignment is not wanted."""
        refusal = self.dispatcher.refusal(assignment, volunteer.hex(), now=self._clock())
        if refusal is not None:
            raise Refused(*refusal)

    def awaits(self, assignment: str) -> bool:
        """Return True if the result of an assignment is wanted from its volunteer."""
        replica = self.dispatcher.state.replicas.get(assignment)
        now = self._clock()
        return replica is not None and not self.dispatcher.refusal(assignment, replica.volunteer, now=now)

    async def take(self, volunteer: PeerId, assignment: str, data: bytes) -> None:
        """Check a complete result, a file as `Schema.encode` makes it; raise Refused if it is invalid or not wanted."""
        self.check(volunteer, assignment)
        unit = self.dispatcher.state.replicas[assignment].unit
        _, file = await self.parameters_file(unit if self.job.plan.replication > 1 else None)
        base = self.schema.decode(file)
        values, change, fault = await asyncio.to_thread(self._judge, data, base)
        async with self._log.lock:
            await self._log.settle()
            self.check(volunteer, assignment)
            if fault is not None:
                await self._log.write([Rejected(at=self._clock(), assignment=assignment, reason=fault)])
                raise Refused("invalid", fault)
            await self._save(assignment, values, change, base)

    def _judge(self, data: bytes, base: Floats) -> tuple[Floats, float, str | None]:
        """Values of a result, how far they moved, and why they are refused."""
        try:
            values = self.schema.decode(data)
        except ValueError as error:
            return base, 0.0, str(error)
        return values, moved(values, base), self._validator.judge(values, base)

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
        await self._log.write(entries, put=put, drop=self._obsolete(entries))
        if odd:
            raise Refused("invalid", odd[0].reason)

    def _obsolete(self, entries: Sequence[AnyEntry]) -> set[str]:
        """Blobs that are no longer needed once ``entries`` are in the log."""
        state, names = self.dispatcher.state, set[str]()
        for entry in entries:
            if isinstance(entry, Rejected):
                names.add(state.replicas[entry.assignment].result)
            elif isinstance(entry, Accepted) and self.job.plan.replication > 1:
                names |= {_base_blob(entry.unit), *self.dispatcher.results_of(entry.unit)} - {entry.result}
        return names - {""}

    # -- initial parameters of a unit

    async def parameters_file(self, unit: Unit | None = None) -> tuple[int, memoryview]:
        """Return version and file (`Schema.encode`) of a unit's initial parameters; None: the newest ones.

        Raises Refused if the unit is not open, or has no replicas.
        """
        if unit is None:
            async with self._loading:
                if self._newest_file[0] < self._log.version:
                    found = await asyncio.to_thread(self.store.parameters)
                    file = await asyncio.to_thread(self.schema.encode, found.values)
                    self._newest_file = found.version, memoryview(file)
                return self._newest_file
        try:
            values = await asyncio.to_thread(self.store.blob, _base_blob(unit))
        except KeyError as error:
            raise Refused("stale", f"unit {unit} is not open: ask for other units") from error
        version = self.dispatcher.state.unit(unit).replicas[0].version
        return version, memoryview(self.schema.head() + values)

    async def _with_base(self, units: list[Assigned]) -> tuple[list[Assigned], dict[str, bytes]]:
        """Give replicas of a unit the same initial parameters; the blobs are those of units without replicas so far."""
        put: dict[str, bytes] = {}
        if self.job.plan.replication == 1 or not units:
            return units, put
        newest = await asyncio.to_thread(self.store.parameters)
        blob = newest.values.astype("<f4", copy=False).tobytes()
        for place, one in enumerate(units):
            before = self.dispatcher.state.unit(one.unit).replicas
            version = before[0].version if before else newest.version
            units[place] = msgspec.structs.replace(one, version=version)
            if not before:
                put[_base_blob(one.unit)] = blob
        return units, put

    # -- upkeep

    async def _keep_up(self) -> None:
        while not self._stopping.is_set():
            try:
                async with self._log.lock:
                    await self._log.settle()
                self._backlog = await self._log.call(self.store.waiting)
                wanted, now = self.servers, self._clock()
                if self._log.finished.is_set():
                    wanted = 0
                elif wanted == "auto":
                    wanted = self._staffing.on_backlog(self._backlog, self._pool.size, now=now)
                await asyncio.to_thread(self._pool.keep, wanted, now=now)
            except StoreError:
                pass  # the log has reported it, and the next round retries
            except Exception as error:  # volunteers are answered all the same
                if self._log.fault != str(error):
                    logger.exception("upkeep of the job failed")
                    self._log.fault = str(error)
            with suppress(TimeoutError):
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
            version=self._log.version,
            servers=self._pool.size,
            server_deaths=self._pool.deaths,
            backlog=self._backlog,
            fault=self._log.fault,
            overview=self.dispatcher.overview(now=now),
        )


def _base_blob(unit: Unit) -> str:
    """Name of the blob with the initial parameters of a unit's replicas."""
    return f"base-{unit}"


def lay_out(job: Job, folder: Path) -> tuple[Subset, ...]:
    """Cut the data into subsets and write each to ``folder``; delete all other files in it.

    The same data make the same files, so volunteers need not fetch them again after a restart.

    Raises:
        ValueError, TypeError: the data cannot be cut, or the job cannot learn from them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = job.rows()
    parts = rows.cut(job.plan.subsets_of(len(rows), rows.size_bytes), seed=job.plan.seed)
    _try_out(job, Rows.decode(parts[0].encode()))  # as volunteers get them
    subsets = []
    for part in parts:
        data = part.encode()
        subsets.append(Subset(sha256(data).hexdigest(), len(data), len(part)))
        half = folder / f"{subsets[-1].sha256}.half"
        half.write_bytes(data)
        os.replace(half, half.with_suffix(""))  # whole or not at all, whatever a crash left there
    for name in {file.name for file in folder.iterdir()} - {subset.sha256 for subset in subsets}:
        (folder / name).unlink()
    return tuple(subsets)


def _try_out(job: Job, rows: Rows) -> None:
    """Train one batch and measure the accuracy, to find faults before volunteers do."""
    doing, plan, model = "one batch could not be trained", job.plan, job.first_model()
    try:
        UnitTraining(job, rows, local_epochs=1, batch_size=plan.batch_size, seed=0, model=model).step()
        doing = "the accuracy could not be measured"
        accuracy = measure(job, job.first_model(), job.validation_rows().sample(plan.batch_size, seed=0))
    except Exception as error:  # whatever it is, with its traceback
        raise ValueError(f"{doing}: {traceback.format_exception_only(error)[-1].strip()}") from error
    if not 0 <= accuracy <= 1:
        raise ValueError(f"the accuracy is {accuracy:g}: it must be between 0 and 1")
