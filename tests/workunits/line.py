"""The line between a volunteer and a coordinator: a proxy on loopback, with faults where a test wants them."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from aiohttp import web

from colab_swarm.net.identity import Identity
from colab_swarm.workunits.client import CoordinatorClient
from colab_swarm.workunits.job import Job
from colab_swarm.workunits.messages import Problem, Token
from colab_swarm.workunits.sql_store import MEMORY, SqlStore
from colab_swarm.workunits.state import Accepted
from tests.workunits.local import RUN, Scene, coordinating

QUICK = 0.01, 0.02
Respond: TypeAlias = Callable[[web.Request], Awaitable[web.Response]]
Fault: TypeAlias = Callable[[web.Request, Respond], Awaitable[web.StreamResponse]]


class Line:
    """Passes requests on to the coordinator of ``scene``, at ``url``."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.url = ""
        self.seen: list[str] = []  # method and path of all requests
        self.fired: list[str] = []  # the same of requests that met a fault
        self._script = list[tuple[str, Fault]]()

    def meets(self, what: str, *faults: Fault) -> None:
        """The next requests whose method and path begin with ``what`` meet these faults, one each."""
        self._script += [(what, fault) for fault in faults]

    def client(self, **changes: Any) -> CoordinatorClient:
        """Of an open run, in a hurry; ``changes``: of its arguments."""
        given = {"url": self.url, "token": Token(Identity()), "run_id": RUN, "authority": None}
        return CoordinatorClient(**{**given, "retry_s": QUICK, "rng": random.Random(0), **changes})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        what = f"{request.method} {request.path}"
        self.seen.append(what)
        for scripted in self._script:
            if what.startswith(scripted[0]):
                self._script.remove(scripted)
                self.fired.append(what)
                return await scripted[1](request, self._pass_on)
        return await self._pass_on(request)

    async def _pass_on(self, request: web.Request) -> web.Response:
        names = ("Authorization", "Accept", "Range", "If-Range")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        url = self.scene.server.url.rstrip("/") + request.path_qs
        assert self.scene.session is not None
        body = await request.read()
        async with self.scene.session.request(request.method, url, data=body, headers=headers) as answer:
            names = ("Content-Type", "Content-Range", "ETag", "Retry-After")
            headers = {name: answer.headers[name] for name in names if name in answer.headers}
            return web.Response(status=answer.status, body=await answer.read(), headers=headers)


class Held(SqlStore):
    """A store in memory whose results wait, and change no parameters, until a test lets them go."""

    held = True

    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        return None if self.held else super().claim(server, now=now, lease_s=lease_s)


@asynccontextmanager
async def line_to(job: Job, folder: Path, *, held: bool = False) -> AsyncIterator[Line]:
    """A line to a coordinator of ``job``; ``held``: it has a `Held` store."""
    store = Held(MEMORY, job.name) if held else None
    async with coordinating(job, folder, store=store) as scene:
        line = Line(scene)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", line.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        line.url = f"http://{host}:{port}"
        try:
            yield line
        finally:
            await runner.cleanup()


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
        assert isinstance(whole.body, bytes | bytearray)
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
    assert isinstance(whole.body, bytes | bytearray)
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
