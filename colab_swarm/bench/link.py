"""What a link costs: bulk data and calls between two processes, compared with a plain asyncio socket in the same run.

Three ways lead to the same child process. Each gets 64 KiB pieces in turn, round by round, so that other load on the
machine hits all three. *raw* is an asyncio socket read by a `BufferedProtocol`, *ws* the WebSocket carrier without
encryption, *link* a stream between two nodes. The child answers with its CPU time so far.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from colab_swarm.bench.report import BenchReport
from colab_swarm.bench.workers import Parent, Worker
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node, NodeSettings
from colab_swarm.net.peers import Contact, Message, PeerId, Stream
from colab_swarm.net.websocket import SCRATCH_BYTES, WebSocket, accept, dial

PIECE = os.urandom(1 << 16)
MIB = 1 << 20
_COUNT, _SECONDS = struct.Struct("<Q"), struct.Struct("<d")
IN_FLIGHT = 32


class Sink(Message, frozen=True):
    """Opens a stream of this many pieces."""

    pieces: int


class ResourceUse(Message, frozen=True):
    """CPU seconds of the process so far."""

    cpu_s: float


class Ping(Message, frozen=True):
    """The receiver returns it."""

    data: bytes


class TransferTime(NamedTuple):
    """One transfer: wall seconds, and CPU seconds of both processes."""

    wall_s: float
    cpu_s: float


def run(*, quick: bool) -> BenchReport:
    """Measure against a child process."""
    report = BenchReport("link", quick)
    with Worker(serve) as worker:
        asyncio.run(_measure(worker.receive(), report))
    return report


async def _measure(child: dict[str, Any], report: BenchReport) -> None:
    node = await Node.start(Identity(), NodeSettings(listen=False))
    try:
        peer = PeerId(bytes.fromhex(child["id"]))
        node.learn(Contact(peer, (child["address"],)))
        rounds, size_mib, calls = (3, 96, 640) if report.quick else (9, 512, 6400)
        pieces = size_mib * MIB // len(PIECE)
        took = await _bulk(node, peer, child, rounds=rounds, pieces=pieces)
        one_ms, _ = await _round_trips(node, peer, count=calls, in_flight=1)
        many_ms, calls_per_s = await _round_trips(node, peer, count=calls * 4, in_flight=IN_FLIGHT)
    finally:
        await node.close()
    _add_bulk(report, took, pieces * len(PIECE))
    for key, values in (("rtt", one_ms), ("rtt32", many_ms)):
        note = "1 KiB call, 1 in flight" if key == "rtt" else f"{IN_FLIGHT} in flight"
        report.add(f"link.{key}_ms_p50", statistics.median(values), "ms", note)
        report.add(f"link.{key}_ms_p99", values[int(len(values) * 0.99)], "ms", note)
    report.add("link.calls_per_s", calls_per_s, "1/s", f"{IN_FLIGHT} in flight, one link")


def _add_bulk(report: BenchReport, took: dict[str, list[TransferTime]], size_bytes: int) -> None:
    ratios = [raw.wall_s / link.wall_s for raw, link in zip(took["raw"], took["link"], strict=True)]
    report.add("link.vs_raw", statistics.median(ratios), "", "encrypted bulk against the plain socket")
    notes = {
        "link": "encrypted, both ends",
        "ws": "the WebSocket alone",
        "raw": "plain asyncio socket, BufferedProtocol",
    }
    for name, note in notes.items():
        prefix = "link." if name == "link" else f"link.{name}_"
        cpu_s = statistics.median(one.cpu_s for one in took[name])
        wall_s = statistics.median(one.wall_s for one in took[name])
        report.add(f"{prefix}mb_s", size_bytes / 1e6 / wall_s, "MB/s", note)
        report.add(f"{prefix}cpu_s_per_gb", cpu_s / (size_bytes / 1e9), "CPU-s/GB", note)


async def _bulk(
    node: Node, peer: PeerId, child: dict[str, Any], *, rounds: int, pieces: int
) -> dict[str, list[TransferTime]]:
    """Return the transfers of each way, one of each per round."""
    end, scratch = CarrierEnd(), memoryview(bytearray(SCRATCH_BYTES))
    async with aiohttp.ClientSession() as session:
        websocket = await dial(session, f"ws://127.0.0.1:{child['ws']}", scratch=scratch, receiver=end)
        ways: dict[str, Callable[[int], Awaitable[float]]] = {
            "raw": lambda count: _send_raw(child["raw"], count),
            "ws": lambda count: _send_websocket(websocket, end, count),
            "link": lambda count: send_pieces(node, peer, PIECE, count),
        }
        took: dict[str, list[TransferTime]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, send in ways.items():
                took[name].append(await time_transfer(send, pieces))
        websocket.close()
        await websocket.wait_closed()
    return {name: values[1:] for name, values in took.items()}  # the first round warms up


async def time_transfer(send: Callable[[int], Awaitable[float]], pieces: int) -> TransferTime:
    """Time ``send(pieces)``; ``send(n)`` moves n pieces and returns the child's CPU seconds so far."""
    child_s = await send(0)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    child_s = await send(pieces) - child_s
    return TransferTime(time.perf_counter() - wall_s, time.process_time() - cpu_s + child_s)


async def _send_raw(port: int, pieces: int) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_COUNT.pack(pieces * len(PIECE)))
    for _ in range(pieces):
        writer.write(PIECE)
        await writer.drain()
    answer = await reader.readexactly(_SECONDS.size)
    writer.close()
    return float(_SECONDS.unpack(answer)[0])


async def _send_websocket(websocket: WebSocket, end: CarrierEnd, pieces: int) -> float:
    answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    end.on_data = lambda data: answer.set_result(_SECONDS.unpack(data)[0])
    websocket.send_bytes(_COUNT.pack(pieces * len(PIECE)))
    for _ in range(pieces):
        websocket.send_bytes(PIECE)
        await end.writable.wait()
    return await answer


async def send_pieces(node: Node, peer: PeerId, piece: bytes, pieces: int) -> float:
    """Send ``piece`` so often over a stream; return the receiver's CPU seconds so far."""
    async with await node.stream(peer, Sink(pieces), timeout_s=10) as stream:
        for _ in range(pieces):
            await stream.send(Sink(0), piece)
        used, _ = await stream.receive(ResourceUse)
        return used.cpu_s


async def _round_trips(node: Node, peer: PeerId, *, count: int, in_flight: int) -> tuple[list[float], float]:
    """Return the milliseconds of each 1 KiB call, sorted, and calls per second."""
    message, took_ms = Ping(bytes(1024)), []

    async def caller() -> None:
        for _ in range(count // in_flight):
            at = time.perf_counter()
            await node.call(peer, message, Ping, timeout_s=10)
            took_ms.append((time.perf_counter() - at) * 1e3)

    began_at = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(in_flight)))
    return sorted(took_ms), len(took_ms) / (time.perf_counter() - began_at)


# --- the child --------------------------------------------------------------------------------------------------------


class _Counter:
    """Counts ``total`` bytes, given in the first 8, then answers with the CPU time; repeatedly."""

    def __init__(self, answer: Callable[[bytes], object]) -> None:
        self._answer = answer
        self._left: int | None = None

    def add(self, data: memoryview) -> None:
        if self._left is None:
            (self._left,) = _COUNT.unpack_from(data)
            data = data[_COUNT.size :]
        self._left -= len(data)
        if self._left <= 0:
            self._left = None
            self._answer(_SECONDS.pack(time.process_time()))


class RawSink(asyncio.BufferedProtocol):
    """The child's end of the plain socket."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._buffer = memoryview(bytearray(SCRATCH_BYTES))
        self._counter = _Counter(transport.write)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._counter.add(self._buffer[:nbytes])


class CarrierEnd:
    """An end of the bare WebSocket: counts, or collects the answer."""

    def __init__(self) -> None:
        self.on_data: Callable[[memoryview], object] = lambda data: None
        self.writable = asyncio.Event()
        self.writable.set()

    def on_message(self, data: memoryview) -> None:
        self.on_data(data)

    def on_writable(self, writable: bool) -> None:
        if writable:
            self.writable.set()
        else:
            self.writable.clear()

    def on_lost(self, reason: str) -> None:
        self.writable.set()


async def serve(parent: Parent) -> None:
    """Worker: serve all three ways."""
    loop = asyncio.get_running_loop()
    raw = await loop.create_server(RawSink, "127.0.0.1", 0)
    ws = await loop.create_server(web.Server(_serve_websocket, access_log=None), "127.0.0.1", 0)
    node = await Node.start(Identity(), NodeSettings(host="127.0.0.1"))
    node.serve(Ping, _echo)
    node.serve_stream(Sink, take_pieces)
    parent.send(
        raw=raw.sockets[0].getsockname()[1],
        ws=ws.sockets[0].getsockname()[1],
        id=node.id.hex(),
        address=node.contact.addresses[0],
    )
    await parent.wait()


async def _serve_websocket(request: web.BaseRequest) -> web.StreamResponse:
    end, scratch = CarrierEnd(), memoryview(bytearray(SCRATCH_BYTES))
    websocket, first, response = await accept(request, scratch=scratch, receiver=end)
    end.on_data = _Counter(websocket.send_bytes).add
    end.on_message(memoryview(first))
    await websocket.wait_closed()
    return response


async def _echo(peer: PeerId, message: Ping) -> Ping:
    return message


async def take_pieces(opening: Sink, stream: Stream) -> None:
    """Receive all pieces of a stream, then answer with the CPU time."""
    for _ in range(opening.pieces):
        await stream.receive(Sink)
    await stream.send(ResourceUse(time.process_time()))
