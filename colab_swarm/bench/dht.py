"""How well the DHT finds, and how fast: 10,000 peers on virtual time, and real ones on loopback."""

from __future__ import annotations

import asyncio
import bisect
import random
import statistics
import time
from dataclasses import dataclass

from colab_swarm.bench.report import Report
from colab_swarm.dht.service import DHT, DHTSettings
from colab_swarm.net.peers import Contact
from colab_swarm.sim import PAPER_CLOUD, SimNetwork, run_virtual, virtual_time

DEAD_SHARE = 0.2


@dataclass(frozen=True)
class Searches:
    """What reading fresh records took, one entry per record."""

    found: list[bool]
    hops: list[int]
    calls: list[int]
    seconds: list[float]


def fill_tables(dhts: list[DHT], contacts: list[Contact], rng: random.Random) -> None:
    """Give every peer the routing table it has in a swarm that has run for long: random contacts in each bucket."""
    order = sorted(range(len(contacts)), key=lambda i: contacts[i].id)
    ids = [int.from_bytes(contacts[i].id, "big") for i in order]
    for dht, contact in zip(dhts, contacts, strict=True):
        me = int.from_bytes(contact.id, "big")
        for bit in range(255, -1, -1):
            low = ((me >> bit) ^ 1) << bit
            begin, end = bisect.bisect_left(ids, low), bisect.bisect_left(ids, low + (1 << bit))
            size = dht.settings.bucket_size
            chosen = range(begin, end) if end - begin <= size else rng.sample(range(begin, end), size)
            for i in chosen:
                dht.table.saw(contacts[order[i]], 0.0)
            if bisect.bisect_left(ids, me >> bit << bit) + 1 >= bisect.bisect_left(
                ids, (me >> bit) + 1 << bit
            ):
                break  # nobody else shares more bits


async def search_virtual(peers: int, records: int, seed: int = 0) -> Searches:
    """Store records, let a fifth of all peers fall silent, read each record from somewhere else."""
    network, rng = SimNetwork(PAPER_CLOUD, seed=seed), random.Random(seed)
    nodes = [network.peer(str(i)) for i in range(peers)]
    dhts = [DHT(node, DHTSettings(), random.Random(i)) for i, node in enumerate(nodes)]
    fill_tables(dhts, [node.contact for node in nodes], rng)
    for i in range(records):
        await rng.choice(dhts).store(f"record {i}", i, ttl_s=86_400)
    dead = set(rng.sample([node.name for node in nodes], int(peers * DEAD_SHARE)))
    network.now().partition(dead, {node.name for node in nodes} - dead)
    await asyncio.sleep(60)
    alive = [dht for dht, node in zip(dhts, nodes, strict=True) if node.name not in dead]
    searches = Searches([], [], [], [])
    for i in range(records):
        began = virtual_time()
        reading = await rng.choice(alive).read(f"record {i}")
        value = reading.found.get(b"")
        searches.found.append(value is not None and value.value == i)
        searches.hops.append(reading.hops or 0)
        searches.calls.append(reading.calls)
        searches.seconds.append(virtual_time() - began)
    return searches


def bench_virtual(report: Report, peers: int, records: int) -> None:
    """Found share, hops and latency with ``peers`` peers."""
    began = time.perf_counter()
    searches = run_virtual(search_virtual(peers, records))
    name = f"{peers // 1000}k" if peers >= 1000 else str(peers)
    note = f"{records} reads, {DEAD_SHARE:.0%} silent, {time.perf_counter() - began:.0f} s real"
    report.add(f"dht.found_{name}", statistics.mean(searches.found), "", note)
    report.add(f"dht.hops_{name}", statistics.median(searches.hops), "hops", "median")
    report.add(f"dht.calls_{name}", statistics.mean(searches.calls), "calls", "mean per read")
    report.add(f"dht.latency_ms_{name}", statistics.median(searches.seconds) * 1e3, "ms", "virtual, median")
