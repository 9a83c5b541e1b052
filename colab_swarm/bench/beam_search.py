"""How fast a trainer finds its experts: the top 4 of 1,024 for a batch of 64, among up to 10,000 peers on virtual time.

Learning@home (section 4.1) took 317, 528 and 764 ms among 100, 1,000 and 10,000 peers, in three cloud regions that were
92.5 ms apart. Here that is the mean delay of each single message, not of a round trip. As in a swarm that has run for a
while, links between peers that are in each other's routing tables stand; all other links must be dialled.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field

import numpy as np

from colab_swarm.bench.dht import fill_tables
from colab_swarm.bench.report import BenchReport
from colab_swarm.dht.records import Fetch, FindValue
from colab_swarm.dht.service import DHT, DHTSettings, Reading
from colab_swarm.events import EventLog
from colab_swarm.moe.calls import ExpertServices
from colab_swarm.moe.directory import Directory, DirectorySettings
from colab_swarm.moe.grid import Grid
from colab_swarm.net.peers import Message
from colab_swarm.sim import PAPER_CLOUD, NetworkProfile, SimNetwork, SimPeers, run_virtual, virtual_time
from colab_swarm.tensors.codecs import Floats

GRID = Grid("ffn", (32, 32))
HOSTS = 256
BATCH, BEST = 64, 4
SIZES = (100, 1000, 10_000)
PUBLISHED_MS = {100: 317, 1000: 528, 10_000: 764}
EXPONENTIAL = NetworkProfile("exponential", 0.0925, jitter_s=0.0924, hosts=PAPER_CLOUD.hosts)
"""Each message is delayed on its own, exponentially, as the blocks of the paper's Figure 4."""


class CountingNetwork(SimNetwork):
    """Counts the queries of look-ups, whoever sends them."""

    queries = 0

    def on_message(self, message: Message, sender: str, receiver: str) -> None:
        """Count, then go on as ever."""
        self.queries += isinstance(message, Fetch | FindValue)
        super().on_message(message, sender, receiver)


class WatchedDHT(DHT):
    """Notes what each look-up took."""

    readings: list[Reading]

    async def fetch(self, key: str | bytes) -> Reading:
        """Note it."""
        reading = await super().fetch(key)
        self.readings.append(reading)
        return reading


@dataclass
class BeamSearches:
    """One entry per search, times in milliseconds: cold ones on virtual time, warm ones on the processor's."""

    cold_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)
    compute_ms: list[float] = field(default_factory=list)
    look_ups: list[int] = field(default_factory=list)
    hops: list[float] = field(default_factory=list)
    queries: list[int] = field(default_factory=list)
    received_kb: list[float] = field(default_factory=list)


def directory_of(peer: SimPeers, dht: DHT) -> Directory:
    """The directory of one peer; its announcements hold for as long as the benchmark takes."""
    services = ExpertServices(peer, dht, EventLog(), random.Random(peer.name), "bench")
    return Directory(services, DirectorySettings(ttl_s=3600.0))


async def announce(peers: list[SimPeers], dhts: list[WatchedDHT]) -> None:
    """Let the first `HOSTS` peers host all places of the grid between them."""
    uids = [GRID.uid(index) for index in GRID]
    hosts = min(HOSTS, len(peers) // 2)
    share = -(-len(uids) // hosts)
    parts = [uids[i * share : (i + 1) * share] for i in range(hosts)]
    await asyncio.gather(
        *(
            directory_of(peer, dht).announce(GRID, {uid: ((1024,), 0) for uid in part})
            for peer, dht, part in zip(peers, dhts, parts, strict=False)
        )
    )


def some_scores(seed: int) -> list[Floats]:
    """What a gating function might say."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((BATCH, side), dtype=np.float32) for side in GRID.sides]


async def search(network: CountingNetwork, peer: SimPeers, dht: WatchedDHT, into: BeamSearches) -> None:
    """Search once with an empty cache, then again with a full one."""
    directory, scores = directory_of(peer, dht), some_scores(len(into.cold_ms))
    dht.readings = []
    queries, received = network.queries, peer.statistics().received_bytes
    began, cpu_began = virtual_time(), time.process_time()
    cold = await directory.best(GRID, scores, BEST)
    into.cold_ms.append((virtual_time() - began) * 1e3)
    into.compute_ms.append((time.process_time() - cpu_began) * 1e3)
    into.look_ups.append(len(dht.readings))
    into.hops.append(statistics.mean(reading.hops or 0 for reading in dht.readings))
    into.queries.append(network.queries - queries)
    into.received_kb.append((peer.statistics().received_bytes - received) / 1e3)
    cpu_began = time.process_time()
    warm = await directory.best(GRID, scores, BEST)
    into.warm_ms.append((time.process_time() - cpu_began) * 1e3)
    assert cold == warm and all(len(sample) == BEST for sample in cold)
    await directory.close()


async def search_virtual(
    size: int, searches: int, profile: NetworkProfile, *, standing: bool
) -> BeamSearches:
    """Peers without experts search, one after the other, each for the first time."""
    network, rng = CountingNetwork(profile), random.Random(0)
    peers = [network.peer(str(i)) for i in range(size)]
    dhts = [WatchedDHT(peer, DHTSettings(), random.Random(i)) for i, peer in enumerate(peers)]
    for dht in dhts:
        dht.readings = []
    fill_tables(list(dhts), [peer.contact for peer in peers], rng)
    known = {peer.name: {contact.id for contact in dht.table} for peer, dht in zip(peers, dhts, strict=True)}
    if standing:
        network.standing = lambda one, other: other.id in known[one.name] or one.id in known[other.name]
    await announce(peers, dhts)
    found = BeamSearches()
    for i in rng.sample(range(size // 2, size), searches):
        await search(network, peers[i], dhts[i], found)
    return found


def bench_size(report: BenchReport, size: int, searches: int) -> None:
    """All figures for a swarm of ``size`` peers."""
    began = time.perf_counter()
    found = run_virtual(search_virtual(size, searches, PAPER_CLOUD, standing=True))
    name = f"{size // 1000}k" if size >= 1000 else str(size)
    took = f"{searches} searches, {time.perf_counter() - began:.0f} s real"
    published = f"virtual, median; published {PUBLISHED_MS[size]}; {took}"
    report.add(f"beam.cold_ms_{name}", statistics.median(found.cold_ms), "ms", published)
    report.add(f"beam.cold_ms_{name}_worst", max(found.cold_ms), "ms", "virtual")
    report.add(f"beam.look_ups_{name}", statistics.mean(found.look_ups), "keys", "mean per search")
    report.add(f"beam.hops_{name}", statistics.mean(found.hops), "hops", "mean per look-up")
    report.add(f"beam.queries_{name}", statistics.mean(found.queries), "", "by all peers, mean per search")
    report.add(f"beam.received_kb_{name}", statistics.mean(found.received_kb), "kB", "mean per search")
    if size == SIZES[-1]:
        report.add(
            "beam.cold_compute_ms", statistics.median(found.compute_ms), "ms", "of the whole simulation"
        )
        report.add("beam.warm_ms", statistics.median(found.warm_ms), "ms", "processor time, median")


def run(quick: bool) -> BenchReport:
    """All figures; ``quick`` searches less often."""
    report = BenchReport("beam-search", quick)
    for size in SIZES:
        bench_size(report, size, 8 if quick else 40)
    others = {"exponential": (EXPONENTIAL, True), "no_links": (PAPER_CLOUD, False)}
    for name, (profile, standing) in others.items():
        found = run_virtual(search_virtual(SIZES[0], 8 if quick else 40, profile, standing=standing))
        note = "exponential delays" if standing else "as a newcomer: nobody has a link"
        report.add(
            f"beam.cold_ms_100_{name}", statistics.median(found.cold_ms), "ms", f"virtual, median; {note}"
        )
    return report
