"""The places of a grid of experts as a picture, and as characters. Pure functions of a listing, drawn once each.

Each place is a cell, filled from below in steps by how much its expert is used; large grids have several places to a
cell, whose live part is its width. Grids of more than two dimensions are cut into slices of their last two.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from colab_swarm.moe.grid import Grid, Index
from colab_swarm.moe.watch import ExpertsListing, LiveExpert
from colab_swarm.notebook import squares
from colab_swarm.notebook.squares import Drawing, box, exclamation, hatching, path

MOST_CELLS = {1: (40,), 2: (20, 20), 3: (8, 8, 8), 4: (4, 4, 6, 6)}
"""Along each dimension, by how many there are; a grid with more places has several to a cell."""
STEPS = (0.5, 1.5, 3.0)
"""Where one step of use ends and the next begins, in even shares: what each had if all were used alike."""
LEVELS = ("no updates", "under half an even share", "about an even share", "up to 3 even shares", "more")
WIDTH, MOST_CELL, SMALLEST_CELL, GAP, CAPTION = 750, 26, 12, 14, 16
TEXT_SLICES = 8


@dataclass
class Cell:
    """One or several places.

    Attributes:
        name: of the place, or of the first and last of each index.
        places: how many there are.
        live: experts that can be called.
        dead, left_out: how many places have an expert that cannot.
    """

    name: str
    places: int
    live: list[LiveExpert] = field(default_factory=list)
    dead: int = 0
    left_out: int = 0

    @property
    def empty(self) -> bool:
        """Whether no expert was ever seen there."""
        return not (self.live or self.dead or self.left_out)

    @property
    def mine(self) -> bool:
        """Whether this peer hosts an expert there."""
        return any(expert.mine for expert in self.live)

    def told(self) -> str:
        """All there is to say of it, in words."""
        if self.places == 1 and self.live:
            expert = self.live[0]
            host = f"{expert.host} (me)" if expert.mine else expert.host
            return (
                f"{self.name} at {host}: step {expert.step:,}, {_share(self.live)}, {expert.age_s:.0f} s old"
            )
        if self.places == 1:
            return f"{self.name}: {'left out' if self.left_out else 'dead'}"
        states = {"left out": self.left_out, "dead": self.dead, "mine": sum(one.mine for one in self.live)}
        parts = [f"{number} {state}" for state, number in states.items() if number]
        return (
            f"{self.name}: {len(self.live)} of {self.places} live, {', '.join([_share(self.live), *parts])}"
        )


def _share(experts: Sequence[LiveExpert]) -> str:
    return f"{sum(expert.share or 0.0 for expert in experts):.1%}"


@dataclass(frozen=True)
class Cells:
    """A grid cut into cells; ``even``: the share that each live expert had if all were used alike."""

    sides: tuple[int, ...]
    cells: dict[Index, Cell]
    even: float

    def level(self, cell: Cell) -> int:
        """How much its experts are used: an index into `LEVELS`."""
        used = sum(expert.share or 0.0 for expert in cell.live)
        if not used:
            return 0
        return 1 + sum(used / (self.even * len(cell.live)) >= step for step in STEPS)

    @property
    def slices(self) -> Iterator[Index]:
        """The first indices of all slices of two dimensions, or one."""
        return itertools.product(*map(range, self.sides[:-2]))

    def rows(self, part: Index) -> list[list[Cell]]:
        """The cells of one slice."""
        height = self.sides[-2] if len(self.sides) > 1 else 1
        between = ((row,) if len(self.sides) > 1 else () for row in range(height))
        return [[self.cells[(*part, *row, column)] for column in range(self.sides[-1])] for row in between]


def cells_of(listing: ExpertsListing) -> Cells:
    """The grid in as many cells as can be looked at."""
    grid = listing.grid
    together = _together(grid)
    sides = tuple(math.ceil(side / merged) for side, merged in zip(grid.sides, together, strict=True))
    cells = {at: _cell(grid, at, together) for at in itertools.product(*map(range, sides))}

    def at(uid: str) -> Cell:
        return cells[tuple(i // merged for i, merged in zip(grid.index(uid), together, strict=True))]

    for expert in listing.live:
        at(expert.uid).live.append(expert)
    for uid in listing.dead:
        at(uid).dead += 1
    for uid in listing.left_out:
        at(uid).left_out += 1
    return Cells(sides, cells, 1 / max(1, len(listing.live)))


def _together(grid: Grid) -> tuple[int, ...]:
    """How many places of each dimension share a cell."""
    most = MOST_CELLS[len(grid.sides)]
    return tuple(math.ceil(side / cells) for side, cells in zip(grid.sides, most, strict=True))


def _cell(grid: Grid, at: Index, together: Sequence[int]) -> Cell:
    begins = [i * merged for i, merged in zip(at, together, strict=True)]
    ends = [min(b + merged, side) for b, merged, side in zip(begins, together, grid.sides, strict=True)]
    names = [str(b) if e - b == 1 else f"{b}-{e - 1}" for b, e in zip(begins, ends, strict=True)]
    places = math.prod(e - b for b, e in zip(begins, ends, strict=True))
    return Cell(".".join([grid.prefix, *names]), places)


def _caption(slice_: Sequence[Sequence[Cell]], dimensions: int) -> str:
    """``ffn.3.*.*``: the name of a slice."""
    return ".".join([*slice_[0][0].name.split(".")[:-2], "*", "*"]) if dimensions > 2 else ""


def note(listing: ExpertsListing) -> str:
    """What else one must know to read the map; most often nothing."""
    places = math.prod(_together(listing.grid))
    notes = [f"a cell is {places} places, as wide as many of them live"] if places > 1 else []
    if listing.live and all(expert.share is None for expert in listing.live):
        notes.append("use is known when hosts have told of new steps, which they do about every 20 s")
    return f"  ({'; '.join(notes)})" if notes else ""


# --- as characters ------------------------------------------------------------------------------------------------

TEXT_KEY = "  . nobody  0-4 use  [ ] mine  ! left out  x dead"


@lru_cache(maxsize=4)
def render_text(listing: ExpertsListing) -> str:
    """The map as characters, three to a cell, and what they mean."""
    cells = cells_of(listing)
    lines, parts = [], list(cells.slices)
    for part in parts[:TEXT_SLICES]:
        rows = cells.rows(part)
        lines += [f"  {caption}"] if (caption := _caption(rows, len(cells.sides))) else []
        lines += ["  " + "".join(_characters(cells, cell) for cell in row).rstrip() for row in rows]
    more = len(parts) - TEXT_SLICES
    return "\n".join([*lines, *([f"  and {more} more slices"] if more > 0 else []), TEXT_KEY + note(listing)])


def _characters(cells: Cells, cell: Cell) -> str:
    shown = str(cells.level(cell)) if cell.live else "!" if cell.left_out else "x" if cell.dead else "."
    return f"[{shown}]" if cell.mine else f" {shown} "


# --- as a picture -------------------------------------------------------------------------------------------------


LOOKS = {
    "frame": 'fill="none" stroke="var(--line)"',
    "live": 'fill="currentColor" opacity=".22"',
    "used": 'fill="currentColor"',
    "dead": 'fill="none" stroke="var(--soft)" stroke-width="1.5"',
    "left out": 'fill="none" stroke="var(--amber)" stroke-width="2.5"',
    "mine": 'fill="none" stroke="var(--ink)" stroke-width="2"',
}


@lru_cache(maxsize=4)
def render_svg(listing: ExpertsListing) -> str:
    """The map as inline SVG, a tooltip to each cell where an expert is or was."""
    cells = cells_of(listing)
    slices = [cells.rows(part) for part in cells.slices]
    high, wide = len(slices[0]), len(slices[0][0])
    beside = (WIDTH + GAP) // len(slices) - GAP  # what each has if all stand in one line
    size = min(MOST_CELL, max(SMALLEST_CELL, beside // wide))
    caption = CAPTION if len(cells.sides) > 2 else 0
    across = min(len(slices), max(1, (WIDTH + GAP) // (wide * size + GAP)))
    drawing, captions = Drawing(LOOKS), []
    for number, rows in enumerate(slices):
        x = number % across * (wide * size + GAP) + 1
        y = number // across * (high * size + caption + GAP) + caption + 1
        if caption:
            captions.append(
                f'<text x="{x}" y="{y - 4}">{html.escape(_caption(rows, len(cells.sides)))}</text>'
            )
        _draw(drawing, cells, rows, (x, y, size))
    width = across * (wide * size + GAP) - GAP + 2
    height = math.ceil(len(slices) / across) * (high * size + caption + GAP) - GAP + 2
    label = html.escape(f"{len(listing.live)} live experts of {listing.grid}")
    return (
        f'<svg class="blue" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}">{"".join(captions)}{drawing.inside()}</svg>'
    )


def _draw(
    drawing: Drawing, cells: Cells, rows: Sequence[Sequence[Cell]], place: tuple[int, int, int]
) -> None:
    """One slice; ``place``: its corner and the size of a cell."""
    x, y, size = place
    wide, high = len(rows[0]), len(rows)
    drawing.add("frame", "".join(f"M{x} {y + i * size}h{wide * size}" for i in range(high + 1)))
    drawing.add("frame", "".join(f"M{x + i * size} {y}v{high * size}" for i in range(wide + 1)))
    for (row, line), column in itertools.product(enumerate(rows), range(wide)):
        if not line[column].empty:
            _draw_cell(drawing, cells, line[column], (x + column * size, y + row * size, size))


def _draw_cell(drawing: Drawing, cells: Cells, cell: Cell, place: tuple[int, int, int]) -> None:
    x, y, size = place
    inner = size - 2
    alive = inner * len(cell.live) / cell.places
    used = inner * cells.level(cell) / (len(LEVELS) - 1)
    if cell.live:
        drawing.add("live", box(x + 1, y + 1, alive, inner))
        drawing.add("used", box(x + 1, y + 1 + inner - used, alive, used) if used else "")
    elif cell.dead:
        drawing.add("dead", hatching(x + 1, y + 1, inner))
    if cell.left_out:
        drawing.add("left out", exclamation(x, y, size))
    if cell.mine:
        drawing.add("mine", box(x + 2, y + 2, size - 4, size - 4))
    drawing.tip(x, y, size, cell.told())


def key(listing: ExpertsListing) -> str:
    """What the cells mean: small ones, each with its words."""
    live = path(box(1, 1, 12, 12), LOOKS["live"])
    heights = {words: 12 * level / (len(LEVELS) - 1) for level, words in enumerate(LEVELS)}
    steps = {
        words: live + path(box(1, 13 - used, 12, used), LOOKS["used"]) for words, used in heights.items()
    }
    rest = {"mine": box(2, 2, 10, 10), "left out": exclamation(0, 0, 14), "dead": hatching(1, 1, 12)}
    others = {kind: path(shape, LOOKS[kind]) for kind, shape in rest.items()}
    return squares.key(steps | others, "use: ", note(listing))
