"""Names of experts on a grid ``prefix.u_0.….u_(d-1)``, their records in the DHT, and the beam search for the best.

Records. Each prefix of the grid has one key, the empty prefix included. Under it each host stores
one signed record with its own id as the subkey. A *row* is a prefix that lacks only the last index.
Its record names the host's addresses and all its experts there, so a peer that has read the row can
call them. Under a shorter prefix the record names only the next indices that lead to live experts,
and two hosts per index are enough. So the size of a key is bounded by the grid and not by the
number of peers, and each key fits in one message. Rows of more than `PAGE` places are split over
several keys. Shorter rows share a key, as many as fit in a page, so that a search reads few keys:
they form a *shelf*, named after its first row.

To claim a vacant place, a peer announces it with the step `CLAIMED`. If several hosts announce one
place, it belongs to the first claim; see `Holding.claim`.

Search. It is SelectExperts of Learning@home (section 3.1, Algorithm 1) for a whole batch. Below a
prefix that has not been looked up, everything counts as live. The search returns the unknown
prefixes it met; the caller looks them all up at once and searches again, until none is unknown. In
a well-filled grid all look-ups of a search are one wait.

Axis letters: N samples, B prefixes in a sample's beam, M indices of a dimension, U different prefixes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from colab_swarm.dht.service import Found, is_sound
from colab_swarm.net.peers import Contact, LeftOut, Message, PeerId
from colab_swarm.tensors.codecs import Floats

Index: TypeAlias = tuple[int, ...]  # A point of the grid, or its first coordinates
Mask: TypeAlias = npt.NDArray[np.bool_]
_Ints: TypeAlias = npt.NDArray[np.int64]
_Doubles: TypeAlias = npt.NDArray[np.float64]
MAX_DIMENSIONS = 4
MAX_SIDE = 4096
MAX_NAME_CHARS = 128
_HUGE = 1e300
_NONE = -1  # stands for no prefix where a beam is not full
_PREFIX = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z_-][A-Za-z0-9_-]*)*")
PAGE = 256  # places, or next indices, that share a key
MAX_ADDRESS_CHARS = 256  # of all addresses in a row's record: 256 hosts must fit under one key
FIRST_BAN_S, LONGEST_BAN_S = 5.0, 300.0
Bans: TypeAlias = LeftOut[tuple[str, bytes]]
"""Experts that failed this peer, each by name and host."""
CLAIMED = -1  # the step of a place that its host does not serve yet

NextIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SIDE)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Step: TypeAlias = Annotated[int, msgspec.Meta(ge=CLAIMED, le=1 << 62)]
Length: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
Shape: TypeAlias = Annotated[tuple[Length, ...], msgspec.Meta(max_length=8)]


@dataclass(frozen=True)
class Grid:
    """All places for experts of one kind.

    Attributes:
        prefix: names the kind within the run: letters, digits, ``_``, ``-``; no digit after a dot.
        sides: number of indices of each dimension.
    """

    prefix: str
    sides: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.prefix) > MAX_NAME_CHARS or not _PREFIX.fullmatch(self.prefix):
            raise ValueError(f"{self.prefix!r} names no experts: use letters, digits, _ and -, such as 'ffn'")
        limits = f"a grid has 1 to {MAX_DIMENSIONS} dimensions of 1 to {MAX_SIDE} indices"
        if not 1 <= len(self.sides) <= MAX_DIMENSIONS or not all(
            1 <= side <= MAX_SIDE for side in self.sides
        ):
            raise ValueError(f"{limits}, got {self.sides}")

    @classmethod
    def of(cls, prefix: str, sides: Sequence[int]) -> Grid:
        """Return the grid with these sides."""
        return cls(prefix, tuple(int(side) for side in sides))

    @property
    def size(self) -> int:
        """Number of places."""
        return math.prod(self.sides)

    def __iter__(self) -> Iterator[Index]:
        return itertools.product(*map(range, self.sides))

    def uid(self, index: Index) -> str:
        """Return the name of an expert or, with fewer coordinates, the common prefix of the names below."""
        return ".".join([self.prefix, *map(str, index)])

    def index(self, uid: str) -> Index:
        """Return the place of an expert. Raises ValueError if the name is not in this grid."""
        head, *tail = uid.rsplit(".", len(self.sides))
        within = len(tail) == len(self.sides) and all(
            part.isascii() and part.isdigit() and str(int(part)) == part and int(part) < side
            for part, side in zip(tail, self.sides, strict=True)
        )
        if head != self.prefix or not within:
            raise ValueError(f"{uid!r} is not an expert of {self}")
        return tuple(map(int, tail))

    def contains(self, uid: str) -> bool:
        """Return True if `index` accepts this name."""
        try:
            return bool(self.index(uid))
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"{self.prefix}[{' x '.join(map(str, self.sides))}]"


@dataclass(frozen=True)
class ExpertInfo:
    """A live expert, as announced in the DHT."""

    uid: str  # its name, ``prefix.u_0.….u_(d-1)``
    host: Contact  # the peer that serves it
    shape: tuple[int, ...]  # of one sample, input and output alike; -1: any length
    step: int  # optimizer steps in its weights at its host's last announcement
    expires_at: float  # when that announcement expires, swarm time, seconds


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
    grid: Grid, shelf: Index, found: Iterable[tuple[bytes, Found]], *, now: float, swarm_time: float
) -> dict[PeerId, list[Holding]]:
    """Decode the records of a shelf or shorter prefix, by host; invalid records of strangers are dropped.

    A host that has withdrawn everything has an empty list. ``now`` is the reader's monotonic clock at ``swarm_time``:
    only the remaining life of a record counts, so clocks that are wrong do no harm.
    """
    announced: dict[PeerId, list[Holding]] = {}
    for subkey, record in found:
        try:
            contact, places = _decoded(PeerId(subkey), record.value, is_row(grid, shelf))
        except msgspec.ValidationError:
            continue
        if record.owner == subkey and is_sound(contact):
            until = now + record.expires_at - swarm_time
            held = announced.setdefault(contact.id, [])
            for index, place in places:
                if (uid := _uid_at(grid, shelf, index)) is not None:
                    held.append(Holding(contact, index, until, uid, place))
    return announced


def _decoded(host: PeerId, value: Any, row: bool) -> tuple[Contact, list[tuple[int, ExpertPlace | None]]]:
    if not row:
        return Contact(host, ()), [(index, None) for index in msgspec.convert(value, GridBranch).indices]
    record = msgspec.convert(value, RecordRow)
    return Contact(host, record.addresses), [(place.index, place) for place in record.places]


class Listing:
    """The announcements read for one prefix or shelf, by host and by index."""

    def __init__(self, by_host: dict[PeerId, list[Holding]]) -> None:
        self.by_host = by_host
        self._by_index: dict[int, list[Holding]] = {}
        for one in sorted(itertools.chain(*by_host.values()), key=lambda one: one.claim):
            self._by_index.setdefault(one.index, []).append(one)
        self._mask: Mask | None = None
        self._mask_version, self._mask_until = -1, 0.0

    def served(self) -> set[str]:
        """Return the names, or the common prefixes, of what can be called."""
        return {one.uid for one in itertools.chain(*self.by_host.values()) if one.served}

    def remaining(self, now: float) -> dict[PeerId, list[Holding]]:
        """Return the hosts of which an announcement has not expired."""
        return {host: held for host, held in self.by_host.items() if any(one.until > now for one in held)}

    def live(self, index: int, now: float) -> Iterator[Holding]:
        """Yield the announcements of an index that have not expired, the rightful owner's first."""
        return (one for one in self._by_index.get(index, ()) if one.until > now)

    def usable(self, index: int, now: float, bans: Bans) -> Holding | None:
        """Return the first announcement that can be called and is not banned, or None."""
        served = (one for one in self.live(index, now) if one.served)
        return next((one for one in served if not bans.holds((one.uid, one.host.id), now)), None)

    def mask(self, width: int, now: float, bans: Bans) -> Mask:
        """Return which of ``width`` indices are usable; computed again only after a change."""
        if self._mask is None or self._mask_version != bans.version or now >= self._mask_until:
            self._mask = np.zeros(width, np.bool_)
            self._mask[[index for index in self._by_index if self.usable(index, now, bans)]] = True
            ends = (one.until for one in itertools.chain(*self._by_index.values()) if one.until > now)
            self._mask_version = bans.version
            self._mask_until = min([*bans.ends(now).values(), *ends], default=math.inf)
        return self._mask


def beam_search(
    scores: Sequence[Floats], k: int, children: Callable[[Index], Mask | None]
) -> tuple[list[list[Index]], list[Index]]:
    """Find the ``k`` best live experts of each sample; an expert's score is the sum over its indices.

    After each dimension the search keeps the ``k`` best live prefixes. It skips a prefix that is announced as live but
    has no live child, in favour of the next best. Ties go to the smaller index. NaN is the worst score.

    Args:
        scores: for each dimension i an array (N, sides[i]).
        k: experts per sample.
        children: returns the live next indices of a prefix as a mask (M,), read-only; None: not looked up yet.

    Returns:
        For each sample its experts, best first; and the prefixes to look up before this result is valid.
    """
    clean = [np.nan_to_num(s.astype(np.float64), nan=-_HUGE, posinf=_HUGE, neginf=-_HUGE) for s in scores]
    barren: set[Index] = set()
    while True:
        known_barren, unknown = len(barren), set[Index]()
        best = _descend(clean, k, children, barren, unknown)
        if len(barren) == known_barren:
            return best, sorted(unknown)


def _descend(
    scores: list[_Doubles],
    k: int,
    children: Callable[[Index], Mask | None],
    barren: set[Index],
    unknown: set[Index],
) -> list[list[Index]]:
    """Walk once from the empty prefix to the experts; add the prefixes that are found barren or unknown."""
    samples = len(scores[0])
    prefixes: list[Index] = [()]
    beam_NB, totals_NB = np.zeros((samples, 1), np.int64), np.zeros((samples, 1))
    for i, scores_NM in enumerate(scores):
        side = scores_NM.shape[1]
        alive_UM = np.zeros((len(prefixes) + 1, side), np.bool_)  # the last, empty row is that of `_NONE`
        for u, prefix in enumerate(prefixes):
            mask = children(prefix)
            if mask is None:
                unknown.add(prefix)
            alive_UM[u] = True if mask is None else mask
        _bury(alive_UM, prefixes, barren)
        sums_NBM = np.where(alive_UM[beam_NB], totals_NB[:, :, None] + scores_NM[:, None, :], -np.inf)
        flat = sums_NBM.reshape(samples, beam_NB.shape[1] * side)
        chosen = _best(flat, k)
        if (
            i < len(scores) - 1
        ):  # ties go to the smaller index, so the next iteration needs its columns in order
            chosen = np.sort(np.where(chosen == _NONE, flat.shape[1], chosen), axis=1)
            chosen[chosen == flat.shape[1]] = _NONE
        totals_NB = np.where(chosen == _NONE, -np.inf, np.take_along_axis(flat, chosen, axis=1))
        prefixes, beam_NB = _extend(prefixes, beam_NB, chosen, side)
    return [[prefixes[u] for u in row if u != _NONE] for row in beam_NB.tolist()]


def _bury(alive_UM: Mask, prefixes: list[Index], barren: set[Index]) -> None:
    """Mark barren children as dead, then add the prefixes without a live child to the barren ones."""
    places = {prefix: u for u, prefix in enumerate(prefixes)} if barren else {}
    for child in barren:
        if child[:-1] in places:
            alive_UM[places[child[:-1]], child[-1]] = False
    barren |= {prefixes[u] for u in np.flatnonzero(~alive_UM[:-1].any(axis=1)) if prefixes[u]}


def _best(values: _Doubles, count: int) -> _Ints:
    """Return the columns of each row's ``count`` largest values, largest first, ties left; `_NONE` for -inf."""
    rows_total, columns_total = values.shape
    worthy = values > -np.inf
    if columns_total > count:
        threshold = np.partition(values, columns_total - count, axis=1)[:, columns_total - count]
        worthy &= values >= threshold[:, None]
    rows, columns = np.nonzero(worthy)
    order = np.lexsort((columns, -values[rows, columns], rows))
    rows, columns = rows[order], columns[order]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    chosen = np.full((rows_total, count), _NONE, np.int64)
    kept = rank < count
    chosen[rows[kept], rank[kept]] = columns[kept]
    return chosen


def _extend(prefixes: list[Index], beam_NB: _Ints, chosen: _Ints, side: int) -> tuple[list[Index], _Ints]:
    """Return the chosen prefixes, one index longer: the different ones in order, and each sample's positions."""
    parents = np.take_along_axis(beam_NB, np.maximum(chosen, 0) // side, axis=1)
    codes = np.where(chosen == _NONE, _NONE, parents * side + chosen % side)
    unique, beam = np.unique(codes, return_inverse=True)
    beam = beam.reshape(codes.shape)
    if len(unique) and unique[0] == _NONE:
        unique, beam = unique[1:], beam - 1
    return [(*prefixes[code // side], code % side) for code in unique.tolist()], beam
