"""The coordinator over HTTP: the requests of `colab_swarm.workunits.messages`, and a page for everybody.

What a volunteer may not do is refused as early as it is known: by its token, by the size it announces, by the
assignment it names; only then is a body read. Nothing of a request becomes a path of the file system: data are looked
up in the job's card, uploads by a pattern.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import TypeVar

import msgspec
from aiohttp import web

from colab_swarm.errors import NotAdmitted, StoreError
from colab_swarm.markup import content_security_policy
from colab_swarm.net.addresses import VisitLimit, source_of
from colab_swarm.net.peers import UNDECODABLE, Message, PeerId
from colab_swarm.workunits.coordination import Coordination, Refused
from colab_swarm.workunits.messages import MAX_BODY_BYTES, AskForUnits, GiveBack, Problem
from colab_swarm.workunits.overview import JobStatus
from colab_swarm.workunits.page import render_live, render_page, render_prometheus
from colab_swarm.workunits.state import Unit
from colab_swarm.workunits.tokens import Crowded, RequestGate
from colab_swarm.workunits.uploads import Gap, Uploads, piece_of, range_of

logger = logging.getLogger(__name__)
M = TypeVar("M", AskForUnits, GiveBack)
Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_PIECE_BYTES = 4 << 20
"""Of an upload; it is in memory while its digest is checked."""
MAX_UPLOADS, MAX_DOWNLOADS, MAX_EACH = 32, 64, 8
"""At once, and of one volunteer; whoever comes beyond that is asked to come again."""
READ_S, SEND_S, SLOWEST_BYTES_S = 300.0, 60.0, 32 << 10
"""How long a body may take to come, and a file to go, which has longer by its size."""
IDLE_S = 75.0
"""How long a connection may be silent, or take to say what it wants."""
SENT_BYTES = 64 << 10
BUSY_S, BROKEN_S = 1, 5
"""After how many seconds to come again."""
FAREWELL_S = 2.0
"""For taking in what is not wanted before the line is cut, and for ending what goes on when the server closes."""
FRESH_S = 1.0
ANSWERS_PER_S = 100
"""Pages for one visitor; see `colab_swarm.net.addresses`."""
STATUSES = {
    "token": 401,
    "banned": 403,
    "unknown": 404,
    "stale": 410,
    "invalid": 422,
    "size": 413,
    "busy": 503,
}
PAGE_HEADERS = {
    "Content-Security-Policy": content_security_policy(),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
PAGES: dict[str, tuple[str, Callable[[JobStatus], str | bytes]]] = {
    "/": ("text/html", render_page),
    "/live": ("text/html", render_live),
    "/metrics": ("text/plain", render_prometheus),
    "/status.json": ("application/json", msgspec.json.encode),
}
VOLUNTEER: web.RequestKey[PeerId] = web.RequestKey("volunteer", bytes)  # type: ignore[arg-type]
DIGEST: web.RequestKey[bytes] = web.RequestKey("digest", bytes)


class CoordinatorServer:
    """Serves a coordination that has started.

    Attributes:
        url: of the page, and of all else.
        running: uploads and downloads that go on.
    """

    def __init__(
        self,
        coordination: Coordination,
        uploads: Uploads,
        gate: RequestGate,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url = ""
        self._coordination, self._uploads, self._gate, self._clock = coordination, uploads, gate, clock
        self.running = {"upload": 0, "download": 0}
        self._each: Counter[tuple[str, PeerId]] = Counter()  # of them, by volunteer
        self._pages: dict[str, bytes] = {}
        self._paged_at, self._visits = float("-inf"), VisitLimit(ANSWERS_PER_S)
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one.

        Raises:
            OSError: the port is taken.
        """
        app = web.Application(middlewares=[self._explained, self._admitted], client_max_size=MAX_BODY_BYTES)
        for path in PAGES:
            app.router.add_get(path, self._page)
        routes = app.router
        routes.add_get("/api/job", self._job)
        routes.add_get("/api/code", self._code)
        routes.add_post("/api/units", self._units)
        routes.add_post("/api/return", self._return)
        routes.add_get("/api/data/{digest}", self._data)
        routes.add_get("/api/parameters", self._parameters)
        routes.add_get("/api/parameters/{unit}", self._base)
        routes.add_head("/api/results/{assignment}", self._received)
        routes.add_put("/api/results/{assignment}", self._piece)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=IDLE_S,
            auto_decompress=False,  # a small body may unpack to a large one
            lingering_time=FAREWELL_S,
            shutdown_timeout=FAREWELL_S,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except BaseException:
            await self.close()
            raise
        port = self._runner.addresses[0][1]
        shown = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/"

    async def close(self) -> None:
        """Listen no more."""
        if self._runner is not None:
            await self._runner.cleanup()

    # -- who may ask, and how a refusal looks

    @web.middleware
    async def _explained(self, request: web.Request, handler: Answering) -> web.StreamResponse:
        """Every refusal below /api is a `Problem`."""
        try:
            return await handler(request)
        except Refused as error:
            return _refusal(STATUSES[error.problem.code], error.problem)
        except Gap as error:
            refusal = _refusal(409, Problem("invalid", str(error)))
            refusal.headers["Received"] = str(error.received)
            return refusal
        except StoreError as error:
            logger.debug("a request waits for the store: %s", error)
            text = "the coordinator's store does not answer: come again in a few seconds"
            return _refusal(503, Problem("busy", text), retry_s=BROKEN_S)
        except web.HTTPException as error:
            if not request.path.startswith("/api") or error.status < 400:
                raise
            refusal = _refusal(
                error.status, Problem("unknown", f"{error.reason}: is this the newest colab-swarm?")
            )
            if "Allow" in error.headers:
                refusal.headers["Allow"] = error.headers["Allow"]
            return refusal

    @web.middleware
    async def _admitted(self, request: web.Request, handler: Answering) -> web.StreamResponse:
        if request.path not in PAGES:
            header = request.headers.get("Authorization", "")
            try:
                volunteer, digest = self._gate.check(
                    header, request.method, request.raw_path, now=self._clock()
                )
            except NotAdmitted as error:
                raise Refused("busy" if isinstance(error, Crowded) else "token", str(error)) from error
            self._coordination.check_ban(volunteer)
            request[VOLUNTEER], request[DIGEST] = volunteer, digest
        return await handler(request)

    async def _read(self, request: web.Request, most_bytes: int) -> bytes:
        """The body, which is what was signed."""
        size = request.content_length
        if size is None and request.body_exists:
            raise Refused("invalid", "the body's length is missing: send Content-Length")
        if (size or 0) > most_bytes:
            raise Refused("size", f"a body of {size:,} bytes: {most_bytes:,} at most")
        try:
            async with asyncio.timeout(READ_S):
                body = await request.content.read()
        except OSError as error:  # it hung up, or took too long
            raise Refused("busy", f"the body did not come within {READ_S:.0f} s: send it again") from error
        if sha256(body).digest() != request[DIGEST]:
            raise Refused("invalid", "the body is not what was signed")
        return body

    async def _message(self, request: web.Request, kind: type[M]) -> M:
        body = await self._read(request, MAX_BODY_BYTES)
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except UNDECODABLE as error:
            raise Refused("invalid", f"no {kind.__name__}: {error}") from error

    @asynccontextmanager
    async def _one_of(self, request: web.Request, kind: str, most: int) -> AsyncIterator[None]:
        mine = kind, request[VOLUNTEER]
        if self.running[kind] >= most or self._each[mine] >= MAX_EACH:
            raise Refused("busy", f"too many {kind}s are going on: come again in a second")
        self.running[kind] += 1
        self._each[mine] += 1
        try:
            yield
        finally:
            self.running[kind] -= 1
            self._each -= Counter([mine])  # and forgets those that have none

    # -- the job, units and results

    async def _job(self, request: web.Request) -> web.Response:
        return _answer(self._coordination.card)

    async def _code(self, request: web.Request) -> web.Response:
        return web.Response(text=self._coordination.code)

    async def _units(self, request: web.Request) -> web.Response:
        asked = await self._message(request, AskForUnits)
        return _answer(await self._coordination.ask(request[VOLUNTEER], asked))

    async def _return(self, request: web.Request) -> web.Response:
        given = await self._message(request, GiveBack)
        return _answer(await self._coordination.give_back(request[VOLUNTEER], given))

    async def _received(self, request: web.Request) -> web.Response:
        received = self._uploads.received(request[VOLUNTEER], _assignment(request))
        return web.Response(headers={"Received": str(received)})

    async def _piece(self, request: web.Request) -> web.Response:
        assignment, expected = _assignment(request), self._uploads.size_bytes
        try:
            start, size, whole = piece_of(request.headers.get("Content-Range", ""))
        except ValueError as error:
            raise Refused("invalid", str(error)) from error
        if whole != expected:
            raise Refused("size", f"a result of {whole:,} bytes: those of this job have {expected:,}")
        if size != request.content_length:
            raise Refused("invalid", f"Content-Range tells {size:,} bytes, Content-Length another number")
        self._uploads.check(request[VOLUNTEER], assignment)
        async with self._one_of(request, "upload", MAX_UPLOADS):
            piece = await self._read(request, MAX_PIECE_BYTES)
            return _answer(await self._uploads.add(request[VOLUNTEER], assignment, start, piece))

    # -- files

    async def _data(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        if not any(subset.sha256 == digest for subset in self._coordination.card.subsets):
            raise Refused("unknown", "no such data: ask for units")
        with (self._coordination.data_folder / digest).open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        keep = {"Cache-Control": "private, max-age=31536000, immutable"}
        return await self._send(request, data, f'"{digest}"', keep)

    async def _parameters(self, request: web.Request) -> web.StreamResponse:
        return await self._send_parameters(request, *await self._coordination.parameters_file())

    async def _base(self, request: web.Request) -> web.StreamResponse:
        found = re.fullmatch(r"([1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})", request.match_info["unit"])
        if found is None:
            raise Refused("unknown", "no such unit: ask for units")
        file = await self._coordination.parameters_file(Unit(int(found[1]), int(found[2])))
        return await self._send_parameters(request, *file)

    async def _send_parameters(
        self, request: web.Request, version: int, data: memoryview
    ) -> web.StreamResponse:
        told = {"Version": str(version), "Cache-Control": "no-cache"}
        return await self._send(request, data, f'"{version}"', told)

    async def _send(
        self, request: web.Request, data: memoryview, etag: str, told: dict[str, str]
    ) -> web.StreamResponse:
        headers = {"ETag": etag, "Accept-Ranges": "bytes", **told}
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers=headers)
        status, start, end = 200, 0, len(data)
        if request.headers.get("If-Range", etag) == etag and "Range" in request.headers:
            try:
                start, end = range_of(request.headers["Range"], len(data))
            except ValueError as error:
                refusal = _refusal(416, Problem("size", str(error)))
                refusal.headers["Content-Range"] = f"bytes */{len(data)}"
                return refusal
            status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{len(data)}"
        async with self._one_of(request, "download", MAX_DOWNLOADS):
            response = web.StreamResponse(status=status, headers=headers)
            response.content_type, response.content_length = "application/octet-stream", end - start
            try:
                async with asyncio.timeout(SEND_S + (end - start) / SLOWEST_BYTES_S):
                    await response.prepare(request)
                    for place in range(start, end, SENT_BYTES):
                        await response.write(bytes(data[place : min(place + SENT_BYTES, end)]))
            except OSError:  # it hung up, or took too long
                if request.transport is not None:
                    request.transport.abort()
        return response

    # -- pages

    async def _page(self, request: web.Request) -> web.Response:
        now = asyncio.get_running_loop().time()
        if now - self._paged_at >= FRESH_S:
            self._pages.clear()
            self._paged_at = now
        if not self._visits.admit(source_of(request), now):
            text = "too often: try again in a second"
            return web.Response(status=429, text=text, headers={"Retry-After": "1"})
        kind, render = PAGES[request.path]
        if request.path not in self._pages:
            made = render(self._coordination.status())
            self._pages[request.path] = made.encode() if isinstance(made, str) else made
        body = self._pages[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=PAGE_HEADERS)


def _assignment(request: web.Request) -> str:
    name = request.match_info["assignment"]
    if not re.fullmatch("[0-9a-f]{32}", name):
        raise Refused("unknown", "no such assignment: ask for units")
    return name


def _answer(message: Message) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(message), content_type="application/msgpack")


def _refusal(status: int, problem: Problem, *, retry_s: int = BUSY_S) -> web.Response:
    """Nothing more is read of the request."""
    response = _answer(problem)
    response.set_status(status)
    if status == 503:
        response.headers["Retry-After"] = str(retry_s)
    if status == 401:
        response.headers["WWW-Authenticate"] = "Swarm"
    return response
