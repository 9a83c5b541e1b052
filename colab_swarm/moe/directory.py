"""Which experts live, and where: what hosts announce and trainers look up.

What is held in the DHT is described in `colab_swarm.moe.records`, how the best are found in `colab_swarm.moe.grid`.
Look-ups are cached for `DirectorySettings.cache_s`, never past the end of a record; a prefix without anything alive is
asked for again soon. Lives are counted on this peer's own monotonic clock from what is left of them, so wrong clocks do
no harm; only the order of two claims is told by their hosts' clocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from colab_swarm.errors import NoExpertsError
from colab_swarm.events import ExpertBanned
from colab_swarm.moe.calls import ExpertInfo, ExpertServices
from colab_swarm.moe.grid import Beams, Grid, Index, Mask, beam_search, parents
from colab_swarm.moe.records import (
    CLAIMED,
    Bans,
    BanSettings,
    ExpertPlace,
    GridBranch,
    Holding,
    Listing,
    RecordRow,
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
from colab_swarm.net.peers import Message, PeerId
from colab_swarm.tensors.codecs import Floats

K = TypeVar("K", bound=Hashable)

V = TypeVar("V")

MAX_ENTRIES = 10_000


@dataclass(frozen=True)
class _Entry(Generic[V]):
    value: V
    aging_at: float
    until: float


class Cache(Generic[K, V]):
    """Values by key, each good for a while.

    Args:
        load: ``await load(key, old, anew)`` reads the value of a key and says for how many seconds it is good;
            ``old`` is the value held before, if any, ``anew`` as in `get`.

    Attributes:
        loads: reads begun so far.
    """

    def __init__(self, load: Callable[[K, V | None, bool], Awaitable[tuple[V, float]]]) -> None:
        self._load = load
        self._entries: dict[K, _Entry[V]] = {}
        self._loads: dict[K, asyncio.Task[V]] = {}
        self._loop = asyncio.get_running_loop()
        self.loads = 0

    def peek(self, key: K) -> V | None:
        """What is held, None if nothing is or it is too old; past half its life it is read anew meanwhile."""
        entry, now = self._entries.get(key), self._loop.time()
        if entry is None or entry.until <= now:
            return None
        if entry.aging_at <= now:
            self._begin(key)
        return entry.value

    async def get(self, keys: Iterable[K], *, anew: bool = False) -> dict[K, V]:
        """The values of all keys, read at once where they must be; ``anew``: by reads that begin now."""
        values: dict[K, V] = {}
        reads: dict[K, asyncio.Task[V]] = {}
        for key in keys:
            held = None if anew else self.peek(key)
            if held is None:
                reads[key] = self._begin(key, anew=anew)
            else:
                values[key] = held
        # a waiter that is cancelled must not end the read for the others
        for key, value in zip(reads, await asyncio.gather(*map(asyncio.shield, reads.values())), strict=True):
            values[key] = value
        return values

    def forget(self, key: K) -> None:
        """What is held under a key is out of date."""
        self._entries.pop(key, None)

    async def close(self) -> None:
        """End the reads that are under way."""
        loads = list(self._loads.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)

    def _begin(self, key: K, *, anew: bool = False) -> asyncio.Task[V]:
        if anew or key not in self._loads:
            self.loads += 1
            load = self._loads[key] = self._loop.create_task(self._read(key, anew))
            load.add_done_callback(lambda done: self._ended(key, done))
        return self._loads[key]

    async def _read(self, key: K, anew: bool) -> V:
        entry = self._entries.get(key)
        value, good_s = await self._load(key, entry.value if entry else None, anew)
        now = self._loop.time()
        self._entries.pop(key, None)
        self._entries[key] = _Entry(value, now + good_s / 2, now + good_s)
        if len(self._entries) > MAX_ENTRIES:
            del self._entries[next(iter(self._entries))]
        return value

    def _ended(self, key: K, load: asyncio.Task[V]) -> None:
        if self._loads.get(key) is load:
            del self._loads[key]


logger = logging.getLogger(__name__)

WITNESSES = 2

"""Hosts that tell of an index above the rows; the others are silent there."""

EXTRA_WAITS = 3

"""Rounds of look-ups of one search beyond one for each dimension; then what is unknown counts as dead."""

MAX_GUESSES = 32

"""Keys that one search asks for on the guess that they tell of something; more are asked for dimension by dimension."""

ROWS_AT_ONCE = 16

MAX_ROWS = 4096

"""Rows that a search for vacant places looks at."""


@dataclass(frozen=True)
class DirectorySettings:
    """How experts are announced and found.

    Attributes:
        ttl_s: life of what is announced; announce about three times as often.
        cache_s: how long what was looked up is believed.
        absent_s: how long it is believed that nothing lives under a prefix.
        settle_s: least wait between claiming places and looking who else did.
        beam_width: prefixes kept by a search, if more than experts are asked for.
        bans: how long who failed is left out.
    """

    ttl_s: float = 60.0
    cache_s: float = 30.0
    absent_s: float = 3.0
    settle_s: float = 2.0
    beam_width: int = 1
    bans: BanSettings = field(default_factory=BanSettings)


class Directory:
    """One peer's view of all experts of a run."""

    def __init__(self, services: ExpertServices, settings: DirectorySettings = DirectorySettings()) -> None:
        self.settings = settings
        self._peers, self._dht, self._events = services.peers, services.dht, services.events
        self._rng, self._run_id = services.rng, services.run_id
        self._loop = asyncio.get_running_loop()
        self._bans = Bans(settings.bans)
        self._cache: Cache[tuple[Grid, Index], Listing] = Cache(self._read)
        self._mine: dict[Grid, dict[Index, ExpertPlace]] = {}
        self._told: set[str] = set()  # keys under which a record of ours is
        self._hosts: dict[str, PeerId] = {}  # whom `find` and `best` named last
        self._seen: dict[Grid, set[str]] = {}  # all experts ever
        self._seen_at: dict[Grid, float] = {}  # when any was seen last, swarm time

    async def close(self) -> None:
        """End the look-ups that are under way."""
        await self._cache.close()

    # -- hosts

    async def announce(self, grid: Grid, experts: Mapping[str, tuple[tuple[int, ...], int]]) -> None:
        """Tell everybody that this peer serves ``experts``, by uid their sample shape and step.

        It holds for ``ttl_s``. Whatever else this peer has announced or claimed in the grid holds as long.
        """
        mine = self._mine.setdefault(grid, {})
        for uid, (shape, step) in experts.items():
            index = grid.index(uid)
            claimed_ms = mine[index].claimed_ms if index in mine else self._now_ms()
            mine[index] = ExpertPlace(position(grid, index), claimed_ms, step, shape)
        await self._tell(grid, mine)

    async def withdraw(self, grid: Grid, uids: Iterable[str]) -> None:
        """Tell everybody at once that this peer no longer has these."""
        mine, gone = self._mine.setdefault(grid, {}), {grid.index(uid) for uid in uids}
        for index in gone:
            mine.pop(index, None)
        await self._tell(grid, gone)

    async def claim(self, grid: Grid, count: int, *, wanted: Sequence[str] | None = None) -> list[str]:
        """Take ``count`` vacant places, of ``wanted`` or anywhere; fewer if there are no more.

        Claims are told, then read again: of several peers that want one place, one gets it. What is claimed must be
        announced within ``ttl_s``.
        """
        held: list[str] = []
        while count > len(held):
            chosen = await self._vacant(grid, count - len(held), None if wanted is None else set(wanted))
            if not chosen:
                break
            uids = [grid.uid(index) for index in chosen]
            mine, began = self._mine.setdefault(grid, {}), self._loop.time()
            mine.update(
                {index: ExpertPlace(position(grid, index), self._now_ms(), CLAIMED, ()) for index in chosen}
            )
            await self._tell(grid, chosen)
            await asyncio.sleep(max(self.settings.settle_s, 2 * (self._loop.time() - began)))
            lost = set(await self.rivals(grid, uids))
            await self.withdraw(grid, lost)
            held += [uid for uid in uids if uid not in lost]
        return held

    async def rivals(self, grid: Grid, uids: Iterable[str]) -> list[str]:
        """Those of this peer's places that are rightfully another's: give them up. Ask now and then.

        After a partition or a race two peers may hold one place. It belongs to who claimed it first by its clock.
        """
        mine = self._mine.get(grid, {})
        asked = {index: uid for uid in uids if (index := grid.index(uid)) in mine}
        listings = await self._listings(grid, {index[:-1] for index in asked}, anew=True)
        now, lost = self._loop.time(), []
        for index, uid in asked.items():
            claim = (mine[index].claimed_ms, self._peers.id)
            told = listings[index[:-1]].live(position(grid, index), now)
            if any(word.claim < claim for word in told if word.host.id != self._peers.id):
                lost.append(uid)
        return lost

    async def _vacant(self, grid: Grid, count: int, wanted: Collection[str] | None) -> list[Index]:
        """Places that nobody holds or claims: as many as asked for, or all there are."""
        if wanted is None:
            some = self._rng.sample(range(rows := grid.size // grid.sides[-1]), min(rows, MAX_ROWS))
            prefixes = [tuple(map(int, np.unravel_index(row, grid.sides[:-1]))) for row in some]
        else:
            prefixes = sorted({grid.index(uid)[:-1] for uid in wanted})
            self._rng.shuffle(prefixes)
        chosen: list[Index] = []
        for begin in range(0, len(prefixes), ROWS_AT_ONCE):
            batch = prefixes[begin : begin + ROWS_AT_ONCE]
            listings = await self._listings(grid, batch, anew=True)
            for prefix in batch:
                places = [(*prefix, j) for j in self._rng.sample(range(grid.sides[-1]), grid.sides[-1])]
                chosen += [p for p in places if self._is_vacant(grid, p, listings[prefix], wanted)]
            if len(chosen) >= count:
                break
        return chosen[:count]

    def _is_vacant(self, grid: Grid, place: Index, row: Listing, wanted: Collection[str] | None) -> bool:
        if place in self._mine.get(grid, {}) or (wanted is not None and grid.uid(place) not in wanted):
            return False
        told = row.live(position(grid, place), self._loop.time())
        return all(word.host.id == self._peers.id for word in told)

    # -- telling

    async def _tell(self, grid: Grid, places: Iterable[Index]) -> None:
        """Store all records that speak of these places anew, each prefix's next indices before what they lead to."""
        shelves = {shelf_of(grid, prefix) for place in places for prefix in parents(place)}
        await asyncio.gather(*(self._tell_of(grid, shelf) for shelf in sorted(shelves)))

    async def _tell_of(self, grid: Grid, shelf: Index) -> None:
        """Store what this peer has to say of a shelf or a shorter prefix; that it is nothing, if it was more before."""
        pages = await self._pages(grid, shelf)
        nothing = RecordRow((), ()) if is_row(grid, shelf) else GridBranch(())
        stores = []
        for page, key in enumerate(keys(self._run_id, grid, shelf)):
            if page in pages or key in self._told:
                stores.append(self._store(key, pages.get(page, nothing)))
            (self._told.add if page in pages else self._told.discard)(key)
        if stores:
            await asyncio.gather(*stores)
            self._cache.forget((grid, shelf))

    async def _pages(self, grid: Grid, shelf: Index) -> Mapping[int, Message]:
        """This peer's records, by page."""
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
        """Those that fewer than `WITNESSES` hosts of smaller id keep telling of: this peer's word is needed."""
        if not indices:
            return []
        listing = (await self._listings(grid, [prefix]))[prefix]
        # who tells no more is replaced before its word ends
        fresh_at = self._loop.time() + self.settings.ttl_s / 2
        smaller = [words for host, words in listing.words.items() if host < self._peers.id]
        told = [word.index for words in smaller for word in words if word.until > fresh_at]
        return [index for index in indices if told.count(index) < WITNESSES]

    async def _store(self, key: str, record: Message) -> None:
        ttl_s = self.settings.ttl_s
        if not await self._dht.store(key, record, subkey=self._peers.id, ttl_s=ttl_s, signed=True):
            logger.info("nobody took the record under %s; it is told again with the next announcement", key)

    def _now_ms(self) -> int:
        return int(self._peers.time() * 1000)

    # -- finding

    async def find(self, grid: Grid, uid: str) -> ExpertInfo | None:
        """Where the expert runs; None if it does not live or is left out for its failures."""
        index = grid.index(uid)
        shelf = shelf_of(grid, index[:-1])
        for anew in (False, True):  # a hasty look-up may have missed it
            if infos := self._infos(grid, [index], await self._listings(grid, [shelf], anew=anew)):
                return infos[index]
        return None

    async def live(self, grid: Grid, *, anew: bool = False) -> list[ExpertInfo]:
        """All experts that can be called, in the order of the grid; ``anew``: what was looked up is not believed."""
        prefixes: list[Index] = [()]
        for _ in grid.sides[:-1]:
            listings = await self._listings(grid, prefixes, anew=anew)
            masks = {prefix: self._mask(grid, prefix, listing) for prefix, listing in listings.items()}
            prefixes = [(*prefix, int(j)) for prefix in prefixes for j in np.flatnonzero(masks[prefix])]
        shelves = await self._listings(grid, {shelf_of(grid, prefix) for prefix in prefixes}, anew=anew)
        places = ((*prefix, j) for prefix in prefixes for j in range(grid.sides[-1]))
        return list(self._infos(grid, places, shelves).values())

    async def best(self, grid: Grid, scores: Sequence[Floats], k: int) -> list[list[ExpertInfo]]:
        """For each sample the ``k`` best experts that can be called, best first; fewer if fewer live.

        Args:
            scores: for each dimension i an array (samples, sides[i]); an expert's score is the sum over its indices.

        Raises:
            NoExpertsError: none lives.
            ValueError: the scores do not fit the grid.
        """
        samples = {len(s) for s in scores}
        if [s.shape[1:] for s in scores] != [(side,) for side in grid.sides] or len(samples) != 1:
            raise ValueError(
                f"scores of shapes {[s.shape for s in scores]} do not fit {grid}: (samples, side) each"
            )
        found, shelves = await self._search(grid, scores, k)
        if found.best and not any(found.best):  # a hasty look-up may have missed them
            await self._listings(grid, shelves, anew=True)
            found, shelves = await self._search(grid, scores, k)
        infos = self._infos(grid, {index for sample in found.best for index in sample}, shelves)
        chosen = [[infos[index] for index in sample if index in infos] for sample in found.best]
        if chosen and not any(chosen):
            raise NoExpertsError(self._nobody(grid))
        return chosen

    async def _search(
        self, grid: Grid, scores: Sequence[Floats], k: int
    ) -> tuple[Beams, dict[Index, Listing]]:
        """Search, look up what was unknown, search again; returns also the listings that were used."""
        known: dict[Index, Listing] = {}

        def children(prefix: Index) -> Mask | None:
            shelf = shelf_of(grid, prefix)
            listing = known.get(shelf) or self._cache.peek((grid, shelf))
            if listing is None:
                return None if patient else np.zeros(grid.sides[len(prefix)], np.bool_)
            known[shelf] = listing
            return self._mask(grid, prefix, listing)

        patient = True
        for _ in range(len(grid.sides) + EXTRA_WAITS):
            found = beam_search(scores, k, children, width=self.settings.beam_width)
            if not found.unknown:
                return found, known
            listings = await self._listings(grid, _worth_asking(grid, found.unknown))
            known |= {shelf_of(grid, prefix): listing for prefix, listing in listings.items()}
        patient = False
        return beam_search(scores, k, children, width=self.settings.beam_width), known

    def _mask(self, grid: Grid, prefix: Index, listing: Listing) -> Mask:
        """The usable children of one prefix, from the listing of its shelf."""
        mask, begin = listing.mask(width(grid, prefix), self._loop.time(), self._bans), offset(grid, prefix)
        return mask[begin : begin + grid.sides[len(prefix)]]

    def _infos(
        self, grid: Grid, indices: Iterable[Index], shelves: Mapping[Index, Listing]
    ) -> dict[Index, ExpertInfo]:
        """Those of the experts that can be called; their hosts' addresses are learned."""
        infos: dict[Index, ExpertInfo] = {}
        now = self._loop.time()
        ahead_s = self._peers.time() - now
        for index in indices:
            word = shelves[shelf_of(grid, index[:-1])].usable(position(grid, index), now, self._bans)
            if word is not None and word.place is not None:
                shape, step = word.place.shape, word.place.step
                infos[index] = ExpertInfo(word.uid, word.host, shape, step, word.until + ahead_s)
                self._hosts[word.uid] = word.host.id
                self._peers.learn(word.host)
        return infos

    def _nobody(self, grid: Grid) -> str:
        if grid not in self._seen:
            return (
                f"no expert of {grid} lives, and none was ever seen from here: host some, or check the prefix"
            )
        ago_s = self._peers.time() - self._seen_at[grid]
        past = f"{len(self._seen[grid])} were seen from here, the last {ago_s:.0f} s ago"
        return f"no expert of {grid} can be called: {past}; host some, or wait until their hosts are back"

    # -- failures

    def on_failure(self, uid: str, reason: str) -> None:
        """The expert failed this peer: leave it out for a while, longer each time, unless another peer hosts it."""
        seconds = self._bans.fail((uid, self._hosts.get(uid)), self._loop.time())
        if seconds is not None:
            self._events.emit(ExpertBanned(self._loop.time(), uid, reason, seconds))

    def on_success(self, uid: str) -> None:
        """The expert did well: its failures are forgiven."""
        self._bans.succeed((uid, self._hosts.get(uid)))

    def left_out(self) -> set[str]:
        """The experts that this peer does not call for a while, for their failures."""
        return {who[0] for who in self._bans.ends(self._loop.time()) if isinstance(who, tuple)}

    # -- reading

    async def _listings(
        self, grid: Grid, prefixes: Iterable[Index], *, anew: bool = False
    ) -> dict[Index, Listing]:
        """What is told of each prefix; those on one shelf share a listing."""
        shelves = {prefix: shelf_of(grid, prefix) for prefix in prefixes}
        found = await self._cache.get(dict.fromkeys((grid, shelf) for shelf in shelves.values()), anew=anew)
        return {prefix: found[grid, shelf] for prefix, shelf in shelves.items()}

    async def _read(self, key: tuple[Grid, Index], old: Listing | None, anew: bool) -> tuple[Listing, float]:
        """Read a shelf, in haste the first time; who was there before is believed until its word ends."""
        grid, shelf = key
        began = self._loop.time()
        read = self._dht.read if old or anew else self._dht.fetch
        pages = await asyncio.gather(*(read(name) for name in keys(self._run_id, grid, shelf)))
        now, swarm_time = self._loop.time(), self._peers.time()
        words = dict(old.words) if old else {}
        ends = {host: {word.until for word in told} for host, told in words.items()}
        for host in [host for host, until in ends.items() if max(until, default=0.0) <= now]:
            del words[host]
        fresh: dict[PeerId, list[Holding]] = {}
        for page in pages:
            for host, told in holdings(grid, shelf, page.found, now=now, swarm_time=swarm_time).items():
                fresh.setdefault(host, []).extend(told)
        listing = Listing(words | fresh)
        logger.debug("read %s in %.0f ms", grid.uid(shelf), (now - began) * 1e3)
        alive = {word.uid for told in listing.words.values() for word in told if word.served}
        if alive and is_row(grid, shelf):
            self._seen.setdefault(grid, set()).update(alive)
            self._seen_at[grid] = swarm_time
        return listing, self.settings.cache_s if alive else self.settings.absent_s


def _worth_asking(grid: Grid, unknown: list[Index]) -> list[Index]:
    """All unknown prefixes or, if those are many, the shortest: they are known to live, the others are guessed."""
    if len({shelf_of(grid, prefix) for prefix in unknown}) <= MAX_GUESSES:
        return unknown
    shortest = min(map(len, unknown))
    return [prefix for prefix in unknown if len(prefix) == shortest]
