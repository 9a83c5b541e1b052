"""How reliably and fast the DHT finds records: 10,000 peers on virtual time, real peers on loopback.

*beam-search*: how fast a trainer finds the top 4 of 1,024 experts for a batch of 64. Learning@home
(section 4.1) took 317, 528 and 764 ms among 100, 1,000 and 10,000 peers, 92.5 ms apart: here the
mean delay of a message. Peers in each other's routing tables are linked; others must be dialled.
"""

import asyncio
import bisect
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import numpy as np

from colab_swarm.bench.harness import BenchReport, Channel, Crew, benchmark, call_all, receive_all
from colab_swarm.bench.link import contact, start_node, where
from colab_swarm.dht.records import Fetch, FindNear
from colab_swarm.dht.service import DHT, DHTSettings, Reading, RunServices
from colab_swarm.events import EventLog
from colab_swarm.moe.directory import Directory, DirectorySettings
from colab_swarm.moe.grid import Grid
from colab_swarm.net.peers import Contact, Message, Peers
from colab_swarm.sim import PAPER_CLOUD, NetworkProfile, run_virtual, virtual_time
from colab_swarm.sim.calls import CallNetwork, CallPeer

DEAD_SHARE, PROCESSES, IN_FLIGHT = 0.2, 8, 8
SIZES = {100: "100", 1000: "1k", 10_000: "10k"}


def fill_tables(dhts: Sequence[DHT], contacts: list[Contact], rng: random.Random) -> None:
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


async def read_records(peers: int, records: int, seed: int = 0) -> dict[str, tuple[float, ...]]:
    """Store records, silence a fifth of all peers, then read each elsewhere; per figure a value a read."""
    network, rng = CallNetwork(PAPER_CLOUD, seed=seed), random.Random(seed)
    nodes = [network.peer(str(i)) for i in range(peers)]
    dhts = [DHT(cast(Peers, node), DHTSettings(), random.Random(i)) for i, node in enumerate(nodes)]
    fill_tables(dhts, [node.contact for node in nodes], rng)
    for i in range(records):
        await rng.choice(dhts).store(f"record {i}", i, ttl_s=86_400)
    dead = set(rng.sample(range(peers), int(peers * DEAD_SHARE)))
    network.silent = set(map(str, dead))
    await asyncio.sleep(60)
    alive = [dht for i, dht in enumerate(dhts) if i not in dead]
    lookups = []
    for i in range(records):
        began = virtual_time()
        reading = await rng.choice(alive).read(f"record {i}")
        found = b"" in reading.found and reading.found[b""].value == i
        lookups.append((found, reading.hops or 0, reading.calls, virtual_time() - began))
    return dict(zip(("found", "hops", "calls", "seconds"), zip(*lookups, strict=True), strict=True))


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


async def take_part(parent: Channel) -> None:
    node = await start_node()
    dht, name, found = DHT(node, DHTSettings(), random.Random()), node.id.hex(), where(node)
    while True:
        match await parent.wait_call(**found):
            case {"bootstrap": entry}:
                await dht.bootstrap([contact(entry)])
                found = {}
            case {"one_at_a_time": operations}:
                store_ms = await _median_ms(operations, lambda i: dht.store(f"{name} {i}", i, ttl_s=600))
                get_ms = await _median_ms(operations, lambda i: dht.get(f"{name} {i}"))
                found = {"store_ms": store_ms, "get_ms": get_ms}
            case {"at_once": operations}:
                found = {"good": await _store_and_get(dht, name, operations)}


def _processes(report: BenchReport, operations: int) -> None:
    with Crew() as crew:
        for _ in range(PROCESSES):
            crew.start(take_part)
        entry, *_ = receive_all(crew)
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


@benchmark("dht")
def run(report: BenchReport) -> None:
    for peers, name in SIZES.items():
        lookups = run_virtual(read_records(peers, 50 if report.quick else 400))
        report.add_rows(
            (f"found_{name}", statistics.mean(lookups["found"]), "", "a fifth is silent"),
            (f"hops_{name}", statistics.median(lookups["hops"]), "hops", "median"),
            (f"calls_{name}", statistics.mean(lookups["calls"]), "calls", "mean per read"),
            (f"latency_ms_{name}", 1e3 * statistics.median(lookups["seconds"]), "ms", "virtual, median"),
        )
    _processes(report, 160 if report.quick else 800)
    asyncio.run(_loopback(report, 32, 50 if report.quick else 200))


GRID = Grid("ffn", (32, 32))
HOSTS = 256
BATCH, BEST = 64, 4
PUBLISHED_MS = {100: 317, 1000: 528, 10_000: 764}
EXPONENTIAL = NetworkProfile("exponential", 0.0925, jitter_s=0.0924, hosts=PAPER_CLOUD.hosts)


class WatchedDHT(DHT):
    readings: list[Reading]

    async def fetch(self, key: str | bytes) -> Reading:
        self.readings.append(await super().fetch(key))
        return self.readings[-1]


def _directory(peer: CallPeer, dht: DHT) -> Directory:
    services = RunServices(cast(Peers, peer), dht, EventLog(), random.Random(peer.name), "bench")
    return Directory(services, DirectorySettings(ttl_s=3600.0))


def is_query(message: Message) -> bool:
    return isinstance(message, Fetch) or (isinstance(message, FindNear) and message.records)


async def _search(network: CallNetwork, peer: CallPeer, dht: WatchedDHT, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    scores = [rng.standard_normal((BATCH, side), dtype=np.float32) for side in GRID.sides]
    directory, dht.readings = _directory(peer, dht), []
    queries: list[bool] = []
    network.on_message = lambda message: queries.append(is_query(message))
    received = peer.received_bytes
    began, cpu_began = virtual_time(), time.process_time()
    cold = await directory.best(GRID, scores, BEST)
    cold_ms, found_at = (virtual_time() - began) * 1e3, time.process_time()
    warm = await directory.best(GRID, scores, BEST)
    warm_s = time.process_time() - found_at
    assert cold == warm and all(len(sample) == BEST for sample in cold)
    await directory.close()
    return {
        "cold_ms": cold_ms,
        "compute_ms": (found_at - cpu_began) * 1e3,
        "warm_ms": warm_s * 1e3,
        "look_ups": len(dht.readings),
        "hops": statistics.mean(reading.hops or 0 for reading in dht.readings),
        "queries": sum(queries),
        "received_kb": (peer.received_bytes - received) / 1e3,
    }


async def find_experts(
    size: int, searches: int, profile: NetworkProfile, *, standing: bool
) -> dict[str, list[float]]:
    """Let peers search in turn, for the first time; cold ms are virtual, warm ones the processor's."""
    network, rng = CallNetwork(profile), random.Random(0)
    peers = [network.peer(str(i)) for i in range(size)]
    dhts = [WatchedDHT(cast(Peers, peer), DHTSettings(), random.Random(i)) for i, peer in enumerate(peers)]
    for dht in dhts:
        dht.readings = []
    fill_tables(dhts, [peer.contact for peer in peers], rng)
    if standing:
        known = {
            peer.name: {contact.id for contact in dht.table} for peer, dht in zip(peers, dhts, strict=True)
        }
        network.linked = lambda one, other: other.id in known[one.name] or one.id in known[other.name]
    uids, hosts = [GRID.uid(index) for index in GRID], min(HOSTS, size // 2)
    share = -(-len(uids) // hosts)
    for_host = [dict.fromkeys(uids[i * share : (i + 1) * share], ((1024,), 0)) for i in range(hosts)]
    announced = zip(peers, dhts, for_host, strict=False)
    await asyncio.gather(*(_directory(peer, dht).announce(GRID, part) for peer, dht, part in announced))
    chosen = rng.sample(range(size // 2, size), searches)
    found = [await _search(network, peers[i], dhts[i], seed) for seed, i in enumerate(chosen)]
    return {key: [one[key] for one in found] for key in found[0]}


@benchmark("beam-search", "beam")
def run_beam_search(report: BenchReport) -> None:
    searches = 8 if report.quick else 40
    for size, name in SIZES.items():
        found = run_virtual(find_experts(size, searches, PAPER_CLOUD, standing=True))
        note = f"virtual, median; published {PUBLISHED_MS[size]}"
        report.add(f"cold_ms_{name}", statistics.median(found["cold_ms"]), "ms", note)
        report.add(f"cold_ms_{name}_worst", max(found["cold_ms"]), "ms", "virtual")
        means = {key: statistics.mean(found[key]) for key in ("look_ups", "hops", "queries", "received_kb")}
        report.add_all({f"{key}_{name}": mean for key, mean in means.items()}, "", "mean per search")
    report.add("cold_compute_ms", statistics.median(found["compute_ms"]), "ms", "of the whole simulation")
    report.add("warm_ms", statistics.median(found["warm_ms"]), "ms", "processor time, median")
    for name, profile, standing in (("exponential", EXPONENTIAL, True), ("no_links", PAPER_CLOUD, False)):
        found = run_virtual(find_experts(100, searches, profile, standing=standing))
        report.add(f"cold_ms_100_{name}", statistics.median(found["cold_ms"]), "ms", "virtual, median")
