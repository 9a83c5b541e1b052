"""How reliably and fast the DHT finds records: 10,000 peers on virtual time, processes on loopback.

*beam-search*: how fast a trainer finds the top 4 of 1,024 experts for a batch of 64. Learning@home
(section 4.1) took 317, 528 and 764 ms among 100, 1,000 and 10,000 peers, 92.5 ms apart: here the
mean delay of a message. Peers in each other's routing tables are linked; others must be dialled.
"""

import asyncio
import bisect
import hashlib
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from colab_swarm.dht.routing import BUCKET_SIZE
from colab_swarm.dht.service import DHT, RunServices
from colab_swarm.errors import CallRefused, PeerTimeout
from colab_swarm.events import EventLog
from colab_swarm.experiments.report import Report, reports
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.grid import Grid
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact, M, Message, PeerId, R, Refusal, Role
from colab_swarm.runtime import loop_now
from colab_swarm.sim import PAPER_CLOUD, run_virtual
from colab_swarm.sim.network import DIAL_ROUND_TRIPS, EPOCH
from tests.benchmarks.harness import Channel, Crew, call_all, receive_all, timed
from tests.benchmarks.link import contact, start_node, where

DEAD_SHARE = 0.2
PROCESSES = 8
IN_FLIGHT = 8
HEADER_BYTES = 100
SIZES = {100: "100", 1000: "1k", 10_000: "10k"}


class CallNetwork:
    """Peers that call each other in virtual time, without shared bandwidth; others must dial."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.by_id: dict[PeerId, CallPeer] = {}
        self.silent: set[str] = set()  # names of peers that never answer
        self.linked: Callable[[CallPeer, CallPeer], bool] = lambda one, other: False

    def peers(self, count: int) -> "list[CallPeer]":
        made = [CallPeer(self, str(i)) for i in range(count)]
        self.by_id |= {peer.id: peer for peer in made}
        return made

    async def carry(self, message: Message, latency_s: float) -> None:
        size_bytes = len(msgspec.msgpack.encode(message)) + HEADER_BYTES
        jitter_s = self.rng.expovariate(1 / PAPER_CLOUD.jitter_s) if latency_s else 0.0
        await asyncio.sleep(latency_s + jitter_s + 8 * size_bytes / PAPER_CLOUD.hosts[0].upload_bps)


class CallPeer:
    """As much of a `Node` as a DHT and an expert directory use."""

    membership = b""

    def __init__(self, network: CallNetwork, name: str) -> None:
        identity = Identity(hashlib.sha256(f"{network.seed} {name}".encode()).digest())
        self.id = identity.id
        self.public_key = identity.public_key
        self.sign = identity.sign
        self.name = name
        self.contact = Contact(identity.id, (f"ws://peer-{name}:1",))
        self._network = network
        self._links: dict[PeerId, float] = {self.id: 0.0}  # one-way latency
        self._handlers: dict[type[Message], Callable[[PeerId, Any], Awaitable[Any]]] = {}

    def time(self) -> float:
        return EPOCH + loop_now()

    def role_by(self, public_key: bytes, membership: bytes, at: float) -> Role:
        return Role.WORKER

    def learn(self, contact: Contact) -> None:
        pass  # the network finds peers by their ids

    def on_lost(self, listener: Callable[[PeerId], None]) -> Callable[[], None]:
        return lambda: None

    def serve(
        self, kind: type[M], handler: Callable[[PeerId, M], Awaitable[Message]], *, role: Role = Role.VIEWER
    ) -> None:
        self._handlers[kind] = handler

    async def call(self, peer: PeerId, message: Message, reply: type[R], *, timeout_s: float) -> R:
        network = self._network
        other = self._network.by_id[peer]
        try:
            async with asyncio.timeout(timeout_s):
                if {self.name, other.name} & network.silent:
                    await asyncio.get_running_loop().create_future()
                if peer not in self._links:
                    latency_s = PAPER_CLOUD.pair_latency_s(self.name, other.name, seed=network.seed)
                    if not network.linked(self, other):
                        await asyncio.sleep(2 * latency_s * DIAL_ROUND_TRIPS)
                    self._links[peer] = other._links[self.id] = latency_s
                await network.carry(message, self._links[peer])
                answer: R = await other._handlers[type(message)](self.id, message)
                await network.carry(answer, self._links[peer])
                return answer
        except TimeoutError as error:
            raise PeerTimeout(f"{other.name} does not answer") from error
        except Refusal as error:
            raise CallRefused("refused", str(error)) from error


def found_each_other(peers: Sequence[CallPeer], rng: random.Random) -> list[DHT]:
    """Return the peers' DHTs as in a swarm that has run for long: with random contacts in each bucket."""
    dhts = [DHT(cast(Node, peer), random.Random(i)) for i, peer in enumerate(peers)]
    by_id = sorted((peer.contact for peer in peers), key=lambda contact: contact.id)
    ids = [int.from_bytes(contact.id, "big") for contact in by_id]
    for dht, own in zip(dhts, peers, strict=True):
        me = int.from_bytes(own.id, "big")
        for bit in range(255, -1, -1):
            others, sharing = (
                range(bisect.bisect_left(ids, at), bisect.bisect_left(ids, at + (1 << bit)))
                for at in (((me >> bit) ^ 1) << bit, me >> bit << bit)
            )
            for i in others if len(others) <= BUCKET_SIZE else rng.sample(others, BUCKET_SIZE):
                dht.table.saw(by_id[i], 0.0)
            if len(sharing) <= 1:
                break  # no other id shares more bits
    return dhts


async def read_records(peers: int, records: int, seed: int = 0) -> dict[str, tuple[float, ...]]:
    """Store records, silence a fifth of all peers, then read each elsewhere; per figure a value a read."""
    network = CallNetwork(seed)
    rng = random.Random(seed)
    dhts = found_each_other(network.peers(peers), rng)
    for i in range(records):
        await rng.choice(dhts).publish(f"record {i}", i, ttl_s=86_400)
    dead = set(rng.sample(range(peers), int(peers * DEAD_SHARE)))
    network.silent = set(map(str, dead))
    await asyncio.sleep(60)
    alive = [dht for i, dht in enumerate(dhts) if i not in dead]
    lookups = []
    for i in range(records):
        began = loop_now()
        reading = await rng.choice(alive).read(f"record {i}")
        found = [one.value for one in reading.found.values()] == [i]
        lookups.append((found, reading.hops or 0, reading.calls, loop_now() - began))
    return dict(zip(("found", "hops", "calls", "seconds"), zip(*lookups, strict=True), strict=True))


async def _median_ms(operations: int, operation: Callable[[int], Awaitable[Any]]) -> float:
    return statistics.median([(await timed(operation(i)))[0] for i in range(operations)]) * 1e3


async def _store_and_get(dht: DHT, name: str, operations: int) -> int:
    async def chain(which: int) -> int:
        good = 0
        for i in range(operations // IN_FLIGHT // 2):
            key = f"{name} {which} {i}"
            stored = await dht.publish(key, i, ttl_s=600)
            found = next(iter((await dht.get(key)).values()), None)
            if stored > 0:
                good += 1
            if found is not None and found.value == i:
                good += 1
        return good

    return sum(await asyncio.gather(*map(chain, range(IN_FLIGHT))))


async def take_part(parent: Channel) -> None:
    node = await start_node()
    dht = DHT(node, random.Random())
    name = node.id.hex()
    found = where(node)
    while True:
        match await parent.wait_call(**found):
            case {"bootstrap": entry}:
                await dht.bootstrap([contact(entry)])
                found = {}
            case {"one_at_a_time": operations}:
                store_ms = await _median_ms(operations, lambda i: dht.publish(f"{name} {i}", i, ttl_s=600))
                get_ms = await _median_ms(operations, lambda i: dht.get(f"{name} {i}"))
                found = {"store_ms": store_ms, "get_ms": get_ms}
            case {"at_once": operations}:
                found = {"good": await _store_and_get(dht, name, operations)}


@reports("dht")
def run(report: Report) -> None:
    for peers, name in SIZES.items():
        lookups = run_virtual(read_records(peers, 50 if report.quick else 400))
        report.add_rows(
            (f"found_{name}", statistics.mean(lookups["found"]), "", "a fifth is silent"),
            (f"hops_{name}", statistics.median(lookups["hops"]), "hops", "median"),
            (f"calls_{name}", statistics.mean(lookups["calls"]), "calls", "mean per read"),
            (f"latency_ms_{name}", 1e3 * statistics.median(lookups["seconds"]), "ms", "virtual, median"),
        )
    operations = 160 if report.quick else 800
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


GRID = Grid("ffn", (32, 32))
HOSTS = 256
BATCH = 64
BEST = 4
PUBLISHED_MS = {100: 317, 1000: 528, 10_000: 764}


async def _search(directory: Directory, seed: int) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    scores = [rng.standard_normal((BATCH, side), dtype=np.float32) for side in GRID.sides]
    began = loop_now()
    cold = await directory.best(GRID, scores, BEST)
    cold_s = loop_now() - began
    found_at = time.process_time()
    warm = await directory.best(GRID, scores, BEST)
    warm_s = time.process_time() - found_at
    assert cold == warm and all(len(sample) == BEST for sample in cold)
    await directory.close()
    return 1e3 * cold_s, 1e3 * warm_s


async def find_experts(size: int, searches: int) -> tuple[list[float], list[float]]:
    """Let peers search in turn, for the first time; cold ms are virtual, warm ones the processor's."""
    network = CallNetwork(0)
    rng = random.Random(0)
    peers = network.peers(size)
    dhts = found_each_other(peers, rng)
    known = {peer.id: {contact.id for contact in dht.table} for peer, dht in zip(peers, dhts, strict=True)}
    network.linked = lambda one, other: other.id in known[one.id] or one.id in known[other.id]
    services = [
        RunServices(cast(Node, peer), dht, EventLog(), random.Random(peer.name), "bench")
        for peer, dht in zip(peers, dhts, strict=True)
    ]
    directories = [Directory(one, ttl_s=3600.0) for one in services]
    uids = [GRID.uid(index) for index in GRID]
    hosts = min(HOSTS, size // 2)
    share = -(-len(uids) // hosts)
    for_host = [dict.fromkeys(uids[i * share : (i + 1) * share], ((1024,), 0)) for i in range(hosts)]
    announced = zip(directories, for_host, strict=False)
    await asyncio.gather(*(directory.announce(GRID, part) for directory, part in announced))
    chosen = rng.sample(range(size // 2, size), searches)
    cold_ms, warm_ms = zip(*[await _search(directories[i], n) for n, i in enumerate(chosen)], strict=True)
    return list(cold_ms), list(warm_ms)


@reports("beam")
def run_beam_search(report: Report) -> None:
    for size, name in SIZES.items():
        cold_ms, warm_ms = run_virtual(find_experts(size, 8 if report.quick else 40))
        note = f"virtual, median; published {PUBLISHED_MS[size]}"
        report.add(f"cold_ms_{name}", statistics.median(cold_ms), "ms", note)
        report.add(f"cold_ms_{name}_worst", max(cold_ms), "ms", "virtual")
    report.add("warm_ms", statistics.median(warm_ms), "ms", "processor time, median")
