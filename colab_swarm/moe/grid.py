"""Names of experts on a grid ``prefix.u_0.….u_(d-1)``, their records, and the beam search.

Records. The grid numbers its experts row by row, and also its prefixes of each length. `PAGE` neighbours form a page,
which has one key in the DHT. Under this key each host stores one signed record. In a page of experts, the record has
the host's addresses and experts. In a page of prefixes, the record has the prefixes that lead to the host's live
experts. If two other hosts announce a prefix, a host need not announce it too. `CLAIMED` is the step of a place that a
host has claimed but does not serve yet.

Search. The search is SelectExperts of Learning@home (section 3.1, Algorithm 1) for a whole batch. Below a
prefix that was not looked up, the search treats all experts as live. The caller then looks up all unknown
prefixes of the search together and searches again, until no prefix is unknown.

Axis letters: N samples, B prefixes in a beam, M indices of a dimension, U different prefixes.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from colab_swarm.dht.service import Found, is_sound
from colab_swarm.errors import require
from colab_swarm.net.patience import LeftOut
from colab_swarm.net.peers import Contact, Message, PeerId
from colab_swarm.tensors.codecs import Floats

Index: TypeAlias = tuple[int, ...]  # A point of the grid, or its first coordinates
Mask: TypeAlias = npt.NDArray[np.bool_]
_Ints: TypeAlias = npt.NDArray[np.int64]
_Doubles: TypeAlias = npt.NDArray[np.float64]
MAX_DIMENSIONS = 4
MAX_SIDE = 4096
MAX_NAME_CHARS = 128
MAX_HOLDERS = 8  # most peers that hold the saves of an expert
_HUGE = 1e300
_NONE = -1  # stands for no prefix if a beam is not full
_PREFIX = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z_-][A-Za-z0-9_-]*)*")
PAGE = 256  # number of places, or prefixes, that share a key in the DHT
MAX_ADDRESS_CHARS = 256  # of all addresses in a record, because 256 hosts must fit under one key
Bans: TypeAlias = LeftOut[
    tuple[str, bytes]
]  # experts that failed when this peer called them, by name and host
CLAIMED = -1  # the step of a place that its host does not serve yet

Length: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]


@dataclass(frozen=True)
class Grid:
    """All places for experts of one kind. A place is a point of the grid, and has room for one expert."""

    prefix: str  # name of the kind within the run: letters, digits, ``_``, ``-``; no digit after a dot
    sides: tuple[int, ...]  # number of indices along each dimension

    def __post_init__(self) -> None:
        text = f"{self.prefix!r} names no experts: use letters, digits, _ and -, such as 'ffn'"
        require(len(self.prefix) <= MAX_NAME_CHARS and _PREFIX.fullmatch(self.prefix), text)
        require(
            1 <= len(self.sides) <= MAX_DIMENSIONS and all(1 <= side <= MAX_SIDE for side in self.sides),
            f"a grid has 1 to {MAX_DIMENSIONS} dimensions of 1 to {MAX_SIDE} indices, got {self.sides}",
        )

    @property
    def size(self) -> int:
        return math.prod(self.sides)

    def __iter__(self) -> Iterator[Index]:
        return itertools.product(*map(range, self.sides))

    def uid(self, index: Index) -> str:
        """Return the name of an expert or, if ``index`` has fewer coordinates, the prefix of its experts' names."""
        return ".".join([self.prefix, *map(str, index)])

    def index(self, uid: str) -> Index:
        """Return the place of an expert; raise `ValueError` if the name is not in this grid."""
        head, *tail = uid.rsplit(".", len(self.sides))
        if head != self.prefix or len(tail) != len(self.sides):
            raise ValueError(f"{uid!r} is not an expert of {self}")
        for part, side in zip(tail, self.sides, strict=True):
            is_number = part.isascii() and part.isdigit() and str(int(part)) == part
            if not (is_number and int(part) < side):
                raise ValueError(f"{uid!r} is not an expert of {self}")
        return tuple(map(int, tail))

    def contains(self, uid: str) -> bool:
        try:
            return bool(self.index(uid))
        except ValueError:
            return False

    def number(self, index: Index) -> int:
        """Return the number of an expert or prefix among all entries of the same length, counted row by row."""
        number = 0
        for position, side in zip(index, self.sides, strict=False):
            number = number * side + position
        return number

    def __str__(self) -> str:
        return f"{self.prefix}[{' x '.join(map(str, self.sides))}]"


class GridPage(NamedTuple):
    """`PAGE` neighbouring experts, or prefixes of one length, whose records share a key in the DHT."""

    grid: Grid
    depth: int  # number of coordinates of each entry; an expert has all coordinates of the grid
    number: int

    @classmethod
    def of(cls, grid: Grid, index: Index) -> "GridPage":
        return cls(grid, len(index), grid.number(index) // PAGE)

    @classmethod
    def below(cls, grid: Grid, prefix: Index) -> "list[GridPage]":
        """Return the pages with the children of a prefix."""
        side = grid.sides[len(prefix)]
        first = grid.number(prefix) * side
        numbers = range(first // PAGE, (first + side - 1) // PAGE + 1)
        return [cls(grid, len(prefix) + 1, number) for number in numbers]

    def key(self, run_id: str) -> str:
        sides = "x".join(map(str, self.grid.sides))
        return f"{run_id}/experts/{self.grid.prefix}/{sides}/{self.depth}/{self.number}"

    def index_at(self, position: int) -> Index | None:
        """Return the expert or prefix at a position of the page; beyond the grid's end, return None."""
        sides = self.grid.sides[: self.depth]
        number = self.number * PAGE + position
        if number < math.prod(sides):
            return tuple(map(int, np.unravel_index(number, sides)))
        return None

    def indices(self, positions: Iterable[int]) -> set[Index]:
        """Return the experts or prefixes at these positions; ignore positions beyond the grid's end."""
        return {index for index in map(self.index_at, positions) if index is not None}


@dataclass(frozen=True)
class ExpertInfo:
    """One host's announcement of an expert or, in a page of prefixes, of a prefix that leads to the host's experts."""

    uid: str  # its name, ``prefix.u_0.….u_(d-1)``
    host: Contact  # the peer that serves it; without addresses in a page of prefixes
    shape: tuple[int, ...]  # of one sample, both input and output; -1: any length
    step: int  # number of optimizer steps at the announcement; `CLAIMED`: it cannot be called yet
    until: float  # when the announcement expires, on the reader's monotonic clock, seconds
    claimed_ms: int = 0  # the host's swarm time when it claimed the place, milliseconds

    @property
    def claim(self) -> tuple[int, PeerId]:
        """Sort key of the claims to one place: the peer with the smallest key hosts the expert."""
        return self.claimed_ms, self.host.id


class ExpertPlace(Message, frozen=True):
    """One expert of a page or, in a page of prefixes, one prefix that leads to experts."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=PAGE)]  # in its page
    # the host's swarm time when it claimed the place, milliseconds
    claimed_ms: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    # number of the expert's optimizer steps; `CLAIMED`: not served yet
    step: Annotated[int, msgspec.Meta(ge=CLAIMED, le=1 << 62)] = 0
    shape: Annotated[tuple[Length, ...], msgspec.Meta(max_length=8)] = ()  # of one sample; -1: any length


class GridRecord(Message, frozen=True):
    """A host's places in a page, and the host's addresses. In a page of prefixes, there are no addresses."""

    addresses: tuple[str, ...]
    places: Annotated[tuple[ExpertPlace, ...], msgspec.Meta(max_length=PAGE)]


def short_addresses(contact: Contact) -> tuple[str, ...]:
    chosen: list[str] = []
    for address in contact.addresses:
        if sum(map(len, chosen)) + len(address) <= MAX_ADDRESS_CHARS:
            chosen.append(address)
    return tuple(chosen)


Announced: TypeAlias = dict[PeerId, dict[int, ExpertInfo]]  # what hosts announce in a page, by position


def announced(
    page: GridPage, found: Iterable[tuple[PeerId, Found]], *, now: float, swarm_time: float
) -> Announced:
    """Decode the valid records of a page. ``now`` is the monotonic clock at the moment ``swarm_time``."""
    by_host: Announced = {}
    for peer, record in found:
        try:
            row = msgspec.convert(record.value, GridRecord)
        except msgspec.ValidationError:
            continue
        contact = Contact(peer, row.addresses)
        if not is_sound(contact):
            continue
        until = now + record.expires_at - swarm_time
        infos = by_host.setdefault(peer, {})
        for place in row.places:
            index = page.index_at(place.index)
            if index is not None:
                uid = page.grid.uid(index)
                infos[place.index] = ExpertInfo(
                    uid, contact, place.shape, place.step, until, place.claimed_ms
                )
    return by_host


class Listing:
    def __init__(self, by_host: Announced) -> None:
        self.by_host = by_host
        self._by_position: dict[int, list[ExpertInfo]] = {}
        for infos in by_host.values():
            for position, info in infos.items():
                self._by_position.setdefault(position, []).append(info)
        for claims in self._by_position.values():
            claims.sort(key=lambda info: info.claim)
        self._mask: Mask = np.zeros(PAGE, np.bool_)
        # -1: not computed yet
        self._mask_version = -1
        self._mask_until = 0.0

    def taken(self, me: PeerId, now: float) -> set[int]:
        """Return the positions that peers other than ``me`` hold or claim."""
        positions: set[int] = set()
        for host, infos in self.by_host.items():
            if host != me:
                positions.update(position for position, info in infos.items() if info.until > now)
        return positions

    def live(self, position: int, now: float) -> Iterator[ExpertInfo]:
        """Yield the announcements of a position that have not expired, the earliest claim first."""
        for info in self._by_position.get(position, ()):
            if info.until > now:
                yield info

    def usable(self, position: int, now: float, bans: Bans) -> ExpertInfo | None:
        """Return the first announcement whose expert can be called and is not banned, or None."""
        for info in self.live(position, now):
            if info.step != CLAIMED and not bans.holds((info.uid, info.host.id), now):
                return info
        return None

    def mask(self, now: float, bans: Bans) -> Mask:
        """Return a mask of the page's usable positions. Compute it again only after a change."""
        if self._mask_version != bans.version or now >= self._mask_until:
            self._mask = np.zeros(PAGE, np.bool_)
            ends = [*bans.ends(now).values()]
            for position in self._by_position:
                self._mask[position] = self.usable(position, now, bans) is not None
                ends += [info.until for info in self.live(position, now)]
            self._mask_version = bans.version
            self._mask_until = min(ends, default=math.inf)
        return self._mask


def beam_search(
    scores: Sequence[Floats], k: int, children: Callable[[Index], Mask | None]
) -> tuple[list[list[Index]], list[Index]]:
    """Find the ``k`` best live experts of each sample, best first.

    Also returns the prefixes that the caller must look up. If there are such prefixes, the experts are not valid yet.
    After each dimension, the search keeps the ``k`` best live prefixes. It drops a prefix that turns out to have no
    live child. If scores are equal, the smaller index wins. NaN is the worst score. ``scores`` has an array
    (N, sides[i]) for each dimension i. An expert's score is the sum of the scores at its indices. ``children`` returns
    the live next indices of a prefix as a read-only mask (M,), or None if the prefix was not looked up yet.
    """
    clean = [np.nan_to_num(s.astype(np.float64), nan=-_HUGE, posinf=_HUGE, neginf=-_HUGE) for s in scores]
    # for each prefix, the next indices that lead to no live expert
    barren: dict[Index, set[int]] = {}
    grown = True
    while grown:
        grown, unknown, experts, beam_NB = _descend(clean, k, children, barren)
    best = []
    for row in beam_NB.tolist():
        best.append([experts[u] for u in row if u != _NONE])
    return best, sorted(unknown)


def _descend(
    scores: list[_Doubles], k: int, children: Callable[[Index], Mask | None], barren: dict[Index, set[int]]
) -> tuple[bool, set[Index], list[Index], _Ints]:
    """Search once through all dimensions.

    Returns whether ``barren`` has grown, the unknown prefixes, the experts found, and each sample's best experts.
    """
    samples = len(scores[0])
    unknown = set[Index]()
    grown = False
    prefixes: list[Index] = [()]
    beam_NB: _Ints = np.zeros((samples, 1), np.int64)
    totals_NB = np.zeros((samples, 1))
    for i, scores_NM in enumerate(scores):
        side = scores_NM.shape[1]
        alive_UM = np.zeros(
            (len(prefixes) + 1, side), np.bool_
        )  # the last row is empty and belongs to `_NONE`
        for u, prefix in enumerate(prefixes):
            mask = children(prefix)
            if mask is None:
                unknown.add(prefix)
            alive_UM[u] = True if mask is None else mask
            if prefix in barren:
                alive_UM[u, [*barren[prefix]]] = False
        for u in np.flatnonzero(~alive_UM[:-1].any(axis=1)).tolist() if i else ():
            barren.setdefault(prefixes[u][:-1], set()).add(prefixes[u][-1])
            grown = True
        sums_NBM = np.where(alive_UM[beam_NB], totals_NB[:, :, None] + scores_NM[:, None, :], -np.inf)
        chosen_NB, totals_NB = _best(sums_NBM, beam_NB, k)
        codes_U, places = np.unique(chosen_NB, return_inverse=True)
        empty = int((chosen_NB == _NONE).any())  # if `_NONE` occurs, it is the first code and gets place -1
        beam_NB = places.reshape(chosen_NB.shape) - empty
        prefixes = [(*prefixes[code // side], code % side) for code in codes_U[empty:].tolist()]
    return grown, unknown, prefixes, beam_NB


def _best(sums_NBM: _Doubles, beam_NB: _Ints, count: int) -> tuple[_Ints, _Doubles]:
    """Return the codes and values of each sample's ``count`` largest sums. A code is M * prefix + index, or `_NONE`."""
    samples, width, side = sums_NBM.shape
    values = sums_NBM.reshape(samples, width * side)
    worthy = values > -np.inf
    if width * side > count:
        threshold = np.partition(values, width * side - count, axis=1)[:, width * side - count]
        worthy &= values >= threshold[:, None]
    rows, columns = np.nonzero(worthy)
    codes = beam_NB[rows, columns // side] * side + columns % side
    sums = values[rows, columns]
    order = np.lexsort((codes, -sums, rows))
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    order = order[rank < count]
    rank = rank[rank < count]
    chosen = np.full((samples, count), _NONE, np.int64)
    largest = np.full((samples, count), -np.inf)
    chosen[rows[order], rank] = codes[order]
    largest[rows[order], rank] = sums[order]
    return chosen, largest
