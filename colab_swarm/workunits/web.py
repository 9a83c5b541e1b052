"""The coordinator over HTTP: requests of `colab_swarm.workunits.messages`, and a public status page.

The server refuses a bad request as early as possible: first by its token, then by the assignment that it names, then by
the size that it announces. It reads the body only after these checks. It uses no part of a request as a file's path.
"""

import asyncio
import mmap
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
from aiohttp import web

from colab_swarm.errors import CallRefused, NotAdmitted, StoreError
from colab_swarm.net.peers import UNDECODABLE, Message, remember
from colab_swarm.notebook.page import PATHS, Answering, listen
from colab_swarm.notebook.units_view import status_page
from colab_swarm.workunits.dispatcher import JobLog
from colab_swarm.workunits.job import Job, unit_seed
from colab_swarm.workunits.messages import (
    MAX_BODY_BYTES,
    PACKED,
    SCHEME,
    AskForUnit,
    GivenUnit,
    JobCard,
    Problem,
    RequestGate,
    Taken,
    UnitAnswer,
)
from colab_swarm.workunits.state import AnyEntry, Assigned, JobStatus, Rejected, Unit
from colab_swarm.workunits.weights import Floats, Schema, as_bytes, moved

ASSIGNMENT = "[0-9a-f]{32}"
INITIAL = "/api/parameters/{epoch:[1-9][0-9]{0,8}}-{subset:0|[1-9][0-9]{0,8}}"

# How many transfers may run at the same time; with more, a volunteer must retry. Uploads are in memory.
MIN_UPLOADS = 4
MAX_UPLOADS = 32
MAX_UPLOADS_BYTES = 1 << 30
MAX_DOWNLOADS = 64
# How many versions of the parameters are kept, plain and compressed
MAX_KEPT = 64
MAX_KEPT_BYTES = 128 << 20
SHARE = 4
"""A volunteer may have at most the fraction 1/`SHARE` of all transfers at the same time."""
MAX_CHECKS = 4

# Time limit of a transfer; a large file has more time.
READ_S = 300.0
SEND_S = 60.0
SLOWEST_BYTES_S = 32 << 10
SENT_BYTES = 64 << 10
BUSY_S = 1
"""Seconds after which a volunteer retries if the coordinator is busy or its store fails."""
FAREWELL_S = 2.0
"""Time limit for reading a refused body to its end, and for transfers that are open when the server closes."""
STATUSES = dict(token=401, banned=403, unknown=404, stale=410, surplus=410, size=413, invalid=422, busy=503)
VOLUNTEER: web.RequestKey[str] = web.RequestKey("volunteer", str)
"""The volunteer's id in hex."""
DIGEST: web.RequestKey[bytes] = web.RequestKey("digest", bytes)


def most_uploads(size_bytes: int) -> int:
    """Return how many results of ``size_bytes`` the server takes at the same time, because uploads are in memory."""
    return max(MIN_UPLOADS, min(MAX_UPLOADS, MAX_UPLOADS_BYTES // size_bytes))


class CoordinatorServer:
    """The web server of a job. It serves volunteers according to the ``log``, and shows pages of the ``status``.

    A result may change the parameters by at most ``most`` (L2 norm).
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
        self.url = ""
        # running transfers, by kind (`upload` or `download`) and volunteer
        self.transfers: Counter[tuple[str, str]] = Counter()
        self._job = job
        self._card = card
        self._log = log
        self._folder = folder
        self._gate = gate
        self._dispatcher = log.dispatcher
        self._schema = Schema.of(job.first_model())
        self._judge = partial(self._schema.judge, max_change=job.plan.max_change, most=most)
        # files of the latest versions of the parameters, plain and compressed; kept because many volunteers fetch them
        self._files: dict[int, memoryview] = {}
        self._loading = asyncio.Lock()
        self._packed: dict[int, memoryview] = {}
        self._packing = asyncio.Lock()
        self._most_kept = max(1, min(MAX_KEPT, MAX_KEPT_BYTES // self._schema.size_bytes))
        self._checking = asyncio.Semaphore(MAX_CHECKS)
        self._page = status_page(status)
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen on ``port``, or on a free port if it is 0. Raises PortError if the port is taken."""
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
            # a small compressed body may unpack to a large one
            auto_decompress=False,
            lingering_time=FAREWELL_S,
            shutdown_timeout=FAREWELL_S,
        )

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    # -- admission and refusals

    @web.middleware
    async def _answered(self, request: web.Request, handler: Answering) -> web.StreamResponse:
        """Check the token of a request below /api, and turn each refusal there into a `Problem`."""
        try:
            if request.path not in PATHS:
                self._admit(request)
            return await handler(request)
        except NotAdmitted as error:
            code = "busy" if error.reason == "busy" else "token"
            return _refusal(STATUSES[code], Problem(code, str(error)))
        except CallRefused as error:
            return _refusal(STATUSES[error.code], Problem(error.code, str(error)))
        except StoreError:
            problem = Problem("busy", "the coordinator's store does not answer: try again in a few seconds")
            return _refusal(503, problem)
        except web.HTTPException as error:
            if not request.path.startswith("/api"):
                raise
            problem = Problem("unknown", f"{error.reason}: is this the newest colab-swarm?")
            headers = {name: value for name, value in error.headers.items() if name == "Allow"}
            return _refusal(error.status, problem, headers)

    def _admit(self, request: web.Request) -> None:
        now = time.time()
        header = request.headers.get("Authorization", "")
        peer, digest = self._gate.check(header, request.method, request.raw_path, now=now)
        request[DIGEST] = digest
        request[VOLUNTEER] = peer.hex()
        _raise(self._dispatcher.ban_of(peer.hex(), now=now))

    async def _read(self, request: web.Request, most_bytes: int) -> bytes:
        size = request.content_length
        if size is None and request.body_exists:
            raise CallRefused("invalid", "the body's length is missing: send Content-Length")
        if size is not None and size > most_bytes:
            raise CallRefused("size", f"a body of {size:,} bytes: {most_bytes:,} at most")
        limit_s = READ_S + most_bytes / SLOWEST_BYTES_S
        try:
            async with asyncio.timeout(limit_s):
                body = await request.content.read()
        except OSError as error:
            # the client closed the connection, or took too long
            raise CallRefused(
                "busy", f"the body did not arrive within {limit_s:.0f} s: send it again"
            ) from error
        if sha256(body).digest() != request[DIGEST]:
            raise CallRefused("invalid", "the body is not the signed one")
        return body

    @asynccontextmanager
    async def _transfer(self, request: web.Request, kind: str, most: int) -> AsyncIterator[None]:
        """Count a transfer of a volunteer while the block runs; at most ``most`` may run at the same time."""
        transfer = (kind, request[VOLUNTEER])
        if self.running(kind) >= most or self.transfers[transfer] >= most // SHARE:
            raise CallRefused("busy", f"too many {kind}s at once: try again in a second")
        self.transfers[transfer] += 1
        try:
            yield
        finally:
            # unlike -= 1 on the key, this drops volunteers that have no transfers
            self.transfers -= Counter([transfer])

    def running(self, kind: str) -> int:
        """Return the number of running transfers of a ``kind``."""
        return sum(number for transfer, number in self.transfers.items() if transfer[0] == kind)

    # -- the job and its units

    async def _describe(self, request: web.Request) -> web.Response:
        return _answer(self._card)

    async def _units(self, request: web.Request) -> web.Response:
        body = await self._read(request, MAX_BODY_BYTES)
        volunteer = request[VOLUNTEER]
        try:
            ask = msgspec.msgpack.decode(body, type=AskForUnit)
        except UNDECODABLE as error:
            raise CallRefused("invalid", f"no AskForUnit: {error}") from error
        core = self._dispatcher
        state = core.state
        async with self._log.deciding() as now:
            assigned = None
            if ask.leaves:
                await self._log.write(core.give_back(volunteer, now=now))
            else:
                assigned = core.unacknowledged(volunteer, ask.in_hand, now=now)
                assigned = assigned or await self._assign(volunteer, ask, now)
            answer = UnitAnswer(
                unit=self._given(assigned, now) if assigned else None,
                wait_s=0.0 if assigned else core.wait_s(volunteer, now=now),
                finished=state.finished is not None,
                epoch=core.epoch,
                accuracy=state.epochs[-1].accuracy if state.epochs else None,
                unfit=core.unfit(ask.resources),
            )
            return _answer(answer)

    async def _assign(self, volunteer: str, ask: AskForUnit, now: float) -> Assigned | None:
        """Assign a unit. If replicas of the unit share their initial parameters, save a blob with these parameters."""
        core = self._dispatcher
        assigned = core.assign(volunteer, now=now, name=ask.name, resources=ask.resources)
        if assigned is None:
            return None
        base = {}
        if self._job.plan.replication > 1 and not core.state.open[assigned.unit].replicas:
            newest = await asyncio.to_thread(self._log.store.parameters)
            base[f"base-{assigned.unit}"] = bytes(as_bytes(newest.values))
            # a server may have stored parameters since the log was read
            assigned = msgspec.structs.replace(assigned, version=newest.version)
        await self._log.write([assigned], put=base)
        return assigned

    def _given(self, assigned: Assigned, now: float) -> GivenUnit:
        plan = self._job.plan
        unit = assigned.unit
        path = "parameters"
        if plan.replication > 1:
            path = f"parameters/{unit}"
        return GivenUnit(
            assignment=assigned.assignment,
            epoch=unit.epoch,
            subset=unit.subset,
            data=self._card.subsets[unit.subset].sha256,
            parameters=path,
            deadline_s=assigned.deadline - now,
            seed=unit_seed(plan.seed, unit.epoch, unit.subset),
        )

    # -- results

    async def _result(self, request: web.Request) -> web.Response:
        """Receive a result into memory and check it. After a temporary failure, the volunteer may send it again."""
        assignment = request.match_info["assignment"]
        volunteer = request[VOLUNTEER]
        _raise(self._dispatcher.refusal(assignment, volunteer, now=time.time()))
        size = request.content_length
        expected = self._schema.size_bytes
        if size is not None and size != expected:
            raise CallRefused("size", f"a result of {size:,} bytes: those of this job have {expected:,}")
        async with self._transfer(request, "upload", most_uploads(expected)):
            data = await self._read(request, expected)
            async with self._checking:
                await self._take(volunteer, assignment, data)
        return _answer(Taken(assignment))

    async def _take(self, volunteer: str, assignment: str, data: bytes) -> None:
        """Check a result and log the decision on it; raise CallRefused if the result is invalid or no longer wanted."""
        core = self._dispatcher
        # the result has waited for this check, and may no longer be wanted
        _raise(core.refusal(assignment, volunteer, now=time.time()))
        unit = None
        if self._job.plan.replication > 1:
            unit = core.state.replicas[assignment].given.unit
        _, file = await self._file(unit)
        base = self._schema.decode(file)
        values = base
        change = 0.0
        fault = ""
        try:
            values, change = await asyncio.to_thread(self._judge, data, base, tuple(core.state.changes))
        except ValueError as error:
            fault = str(error)
        async with self._log.deciding() as now:
            _raise(core.refusal(assignment, volunteer, now=now))
            entries: list[AnyEntry] = [Rejected(at=now, assignment=assignment, reason=fault)]
            if not fault:
                distance = partial(self._distance, {assignment: values}, base)
                entries = await asyncio.to_thread(core.on_result, assignment, change, distance, now=now)
            rejected = [entry for entry in entries if isinstance(entry, Rejected)]
            reasons = [entry.reason for entry in rejected if entry.assignment == assignment]
            blobs = {}
            if not reasons:
                blobs[f"result-{assignment}"] = bytes(as_bytes(values))
            await self._log.write(entries, put=blobs, drop=core.obsolete(entries))
        if reasons:
            raise CallRefused("invalid", reasons[0])

    def _distance(self, results: dict[str, Floats], base: Floats, assignment: str, other: str) -> float:
        """Return the distance of two results, relative to the larger of their changes from ``base``.

        Read results that are not among ``results`` from the store.
        """
        for name in {assignment, other} - results.keys():
            results[name] = np.frombuffer(self._log.store.blob(f"result-{name}"), "<f4")
        values = results[assignment]
        other_values = results[other]
        change = max(moved(values, base), moved(other_values, base)) or 1.0
        return moved(values, other_values) / change

    # -- files

    async def _data(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        if not any(subset.sha256 == digest for subset in self._card.subsets):
            raise CallRefused("unknown", "no such data: ask for units")
        async with self._transfer(request, "download", MAX_DOWNLOADS):
            with (self._folder / "data" / digest).open("rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            return await self._send(request, data, f'"{digest}"')

    async def _parameters(self, request: web.Request) -> web.StreamResponse:
        numbers = [int(number) for number in request.match_info.values()]
        unit = Unit(*numbers) if numbers else None
        # count the transfer before the store is read, so that one volunteer cannot keep the store and a core busy
        async with self._transfer(request, "download", MAX_DOWNLOADS):
            version, data = await self._file(unit)
            if request.headers.get("Accept") != PACKED:
                return await self._send(request, data, f'"{version}"')
            async with self._packing:
                if version not in self._packed:
                    packed = await asyncio.to_thread(self._schema.pack, data)
                    remember(self._packed, version, memoryview(packed), self._most_kept)
                data = self._packed[version]
            return await self._send(request, data, f'"{version}-packed"', PACKED)

    async def _file(self, unit: Unit | None) -> tuple[int, memoryview]:
        """Return the version and the file of a unit's initial parameters. Without a unit, use the newest parameters."""
        async with self._loading:
            if unit is None:
                version = max({self._dispatcher.state.version, *self._files})
            else:
                state = self._dispatcher.state.open.get(unit)
                if state is None or not state.replicas:
                    raise CallRefused("stale", f"unit {unit} is not open: ask for other units")
                version = state.replicas[0].given.version
            if version not in self._files:
                version, values = await self._load(unit, version)
                file = memoryview(b"".join((self._schema.head(), values)))
                remember(self._files, version, file, self._most_kept)
            return version, self._files[version]

    async def _load(self, unit: Unit | None, version: int) -> tuple[int, bytes | memoryview]:
        if unit is None:
            newest = await asyncio.to_thread(self._log.store.parameters)
            return newest.version, as_bytes(newest.values)
        try:
            return version, await asyncio.to_thread(self._log.store.blob, f"base-{unit}")
        except LookupError as error:
            raise CallRefused("stale", f"unit {unit} is not open: ask for other units") from error

    async def _send(
        self, request: web.Request, data: memoryview, etag: str, kind: str = "application/octet-stream"
    ) -> web.StreamResponse:
        """Send a file, or the range of it that the request names."""
        headers = {"ETag": etag, "Accept-Ranges": "bytes", "Cache-Control": "no-cache"}
        status = 200
        start = 0
        end = len(data)
        # if the client has a part of another version of the file, the whole file is sent
        if request.headers.get("If-Range", etag) == etag and "Range" in request.headers:
            status = 206
            try:
                start, end, _ = request.http_range.indices(len(data))
            except ValueError:
                # the header is garbled, or has several ranges
                start = end
            if start >= end:
                problem = Problem("size", f"no such range: the file has {len(data):,} bytes")
                return _refusal(416, problem, {"Content-Range": f"bytes */{len(data)}"})
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        response = web.StreamResponse(status=status, headers=headers)
        response.content_type = kind
        response.content_length = end - start
        await _stream(request, response, data[start:end])
        return response


async def _stream(request: web.Request, response: web.StreamResponse, data: memoryview) -> None:
    try:
        async with asyncio.timeout(SEND_S + len(data) / SLOWEST_BYTES_S):
            await response.prepare(request)
            for place in range(0, len(data), SENT_BYTES):
                await response.write(bytes(data[place : place + SENT_BYTES]))
    except OSError:
        # the client closed the connection, or is too slow
        if request.transport is not None:
            request.transport.abort()


def _raise(refusal: tuple[str, str] | None) -> None:
    if refusal is not None:
        raise CallRefused(*refusal)


def _answer(message: Message, status: int = 200, headers: Mapping[str, str] = {}) -> web.Response:
    body = msgspec.msgpack.encode(message)
    return web.Response(body=body, status=status, headers=headers, content_type="application/msgpack")


def _refusal(status: int, problem: Problem, headers: Mapping[str, str] = {}) -> web.Response:
    usual: dict[str, str] = {}
    if status == 503:
        usual = {"Retry-After": str(BUSY_S)}
    if status == 401:
        usual = {"WWW-Authenticate": SCHEME}
    return _answer(problem, status, {**usual, **headers})
