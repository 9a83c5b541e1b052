"""A coordinator at work: a job's log in the store, the dispatcher that decides, the servers that assimilate.

All state is the store's log. A request is answered in three steps, one request at a time: read what is new in the
log, let the dispatcher decide, append the decision. What is not in the log has not happened, so a coordinator may be
killed between any two steps; and when the store fails, the step is left undone and the volunteer comes again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np

from colab_swarm.errors import StoreError
from colab_swarm.net.peers import PeerId
from colab_swarm.workunits.assimilation import (
    PoolWorker,
    ProcessWorker,
    Staffing,
    ThreadWorker,
    Validator,
    WorkerPool,
    code_of_servers,
    moved,
)
from colab_swarm.workunits.dispatcher import Dispatcher
from colab_swarm.workunits.job import Job
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
from colab_swarm.workunits.store import ParameterStore
from colab_swarm.workunits.tokens import Token
from colab_swarm.workunits.training import lay_out, unit_seed
from colab_swarm.workunits.weights import Floats, Schema

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Logbook:
    """Used by one coordinator, on one event loop. Whoever decides holds the `lock` and has called `settle` before.

    Attributes:
        lock: of the log and of what is made of it.
        version: of the newest parameters.
        fault: what is wrong with the store now, for people; empty while all is well.
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
        """Read what is new, and write what is due by now: deadlines that passed, the end of an epoch.

        Raises:
            StoreError: the store fails, or another coordinator uses it; nothing is lost.
        """
        await self._read()
        self._up_to_date = True
        await self.write(self._dispatcher.expired(now=self._clock()))
        while due := self._dispatcher.advance(now=self._clock()):
            await self.write(due)

    async def write(
        self,
        entries: Sequence[AnyEntry],
        *,
        put: Mapping[str, bytes] | None = None,
        drop: Collection[str] = (),
    ) -> None:
        """Append a decision, with blobs, and read it back.

        Raises:
            StoreError: the store fails. Whether it was written is known after the next `settle`.
        """
        if entries:
            self._mine.update(map(encode_entry, entries))
            await self._ask(lambda: self._store.append(entries, put=put or {}, drop=drop))
            await self._read()

    async def waiting(self) -> int:
        """Results that wait for a parameter server.

        Raises:
            StoreError: the store fails.
        """
        return await self._ask(self._store.waiting)

    async def _read(self) -> None:
        for position, entry in await self._ask(lambda: self._store.entries(self._position)):
            if not isinstance(entry, Assimilated | Measured):
                self._check_mine(entry)
            self._dispatcher.apply(entry)
            self._position = position
            if isinstance(entry, Accepted):
                self._validator.learn(entry.change)
            elif isinstance(entry, Assimilated):
                self.version = max(self.version, entry.version)
        if self._dispatcher.finished is not None:
            self.finished.set()

    def _check_mine(self, entry: AnyEntry) -> None:
        """Two coordinators would decide without knowing of each other; the one that began later goes on."""
        written = encode_entry(entry)
        if self._up_to_date and written not in self._mine:
            self.fault = "another coordinator has taken over this job: stop this one, or rename its job"
            raise StoreError(self.fault)
        self._mine.discard(written)

    async def _ask(self, call: Callable[[], T]) -> T:
        try:
            answer = await asyncio.to_thread(call)
        except StoreError as error:
            if not self.fault:
                logger.warning("the store fails, volunteers wait: %s", error)
            self.fault = str(error)
            raise
        self.fault = ""
        return answer


def base_blob(unit: Unit) -> str:
    """Name of the blob with the parameters that all replicas of a unit begin with."""
    return f"base-{unit}"


class InitialParametersCache:
    """Files of parameters (`Schema.encode`). The newest one is held in memory, for many ask at once."""

    def __init__(self, store: ParameterStore, schema: Schema, log: Logbook) -> None:
        self._store, self._schema, self._log = store, schema, log
        self._loading = asyncio.Lock()
        self._version, self._file = -1, memoryview(b"")

    async def newest(self) -> tuple[int, memoryview]:
        """Version and file of the newest parameters.

        Raises:
            StoreError: later perhaps.
        """
        async with self._loading:
            if self._version < self._log.version:
                found = await asyncio.to_thread(self._store.parameters)
                self._file = memoryview(await asyncio.to_thread(self._schema.encode, found.values))
                self._version = found.version
            return self._version, self._file

    async def of_unit(self, unit: Unit) -> memoryview:
        """File of those that the replicas of a unit begin with.

        Raises:
            KeyError: it is not open.
            StoreError: later perhaps.
        """
        return memoryview(self._schema.head() + await asyncio.to_thread(self._store.blob, base_blob(unit)))


class Refused(Exception):
    """A volunteer asked for what it cannot have; nothing has changed but what the log says of it."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.problem = Problem(code, text)


@dataclass(frozen=True)
class CoordinationSettings:
    """How a job is coordinated.

    Attributes:
        folder: for the data of volunteers, and uploads on their way.
        store: address of the store, for parameter servers in processes of their own.
        servers: how many parameter servers; ``auto``: as many as keep up with the results.
        tick_s: between two looks for deadlines that passed.
    """

    folder: Path
    store: str = "memory"
    servers: int | Literal["auto"] = "auto"
    tick_s: float = 0.5

    def __post_init__(self) -> None:
        if self.servers != "auto" and self.servers < 1:
            raise ValueError(f"servers={self.servers}: it must be 1 at least, or 'auto'")


class Coordination:
    """Coordinates one job; made and used on one event loop.

    Attributes:
        servers: as in the settings; may be set while it runs.
        schema: of the job's parameters.
    """

    def __init__(
        self,
        job: Job,
        store: ParameterStore,
        token: Token,
        run_id: str,
        settings: CoordinationSettings,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``token``: of the peer that coordinates; ``run_id``: of its run. The store is closed by whoever opened it."""
        self.servers = settings.servers
        self._first = job.first_model()
        self.schema = Schema.of(self._first)
        self._job, self._store, self._token, self._run_id = job, store, token, run_id
        self._settings, self._clock = settings, clock
        self._since = clock()
        self._validator = Validator(job.plan)
        self._staffing = Staffing()
        self._crew = WorkerPool(self._hire)
        self._backlog = 0
        self._upkeep: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    # -- life

    async def start(self) -> None:
        """Begin the job, or go on with it where the store says it is.

        Raises:
            ValueError, TypeError: the data cannot be cut, or the store holds another job of this name.
            StoreError: the store cannot be used.
        """
        subsets = await asyncio.to_thread(lay_out, self._job, self.data_folder)
        await asyncio.to_thread(self._store.begin, self.schema.flatten(self._first))
        await asyncio.to_thread(self._code_file.write_text, code_of_servers(self._job), encoding="utf-8")
        names = [subset.sha256 for subset in subsets]
        self._dispatcher = Dispatcher(self._job.plan, names, random.SystemRandom())
        self._log = Logbook(self._store, self._dispatcher, self._validator, self._clock)
        self._beginnings = InitialParametersCache(self._store, self.schema, self._log)
        self.card = self._signed_card(subsets)
        async with self._log.lock:
            await self._log.settle()
        self._upkeep = asyncio.create_task(self._go_on(), name="coordinate")

    async def stop(self) -> None:
        """Coordinate no more; the job can be gone on with later. Idempotent."""
        upkeep, self._upkeep = self._upkeep, None
        if upkeep is None:  # it could not start
            return
        self._stopping.set()
        await upkeep  # not cut short: its threads use the store, and hire
        await asyncio.to_thread(self._crew.close)

    async def wait_finished(self) -> None:
        """Until the job is done."""
        await self._log.finished.wait()

    @property
    def data_folder(self) -> Path:
        """Where the subsets lie, by their SHA-256."""
        return self._settings.folder / "data"

    @property
    def _code_file(self) -> Path:
        return self._settings.folder / "job.py"

    @property
    def code(self) -> str:
        """The job's text."""
        return self._job.code

    def _signed_card(self, subsets: tuple[Subset, ...]) -> JobCard:
        code, plan = self._job.code.encode(), self._job.plan
        return JobCard(
            run_id=self._run_id,
            name=self._job.name,
            key=self._token.identity.public_key,
            membership=self._token.membership,
            code_sha256=sha256(code).hexdigest() if code else "",
            local_epochs=plan.local_epochs,
            batch_size=plan.batch_size,
            schema=self.schema.head(),
            subsets=subsets,
        ).signed(self._token.identity.sign)

    # -- what volunteers ask

    async def ask(self, volunteer: PeerId, asked: AskForUnits) -> GivenUnits:
        """Units for a volunteer.

        Raises:
            Refused: it is banned.
            StoreError: later perhaps.
        """
        me = volunteer.hex()
        async with self._log.lock:
            await self._log.settle()
            self.check_ban(volunteer)
            now = self._clock()
            again = self._dispatcher.astray(me, asked.in_hand, now=now)[: asked.count]
            count = asked.count - len(again)
            units = self._dispatcher.assign(me, count, asked.held, now=now, version=self._log.version)
            new = units and me not in self._dispatcher.state.volunteers
            met = [Met(at=now, volunteer=me, name=asked.name)] if new else []
            units, put = await self._with_base(units)
            await self._log.write([*met, *units], put=put)
            given: list[Assigned | UnitReplica] = [*again, *units]
            wait_s = 0.0 if given else self._dispatcher.wait_s(me, now=now)
            return self._given([self._unit(one, now) for one in given], wait_s)

    async def give_back(self, volunteer: PeerId, given: GiveBack) -> GivenUnits:
        """A volunteer will not train some units.

        Raises:
            StoreError: later perhaps.
        """
        async with self._log.lock:
            await self._log.settle()
            now = self._clock()
            await self._log.write(self._dispatcher.give_back(volunteer.hex(), given.assignments, now=now))
            return self._given([], self._dispatcher.wait_s(volunteer.hex(), now=now))

    def check_ban(self, volunteer: PeerId) -> None:
        """Raise Refused if a volunteer is banned."""
        if (ban := self._dispatcher.ban_of(volunteer.hex(), now=self._clock())) is not None:
            raise Refused("banned", ban)

    def check(self, volunteer: PeerId, assignment: str) -> None:
        """Raise Refused if the result of an assignment is not wanted from a volunteer."""
        refusal = self._dispatcher.refusal(assignment, volunteer.hex(), now=self._clock())
        if refusal is not None:
            raise Refused(*refusal)

    def awaits(self, assignment: str) -> bool:
        """Whether the result of an assignment is wanted from whoever has it."""
        replica = self._dispatcher.state.replicas.get(assignment)
        now = self._clock()
        return replica is not None and not self._dispatcher.refusal(assignment, replica.volunteer, now=now)

    async def take(self, volunteer: PeerId, assignment: str, data: bytes) -> None:
        """Take a result, a file as `Schema.encode` makes it.

        Raises:
            Refused: it is no use; if it is at fault, the unit goes to somebody else.
            StoreError: later perhaps.
        """
        self.check(volunteer, assignment)
        unit = self._dispatcher.state.replicas[assignment].unit
        _, file = await self.parameters_file(unit if self._job.plan.replication > 1 else None)
        base = self.schema.decode(file)
        values, change, fault = await asyncio.to_thread(self._judge, data, base)
        async with self._log.lock:
            await self._log.settle()
            self.check(volunteer, assignment)
            if fault is not None:
                await self._log.write([Rejected(at=self._clock(), assignment=assignment, reason=fault)])
                raise Refused("invalid", fault)
            await self._keep(assignment, values, change, base)

    def _judge(self, data: bytes, base: Floats) -> tuple[Floats, float, str | None]:
        """Values of a result, how far they moved, and what is wrong with them."""
        try:
            values = self.schema.decode(data)
        except ValueError as error:
            return base, 0.0, str(error)
        return values, moved(values, base), self._validator.judge(values, base)

    async def _keep(self, assignment: str, values: Floats, change: float, base: Floats) -> None:
        """Put a valid result into the store, with all that follows from it."""
        name = f"result-{assignment}"
        known = {name: values}

        def distance(one: str, other: str) -> float:
            for result in {one, other} - known.keys():
                known[result] = np.frombuffer(self._store.blob(result), "<f4")
            a, b = known[one], known[other]
            return moved(a, b) / (max(moved(a, base), moved(b, base)) or 1.0)

        entries = await asyncio.to_thread(
            self._dispatcher.on_result, assignment, change, name, now=self._clock(), distance=distance
        )
        odd = [one for one in entries if isinstance(one, Rejected) and one.assignment == assignment]
        put = {} if odd else {name: values.astype("<f4", copy=False).tobytes()}
        await self._log.write(entries, put=put, drop=self._spent(entries))
        if odd:
            raise Refused("invalid", odd[0].reason)

    def _spent(self, entries: Sequence[AnyEntry]) -> set[str]:
        """Blobs that nobody needs once ``entries`` are in the log."""
        state, spent = self._dispatcher.state, set[str]()
        for entry in entries:
            if isinstance(entry, Rejected):
                spent.add(state.replicas[entry.assignment].result)
            elif isinstance(entry, Accepted) and self._job.plan.replication > 1:
                spent |= {base_blob(entry.unit), *self._dispatcher.results_of(entry.unit)} - {entry.result}
        return spent - {""}

    # -- parameters that volunteers begin with

    async def parameters_file(self, unit: Unit | None = None) -> tuple[int, memoryview]:
        """Version and file (`Schema.encode`) of the parameters to begin a unit with; None: the newest.

        Raises:
            Refused: the unit is not open, or has no replicas.
            StoreError: later perhaps.
        """
        if unit is None:
            return await self._beginnings.newest()
        try:
            file = await self._beginnings.of_unit(unit)
        except KeyError as error:
            raise Refused("stale", f"unit {unit} is not open: ask for other units") from error
        return self._dispatcher.state.unit(unit).replicas[0].version, file

    async def _with_base(self, units: list[Assigned]) -> tuple[list[Assigned], dict[str, bytes]]:
        """Assignments whose replicas begin alike, and blobs with what those begin with that nobody began before."""
        put: dict[str, bytes] = {}
        if self._job.plan.replication == 1 or not units:
            return units, put
        newest = await asyncio.to_thread(self._store.parameters)
        blob = newest.values.astype("<f4", copy=False).tobytes()
        for place, one in enumerate(units):
            before = self._dispatcher.state.unit(one.unit).replicas
            version = before[0].version if before else newest.version
            units[place] = msgspec.structs.replace(one, version=version)
            if not before:
                put[base_blob(one.unit)] = blob
        return units, put

    # -- upkeep

    async def _go_on(self) -> None:
        while not self._stopping.is_set():
            try:
                async with self._log.lock:
                    await self._log.settle()
                self._backlog = await self._log.waiting()
                await asyncio.to_thread(self._crew.keep, self._wanted(), now=self._clock())
            except StoreError:
                pass  # the log has told it, and the next try will do better
            except Exception as error:  # volunteers are answered all the same
                if self._log.fault != str(error):
                    logger.exception("upkeep of the job failed")
                    self._log.fault = str(error)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.tick_s):
                    await self._stopping.wait()

    def _wanted(self) -> int:
        if self._log.finished.is_set():
            return 0
        if self.servers == "auto":
            return self._staffing.on_backlog(self._backlog, self._crew.size, now=self._clock())
        return self.servers

    def _hire(self, name: str) -> PoolWorker:
        if not self._store.shared or not self._job.code:
            return ThreadWorker(self._store, self._job, name)
        return ProcessWorker(self._settings.store, self._job.name, self._code_file, name)

    # -- what is told

    def _unit(self, one: Assigned | UnitReplica, now: float) -> GivenUnit:
        return GivenUnit(
            assignment=one.assignment,
            epoch=one.unit.epoch,
            subset=one.unit.subset,
            data=self.card.subsets[one.unit.subset].sha256,
            parameters="parameters" if self._job.plan.replication == 1 else f"parameters/{one.unit}",
            deadline_s=one.deadline - now,
            seed=unit_seed(self._job.plan.seed, one.unit.epoch, one.unit.subset),
        )

    def _given(self, units: list[GivenUnit], wait_s: float) -> GivenUnits:
        epochs = self._dispatcher.state.epochs
        finished = self._dispatcher.finished is not None
        accuracy = epochs[-1].accuracy if epochs else None
        return GivenUnits(tuple(units), wait_s, finished, self._dispatcher.epoch, accuracy)

    def status(self) -> JobStatus:
        """Where the job stands."""
        now = self._clock()
        return JobStatus(
            name=self._job.name,
            at=now,
            since=self._since,
            target_accuracy=self._job.plan.target_accuracy,
            rows=tuple(subset.rows for subset in self.card.subsets),
            local_epochs=self._job.plan.local_epochs,
            numel=self.schema.numel,
            version=self._log.version,
            servers=self._crew.size,
            server_deaths=self._crew.deaths,
            backlog=self._backlog,
            fault=self._log.fault,
            overview=self._dispatcher.overview(now=now),
        )

    def check_invariants(self) -> None:
        """Used by tests.

        Raises:
            AssertionError: the state contradicts itself.
        """
        self._dispatcher.check_invariants()
