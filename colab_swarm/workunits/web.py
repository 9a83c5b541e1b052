"""The coordinator over HTTP: requests of `colab_swarm.workunits.messages`, and a public status page.

A request is refused as early as possible: by its token, the size it announces, the assignment it
names. Only then is the body read. Nothing of a request becomes a path.
"""

import asyncio
import mmap
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
from aiohttp import web

from colab_swarm.errors import NotAdmitted, StoreError
from colab_swarm.net.peers import UNDECODABLE, Message
from colab_swarm.notebook.page import PATHS, listen
from colab_swarm.notebook.units_view import status_page
from colab_swarm.workunits.dispatcher import JobLog
from colab_swarm.workunits.job import Job, unit_seed
from colab_swarm.workunits.messages import (
    MAX_BODY_BYTES,
    SCHEME,
    AskForUnits,
    GivenUnit,
    GivenUnits,
    JobCard,
    Problem,
    Refused,
    RequestGate,
    Taken,
)
from colab_swarm.workunits.state import Assigned, JobStatus, Rejected, Unit
from colab_swarm.workunits.weights import Floats, Schema, as_bytes, moved

ASSIGNMENT = "[0-9a-f]{32}"
INITIAL = "/api/parameters/{epoch:[1-9][0-9]{0,8}}-{subset:0|[1-9][0-9]{0,8}}"
Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]
MIN_UPLOADS, MAX_UPLOADS, MAX_UPLOADS_BYTES = (
    4,
    32,
    1 << 30,
)  # at once, which are in memory; then volunteers must retry
MAX_DOWNLOADS, SHARE = 64, 4  # at once, and of those and of uploads a volunteer has one in `SHARE`
READ_S, SEND_S, SLOWEST_BYTES_S = 300.0, 60.0, 32 << 10  # limits; a large file has longer
IDLE_S = 75.0  # time limit for a silent connection, and for the head of a request
SENT_BYTES = 64 << 10
BUSY_S, BROKEN_S = 1, 5  # seconds after which to retry
FAREWELL_S = 2.0  # for draining a refused body, and for transfers when the server closes
STATUSES = dict(token=401, banned=403, unknown=404, stale=410, size=413, invalid=422, busy=503)
VOLUNTEER: web.RequestKey[str] = web.RequestKey("volunteer", str)  # its id in hex
DIGEST: web.RequestKey[bytes] = web.RequestKey("digest", bytes)


def most_uploads(size_bytes: int) -> int:
    """Return how many results of ``size_bytes`` may arrive at once: they are in memory."""
    return max(MIN_UPLOADS, min(MAX_UPLOADS, MAX_UPLOADS_BYTES // size_bytes))


class CoordinatorServer:
    """Serve the volunteers of a job, by what its ``log`` says, and pages of its ``status``.

    A result may move the parameters by ``most`` (L2 norm).
    """

    def __init__(
        self,
        job: Job,
        card: JobCard,
        most: float,
        log: JobLog,
        folder: Path,
        gate: RequestGate,
        status: Callable[[], JobStatus],
    ) -> None:
        self.url, self.running = "", {"upload": 0, "download": 0}
        self._job, self._card, self._log, self._folder, self._gate = job, card, log, folder, gate
        self._judge = partial(Schema.of(job.first_model()).judge, max_change=job.plan.max_change, most=most)
        self._dispatcher, self._schema = log.dispatcher, Schema.of(job.first_model())
        self._newest = -1, memoryview(b"")  # version and file of the newest parameters: many fetch them
        self._loading = asyncio.Lock()
        self._checking = asyncio.Semaphore(4)
        self._under_check: set[str] = set()  # assignments whose results are being checked
        self._each: Counter[tuple[str, str]] = Counter()  # transfers under way by kind and volunteer
        self._page = status_page(status)
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 chooses a free one. Raises PortError if the port is taken."""
        app = web.Application(middlewares=[self._answered], client_max_size=MAX_BODY_BYTES)
        app.router.add_routes(
            [
                *self._page.routes,
                web.get("/api/job", self._describe),
                web.post("/api/units", self._units),
                web.get("/api/data/{digest}", self._data),
                web.get("/api/parameters", self._parameters),
                web.get(INITIAL, self._parameters),
                web.put(f"/api/results/{{assignment:{ASSIGNMENT}}}", self._result),
            ]
        )
        self._runner, self.url = await listen(
            app,
            host,
            port,
            keepalive_timeout=IDLE_S,
            auto_decompress=False,  # a small body may unpack to a large one
            lingering_time=FAREWELL_S,
            shutdown_timeout=FAREWELL_S,
        )

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    # -- admission and refusals

    @web.middleware
    async def _answered(self, request: web.Request, handler: Answering) -> web.StreamResponse:
        """Admit a request below /api, and turn every refusal there into a `Problem`."""
        try:
            if request.path not in PATHS:
                header, now = request.headers.get("Authorization", ""), time.time()
                peer, request[DIGEST] = self._gate.check(header, request.method, request.raw_path, now=now)
                request[VOLUNTEER] = peer.hex()
                _raise(self._dispatcher.ban_of(peer.hex(), now=now))
            return await handler(request)
        except NotAdmitted as error:
            code = "busy" if error.reason == "busy" else "token"
            return _refusal(STATUSES[code], Problem(code, str(error)))
        except Refused as error:
            return _refusal(STATUSES[error.args[0]], Problem(*error.args))
        except StoreError:
            problem = Problem("busy", "the coordinator's store does not answer: try again in a few seconds")
            return _refusal(503, problem, {"Retry-After": str(BROKEN_S)})
        except web.HTTPException as error:
            if not request.path.startswith("/api"):
                raise
            problem = Problem("unknown", f"{error.reason}: is this the newest colab-swarm?")
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            return _refusal(error.status, problem, allow)

    async def _read(self, request: web.Request, most_bytes: int) -> bytes:
        if (size := request.content_length) is None and request.body_exists:
            raise Refused("invalid", "the body's length is missing: send Content-Length")
        if (size or 0) > most_bytes:
            raise Refused("size", f"a body of {size:,} bytes: {most_bytes:,} at most")
        limit_s = READ_S + most_bytes / SLOWEST_BYTES_S
        try:
            async with asyncio.timeout(limit_s):
                body = await request.content.read()
        except OSError as error:  # the client hung up, or took too long
            raise Refused("busy", f"the body did not arrive within {limit_s:.0f} s: send it again") from error
        if sha256(body).digest() != request[DIGEST]:
            raise Refused("invalid", "the body is not the signed one")
        return body

    @asynccontextmanager
    async def _one_of(self, request: web.Request, kind: str, most: int) -> AsyncIterator[None]:
        mine = kind, request[VOLUNTEER]
        if self.running[kind] >= most or self._each[mine] >= most // SHARE:
            raise Refused("busy", f"too many {kind}s at once: try again in a second")
        self.running[kind] += 1
        self._each[mine] += 1
        try:
            yield
        finally:
            self.running[kind] -= 1
            self._each -= Counter([mine])  # which drops volunteers without any

    # -- the job and its units

    async def _describe(self, request: web.Request) -> web.Response:
        return _answer(self._card)

    async def _units(self, request: web.Request) -> web.Response:
        body, me = await self._read(request, MAX_BODY_BYTES), request[VOLUNTEER]
        try:
            asked = msgspec.msgpack.decode(body, type=AskForUnits)
        except UNDECODABLE as error:
            raise Refused("invalid", f"no AskForUnits: {error}") from error
        async with self._log.deciding() as now:
            _raise(self._dispatcher.ban_of(me, now=now))
            await self._log.write(self._dispatcher.give_back(me, asked.given_back, now=now))
            old = self._dispatcher.unacknowledged(me, asked.in_hand, now=now)[: asked.count]
            units = self._dispatcher.assign(me, asked.count - len(old), asked.held, now=now, name=asked.name)
            put, open_ = {}, self._dispatcher.state.open
            first = [one.unit for one in units if not open_[one.unit].replicas]
            if first and self._job.plan.replication > 1:  # replicas have the same initial parameters
                newest = await asyncio.to_thread(self._log.store.parameters)
                put = dict.fromkeys((f"base-{unit}" for unit in first), bytes(as_bytes(newest.values)))
                version = newest.version  # another server may have stored parameters since this log was read
                units = [
                    msgspec.structs.replace(one, version=version) if one.unit in first else one
                    for one in units
                ]
            await self._log.write(units, put=put)
            return self._given(me, [*old, *units], now)

    def _given(self, volunteer: str, units: Sequence[Assigned], now: float) -> web.Response:
        plan, state = self._job.plan, self._dispatcher.state
        given = [
            GivenUnit(
                assignment=one.assignment,
                epoch=one.unit.epoch,
                subset=one.unit.subset,
                data=self._card.subsets[one.unit.subset].sha256,
                parameters="parameters" if plan.replication == 1 else f"parameters/{one.unit}",
                deadline_s=one.deadline - now,
                seed=unit_seed(plan.seed, one.unit.epoch, one.unit.subset),
            )
            for one in units
        ]
        return _answer(
            GivenUnits(
                tuple(given),
                wait_s=0.0 if given else self._dispatcher.wait_s(volunteer, now=now),
                finished=state.finished is not None,
                epoch=self._dispatcher.epoch,
                accuracy=state.epochs[-1].accuracy if state.epochs else None,
            )
        )

    # -- results

    async def _result(self, request: web.Request) -> web.Response:
        """Take a result, which is in memory until it is checked. If that fails for now, it may be sent again."""
        assignment = request.match_info["assignment"]
        _raise(self._dispatcher.refusal(assignment, request[VOLUNTEER], now=time.time()))
        size, whole = request.content_length, self._schema.size_bytes
        if size is not None and size != whole:
            raise Refused("size", f"a result of {size:,} bytes: those of this job have {whole:,}")
        async with self._one_of(request, "upload", most_uploads(whole)):
            data = await self._read(request, whole)
            if assignment in self._under_check:
                raise Refused("busy", "this result is here and is being checked: ask again in a second")
            self._under_check.add(assignment)
            try:
                async with self._checking:
                    await self._take(request[VOLUNTEER], assignment, data)
            finally:
                self._under_check.discard(assignment)
        return _answer(Taken(assignment))

    async def _take(self, volunteer: str, assignment: str, data: bytes) -> None:
        """Check a complete result and write what follows from it; raise Refused if it is invalid or not wanted."""
        core, plan = self._dispatcher, self._job.plan
        _raise(core.refusal(assignment, volunteer, now=time.time()))  # it waited for its check
        _, file = await self._file(
            core.state.replicas[assignment].given.unit if plan.replication > 1 else None
        )
        base, changes = self._schema.decode(file), tuple(core.state.changes)
        values, change, fault = base, 0.0, None
        try:
            values, change = await asyncio.to_thread(self._judge, data, base, changes)
        except ValueError as error:
            fault = str(error)
        async with self._log.deciding() as now:
            _raise(core.refusal(assignment, volunteer, now=now))
            if fault is not None:
                await self._log.write([Rejected(at=now, assignment=assignment, reason=fault)])
                raise Refused("invalid", fault)
            distance = partial(self._distance, {assignment: values}, base)
            entries = await asyncio.to_thread(core.on_result, assignment, change, distance, now=now)
            odd = [one for one in entries if isinstance(one, Rejected) and one.assignment == assignment]
            put = {} if odd else {f"result-{assignment}": bytes(as_bytes(values))}
            await self._log.write(entries, put=put, drop=core.obsolete(entries))
            if odd:
                raise Refused("invalid", odd[0].reason)

    def _distance(self, known: dict[str, Floats], base: Floats, one: str, other: str) -> float:
        """Distance of two results, ``known`` or stored, as a share of the change from ``base``."""
        for name in {one, other} - known.keys():
            known[name] = np.frombuffer(self._log.store.blob(f"result-{name}"), "<f4")
        a, b = known[one], known[other]
        return moved(a, b) / (max(moved(a, base), moved(b, base)) or 1.0)

    # -- files

    async def _data(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        if not any(subset.sha256 == digest for subset in self._card.subsets):
            raise Refused("unknown", "no such data: ask for units")
        with (self._folder / "data" / digest).open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return await self._send(request, data, f'"{digest}"')

    async def _parameters(self, request: web.Request) -> web.StreamResponse:
        numbers = [int(number) for number in request.match_info.values()]
        version, data = await self._file(Unit(*numbers) if numbers else None)
        return await self._send(request, data, f'"{version}"')

    async def _file(self, unit: Unit | None) -> tuple[int, memoryview]:
        """Return version and file of a unit's initial parameters; None: the newest ones."""
        if unit is None:
            async with self._loading:
                if self._newest[0] < self._dispatcher.state.version:
                    found = await asyncio.to_thread(self._log.store.parameters)
                    file = await asyncio.to_thread(self._schema.encode, found.values)
                    self._newest = found.version, memoryview(file)
                return self._newest
        try:
            values = await asyncio.to_thread(self._log.store.blob, f"base-{unit}")
            version = self._dispatcher.state.units[unit].replicas[0].given.version
        except LookupError as error:
            raise Refused("stale", f"unit {unit} is not open: ask for other units") from error
        return version, memoryview(self._schema.head() + values)

    async def _send(self, request: web.Request, data: memoryview, etag: str) -> web.StreamResponse:
        headers = {"ETag": etag, "Accept-Ranges": "bytes", "Cache-Control": "no-cache"}
        status, start, end = 200, 0, len(data)
        if request.headers.get("If-Range", etag) == etag and "Range" in request.headers:
            status = 206
            try:
                start, end, _ = request.http_range.indices(len(data))
            except ValueError:  # garbled, or several ranges
                start = end
            if start >= end:
                problem = Problem("size", f"no such range: the file has {len(data):,} bytes")
                return _refusal(416, problem, {"Content-Range": f"bytes */{len(data)}"})
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        async with self._one_of(request, "download", MAX_DOWNLOADS):
            response = web.StreamResponse(status=status, headers=headers)
            response.content_type, response.content_length = "application/octet-stream", end - start
            try:
                async with asyncio.timeout(SEND_S + (end - start) / SLOWEST_BYTES_S):
                    await response.prepare(request)
                    for place in range(start, end, SENT_BYTES):
                        await response.write(bytes(data[place : min(place + SENT_BYTES, end)]))
            except OSError:  # the client hung up, or is too slow
                if request.transport is not None:
                    request.transport.abort()
        return response


def _raise(refusal: tuple[str, str] | None) -> None:
    if refusal is not None:
        raise Refused(*refusal)


def _answer(message: Message, status: int = 200, headers: Mapping[str, str] = {}) -> web.Response:
    body = msgspec.msgpack.encode(message)
    return web.Response(body=body, status=status, headers=headers, content_type="application/msgpack")


def _refusal(status: int, problem: Problem, headers: Mapping[str, str] = {}) -> web.Response:
    always = {503: {"Retry-After": str(BUSY_S)}, 401: {"WWW-Authenticate": SCHEME}}.get(status, {})
    return _answer(problem, status, {**always, **headers})
