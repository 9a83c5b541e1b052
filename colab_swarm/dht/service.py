"""The DHT for its users: store and get values at the peers nearest to a key.

A peer that knows the whole swarm, or that stored under the key a short time ago, stores without a lookup. If there are
peers nearer to the key, the replies name them. Each query contains its sender's contact. Only peers that sent this peer
a query or an answer enter its routing table.
"""

import asyncio
import contextlib
import hashlib
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import msgspec

from colab_swarm.dht.records import (
    CLOCK_SLACK_S,
    ID_BYTES,
    Fetch,
    Fetched,
    FindNear,
    FoundNear,
    Record,
    Storage,
    Stored,
    StoreRecord,
)
from colab_swarm.dht.routing import BUCKET_SIZE, MIN_PATIENCE_S, Lookup, RoutingTable, distance
from colab_swarm.errors import CallRefused, PeerError, require
from colab_swarm.events import EventLog
from colab_swarm.net.node import Node
from colab_swarm.net.patience import Patience
from colab_swarm.net.peers import MAX_ADDRESSES, Contact, Message, PeerId, R, Refusal, Role, remember, short
from colab_swarm.runtime import BackgroundTasks, PauseGate

logger = logging.getLogger(__name__)
T = TypeVar("T")
REPLICAS = 5  # peers that hold a record
READ_REPLICAS = 3  # peers whose answers a reader needs
PARALLEL = 3  # queries in flight during a lookup (Kademlia's alpha)
TIMEOUT_S = 5.0  # for one query; a lookup waits less for a silent peer, see `Lookup`
REFRESH_S = 120.0  # between lookups in buckets without contact
RETRY_S = 30.0  # between queries to one of the lost peers
REPUBLISH_S = 600.0  # after this time, records are stored again at the peers that are nearest then
MAX_ADDRESS_CHARS = 800  # for all addresses in one contact, because a reply contains 20 contacts
REMEMBERED = 1000  # number of keys whose replicas are remembered
MAX_FORWARDS = 4  # maximum number of forwards of a fetch, one after another
FORWARD_WIDTH = 2  # peers to which each peer forwards a fetch, so that a silent one does not delay it
_ANSWER = "an answer"  # one key for all peers, because a lookup asks too many peers to know the times of each


def is_sound(contact: Contact) -> bool:
    """Return True if a contact from any peer may be stored: its id has the right length, its addresses are few."""
    few = len(contact.addresses) <= MAX_ADDRESSES and sum(map(len, contact.addresses)) <= MAX_ADDRESS_CHARS
    return len(contact.id) == ID_BYTES and few


@dataclass(frozen=True)
class Found:
    """A value from the DHT, the swarm time at which it expires, and the role of its owner."""

    value: Any
    expires_at: float
    role: Role


@dataclass(frozen=True)
class Reading:
    """The values that a look-up found.

    ``hops`` is the number of queries in a row until the first record. ``calls`` is the number of all queries.
    """

    found: dict[PeerId, Found]
    hops: int | None
    calls: int


class DHT:
    """One peer's part in the distributed hash table."""

    def __init__(self, peers: Node, rng: random.Random, events: EventLog | None = None) -> None:
        self.table = RoutingTable(peers.id)
        self._peers = peers
        self._rng = rng
        self._now = asyncio.get_running_loop().time
        self._tasks = BackgroundTasks("upkeep of the DHT", events or EventLog(), rng)
        self._storage = Storage(peers.role_by)
        self._patience = Patience[str](0.0, first_s=1.0, least_s=MIN_PATIENCE_S)
        self._entries: list[Contact] = []
        self._replicas: dict[bytes, list[Contact]] = {}  # peers that hold the last keys
        self._last_version = 0
        self._hands_over = False
        peers.serve(FindNear, self._on_find)
        peers.serve(Fetch, self._on_fetch)
        peers.serve(StoreRecord, self._on_store, role=Role.REDUCER)

    async def bootstrap(self, contacts: Iterable[Contact]) -> int:
        """Join the DHT through ``contacts``; return how many peers answered."""
        self._entries = [contact for contact in contacts if contact.id != self._peers.id]
        lookup = await self.find_near(self._peers.id, width=BUCKET_SIZE, seeds=self._entries)
        return len(lookup.nearest(BUCKET_SIZE))

    async def publish(self, key: str | bytes, value: Any, *, ttl_s: float) -> int:
        """Sign this peer's ``value`` and store it as msgpack for ``ttl_s`` seconds; return how many peers hold it.

        The value replaces this peer's earlier value under the key. Raises `ValueError` if the value is too large.
        """
        peers = self._peers
        id = key_id(key)
        now = self._peers.time()
        version = int(now * 1e6)
        # If the last version is further ahead, because the clock was set back, no holder would take the next one.
        if self._last_version < version + CLOCK_SLACK_S * 1e6:
            version = max(self._last_version + 1, version)
        self._last_version = version
        data = msgspec.msgpack.encode(value)
        record = Record(data, now + ttl_s, self._last_version, ttl_s, peers.public_key, peers.membership)
        record = msgspec.structs.replace(record, signature=peers.sign(record.signed_bytes(id)))
        fault = self._storage.fault_of(id, record, swarm_time=now)
        if fault:
            raise ValueError(f"cannot publish under {key!r}: {fault}")
        return await self._store(id, (record,))

    async def get(self, key: str | bytes) -> dict[PeerId, Found]:
        """Return all values under ``key`` that have not expired, each by the peer that published it."""
        return (await self.read(key)).found

    async def published(self, key: str, kind: type[T]) -> dict[PeerId, T]:
        """Return the valid records of type ``kind`` that peers published, and learn the ``addresses`` in them."""
        return {peer: record for peer, (record, _) in (await self.found(key, kind)).items()}

    async def found(self, key: str, kind: type[T]) -> dict[PeerId, tuple[T, Found]]:
        """Return the same records as `published`, each with its `Found`."""
        records: dict[PeerId, tuple[T, Found]] = {}
        for peer, found in (await self.get(key)).items():
            try:
                record = msgspec.convert(found.value, kind, strict=False)
            except (msgspec.ValidationError, ValueError) as error:
                logger.info("record of %s under %s ignored: %s", short(peer), key, error)
                continue
            contact = Contact(peer, getattr(record, "addresses", ()))
            if is_sound(contact):
                self._peers.learn(contact)
                records[contact.id] = record, found
        return records

    async def read(self, key: str | bytes) -> Reading:
        """Return the same values as `get`, with the number of hops and calls."""
        id = key_id(key)
        merged = Storage(self._peers.role_by)
        first = list[PeerId]()
        lookup = self._lookup(id, width=READ_REPLICAS)
        ask = partial(self._ask, id, merged, first)
        await self._search(lookup, ask)
        if not first:  # the nearest peers may have just joined, and not have the records yet
            lookup.width = REPLICAS + READ_REPLICAS
            await self._search(lookup, ask)
        return Reading(self._found_in(merged, id), lookup.hops(first[0]) if first else None, lookup.calls)

    async def fetch(self, key: str | bytes) -> Reading:
        """Return the records of the first holder that answers, which is faster and less reliable than `read`.

        Each peer forwards the query to nearer peers over open links, while `read` would dial each peer itself. The
        result lacks the records that this holder lacks, and a dishonest peer on the way can hide all records.
        """
        id = key_id(key)
        merged = Storage(self._peers.role_by)
        async for answer in self._fetch(id, forwards=MAX_FORWARDS, width=PARALLEL):
            if "" in await self._put(merged, id, answer.records):
                return Reading(self._found_in(merged, id), answer.hops, PARALLEL)
        return Reading({}, None, PARALLEL)

    async def find_peer(self, peer: PeerId) -> Contact | None:
        """Return the contact of ``peer``; None if this peer is unknown and does not answer."""
        known = self._peers.contact_of(peer)
        if known.addresses:
            return known
        nearest = (await self.find_near(peer, width=PARALLEL)).nearest(1)
        return nearest[0] if nearest and nearest[0].id == peer else None

    def start(self) -> None:
        self._hands_over = True
        self._tasks.every(REFRESH_S, self._refresh)
        self._tasks.every(RETRY_S, self._retry)
        self._tasks.every(2.0, partial(self._retry, if_cut_off=True))
        self._tasks.every(REPUBLISH_S, self._republish)

    async def stop(self) -> None:
        for kind in (FindNear, Fetch, StoreRecord):
            self._peers.unserve(kind)
        await asyncio.gather(*self.kill(), return_exceptions=True)

    def kill(self) -> list[asyncio.Task[Any]]:
        """Cancel the background work, as in a crash, but keep serving; return the tasks."""
        self._hands_over = False
        return self._tasks.cancel()

    async def find_near(self, target: bytes, *, width: int, seeds: Iterable[Contact] | None = None) -> Lookup:
        """Find the ``width`` peers nearest to ``target``. The lookup starts at ``seeds``, or else at known peers."""
        lookup = self._lookup(target, width=width, seeds=seeds)
        await self._search(lookup, partial(self._ask, target, None, []))
        return lookup

    def _lookup(self, target: bytes, *, width: int, seeds: Iterable[Contact] | None = None) -> Lookup:
        if seeds is None:
            seeds = [*self.table.nearest(target, BUCKET_SIZE), self._peers.contact]
        others = (contact for contact in seeds if contact.direct)
        # all replicas of a key are queried together
        parallel = max(PARALLEL, width if width <= REPLICAS else 0)
        return Lookup(target, others, width=width, alpha=parallel, patience_s=self._patience_s())

    def _patience_s(self) -> float:
        return min(self._patience.limit_s(_ANSWER), TIMEOUT_S)

    async def _search(self, lookup: Lookup, ask: Callable[[Contact], Awaitable[Iterable[Contact]]]) -> None:
        """Carry out ``lookup``. Slow queries continue in the background, because answers update the routing table."""
        asked: dict[asyncio.Task[list[Contact] | None], PeerId] = {}
        now = self._now
        try:
            while not lookup.done(now()):
                for contact in lookup.next_queries(now()):
                    asked[self._tasks.spawn(self._answer_of(ask, contact))] = contact.id
                wake_at = lookup.wake_at(now())
                timeout_s = None if wake_at is None else wake_at - now() + 0.001
                await asyncio.wait(asked, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for query in [query for query in asked if query.done()]:
                    lookup.on_answer(asked.pop(query), None if query.cancelled() else query.result())
                lookup.patience_s = self._patience_s()  # updated by these answers
        except asyncio.CancelledError:
            for query in asked:
                query.cancel()
            raise
        for peer in asked.values():
            lookup.on_answer(peer, None)  # a wider search with this lookup must not wait for this peer

    async def _answer_of(
        self, ask: Callable[[Contact], Awaitable[Iterable[Contact]]], contact: Contact
    ) -> list[Contact] | None:
        try:
            contacts = islice(await ask(contact), BUCKET_SIZE)
            return [near for near in contacts if is_sound(near)]
        except PeerError as error:
            logger.debug("%s does not answer: %s", short(contact.id), error)
            return None

    async def _call(self, contact: Contact, message: Message, reply: type[R]) -> R:
        self._peers.learn(contact)
        asked_at = self._now()
        try:
            answer = await self._peers.call(contact.id, message, reply, timeout_s=TIMEOUT_S)
        except PeerError as error:
            if not (isinstance(error, CallRefused) and error.code == "refused"):  # a refusal is no failure
                self.table.failed(contact.id)
            raise
        self._patience.learn(_ANSWER, self._now() - asked_at)
        self._saw(contact)
        return answer

    def _saw(self, contact: Contact) -> None:
        if self.table.saw(contact, self._now()) and self._hands_over:
            self._tasks.spawn(self._hand_over(contact))

    async def _ask(
        self, target: bytes, merged: Storage | None, first: list[PeerId], contact: Contact
    ) -> Iterable[Contact]:
        """Query a peer for contacts and, if ``merged`` is given, for records to put into ``merged``.

        If the peer sent valid records, add its id to ``first``.
        """
        records = tuple[Record, ...]()
        contacts = tuple[Contact, ...]()
        if contact.id != self._peers.id:
            message = FindNear(target, self._peers.contact, merged is not None)
            answer = await self._call(contact, message, FoundNear)
            records = answer.records
            contacts = answer.contacts
        elif merged is not None:
            records = self._storage.get(target, now=self._now())
        if merged is not None and "" in await self._put(merged, target, records):
            first.append(contact.id)
        return contacts

    def _found_in(self, merged: Storage, key: bytes) -> dict[PeerId, Found]:
        now = self._peers.time()
        decode = msgspec.msgpack.decode
        found: dict[PeerId, Found] = {}
        for record in merged.get(key, now=self._now()):
            found[record.writer] = Found(decode(record.value), now + record.ttl_s, merged.role_of(record))
        return found

    async def _fetch(self, key: bytes, *, forwards: int, width: int) -> AsyncIterator[Fetched]:
        """Yield this peer's own records or, if it has none, the answers of the ``width`` nearest peers."""
        held = self._storage.get(key, now=self._now())
        if held:
            yield Fetched(held, 0)
        elif forwards > 0:
            asked = [self._forward(key, forwards - 1, contact) for contact in self.table.nearest(key, width)]
            for answer in asyncio.as_completed(list(map(self._tasks.spawn, asked))):
                yield await answer

    async def _forward(self, key: bytes, forwards: int, contact: Contact) -> Fetched:
        try:
            answer = await self._call(contact, Fetch(key, forwards), Fetched)
        except PeerError as error:
            logger.debug("%s fetches nothing: %s", short(contact.id), error)
            return Fetched((), 0)
        return Fetched(answer.records, answer.hops + 1)

    async def _store(self, key: bytes, records: tuple[Record, ...]) -> int:
        width = REPLICAS
        seeds = [*self._replicas.get(key, ()), *self.table.nearest(key, width), self._peers.contact]
        if key not in self._replicas and len(self.table) >= BUCKET_SIZE:
            seeds = (await self.find_near(key, width=width)).nearest(width)
        taken: list[tuple[str, ...]] = []
        lookup = self._lookup(key, width=width, seeds=seeds)
        await self._search(lookup, partial(self._ask_store, key, records, taken))
        remember(self._replicas, key, lookup.nearest(width), REMEMBERED)
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
        answer = await self._call(contact, StoreRecord(key, records, self._peers.contact), Stored)
        taken.append(answer.refusals)
        return answer.contacts

    async def _put(self, storage: Storage, key: bytes, records: tuple[Record, ...]) -> tuple[str, ...]:
        refusals: list[str] = []
        for record in records:
            refusals.append(storage.put(key, record, now=self._now(), swarm_time=self._peers.time()) or "")
            if len(refusals) % 16 == 0:  # checking signatures takes time, so other tasks may run in between
                await asyncio.sleep(0)
        return tuple(refusals)

    async def _on_find(self, caller: PeerId, message: FindNear) -> FoundNear:
        if message.records:
            records = self._storage.get(message.key, now=self._now())
        else:
            records = ()
        return FoundNear(self._nearest_for(caller, message.key, message.asker), records)

    async def _on_fetch(self, caller: PeerId, message: Fetch) -> Fetched:
        require(len(message.key) == ID_BYTES, f"a key of {len(message.key)} bytes, not {ID_BYTES}", Refusal)
        if self._nearest_to(message.key):
            forwards = 0
        else:
            forwards = min(message.forwards, MAX_FORWARDS)
        async for answer in self._fetch(message.key, forwards=forwards, width=FORWARD_WIDTH):
            if answer.records:
                return answer
        return Fetched((), 0)

    async def _on_store(self, caller: PeerId, message: StoreRecord) -> Stored:
        contacts = self._nearest_for(caller, message.key, message.asker)
        return Stored(await self._put(self._storage, message.key, message.records), contacts)

    def _nearest_for(self, caller: PeerId, target: bytes, asker: Contact) -> tuple[Contact, ...]:
        require(len(target) == ID_BYTES, f"a key of {len(target)} bytes, not {ID_BYTES}", Refusal)
        require(asker.id == caller, "the asker's contact is not its own", Refusal)
        if is_sound(asker):
            self._peers.learn(asker)
            self._saw(asker)
        nearest = self.table.nearest(target, BUCKET_SIZE)
        return tuple(contact for contact in nearest if contact.id != caller)

    async def _hand_over(self, new: Contact) -> None:
        """Send a new peer the records that it should hold and to whose keys this peer was the nearest until now."""
        for key in list(self._storage):
            if new in self.table.nearest(key, REPLICAS) and self._nearest_to(key, but=new):
                with contextlib.suppress(PeerError):
                    await self._ask_store(key, self._storage.get(key, now=self._now()), [], new)
            await asyncio.sleep(0)

    def _nearest_to(self, key: bytes, *, but: Contact | None = None) -> bool:
        others = (contact for contact in self.table.nearest(key, 2) if contact != but)
        return all(distance(self._peers.id, key) < distance(contact.id, key) for contact in others)

    async def _refresh(self) -> None:
        """Look up this peer's own id, and an id in each bucket without recent contact."""
        stale = self.table.refresh_targets(self._now(), older_than_s=REFRESH_S, rng=self._rng)
        seeds = [*self.table.nearest(self._peers.id, BUCKET_SIZE), *self._entries]
        await self.find_near(self._peers.id, width=BUCKET_SIZE, seeds=seeds)
        for target in stale:
            await self.find_near(target, width=BUCKET_SIZE)

    async def _retry(self, *, if_cut_off: bool = False) -> None:
        """Query a lost peer again. If it is back, its contacts reconnect two separate halves of a swarm."""
        if if_cut_off and len(self.table):
            return
        lost = [*self.table.lost.values()] or ([] if len(self.table) else self._entries)
        if lost:
            seeds = [self._rng.choice(lost)]
            await self.find_near(self._peers.id, width=BUCKET_SIZE, seeds=seeds)

    async def _republish(self) -> None:
        for key in list(self._storage):
            records = self._storage.get(key, now=self._now())
            if records and self._nearest_to(key):
                await self._store(key, records)


def key_id(key: str | bytes) -> bytes:
    """Return the SHA-256 of a key, which is its position among the peers' ids."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


@dataclass(frozen=True)
class RunServices:
    peers: Node
    dht: DHT
    events: EventLog
    rng: random.Random
    run_id: str  # the keys of the run's records in the DHT begin with it
    gate: PauseGate = field(default_factory=PauseGate)  # closed while this peer is paused
    expert_calls: Counter[PeerId] = field(
        default_factory=Counter
    )  # that each peer's experts answered for this one
