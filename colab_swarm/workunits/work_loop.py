"""The volunteer's work loop: request units, train them, upload the results, and resume after a kill.

Each slot requests, fetches, trains, uploads, and starts over. Errors of the coordinator never end the loop, only its
refusals do. All units of the process are trained in turns on one thread, because torch's random numbers belong to the
process. So replicas of a unit agree, and one slot's training overlaps with another's transfers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from colab_swarm.errors import CallRefused, PeerError
from colab_swarm.runtime import PauseGate
from colab_swarm.tensors.device import DeviceThread
from colab_swarm.workunits.client import CoordinatorClient, SubsetCache
from colab_swarm.workunits.job import Job, Rows, UnitTraining
from colab_swarm.workunits.messages import Backoff, GivenUnit, GivenUnits, JobCard
from colab_swarm.workunits.resume import Slot, UnitInHand, UnitProgress, UnitSaves, VolunteerSnapshot
from colab_swarm.workunits.weights import Floats, Schema

logger = logging.getLogger(__name__)
T = TypeVar("T")
TURN_S = 0.1
"""Training time of one unit before the next unit's turn."""
BANNED_S = 60.0
MIN_WAIT_S = 0.05
FAREWELL_S = 5.0
"""Time limit for giving units back."""
AFTER_REFUSAL_S = 0.5, 60.0
THREAD = DeviceThread()


@dataclass(frozen=True)
class VolunteerSettings:
    """Settings of a volunteer.

    Attributes:
        folder: for data and units in hand.
        units: trained at a time.
        name: shown to people.
        device: to train on.
        save_s: interval between saves of a unit.
        cache_bytes: most data on disk.
        gate: closed while the machine is needed for something else.
    """

    folder: Path
    units: int = 1
    name: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    save_s: float = 30.0
    cache_bytes: int = 2 << 30
    gate: PauseGate = field(default_factory=PauseGate)

    def __post_init__(self) -> None:
        if self.units < 1:
            raise ValueError(f"units={self.units}: it must be 1 at least")


class _Over(Exception):
    """The loop ends; the text says why. ``fault``: traceback of the job's code."""

    def __init__(self, text: str, *, fault: str = "", finished: bool = False) -> None:
        super().__init__(text)
        self.fault, self.finished = fault, finished


class Volunteering:
    """Train units of one job until `leave` is called or the job ends.

    Args:
        client: of the job's coordinator; the caller closes it.
        job: model, loss and optimizer.
        card: the coordinator's.
        settings: of this volunteer.
        clock: seconds since the epoch.
        rng: random numbers for waits.

    Raises:
        ValueError: the job's model is not the coordinator's.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        job: Job,
        card: JobCard,
        settings: VolunteerSettings,
        *,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._schema = Schema.of(THREAD.submit(job.first_model).result())
        if self._schema.head() != card.schema:
            raise ValueError(
                f"this job's model is not that of {card.name!r}: {_difference(self._schema, card)}"
            )
        self._client, self._job, self._card, self._settings = client, job, card, settings
        self._clock, self._rng = clock, rng or random.Random()
        self._subsets = {subset.sha256: subset for subset in card.subsets}
        self._cache = SubsetCache(settings.folder / "data", settings.cache_bytes)
        same = msgspec.structs.replace(card, key=b"", membership=b"", signature=b"").encode()
        owner = sha256(client.token.identity.id + same).hexdigest()
        self._saves = UnitSaves(settings.folder / "units", owner)
        self._slots = [Slot() for _ in range(settings.units)]
        self._left_behind: deque[UnitInHand] = deque()
        self._leaving, self._finish_s = asyncio.Event(), 0.0
        self._asking = asyncio.Lock()
        self._work: asyncio.Task[None] | None = None
        self._over: _Over | None = None
        self._answer = GivenUnits()
        self._accepted = self._refused = self._given_back = self._samples = 0
        self._refusal, self._banned = "", ""
        self._began, self._ended = time.monotonic(), 0.0

    async def begin(self) -> None:
        """Start the loop."""
        self._work = asyncio.create_task(self._run(), name="volunteer")

    async def wait_over(self) -> None:
        """Wait until it has ended; `snapshot` says why."""
        if self._work is not None:
            await asyncio.shield(self._work)

    async def leave(self, *, finish_s: float = 30.0) -> None:
        """Finish the units that ``finish_s`` is enough for, give the others back, and end."""
        self._finish_s = finish_s
        self._leaving.set()
        await self.wait_over()

    def snapshot(self) -> VolunteerSnapshot:
        """Return its progress. Thread-safe."""
        units = tuple(slot.progress() for slot in self._slots)
        return VolunteerSnapshot(
            job=self._card.name,
            state=self._state(units),
            over=self._over is not None,
            fault="" if self._over is None else self._over.fault,
            epoch=self._answer.epoch,
            accuracy=self._answer.accuracy,
            units=units,
            accepted=self._accepted,
            refused=self._refused,
            given_back=self._given_back,
            refusal=self._refusal,
            samples=self._samples,
            sent_bytes=self._client.sent_bytes,
            received_bytes=self._client.received_bytes,
            seconds=(self._ended or time.monotonic()) - self._began,
            cache_hits=self._cache.hits,
            cache_misses=self._cache.misses,
        )

    def _state(self, units: tuple[UnitProgress, ...]) -> str:
        if self._over is not None:
            return str(self._over)
        if self._client.trouble:
            return self._client.trouble
        if self._leaving.is_set():
            return "leaving, once the units in hand are done"
        if self._settings.gate.closed:
            return "paused"
        phases = {unit.phase for unit in units}
        busy = [phase for phase in ("training", "uploading", "downloading") if phase in phases]
        return busy[0] if busy else self._banned or "waiting for units"

    # -- from the first unit to the last

    async def _run(self) -> None:
        over = _Over("left")
        try:
            async with asyncio.TaskGroup() as group:
                self._left_behind.extend(await asyncio.to_thread(self._saves.left_behind, now=self._clock()))
                slots = [group.create_task(self._serve(slot)) for slot in self._slots]
                await self._leaving.wait()
                await self._finish(slots)
                raise over
        except* Exception as ends:
            over = _first(ends)
        await self._farewell(over)
        self._over, self._ended = over, time.monotonic()

    async def _finish(self, slots: Sequence[asyncio.Task[None]]) -> None:
        """Wait for units in hand and for units on their way, but not for an unreachable coordinator."""
        pairs = zip(slots, self._slots, strict=True)
        last = [task for task, slot in pairs if slot.held is not None or not self._client.trouble]
        if last:
            await asyncio.wait(last, timeout=self._finish_s)

    async def _farewell(self, over: _Over) -> None:
        """Give back the units in hand. Those that cannot be given back stay on disk for the next session."""
        with suppress(TimeoutError):  # once the thread is idle, nothing is saved any more
            async with asyncio.timeout(FAREWELL_S):
                await THREAD.run(lambda: None)
        units = [slot.held.unit for slot in self._slots if slot.held is not None]
        units += [held.unit for held in self._left_behind]
        if units and not over.finished:
            try:
                async with asyncio.timeout(FAREWELL_S):
                    await self._client.give_back([unit.assignment for unit in units])
            except (PeerError, TimeoutError) as error:
                logger.info("units were not given back: %s", error or "no answer")
                return
            self._given_back += len(units)
        for unit in units:
            self._saves.drop(unit)
        for slot in self._slots:
            slot.let_go()

    async def _serve(self, slot: Slot) -> None:
        backoff = Backoff(self._rng, *AFTER_REFUSAL_S)
        while not self._leaving.is_set():
            if not await self._next(slot) or slot.held is None:
                continue
            try:
                await self._train(slot, slot.held)
            except CallRefused as error:
                self._refused, self._refusal = self._refused + 1, str(error)
                logger.info("unit %s was refused: %s", slot.held.unit.assignment, error)
                pause_s = backoff.failed()
            else:
                backoff.succeeded()
                pause_s = 0.0
            self._saves.drop(slot.held.unit)
            slot.let_go()
            await self._pause(pause_s)

    # -- one unit

    async def _next(self, slot: Slot) -> bool:
        """Get a unit or wait for a while; return True if there is one to train."""
        if self._left_behind:
            slot.take(self._left_behind.popleft())
            return True
        slot.phase = "asking"
        await self._settings.gate.wait_open()
        try:
            async with self._asking:  # one at a time: else a unit on its way to another slot seems lost
                held = [one.held for one in self._slots if one.held is not None]
                answer = await self._client.ask(
                    1,
                    held=self._cache.held(),
                    name=self._settings.name,
                    in_hand=[one.unit.assignment for one in (*held, *self._left_behind)],
                )
                for unit in answer.units[:1]:
                    slot.take(UnitInHand(unit, self._clock() + unit.deadline_s))
        except CallRefused as error:
            if error.code != "banned":
                raise _Over(f"the coordinator refuses: {error}") from error
            self._banned, slot.phase = str(error), "waiting"
            await self._pause(BANNED_S)
            return False
        self._banned, self._answer = "", answer
        if answer.finished:
            raise _Over("the job is finished", finished=True)
        if slot.held is not None:
            return not self._leaving.is_set()
        slot.phase = "waiting"
        await self._pause(max(answer.wait_s, MIN_WAIT_S))
        return False

    async def _train(self, slot: Slot, held: UnitInHand) -> None:
        """Train a unit and upload its result.

        Raises:
            CallRefused: the coordinator refuses the result.
        """
        unit, slot.phase = held.unit, "downloading"
        if held.training is None:
            await asyncio.to_thread(self._saves.save, held)
        data = await self._data(unit)
        values = None if held.training else await self._client.parameters(unit.parameters, self._schema)
        training = slot.training = await self._compute(lambda: self._begin(held, data, values))
        slot.phase = "training"
        while training.done < training.batches:
            await self._compute(lambda: self._some_batches(slot, training))
        schema = self._schema
        result = await self._compute(lambda: schema.encode(schema.flatten(training.model)))
        slot.phase = "uploading"
        await self._client.upload(unit.assignment, result)
        self._accepted += 1
        self._samples += self._subsets[unit.data].rows * self._card.local_epochs

    async def _data(self, unit: GivenUnit) -> bytes:
        subset = self._subsets.get(unit.data)
        if subset is None:
            raise _Over("the coordinator's data have changed: call volunteer again")
        data = await asyncio.to_thread(self._cache.get, unit.data)
        if data is None:
            data = await self._client.data(subset)
            await asyncio.to_thread(self._cache.put, unit.data, data)
        return data

    def _begin(self, held: UnitInHand, data: bytes, values: Floats | None) -> UnitTraining:
        """On the thread: start the training of a unit, or resume a saved one."""
        model = self._job.first_model()
        if values is not None:
            self._schema.load(model, values)
        training = UnitTraining(
            self._job,
            Rows.decode(data),
            local_epochs=self._card.local_epochs,
            batch_size=self._card.batch_size,
            seed=held.unit.seed,
            model=model,
            device=self._settings.device,
        )
        if held.training is not None:
            training.load_state_dict(held.training)
        return training

    def _some_batches(self, slot: Slot, training: UnitTraining) -> None:
        """On the thread: train for one turn, and save if it is time to."""
        end = time.monotonic() + TURN_S
        while training.done < training.batches:
            slot.loss = training.step()
            now = time.monotonic()
            if slot.held is not None and now - slot.saved >= self._settings.save_s:
                slot.saved = now
                self._saves.save(replace(slot.held, training=training.state_dict()))
            if now >= end:
                return

    async def _compute(self, work: Callable[[], T]) -> T:
        """Run the job's own code, on the thread.

        Raises:
            _Over: it raised.
        """
        await self._settings.gate.wait_open()
        try:
            return await THREAD.run(work)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit too: a retry would raise it again
            fault = "".join(traceback.format_exception(error))
            logger.warning("the job's code failed:\n%s", fault)
            said = traceback.format_exception_only(error)[-1].strip()
            raise _Over(f"the job's code failed: {said}", fault=fault) from error

    async def _pause(self, seconds: float) -> None:
        """Wait, but not after `leave` was called."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._leaving.wait()


def _first(ends: ExceptionGroup[Exception]) -> _Over:
    for end in ends.exceptions:
        if isinstance(end, _Over):
            return end
    fault = "".join(traceback.format_exception(ends.exceptions[0]))
    logger.error("volunteering failed:\n%s", fault)
    return _Over(f"colab-swarm failed: {ends.exceptions[0]}", fault=fault)


def _difference(schema: Schema, card: JobCard) -> str:
    try:
        schema.decode(card.schema)
    except ValueError as error:
        return str(error)
    return "its size differs"
