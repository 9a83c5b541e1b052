"""The DHT as its users see it: store and get, over the peers nearest to a key.

Who is asked. A record is stored at the ``replicas`` (5) peers nearest to its key, this peer included if it
can be dialled, and read from the nearest ``read_replicas`` (3), so that a reader meets every write that
missed at most two of its replicas. Readers merge what they get, subkey by subkey; nothing is cached on the
way, so that whoever writes its progress each second is seen in the next second. A peer that knows the whole
swarm, or who stored under the key lately, stores without looking up first: the replies name peers nearer
still, if there are any. Who must be fast rather than sure lets peers ask on instead: see `DHT.fetch`.

Who is known. Each query carries its asker's contact. Only peers that spoke to us, or answered, enter the
routing table; peers in client mode look up and store but are never asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import msgspec

from colab_swarm.dht.records import (
    ID_BYTES,
    DHTSettings,
    Fetch,
    Fetched,
    FindPeers,
    FindValue,
    FoundPeers,
    FoundValue,
    Inspector,
    Record,
    Storage,
    Stored,
    StoreRecord,
    owner_of,
    write_record,
)
from colab_swarm.dht.routing import Lookup, Patience, RoutingTable, distance
from colab_swarm.errors import CallRefused, PeerError
from colab_swarm.events import EventLog, Fault
from colab_swarm.net.peers import Contact, Message, PeerId, Peers, R, Refusal, Role, short

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_ADDRESSES = 16
MAX_ADDRESS_CHARS = 800
"""Of all addresses in one contact: a reply carries 20 contacts."""


def is_sound(contact: Contact) -> bool:
    """Whether a stranger's contact may be kept and passed on: an id, and not too many addresses."""
    chars = sum(map(len, contact.addresses))
    return (
        len(contact.id) == ID_BYTES and len(contact.addresses) <= MAX_ADDRESSES and chars <= MAX_ADDRESS_CHARS
    )


class Searcher:
    """Carries out lookups for one peer and keeps its routing table.

    Attributes:
        table: the peers that spoke to us or answered.
        on_new: called with each peer that is new in the table.
    """

    def __init__(self, peers: Peers, settings: DHTSettings) -> None:
        self.table = RoutingTable(peers.id, bucket_size=settings.bucket_size)
        self.on_new: Callable[[Contact], object] | None = None
        self._peers, self._settings = peers, settings
        self._loop = asyncio.get_running_loop()
        self._patience = Patience()
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def lookup(self, target: bytes, *, width: int, seeds: Iterable[Contact] | None = None) -> Lookup:
        """A lookup that begins at ``seeds``, or at whom we know; all replicas of a key are asked at once."""
        if seeds is None:
            seeds = [*self.table.nearest(target, self._settings.bucket_size), *self.myself()]
        others = (contact for contact in seeds if contact.direct)
        parallel = max(self._settings.parallel, width if width <= self._settings.replicas else 0)
        return Lookup(target, others, width=width, alpha=parallel, patience_s=self._patience.seconds)

    def myself(self) -> tuple[Contact, ...]:
        """This peer as a candidate, if others can dial it."""
        contact = self._peers.contact
        return (contact,) if contact.direct else ()

    async def search(self, lookup: Lookup, ask: Callable[[Contact], Awaitable[Iterable[Contact]]]) -> None:
        """Carry out what ``lookup`` decides; ``ask`` returns the contacts that a peer named.

        Slow queries run on in the background: their answer, or their timeout, still teaches the routing table.
        """
        asked: dict[asyncio.Task[Iterable[Contact] | None], PeerId] = {}
        now = self._loop.time
        try:
            while not lookup.done(now()):
                for contact in lookup.next_queries(now()):
                    asked[self.spawn(_answer_of(ask, contact))] = contact.id
                wake_at = lookup.wake_at(now())
                timeout_s = None if wake_at is None else wake_at - now() + 0.001
                await asyncio.wait(asked, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for query in [query for query in asked if query.done()]:
                    closer = None if query.cancelled() else query.result()
                    lookup.on_answer(asked.pop(query), closer and self._some_of(closer))
        except asyncio.CancelledError:
            for query in asked:
                query.cancel()
            raise
        for peer in asked.values():
            lookup.on_answer(peer, None)  # a wider search with this lookup must not wait for it

    def _some_of(self, closer: Iterable[Contact]) -> list[Contact]:
        """What an honest answer holds: the sound ones of the first ``bucket_size``."""
        return [contact for contact in islice(closer, self._settings.bucket_size) if is_sound(contact)]

    async def call(self, contact: Contact, message: Message, reply: type[R]) -> R:
        """Call a peer by its contact; how it goes teaches the routing table and our patience."""
        self._peers.learn(contact)
        asked_at = self._loop.time()
        try:
            answer = await self._peers.call(contact.id, message, reply, timeout_s=self._settings.timeout_s)
        except PeerError as error:
            # whoever refuses what our role may not do is alive
            if not (isinstance(error, CallRefused) and error.code == "refused"):
                self.table.failed(contact.id)
            raise
        self._patience.learn(self._loop.time() - asked_at)
        self.saw(contact)
        return answer

    async def find_near(self, target: bytes, *, width: int, seeds: Iterable[Contact] | None = None) -> Lookup:
        """Find the ``width`` peers nearest to ``target``, beginning at ``seeds`` or at those we know."""
        lookup = self.lookup(target, width=width, seeds=seeds)
        await self.search(lookup, partial(self._ask_peers, target))
        return lookup

    async def _ask_peers(self, target: bytes, contact: Contact) -> Iterable[Contact]:
        if contact.id == self._peers.id:
            return ()
        return (await self.call(contact, FindPeers(target, self._peers.contact), FoundPeers)).contacts

    def saw(self, contact: Contact) -> None:
        """A peer was heard from."""
        if self.table.saw(contact, self._loop.time()) and self.on_new is not None:
            self.on_new(contact)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` in the background until `cancel`."""
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancel all background work; returns what there was."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks


async def _answer_of(
    ask: Callable[[Contact], Awaitable[Iterable[Contact]]], contact: Contact
) -> Iterable[Contact] | None:
    """The contacts a peer named, None if it did not answer."""
    try:
        return await ask(contact)
    except PeerError as error:
        logger.debug("%s does not answer: %s", short(contact.id), error)
        return None


__all__ = ["DHT", "DHTSettings", "Found", "Reading"]

K = TypeVar("K")
V = TypeVar("V")
REMEMBERED = 1000
"""Keys whose replicas, and peers whose skews, are remembered."""
RECORDS_AT_ONCE = 16
CUT_OFF_RETRY_S = 2.0
MAX_RELAYS = 4
RELAY_WIDTH = 2
"""How many peers in a row a fetch passes, and whom each asks on: one silent peer holds nothing up."""
SKEW_S = 60.0
"""Clocks further apart than this are reported."""


@dataclass(frozen=True)
class Found:
    """A value read from the DHT; ``expires_at`` in this peer's swarm time, ``owner`` if it is signed."""

    value: Any
    expires_at: float
    owner: PeerId | None


@dataclass(frozen=True)
class Reading:
    """What a read found and took: ``hops`` queries in a row until the first record, ``calls`` in all."""

    found: dict[bytes, Found]
    hops: int | None
    calls: int


class DHT:
    """One peer's part in the distributed hash table."""

    def __init__(
        self, peers: Peers, settings: DHTSettings, rng: random.Random, events: EventLog | None = None
    ) -> None:
        self.settings, self._events = settings, events or EventLog()
        self.skews: dict[PeerId, float] = {}
        self._peers = peers
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._searcher = Searcher(peers, settings)
        self.table = self._searcher.table
        self._inspector = Inspector(settings.limits)
        self._storage = Storage(self._inspector)
        self._entries: list[Contact] = []
        self._replicas: dict[bytes, list[Contact]] = {}
        self._last_version = 0
        peers.serve(FindPeers, self._on_find_peers)
        peers.serve(FindValue, self._on_find_value)
        peers.serve(Fetch, self._on_fetch)
        peers.serve(StoreRecord, self._on_store, role=Role.REDUCER)

    # -- what users call

    async def bootstrap(self, contacts: Iterable[Contact]) -> int:
        """Get to know the swarm through ``contacts``; returns how many peers answered."""
        self._entries = [contact for contact in contacts if contact.id != self._peers.id]
        width = self.settings.bucket_size
        lookup = await self._searcher.find_near(self._peers.id, width=width, seeds=self._entries)
        return len(lookup.nearest(width))

    async def store(
        self, key: str | bytes, value: Any, *, subkey: bytes | None = None, ttl_s: float, signed: bool = False
    ) -> int:
        """Store ``value`` for ``ttl_s`` seconds; returns how many peers took it.

        Args:
            key: any text or bytes.
            value: whatever msgspec encodes to msgpack.
            subkey: values under one key live side by side under their subkeys; a later value replaces one
                under the same subkey. The id of a peer (32 bytes) is that peer's own: it needs ``signed``.
            ttl_s: life of the record, seconds.
            signed: sign it, so that nobody else can replace it.

        Raises:
            ValueError: the value is too large, or the subkey belongs to another peer.
        """
        self._last_version = max(self._last_version + 1, int(self._peers.time() * 1e6))
        record = write_record(
            self._peers,
            key_id(key),
            msgspec.msgpack.encode(value),
            subkey=subkey or b"",
            ttl_s=ttl_s,
            version=self._last_version,
            signed=signed,
        )
        fault = self._inspector.fault_of(key_id(key), record, swarm_time=self._peers.time())
        if fault is not None:
            raise ValueError(f"cannot store under {key!r}: {fault}")
        return await self._store(key_id(key), (record,))

    async def get(self, key: str | bytes) -> dict[bytes, Found]:
        """All live values under ``key``, by subkey; empty if there are none."""
        return (await self.read(key)).found

    async def read(self, key: str | bytes) -> Reading:
        """Like `get`, and tells what it took."""
        id, merged = key_id(key), Storage(self._inspector)
        lookup, first = await self._gather(id, merged)
        return Reading(self._found_in(merged, id), lookup.hops(first[0]) if first else None, lookup.calls)

    async def records(self, key: str | bytes) -> tuple[Record, ...]:
        """What `get` makes its values of: live records as they were written, with their signatures."""
        id, merged = key_id(key), Storage(self._inspector)
        await self._gather(id, merged)
        return merged.get(id, now=self._loop.time())

    async def _gather(self, id: bytes, merged: Storage) -> tuple[Lookup, list[PeerId]]:
        """Merge what the peers nearest to ``id`` hold; who held something, the first first."""
        first: list[PeerId] = []
        lookup = self._searcher.lookup(id, width=self.settings.read_replicas)
        ask = partial(self._ask_value, id, merged, first)
        await self._searcher.search(lookup, ask)
        if not first:  # perhaps the nearest have just joined
            lookup.widen(self.settings.replicas + self.settings.read_replicas)
            await self._searcher.search(lookup, ask)
        return lookup, first

    async def fetch(self, key: str | bytes) -> Reading:
        """Like `read`, but faster and less sure: what the first holder to answer holds.

        Queries travel on from peer to nearer peer, over links that stand, where `read` would dial each itself. A
        write that missed this holder is missed; whoever is asked first and lies may hide everything.
        """
        id, merged = key_id(key), Storage(self._inspector)
        hops, width = None, self.settings.parallel
        async for answer in self._fetch(id, relays=MAX_RELAYS, width=width):
            if "" in await self._put(merged, id, answer.records):
                hops = answer.hops
                break
        return Reading(self._found_in(merged, id), hops, width)

    async def find_peer(self, peer: PeerId) -> Contact | None:
        """Where ``peer`` can be dialled; None if nobody near it knows."""
        known = self._peers.contact_of(peer)
        if known.addresses:
            return known
        return (await self._searcher.find_near(peer, width=self.settings.parallel)).known(peer)

    def start(self) -> None:
        """Keep the routing table fresh and the held records where they belong, until `stop`."""
        self._searcher.on_new = lambda contact: self._searcher.spawn(self._hand_over(contact))
        self._searcher.spawn(self._every(self.settings.refresh_s, self._refresh))
        self._searcher.spawn(self._every(self.settings.retry_s, self._retry))
        self._searcher.spawn(self._every(CUT_OFF_RETRY_S, self._retry_if_cut_off))
        self._searcher.spawn(self._every(self.settings.republish_s, self._republish))

    async def stop(self) -> None:
        """End the background work and serve no more."""
        for kind in (FindPeers, FindValue, Fetch, StoreRecord):
            self._peers.unserve(kind)
        await asyncio.gather(*self.kill(), return_exceptions=True)

    def kill(self) -> list[asyncio.Task[Any]]:
        """End the background work without a goodbye, as a crash would; returns the tasks that are ending."""
        self._searcher.on_new = None
        return self._searcher.cancel()

    # -- conversations

    async def _ask_value(
        self, key: bytes, merged: Storage, first: list[PeerId], contact: Contact
    ) -> Iterable[Contact]:
        """Merge what a peer holds under ``key``; the first peers to hold anything are noted in ``first``."""
        contacts: Iterable[Contact] = ()
        if contact.id == self._peers.id:
            records = self._storage.get(key, now=self._loop.time())
        else:
            answer = await self._searcher.call(contact, FindValue(key, self._peers.contact), FoundValue)
            records, contacts = answer.records, answer.contacts
        refusals = await self._put(merged, key, records)
        if "" in refusals:
            first.append(contact.id)
        return contacts

    def _found_in(self, merged: Storage, key: bytes) -> dict[bytes, Found]:
        swarm_time = self._peers.time()
        return {
            record.subkey: Found(
                msgspec.msgpack.decode(record.value), swarm_time + record.ttl_s, owner_of(record)
            )
            for record in merged.get(key, now=self._loop.time())
        }

    async def _fetch(self, key: bytes, *, relays: int, width: int) -> AsyncIterator[Fetched]:
        """What we hold or, if nothing, what the ``width`` nearest peers we know can fetch, as it comes."""
        if held := self._storage.get(key, now=self._loop.time()):
            yield Fetched(held, 0)
        elif relays > 0:
            asked = [self._ask_on(key, relays - 1, contact) for contact in self.table.nearest(key, width)]
            for answer in asyncio.as_completed(list(map(self._searcher.spawn, asked))):
                yield await answer

    async def _ask_on(self, key: bytes, relays: int, contact: Contact) -> Fetched:
        try:
            answer = await self._searcher.call(contact, Fetch(key, relays), Fetched)
        except PeerError as error:
            logger.debug("%s fetches nothing: %s", short(contact.id), error)
            return Fetched((), 0)
        return Fetched(answer.records, answer.hops + 1)

    async def _store(self, key: bytes, records: tuple[Record, ...]) -> int:
        """Store at the nearest peers; returns how many took all."""
        width = self.settings.replicas
        seeds = [*self._replicas.get(key, ()), *self.table.nearest(key, width), *self._searcher.myself()]
        if key not in self._replicas and len(self.table) >= self.settings.bucket_size:
            seeds = (await self._searcher.find_near(key, width=width)).nearest(width)
        taken: list[tuple[str, ...]] = []
        lookup = self._searcher.lookup(key, width=width, seeds=seeds)
        await self._searcher.search(lookup, partial(self._ask_store, key, records, taken))
        _remember(self._replicas, key, lookup.nearest(width))
        refused = {text for refusals in taken for text in refusals if text}
        if refused:
            logger.info("records were refused: %s", "; ".join(sorted(refused)))
        return sum(not any(refusals) for refusals in taken)

    async def _ask_store(
        self, key: bytes, records: tuple[Record, ...], taken: list[tuple[str, ...]], contact: Contact
    ) -> Iterable[Contact]:
        if contact.id == self._peers.id:
            taken.append(await self._put(self._storage, key, records))
            return ()
        message = StoreRecord(key, records, self._peers.contact, self._peers.time())
        answer = await self._searcher.call(contact, message, Stored)
        taken.append(answer.refusals)
        return answer.contacts

    async def _put(self, storage: Storage, key: bytes, records: tuple[Record, ...]) -> tuple[str, ...]:
        """Put all records; checking signatures in bulk lets others run in between."""
        refusals = []
        for i, record in enumerate(records):
            refusal = storage.put(key, record, now=self._loop.time(), swarm_time=self._peers.time())
            refusals.append(refusal or "")
            if i % RECORDS_AT_ONCE == RECORDS_AT_ONCE - 1:
                await asyncio.sleep(0)
        return tuple(refusals)

    # -- what others ask

    async def _on_find_peers(self, caller: PeerId, message: FindPeers) -> FoundPeers:
        return FoundPeers(self._nearest_for(caller, message.target, message.asker))

    async def _on_find_value(self, caller: PeerId, message: FindValue) -> FoundValue:
        contacts = self._nearest_for(caller, message.key, message.asker)
        return FoundValue(self._storage.get(message.key, now=self._loop.time()), contacts)

    async def _on_fetch(self, caller: PeerId, message: Fetch) -> Fetched:
        if len(message.key) != ID_BYTES:
            raise Refusal(f"a key has {ID_BYTES} bytes, this one {len(message.key)}")
        relays = 0 if self._nearest_to(message.key) else min(message.relays, MAX_RELAYS)
        async for answer in self._fetch(message.key, relays=relays, width=RELAY_WIDTH):
            if answer.records:
                return answer
        return Fetched((), 0)

    async def _on_store(self, caller: PeerId, message: StoreRecord) -> Stored:
        contacts = self._nearest_for(caller, message.key, message.asker)
        self._note_skew(caller, message.at - self._peers.time())
        return Stored(await self._put(self._storage, message.key, message.records), contacts)

    def _nearest_for(self, caller: PeerId, target: bytes, asker: Contact) -> tuple[Contact, ...]:
        """Learn the asker's contact and answer with the peers nearest to ``target``."""
        if len(target) != ID_BYTES:
            raise Refusal(f"a key has {ID_BYTES} bytes, this one {len(target)}")
        if asker.id != caller:
            raise Refusal("the asker's contact is not its own")
        if is_sound(asker):
            self._peers.learn(asker)
            self._searcher.saw(asker)
        nearest = self.table.nearest(target, self.settings.bucket_size)
        return tuple(contact for contact in nearest if contact.id != caller)

    def _note_skew(self, peer: PeerId, skew_s: float) -> None:
        if abs(skew_s) < SKEW_S:
            self.skews.pop(peer, None)
            return
        if peer not in self.skews:
            logger.warning("the clock of %s is %.0f s off; records tolerate it", short(peer), skew_s)
        _remember(self.skews, peer, skew_s)

    # -- upkeep

    async def _hand_over(self, newcomer: Contact) -> None:
        """Give a new peer the records it is among the nearest for; one holder of each does so."""
        for key in list(self._storage):
            nearest = self.table.nearest(key, self.settings.replicas)
            if newcomer in nearest and self._nearest_to(key, but=newcomer):
                records = self._storage.get(key, now=self._loop.time())
                with contextlib.suppress(PeerError):
                    await self._ask_store(key, records, [], newcomer)
            await asyncio.sleep(0)

    def _nearest_to(self, key: bytes, *, but: Contact | None = None) -> bool:
        """Whether no other known peer, ``but`` this one, is nearer to ``key``."""
        others = (contact for contact in self.table.nearest(key, 2) if contact != but)
        mine = distance(self._peers.id, key)
        return all(mine < distance(contact.id, key) for contact in others)

    async def _refresh(self) -> None:
        """Look up ourselves and an id in each quiet bucket; a peer cut off from all begins at its entries."""
        width, period_s = self.settings.bucket_size, self.settings.refresh_s
        stale = self.table.refresh_targets(self._loop.time(), older_than_s=period_s, rng=self._rng)
        seeds = [*self.table.nearest(self._peers.id, width), *self._entries]
        await self._searcher.find_near(self._peers.id, width=width, seeds=seeds)
        for target in stale:
            await self._searcher.find_near(target, width=width)

    async def _retry(self) -> None:
        """Try one of the lost peers again; if it is back, meet whom it knows: two halves of a swarm join."""
        lost = [*self.table.lost.values()] or ([] if len(self.table) else self._entries)
        if lost:
            seeds = [self._rng.choice(lost)]
            await self._searcher.find_near(self._peers.id, width=self.settings.bucket_size, seeds=seeds)

    async def _retry_if_cut_off(self) -> None:
        """Who has nobody left does not wait that long."""
        if not len(self.table):
            await self._retry()

    async def _republish(self) -> None:
        """Store again what we are the nearest holder of: peers have come and gone."""
        for key in list(self._storage):
            records = self._storage.get(key, now=self._loop.time())
            if records and self._nearest_to(key):
                await self._store(key, records)

    async def _every(self, period_s: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(period_s * self._rng.uniform(0.5, 1.5))
            try:
                await work()
            except Exception as error:
                logger.exception("upkeep of the DHT failed")
                self._events.emit(Fault.of(self._loop.time(), "upkeep of the DHT", error))


def _remember(known: dict[K, V], key: K, value: V) -> None:
    """Put ``value`` last and, where there are too many, forget the first."""
    known.pop(key, None)
    known[key] = value
    if len(known) > REMEMBERED:
        del known[next(iter(known))]


def key_id(key: str | bytes) -> bytes:
    """Where a key lies among the peers' ids: its SHA-256."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()
