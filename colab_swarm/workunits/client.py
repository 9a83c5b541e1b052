"""The volunteer's HTTP client, and its disk cache of data and unfinished units.

The client retries a call until it succeeds. After a broken connection, a download resumes where it stopped, and an
upload starts again. If the coordinator itself refuses a call by a `Problem`, the call raises `CallRefused` with the
problem's code. The client retries after a `Problem` with the code ``busy``, after an error page of a proxy, and once it
has corrected its clock.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import aiohttp
import msgspec

from colab_swarm.errors import CallRefused, NotAdmitted, PeerError, StateError, require
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.net.patience import backoff
from colab_swarm.net.peers import UNDECODABLE, Role
from colab_swarm.training.state import load_checkpoint, save_checkpoint
from colab_swarm.workunits.job import UnitTraining
from colab_swarm.workunits.messages import (
    FRESH_S,
    PACKED,
    AskForUnit,
    GivenUnit,
    JobCard,
    Problem,
    Subset,
    Taken,
    Token,
    UnitAnswer,
)
from colab_swarm.workunits.weights import Floats, Schema


class RetryableError(PeerError):
    """An error after which the client retries, at the earliest ``asked_s`` seconds later."""

    def __init__(self, text: str, asked_s: float = 0.0) -> None:
        super().__init__(text)
        self.asked_s = asked_s


logger = logging.getLogger(__name__)


class SubsetCache:
    """Files of a job's data on disk, named by their SHA-256. Deletes files that are not in ``digests``."""

    def __init__(self, folder: Path, digests: Collection[str]) -> None:
        self._folder = folder
        names = {path.name for path in folder.glob("[0-9a-f]" * 64)}
        for name in names.difference(digests):
            with suppress(OSError):
                (folder / name).unlink()

    def get(self, digest: str) -> bytes | None:
        """Return a file's content, or None if the file is missing or garbled."""
        path = self._folder / digest
        with suppress(OSError):
            data = path.read_bytes()
            if sha256(data).hexdigest() == digest:
                return data
            logger.warning("%s is garbled and is fetched again", path)
            path.unlink()
        return None

    def put(self, digest: str, data: bytes) -> None:
        """Save ``data`` if there is room. If the disk fails, only log a warning."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            size_bytes = sum(path.stat().st_size for path in self._folder.iterdir())
            if size_bytes + len(data) <= MAX_CACHE_BYTES:
                (self._folder / digest).write_bytes(data)
        except OSError as error:
            logger.warning("cannot save %s bytes of data in %s: %s", f"{len(data):,}", self._folder, error)


T = TypeVar("T")
MAX_CACHE_BYTES = 2 << 30
READ_BYTES = 64 << 10
MAX_ANSWER_BYTES = 64 << 10
MAX_CARD_BYTES = 16 << 20
LONGEST_WAIT_S = 900.0
"""Longest wait that the other side may ask for."""
# "identity", because ranges count bytes of the file itself, and the data are compressed already
HEADERS = {"Accept-Encoding": "identity", "Content-Type": "application/octet-stream"}
TROUBLE = (aiohttp.ClientError, OSError)
"""Errors after which to retry. Timeouts and `RetryableError` are OSErrors."""
GOOD = (200, 206)


class CoordinatorClient:
    """Connection to one coordinator of the run ``run_id``. Use it in one event loop, and `aclose` it at the end.

    Each method raises `CallRefused` if the coordinator refuses. After other errors it retries. The waits grow from
    the first to the second value of ``retry_s``. ``authority`` is the run's public key, or None in an open run.
    ``clock`` returns seconds since the epoch (1970). The client corrects this time by the coordinator's clock.
    ``trouble`` is the error after which the client retries the current call, or empty.
    """

    def __init__(
        self,
        url: str,
        token: Token,
        *,
        run_id: str,
        authority: bytes | None,
        retry_s: tuple[float, float] = (1.0, 60.0),
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self.trouble = ""
        self.sent_bytes = 0
        self.received_bytes = 0
        self._run_id = run_id
        self._authority = authority
        self._retry_s = retry_s
        self._rng = rng or random.Random()
        self._clock = clock
        # how far the coordinator's clock is ahead of this one
        self._ahead_s = 0.0
        self._session: aiohttp.ClientSession | None = None

    async def card(self) -> JobCard:
        """Return the job; raise NotAdmitted unless the run's authority admitted its coordinator as a worker."""
        card = await self._call("GET", "/api/job", JobCard)
        require(card.run_id == self._run_id, f"{self.url} is of another run: use its link", NotAdmitted)
        require(card.is_signed_by(card.key), f"{self.url}: wrong signature, do not trust it", NotAdmitted)
        if self._authority is not None:
            admission = MembershipAdmission(card.run_id, authority=self._authority, own=b"")
            role = admission.verify(card.key, card.membership, now=self._now())
            if role < Role.WORKER:
                raise NotAdmitted(f"{self.url} belongs to a {role.name.lower()}, who may not coordinate")
        return card

    async def ask(self, request: AskForUnit) -> UnitAnswer:
        """Request a unit, or return all units untrained."""
        return await self._call("POST", "/api/units", UnitAnswer, msgspec.msgpack.encode(request))

    async def data(self, subset: Subset) -> bytes:
        """Fetch a subset of the data, for `Rows.decode`."""

        def checked(file: bytes) -> bytes:
            require(sha256(file).hexdigest() == subset.sha256, "other bytes than the job's card says")
            return file

        return await self._download(f"/api/data/{subset.sha256}", subset.size_bytes, checked)

    async def parameters(self, path: str, schema: Schema) -> Floats:
        """Fetch the parameters (numel,) at ``path`` below /api, read-only."""

        def decode(file: bytes) -> Floats:
            return schema.decode(schema.unpack(file))

        return await self._download(f"/api/{path}", schema.size_bytes, decode, accept=PACKED)

    async def upload(self, assignment: str, data: bytes) -> None:
        """Send a result; return once the coordinator has accepted it."""
        target = f"/api/results/{assignment}"
        lost = False

        async def attempt() -> None:
            nonlocal lost
            try:
                async with self._request("PUT", target, data) as answer:
                    taken = _decoded(await _body(answer, MAX_ANSWER_BYTES), Taken)
            except CallRefused as error:
                # an earlier upload arrived, but its answer was lost
                if lost and error.code == "stale":
                    return
                raise
            except TROUBLE:
                lost = True
                raise
            require(taken.assignment == assignment, "the answer to another upload", RetryableError)
            self.sent_bytes += len(data)

        await self._until_done(attempt)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    # -- one request, and its retries

    async def _call(self, method: str, target: str, kind: type[T], body: bytes = b"") -> T:
        async def attempt() -> T:
            async with self._request(method, target, body) as answer:
                return _decoded(await _body(answer, MAX_CARD_BYTES), kind)

        return await self._until_done(attempt)

    async def _download(
        self, target: str, size_bytes: int, decode: Callable[[bytes], T], *, accept: str = "*/*"
    ) -> T:
        """Fetch a file; after a broken connection, resume the download."""
        data = bytearray()
        etag = ""

        async def attempt() -> T:
            nonlocal data, etag
            headers = {"Accept": accept}
            if data and etag:
                headers |= {"Range": f"bytes={len(data)}-", "If-Range": etag}
            async with self._request("GET", target, headers=headers) as answer:
                if answer.status != 206:
                    data = bytearray()
                    etag = answer.headers.get("ETag", "")
                elif not answer.headers.get("Content-Range", "").startswith(f"bytes {len(data)}-"):
                    data = bytearray()
                    raise RetryableError(f"{target} came in another range than requested")
                await self._receive(answer, data, size_bytes)
            try:
                return await asyncio.to_thread(decode, bytes(data))
            except ValueError as error:
                data = bytearray()
                raise RetryableError(f"{target} cannot be used: {error}") from error

        return await self._until_done(attempt)

    async def _receive(self, answer: aiohttp.ClientResponse, data: bytearray, size_bytes: int) -> None:
        """Append the answer's body to ``data``, a file of ``size_bytes``; raise RetryableError if it ends too early."""
        async for piece in answer.content.iter_chunked(READ_BYTES):
            data += piece
            self.received_bytes += len(piece)
            if len(data) > size_bytes:
                return
        # aiohttp itself raises an error if a compressed file ends early
        if len(data) < size_bytes and answer.content_type != PACKED:
            raise RetryableError(f"{answer.url.path} ended after {len(data):,} of {size_bytes:,} bytes")

    async def _until_done(self, attempt: Callable[[], Awaitable[T]]) -> T:
        waits_s = backoff(self._rng, *self._retry_s)
        while True:
            try:
                answer = await attempt()
            except CallRefused:
                raise
            except TROUBLE as error:
                asked_s = min(getattr(error, "asked_s", 0.0), LONGEST_WAIT_S)
                wait_s = max(next(waits_s), asked_s)
                reason = str(error) or type(error).__name__
                self.trouble = f"coordinator unreachable ({reason}), trying again in {wait_s:.0f} s"
                await asyncio.sleep(wait_s)
            else:
                self.trouble = ""
                return answer

    @asynccontextmanager
    async def _request(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] = {}
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one signed request; raise CallRefused, or RetryableError if a retry may succeed."""
        # a session needs a running loop
        if self._session is None:
            self._session = _session()
        token = self.token.header(method, target, body, now=self._now())
        async with self._session.request(
            method,
            self.url + target,
            data=body or None,
            headers={"Authorization": token, **headers},
            allow_redirects=False,
        ) as answer:
            if answer.status not in GOOD:
                await self._refused(answer)
            yield answer

    async def _refused(self, answer: aiohttp.ClientResponse) -> NoReturn:
        """Raise the error of a refusal: CallRefused, or RetryableError if a retry may succeed."""
        body = await _body(answer, MAX_ANSWER_BYTES)
        retry_after = answer.headers.get("Retry-After", "")
        asked_s = 0.0
        if re.fullmatch(r"[0-9]{1,6}", retry_after):
            asked_s = float(retry_after)
        try:
            problem = msgspec.msgpack.decode(body, type=Problem)
        except UNDECODABLE as error:
            # the answer is not from the coordinator, but for example from a proxy
            raise RetryableError(f"answer {answer.status} {answer.reason}", asked_s) from error
        if problem.code == "token" and self._adopt_clock(answer.headers.get("Date", "")):
            raise RetryableError("your clock is wrong: the coordinator's is used")
        if problem.code == "busy" or answer.status >= 500:
            raise RetryableError(problem.text, asked_s)
        raise CallRefused(problem.code, problem.text)

    def _adopt_clock(self, date: str) -> bool:
        """Correct this client's clock by the coordinator's; return True if it was wrong."""
        try:
            ahead_s = parsedate_to_datetime(date).timestamp() - self._clock()
        except ValueError:
            return False
        if abs(ahead_s - self._ahead_s) <= FRESH_S / 2:
            return False
        self._ahead_s = ahead_s
        return True

    def _now(self) -> float:
        return self._clock() + self._ahead_s


def _session() -> aiohttp.ClientSession:
    # a large file may take any time as long as data arrive
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=20.0, sock_read=60.0)
    return aiohttp.ClientSession(timeout=timeout, headers=HEADERS, trust_env=True, middlewares=(_once,))


async def _once(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Keep aiohttp from sending a request again by itself, because a token is valid only once."""
    try:
        return await send(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise RetryableError(str(error)) from error


async def _body(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    body = bytearray()
    async for piece in answer.content.iter_chunked(READ_BYTES):
        body += piece
        require(len(body) <= most_bytes, f"an answer of over {most_bytes:,} bytes", RetryableError)
    return bytes(body)


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except UNDECODABLE as error:
        raise RetryableError("an answer that no coordinator gives: is the link right?") from error


@dataclass
class UnitProgress:
    """Progress of a unit that the volunteer holds, as shown to people."""

    unit: str
    phase: str = "waiting"  # or downloading, training, uploading
    done: int = 0  # batches trained so far
    batches: int = 0  # all batches of the unit
    loss: float | None = None  # of the latest batch; None before the first
    seconds: float = 0.0  # since the unit's arrival


@dataclass
class VolunteerSnapshot:
    """Progress of one volunteer in a job."""

    job: str  # its name
    state: str = ""  # the volunteer's activity, or why it ended, for people
    over: bool = False
    fault: str = ""  # traceback of the job's code, if an error in it ended the volunteer
    epoch: int = 0  # of the job, as last reported
    accuracy: float | None = None  # of the previous epoch
    units: tuple[UnitProgress, ...] = ()  # units that the volunteer holds
    # the next fields are numbers of units
    accepted: int = 0
    refused: int = 0
    given_back: int = 0
    surplus: int = 0  # units for which another volunteer's result came first
    refusal: str = ""  # why the last result was refused
    samples: int = 0  # trained in accepted units
    sent_bytes: int = 0  # of results
    received_bytes: int = 0  # of data and parameters
    seconds: float = 0.0  # from the volunteer's start until now, or until its end


@dataclass
class UnitInHand:
    """A unit from its arrival until its result is uploaded or refused."""

    unit: GivenUnit
    deadline: float  # seconds since the epoch
    state: dict[str, Any] | None = None  # of `UnitTraining`, as saved by a process that was killed
    training: UnitTraining | None = None  # None until the unit's files are downloaded
    # monotonic times of the unit's arrival and of its latest save
    began: float = field(default_factory=time.monotonic)
    saved: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.progress = UnitProgress(f"epoch {self.unit.epoch}, subset {self.unit.subset}")


class UnitSaves:
    """Files of the units that a volunteer holds. After a kill, the volunteer resumes from them.

    ``owner`` names the volunteer and the job.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder = folder
        self._owner = owner

    def save(self, held: UnitInHand) -> None:
        """Save a unit. If the disk is full or the optimizer's state cannot be saved, only log a warning."""
        state = {
            "owner": self._owner,
            "unit": msgspec.msgpack.encode(held.unit),
            "deadline": held.deadline,
            "training": held.training.state_dict() if held.training else held.state,
        }
        try:
            save_checkpoint(self._file(held.unit), state)
        except (StateError, OSError, TypeError, ValueError) as error:
            logger.warning("unit %s is not saved: %s", held.unit.assignment, error)

    def drop(self, unit: GivenUnit) -> None:
        # a file that cannot be deleted now is deleted after its deadline has passed
        with suppress(OSError):
            self._file(unit).unlink()

    def left_behind(self, *, now: float) -> list[UnitInHand]:
        """Return the saved units of a killed process; delete the files of units whose deadlines have passed."""
        units = []
        for path in sorted(self._folder.glob("*.unit")):
            try:
                state = load_checkpoint(path)
                unit = msgspec.msgpack.decode(state["unit"], type=GivenUnit)
                held = UnitInHand(unit, float(state["deadline"]), state["training"])
                owner = state["owner"]
            except (StateError, LookupError, TypeError, *UNDECODABLE) as error:
                logger.warning("a saved unit cannot be resumed: %s", error)
                path.unlink(missing_ok=True)
                continue
            if held.deadline <= now:
                path.unlink(missing_ok=True)
            elif owner == self._owner:
                units.append(held)
        return units

    def _file(self, unit: GivenUnit) -> Path:
        return self._folder / (unit.assignment + ".unit")
