"""Small squares in rows, for maps of many like things: shapes as path data, and a drawing that gathers them.

What looks alike is one path, so that hundreds of squares stay a few kilobytes. Shapes differ, not only colours.
"""

from __future__ import annotations

import html
from collections.abc import Mapping

Looks = Mapping[str, str]
"""Attributes of a path by the kind of thing that it draws; later ones lie above."""


def box(x: float, y: float, width: float, height: float) -> str:
    """A rectangle."""
    return f"M{x:g} {y:g}h{width:.3g}v{height:.3g}h{-width:.3g}z"


def hatching(x: float, y: float, size: float) -> str:
    """Three slanted lines in a square."""
    half = size / 2
    return (
        f"M{x:g} {y + half:g}l{half:g} {-half:g}M{x:g} {y + size:g}l{size:g} {-size:g}"
        f"M{x + half:g} {y + size:g}l{half:g} {-half:g}"
    )


def exclamation(x: float, y: float, size: float) -> str:
    """An exclamation mark in the middle of a square."""
    return f"M{x + size / 2:g} {y + size * 0.2:g}v{size * 0.36:.3g}m0 {size * 0.12:.3g}v2.5"


def cross(x: float, y: float, size: float) -> str:
    """Two slanted lines from corner to corner."""
    return f"M{x:g} {y:g}l{size:g} {size:g}m0 {-size:g}l{-size:g} {size:g}"


class Drawing:
    """Gathers shapes by kind, and tooltips."""

    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self._paths = dict.fromkeys(looks, "")
        self._tips: list[str] = []

    def add(self, kind: str, shape: str) -> None:
        """A shape of a kind of ``looks``."""
        self._paths[kind] += shape

    def tip(self, x: float, y: float, size: float, told: str) -> None:
        """What a square tells, plain text."""
        title = f"<title>{html.escape(told)}</title>"
        self._tips.append(f'<rect x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}">{title}</rect>')

    def inside(self) -> str:
        """All of it, for an ``svg``."""
        drawn = "".join(path(shape, self._looks[kind]) for kind, shape in self._paths.items() if shape)
        return f'{drawn}<g fill="none" pointer-events="all">{"".join(self._tips)}</g>'


def path(shape: str, look: str) -> str:
    """One kind's element."""
    return f'<path d="{shape}" {look}/>'


def key(entries: Mapping[str, str], before: str = "", after: str = "") -> str:
    """A line that says what squares mean.

    Args:
        entries: words, and the 14 by 14 pixels of SVG that they stand beside.
        before, after: HTML around them.
    """
    inline = 'width="14" height="14" style="display:inline-block;vertical-align:-2px" aria-hidden="true"'
    shown = "".join(
        f'<span style="white-space:nowrap"><svg {inline} class="blue">{drawn}</svg> {words}</span> '
        for words, drawn in entries.items()
    )
    return f'<p class="key soft">{before}{shown}{after}</p>'
