"""What hosts tell the DHT about their experts.

One key per prefix of the grid, the empty one included; under it each host has one record, signed, under its own id.
Under a *row*, a prefix that lacks only the last index, the record names the host's addresses and all its experts there:
whoever has read the row can call them. Under a shorter prefix it only names the next indices that lead to live experts,
and there two hosts' word for an index is enough. So what is held under one key is bounded by the grid, never by the
size of the swarm: what is under one key must fit in one message. Rows of more than `PAGE` places spread over several
keys; of shorter ones, as many as fit in a page share a key, so that a search asks for few: they stand on one *shelf*,
called by its first row.

A peer that wants to host what nobody does says so by a place without updates (`CLAIMED`). Of several hosts of one place
it belongs to who claimed first; see `ExpertPlace.claim`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from colab_swarm.dht.service import Found, is_sound
from colab_swarm.moe.grid import MAX_SIDE, Grid, Index, Mask
from colab_swarm.net.peers import Contact, Message, PeerId


@dataclass(frozen=True)
class BanSettings:
    """How long who failed is left out.

    Attributes:
        first_s: after the first failure, seconds.
        longest_s: however often it fails; who has been quiet as long after its ban begins anew.
    """

    first_s: float = 5.0
    longest_s: float = 300.0


@dataclass
class _Record:
    failures: int
    until: float


class Bans:
    """Free of I/O; ``now`` is monotonic seconds.

    Attributes:
        version: changes with each ban that begins or is lifted.
    """

    def __init__(self, settings: BanSettings) -> None:
        self._settings = settings
        self._records: dict[Hashable, _Record] = {}
        self.version = 0

    def fail(self, who: Hashable, now: float) -> float | None:
        """``who`` failed; returns for how many seconds it is left out, None if it is already.

        Calls that were under way when a host died all fail: they count once.
        """
        longest_s = self._settings.longest_s
        self._records = {key: r for key, r in self._records.items() if now < r.until + longest_s}
        record = self._records.setdefault(who, _Record(0, -math.inf))
        if now < record.until:
            return None
        seconds = min(longest_s, self._settings.first_s * 2.0**record.failures)
        record.failures, record.until = min(record.failures + 1, 64), now + seconds
        self.version += 1
        return seconds

    def succeed(self, who: Hashable) -> None:
        """``who`` did well: its failures are forgiven."""
        if self._records.pop(who, None) is not None:
            self.version += 1

    def banned(self, who: Hashable, now: float) -> bool:
        """Whether ``who`` is left out."""
        return who in self._records and now < self._records[who].until

    def ends(self, now: float) -> dict[Hashable, float]:
        """Who is left out, and until when."""
        return {who: record.until for who, record in self._records.items() if now < record.until}

    def next_end(self, now: float) -> float:
        """When the next ban ends; infinite if there is none."""
        return min(self.ends(now).values(), default=math.inf)


PAGE = 256

"""Places, or next indices, that share a key."""

MAX_ADDRESS_CHARS = 256

"""Of all addresses in a row's record: 256 hosts must fit under one key."""

CLAIMED = -1

"""The step of a place that its host does not serve yet."""

NextIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SIDE)]

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]

Step: TypeAlias = Annotated[int, msgspec.Meta(ge=CLAIMED, le=1 << 62)]

Length: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]

Shape: TypeAlias = Annotated[tuple[Length, ...], msgspec.Meta(max_length=8)]


class ExpertPlace(Message, frozen=True):
    """One expert on a shelf.

    Attributes:
        index: where it stands on its shelf, counted row by row.
        claimed_ms: the host's swarm time when it claimed the place, milliseconds.
        step: updates in its weights; `CLAIMED`: not served yet.
        shape: of one sample; -1: any length.
    """

    index: NextIndex
    claimed_ms: Count
    step: Step
    shape: Shape


class RecordRow(Message, frozen=True):
    """A host's experts on a shelf, and where the host can be dialled."""

    addresses: tuple[str, ...]
    places: Annotated[tuple[ExpertPlace, ...], msgspec.Meta(max_length=PAGE)]


class GridBranch(Message, frozen=True):
    """Next indices under a shorter prefix that lead to experts of this host."""

    indices: Annotated[tuple[NextIndex, ...], msgspec.Meta(max_length=PAGE)]


R = TypeVar("R", RecordRow, GridBranch)


@dataclass(frozen=True, slots=True)
class Holding:
    """One host's word for one next index, or for one place on a shelf.

    Attributes:
        host: who said so; without addresses above the rows.
        index: the next index, or that of the place.
        until: when the word ends, on the reader's monotonic clock, seconds.
        uid: of the expert, or of all that begin so.
        place: on a shelf, the expert.
    """

    host: Contact
    index: int
    until: float
    uid: str
    place: ExpertPlace | None = None

    @property
    def served(self) -> bool:
        """Whether there is something to call, not only a claim."""
        return self.place is None or self.place.step != CLAIMED

    @property
    def claim(self) -> tuple[int, PeerId]:
        """The least of all claims of a place is the rightful one: the first and, told at once, the smaller id's."""
        return (self.place.claimed_ms if self.place else 0, self.host.id)


def is_row(grid: Grid, prefix: Index) -> bool:
    """Whether the experts themselves are the children of this prefix."""
    return len(prefix) == len(grid.sides) - 1


def shelf_of(grid: Grid, prefix: Index) -> Index:
    """The first row of the shelf on which a row stands; a shorter prefix stands alone."""
    if not is_row(grid, prefix) or not prefix:
        return prefix
    return (*prefix[:-1], prefix[-1] - prefix[-1] % _rows_together(grid))


def _rows_together(grid: Grid) -> int:
    """How many rows a shelf has, where there are so many that differ in their last index only."""
    return max(1, PAGE // grid.sides[-1])


def width(grid: Grid, shelf: Index) -> int:
    """How many next indices or, on a shelf, places there are at most."""
    side = grid.sides[len(shelf)]
    return side * _rows_together(grid) if is_row(grid, shelf) and shelf else side


def offset(grid: Grid, prefix: Index) -> int:
    """The index of a row's first place on its shelf; 0 for a shorter prefix."""
    return (
        (prefix[-1] - shelf_of(grid, prefix)[-1]) * grid.sides[-1] if is_row(grid, prefix) and prefix else 0
    )


def position(grid: Grid, place: Index) -> int:
    """The index of an expert on its shelf."""
    return offset(grid, place[:-1]) + place[-1]


def _uid_at(grid: Grid, shelf: Index, index: int) -> str | None:
    """The name of what is there; None if the grid ends before."""
    if index >= width(grid, shelf):
        return None
    if not (is_row(grid, shelf) and shelf):
        return grid.uid((*shelf, index))
    row, last = divmod(index, grid.sides[-1])
    return grid.uid((*shelf[:-1], shelf[-1] + row, last)) if shelf[-1] + row < grid.sides[-2] else None


def keys(run_id: str, grid: Grid, shelf: Index) -> list[str]:
    """The keys whose records together tell of all that a shelf or a shorter prefix has: one per `PAGE` of it."""
    pages = -(-width(grid, shelf) // PAGE)
    return [f"{run_id}/experts/{grid.uid(shelf)}/{page}" for page in range(pages)]


def by_page(indices: Iterable[int]) -> dict[int, list[int]]:
    """Indices by the page they are on, in order."""
    pages: dict[int, list[int]] = {}
    for index in sorted(indices):
        pages.setdefault(index // PAGE, []).append(index)
    return pages


def short_addresses(contact: Contact) -> tuple[str, ...]:
    """The best addresses that fit in a row's record."""
    chosen: list[str] = []
    for address in contact.addresses:
        if sum(map(len, chosen)) + len(address) <= MAX_ADDRESS_CHARS:
            chosen.append(address)
    return tuple(chosen)


def holdings(
    grid: Grid, shelf: Index, found: Mapping[bytes, Found], *, now: float, swarm_time: float
) -> dict[PeerId, list[Holding]]:
    """What the records of a shelf or a shorter prefix say, host by host; strangers' nonsense is left out.

    A host that has withdrawn all is there with an empty list. ``now`` is the reader's monotonic clock when it read at
    ``swarm_time``: what skewed clocks say of the end of a record is not believed, only how long it has left.
    """
    told: dict[PeerId, list[Holding]] = {}
    for subkey, record in found.items():
        said = _decode(record.value, RecordRow) if is_row(grid, shelf) else _decode(record.value, GridBranch)
        contact = Contact(PeerId(subkey), said.addresses if isinstance(said, RecordRow) else ())
        if said is None or record.owner != subkey or not is_sound(contact):
            continue
        until = now + record.expires_at - swarm_time
        places = said.places if isinstance(said, RecordRow) else ()
        words = (
            [(place.index, place) for place in places]
            if isinstance(said, RecordRow)
            else [(i, None) for i in said.indices]
        )
        told[contact.id] = [
            Holding(contact, index, until, uid, place)
            for index, place in words
            if (uid := _uid_at(grid, shelf, index)) is not None
        ]
    return told


def _decode(value: Any, kind: type[R]) -> R | None:
    """A stranger's record; None if it is none."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None


class Listing:
    """What was read of one prefix or shelf: each host's words, and who is believed for each index."""

    def __init__(self, words: dict[PeerId, list[Holding]]) -> None:
        self.words = words
        self._by_index: dict[int, list[Holding]] = {}
        for word in sorted(itertools.chain(*words.values()), key=lambda word: word.claim):
            self._by_index.setdefault(word.index, []).append(word)
        self._mask: Mask | None = None
        self._mask_version, self._mask_until = -1, 0.0

    def live(self, index: int, now: float) -> Iterator[Holding]:
        """Hosts' words for an index that still hold, the rightful one's first."""
        return (word for word in self._by_index.get(index, ()) if word.until > now)

    def usable(self, index: int, now: float, bans: Bans) -> Holding | None:
        """Who can be called for an index: the rightful one of those that are not banned."""
        for word in self.live(index, now):
            if word.served and not bans.banned((word.uid, word.host.id), now):
                return word
        return None

    def mask(self, width: int, now: float, bans: Bans) -> Mask:
        """The usable ones of ``width`` indices; worked out anew only when something has changed."""
        if self._mask is None or self._mask_version != bans.version or now >= self._mask_until:
            self._mask = np.zeros(width, np.bool_)
            self._mask[[index for index in self._by_index if self.usable(index, now, bans)]] = True
            ends = (word.until for word in itertools.chain(*self._by_index.values()) if word.until > now)
            self._mask_version = bans.version
            self._mask_until = min([bans.next_end(now), *ends], default=math.inf)
        return self._mask
