"""How reliably and how fast the DHT finds records: 10,000 peers on virtual time, and real peers on loopback."""

from __future__ import annotations

import asyncio
import bisect
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any, NamedTuple

import msgspec

from colab_swarm.bench.report import BenchReport
from colab_swarm.bench.workers import Parent, Worker
from colab_swarm.dht.service import DHT, DHTSettings
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node, NodeSettings
from colab_swarm.net.peers import Contact
from colab_swarm.sim import PAPER_CLOUD, SimNetwork, run_virtual, virtual_time

DEAD_SHARE = 0.2
PROCESSES = 8
IN_FLIGHT = 8
"""Concurrent operations of each process in the measurement of operations per second."""


class DhtLookup(NamedTuple):
    """One read of a fresh record."""

    found: bool
    hops: int
    calls: int
    seconds: float


def fill_tables(dhts: list[DHT], contacts: list[Contact], rng: random.Random) -> None:
    """Fill every routing table as in a swarm that has run for long: random contacts in each bucket."""
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
                break  # no other id shares more bits


async def search_virtual(peers: int, records: int, seed: int = 0) -> list[DhtLookup]:
    """Store records, silence a fifth of all peers, then read each record at another peer."""
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
    lookups = []
    for i in range(records):
        began = virtual_time()
        reading = await rng.choice(alive).read(f"record {i}")
        value = reading.found.get(b"")
        found = value is not None and value.value == i
        lookups.append(DhtLookup(found, reading.hops or 0, reading.calls, virtual_time() - began))
    return lookups


def bench_virtual(report: BenchReport, peers: int, records: int) -> None:
    """Measure the share found, hops and latency with ``peers`` peers."""
    began = time.perf_counter()
    lookups = run_virtual(search_virtual(peers, records))
    name = f"{peers // 1000}k" if peers >= 1000 else str(peers)
    note = f"{records} reads, {DEAD_SHARE:.0%} silent, {time.perf_counter() - began:.0f} s real"
    report.add(f"dht.found_{name}", statistics.mean(one.found for one in lookups), "", note)
    report.add(f"dht.hops_{name}", statistics.median(one.hops for one in lookups), "hops", "median")
    report.add(f"dht.calls_{name}", statistics.mean(one.calls for one in lookups), "calls", "mean per read")
    latency_ms = statistics.median(one.seconds for one in lookups) * 1e3
    report.add(f"dht.latency_ms_{name}", latency_ms, "ms", "virtual, median")


async def start_node(stack: AsyncExitStack) -> tuple[Node, DHT]:
    """Start a real peer on loopback; ``stack`` closes it."""
    node = await Node.start(Identity(), NodeSettings(host="127.0.0.1"))
    stack.push_async_callback(node.close)
    return node, DHT(node, DHTSettings(), random.Random())


async def median_ms(operations: int, operation: Callable[[int], Awaitable[Any]]) -> float:
    """Return the median time of an operation, one at a time."""
    times = []
    for i in range(operations):
        began = time.perf_counter()
        await operation(i)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


async def store_and_get(dht: DHT, name: str, operations: int) -> int:
    """Alternate stores and gets of fresh keys, `IN_FLIGHT` at a time; return how many succeeded."""

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
    """Worker: a peer that measures at each message."""
    async with AsyncExitStack() as stack:
        node, dht = await start_node(stack)
        name = node.id.hex()
        parent.send(contact=msgspec.to_builtins(node.contact))
        while True:
            match await parent.wait():
                case {"bootstrap": contact}:
                    await dht.bootstrap([msgspec.convert(contact, Contact)])
                    parent.send()
                case {"one at a time": operations}:
                    store_ms = await median_ms(operations, lambda i: dht.store(f"{name} {i}", i, ttl_s=600))
                    get_ms = await median_ms(operations, lambda i: dht.get(f"{name} {i}"))
                    parent.send(store_ms=store_ms, get_ms=get_ms)
                case {"at once": operations}:
                    parent.send(good=await store_and_get(dht, name, operations))


def bench_processes(report: BenchReport, operations: int) -> None:
    """Measure stores and gets among `PROCESSES` processes on loopback: one at a time, then all at once."""
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(take_part)) for _ in range(PROCESSES)]
        entry, *_ = [worker.receive()["contact"] for worker in workers]
        for worker in workers[1:] * 2:  # twice, so that the first ones meet the last ones
            worker.call(bootstrap=entry)
        found = workers[1].call(**{"one at a time": operations})
        began = time.perf_counter()
        for worker in workers:
            worker.send(**{"at once": operations})
        good = sum(worker.receive()["good"] for worker in workers)
        seconds = time.perf_counter() - began
    report.add("dht.store_ms", found["store_ms"], "ms", f"{PROCESSES} processes, median, one at a time")
    report.add("dht.get_ms", found["get_ms"], "ms", "same")
    report.add("dht.ops_per_s", good / seconds, "/s", f"{PROCESSES} processes, {IN_FLIGHT} in flight in each")
    report.add("dht.ops_success", good / (operations * PROCESSES), "", "stored, and read back")


async def bench_loopback(report: BenchReport, peers: int, operations: int) -> None:
    """Measure stores and gets with many peers in this process."""
    async with AsyncExitStack() as stack:
        swarm = [await start_node(stack) for _ in range(peers)]
        for _, dht in swarm[1:]:
            await dht.bootstrap([swarm[0][0].contact])
        rng = random.Random(0)
        store_ms = await median_ms(operations, lambda i: rng.choice(swarm)[1].store(str(i), i, ttl_s=600))
        found = [await rng.choice(swarm)[1].get(str(i)) for i in range(operations)]
        get_ms = await median_ms(operations, lambda i: rng.choice(swarm)[1].get(str(i)))
    hits = statistics.mean(b"" in values and values[b""].value == i for i, values in enumerate(found))
    report.add(f"dht.found_loopback_{peers}", hits, "", f"{peers} real peers in one process")
    report.add(f"dht.store_ms_{peers}", store_ms, "ms", "median")
    report.add(f"dht.get_ms_{peers}", get_ms, "ms", "median")


def run(quick: bool) -> BenchReport:
    """Measure all figures; ``quick`` takes fewer operations."""
    report = BenchReport("dht", quick)
    for peers in (100, 1000, 10_000):
        bench_virtual(report, peers, 50 if quick else 400)
    bench_processes(report, 160 if quick else 800)
    asyncio.run(bench_loopback(report, 32, 50 if quick else 200))
    return report
