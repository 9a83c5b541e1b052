"""Texts for people: bounded, escaped, with units; and the small tables of `_repr_html_`. Pure functions."""

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
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def facts(title: str, figures: Mapping[str, object], columns: Sequence[str] = (), rows: Rows = ()) -> str:
    """Return an object's facts as a small HTML table; for ``_repr_html_``.

    ``figures`` are values by name, above a table of `MAX_FACT_ROWS` of the ``rows`` at most.
    """
    pairs = "".join(
        f'<tr><th scope="row" style="{CELL}">{text(name)}</th><td style="{CELL}">{text(str(value))}</td></tr>'
        for name, value in figures.items()
    )
    head = "".join(f'<th scope="col" style="{CELL}">{text(column)}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f'<td style="{CELL}">{text(cell)}</td>' for cell in row) + "</tr>"
        for row in rows[:MAX_FACT_ROWS]
    )
    more = len(rows) - MAX_FACT_ROWS
    tables = [f"<table>{pairs}</table>"] if pairs else []
    tables += [f"<table><tr>{head}</tr>{body}</table>"] if body else []
    tables += [f"<p>and {more:,} more</p>"] if more > 0 else []
    return f"<div><b>{text(title)}</b>{''.join(tables)}</div>"


def settings(of: Any) -> str:
    """Return a settings dataclass in one line, without values that are defaults; for ``repr``."""
    given = [
        f"{field.name}={name_of(value) if callable(value) else repr(value)}"
        for field in fields(of)
        if field.repr and (value := getattr(of, field.name)) != field.default
    ]
    return f"{type(of).__name__}({', '.join(given)})"


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name without its address in memory."""
    if isinstance(function, partial):
        named = (f"{name}={value!r}" for name, value in function.keywords.items())
        return f"{name_of(function.func)}({', '.join([*map(repr, function.args), *named])})"
    return getattr(function, "__name__", type(function).__name__)


def plain(words: str, limit: int = 200) -> str:
    """Return at most ``limit`` printable characters, which cannot control a terminal."""
    printable = words[: limit + 1]
    if not printable.isprintable():
        printable = "".join(letter if letter.isprintable() else "?" for letter in printable)
    return printable if len(printable) <= limit else printable[: limit - 1] + "…"


def text(words: str, limit: int = 200) -> str:
    """Return `plain` text escaped for HTML."""
    return html.escape(plain(words, limit))


def count(number: int, noun: str) -> str:
    """Return ``1 peer`` or ``2 peers``."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    if (seconds := max(0.0, seconds)) < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def milliseconds(seconds: float | None) -> str:
    """Return a round-trip time in ms; empty if it was not measured."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    return "<1 ms" if seconds < 0.001 else f"{1000 * seconds:,.0f} ms"


def bandwidth(bps: float) -> str:
    unit, factor = next(((u, f) for u, f in (("Gbit/s", 1e9), ("Mbit/s", 1e6)) if bps >= f), ("kbit/s", 1e3))
    return "too fast to measure" if math.isinf(bps) else f"{bps / factor:.3g} {unit}"


def size(size_bytes: float) -> str:
    """Return a size in the unit that fits; 1 kB has 1000 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.1f} TB"
