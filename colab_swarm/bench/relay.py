"""What a relay costs: bulk data through it against the direct link in the same run, and circuits that are idle.

Three processes, as on the internet: this one sends, *far* takes, *relay* stands between. Transfers alternate, so that
what else the machine does hits both ways.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from colab_swarm.averaging.group import CHUNK_BYTES
from colab_swarm.bench.link import MIB, ResourceUse, Sink, TransferTime, _sink, _timed
from colab_swarm.bench.report import BenchReport
from colab_swarm.net.circuits import Circuits
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node, NodeSettings
from colab_swarm.net.peers import Contact, Message, PeerId
from colab_swarm.net.relay import Relay, RelayQuota

IDLE_CIRCUITS = 100
PIECE = os.urandom(CHUNK_BYTES)
"""What averaging sends at a time."""
LOOPBACK = NodeSettings(host="127.0.0.1", max_links=4 * IDLE_CIRCUITS, max_handshakes=4 * IDLE_CIRCUITS)


class HowMuch(Message, frozen=True):
    """Asks a process what it uses."""


class Uses(Message, frozen=True):
    """CPU seconds so far, and resident memory."""

    cpu_s: float
    memory_bytes: int


async def _on_how_much(peer: PeerId, message: HowMuch) -> Uses:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Uses(time.process_time(), pages * 4096)


async def serve(relay: Contact | None) -> None:
    """A child, until stdin closes: the relay, or the one that takes what comes through ``relay``."""
    node = await Node.start(Identity(), LOOPBACK)
    node.serve(HowMuch, _on_how_much)
    if relay is None:
        relaying = Relay(node, RelayQuota(circuits=2 * IDLE_CIRCUITS, circuits_per_peer=2 * IDLE_CIRCUITS))
        addresses: tuple[str, ...] = node.contact.addresses
    else:
        node.serve_stream(Sink, _sink)
        circuits = _circuits(node, relay)
        circuits.start()
        await circuits.wait_looked(10.0)
        addresses = (*node.contact.addresses, *circuits.addresses)
    print(json.dumps({"id": node.id.hex(), "addresses": addresses}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    if relay is None:
        relaying.close()
    await node.close()


def _circuits(node: Node, relay: Contact) -> Circuits:
    async def known() -> list[Contact]:
        return [relay]

    return Circuits(node, known, lambda: None, random.Random(0))


@contextmanager
def _child(*arguments: str) -> Iterator[Contact]:
    command = [sys.executable, "-m", "colab_swarm.bench.relay", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            said = json.loads(child.stdout.readline())
            yield Contact(PeerId(bytes.fromhex(said["id"])), tuple(said["addresses"]))
        finally:
            child.stdin.close()


async def _send(node: Node, peer: PeerId, pieces: int) -> float:
    async with await node.stream(peer, Sink(pieces), timeout_s=10) as stream:
        for _ in range(pieces):
            await stream.send(Sink(0), PIECE)
        used, _ = await stream.receive(ResourceUse)
        return used.cpu_s


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
        "direct": lambda count: _send(direct, far.id, count),
        "relayed": lambda count: _send(relayed, far.id, count),
    }
    took: dict[str, list[TransferTime]] = {name: [] for name in ways}
    relay_cpu_s = []
    for _ in range(rounds + 1):
        for name, send in ways.items():
            before = await direct.call(relay.id, HowMuch(), Uses, timeout_s=10)
            took[name].append(await _timed(send, pieces))
            after = await direct.call(relay.id, HowMuch(), Uses, timeout_s=10)
            if name == "relayed":
                relay_cpu_s.append(after.cpu_s - before.cpu_s)
    pairs = list(zip(took["direct"], took["relayed"], strict=True))[1:]
    gb = size_mib * MIB / 1e9
    report.add(
        "relay.vs_direct", statistics.median(a.wall_s / b.wall_s for a, b in pairs), "", "bulk, same run"
    )
    report.add("relay.mb_s", gb * 1e3 / statistics.median(b.wall_s for _, b in pairs), "MB/s", "relayed")
    report.add(
        "relay.direct_mb_s", gb * 1e3 / statistics.median(a.wall_s for a, _ in pairs), "MB/s", "direct"
    )
    report.add(
        "relay.cpu_s_per_gb", statistics.median(relay_cpu_s[1:]) / gb, "CPU-s/GB", "the relay's process"
    )


async def _idle(asker: Node, relay: Contact, far: Contact, report: BenchReport) -> None:
    """Circuits that carry their keep-alives and nothing else."""
    before = await asker.call(relay.id, HowMuch(), Uses, timeout_s=10)
    callers = [await Node.start(Identity(), NodeSettings(listen=False)) for _ in range(IDLE_CIRCUITS)]
    try:
        for node in callers:
            _circuits(node, relay)
            node.learn(Contact(far.id, tuple(one for one in far.addresses if "/relay/" in one)))
            await node.linker.link_to(far.id, 10.0)
        open_at = await asker.call(relay.id, HowMuch(), Uses, timeout_s=10)
        seconds = 5.0 if report.quick else 30.0
        await asyncio.sleep(seconds)
        later = await asker.call(relay.id, HowMuch(), Uses, timeout_s=10)
        still = sum(bool(node.linker.table.of(far.id)) for node in callers)
    finally:
        await asyncio.gather(*(node.close() for node in callers))
    note = f"{still} idle circuits"
    report.add("relay.idle_mb", (later.memory_bytes - before.memory_bytes) / 1e6, "MB", note)
    report.add("relay.idle_cpu_percent", 100 * (later.cpu_s - open_at.cpu_s) / seconds, "% of a core", note)


def run(*, quick: bool) -> BenchReport:
    """Measure with two child processes."""
    report = BenchReport("relay", quick)
    with _child() as relay, _child(relay.id.hex(), *relay.addresses) as far:
        asyncio.run(_measure(relay, far, report))
    return report


if __name__ == "__main__":
    told = sys.argv[1:]
    asyncio.run(serve(Contact(PeerId(bytes.fromhex(told[0])), tuple(told[1:])) if told else None))
