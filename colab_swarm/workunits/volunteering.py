"""`cs.workunits.volunteer`: train units of another person's job on this machine.

Each slot of a volunteer requests a unit, fetches its data, trains it, uploads the result, and starts again. Network
errors never end a volunteer. All threads share torch's random numbers. So the process trains all its units in turns on
one thread, and replicas of a unit agree.
"""

import asyncio
import atexit
import logging
import os
import random
import re
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from filelock import FileLock, Timeout

from colab_swarm.errors import CallRefused, JoinError, PeerError, require
from colab_swarm.net.identity import Identity
from colab_swarm.net.patience import backoff
from colab_swarm.notebook.panel import Panel
from colab_swarm.notebook.platforms import Consent, require_terms
from colab_swarm.notebook.units_view import VOLUNTEER_VIEWS, draw_volunteer
from colab_swarm.runtime import DeviceThread, PauseGate, Runtime, cores
from colab_swarm.workunits.client import (
    CoordinatorClient,
    SubsetCache,
    UnitInHand,
    UnitSaves,
    VolunteerSnapshot,
)
from colab_swarm.workunits.job import Job, Rows, UnitTraining
from colab_swarm.workunits.messages import (
    AskForUnit,
    JobCard,
    Resources,
    Subset,
    parse_link,
    token_by,
    waited,
)
from colab_swarm.workunits.weights import Floats, Schema

logger = logging.getLogger(__name__)
T = TypeVar("T")
FIRST_ANSWER_S = 30.0
"""Time limit for the coordinator's first answer."""
FINISH_S = 30.0
FAREWELL_S = 5.0
"""Time limit for giving units back."""
AFTER_REFUSAL_S = (0.5, 60.0)
"""Waits after refused results: the first wait and the longest wait."""
SHORTEST_WAIT_S = 0.05
TURN_S = 0.1
"""How long a unit trains until the next unit gets its turn."""
SAVE_S = 30.0
MAX_FOLDERS = 64
"""Most volunteers of one name on one machine."""
BUSY_PHASES = ("training", "uploading", "downloading")
THREAD = DeviceThread()
_volunteers: "set[Volunteer]" = set()


class _Over(Exception):
    """The work ends; the text says why."""


class _JobFinished(_Over):
    """The job has finished, so the results of the remaining units are not needed."""


class Volunteer(AbstractContextManager["Volunteer"]):
    """A volunteer that works in the background while ``gate`` is open. `watch` shows its progress, `close` ends it.

    On an event loop use `begin`, `wait_over` and `leave`. From other threads use `wait` and `close`. The volunteer
    trains ``units`` units at a time, and keeps data and unfinished units in ``folder``. Raises ValueError
    if the model of ``job`` differs from the model on the coordinator's ``card``, or if ``units`` is below 1.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        job: Job,
        card: JobCard,
        folder: Path,
        *,
        units: int = 1,
        name: str = "",
        device: torch.device | None = None,
        gate: PauseGate | None = None,
    ) -> None:
        require(units >= 1, f"units={units}: it must be 1 at least")
        self._schema = Schema.of(THREAD.submit(job.first_model).result())
        if card.schema != self._schema.head():
            raise ValueError(f"model is not that of {card.name!r}: it {self._schema.difference(card.schema)}")
        self.url = client.url
        self.folder = folder
        self._job = job.with_plan(local_epochs=card.local_epochs, batch_size=card.batch_size)
        self._client = client
        self._name = name
        self._device = device
        self._resources = resources_of(device)
        self._gate = gate or PauseGate()
        # closes the client, and releases the folder's lock, in `close`
        self._held = ExitStack()
        self._stopped = False
        self._subsets = {subset.sha256: subset for subset in card.subsets}
        self._cache = SubsetCache(folder / "data", self._subsets)
        self._saves = UnitSaves(folder / "units", _owner(client, card))
        self._slots = units
        # units that this volunteer holds, by assignment
        self._in_hand: dict[str, UnitInHand] = {}
        # units of a killed process that no slot has taken yet
        self._left_behind: list[UnitInHand] = []
        self._leaving = asyncio.Event()
        self._finish_s = 0.0
        self._asking = asyncio.Lock()
        self._work: asyncio.Task[None] | None = None
        self._seen = VolunteerSnapshot(card.name)
        self._began = time.monotonic()

    async def begin(self) -> None:
        self._work = asyncio.create_task(self._run(), name="volunteer")

    async def wait_over(self) -> None:
        if self._work is not None:
            await asyncio.shield(self._work)

    async def leave(self, *, finish_s: float = FINISH_S) -> None:
        """Finish the units that can be finished within ``finish_s``, give the others back, and end."""
        self._finish_s = finish_s
        self._leaving.set()
        await self.wait_over()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the volunteer has ended, or for ``seconds``; return True if it has ended."""
        Runtime.shared().call(waited(self.wait_over(), seconds))
        return self._seen.over

    def close(self, *, finish_s: float = FINISH_S) -> None:
        """Finish the units that can be finished within ``finish_s``, give the others back, and end. Idempotent."""
        if not self._stopped:
            self._stopped = True
            _volunteers.discard(self)
            atexit.unregister(self.close)
            with self._held:
                Runtime.shared().call(self.leave(finish_s=finish_s))

    def __exit__(self, *_: object) -> None:
        self.close()

    def panel(self) -> Panel[VolunteerSnapshot]:
        """Return a live view: widgets in a notebook, text elsewhere."""
        return Panel(self.snapshot, self.close, views=VOLUNTEER_VIEWS)

    def watch(self, seconds: float | None = None) -> None:
        """Show the progress for ``seconds``, or until the volunteer ends or you interrupt; it continues afterwards."""
        self.panel().watch(seconds)

    def __repr__(self) -> str:
        return f"Volunteer({draw_volunteer(self.snapshot()).line})"

    def _repr_html_(self) -> str:
        return draw_volunteer(self.snapshot()).html()

    def snapshot(self) -> VolunteerSnapshot:
        """Return the volunteer's progress. Thread-safe."""
        now = time.monotonic()
        in_hand = list(self._in_hand.values())
        units = tuple(replace(held.progress, seconds=now - held.began) for held in in_hand)
        return replace(
            self._seen,
            state=self._state({unit.phase for unit in units}),
            units=units,
            sent_bytes=self._client.sent_bytes,
            received_bytes=self._client.received_bytes,
            seconds=self._seen.seconds or now - self._began,
        )

    def _state(self, phases: set[str]) -> str:
        if self._seen.over:
            return self._seen.state
        if self._client.trouble:
            return self._client.trouble
        if self._leaving.is_set():
            return "leaving, once the units in hand are done"
        if self._gate.closed:
            return "paused"
        for phase in BUSY_PHASES:
            if phase in phases:
                return phase
        return "waiting for units"

    # -- from the first unit to the last

    async def _run(self) -> None:
        over = _Over("left")
        try:
            async with asyncio.TaskGroup() as group:
                self._left_behind = await asyncio.to_thread(self._saves.left_behind, now=time.time())
                self._in_hand = {held.unit.assignment: held for held in self._left_behind}
                tasks = [group.create_task(self._serve()) for _ in range(self._slots)]
                await self._leaving.wait()
                # while the coordinator is away, do not wait for slots that have no unit
                if self._in_hand or not self._client.trouble:
                    await asyncio.wait(tasks, timeout=self._finish_s)
                raise over
        except* Exception as ends:
            reasons = [end for end in ends.exceptions if isinstance(end, _Over)]
            over = reasons[0] if reasons else self._failed("colab-swarm", ends.exceptions[0])
        await self._farewell(isinstance(over, _JobFinished))
        self._seen.state = str(over)
        self._seen.over = True
        self._seen.seconds = time.monotonic() - self._began

    def _failed(self, what: str, error: BaseException) -> _Over:
        """Return why the work ends, and keep the traceback of the fault."""
        self._seen.fault = "".join(traceback.format_exception(error))
        logger.error("%s failed:\n%s", what, self._seen.fault)
        reason = traceback.format_exception_only(error)[-1].strip()
        return _Over(f"{what} failed: {reason}")

    async def _farewell(self, finished: bool) -> None:
        """Give back the units that this volunteer holds. If this fails, the units stay on disk for the next session."""
        # wait until the thread is idle, because then nothing more is saved
        await waited(THREAD.run(lambda: None), FAREWELL_S)
        if self._in_hand and not finished:
            try:
                async with asyncio.timeout(FAREWELL_S):
                    await self._client.ask(AskForUnit(leaves=True))
            except (PeerError, TimeoutError) as error:
                logger.info("units were not given back: %s", error or "no answer")
                return
            self._seen.given_back += len(self._in_hand)
        for held in self._in_hand.values():
            self._saves.drop(held.unit)
            # a thread that still trains the unit will not save it
            held.training = None
        self._in_hand.clear()

    async def _serve(self) -> None:
        waits_s = backoff(random.Random(), *AFTER_REFUSAL_S)
        while not self._leaving.is_set():
            held = await self._next()
            if held is None:
                continue
            pause_s = 0.0
            try:
                await self._train(held)
                waits_s = backoff(random.Random(), *AFTER_REFUSAL_S)
            except CallRefused as error:
                logger.info("unit %s was refused: %s", held.unit.assignment, error)
                if error.code == "surplus":
                    self._seen.surplus += 1
                else:
                    self._seen.refused += 1
                    self._seen.refusal = str(error)
                    pause_s = next(waits_s)
            self._saves.drop(held.unit)
            del self._in_hand[held.unit.assignment]
            await waited(self._leaving.wait(), pause_s)

    # -- one unit

    async def _next(self) -> UnitInHand | None:
        """Return a unit to train. If there is none, wait for a while and return None."""
        if self._left_behind:
            return self._left_behind.pop()
        await self._gate.wait_open()
        held = None
        try:
            # only one slot asks at a time; otherwise a unit on its way to another slot would seem lost
            async with self._asking:
                names = tuple(self._in_hand)
                answer = await self._client.ask(AskForUnit(self._name, names, self._resources))
                if answer.unit is not None:
                    held = UnitInHand(answer.unit, time.time() + answer.unit.deadline_s)
                    self._in_hand[answer.unit.assignment] = held
        except CallRefused as error:
            raise _Over(f"the coordinator refuses: {error}") from error
        self._seen.epoch = answer.epoch
        self._seen.accuracy = answer.accuracy
        if answer.finished:
            raise _JobFinished("the job is finished")
        if answer.unfit and held is None:
            logger.warning("no units for this machine: %s", answer.unfit)
            raise _Over(answer.unfit)
        if held is None:
            await waited(self._leaving.wait(), max(answer.wait_s, SHORTEST_WAIT_S))
        # if the volunteer is leaving, a unit that has just arrived is given back
        return None if self._leaving.is_set() else held

    async def _train(self, held: UnitInHand) -> None:
        """Train a unit and upload its result; raise CallRefused if the result is refused."""
        unit = held.unit
        progress = held.progress
        progress.phase = "downloading"
        if held.state is None:
            await asyncio.to_thread(self._saves.save, held)
        subset = self._subsets.get(unit.data)
        if subset is None:
            raise _Over("the coordinator's data have changed: call volunteer again")
        data = await self._data(subset)
        values = None
        if held.state is None:
            values = await self._client.parameters(unit.parameters, self._schema)
        training = await self._compute(lambda: self._begin(held, data, values))
        held.training = training
        progress.phase = "training"
        progress.batches = training.batches
        while training.done < training.batches:
            await self._compute(lambda: self._some_batches(held, training))
        schema = self._schema
        result = await self._compute(lambda: schema.encode(schema.flatten(training.model)))
        progress.phase = "uploading"
        await self._client.upload(unit.assignment, result)
        self._seen.accepted += 1
        self._seen.samples += subset.rows * self._job.plan.local_epochs

    async def _data(self, subset: Subset) -> bytes:
        """Return a subset of the data, from the cache or from the coordinator."""
        data = await asyncio.to_thread(self._cache.get, subset.sha256)
        if data is None:
            data = await self._client.data(subset)
            await asyncio.to_thread(self._cache.put, subset.sha256, data)
        return data

    def _begin(self, held: UnitInHand, data: bytes, values: Floats | None) -> UnitTraining:
        model = self._job.first_model()
        if values is not None:
            self._schema.load(model, values)
        rows = Rows.decode(data)
        training = UnitTraining(self._job, rows, seed=held.unit.seed, model=model, device=self._device)
        if held.state is not None:
            training.load_state_dict(held.state)
        return training

    def _some_batches(self, held: UnitInHand, training: UnitTraining) -> None:
        end = time.monotonic() + TURN_S
        while training.done < training.batches:
            held.progress.loss = training.step()
            held.progress.done = training.done
            now = time.monotonic()
            # a unit that was given back in the meantime is not saved again
            if held.training is training and now - held.saved >= SAVE_S:
                held.saved = now
                self._saves.save(held)
            if now >= end:
                return

    async def _compute(self, work: Callable[[], T]) -> T:
        """Run code of the job on the training thread; raise _Over if the code fails."""
        await self._gate.wait_open()
        try:
            return await THREAD.run(work)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            # no retry, because it would fail again
            raise self._failed("the job's code", error) from error


def _owner(client: CoordinatorClient, card: JobCard) -> str:
    """Return a name for the saved units of a volunteer in a job. The name does not depend on the coordinator."""
    job = msgspec.structs.replace(card, key=b"", membership=b"", signature=b"").encode()
    return sha256(client.token.identity.id + job).hexdigest()


def volunteer(
    link: str,
    *,
    job: Job | None = None,
    trust_code: bool = False,
    units: int = 1,
    peer_name: str = "",
    folder: str | Path | None = None,
    device: str | torch.device | None = None,
    accept_terms: Consent = False,
) -> Volunteer:
    """Train units of a job on this machine. The volunteer only makes outgoing HTTP(S) requests.

    If the kernel dies, call this again with the same ``peer_name`` and ``folder``. The volunteer then resumes the units
    whose deadline has not passed. A second call while the volunteer works returns the same volunteer, so you can run a
    cell again. Raises InviteError for a wrong link, JoinError if the coordinator does not answer or does not admit this
    peer, and TermsError if the platform's terms are not accepted. Raises ValueError if ``job`` is another job, or if
    you have not trusted the code yet. The message then says where to read the code.

    Args:
        link: the link that the coordinator shows.
        job: your copy of the job. The volunteer then runs your code, and not the code that the coordinator sends.
        trust_code: True to run the code that the coordinator sends. Read the code first.
        units: how many units to train at a time.
        peer_name: the name that others see. By default the name of this machine.
        folder: folder for data and unfinished units. By default in your home.
        device: where to train. By default a GPU, if there is one.
        accept_terms: True if the platform's terms allow volunteering, as Colab requires.
    """
    url, invite = parse_link(link)
    name = peer_name or socket.gethostname()
    for other in list(_volunteers):
        if other.url == url.rstrip("/") and other.folder.name == _plain(name):
            if not other._seen.over:
                return other
            # this releases the folder
            other.close()
    require_terms(accept_terms)

    def client(own: Path) -> CoordinatorClient:
        token = token_by(invite, Identity.load_or_create(own / "volunteer.key"))
        authority = None if invite.access == "open" else invite.authority
        return CoordinatorClient(url, token, run_id=invite.run_id, authority=authority)

    return open_volunteer(
        client, name=name, job=job, trust_code=trust_code, units=units, folder=folder, device=device
    )


def open_volunteer(
    client_in: Callable[[Path], CoordinatorClient],
    *,
    name: str,
    job: Job | None,
    trust_code: bool,
    units: int,
    folder: str | Path | None,
    device: str | torch.device | None,
    gate: PauseGate | None = None,
) -> Volunteer:
    """Begin to work for a coordinator. ``client_in`` returns a client for it, given the volunteer's folder."""
    runtime = Runtime.shared()
    own, lock = take_folder(folder, name)
    with ExitStack() as held:
        held.callback(lock.release)
        client = client_in(own)
        held.callback(lambda: runtime.call(client.aclose()))
        card = runtime.call(_card_of(client))
        job = job or _trusted(card, own, trust_code=trust_code)
        volunteer = Volunteer(
            client, job, card, own, units=units, name=name, device=_device(device), gate=gate
        )
        runtime.call(volunteer.begin())
        volunteer._held = held.pop_all()
    _volunteers.add(volunteer)
    atexit.register(volunteer.close, finish_s=0.0)
    return volunteer


def resources_of(device: torch.device | None) -> Resources:
    """Return the resources of this machine for one job. A resource that the system does not report is 0."""
    memory_bytes = 0
    # Windows has no `sysconf`
    with suppress(AttributeError, ValueError, OSError):
        # -1 if the system does not know
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * max(0, os.sysconf("SC_PHYS_PAGES"))
    gpu_bytes = 0
    if device is not None and device.type == "cuda":
        gpu_bytes = torch.cuda.get_device_properties(device).total_memory
    return Resources(cores(), memory_bytes / 1e9, gpu_bytes / 1e9)


def _device(name: str | torch.device | None) -> torch.device:
    if not name:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


async def _card_of(client: CoordinatorClient) -> JobCard:
    try:
        async with asyncio.timeout(FIRST_ANSWER_S):
            return await client.card()
    except PeerError as error:
        raise JoinError(str(error)) from error
    except TimeoutError as error:
        raise JoinError(
            f"no coordinator answers at {client.url} ({client.trouble or 'silence'}): is it still running? "
            "Ask its organizer for the newest link"
        ) from error


def _trusted(card: JobCard, folder: Path, *, trust_code: bool) -> Job:
    require(
        card.code,
        f"the job {card.name!r} was made in a notebook and has no file of code: run the cell that makes it here "
        "too, and give it as job=; or its organizer puts it into a file (%%writefile job.py, cs.workunits.Job.load)",
    )
    digest = sha256(card.code.encode()).hexdigest()
    path = folder / "jobs" / f"{card.name}-{digest[:12]}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(card.code, encoding="utf-8")
    require(
        trust_code,
        f"the job {card.name!r} runs its organizer's code on this machine ({len(card.code.splitlines())} lines): "
        f"read {path}, and if you trust it, volunteer with trust_code=True",
    )
    return Job.from_code(card.code, str(path))


def take_folder(folder: str | Path | None, name: str) -> tuple[Path, FileLock]:
    """Lock and return the first free folder of ``name``, ``name-2`` …, because two volunteers need two folders."""
    if folder is None:
        folder = Path.home() / ".cache" / "colab_swarm" / "volunteers"
    base = Path(folder)
    for number in range(1, MAX_FOLDERS + 1):
        own = base / (_plain(name) if number == 1 else f"{_plain(name)}-{number}")
        own.mkdir(parents=True, exist_ok=True)
        lock = FileLock(own / "lock", thread_local=False)
        with suppress(Timeout):
            lock.acquire(timeout=0)
            return own, lock
    raise ValueError(f"{MAX_FOLDERS} volunteers called {name!r} work in {base}: give another name=")


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)
