"""Directory of live experts: hosts announce their experts, and trainers look them up.

The directory caches look-ups, and ignores a cached record after its expiration on this peer's monotonic clock.
`Directory.rivals` has the rule for two hosts of one expert. `colab_swarm.moe.grid` has the records and the beam search.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from colab_swarm.dht.service import RunServices
from colab_swarm.errors import NoExpertsError
from colab_swarm.events import ExpertBanned
from colab_swarm.moe.grid import (
    CLAIMED,
    PAGE,
    Announced,
    Bans,
    ExpertInfo,
    ExpertPlace,
    Grid,
    GridPage,
    GridRecord,
    Index,
    Listing,
    Mask,
    announced,
    beam_search,
    short_addresses,
)
from colab_swarm.net.peers import end_tasks, remember
from colab_swarm.tensors.codecs import Floats

logger = logging.getLogger(__name__)
MAX_ENTRIES = 10_000
TTL_S = 60.0  # life of an announcement; announce about three times as often
CACHE_S = 30.0  # how long a look-up is cached
ABSENT_S = 3.0  # how long an empty look-up is cached
SETTLE_S = 2.0  # minimum wait between a claim and the check for other claims
FIRST_BAN_S = 5.0
LONGEST_BAN_S = 300.0
WITNESSES = 2  # how many hosts announce a prefix; the other hosts do not announce it
EXTRA_WAITS = (
    3  # a search may look up this many times more often than once per dimension; the rest counts as dead
)
MAX_GUESSES = (
    32  # most guessed pages that a search reads together; with more, it reads dimension by dimension
)
PAGES_AT_ONCE = 16


class Cache:
    """Caches the listings of pages. ``await load(page, old, fresh)`` returns a listing and its life in seconds.

    ``old`` is the cached listing, or None. ``fresh`` has the same meaning as in `get`.
    """

    def __init__(
        self, load: Callable[[GridPage, Listing | None, bool], Awaitable[tuple[Listing, float]]]
    ) -> None:
        self._load = load
        self._entries: dict[
            GridPage, tuple[Listing, float, float]
        ] = {}  # listing, when to refresh it, when it expires
        self._loads: dict[GridPage, asyncio.Task[Listing]] = {}
        self._loop = asyncio.get_running_loop()
        self.loads = 0

    def peek(self, key: GridPage) -> Listing | None:
        """Return the cached listing, or None. After half of the listing's life, refresh it in the background."""
        now = self._loop.time()
        if key not in self._entries or self._entries[key][2] <= now:
            return None
        value, aging_at, _ = self._entries[key]
        if aging_at <= now:
            self._begin(key)
        return value

    async def get(self, keys: Iterable[GridPage], *, fresh: bool = False) -> dict[GridPage, Listing]:
        """Return the listings of all pages; read the pages that are not cached in parallel.

        If ``fresh``, read all pages now, and use neither the cache nor reads that began earlier.
        """
        listings: dict[GridPage, Listing] = {}
        reads: dict[GridPage, asyncio.Task[Listing]] = {}
        for key in keys:
            cached = None if fresh else self.peek(key)
            if cached is None:
                reads[key] = self._begin(key, fresh=fresh)
            else:
                listings[key] = cached
        # shielded, because a caller that is cancelled must not cancel reads for which other callers wait
        values = await asyncio.gather(*map(asyncio.shield, reads.values()))
        return listings | dict(zip(reads, values, strict=True))

    def forget(self, key: GridPage) -> None:
        self._entries.pop(key, None)

    async def close(self) -> None:
        await end_tasks(*self._loads.values())

    def _begin(self, key: GridPage, *, fresh: bool = False) -> asyncio.Task[Listing]:
        if fresh or key not in self._loads:
            self.loads += 1
            self._loads[key] = self._loop.create_task(self._read(key, fresh))
        return self._loads[key]

    async def _read(self, key: GridPage, fresh: bool) -> Listing:
        old = self._entries.get(key)
        try:
            value, valid_s = await self._load(key, old[0] if old else None, fresh)
        finally:
            if self._loads.get(key) is asyncio.current_task():
                del self._loads[key]
        now = self._loop.time()
        remember(self._entries, key, (value, now + valid_s / 2, now + valid_s), MAX_ENTRIES)
        return value


class Directory:
    """One peer's view of all experts of a run. The peer's own announcements expire after ``ttl_s``."""

    def __init__(self, services: RunServices, *, ttl_s: float = TTL_S) -> None:
        self.ttl_s = ttl_s
        self._expert_calls = services.expert_calls
        self._peers = services.peers
        self._dht = services.dht
        self._events = services.events
        self._rng = services.rng
        self._run_id = services.run_id
        self._now = asyncio.get_running_loop().time
        self._bans = Bans(FIRST_BAN_S, LONGEST_BAN_S)
        self._cache = Cache(self._read)
        self._mine: dict[Grid, dict[Index, ExpertPlace]] = {}
        self._published: set[GridPage] = set()  # pages in which this peer has a record

    async def close(self) -> None:
        await self._cache.close()

    async def announce(self, grid: Grid, experts: Mapping[str, tuple[tuple[int, ...], int]]) -> None:
        """Announce that this peer serves ``experts``, a mapping from an expert's uid to its sample shape and step.

        Also renew this peer's other announcements and claims in the grid.
        """
        for uid, (shape, step) in experts.items():
            self._hold(grid, grid.index(uid), shape, step)
        await self._publish(grid, self._mine.get(grid, ()))

    async def withdraw(self, grid: Grid, uids: Iterable[str]) -> None:
        mine = self._mine.setdefault(grid, {})
        gone = {grid.index(uid) for uid in uids}
        for index in gone:
            mine.pop(index, None)
        await self._publish(grid, gone)

    async def claim(self, grid: Grid, count: int, *, wanted: Collection[str] | None = None) -> list[str]:
        """Claim ``count`` vacant places, among ``wanted`` or anywhere, and return the names of these places' experts.

        If there are not enough vacant places, return fewer names. If several peers claim a place, one of them gets it.
        The claims expire after ``ttl_s``, so announce the experts before.
        """
        held: list[str] = []
        while chosen := await self._vacant(grid, count - len(held), wanted):
            uids = [*map(grid.uid, chosen)]
            began = self._now()
            for index in chosen:
                self._hold(grid, index, (), CLAIMED)
            await self._publish(grid, chosen)
            await asyncio.sleep(max(SETTLE_S, 2 * (self._now() - began)))
            lost = set(await self.rivals(grid, uids))
            await self.withdraw(grid, lost)
            held += [uid for uid in uids if uid not in lost]
        return held

    async def rivals(self, grid: Grid, uids: Iterable[str]) -> list[str]:
        """Return the experts of this peer that another peer claimed earlier. This peer must give them up.

        Two peers can claim one expert in a race or during a network partition. The peer with the earliest claim hosts
        the expert. If claims are equal, the peer with the smallest id hosts it. Callers prefer the same host.
        """
        mine = self._mine.get(grid, {})
        claims = {index: mine[index].claimed_ms for index in map(grid.index, uids) if index in mine}
        pages = {index: GridPage.of(grid, index) for index in claims}
        listings = await self._cache.get(dict.fromkeys(pages.values()), fresh=True)
        lost = []
        for index, page in pages.items():
            own_claim = claims[index], self._peers.id
            infos = listings[page].live(grid.number(index) % PAGE, self._now())
            if any(info.claim < own_claim for info in infos):
                lost.append(grid.uid(index))
        return lost

    def _hold(self, grid: Grid, index: Index, shape: tuple[int, ...], step: int) -> None:
        mine = self._mine.setdefault(grid, {})
        if index in mine:
            claimed_ms = mine[index].claimed_ms
        else:
            claimed_ms = int(self._peers.time() * 1000)
        mine[index] = ExpertPlace(grid.number(index) % PAGE, claimed_ms, step, shape)

    async def _vacant(self, grid: Grid, count: int, wanted: Collection[str] | None) -> list[Index]:
        if wanted is None:
            places = None
            numbers: Sequence[int] = range(-(-grid.size // PAGE))
        else:
            places = set(map(grid.index, wanted))
            numbers = sorted({grid.number(place) // PAGE for place in places})
        numbers = self._rng.sample(numbers, min(len(numbers), 1024))
        chosen: list[Index] = []
        while numbers and len(chosen) < count:
            pages = [GridPage(grid, len(grid.sides), number) for number in numbers[:PAGES_AT_ONCE]]
            numbers = numbers[PAGES_AT_ONCE:]
            listings = await self._cache.get(pages, fresh=True)
            for page, listing in listings.items():
                taken = listing.taken(self._peers.id, self._now())
                free = page.indices(range(PAGE)) - page.indices(taken)
                free -= self._mine.get(grid, {}).keys()
                if places is not None:
                    free &= places
                chosen += self._rng.sample(sorted(free), len(free))
        return chosen[:count]

    async def _publish(self, grid: Grid, places: Iterable[Index]) -> None:
        lengths = range(1, len(grid.sides) + 1)
        pages: set[GridPage] = set()
        for place in places:
            pages.update(GridPage.of(grid, place[:length]) for length in lengths)
        await asyncio.gather(*map(self._publish_page, sorted(pages, key=lambda page: page[1:])))

    async def _publish_page(self, page: GridPage) -> None:
        mine = self._mine[page.grid].items()
        here = {index: place for index, place in mine if GridPage.of(page.grid, index[: page.depth]) == page}
        if page.depth == len(page.grid.sides):
            addresses = short_addresses(self._peers.contact)
            places = sorted(here.values(), key=lambda place: place.index)
        else:
            addresses = ()
            served = [index for index, place in here.items() if place.step != CLAIMED]
            positions = {page.grid.number(index[: page.depth]) % PAGE for index in served}
            places = [*map(ExpertPlace, await self._unwitnessed(page, positions))]
        if places:
            self._published.add(page)
        elif page in self._published:
            self._published.discard(page)
        else:
            return
        record = GridRecord(addresses, tuple(places))
        if not await self._dht.publish(page.key(self._run_id), record, ttl_s=self.ttl_s):
            logger.info("no peer stored the record of %s; the next announcement retries", page)
        self._cache.forget(page)

    async def _unwitnessed(self, page: GridPage, positions: set[int]) -> list[int]:
        if not positions:
            return []
        by_host = (await self._cache.get([page]))[page].by_host
        # a host that stopped announcing is replaced before its record expires
        fresh_at = self._now() + self.ttl_s / 2
        witnesses = Counter[int]()
        for host, infos in by_host.items():
            if host < self._peers.id:
                witnesses.update(position for position, info in infos.items() if info.until > fresh_at)
        return sorted(position for position in positions if witnesses[position] < WITNESSES)

    async def find(self, grid: Grid, uid: str) -> ExpertInfo | None:
        """Return an expert's host, shape and step; None if the expert is dead or banned."""
        index = grid.index(uid)
        for fresh in (False, True):  # the first read is quick, and may have missed the expert
            listings = await self._cache.get([GridPage.of(grid, index)], fresh=fresh)
            infos = self._infos(grid, [index], listings)
            if infos:
                return infos[index]
        return None

    async def live(self, grid: Grid) -> list[ExpertInfo]:
        """Return all experts that can be called, in grid order."""
        indices: list[Index] = [()]
        listings: dict[GridPage, Listing] = {}
        for _ in grid.sides:
            listings = await self._cache.get(_pages_below(grid, indices))
            children: list[Index] = []
            for prefix in indices:
                mask = self._mask(grid, prefix, listings)
                children += [(*prefix, int(position)) for position in np.flatnonzero(mask)]
            indices = children
        return list(self._infos(grid, indices, listings).values())

    async def best(self, grid: Grid, scores: Sequence[Floats], k: int) -> list[list[ExpertInfo]]:
        """Return for each sample the ``k`` best experts that can be called, or fewer, best first.

        ``scores`` has an array (samples, sides[i]) for each dimension i of the grid. An expert's score is the sum of
        the scores at its indices. Raises `NoExpertsError` if no expert can be called, and `ValueError` if the scores
        have other shapes.
        """
        shapes = [s.shape for s in scores]
        if not shapes or shapes != [(shapes[0][0], side) for side in grid.sides]:
            raise ValueError(f"scores of shapes {shapes} do not fit {grid}: (samples, side) each")
        best, listings = await self._search(grid, scores, k)
        if not any(best):  # the first reads are quick, and may have missed experts
            await self._cache.get(listings, fresh=True)
            best, listings = await self._search(grid, scores, k)
        infos = self._infos(grid, set(itertools.chain(*best)), listings)
        chosen = [[infos[index] for index in indices if index in infos] for indices in best]
        if any(chosen) or not chosen:
            return chosen
        advice = "host some, check the prefix and the grid, or wait until swarm.experts.panel shows some"
        failed = [uid for uid in self.banned() if grid.contains(uid)]
        if failed:
            advice += f"; {len(failed)} failed this peer's calls and are left out for a while"
        raise NoExpertsError(f"no expert of {grid} can be called: {advice}")

    async def _search(
        self, grid: Grid, scores: Sequence[Floats], k: int
    ) -> tuple[list[list[Index]], dict[GridPage, Listing]]:
        listings: dict[GridPage, Listing] = {}
        for _ in range(len(grid.sides) + EXTRA_WAITS):
            best, unknown = beam_search(scores, k, partial(self._children, grid, listings))
            if not unknown:
                return best, listings
            pages = [page for page in _pages_below(grid, unknown) if page not in listings]
            if len(pages) > MAX_GUESSES:
                # only the shortest of these prefixes are known to be live; the others are guesses
                depth = min(page.depth for page in pages)
                pages = [page for page in pages if page.depth == depth]
            listings |= await self._cache.get(pages)
        best, _ = beam_search(scores, k, partial(self._children, grid, listings, patient=False))
        return best, listings

    def _children(
        self, grid: Grid, listings: dict[GridPage, Listing], prefix: Index, *, patient: bool = True
    ) -> Mask | None:
        for page in GridPage.below(grid, prefix):
            listing = listings.get(page) or self._cache.peek(page)
            if listing is None:
                if patient:
                    return None
                return np.zeros(grid.sides[len(prefix)], np.bool_)
            listings[page] = listing
        return self._mask(grid, prefix, listings)

    def _mask(self, grid: Grid, prefix: Index, listings: Mapping[GridPage, Listing]) -> Mask:
        side = grid.sides[len(prefix)]
        now = self._now()
        masks = [listings[page].mask(now, self._bans) for page in GridPage.below(grid, prefix)]
        begin = grid.number(prefix) * side % PAGE
        return np.concatenate(masks)[begin : begin + side]

    def _infos(
        self, grid: Grid, indices: Iterable[Index], listings: Mapping[GridPage, Listing]
    ) -> dict[Index, ExpertInfo]:
        infos: dict[Index, ExpertInfo] = {}
        for index in indices:
            listing = listings.get(GridPage.of(grid, index))
            if listing is None:
                continue
            info = listing.usable(grid.number(index) % PAGE, self._now(), self._bans)
            if info is not None:
                infos[index] = info
                self._peers.learn(info.host)
        return infos

    async def _read(self, page: GridPage, old: Listing | None, fresh: bool) -> tuple[Listing, float]:
        read = self._dht.read if old or fresh else self._dht.fetch
        reading = await read(page.key(self._run_id))
        now = self._now()
        by_host: Announced = {}
        if old is not None:
            by_host = {
                h: infos for h, infos in old.by_host.items() if any(i.until > now for i in infos.values())
            }
        by_host |= announced(page, reading.found.items(), now=now, swarm_time=self._peers.time())
        everything = itertools.chain(*(infos.values() for infos in by_host.values()))
        is_served = any(info.step != CLAIMED for info in everything)
        return Listing(by_host), CACHE_S if is_served else ABSENT_S

    def on_failure(self, info: ExpertInfo, reason: str) -> None:
        """Ban an expert at this host after a failed call, longer each time. Other hosts of the expert stay callable."""
        seconds = self._bans.fail((info.uid, info.host.id), self._now())
        if seconds is not None:
            self._events.emit(ExpertBanned(self._now(), info.uid, reason, seconds))

    def on_success(self, info: ExpertInfo) -> None:
        """Credit the host of an expert that answered, and lift the expert's ban at this host."""
        self._expert_calls[info.host.id] += 1
        self._bans.forgive((info.uid, info.host.id))

    def banned(self) -> set[str]:
        """Return the experts that failed, and that this peer therefore does not call for a while."""
        return {uid for uid, _ in self._bans.ends(self._now())}


def _pages_below(grid: Grid, prefixes: Iterable[Index]) -> list[GridPage]:
    """Return the pages that contain the children of these prefixes, without duplicates."""
    pages: dict[GridPage, None] = {}
    for prefix in prefixes:
        pages.update(dict.fromkeys(GridPage.below(grid, prefix)))
    return list(pages)
