"""Names of experts: points of a grid, written ``prefix.u_0.….u_(d-1)`` (Learning@home, section 3.1)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Index: TypeAlias = tuple[int, ...]
"""A point of the grid, or its first coordinates."""

MAX_DIMENSIONS = 4
MAX_SIDE = 4096
MAX_NAME_CHARS = 128
_PREFIX = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z_-][A-Za-z0-9_-]*)*")


@dataclass(frozen=True)
class Grid:
    """All places for experts of one kind.

    Attributes:
        prefix: names the kind within the run: letters, digits, ``_``, ``-``; after a dot no digit.
        sides: how many indices each dimension has.
    """

    prefix: str
    sides: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.prefix) > MAX_NAME_CHARS or not _PREFIX.fullmatch(self.prefix):
            raise ValueError(f"{self.prefix!r} names no experts: use letters, digits, _ and -, such as 'ffn'")
        if not 1 <= len(self.sides) <= MAX_DIMENSIONS or not all(
            1 <= side <= MAX_SIDE for side in self.sides
        ):
            raise ValueError(
                f"a grid has 1 to {MAX_DIMENSIONS} dimensions of 1 to {MAX_SIDE} indices, got {self.sides}"
            )

    @classmethod
    def of(cls, prefix: str, sides: Sequence[int]) -> Grid:
        """The grid with these sides."""
        return cls(prefix, tuple(int(side) for side in sides))

    @property
    def size(self) -> int:
        """How many experts fit in."""
        return math.prod(self.sides)

    def __iter__(self) -> Iterator[Index]:
        return itertools.product(*map(range, self.sides))

    def uid(self, index: Index) -> str:
        """The name of an expert or, with fewer coordinates, of all experts that begin so."""
        return ".".join([self.prefix, *map(str, index)])

    def index(self, uid: str) -> Index:
        """Where an expert is.

        Raises:
            ValueError: it is none of this grid.
        """
        head, *tail = uid.rsplit(".", len(self.sides))
        within = len(tail) == len(self.sides) and all(
            part.isascii() and part.isdigit() and str(int(part)) == part and int(part) < side
            for part, side in zip(tail, self.sides, strict=True)
        )
        if head != self.prefix or not within:
            raise ValueError(f"{uid!r} is no expert of {self}")
        return tuple(map(int, tail))

    def __str__(self) -> str:
        return f"{self.prefix}[{' x '.join(map(str, self.sides))}]"


def parents(index: Index) -> Iterator[Index]:
    """All proper prefixes of an index, the empty one first."""
    return (index[:length] for length in range(len(index)))
