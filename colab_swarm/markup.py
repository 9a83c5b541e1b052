"""Format texts for people: bounded, escaped and with units. Also the small tables of `_repr_html_`. Pure functions."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, TypeAlias

Rows: TypeAlias = Sequence[Sequence[str]]
MAX_FACT_ROWS = 20
CELL = "text-align:left;padding:1px 14px 1px 0;font-weight:normal"


def aligned(rows: Rows) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"  {'  '.join(map(str.ljust, row, widths))}".rstrip() for row in rows]


def facts(title: str, figures: Mapping[str, object], columns: Sequence[str] = (), rows: Rows = ()) -> str:
    """Return an object's facts as a small HTML table; for ``_repr_html_``.

    ``figures`` are values by name. Below them is a table with at most `MAX_FACT_ROWS` of the ``rows``.
    """
    heading = f'<th scope="{{}}" style="{CELL}">{{}}</th>'.format
    cell = f'<td style="{CELL}">{{}}</td>'.format
    parts = [f"<div><b>{text(title)}</b>"]
    if figures:
        lines = [
            f"<tr>{heading('row', text(name))}{cell(text(str(value)))}</tr>"
            for name, value in figures.items()
        ]
        parts += ["<table>", *lines, "</table>"]
    if rows:
        titles = [heading("col", text(column)) for column in columns]
        lines = [f"<tr>{''.join(cell(text(words)) for words in row)}</tr>" for row in rows[:MAX_FACT_ROWS]]
        parts += ["<table><tr>", *titles, "</tr>", *lines, "</table>"]
    more = len(rows) - MAX_FACT_ROWS
    if more > 0:
        parts.append(f"<p>and {more:,} more</p>")
    return "".join([*parts, "</div>"])


def settings(of: Any) -> str:
    """Return a settings dataclass in one line, without the values that equal the defaults; for ``repr``."""
    changed: list[str] = []
    for field in fields(of):
        value = getattr(of, field.name)
        if field.repr and value != field.default:
            shown = name_of(value) if callable(value) else repr(value)
            changed.append(f"{field.name}={shown}")
    return f"{type(of).__name__}({', '.join(changed)})"


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name without its address in memory."""
    if isinstance(function, partial):
        named = (f"{name}={value!r}" for name, value in function.keywords.items())
        return f"{name_of(function.func)}({', '.join([*map(repr, function.args), *named])})"
    return getattr(function, "__name__", type(function).__name__)


def plain(words: str, limit: int = 200) -> str:
    """Return at most ``limit`` characters of ``words``, all printable, so that they cannot control a terminal."""
    printable = words[: limit + 1]
    for letter in set(printable):
        if not letter.isprintable():
            printable = printable.replace(letter, "?")
    if len(printable) <= limit:
        return printable
    return printable[: limit - 1] + "…"


def text(words: str, limit: int = 200) -> str:
    """Return `plain` text escaped for HTML."""
    return html.escape(plain(words, limit))


def count(number: int, noun: str) -> str:
    """Return ``1 peer`` or ``2 peers``."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def milliseconds(seconds: float | None) -> str:
    """Return a round-trip time in ms; empty if it was not measured."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    return "<1 ms" if seconds < 0.001 else f"{1000 * seconds:,.0f} ms"


def bandwidth(bps: float) -> str:
    if math.isinf(bps):
        return "too fast to measure"
    if bps >= 1e9:
        return f"{bps / 1e9:.3g} Gbit/s"
    if bps >= 1e6:
        return f"{bps / 1e6:.3g} Mbit/s"
    return f"{bps / 1e3:.3g} kbit/s"


def size(size_bytes: float) -> str:
    """Return a size in the unit that fits; 1 kB has 1000 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.1f} TB"
