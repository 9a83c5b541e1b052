"""How fast a trainer finds the top 4 of 1,024 experts for a batch of 64, among up to 10,000 peers on virtual time.

Learning@home (section 4.1) took 317, 528 and 764 ms among 100, 1,000 and 10,000 peers, in three cloud regions that were
92.5 ms apart. Here that is the mean delay of each single message, not of a round trip. As in a swarm that has run for a
while, peers that are in each other's routing tables are already linked; all other links must be dialled.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time

import numpy as np

from colab_swarm.bench.dht import fill_tables, size_name
from colab_swarm.bench.harness import BenchReport
from colab_swarm.dht.records import Fetch, FindNear
from colab_swarm.dht.service import DHT, DHTSettings, Reading
from colab_swarm.events import EventLog
from colab_swarm.moe.directory import Directory, DirectorySettings
from colab_swarm.moe.grid import ExpertServices, Grid
from colab_swarm.net.peers import Message
from colab_swarm.sim import PAPER_CLOUD, NetworkProfile, SimNetwork, SimPeers, run_virtual, virtual_time

GRID = Grid("ffn", (32, 32))
HOSTS = 256
BATCH, BEST = 64, 4
PUBLISHED_MS = {100: 317, 1000: 528, 10_000: 764}
EXPONENTIAL = NetworkProfile("exponential", 0.0925, jitter_s=0.0924, hosts=PAPER_CLOUD.hosts)


class CountingNetwork(SimNetwork):
    """Counts the look-up queries of all peers."""

    queries = 0

    def on_message(self, message: Message, sender: str, receiver: str) -> None:
        self.queries += isinstance(message, Fetch) or (isinstance(message, FindNear) and message.records)
        super().on_message(message, sender, receiver)


class WatchedDHT(DHT):
    """Records every look-up in ``readings``."""

    readings: list[Reading]

    async def fetch(self, key: str | bytes) -> Reading:
        self.readings.append(await super().fetch(key))
        return self.readings[-1]


def _directory(peer: SimPeers, dht: DHT) -> Directory:
    """Return the directory of one peer; its announcements do not expire during the benchmark."""
    services = ExpertServices(peer, dht, EventLog(), random.Random(peer.name), "bench")
    return Directory(services, DirectorySettings(ttl_s=3600.0))


async def _announce(peers: list[SimPeers], dhts: list[WatchedDHT]) -> None:
    uids = [GRID.uid(index) for index in GRID]
    hosts = min(HOSTS, len(peers) // 2)
    share = -(-len(uids) // hosts)
    parts = [uids[i * share : (i + 1) * share] for i in range(hosts)]
    await asyncio.gather(
        *(
            _directory(peer, dht).announce(GRID, {uid: ((1024,), 0) for uid in part})
            for peer, dht, part in zip(peers, dhts, parts, strict=False)
        )
    )


async def _search(network: CountingNetwork, peer: SimPeers, dht: WatchedDHT, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    scores = [rng.standard_normal((BATCH, side), dtype=np.float32) for side in GRID.sides]
    directory, dht.readings = _directory(peer, dht), []
    queries, received = network.queries, peer.statistics().received_bytes
    began, cpu_began = virtual_time(), time.process_time()
    cold = await directory.best(GRID, scores, BEST)
    cold_ms, found_at = (virtual_time() - began) * 1e3, time.process_time()
    warm = await directory.best(GRID, scores, BEST)
    assert cold == warm and all(len(sample) == BEST for sample in cold)
    await directory.close()
    return {
        "cold_ms": cold_ms,
        "compute_ms": (found_at - cpu_began) * 1e3,
        "warm_ms": (time.process_time() - found_at) * 1e3,
        "look_ups": len(dht.readings),
        "hops": statistics.mean(reading.hops or 0 for reading in dht.readings),
        "queries": network.queries - queries,
        "received_kb": (peer.statistics().received_bytes - received) / 1e3,
    }


def _link(network: SimNetwork, peers: list[SimPeers], dhts: list[WatchedDHT]) -> None:
    known = {peer.name: {contact.id for contact in dht.table} for peer, dht in zip(peers, dhts, strict=True)}
    network.standing = lambda one, other: other.id in known[one.name] or one.id in known[other.name]


async def find_experts(
    size: int, searches: int, profile: NetworkProfile, *, standing: bool
) -> dict[str, list[float]]:
    """Let peers without experts search, one after the other, each for the first time.

    Returns:
        Per figure one entry per search; cold times are virtual milliseconds, warm ones those of the processor.
    """
    network, rng = CountingNetwork(profile), random.Random(0)
    peers = [network.peer(str(i)) for i in range(size)]
    dhts = [WatchedDHT(peer, DHTSettings(), random.Random(i)) for i, peer in enumerate(peers)]
    for dht in dhts:
        dht.readings = []
    fill_tables(list(dhts), [peer.contact for peer in peers], rng)
    if standing:
        _link(network, peers, dhts)
    await _announce(peers, dhts)
    chosen = rng.sample(range(size // 2, size), searches)
    found = [await _search(network, peers[i], dhts[i], seed) for seed, i in enumerate(chosen)]
    return {key: [one[key] for one in found] for key in found[0]}


def run(quick: bool) -> BenchReport:
    """Measure how fast experts are found; ``quick`` searches less often."""
    report, searches = BenchReport("beam-search", quick, "beam"), 8 if quick else 40
    for size, published in PUBLISHED_MS.items():
        found, name = run_virtual(find_experts(size, searches, PAPER_CLOUD, standing=True)), size_name(size)
        cold_ms = statistics.median(found["cold_ms"])
        report.add(f"cold_ms_{name}", cold_ms, "ms", f"virtual, median; published {published}")
        report.add(f"cold_ms_{name}_worst", max(found["cold_ms"]), "ms", "virtual")
        means = {key: statistics.mean(found[key]) for key in ("look_ups", "hops", "queries", "received_kb")}
        report.add_all({f"{key}_{name}": mean for key, mean in means.items()}, "", "mean per search")
    report.add("cold_compute_ms", statistics.median(found["compute_ms"]), "ms", "of the whole simulation")
    report.add("warm_ms", statistics.median(found["warm_ms"]), "ms", "processor time, median")
    for name, profile, standing in (("exponential", EXPONENTIAL, True), ("no_links", PAPER_CLOUD, False)):
        found = run_virtual(find_experts(100, searches, profile, standing=standing))
        note = f"virtual, median; {'exponential delays' if standing else 'as a late joiner without links'}"
        report.add(f"cold_ms_100_{name}", statistics.median(found["cold_ms"]), "ms", note)
    return report
