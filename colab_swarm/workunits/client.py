"""The volunteer's side of `colab_swarm.workunits.messages`: plain requests over outgoing HTTP(S).

Whatever the network does, a call goes on trying, and `CoordinatorClient.trouble` says why it takes so long; what was
fetched or sent before a connection broke is not fetched or sent again. Only what the coordinator itself refuses, by a
`Problem`, ends a call: with `CallRefused`, whose code is the problem's. An error page of some proxy in between is
trouble like any other.

Subsets of data on a volunteer's disk, so that each is fetched once; bounded, the least recently used goes first.

A file is named by the SHA-256 of what it holds, which is checked whenever it is read: a garbled one is as good as none.
Its time of modification tells when it was last used. Several volunteers may share the folder.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeVar

import aiohttp
import msgspec

from colab_swarm.errors import CallRefused, NotAdmitted, ProtocolError
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.net.peers import UNDECODABLE, Role
from colab_swarm.workunits.job import MAX_CODE_CHARACTERS
from colab_swarm.workunits.messages import (
    MAX_HELD,
    AskForUnits,
    Backoff,
    BackoffSettings,
    GiveBack,
    GivenUnits,
    JobCard,
    Problem,
    Subset,
    Taken,
)
from colab_swarm.workunits.tokens import FRESH_S, Token
from colab_swarm.workunits.weights import Floats, Schema


class Trouble(ProtocolError):
    """Worth another try, after ``asked_s`` seconds at least."""

    def __init__(self, text: str, asked_s: float = 0.0) -> None:
        super().__init__(text)
        self.asked_s = asked_s


class Download:
    """What is here of a file, across broken connections.

    Attributes:
        etag: version that ``data`` are of.

    Args:
        target: path of the request.
        size_bytes: of the whole file.
    """

    def __init__(self, target: str, size_bytes: int) -> None:
        self.target, self.size_bytes = target, size_bytes
        self.etag, self.data = "", bytearray()

    def headers(self) -> dict[str, str]:
        """Ask for the rest of this version; if nobody knows which it is, for all of any."""
        if not (self.data and self.etag):
            return {}
        return {"Range": f"bytes={len(self.data)}-", "If-Range": self.etag}

    async def take(self, pieces: AsyncIterator[bytes], status: int, headers: Mapping[str, str]) -> None:
        """Take an answer; what has come is kept, wherever it breaks off.

        Raises:
            Trouble: it is not what was asked for.
        """
        if status != 206:
            self.data, self.etag = bytearray(), headers.get("ETag", "")
        elif not headers.get("Content-Range", "").startswith(f"bytes {len(self.data)}-"):
            self.data = bytearray()
            raise Trouble(f"{self.target} came in another range than asked for")
        async for piece in pieces:
            if len(self.data) + len(piece) > self.size_bytes:
                self.data = bytearray()
                raise Trouble(f"{self.target} is longer than its {self.size_bytes:,} bytes")
            self.data += piece
        if len(self.data) < self.size_bytes:
            raise Trouble(f"{self.target} ended after {len(self.data):,} of {self.size_bytes:,} bytes")


logger = logging.getLogger(__name__)

SUFFIX, PARTIAL = ".subset", ".partial"


class SubsetCache:
    """Files by their SHA-256, in hex.

    Args:
        folder: made at the first `put`.
        max_bytes: of all files together.

    Attributes:
        hits, misses: what was asked for and was here, and was not.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self.hits = self.misses = 0

    def get(self, digest: str) -> bytes | None:
        """What was put, if it is still there and sound."""
        found = self._read(digest)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
        return found

    def _read(self, digest: str) -> bytes | None:
        path = self._folder / (digest + SUFFIX)
        try:
            data = path.read_bytes()
            if sha256(data).hexdigest() == digest:
                os.utime(path)
                return data
            logger.warning("%s is garbled and is fetched anew", path)
            path.unlink()
        except OSError:  # it went while we looked
            return None
        return None

    def put(self, digest: str, data: bytes) -> None:
        """Keep ``data``; where the disk does not let it, only a warning tells."""
        if len(data) > self._max_bytes:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(self._max_bytes - len(data))
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=PARTIAL, delete=False) as file:
                file.write(data)
            os.replace(file.name, self._folder / (digest + SUFFIX))
        except OSError as error:
            logger.warning("cannot keep %s bytes of data in %s: %s", f"{len(data):,}", self._folder, error)

    def held(self) -> tuple[str, ...]:
        """What is here, last used first; as many as fit in a message."""
        return tuple(path.stem for _, _, path in reversed(self._files()) if path.suffix == SUFFIX)[:MAX_HELD]

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of use, size in bytes and path, oldest first; with what a killed process left half written."""
        found = []
        for path in [*self._folder.glob(f"*{SUFFIX}"), *self._folder.glob(f"*{PARTIAL}")]:
            try:
                stat = path.stat()
            except OSError:  # another volunteer made room
                continue
            found.append((stat.st_mtime, stat.st_size, path))
        return sorted(found)

    def _make_room(self, max_bytes: int) -> None:
        files = self._files()
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


T = TypeVar("T")

PIECE_BYTES = 1 << 20

"""Of an upload: what a broken connection costs at most."""

READ_BYTES = 64 << 10

MAX_CARD_BYTES = 16 << 20

MAX_ANSWER_BYTES = 64 << 10

MAX_CODE_BYTES = 4 * MAX_CODE_CHARACTERS

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=20.0, sock_read=60.0)

"""No bound on the whole: a large file may take its time as long as it moves."""

HEADERS = {"Accept-Encoding": "identity", "Content-Type": "application/octet-stream"}

"""Ranges count bytes of the file itself; data are compressed already."""

TROUBLE = (aiohttp.ClientError, OSError)

"""What is worth another try; so are timeouts and `Trouble`, which are OSErrors."""

GOOD = (200, 206, 304)

CONFLICT = 409

"""A piece does not go on where the coordinator is; header Received tells where that is."""


class CoordinatorClient:
    """Speaks to one coordinator. Use it in one event loop, and `close` it.

    Attributes:
        trouble: why the call in progress takes so long, for people; empty while all is well.
        sent_bytes, received_bytes: of bodies.

    Args:
        url: of the coordinator, such as ``https://example.org``.
        token: signs the requests.
        run_id: the run that the coordinator must belong to.
        authority: the run's public key; None where everybody may join, and anybody coordinate.
        backoff: how long to wait between tries.
        rng: chance.
        clock: seconds since the epoch; the coordinator's own clock corrects it.
    """

    def __init__(
        self,
        url: str,
        token: Token,
        *,
        run_id: str,
        authority: bytes | None,
        backoff: BackoffSettings | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url, self.token = url.rstrip("/"), token
        self.trouble, self.sent_bytes, self.received_bytes = "", 0, 0
        self._run_id, self._authority = run_id, authority
        self._backoff, self._rng, self._clock = backoff or BackoffSettings(), rng or random.Random(), clock
        self._ahead_s = 0.0  # the coordinator's clock, before ours
        self._session: aiohttp.ClientSession | None = None
        self._newest: tuple[str, str, Floats] | None = None  # target, ETag and values fetched last
        self._fetching = asyncio.Lock()

    async def card(self) -> JobCard:
        """What there is to train.

        Raises:
            CallRefused: the coordinator does not let this peer take part.
            NotAdmitted: it is not a coordinator of the run.
        """
        card = await self._message("GET", "/api/job", JobCard)
        if card.run_id != self._run_id:
            raise NotAdmitted(f"{self.url} coordinates another run: ask its organizer for a new link")
        if not card.is_signed_by(card.key):
            raise NotAdmitted(f"{self.url} shows a job with a wrong signature: do not trust it")
        if self._authority is not None:
            admission = MembershipAdmission(card.run_id, authority=self._authority, own=b"")
            role = admission.verify(card.key, card.membership, now=self._now())
            if role < Role.WORKER:
                raise NotAdmitted(f"{self.url} belongs to a {role.name.lower()}, who may not coordinate")
        return card

    async def code(self, card: JobCard) -> str:
        """The job's Python text; empty if it has none.

        Raises:
            CallRefused: see `card`.
        """
        if not card.code_sha256:
            return ""

        async def attempt() -> str:
            async with self._request("GET", "/api/code") as answer:
                body = await _body(answer, MAX_CODE_BYTES)
            if sha256(body).hexdigest() != card.code_sha256:
                raise Trouble("the job's code came garbled")
            return body.decode()

        return await self._until_done(attempt)

    async def ask(
        self, count: int, *, held: Sequence[str] = (), name: str = "", in_hand: Sequence[str] = ()
    ) -> GivenUnits:
        """Ask for up to ``count`` units, best of data that are ``held`` (SHA-256), besides those ``in_hand``.

        Raises:
            CallRefused: there are none for this peer; the text says why.
        """
        body = msgspec.msgpack.encode(AskForUnits(count, tuple(held), name, tuple(in_hand)))
        return await self._message("POST", "/api/units", GivenUnits, body)

    async def give_back(self, assignments: Sequence[str]) -> None:
        """Say that these will not be trained.

        Raises:
            CallRefused: the coordinator does not let this peer take part.
        """
        await self._message(
            "POST", "/api/return", GivenUnits, msgspec.msgpack.encode(GiveBack(tuple(assignments)))
        )

    async def data(self, subset: Subset) -> bytes:
        """A subset of the data, for `Rows.decode`.

        Raises:
            CallRefused: the coordinator has no such data.
        """
        download = Download(f"/api/data/{subset.sha256}", subset.size_bytes)

        async def attempt() -> bytes:
            await self._fetch(download, download.headers())
            data = bytes(download.data)
            if await asyncio.to_thread(lambda: sha256(data).hexdigest()) != subset.sha256:
                download.data.clear()
                raise Trouble("a subset of the data came garbled")
            return data

        return await self._until_done(attempt)

    async def parameters(self, path: str, schema: Schema) -> Floats:
        """The parameters (numel,) at ``path`` below /api, read-only; not fetched again while they are the same.

        Raises:
            CallRefused: there are none, for the unit is done.
        """
        download = Download(f"/api/{path}", len(schema.head()) + 4 * schema.numel)

        async def attempt() -> Floats:
            target, etag, values = self._newest or ("", "", None)
            known = target == download.target and etag and not download.data
            headers = {"If-None-Match": etag} if known else download.headers()
            if not await self._fetch(download, headers) and values is not None:
                return values
            try:
                values = schema.decode(memoryview(download.data))
            except ValueError as error:
                download.data = bytearray()
                raise Trouble(f"the parameters cannot be used: {error}") from error
            values.flags.writeable = False
            self._newest = download.target, download.etag, values
            return values

        async with self._fetching:  # of two units at once, the second finds what the first has fetched
            return await self._until_done(attempt)

    async def upload(self, assignment: str, data: bytes) -> Taken:
        """Bring a result, in pieces.

        Raises:
            CallRefused: it is no use; the text says why.
        """
        target, at, lost = f"/api/results/{assignment}", 0, False

        async def attempt() -> Taken:
            nonlocal at, lost
            while True:
                piece = data[at : at + PIECE_BYTES]
                place = {"Content-Range": f"bytes {at}-{at + len(piece) - 1}/{len(data)}"}
                try:
                    async with self._request("PUT", target, piece, place) as answer:
                        if answer.status == CONFLICT:  # an answer was lost, or a killed process sent some
                            at = _received(answer, at, len(data))
                            continue
                        taken = _decoded(await _body(answer, MAX_ANSWER_BYTES), Taken)
                except CallRefused as error:
                    if lost and error.code == "stale":  # it was taken
                        return Taken(len(data), accepted=True)
                    raise
                except TROUBLE:
                    lost = at + len(piece) == len(data)  # perhaps only the answer to the last piece
                    raise
                self.sent_bytes += len(piece)
                if taken.accepted:
                    return taken
                if not at < taken.received < len(data):
                    raise Trouble(
                        f"the coordinator has {taken.received:,} bytes of an upload: that cannot be"
                    )
                at = taken.received

        return await self._until_done(attempt)

    async def close(self) -> None:
        """Hang up."""
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"CoordinatorClient({self.url})"

    # --- one request, and as many as it takes ------------------------------------------------------------------------

    async def _message(self, method: str, target: str, kind: type[T], body: bytes = b"") -> T:
        async def attempt() -> T:
            async with self._request(method, target, body) as answer:
                return _decoded(await _body(answer, MAX_CARD_BYTES), kind)

        return await self._until_done(attempt)

    async def _fetch(self, download: Download, headers: Mapping[str, str]) -> bool:
        """Go on with a download; returns whether anything came, else what was known is the newest."""
        async with self._request("GET", download.target, headers=headers) as answer:
            if answer.status == 304:
                return False
            before = len(download.data) if answer.status == 206 else 0
            try:
                await download.take(answer.content.iter_chunked(READ_BYTES), answer.status, answer.headers)
            finally:
                self.received_bytes += max(0, len(download.data) - before)
        return True

    async def _until_done(self, attempt: Callable[[], Awaitable[T]]) -> T:
        backoff = Backoff(self._backoff, self._rng)
        while True:
            try:
                result = await attempt()
            except CallRefused:
                raise
            except TROUBLE as error:
                wait_s = backoff.failed(getattr(error, "asked_s", 0.0))
                said = str(error) or type(error).__name__
                self.trouble = f"coordinator unreachable ({said}), trying again in {wait_s:.0f} s"
                logger.debug("%s: %s", self.url, self.trouble)
                await asyncio.sleep(wait_s)
            else:
                self.trouble = ""
                return result

    @asynccontextmanager
    async def _request(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One signed request.

        Raises:
            CallRefused: the coordinator refuses it.
            Trouble: somebody else does, or the coordinator cannot answer now.
        """
        if self._session is None:  # in the loop, which there is none of at construction
            self._session = aiohttp.ClientSession(
                timeout=TIMEOUT, headers=HEADERS, trust_env=True, middlewares=(_once,)
            )
        token = self.token.header(method, target, body, now=self._now())
        async with self._session.request(
            method,
            self.url + target,
            data=body or None,
            headers={"Authorization": token, **(headers or {})},
            allow_redirects=False,
        ) as answer:
            if answer.status not in GOOD and not (answer.status == CONFLICT and "Received" in answer.headers):
                await self._refused(answer)
            yield answer

    async def _refused(self, answer: aiohttp.ClientResponse) -> NoReturn:
        problem = _problem(await _body(answer, MAX_ANSWER_BYTES))
        asked_s = _seconds(answer.headers.get("Retry-After", ""))
        if problem is None:
            raise Trouble(f"answer {answer.status} {answer.reason}", asked_s)
        if problem.code == "token" and self._set_clock(answer.headers.get("Date", "")):
            raise Trouble("your clock is wrong, the coordinator's is taken")
        if problem.code == "busy" or answer.status >= 500:
            raise Trouble(problem.text, asked_s)
        raise CallRefused(problem.code, problem.text)

    def _set_clock(self, date: str) -> bool:
        """Take the coordinator's time, if ours is so far from it that tokens are refused."""
        try:
            ahead_s = parsedate_to_datetime(date).timestamp() - self._clock()
        except ValueError:
            return False
        wrong = abs(ahead_s - self._ahead_s) > FRESH_S / 2
        if wrong:
            self._ahead_s = ahead_s
        return wrong

    def _now(self) -> float:
        return self._clock() + self._ahead_s


async def _once(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Keeps aiohttp from sending the same bytes again on its own: a token is good for one request."""
    try:
        return await send(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise Trouble(str(error)) from error


async def _body(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    body = bytearray()
    async for piece in answer.content.iter_chunked(READ_BYTES):
        body += piece
        if len(body) > most_bytes:
            raise Trouble(f"an answer of over {most_bytes:,} bytes")
    return bytes(body)


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except UNDECODABLE as error:
        raise Trouble("an answer that no coordinator gives: is the link right?") from error


def _problem(body: bytes) -> Problem | None:
    """What the coordinator says; None if it was not the coordinator that answered."""
    try:
        return msgspec.msgpack.decode(body, type=Problem)
    except UNDECODABLE:
        return None


def _received(answer: aiohttp.ClientResponse, at: int, size: int) -> int:
    """Where the coordinator wants an upload of ``size`` bytes to go on, if not ``at``."""
    text = answer.headers["Received"]
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) == at or int(text) >= size:
        raise Trouble(f"a piece at byte {at:,} was not taken")
    return int(text)


def _seconds(text: str) -> float:
    """Of a Retry-After header; those that hold a date count as 0."""
    return float(text) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text) else 0.0
