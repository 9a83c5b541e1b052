"""Pieces of web pages, and of the text that Prometheus reads. Pure functions; they make HTML of what is told to them.

A page shows what ``/live`` answers, anew every three seconds; a browser is allowed nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from importlib.resources import files
from string import Template
from typing import Any, TypeAlias

Rows: TypeAlias = Sequence[Sequence[str]]
Labels: TypeAlias = tuple[tuple[str, str], ...]
Metric: TypeAlias = tuple[str, str, Mapping[Labels, float]]
"""Name, kind (``gauge`` or ``counter``), and value by labels."""
MAX_FACT_ROWS = 20
CELL = "text-align:left;padding:1px 14px 1px 0;font-weight:normal"
SCRIPT = """
const live = document.getElementById("live"), lost = document.getElementById("lost");
setInterval(async () => {
  try {
    const answer = await fetch("live", {signal: AbortSignal.timeout(5000)});
    if (answer.ok) live.innerHTML = await answer.text();
    lost.style.display = answer.ok || answer.status == 429 ? "none" : "block";
  } catch { lost.style.display = "block"; }
}, 3000);
"""


def page(title: str, live: str, *, lost: str, style: str = "") -> str:
    """A whole page.

    Args:
        title: escaped.
        live: HTML of the part that changes.
        lost: what to say while the server does not answer.
        style: CSS of this page only.
    """
    return _template().substitute(title=title, live=live, lost=lost, style=style, script=SCRIPT)


@cache
def _template() -> Template:
    return Template(files("colab_swarm").joinpath("page.html").read_text(encoding="utf-8"))


def content_security_policy() -> str:
    """What a browser may do with a page: run its one script, ask where it came from, nothing else."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    allowed = "style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src 'sha256-{digest}'; frame-ancestors 'none'; {allowed}"


def card(title: str, inside: str) -> str:
    """A box with a title; both are HTML."""
    return f'<div class="card"><h3>{title}</h3>{inside}</div>'


def tiles(figures: Mapping[str, str]) -> str:
    """A row of figures by what they tell; both are HTML."""
    shown = (f'<div class="card"><h3>{name}</h3><b>{value}</b></div>' for name, value in figures.items())
    return f'<div class="tiles">{"".join(shown)}</div>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under their columns; cells are HTML."""
    if not rows:
        return '<p class="soft">None yet.</p>'
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of plain cells as lines for terminals, columns one under the other, all two to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def facts(title: str, told: Mapping[str, object], columns: Sequence[str] = (), rows: Rows = ()) -> str:
    """What there is to say of an object, as a small table in the page's own colours; for ``_repr_html_``.

    Args:
        title: what it is.
        told: figures by their names.
        columns, rows: of a table below; at most `MAX_FACT_ROWS` rows are shown.
    """
    pairs = "".join(
        f'<tr><th scope="row" style="{CELL}">{text(name)}</th><td style="{CELL}">{text(str(value))}</td></tr>'
        for name, value in told.items()
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
    """A dataclass of settings in a line: what differs from the defaults, functions by their names; for ``repr``."""
    given = [
        f"{field.name}={name_of(value) if callable(value) else repr(value)}"
        for field in fields(of)
        if field.repr and (value := getattr(of, field.name)) != field.default
    ]
    return f"{type(of).__name__}({', '.join(given)})"


def name_of(function: Callable[..., Any]) -> str:
    """What people call a function, without where it lies in memory."""
    if isinstance(function, partial):
        given = [
            *map(repr, function.args),
            *(f"{name}={value!r}" for name, value in function.keywords.items()),
        ]
        return f"{name_of(function.func)}({', '.join(given)})"
    return getattr(function, "__name__", type(function).__name__)


def legend(keys: Iterable[tuple[str, str]]) -> str:
    """Names, each after a square of its CSS class."""
    return "".join(f'<span class="key {kind}"></span>{name}' for name, kind in keys)


def plain(told: str, limit: int = 200) -> str:
    """Of printable characters, which steer no terminal, ``limit`` of them at most."""
    printable = told[: limit + 1]
    if not printable.isprintable():
        printable = "".join(letter if letter.isprintable() else "?" for letter in printable)
    return printable if len(printable) <= limit else printable[: limit - 1] + "…"


def text(told: str, limit: int = 200) -> str:
    """The same, escaped for HTML."""
    return html.escape(plain(told, limit))


def count(number: int, noun: str) -> str:
    """``1 peer``, ``2 peers``."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """In the unit that fits."""
    seconds = max(0.0, seconds)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def size(size_bytes: float) -> str:
    """In the unit that fits, of 1000 each."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.1f} TB"


def exposition(metrics: Iterable[Metric]) -> str:
    """Figures in the text format that Prometheus reads, one a line."""
    lines = []
    for name, kind, samples in metrics:
        lines.append(f"# TYPE colab_swarm_{name} {kind}")
        lines += [
            f"colab_swarm_{name}{{{_labels(labels)}}} {float(value)!r}" for labels, value in samples.items()
        ]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
