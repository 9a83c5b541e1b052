"""How reliably and fast the DHT finds records: 10,000 peers on virtual time, real peers on loopback."""

from __future__ import annotations

import asyncio
import bisect
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from colab_swarm.bench.harness import BenchReport, Crew, Parent, call_all
from colab_swarm.bench.link import contact, start_node, where
from colab_swarm.dht.service import DHT, DHTSettings
from colab_swarm.net.peers import Contact
from colab_swarm.sim import PAPER_CLOUD, SimNetwork, run_virtual, virtual_time

DEAD_SHARE = 0.2
PROCESSES = 8
IN_FLIGHT = 8


class DhtLookup(NamedTuple):
    """One read of a fresh record."""

    found: bool
    hops: int
    calls: int
    seconds: float


def fill_tables(dhts: list[DHT], contacts: list[Contact], rng: random.Random) -> None:
    """Fill every routing table as in a swarm that has run for long: random contacts in each bucket."""
    by_id = sorted(contacts, key=lambda contact: contact.id)
    ids = [int.from_bytes(contact.id, "big") for contact in by_id]
    for dht, own in zip(dhts, contacts, strict=True):
        me, size = int.from_bytes(own.id, "big"), dht.settings.bucket_size
        for bit in range(255, -1, -1):
            others, sharing = (
                range(bisect.bisect_left(ids, at), bisect.bisect_left(ids, at + (1 << bit)))
                for at in (((me >> bit) ^ 1) << bit, me >> bit << bit)
            )
            for i in others if len(others) <= size else rng.sample(others, size):
                dht.table.saw(by_id[i], 0.0)
            if len(sharing) <= 1:
                break  # no other id shares more bits


async def read_records(peers: int, records: int, seed: int = 0) -> list[DhtLookup]:
    """Store records, silence a fifth of all peers, then read each record at another peer."""
    network, rng = SimNetwork(PAPER_CLOUD, seed=seed), random.Random(seed)
    nodes = [network.peer(str(i)) for i in range(peers)]
    dhts = [DHT(node, DHTSettings(), random.Random(i)) for i, node in enumerate(nodes)]
    fill_tables(dhts, [node.contact for node in nodes], rng)
    for i in range(records):
        await rng.choice(dhts).store(f"record {i}", i, ttl_s=86_400)
    dead = set(rng.sample(range(peers), int(peers * DEAD_SHARE)))
    network.now().partition(set(map(str, dead)), {str(i) for i in range(peers) if i not in dead})
    await asyncio.sleep(60)
    alive = [dht for i, dht in enumerate(dhts) if i not in dead]
    lookups = []
    for i in range(records):
        began = virtual_time()
        reading = await rng.choice(alive).read(f"record {i}")
        found = b"" in reading.found and reading.found[b""].value == i
        lookups.append(DhtLookup(found, reading.hops or 0, reading.calls, virtual_time() - began))
    return lookups


def size_name(peers: int) -> str:
    return f"{peers // 1000}k" if peers >= 1000 else str(peers)


async def _median_ms(operations: int, operation: Callable[[int], Awaitable[Any]]) -> float:
    times = []
    for i in range(operations):
        began = time.perf_counter()
        await operation(i)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


async def _store_and_get(dht: DHT, name: str, operations: int) -> int:
    async def chain(which: int) -> int:
        good = 0
        for i in range(operations // IN_FLIGHT // 2):
            key = f"{name} {which} {i}"
            stored = await dht.store(key, i, ttl_s=600)
            found = (await dht.get(key)).get(b"")
            good += (stored > 0) + (found is not None and found.value == i)
        return good

    return sum(await asyncio.gather(*map(chain, range(IN_FLIGHT))))


async def take_part(parent: Parent) -> None:
    node = await start_node()
    dht, name = DHT(node, DHTSettings(), random.Random()), node.id.hex()
    parent.send(**where(node))
    while True:
        match await parent.wait():
            case {"bootstrap": found}:
                await dht.bootstrap([contact(found)])
                parent.send()
            case {"one_at_a_time": operations}:
                store_ms = await _median_ms(operations, lambda i: dht.store(f"{name} {i}", i, ttl_s=600))
                get_ms = await _median_ms(operations, lambda i: dht.get(f"{name} {i}"))
                parent.send(store_ms=store_ms, get_ms=get_ms)
            case {"at_once": operations}:
                parent.send(good=await _store_and_get(dht, name, operations))


def _processes(report: BenchReport, operations: int) -> None:
    with Crew() as crew:
        for _ in range(PROCESSES):
            crew.start(take_part)
        entry, *_ = [worker.receive() for worker in crew]
        for worker in crew[1:] * 2:  # twice, so that the first ones meet the last ones
            worker.call(bootstrap=entry)
        report.add_all(crew[1].call(one_at_a_time=operations), "ms", f"{PROCESSES} processes, one at a time")
        began = time.perf_counter()
        good = sum(answer["good"] for answer in call_all(crew, at_once=operations))
        seconds = time.perf_counter() - began
    report.add("ops_per_s", good / seconds, "/s", f"{PROCESSES} processes, {IN_FLIGHT} in flight in each")
    report.add("ops_success", good / (operations * PROCESSES), "", "stored, and read back")


async def _loopback(report: BenchReport, peers: int, operations: int) -> None:
    nodes, rng = [await start_node() for _ in range(peers)], random.Random(0)
    dhts = [DHT(node, DHTSettings(), random.Random()) for node in nodes]
    for dht in dhts[1:]:
        await dht.bootstrap([nodes[0].contact])
    store_ms = await _median_ms(operations, lambda i: rng.choice(dhts).store(str(i), i, ttl_s=600))
    found = [await rng.choice(dhts).get(str(i)) for i in range(operations)]
    get_ms = await _median_ms(operations, lambda i: rng.choice(dhts).get(str(i)))
    await asyncio.gather(*(node.close() for node in nodes))
    hits = statistics.mean(b"" in values and values[b""].value == i for i, values in enumerate(found))
    report.add(f"found_loopback_{peers}", hits, "", f"{peers} real peers in one process")
    report.add_all({f"store_ms_{peers}": store_ms, f"get_ms_{peers}": get_ms}, "ms", "median")


def run(quick: bool) -> BenchReport:
    """Measure reads and stores of records; ``quick`` takes fewer operations."""
    report = BenchReport("dht", quick)
    for peers in (100, 1000, 10_000):
        lookups, name = run_virtual(read_records(peers, 50 if quick else 400)), size_name(peers)
        report.add(f"found_{name}", statistics.mean(one.found for one in lookups), "", "a fifth is silent")
        report.add(f"hops_{name}", statistics.median(one.hops for one in lookups), "hops", "median")
        report.add(f"calls_{name}", statistics.mean(one.calls for one in lookups), "calls", "mean per read")
        latency_ms = 1e3 * statistics.median(one.seconds for one in lookups)
        report.add(f"latency_ms_{name}", latency_ms, "ms", "virtual, median")
    _processes(report, 160 if quick else 800)
    asyncio.run(_loopback(report, 32, 50 if quick else 200))
    return report
