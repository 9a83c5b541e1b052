"""A coordinator on loopback that does as its script says: real tokens and data, and faults where a test wants them."""

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any, TypeAlias

import msgspec
from aiohttp import web

from colab_swarm.errors import NotAdmitted
from colab_swarm.net.identity import Identity
from colab_swarm.workunits import messages
from colab_swarm.workunits.client import CoordinatorClient
from colab_swarm.workunits.job import Job, unit_seed
from colab_swarm.workunits.messages import AskForUnit, GivenUnit, JobCard, Problem, Taken, UnitAnswer
from colab_swarm.workunits.weights import Floats, Schema

RUN = "test-run"
QUICK = 0.01, 0.02
Respond: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Fault: TypeAlias = Callable[[web.Request, Respond], Awaitable[web.StreamResponse]]


class StandIn:
    """Hands out every subset once per epoch; its parameters never change unless a test changes them."""

    def __init__(self, job: Job, *, subsets: int = 2, epochs: int = 1, deadline_s: float = 60.0) -> None:
        self.job, self.deadline_s, self.identity = job, deadline_s, Identity()
        self.schema = Schema.of(job.first_model())
        self.values, self.version = self.schema.flatten(job.first_model()), 0
        self.files = [rows.encode() for rows in job.rows().cut(subsets, seed=0)]
        self.units = deque((epoch, subset) for epoch in range(1, epochs + 1) for subset in range(subsets))
        self.given: dict[str, GivenUnit] = {}  # by assignment
        self.results: dict[str, Floats] = {}  # those accepted
        self.returned: list[str] = []
        self.asked: list[AskForUnit] = []
        self.seen: list[str] = []  # method and path of all requests
        self.fired: list[str] = []  # the same of requests that met a fault
        self.refuse: Problem | None = None  # why uploads are refused
        self.url, self.membership = "", b""
        self._gate, self._script = messages.RequestGate(None), list[tuple[str, Fault]]()

    def meets(self, what: str, *faults: Fault) -> None:
        """The next requests whose method and path begin with ``what`` meet these faults, one each."""
        self._script += [(what, fault) for fault in faults]

    def card(self) -> JobCard:
        subsets = tuple(
            messages.Subset(sha256(data).hexdigest(), len(data), len(rows))
            for data, rows in zip(self.files, self.job.rows().cut(len(self.files), seed=0), strict=True)
        )
        whose, plan = (self.identity.public_key, self.membership), self.job.plan
        sizes = plan.local_epochs, plan.batch_size
        card = JobCard(RUN, self.job.name, *whose, self.job.code, *sizes, self.schema.head(), subsets)
        return card.signed(self.identity.sign)

    @asynccontextmanager
    async def serving(self) -> "AsyncIterator[StandIn]":
        """Answers at `url`, until the block ends."""
        app = web.Application(client_max_size=1 << 24, middlewares=[self._answer])
        app.add_routes(
            [
                web.get("/api/job", self._job),
                web.post("/api/units", self._units),
                web.get("/api/data/{digest}", self._data),
                web.get("/api/parameters", self._parameters),
                web.put("/api/results/{assignment}", self._upload),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Respond) -> web.StreamResponse:
        what = f"{request.method} {request.path}"
        self.seen.append(what)
        for scripted in self._script:
            if what.startswith(scripted[0]):
                self._script.remove(scripted)
                self.fired.append(what)
                return await scripted[1](request, self._admitted(handler))
        return await self._admitted(handler)(request)

    def _admitted(self, respond: Respond) -> Respond:
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                _, digest = self._gate.check(
                    request.headers.get("Authorization", ""), request.method, request.path_qs, now=time.time()
                )
            except NotAdmitted as error:
                return problem(401, "token", str(error))
            assert sha256(await request.read()).digest() == digest
            return await respond(request)

        return answer

    async def _job(self, request: web.Request) -> web.Response:
        return web.Response(body=self.card().encode())

    async def _units(self, request: web.Request) -> web.Response:
        ask = msgspec.msgpack.decode(await request.read(), type=AskForUnit)
        self.asked.append(ask)
        if ask.leaves:
            self.returned = [name for name in self.given if name not in self.results]
        unit = None
        if self.units and not ask.leaves:
            epoch, subset = self.units.popleft()
            name, data = random.randbytes(16).hex(), sha256(self.files[subset]).hexdigest()
            seed = unit_seed(self.job.plan.seed, epoch, subset)
            unit = GivenUnit(name, epoch, subset, data, "parameters", self.deadline_s, seed)
            self.given[unit.assignment] = unit
        finished = unit is None and len(self.given) == len(self.results) + len(self.returned)
        return _packed(UnitAnswer(unit, 0.01, finished, epoch=1, accuracy=0.5))

    async def _data(self, request: web.Request) -> web.Response:
        digest = request.match_info["digest"]
        for data in self.files:
            if sha256(data).hexdigest() == digest:
                return _ranged(request, data, f'"{digest}"')
        return problem(404, "unknown", "no such data")

    async def _parameters(self, request: web.Request) -> web.Response:
        return _ranged(request, self.schema.encode(self.values), f'"{self.version}"')

    async def _upload(self, request: web.Request) -> web.Response:
        assignment = request.match_info["assignment"]
        if self.refuse is not None:
            return problem(422, self.refuse.code, self.refuse.text)
        if assignment not in self.given or assignment in self.results:
            return problem(410, "stale", "this result is here already")
        self.results[assignment] = self.schema.decode(await request.read())
        return _packed(Taken(assignment))


def _packed(message: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(message))


def _ranged(request: web.Request, data: bytes, etag: str) -> web.Response:
    headers = {"ETag": etag}
    if request.headers.get("If-None-Match") == etag:
        return web.Response(status=304, headers=headers)
    start = request.http_range.start
    if start is None or request.headers.get("If-Range", etag) != etag:
        return web.Response(body=data, headers=headers)
    headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
    return web.Response(status=206, body=data[start:], headers=headers)


def problem(status: int, code: str, text: str) -> web.Response:
    return web.Response(status=status, body=msgspec.msgpack.encode(Problem(code, text)))


def answers(status: int, body: bytes = b"<html>proxy</html>", **headers: str) -> Fault:
    async def fault(request: web.Request, respond: Respond) -> web.StreamResponse:
        await request.read()
        dashed = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, body=body, headers=dashed)

    return fault


def says(status: int, code: str, text: str) -> Fault:
    return answers(status, msgspec.msgpack.encode(Problem(code, text)))


def breaks_after(size_bytes: int, *, told: bool = True) -> Fault:
    """The connection ends early; not ``told``: as a proxy that does not tell the answer's length ends it."""

    async def fault(request: web.Request, respond: Respond) -> web.StreamResponse:
        whole = await respond(request)
        assert isinstance(whole, web.Response) and isinstance(whole.body, bytes | bytearray)
        assert size_bytes < len(whole.body)
        part = web.StreamResponse(status=whole.status, headers=whole.headers)
        if told:
            part.content_length = len(whole.body)
        else:
            part.headers.popall("Content-Length", None)
            part.enable_chunked_encoding()
        await part.prepare(request)
        await part.write(bytes(whole.body[:size_bytes]))
        if told:
            _hang_up(request)
        else:
            await part.write_eof()
        return part

    return fault


async def loses_its_answer(request: web.Request, respond: Respond) -> web.StreamResponse:
    await respond(request)
    _hang_up(request)
    return web.Response()


async def hangs_up(request: web.Request, respond: Respond) -> web.StreamResponse:
    _hang_up(request)
    return web.Response()


async def garbles(request: web.Request, respond: Respond) -> web.StreamResponse:
    whole = await respond(request)
    assert isinstance(whole, web.Response) and isinstance(whole.body, bytes | bytearray)
    body = bytearray(whole.body)
    body[len(body) // 2] ^= 1
    etag = {"ETag": whole.headers.get("ETag", "")}
    return web.Response(status=whole.status, body=bytes(body), headers=etag)


class Waits:
    """An answer that waits until a test lets it go. ``reached`` is set when the request is there."""

    def __init__(self) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, request: web.Request, respond: Respond) -> web.StreamResponse:
        self.reached.set()
        await self.go_on.wait()
        return await respond(request)


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.close()


def client_of(standin: StandIn, **changes: Any) -> CoordinatorClient:
    """Of an open run, in a hurry; ``changes``: of its arguments."""
    given = {"url": standin.url, "token": messages.Token(Identity()), "run_id": RUN, "authority": None}
    return CoordinatorClient(**{**given, "retry_s": QUICK, "rng": random.Random(0), **changes})
