"""Peers on loopback for the tests, and a proxy between them that can misbehave."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from typing import Any

import pytest
from aiohttp import web

from colab_swarm.events import EventLog
from colab_swarm.net.carrier import NodeSettings
from colab_swarm.net.handshake import HandshakeReceiver
from colab_swarm.net.identity import Identity
from colab_swarm.net.membership import OpenAdmission
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact, Message, PeerId, Role, Stream, StreamEnded

DEADLINE_S = 120.0  # only a hang reaches it; no test measures speed by it
LOOPBACK = NodeSettings(host="127.0.0.1")


class Echo(Message, frozen=True):
    data: bytes = b""


class Talk(Message, frozen=True):
    """Opens a stream."""


class Piece(Message, frozen=True):
    index: int


def identity(name: str) -> Identity:
    return Identity(sha256(name.encode()).digest())


def run(main: Coroutine[Any, Any, None], *, tidy: bool = True) -> None:
    """Run a test against the deadline; if it must be ``tidy``, fail if it leaves tasks behind."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await main
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not (tidy and left), f"left running: {left}"

    asyncio.run(bounded())


async def start(name: str, settings: NodeSettings = LOOPBACK, **more: Any) -> Node:
    return await Node.start(identity(name), settings, more.pop("events", EventLog()), **more)


class Viewers(OpenAdmission):
    def __init__(self, names: Iterable[str]) -> None:
        self._keys = {identity(name).public_key for name in names}

    def admit(self, public_key: bytes, membership: bytes, *, now: float) -> Role:
        return Role.VIEWER if public_key in self._keys else Role.WORKER


@asynccontextmanager
async def peers(
    *names: str,
    settings: NodeSettings = LOOPBACK,
    events: EventLog | None = None,
    clients: Sequence[str] = (),
    viewers: Sequence[str] = (),
    **changes: Any,
) -> AsyncIterator[list[Node]]:
    """Peers that know each other and answer `Echo`; the ``clients`` cannot be dialled."""
    async with AsyncExitStack() as stack:
        nodes = []
        for name in names:
            own = replace(settings, **changes | ({"listen": False, "iroh": None} if name in clients else {}))
            node = await start(name, own, events=events or EventLog(), admission=Viewers(viewers))
            stack.push_async_callback(node.close)
            nodes.append(node)
        introduce(nodes)
        yield nodes


peers_by_iroh = partial(peers, listen=False, iroh="direct")
without_iroh = pytest.mark.skipif(find_spec("iroh") is None, reason="iroh has no wheel for this platform")


def candidates(*relays: Node) -> Callable[[], Coroutine[Any, Any, list[Contact]]]:
    async def known() -> list[Contact]:
        return [relay.contact for relay in relays]

    return known


def introduce(everyone: Sequence[Node]) -> None:
    for each in everyone:
        each.serve(Echo, echo)
        for other in everyone:
            each.learn(other.contact)


async def echo(peer: PeerId, message: Echo) -> Echo:
    return message


async def sink(opening: Talk, stream: Stream) -> None:
    count = 0
    async for _ in items(stream):
        count += 1
    await stream.send(Piece(count))


async def push(stream: Stream, count: int, size: int = 1 << 16) -> int:
    """Send pieces and end; return the index that the other end answers, which is their count from `sink`."""
    for index in range(count):
        await stream.send(Piece(index), bytes(size))
    await stream.end()
    return (await stream.receive(Piece))[0].index


async def items(stream: Stream) -> AsyncIterator[tuple[Piece, memoryview]]:
    while True:
        try:
            yield await stream.receive(Piece)
        except StreamEnded:
            return


async def until(condition: Callable[[], bool]) -> None:
    """Yield to the loop until the condition holds (the deadline of `run` bounds it)."""
    while not condition():
        await asyncio.sleep(0.001)


def deafen(node: Node) -> list[web.BaseRequest]:
    """Let a peer accept WebSockets and never answer a handshake; return its visitors."""
    receive = node.listener._receive
    visitors: list[web.BaseRequest] = []

    def deaf(request: web.BaseRequest) -> HandshakeReceiver:
        visitors.append(request)
        receiver = receive(request)
        receiver.on_message = lambda data: None  # type: ignore[method-assign]
        return receiver

    node.listener._receive = deaf
    return visitors


@asynccontextmanager
async def served(handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Serve HTTP by aiohttp; yields host and port."""
    server = web.Server(handler, access_log=None)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        await server.shutdown()


class Proxy:
    """Passes TCP both ways. ``meddle`` may change what the dialling end sends; all stops while `moving` is cleared."""

    def __init__(self, target: Contact) -> None:
        self.meddle: Callable[[bytes], bytes] = lambda data: data
        self.moving = asyncio.Event()
        self.moving.set()
        self.tasks = set[asyncio.Task[Any] | None]()
        self.writers: list[asyncio.StreamWriter] = []
        self._host, self._port = target.addresses[0].removeprefix("ws://").split(":")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self.tasks.add(task)
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        self.writers += [writer, far_writer]
        there = self._pump(reader, far_writer, meddled=True)
        await asyncio.gather(there, self._pump(far_reader, writer, meddled=False))
        self.tasks.remove(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, meddled: bool
    ) -> None:
        with suppress(OSError):  # one end was cut; the close below informs the other
            while data := await reader.read(1 << 16):
                await self.moving.wait()
                if meddled:
                    data = self.meddle(data)
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def proxied(alice: Node, bob: Node) -> AsyncIterator[Proxy]:
    """Have alice dial bob through a proxy."""
    proxy = Proxy(bob.contact)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    alice.learn(Contact(bob.id, (f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}",)))
    try:
        yield proxy
    finally:
        server.close()
        proxy.moving.set()
        for writer in proxy.writers:
            writer.transport.abort()
        await until(lambda: not proxy.tasks)
