"""What a link costs, and what a relay in between adds, among processes.

*link*: bulk data and calls, compared with a plain asyncio socket. Three ways lead to the same child process. Each gets
64 KiB pieces in turn, round by round, so that other load on the machine hits all three. *raw* is an asyncio socket
read by a `BufferedProtocol`, *ws* the WebSocket carrier without encryption, *link* a stream between two nodes.

*relay*: this process sends, one child receives, another one is the relay between them. Transfers through it and over
the direct link alternate. Then circuits stay idle.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from aiohttp import web

from colab_swarm.averaging.group import CHUNK_BYTES
from colab_swarm.bench.harness import BenchReport, Crew, Parent
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node, NodeSettings
from colab_swarm.net.peers import Contact, Message, PeerId, Stream
from colab_swarm.net.relay import Circuits, Relay, RelayQuota
from colab_swarm.net.websocket import SCRATCH_BYTES, WebSocket, accept, dial

PIECE, CHUNK = os.urandom(1 << 16), os.urandom(CHUNK_BYTES)
MIB = 1 << 20
IN_FLIGHT, IDLE_CIRCUITS = 32, 100


class Sink(Message, frozen=True):
    """Opens a stream of this many pieces."""

    pieces: int


class UsageQuery(Message, frozen=True):
    """Requests a `ResourceUse`."""


class ResourceUse(Message, frozen=True):
    """CPU seconds of a process so far, and its resident memory where it is asked for."""

    cpu_s: float
    memory_bytes: int = 0


class Ping(Message, frozen=True):
    data: bytes


async def start_node(**settings: Any) -> Node:
    return await Node.start(Identity(), NodeSettings(host="127.0.0.1", **settings))


def where(node: Node) -> dict[str, Any]:
    return {"id": node.id.hex(), "addresses": node.contact.addresses}


def contact(found: dict[str, Any]) -> Contact:
    return Contact(PeerId(bytes.fromhex(found["id"])), tuple(found["addresses"]))


def run(*, quick: bool) -> BenchReport:
    report = BenchReport("link", quick)
    with Crew() as crew:
        asyncio.run(_measure(crew.start(serve).receive(), report))
    return report


async def _measure(child: dict[str, Any], report: BenchReport) -> None:
    node, peer = await start_node(listen=False), contact(child)
    node.learn(peer)
    rounds, size_mib, calls = (3, 96, 640) if report.quick else (9, 512, 6400)
    pieces = size_mib * MIB // len(PIECE)
    try:
        took = await _bulk(node, peer.id, child, rounds=rounds, pieces=pieces)
        one_ms, _ = await _round_trips(node, peer.id, count=calls, in_flight=1)
        many_ms, calls_per_s = await _round_trips(node, peer.id, count=calls * 4, in_flight=IN_FLIGHT)
    finally:
        await node.close()
    ratios = [raw_s / link_s for (raw_s, _), (link_s, _) in zip(took["raw"], took["link"], strict=True)]
    report.add("vs_raw", median(ratios), "", "encrypted bulk against the plain socket")
    gb = pieces * len(PIECE) / 1e9
    for name, prefix in {"link": "", "ws": "ws_", "raw": "raw_"}.items():
        wall_s, cpu_s = map(median, zip(*took[name], strict=True))
        report.add(f"{prefix}mb_s", 1e3 * gb / wall_s, "MB/s")
        report.add(f"{prefix}cpu_s_per_gb", cpu_s / gb, "CPU-s/GB", "both ends")
    for key, values in {"rtt": one_ms, "rtt32": many_ms}.items():
        found = {f"{key}_ms_p50": median(values), f"{key}_ms_p99": values[int(len(values) * 0.99)]}
        report.add_all(found, "ms", "1 KiB call")
    report.add("calls_per_s", calls_per_s, "1/s", f"{IN_FLIGHT} in flight, one link")


async def _bulk(
    node: Node, peer: PeerId, child: dict[str, Any], *, rounds: int, pieces: int
) -> dict[str, list[tuple[float, float]]]:
    end, scratch = CarrierEnd(), memoryview(bytearray(SCRATCH_BYTES))
    async with aiohttp.ClientSession() as session:
        websocket = await dial(session, f"ws://127.0.0.1:{child['ws']}", scratch=scratch, receiver=end)
        ways: dict[str, Callable[[int], Awaitable[float]]] = {
            "raw": partial(_send_raw, child["raw"]),
            "ws": partial(_send_websocket, websocket, end),
            "link": partial(send_pieces, node, peer, PIECE),
        }
        turns = [
            {name: await time_transfer(send, pieces) for name, send in ways.items()}
            for _ in range(rounds + 1)
        ]
        websocket.close()
        await websocket.wait_closed()
    return {name: [turn[name] for turn in turns[1:]] for name in ways}  # the first warms up


async def time_transfer(send: Callable[[int], Awaitable[float]], pieces: int) -> tuple[float, float]:
    """Return the wall seconds, and the CPU seconds of both processes, of ``send(pieces)``.

    ``send(n)`` moves n pieces and returns the child's CPU seconds so far.
    """
    child_s = await send(0)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    child_s = await send(pieces) - child_s
    return time.perf_counter() - wall_s, time.process_time() - cpu_s + child_s


async def _send_raw(port: int, pieces: int) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(pieces):
        writer.write(PIECE)
        await writer.drain()
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return float(answer)


async def _send_websocket(websocket: WebSocket, end: CarrierEnd, pieces: int) -> float:
    answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    end.on_data = lambda data: answer.set_result(float(bytes(data)))
    for _ in range(pieces):
        websocket.send_bytes(PIECE)
        await end.writable.wait()
    websocket.send_bytes(END)
    return await answer


async def send_pieces(node: Node, peer: PeerId, piece: bytes, pieces: int) -> float:
    async with await node.stream(peer, Sink(pieces), timeout_s=10) as stream:
        for _ in range(pieces):
            await stream.send(Sink(0), piece)
        used, _ = await stream.receive(ResourceUse)
        return used.cpu_s


async def _round_trips(node: Node, peer: PeerId, *, count: int, in_flight: int) -> tuple[list[float], float]:
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

END = b"."


def _cpu_time() -> bytes:
    return str(time.process_time()).encode()


class RawSink(asyncio.BufferedProtocol):
    """The child's end of the plain socket: answers at the end of the data."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._buffer = transport, bytearray(SCRATCH_BYTES)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def eof_received(self) -> None:
        self._transport.write(_cpu_time())


class CarrierEnd:
    def __init__(self) -> None:
        self.on_data: Callable[[memoryview], object] = lambda data: None
        self.writable = asyncio.Event()
        self.writable.set()

    def on_message(self, data: memoryview) -> None:
        self.on_data(data)

    def on_writable(self, writable: bool) -> None:
        self.writable.set() if writable else self.writable.clear()

    def on_lost(self, reason: str) -> None:
        self.writable.set()


async def serve(parent: Parent) -> None:
    loop = asyncio.get_running_loop()
    raw = await loop.create_server(RawSink, "127.0.0.1", 0)
    ws = await loop.create_server(web.Server(_serve_websocket, access_log=None), "127.0.0.1", 0)
    node = await start_node()
    node.serve(Ping, _echo)
    node.serve_stream(Sink, take_pieces)
    raw_port, ws_port = (server.sockets[0].getsockname()[1] for server in (raw, ws))
    parent.send(raw=raw_port, ws=ws_port, **where(node))
    await parent.wait()


async def _serve_websocket(request: web.BaseRequest) -> web.StreamResponse:
    end, scratch = CarrierEnd(), memoryview(bytearray(SCRATCH_BYTES))
    websocket, first, response = await accept(request, scratch=scratch, receiver=end)

    def on_data(data: memoryview) -> None:
        if data == END:
            websocket.send_bytes(_cpu_time())

    end.on_data = on_data
    on_data(memoryview(first))
    await websocket.wait_closed()
    return response


async def _echo(peer: PeerId, message: Ping) -> Ping:
    return message


async def take_pieces(opening: Sink, stream: Stream) -> None:
    for _ in range(opening.pieces):
        await stream.receive(Sink)
    await stream.send(ResourceUse(time.process_time()))


# --- a relay in between --------------------------------------------------------------------------------------------


def run_relay(*, quick: bool) -> BenchReport:
    report = BenchReport("relay", quick)
    with Crew() as crew:
        relay = crew.start(serve_relay, None).receive()
        far = crew.start(serve_relay, relay).receive()
        asyncio.run(_measure_relay(contact(relay), contact(far), report))
    return report


def _circuits(node: Node, relay: Contact) -> Circuits:
    async def known() -> list[Contact]:
        return [relay]

    return Circuits(node, known, lambda: None, random.Random(0))


async def _on_usage_query(peer: PeerId, message: UsageQuery) -> ResourceUse:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return ResourceUse(time.process_time(), pages * 4096)


async def serve_relay(parent: Parent, relay: dict[str, Any] | None) -> None:
    node = await start_node(max_links=4 * IDLE_CIRCUITS, max_handshakes=4 * IDLE_CIRCUITS)
    node.serve(UsageQuery, _on_usage_query)
    found = where(node)
    if relay is None:
        Relay(node, RelayQuota(circuits=2 * IDLE_CIRCUITS, circuits_per_peer=2 * IDLE_CIRCUITS))
    else:
        node.serve_stream(Sink, take_pieces)
        circuits = _circuits(node, contact(relay))
        circuits.start()
        await circuits.wait_looked(10.0)
        found["addresses"] = (*found["addresses"], *circuits.addresses)
    parent.send(**found)
    await parent.wait()


async def _measure_relay(relay: Contact, far: Contact, report: BenchReport) -> None:
    direct, relayed = nodes = [await start_node(listen=False) for _ in range(2)]
    circuit = Contact(far.id, tuple(one for one in far.addresses if "/relay/" in one))
    usage = partial(direct.call, relay.id, UsageQuery(), ResourceUse, timeout_s=10)
    try:
        direct.learn(Contact(far.id, tuple(one for one in far.addresses if "/relay/" not in one)))
        direct.learn(relay)
        _circuits(relayed, relay)
        relayed.learn(circuit)
        await _relayed_bulk([partial(send_pieces, node, far.id, CHUNK) for node in nodes], usage, report)
        await _idle(usage, relay, circuit, report)
    finally:
        await direct.close()
        await relayed.close()


async def _relayed_bulk(
    ways: list[Callable[[int], Awaitable[float]]],
    usage: Callable[[], Awaitable[ResourceUse]],
    report: BenchReport,
) -> None:
    rounds, size_mib = (3, 64) if report.quick else (9, 256)
    pieces, turns, cpu_s = size_mib * MIB // len(CHUNK), [], []
    for _ in range(rounds + 1):
        direct_s, _ = await time_transfer(ways[0], pieces)
        before = await usage()
        relayed_s, _ = await time_transfer(ways[1], pieces)
        cpu_s.append((await usage()).cpu_s - before.cpu_s)
        turns.append((direct_s, relayed_s))
    direct_s, relayed_s = map(median, zip(*turns[1:], strict=True))
    mb = size_mib * MIB / 1e6
    report.add("vs_direct", median(direct / relayed for direct, relayed in turns[1:]), "", "bulk, same run")
    report.add_all({"mb_s": mb / relayed_s, "direct_mb_s": mb / direct_s}, "MB/s")
    report.add("cpu_s_per_gb", 1e3 * median(cpu_s[1:]) / mb, "CPU-s/GB", "the relay's process")


async def _idle(
    usage: Callable[[], Awaitable[ResourceUse]], relay: Contact, circuit: Contact, report: BenchReport
) -> None:
    before, seconds = await usage(), 5.0 if report.quick else 30.0
    callers = [await start_node(listen=False) for _ in range(IDLE_CIRCUITS)]
    try:
        for caller in callers:
            _circuits(caller, relay)
            caller.learn(circuit)
            await caller.linker.link_to(circuit.id, 10.0)
        open_at = await usage()
        await asyncio.sleep(seconds)
        later = await usage()
        still = sum(bool(caller.linker.table.of(circuit.id)) for caller in callers)
    finally:
        await asyncio.gather(*(caller.close() for caller in callers))
    note = f"{still} idle circuits"
    report.add("idle_mb", (later.memory_bytes - before.memory_bytes) / 1e6, "MB", note)
    report.add("idle_cpu_percent", 100 * (later.cpu_s - open_at.cpu_s) / seconds, "% of a core", note)
