"""What a link costs, and what a relay in between adds, among processes.

*link*: bulk data and calls, compared with a plain asyncio socket. Two ways lead to the same child
process. Each gets 64 KiB pieces in turn, round by round, so that other load on the machine hits
both. *raw* is an asyncio socket read by a `BufferedProtocol`, *link* a stream between two nodes,
*iroh* the same over QUIC, where iroh is installed.

*relay*: this process sends, one child receives, another one is the relay between them. Transfers
through it and over the direct link alternate. Then circuits stay idle.
"""

import asyncio
import os
import random
import statistics
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from itertools import filterfalse
from pathlib import Path
from typing import Any

from colab_swarm.averaging.group import CHUNK_BYTES
from colab_swarm.experiments.report import Report, reports
from colab_swarm.net import handshake
from colab_swarm.net import node as nodes
from colab_swarm.net import relay as relays
from colab_swarm.net.addresses import is_iroh
from colab_swarm.net.carrier import NodeSettings
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact, Message, PeerId, Stream
from colab_swarm.net.relay import Circuits, Relay
from colab_swarm.net.websocket import SCRATCH_BYTES
from tests.benchmarks.harness import Channel, Crew, Worker

PIECE = os.urandom(1 << 16)
CHUNK = os.urandom(CHUNK_BYTES)
"""What is sent over a link; what is sent through a relay, as large as a chunk of averaging."""
MIB = 1 << 20
_COUNT = struct.Struct("<Q")
_SECONDS = struct.Struct("<d")
IN_FLIGHT = 32
IDLE_CIRCUITS = 100


class Sink(Message, frozen=True):
    """Opens a stream of this many pieces."""

    pieces: int


class CpuTime(Message, frozen=True):
    cpu_s: float  # of a process so far


class Ping(Message, frozen=True):
    """The receiver returns it."""

    data: bytes


BY_IROH = "direct" if find_spec("iroh") else None


async def start_node(**settings: Any) -> Node:
    return await Node.start(Identity(), NodeSettings(host="127.0.0.1", **settings))


@asynccontextmanager
async def callers(count: int) -> AsyncIterator[list[Node]]:
    """Start nodes that only dial, and close them at the end."""
    nodes = [await start_node(listen=False) for _ in range(count)]
    try:
        yield nodes
    finally:
        await asyncio.gather(*(node.close() for node in nodes))


def where(node: Node) -> dict[str, Any]:
    return {"id": node.id.hex(), "addresses": node.contact.addresses}


def contact(found: dict[str, Any]) -> Contact:
    return Contact(PeerId(bytes.fromhex(found["id"])), tuple(found["addresses"]))


@reports("link")
def run(report: Report) -> None:
    with Crew() as crew:
        asyncio.run(_measure(crew.start(serve).receive(), report))


async def _measure(child: dict[str, Any], report: Report) -> None:
    peer = contact(child)
    ports = tuple(filterfalse(is_iroh, peer.addresses))
    by_iroh = tuple(filter(is_iroh, peer.addresses))
    rounds, size_mib, calls = (3, 96, 640) if report.quick else (9, 512, 6400)
    pieces = size_mib * MIB // len(PIECE)
    async with callers(2) as (node, other):
        node.learn(Contact(peer.id, ports))
        other.learn(Contact(peer.id, by_iroh))
        ways = {"": partial(send_pieces, node, peer.id, PIECE), "raw_": partial(_send_raw, child["raw"])}
        ways |= {"iroh_": partial(send_pieces, other, peer.id, PIECE)} if by_iroh else {}
        took = [[await time_transfer(send, pieces) for send in ways.values()] for _ in range(rounds + 1)]
        one_ms, _ = await _round_trips(node, peer.id, count=calls, in_flight=1)
        many_ms, calls_per_s = await _round_trips(node, peer.id, count=calls * 4, in_flight=IN_FLIGHT)
        if by_iroh:
            iroh_ms, _ = await _round_trips(other, peer.id, count=calls, in_flight=1)
            report.add("iroh_rtt_ms_p50", statistics.median(iroh_ms), "ms", "1 KiB call, 1 in flight")
    gb = pieces * len(PIECE) / 1e9
    by_way = dict(zip(ways, zip(*took[1:], strict=True), strict=True))
    for prefix, found in by_way.items():
        if prefix != "raw_":
            ratios = [raw_s / own_s for (own_s, _), (raw_s, _) in zip(found, by_way["raw_"], strict=True)]
            report.add(f"{prefix}vs_raw", statistics.median(ratios), "", "encrypted against the plain socket")
        wall_s, cpu_s = map(statistics.median, zip(*found, strict=True))
        report.add(f"{prefix}mb_s", 1e3 * gb / wall_s, "MB/s")
        report.add(f"{prefix}cpu_s_per_gb", cpu_s / gb, "CPU-s/GB", "both ends")
    for key, in_flight, times in (("rtt", 1, one_ms), ("rtt32", IN_FLIGHT, many_ms)):
        found_ms = {f"{key}_ms_p50": statistics.median(times), f"{key}_ms_p99": times[int(len(times) * 0.99)]}
        report.add_all(found_ms, "ms", f"1 KiB call, {in_flight} in flight")
    report.add("calls_per_s", calls_per_s, "1/s", f"{IN_FLIGHT} in flight, one link")


async def time_transfer(send: Callable[[int], Awaitable[float]], pieces: int) -> tuple[float, float]:
    """Return wall and CPU seconds of ``send(n)``, which moves n pieces and returns the child's CPU seconds."""
    child_s = await send(0)
    cpu_s = time.process_time()
    wall_s = time.perf_counter()
    child_s = await send(pieces) - child_s
    return time.perf_counter() - wall_s, time.process_time() - cpu_s + child_s


async def _send_raw(port: int, pieces: int) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_COUNT.pack(pieces * len(PIECE)))
    for _ in range(pieces):
        writer.write(PIECE)
        await writer.drain()
    answer = await reader.readexactly(_SECONDS.size)
    writer.close()
    return float(_SECONDS.unpack(answer)[0])


async def send_pieces(node: Node, peer: PeerId, piece: bytes, pieces: int) -> float:
    """Send ``piece`` so often over a stream; return the receiver's CPU seconds so far."""
    async with await node.stream(peer, Sink(pieces), timeout_s=10) as stream:
        for _ in range(pieces):
            await stream.send(Sink(0), piece)
        used, _ = await stream.receive(CpuTime)
        return used.cpu_s


async def _round_trips(node: Node, peer: PeerId, *, count: int, in_flight: int) -> tuple[list[float], float]:
    """Return the milliseconds of each 1 KiB call, sorted, and calls per second."""
    message = Ping(bytes(1024))
    took_ms = []

    async def caller() -> None:
        for _ in range(count // in_flight):
            at = time.perf_counter()
            await node.call(peer, message, Ping, timeout_s=10)
            took_ms.append((time.perf_counter() - at) * 1e3)

    began_at = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(in_flight)))
    return sorted(took_ms), len(took_ms) / (time.perf_counter() - began_at)


class RawSink(asyncio.BufferedProtocol):
    """Counts as many bytes as the first 8 say, then answers with the CPU time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._buffer = memoryview(bytearray(SCRATCH_BYTES))
        self._left = -1

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._left < 0:
            (self._left,) = _COUNT.unpack_from(self._buffer)
            nbytes -= _COUNT.size
        self._left -= nbytes
        if self._left == 0:
            self._transport.write(_SECONDS.pack(time.process_time()))


async def serve(parent: Channel) -> None:
    raw = await asyncio.get_running_loop().create_server(RawSink, "127.0.0.1", 0)
    node = await start_node(iroh=BY_IROH)
    node.serve(Ping, _echo)
    node.serve_stream(Sink, take_pieces)
    await parent.wait_call(raw=raw.sockets[0].getsockname()[1], **where(node))


async def _echo(peer: PeerId, message: Ping) -> Ping:
    return message


async def take_pieces(opening: Sink, stream: Stream) -> None:
    for _ in range(opening.pieces):
        await stream.receive(Sink)
    await stream.send(CpuTime(time.process_time()))


@reports("relay")
def run_relay(report: Report) -> None:
    with Crew() as crew:
        relay = crew.start(serve_relay, None)
        found = relay.receive()
        far = contact(crew.start(serve_relay, found).receive())
        asyncio.run(_measure_relay(report, relay, contact(found), far))


def _circuits(node: Node, relay: Contact) -> Circuits:
    async def known() -> list[Contact]:
        return [relay]

    return Circuits(node, known, lambda: None, random.Random(0))


async def serve_relay(parent: Channel, relay: dict[str, Any] | None) -> None:
    """Worker: the relay, or the peer that it relays to. Then answers with what the process has used."""
    nodes.MAX_LINKS = handshake.MAX_HANDSHAKES = 4 * IDLE_CIRCUITS
    node = await start_node()
    found = where(node)
    if relay is None:
        relays.CIRCUITS_PER_PEER = 2 * IDLE_CIRCUITS
        Relay(node)
    else:
        node.serve_stream(Sink, take_pieces)
        circuits = _circuits(node, contact(relay))
        circuits.start()
        await circuits.wait_looked(10.0)
        found["addresses"] = (*found["addresses"], *sum(circuits.places.values(), ()))
    while True:
        await parent.wait_call(**found)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found = {"cpu_s": time.process_time(), "memory_mb": pages * 4096 / 1e6}


async def _measure_relay(report: Report, process: Worker, relay: Contact, far: Contact) -> None:
    circuit = Contact(far.id, tuple(one for one in far.addresses if "/relay/" in one))
    rounds, size_mib = (3, 64) if report.quick else (9, 256)
    pieces = size_mib * MIB // len(CHUNK)
    mb = size_mib * MIB / 1e6
    took = []
    async with callers(2) as (direct, relayed):
        direct.learn(Contact(far.id, tuple(one for one in far.addresses if "/relay/" not in one)))
        _circuits(relayed, relay)
        relayed.learn(circuit)
        for _ in range(rounds + 1):
            one_s, _ = await time_transfer(partial(send_pieces, direct, far.id, CHUNK), pieces)
            before = await process.wait_call()
            other_s, _ = await time_transfer(partial(send_pieces, relayed, far.id, CHUNK), pieces)
            used = await process.wait_call()
            took.append((one_s, other_s, used["cpu_s"] - before["cpu_s"]))
    direct_s, relayed_s, relay_cpu_s = zip(*took[1:], strict=True)
    ratios = [a / b for a, b in zip(direct_s, relayed_s, strict=True)]
    report.add_rows(
        ("vs_direct", statistics.median(ratios), "", "bulk, same run"),
        ("mb_s", mb / statistics.median(relayed_s), "MB/s", "relayed"),
        ("direct_mb_s", mb / statistics.median(direct_s), "MB/s", "direct"),
        ("cpu_s_per_gb", 1e3 * statistics.median(relay_cpu_s) / mb, "CPU-s/GB", "the relay's process"),
    )
    await _idle(report, process, relay, circuit)


async def _idle(report: Report, process: Worker, relay: Contact, circuit: Contact) -> None:
    before = await process.wait_call()
    seconds = 5.0 if report.quick else 30.0
    async with callers(IDLE_CIRCUITS) as nodes:
        for caller in nodes:
            _circuits(caller, relay)
            caller.learn(circuit)
            await caller.link_to(circuit.id, 10.0)
        opened = await process.wait_call()
        await asyncio.sleep(seconds)
        later = await process.wait_call()
        still = sum(bool(caller.table.of(circuit.id)) for caller in nodes)
    idle_percent = 100 * (later["cpu_s"] - opened["cpu_s"]) / seconds
    report.add_rows(
        ("idle_mb", later["memory_mb"] - before["memory_mb"], "MB", f"{still} idle circuits"),
        ("idle_cpu_percent", idle_percent, "% of a core", f"{still} idle circuits"),
    )
