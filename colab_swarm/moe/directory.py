"""Directory of live experts: hosts announce theirs, trainers look them up.

See `colab_swarm.moe.grid` for the records in the DHT and the beam search. Look-ups are cached for
`DirectorySettings.cache_s`, never beyond the expiry of a record; an empty prefix is read again soon. Only the remaining
life of a record counts, on this peer's monotonic clock; but the order of two claims follows their hosts' clocks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from colab_swarm.dht.service import RunServices
from colab_swarm.errors import NoExpertsError
from colab_swarm.events import ExpertBanned
from colab_swarm.moe.grid import (
    CLAIMED,
    FIRST_BAN_S,
    LONGEST_BAN_S,
    Bans,
    ExpertInfo,
    ExpertPlace,
    Grid,
    GridBranch,
    Index,
    Listing,
    Mask,
    RecordRow,
    beam_search,
    by_page,
    holdings,
    is_row,
    keys,
    offset,
    position,
    shelf_of,
    short_addresses,
    width,
)
from colab_swarm.net.peers import Message
from colab_swarm.tensors.codecs import Floats

logger = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
MAX_ENTRIES = 10_000
WITNESSES = 2  # hosts that announce an index above the rows; the others stay silent
EXTRA_WAITS = 3  # rounds of look-ups per search beyond one per dimension; then unknown prefixes count as dead
MAX_GUESSES = 32  # guessed keys that a search reads at once; with more, it reads dimension by dimension
ROWS_AT_ONCE = 16
MAX_ROWS = 4096  # rows that a search for vacant places reads


class Cache(Generic[K, V]):
    """Values by key, each valid for a limited time.

    ``await load(key, old, fresh)`` reads a key and returns its value and for how many seconds that
    is valid. ``old`` is the cached value, or None; ``fresh`` is as in `get`.
    """

    def __init__(self, load: Callable[[K, V | None, bool], Awaitable[tuple[V, float]]]) -> None:
        self._load = load
        self._entries: dict[K, tuple[V, float, float]] = {}  # value, refreshed from, valid until
        self._loads: dict[K, asyncio.Task[V]] = {}
        self._loop = asyncio.get_running_loop()
        self.loads = 0

    def peek(self, key: K) -> V | None:
        """Return the cached value, or None; after half its life it is refreshed in the background."""
        now = self._loop.time()
        if key not in self._entries or self._entries[key][2] <= now:
            return None
        value, aging_at, _ = self._entries[key]
        if aging_at <= now:
            self._begin(key)
        return value

    async def get(self, keys: Iterable[K], *, fresh: bool = False) -> dict[K, V]:
        """Return the values of all keys, reading missing ones in parallel; ``fresh``: only by reads that start now."""
        cached = {key: None if fresh else self.peek(key) for key in keys}
        reads = {key: self._begin(key, fresh=fresh) for key, value in cached.items() if value is None}
        # shielded: a caller that is cancelled must not end the read of the others
        read = await asyncio.gather(*map(asyncio.shield, reads.values()))
        found = {key: value for key, value in cached.items() if value is not None}
        return found | dict(zip(reads, read, strict=True))

    def forget(self, key: K) -> None:
        """Drop the cached value of a key."""
        self._entries.pop(key, None)

    async def close(self) -> None:
        """Cancel all running reads."""
        loads = [*self._loads.values()]
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)

    def _begin(self, key: K, *, fresh: bool = False) -> asyncio.Task[V]:
        if fresh or key not in self._loads:
            self.loads += 1
            self._loads[key] = self._loop.create_task(self._read(key, fresh))
        return self._loads[key]

    async def _read(self, key: K, fresh: bool) -> V:
        old = self._entries.get(key)
        try:
            value, valid_s = await self._load(key, old[0] if old else None, fresh)
        finally:
            if self._loads.get(key) is asyncio.current_task():
                del self._loads[key]
        now = self._loop.time()
        self._entries.pop(key, None)
        self._entries[key] = value, now + valid_s / 2, now + valid_s
        if len(self._entries) > MAX_ENTRIES:
            del self._entries[next(iter(self._entries))]
        return value


@dataclass(frozen=True)
class DirectorySettings:
    """How experts are announced and found."""

    ttl_s: float = 60.0  # life of an announcement; announce about three times as often
    cache_s: float = 30.0  # how long a look-up is cached
    absent_s: float = 3.0  # how long an empty look-up is cached
    settle_s: float = 2.0  # minimum wait between a claim and the check for other claims


class Directory:
    """One peer's view of all experts of a run."""

    def __init__(self, services: RunServices, settings: DirectorySettings = DirectorySettings()) -> None:
        self.settings = settings
        self._peers, self._dht, self._events = services.peers, services.dht, services.events
        self._rng, self._run_id = services.rng, services.run_id
        self._loop = asyncio.get_running_loop()
        self._bans = Bans(FIRST_BAN_S, LONGEST_BAN_S)
        self._cache: Cache[tuple[Grid, Index], Listing] = Cache(self._read)
        self._mine: dict[Grid, dict[Index, ExpertPlace]] = {}
        self._published: set[str] = set()  # keys under which a record of ours is

    async def close(self) -> None:
        """Cancel all running look-ups."""
        await self._cache.close()

    # -- hosts

    async def announce(self, grid: Grid, experts: Mapping[str, tuple[tuple[int, ...], int]]) -> None:
        """Announce that this peer serves ``experts``: by uid, their sample shape and step.

        The announcement lives for ``ttl_s``. It renews all other announcements and claims of this peer in the grid.
        """
        mine = self._mine.setdefault(grid, {})
        for uid, (shape, step) in experts.items():
            index = grid.index(uid)
            claimed_ms = mine[index].claimed_ms if index in mine else self._now_ms()
            mine[index] = ExpertPlace(position(grid, index), claimed_ms, step, shape)
        await self._publish(grid, mine)

    async def withdraw(self, grid: Grid, uids: Iterable[str]) -> None:
        """Withdraw the announcements of experts at once."""
        mine, gone = self._mine.setdefault(grid, {}), {grid.index(uid) for uid in uids}
        for index in gone:
            mine.pop(index, None)
        await self._publish(grid, gone)

    async def claim(self, grid: Grid, count: int, *, wanted: Collection[str] | None = None) -> list[str]:
        """Claim ``count`` vacant places, among ``wanted`` or anywhere; fewer if there are no more.

        A claim is published and then checked: of several peers that claim a place, one gets it. Announce the claimed
        experts within ``ttl_s``.
        """
        held: list[str] = []
        while count > len(held) and (chosen := await self._vacant(grid, count - len(held), wanted)):
            uids = [grid.uid(index) for index in chosen]
            mine, began, now_ms = self._mine.setdefault(grid, {}), self._loop.time(), self._now_ms()
            mine.update({index: ExpertPlace(position(grid, index), now_ms, CLAIMED, ()) for index in chosen})
            await self._publish(grid, chosen)
            await asyncio.sleep(max(self.settings.settle_s, 2 * (self._loop.time() - began)))
            lost = set(await self.rivals(grid, uids))
            await self.withdraw(grid, lost)
            held += [uid for uid in uids if uid not in lost]
        return held

    async def rivals(self, grid: Grid, uids: Iterable[str]) -> list[str]:
        """Return this peer's places that belong to another peer: give them up. Call it regularly.

        After a partition or a race two peers may hold one place. It belongs to the earlier claim.
        """
        mine = self._mine.get(grid, {})
        checked = {index: uid for uid in uids if (index := grid.index(uid)) in mine}
        listings = await self._listings(grid, {index[:-1] for index in checked}, fresh=True)
        now, lost = self._loop.time(), []
        for index, uid in checked.items():
            claim = (mine[index].claimed_ms, self._peers.id)
            announced = listings[index[:-1]].live(position(grid, index), now)
            if any(one.claim < claim for one in announced if one.host.id != self._peers.id):
                lost.append(uid)
        return lost

    async def _vacant(self, grid: Grid, count: int, wanted: Collection[str] | None) -> list[Index]:
        if wanted is None:
            some = self._rng.sample(range(rows := grid.size // grid.sides[-1]), min(rows, MAX_ROWS))
            prefixes = [tuple(map(int, np.unravel_index(row, grid.sides[:-1]))) for row in some]
        else:
            wanted = {*wanted}
            prefixes = sorted({grid.index(uid)[:-1] for uid in wanted})
            self._rng.shuffle(prefixes)
        chosen: list[Index] = []
        for begin in range(0, len(prefixes), ROWS_AT_ONCE):
            batch = prefixes[begin : begin + ROWS_AT_ONCE]
            listings = await self._listings(grid, batch, fresh=True)
            for prefix in batch:
                places = [(*prefix, j) for j in self._rng.sample(range(grid.sides[-1]), grid.sides[-1])]
                chosen += [p for p in places if self._is_vacant(grid, p, listings[prefix], wanted)]
            if len(chosen) >= count:
                break
        return chosen[:count]

    def _is_vacant(self, grid: Grid, place: Index, row: Listing, wanted: Collection[str] | None) -> bool:
        if place in self._mine.get(grid, {}) or (wanted is not None and grid.uid(place) not in wanted):
            return False
        announced = row.live(position(grid, place), self._loop.time())
        return all(one.host.id == self._peers.id for one in announced)

    # -- publishing

    async def _publish(self, grid: Grid, places: Iterable[Index]) -> None:
        shelves = {shelf_of(grid, place[:length]) for place in places for length in range(len(place))}
        await asyncio.gather(*(self._publish_shelf(grid, shelf) for shelf in sorted(shelves)))

    async def _publish_shelf(self, grid: Grid, shelf: Index) -> None:
        """Store this peer's records of a shelf or shorter prefix; an empty one where a page has become empty."""
        pages = await self._pages(grid, shelf)
        empty = RecordRow((), ()) if is_row(grid, shelf) else GridBranch(())
        stores = []
        for page, key in enumerate(keys(self._run_id, grid, shelf)):
            if page in pages or key in self._published:
                stores.append(self._store(key, pages.get(page, empty)))
            (self._published.add if page in pages else self._published.discard)(key)
        if stores:
            await asyncio.gather(*stores)
            self._cache.forget((grid, shelf))

    async def _pages(self, grid: Grid, shelf: Index) -> Mapping[int, Message]:
        depth, mine = len(shelf), self._mine[grid]
        if not is_row(grid, shelf):
            served = {i[depth] for i, place in mine.items() if i[:depth] == shelf and place.step != CLAIMED}
            needed = by_page(await self._unwitnessed(grid, shelf, served))
            return {page: GridBranch(tuple(indices)) for page, indices in needed.items()}
        places = {place.index: place for i, place in mine.items() if shelf_of(grid, i[:depth]) == shelf}
        addresses = short_addresses(self._peers.contact)
        return {
            page: RecordRow(addresses, tuple(places[index] for index in indices))
            for page, indices in by_page(places).items()
        }

    async def _unwitnessed(self, grid: Grid, prefix: Index, indices: set[int]) -> list[int]:
        """Return the indices that fewer than `WITNESSES` hosts with smaller ids announce: this peer must."""
        if not indices:
            return []
        listing = (await self._listings(grid, [prefix]))[prefix]
        # a host that stops announcing is replaced before its record expires
        fresh_at = self._loop.time() + self.settings.ttl_s / 2
        smaller = [records for host, records in listing.by_host.items() if host < self._peers.id]
        announced = [one.index for records in smaller for one in records if one.until > fresh_at]
        return [index for index in indices if announced.count(index) < WITNESSES]

    async def _store(self, key: str, record: Message) -> None:
        if not await self._dht.publish(key, record, ttl_s=self.settings.ttl_s):
            logger.info("no peer stored the record under %s; the next announcement retries", key)

    def _now_ms(self) -> int:
        return int(self._peers.time() * 1000)

    # -- finding

    async def find(self, grid: Grid, uid: str) -> ExpertInfo | None:
        """Return the expert's host, shape and step; None if it is dead or banned."""
        index = grid.index(uid)
        shelf = shelf_of(grid, index[:-1])
        for fresh in (False, True):  # the first, quick read may have missed it
            if infos := self._infos(grid, [index], await self._listings(grid, [shelf], fresh=fresh)):
                return infos[index]
        return None

    async def live(self, grid: Grid, *, fresh: bool = False) -> list[ExpertInfo]:
        """Return all experts that can be called, in grid order; ``fresh``: without the cache."""
        prefixes: list[Index] = [()]
        for _ in grid.sides[:-1]:
            listings = await self._listings(grid, prefixes, fresh=fresh)
            masks = {prefix: self._mask(grid, prefix, listing) for prefix, listing in listings.items()}
            prefixes = [(*prefix, int(j)) for prefix in prefixes for j in np.flatnonzero(masks[prefix])]
        shelves = await self._listings(grid, {shelf_of(grid, prefix) for prefix in prefixes}, fresh=fresh)
        places = ((*prefix, j) for prefix in prefixes for j in range(grid.sides[-1]))
        return list(self._infos(grid, places, shelves).values())

    async def best(self, grid: Grid, scores: Sequence[Floats], k: int) -> list[list[ExpertInfo]]:
        """Return for each sample the ``k`` best experts that can be called, best first; fewer if fewer are live.

        Args:
            scores: for each dimension i an array (samples, sides[i]); an expert's score is the sum over its indices.

        Raises:
            NoExpertsError: no expert is live.
            ValueError: the scores do not fit the grid.
        """
        shapes = [s.shape for s in scores]
        if not shapes or shapes != [(shapes[0][0], side) for side in grid.sides]:
            raise ValueError(f"scores of shapes {shapes} do not fit {grid}: (samples, side) each")
        found, shelves = await self._search(grid, scores, k)
        if not any(found):  # the first, quick reads may have missed them
            await self._listings(grid, shelves, fresh=True)
            found, shelves = await self._search(grid, scores, k)
        infos = self._infos(grid, set(itertools.chain(*found)), shelves)
        chosen = [[infos[index] for index in sample if index in infos] for sample in found]
        if chosen and not any(chosen):
            raise NoExpertsError(
                f"no expert of {grid} can be called: host some, check the prefix, or wait for their hosts"
            )
        return chosen

    async def _search(
        self, grid: Grid, scores: Sequence[Floats], k: int
    ) -> tuple[list[list[Index]], dict[Index, Listing]]:
        known: dict[Index, Listing] = {}
        patient = True

        def children(prefix: Index) -> Mask | None:
            shelf = shelf_of(grid, prefix)
            listing = known.get(shelf) or self._cache.peek((grid, shelf))
            if listing is None:
                return None if patient else np.zeros(grid.sides[len(prefix)], np.bool_)
            known[shelf] = listing
            return self._mask(grid, prefix, listing)

        for _ in range(len(grid.sides) + EXTRA_WAITS):
            found, unknown = beam_search(scores, k, children)
            if not unknown:
                return found, known
            if len({shelf_of(grid, prefix) for prefix in unknown}) > MAX_GUESSES:
                shortest = min(map(len, unknown))  # these are known to be live, the others are guesses
                unknown = [prefix for prefix in unknown if len(prefix) == shortest]
            listings = await self._listings(grid, unknown)
            known |= {shelf_of(grid, prefix): listing for prefix, listing in listings.items()}
        patient = False
        return beam_search(scores, k, children)[0], known

    def _mask(self, grid: Grid, prefix: Index, listing: Listing) -> Mask:
        mask, begin = listing.mask(width(grid, prefix), self._loop.time(), self._bans), offset(grid, prefix)
        return mask[begin : begin + grid.sides[len(prefix)]]

    def _infos(
        self, grid: Grid, indices: Iterable[Index], shelves: Mapping[Index, Listing]
    ) -> dict[Index, ExpertInfo]:
        infos: dict[Index, ExpertInfo] = {}
        now = self._loop.time()
        ahead_s = self._peers.time() - now
        for index in indices:
            one = shelves[shelf_of(grid, index[:-1])].usable(position(grid, index), now, self._bans)
            if one is not None and one.place is not None:
                infos[index] = ExpertInfo(
                    one.uid, one.host, one.place.shape, one.place.step, one.until + ahead_s
                )
                self._peers.learn(one.host)
        return infos

    # -- failures

    def on_failure(self, info: ExpertInfo, reason: str) -> None:
        """Ban an expert that failed this peer, longer each time, unless another peer hosts it."""
        seconds = self._bans.fail((info.uid, info.host.id), self._loop.time())
        if seconds is not None:
            self._events.emit(ExpertBanned(self._loop.time(), info.uid, reason, seconds))

    def on_success(self, info: ExpertInfo) -> None:
        """Forget the failures of an expert that answered."""
        self._bans.forgive((info.uid, info.host.id))

    def banned(self) -> set[str]:
        """Return the experts that this peer does not call for a while because they failed."""
        return {uid for uid, _ in self._bans.ends(self._loop.time())}

    # -- reading

    async def _listings(
        self, grid: Grid, prefixes: Iterable[Index], *, fresh: bool = False
    ) -> dict[Index, Listing]:
        shelves = {prefix: shelf_of(grid, prefix) for prefix in prefixes}
        found = await self._cache.get(dict.fromkeys((grid, shelf) for shelf in shelves.values()), fresh=fresh)
        return {prefix: found[grid, shelf] for prefix, shelf in shelves.items()}

    async def _read(self, key: tuple[Grid, Index], old: Listing | None, fresh: bool) -> tuple[Listing, float]:
        """Read a shelf, quickly the first time; hosts of the old listing stay until their records expire."""
        grid, shelf = key
        read = self._dht.read if old or fresh else self._dht.fetch
        pages = await asyncio.gather(*map(read, keys(self._run_id, grid, shelf)))
        now, swarm_time = self._loop.time(), self._peers.time()
        found = itertools.chain(*(page.found.items() for page in pages))
        by_host = {} if old is None else old.remaining(now)
        by_host |= holdings(grid, shelf, found, now=now, swarm_time=swarm_time)
        listing = Listing(by_host)
        return listing, self.settings.cache_s if listing.served() else self.settings.absent_s
