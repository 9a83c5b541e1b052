"""The grid of expert names ``prefix.u_0.….u_(d-1)``, and the beam search for the best live experts. Pure.

The search is SelectExperts of Learning@home (section 3.1, Algorithm 1) for a whole batch. It is optimistic: below a
prefix that has not been looked up, everything counts as live. It runs through all dimensions on that guess and returns
the unknown prefixes it met. The caller looks them all up at once and searches again, until none is unknown. In a
well-filled grid the first guess is right, and all look-ups of a search are one wait instead of one per dimension.

Axis letters: N samples, B prefixes in a sample's beam, M indices of a dimension, U different prefixes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from colab_swarm.tensors.codecs import Floats

Index: TypeAlias = tuple[int, ...]
"""A point of the grid, or its first coordinates."""
Mask: TypeAlias = npt.NDArray[np.bool_]
_Ints: TypeAlias = npt.NDArray[np.int64]
_Doubles: TypeAlias = npt.NDArray[np.float64]
MAX_DIMENSIONS = 4
MAX_SIDE = 4096
MAX_NAME_CHARS = 128
_HUGE = 1e300
_NONE = -1  # stands for no prefix where a beam is not full
_PREFIX = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z_-][A-Za-z0-9_-]*)*")


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
        For each sample its experts, best first, fewer if fewer are live; and the prefixes to look up before this result
        is valid.
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
        places = {prefix: u for u, prefix in enumerate(prefixes)} if barren else {}
        for child in barren:
            if child[:-1] in places:
                alive_UM[places[child[:-1]], child[-1]] = False
        barren |= {prefixes[u] for u in np.flatnonzero(~alive_UM[:-1].any(axis=1)) if prefixes[u]}
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
