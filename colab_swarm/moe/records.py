"""Records in the DHT by which hosts announce their experts.

Each prefix of the grid has one key, the empty prefix included. Under it each host stores one signed record with its own
id as the subkey. A *row* is a prefix that lacks only the last index. Its record names the host's addresses and all its
experts there, so a peer that has read the row can call them. Under a shorter prefix the record names only the next
indices that lead to live experts, and two hosts per index are enough. So the size of a key is bounded by the grid and
not by the number of peers, and each key fits in one message. Rows of more than `PAGE` places are split over several
keys. Shorter rows share a key, as many as fit in a page, so that a search reads few keys: they form a *shelf*, named
after its first row.

To claim a vacant place, a peer announces it with the step `CLAIMED`. If several hosts announce one place, it belongs to
the first claim; see `Holding.claim`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from colab_swarm.dht.service import DHT, Found, is_sound
from colab_swarm.events import EventLog
from colab_swarm.moe.grid import MAX_SIDE, Grid, Index, Mask
from colab_swarm.net.peers import Contact, Message, PeerId, Peers
from colab_swarm.runtime import PauseGate

PAGE = 256  # places, or next indices, that share a key
MAX_ADDRESS_CHARS = 256  # of all addresses in a row's record: 256 hosts must fit under one key
CLAIMED = -1  # the step of a place that its host does not serve yet

NextIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SIDE)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Step: TypeAlias = Annotated[int, msgspec.Meta(ge=CLAIMED, le=1 << 62)]
Length: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
Shape: TypeAlias = Annotated[tuple[Length, ...], msgspec.Meta(max_length=8)]


@dataclass(frozen=True)
class ExpertServices:
    """This peer's services; ``run_id`` is part of all DHT keys, ``gate`` is closed while experts are paused."""

    peers: Peers
    dht: DHT
    events: EventLog
    rng: random.Random
    run_id: str
    gate: PauseGate = field(default_factory=PauseGate)


@dataclass(frozen=True)
class ExpertInfo:
    """A live expert, as announced in the DHT."""

    uid: str  # its name, ``prefix.u_0.….u_(d-1)``
    host: Contact  # the peer that serves it
    shape: tuple[int, ...]  # of one sample, input and output alike; -1: any length
    step: int  # optimizer steps in its weights at its host's last announcement
    expires_at: float  # when that announcement expires, swarm time, seconds

    @property
    def peer(self) -> PeerId:
        """The host's id."""
        return self.host.id


class Bans:
    """Excludes experts, each by name and host, that failed. Pure; ``now`` is monotonic seconds.

    A ban is twice as long after each failure in a row.

    Args:
        first_s: length of the first ban.
        longest_s: longest ban; without a failure for as long after a ban, the count restarts.

    Attributes:
        version: changes with each ban that begins or is lifted.
    """

    def __init__(self, first_s: float = 5.0, longest_s: float = 300.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._records: dict[tuple[str, bytes], tuple[int, float]] = {}  # failures in a row, end of the ban
        self.version = 0

    def fail(self, key: tuple[str, bytes], now: float) -> float | None:
        """Count a failure; return the length of the ban that begins, None if one is running.

        Calls that were open when a host died all fail: they count once.
        """
        self._records = {
            k: (n, until) for k, (n, until) in self._records.items() if now < until + self._longest_s
        }
        failures, until = self._records.get(key, (0, -math.inf))
        if now < until:
            return None
        seconds = min(self._longest_s, self._first_s * 2.0**failures)
        self._records[key] = min(failures + 1, 64), now + seconds
        self.version += 1
        return seconds

    def succeed(self, key: tuple[str, bytes]) -> None:
        """Forget the failures of ``key`` and lift its ban."""
        if self._records.pop(key, None) is not None:
            self.version += 1

    def banned(self, key: tuple[str, bytes], now: float) -> bool:
        """Return True while ``key`` is excluded."""
        return key in self._records and now < self._records[key][1]

    def ends(self, now: float) -> dict[tuple[str, bytes], float]:
        """Return the running bans, and when each ends."""
        return {key: until for key, (_, until) in self._records.items() if now < until}


class ExpertPlace(Message, frozen=True):
    """One expert on a shelf."""

    index: NextIndex  # its position on the shelf, counted row by row
    claimed_ms: Count  # the host's swarm time when it claimed the place, milliseconds
    step: Step  # optimizer steps in its weights; `CLAIMED`: not served yet
    shape: Shape  # of one sample; -1: any length


class RecordRow(Message, frozen=True):
    """A host's experts on a shelf, and the host's addresses."""

    addresses: tuple[str, ...]
    places: Annotated[tuple[ExpertPlace, ...], msgspec.Meta(max_length=PAGE)]


class GridBranch(Message, frozen=True):
    """Next indices under a shorter prefix that lead to experts of this host."""

    indices: Annotated[tuple[NextIndex, ...], msgspec.Meta(max_length=PAGE)]


@dataclass(frozen=True, slots=True)
class Holding:
    """One host's announcement of one next index, or of one place on a shelf."""

    host: Contact  # the announcing peer; without addresses above the rows
    index: int  # the next index, or the position on the shelf
    until: float  # when the announcement expires, on the reader's monotonic clock, seconds
    uid: str  # name of the expert, or common prefix of the experts below
    place: ExpertPlace | None = None  # on a shelf, the expert

    @property
    def served(self) -> bool:
        """False for a place that is claimed and cannot be called yet."""
        return self.place is None or self.place.step != CLAIMED

    @property
    def claim(self) -> tuple[int, PeerId]:
        """Sort key of claims to one place. The smallest wins: the earliest and, at equal times, the smaller id's."""
        return (self.place.claimed_ms if self.place else 0, self.host.id)


def is_row(grid: Grid, prefix: Index) -> bool:
    """Return True if the children of this prefix are experts."""
    return len(prefix) == len(grid.sides) - 1


def shelf_of(grid: Grid, prefix: Index) -> Index:
    """Return the first row of the shelf that contains a row; a shorter prefix is its own shelf."""
    if not is_row(grid, prefix) or not prefix:
        return prefix
    return (*prefix[:-1], prefix[-1] - prefix[-1] % _rows_together(grid))


def _rows_together(grid: Grid) -> int:
    return max(1, PAGE // grid.sides[-1])


def width(grid: Grid, shelf: Index) -> int:
    """Return the largest number of next indices or, on a shelf, of places."""
    side = grid.sides[len(shelf)]
    return side * _rows_together(grid) if is_row(grid, shelf) and shelf else side


def offset(grid: Grid, prefix: Index) -> int:
    """Return the position of a row's first place on its shelf; 0 for a shorter prefix."""
    if not is_row(grid, prefix) or not prefix:
        return 0
    return (prefix[-1] - shelf_of(grid, prefix)[-1]) * grid.sides[-1]


def position(grid: Grid, place: Index) -> int:
    """Return the position of an expert on its shelf."""
    return offset(grid, place[:-1]) + place[-1]


def _uid_at(grid: Grid, shelf: Index, index: int) -> str | None:
    """Return the name at a position of a shelf, None beyond the end of the grid."""
    if index >= width(grid, shelf):
        return None
    if not (is_row(grid, shelf) and shelf):
        return grid.uid((*shelf, index))
    row, last = divmod(index, grid.sides[-1])
    return grid.uid((*shelf[:-1], shelf[-1] + row, last)) if shelf[-1] + row < grid.sides[-2] else None


def keys(run_id: str, grid: Grid, shelf: Index) -> list[str]:
    """Return the keys that together hold all records of a shelf or shorter prefix, one per `PAGE`."""
    pages = -(-width(grid, shelf) // PAGE)
    return [f"{run_id}/experts/{grid.uid(shelf)}/{page}" for page in range(pages)]


def by_page(indices: Iterable[int]) -> dict[int, list[int]]:
    """Return sorted indices by their page."""
    return {page: [*group] for page, group in itertools.groupby(sorted(indices), lambda index: index // PAGE)}


def short_addresses(contact: Contact) -> tuple[str, ...]:
    """Return the best addresses that fit in a row's record."""
    chosen: list[str] = []
    for address in contact.addresses:
        if sum(map(len, chosen)) + len(address) <= MAX_ADDRESS_CHARS:
            chosen.append(address)
    return tuple(chosen)


def holdings(
    grid: Grid, shelf: Index, found: Mapping[bytes, Found], *, now: float, swarm_time: float
) -> dict[PeerId, list[Holding]]:
    """Decode the records of a shelf or shorter prefix, by host; invalid records of strangers are dropped.

    A host that has withdrawn everything has an empty list. ``now`` is the reader's monotonic clock at ``swarm_time``:
    only the remaining life of a record counts, so clocks that are wrong do no harm.
    """
    kind: type[RecordRow] | type[GridBranch] = RecordRow if is_row(grid, shelf) else GridBranch
    announced: dict[PeerId, list[Holding]] = {}
    for subkey, record in found.items():
        try:
            row = msgspec.convert(record.value, kind)
        except msgspec.ValidationError:
            continue
        places: list[tuple[int, ExpertPlace | None]]
        if isinstance(row, RecordRow):
            contact, places = Contact(PeerId(subkey), row.addresses), [(p.index, p) for p in row.places]
        else:
            contact, places = Contact(PeerId(subkey), ()), [(index, None) for index in row.indices]
        if record.owner == subkey and is_sound(contact):
            until = now + record.expires_at - swarm_time
            announced[contact.id] = [
                Holding(contact, index, until, uid, place)
                for index, place in places
                if (uid := _uid_at(grid, shelf, index)) is not None
            ]
    return announced


class Listing:
    """The announcements read for one prefix or shelf, by host and by index."""

    def __init__(self, by_host: dict[PeerId, list[Holding]]) -> None:
        self.by_host = by_host
        self._by_index: dict[int, list[Holding]] = {}
        for one in sorted(itertools.chain(*by_host.values()), key=lambda one: one.claim):
            self._by_index.setdefault(one.index, []).append(one)
        self._mask: Mask | None = None
        self._mask_version, self._mask_until = -1, 0.0

    def live(self, index: int, now: float) -> Iterator[Holding]:
        """Yield the announcements of an index that have not expired, the rightful owner's first."""
        return (one for one in self._by_index.get(index, ()) if one.until > now)

    def usable(self, index: int, now: float, bans: Bans) -> Holding | None:
        """Return the first announcement that can be called and is not banned, or None."""
        for one in self.live(index, now):
            if one.served and not bans.banned((one.uid, one.host.id), now):
                return one
        return None

    def mask(self, width: int, now: float, bans: Bans) -> Mask:
        """Return which of ``width`` indices are usable; computed again only after a change."""
        if self._mask is None or self._mask_version != bans.version or now >= self._mask_until:
            self._mask = np.zeros(width, np.bool_)
            self._mask[[index for index in self._by_index if self.usable(index, now, bans)]] = True
            ends = (one.until for one in itertools.chain(*self._by_index.values()) if one.until > now)
            self._mask_version = bans.version
            self._mask_until = min([*bans.ends(now).values(), *ends], default=math.inf)
        return self._mask
