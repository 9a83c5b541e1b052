"""What volunteers get from a coordinator: the job, units and parameters; and what becomes of their results.

All state is the store's log. Requests are answered one at a time, in three steps: read the new entries of the log, let
the dispatcher decide, append the decision. What is not in the log has not happened, so a coordinator may be killed
between any two steps. When the store fails, the step is not done and the volunteer retries.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from colab_swarm.errors import StoreError
from colab_swarm.net.peers import PeerId
from colab_swarm.workunits.assimilation import Validator, code_of_servers
from colab_swarm.workunits.dispatcher import Dispatcher
from colab_swarm.workunits.job import Job, lay_out, unit_seed
from colab_swarm.workunits.messages import (
    AskForUnits,
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
    Met,
    Rejected,
    ServerEntry,
    Unit,
    UnitReplica,
    encode_entry,
)
from colab_swarm.workunits.store import Blobs, ParameterStore
from colab_swarm.workunits.weights import Floats, Schema, moved

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Desk:
    """Answer the volunteers of one job; the caller closes ``store``. ``clock``: seconds since the epoch.

    Attributes:
        folder: for the data of volunteers and for unfinished uploads.
        schema, card: of the job's parameters, and the job as volunteers see it.
        version: of the newest parameters.
        fault: the store's current error, for people; empty while it works.
        finished: set when the job is done.
    """

    dispatcher: Dispatcher
    card: JobCard

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
        values, change, fault = base, 0.0, ""
        try:
            values, change = await asyncio.to_thread(self._judge, data, base)
        except ValueError as error:
            fault = str(error)
        async with self._lock:
            await self._settle()
            self.check(volunteer, assignment)
            if fault:
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
