"""What a relay costs: bulk data through it compared with the direct link in the same run, and idle circuits.

Three processes, as on the internet: this one sends, *far* receives, *relay* is between them. Transfers alternate, so
that other load on the machine hits both ways.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from colab_swarm.averaging.group import CHUNK_BYTES
from colab_swarm.bench.link import MIB, Sink, TransferTime, send_pieces, take_pieces, time_transfer
from colab_swarm.bench.report import BenchReport
from colab_swarm.bench.workers import Parent, Worker
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node, NodeSettings
from colab_swarm.net.peers import Contact, Message, PeerId
from colab_swarm.net.relay import Circuits, Relay, RelayQuota

IDLE_CIRCUITS = 100
PIECE = os.urandom(CHUNK_BYTES)
"""The size of a chunk of averaging."""
LOOPBACK = NodeSettings(host="127.0.0.1", max_links=4 * IDLE_CIRCUITS, max_handshakes=4 * IDLE_CIRCUITS)


class UsageQuery(Message, frozen=True):
    """Requests a `RelayUsage`."""


class RelayUsage(Message, frozen=True):
    """CPU seconds of a process so far, and its resident memory."""

    cpu_s: float
    memory_bytes: int


async def _on_usage_query(peer: PeerId, message: UsageQuery) -> RelayUsage:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return RelayUsage(time.process_time(), pages * 4096)


def run(*, quick: bool) -> BenchReport:
    """Measure with two child processes."""
    report = BenchReport("relay", quick)
    with Worker(serve, None) as worker:
        where = worker.receive()
        with Worker(serve, where) as other:
            asyncio.run(_measure(_contact(where), _contact(other.receive()), report))
    return report


def _contact(where: dict[str, Any]) -> Contact:
    return Contact(PeerId(bytes.fromhex(where["id"])), tuple(where["addresses"]))


def _circuits(node: Node, relay: Contact) -> Circuits:
    async def known() -> list[Contact]:
        return [relay]

    return Circuits(node, known, lambda: None, random.Random(0))


async def serve(parent: Parent, relay: dict[str, Any] | None) -> None:
    """Worker: the relay, or the process that receives through ``relay``."""
    node = await Node.start(Identity(), LOOPBACK)
    node.serve(UsageQuery, _on_usage_query)
    addresses = node.contact.addresses
    if relay is None:
        quota = RelayQuota(circuits=2 * IDLE_CIRCUITS, circuits_per_peer=2 * IDLE_CIRCUITS)
        Relay(node, quota)
    else:
        node.serve_stream(Sink, take_pieces)
        circuits = _circuits(node, _contact(relay))
        circuits.start()
        await circuits.wait_looked(10.0)
        addresses = (*addresses, *circuits.addresses)
    parent.send(id=node.id.hex(), addresses=addresses)
    await parent.wait()


async def _measure(relay: Contact, far: Contact, report: BenchReport) -> None:
    direct, relayed = [await Node.start(Identity(), NodeSettings(listen=False)) for _ in range(2)]
    try:
        direct.learn(Contact(far.id, tuple(one for one in far.addresses if "/relay/" not in one)))
        _circuits(relayed, relay)
        relayed.learn(Contact(far.id, tuple(one for one in far.addresses if "/relay/" in one)))
        direct.learn(relay)
        await _bulk(direct, relayed, relay, far, report)
        await _idle(direct, relay, far, report)
    finally:
        await direct.close()
        await relayed.close()


async def _bulk(direct: Node, relayed: Node, relay: Contact, far: Contact, report: BenchReport) -> None:
    rounds, size_mib = (3, 64) if report.quick else (9, 256)
    pieces = size_mib * MIB // len(PIECE)
    ways: dict[str, Callable[[int], Awaitable[float]]] = {
        "direct": lambda count: send_pieces(direct, far.id, PIECE, count),
        "relayed": lambda count: send_pieces(relayed, far.id, PIECE, count),
    }
    took: dict[str, list[TransferTime]] = {name: [] for name in ways}
    relay_cpu_s = []
    for _ in range(rounds + 1):
        for name, send in ways.items():
            before = await direct.call(relay.id, UsageQuery(), RelayUsage, timeout_s=10)
            took[name].append(await time_transfer(send, pieces))
            after = await direct.call(relay.id, UsageQuery(), RelayUsage, timeout_s=10)
            if name == "relayed":
                relay_cpu_s.append(after.cpu_s - before.cpu_s)
    pairs = list(zip(took["direct"], took["relayed"], strict=True))[1:]
    ratio, direct_s, relayed_s = (
        statistics.median(values)
        for values in zip(*((a.wall_s / b.wall_s, a.wall_s, b.wall_s) for a, b in pairs), strict=True)
    )
    mb = size_mib * MIB / 1e6
    report.add("relay.vs_direct", ratio, "", "bulk, same run")
    report.add("relay.mb_s", mb / relayed_s, "MB/s", "relayed")
    report.add("relay.direct_mb_s", mb / direct_s, "MB/s", "direct")
    cpu_s = statistics.median(relay_cpu_s[1:])
    report.add("relay.cpu_s_per_gb", 1e3 * cpu_s / mb, "CPU-s/GB", "the relay's process")


async def _idle(node: Node, relay: Contact, far: Contact, report: BenchReport) -> None:
    """Measure circuits that carry only keep-alives."""
    before = await node.call(relay.id, UsageQuery(), RelayUsage, timeout_s=10)
    callers = [await Node.start(Identity(), NodeSettings(listen=False)) for _ in range(IDLE_CIRCUITS)]
    relayed = Contact(far.id, tuple(one for one in far.addresses if "/relay/" in one))
    try:
        for caller in callers:
            _circuits(caller, relay)
            caller.learn(relayed)
            await caller.linker.link_to(far.id, 10.0)
        open_at = await node.call(relay.id, UsageQuery(), RelayUsage, timeout_s=10)
        seconds = 5.0 if report.quick else 30.0
        await asyncio.sleep(seconds)
        later = await node.call(relay.id, UsageQuery(), RelayUsage, timeout_s=10)
        still = sum(bool(caller.linker.table.of(far.id)) for caller in callers)
    finally:
        await asyncio.gather(*(caller.close() for caller in callers))
    note = f"{still} idle circuits"
    report.add("relay.idle_mb", (later.memory_bytes - before.memory_bytes) / 1e6, "MB", note)
    report.add("relay.idle_cpu_percent", 100 * (later.cpu_s - open_at.cpu_s) / seconds, "% of a core", note)
