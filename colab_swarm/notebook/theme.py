"""The style of all views, for light and dark pages, and `Document`, which draws each block as HTML and as text.

Each view sets its own background and text colours, so it is readable on any page. The colours are those of Okabe and
Ito, which colour-blind people can distinguish, with a contrast of 4.5 to 1 for text. No view shows a fact by colour
alone. The functions return pieces of HTML: texts of other peers must first go through `markup.text`.
"""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from colab_swarm import markup

T = TypeVar("T")
# a text, or a text and the HTML that shows it
Cell: TypeAlias = str | tuple[str, str]
MAX_ROWS = 20
MAX_CHARS = 1000
# (step, value), oldest first
History: TypeAlias = Sequence[tuple[float, float]]
MAX_POINTS = 400  # of a curve
# size and margins of a curve, in pixels
_WIDTH = 760
_HEIGHT = 160
_LEFT = 44
_BOTTOM = 36
_TOP = 20
_RIGHT = 12
_TEXT_BAR = 20  # characters of a bar in text
# the theme's blue; on a page without the theme, a blue for light and dark backgrounds
LINE = "var(--blue,#2a78d6)"
HUES = ("blue", "green", "amber", "red", "purple", "soft")
LIGHT = (
    "--paper:#fff;--card:#f3f5f7;--ink:#1b1f24;--soft:#57606a;--line:#d0d7de;"
    "--blue:#0069a8;--green:#00735a;--amber:#8f5600;--red:#b83a00;--purple:#9c3d76"
)
DARK = (
    "--paper:#16191d;--card:#22272d;--ink:#e8eaed;--soft:#a8b1bb;--line:#3d444d;"
    "--blue:#56b4e9;--green:#2cc295;--amber:#eeb03a;--red:#ff8355;--purple:#e39bc4"
)
# A view fills the available width, at most 860 pixels, and scrolls if it needs more. It sets no fixed width, because
# that would stretch the output around it. .cs-view.cs-view overrides the page's rules for tables.
# It is dark if the page says so (JupyterLab, Colab, VS Code), or if the page says nothing and the browser is dark.
STYLE = (
    f".cs-view{{{LIGHT};box-sizing:border-box;width:0;min-width:min(100%,860px);overflow-x:auto;"
    "padding:10px 14px;background:var(--paper);"
    "color:var(--ink);border:1px solid var(--line);border-radius:8px;font:13px/1.45 system-ui,sans-serif;"
    "overflow-wrap:break-word;font-variant-numeric:tabular-nums}"
    f"[data-jp-theme-light=false] .cs-view,[theme=dark] .cs-view,.vscode-dark .cs-view{{{DARK}}}"
    "@media(prefers-color-scheme:dark){html:not([theme]) body:not([data-jp-theme-light],.notebook_app,"
    f"[class*=vscode-]) .cs-view{{{DARK}}}}}"
    + "".join(f".cs-view .{hue}{{color:var(--{hue})}}" for hue in HUES)
    + ".cs-view p{margin:5px 0}.cs-view h4{margin:12px 0 4px;font:600 13px system-ui,sans-serif;color:var(--soft)}"
    ".cs-view .warn{border-left:4px solid var(--amber);padding-left:8px}"
    ".cs-view .row{display:flex;flex-wrap:wrap;gap:8px;margin:8px 0}"
    ".cs-view .row::before,.cs-view .row::after{content:none}"
    ".cs-view .card{flex:1 1 84px;background:var(--card);border-radius:6px;padding:6px 10px}"
    ".cs-view .card b{display:block;font-size:15px}.cs-view .card small{display:block;font-size:11px;font-weight:400}"
    ".cs-view.cs-view table{border-collapse:collapse;border:0;width:100%;margin:4px 0;font-size:inherit;color:inherit;"
    "table-layout:auto}"
    ".cs-view.cs-view tbody tr{background:none}"
    ".cs-view.cs-view :is(th,td){padding:3px 8px 3px 0;text-align:left;border:0;border-top:1px solid var(--line);"
    "vertical-align:top;font-weight:400;color:inherit;background:none;white-space:normal;max-width:none}"
    ".cs-view.cs-view thead th{color:var(--soft);border:0}.cs-view.cs-view .n{text-align:right;white-space:nowrap}"
    ".cs-view tbody th{overflow-wrap:anywhere;min-width:70px}"
    ".cs-view .bar{display:block;height:8px;margin:4px 0;border-radius:4px;background:var(--line);overflow:hidden}"
    ".cs-view .bar i{display:block;height:100%;background:currentColor}"
    ".cs-view svg{display:block;max-width:100%}.cs-view svg text{fill:var(--soft);font:11px system-ui,sans-serif}"
)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = (), label: str = ""
) -> str:
    """Return a table; ``numbers`` are right-aligned columns, ``label`` is for screen readers."""
    right = dict.fromkeys(numbers, ' class="n"')
    head = ""
    for index, name in enumerate(columns):
        head += f'<th scope="col"{right.get(index, "")}>{name}</th>'
    body = ""
    for first, *others in rows:
        body += f'<tr><th scope="row"{right.get(0, "")}>{first}</th>'
        for index, cell in enumerate(others, 1):
            body += f"<td{right.get(index, '')}>{cell}</td>"
        body += "</tr>"
    return f'<table aria-label="{label}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def bar(part: float, label: str, hue: str = "blue") -> str:
    return (
        f'<span class="bar {hue}" role="img" aria-label="{label}" title="{label}">'
        f'<i style="width:{100 * bounded(part):.1f}%"></i></span>'
    )


def mark(hue: str, symbol: str, words: str) -> tuple[str, str]:
    """Return a cell with a symbol and then words, both in one colour."""
    return f"{symbol} {words}", f'<span class="{hue}">{symbol}&#160;{markup.text(words)}</span>'


def stroke(begin: float, end: float, y: float, *, hue: str, dashes: str = "none", width: float = 4.0) -> str:
    """Return a horizontal line of a `drawing`, in pixels; ``dashes`` have the form of SVG."""
    return (
        f'<path class="{hue}" d="M{begin:.1f} {y}H{end:.1f}" fill="none" stroke="currentColor" '
        f'stroke-width="{width:.1f}" stroke-dasharray="{dashes}"/>'
    )


def drawing(width: int, height: int, inside: str, label: str = "") -> str:
    """Return a small SVG that fits into a line of text; screen readers read its ``label``, if it has one."""
    role = 'aria-hidden="true"'
    title = ""
    if label:
        role = f'role="img" aria-label="{label}"'
        title = f"<title>{label}</title>"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" style="display:inline-block"'
    return f"<svg {size} {role}>{title}{inside}</svg>"


class Document:
    """A view as HTML and as text with the same content; all texts are escaped and bounded.

    ``title`` and ``state`` are its first line, ``label`` is its name for screen readers.
    """

    def __init__(self, title: str = "", state: str = "", *, label: str) -> None:
        self.title = title
        self._label = label
        self._html: list[str] = []
        self._lines: list[str] = []
        if title:
            self.heading(title, state)

    def draw(self, html: str, *lines: str) -> None:
        self._html.append(html)
        self._lines += lines

    def heading(self, title: str, state: str) -> None:
        if state:
            title += ":"
        drawn = f'<b>{markup.text(title, MAX_CHARS)}</b> <span class="soft">{markup.text(state, MAX_CHARS)}</span>'
        self.draw(f"<p>{drawn}</p>", markup.plain(f"{title} {state}".rstrip(), MAX_CHARS))

    def warn(self, words: str, symbol: str = "⚠") -> None:
        if words:
            paragraph = f'<p class="warn">{symbol} {markup.text(words, MAX_CHARS)}</p>'
            self.draw(paragraph, f"  {symbol} {markup.plain(words, MAX_CHARS)}")

    def note(self, *lines: str, title: str = "") -> None:
        if not lines:
            return
        head = f"<h4>{title}</h4>" if title else ""
        paragraph = "<br>".join(map(markup.text, lines))
        plain_lines = [f"  {markup.plain(line)}" for line in lines]
        self.draw(f'{head}<p class="soft">{paragraph}</p>', *plain_lines)

    def code(self, lines: Sequence[str]) -> None:
        plain_lines = [markup.plain(line, MAX_CHARS) for line in lines]
        style = "font:13px ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere"
        text = html.escape("\n".join(plain_lines))
        self.draw(f'<pre style="{style}">{text}</pre>', *map("  {}".format, plain_lines))

    def bar(self, part: float, words: str, *, title: str, hue: str = "blue") -> None:
        label = markup.text(f"{title}: {words}")
        filled = "#" * int(_TEXT_BAR * bounded(part))
        line = f"  [{filled:.<{_TEXT_BAR}}] {markup.plain(f'{title}: {words}')}"
        self.draw(f"<p>{label}{bar(part, label, hue)}</p>", line)

    def curve(self, history: History, *, legend: str = "", **options: Any) -> None:
        """Add a `curve`, which has no text, and its legend; nothing for fewer than two points."""
        drawn = curve(history, **options)
        if drawn and legend:
            drawn += f'<p class="soft">{legend}</p>'
        self.draw(drawn)

    def figures(self, figures: Mapping[str, str]) -> None:
        """Add figures, each below its name; the part after a line break is smaller."""
        cards = ""
        words = []
        for name, figure in figures.items():
            value, _, unit = figure.partition("\n")
            small = f'<small class="soft">{markup.text(unit)}</small>' if unit else ""
            card = f'<span class="soft">{name}</span><b>{markup.text(value)}{small}</b>'
            cards += f'<div class="card">{card}</div>'
            words.append(markup.plain(f"{name}: {value} {unit}".rstrip()))
        if words:
            self.draw(f'<div class="row">{cards}</div>', f"  {'; '.join(words)}")

    def table(
        self,
        columns: Sequence[str],
        items: Sequence[T],
        cells: Callable[[T], Sequence[Cell]],
        *,
        what: str,
        numbers: Sequence[int] = (),
    ) -> None:
        """Add a table of the first `MAX_ROWS` items, if any, and a line that says how many more ``what`` there are."""
        plain_rows: list[list[str]] = []
        html_rows: list[list[str]] = []
        for item in items[:MAX_ROWS]:
            pairs = [(cell, markup.text(cell)) if isinstance(cell, str) else cell for cell in cells(item)]
            plain_rows.append([markup.plain(text) for text, _ in pairs])
            html_rows.append([html for _, html in pairs])
        if plain_rows:
            lines = markup.aligned([columns, *plain_rows])
            self.draw(table(columns, html_rows, numbers=numbers, label=what), *lines)
        if len(items) > MAX_ROWS:
            self.note(f"… and {len(items) - MAX_ROWS:,} more {what}")

    @property
    def line(self) -> str:
        """The first line of the text."""
        return self._lines[0]

    def html(self) -> str:
        label = markup.text(self._label)
        inside = f"<style>{STYLE}</style>{''.join(self._html)}"
        return f'<div class="cs-view" role="group" aria-label="{label}">{inside}</div>'

    def text(self) -> str:
        return "\n".join(self._lines)

    def bundle(self, widget: Any = None) -> dict[str, Any]:
        """Return the output of a cell: files show the HTML, front-ends show the widget (of ipywidgets 7 or 8)."""
        bundle: dict[str, Any] = {"text/plain": self.text(), "text/html": self.html()}
        if widget is not None:
            view = {"model_id": widget.model_id, "version_major": 2, "version_minor": 0}
            bundle["application/vnd.jupyter.widget-view+json"] = view
        return bundle


def curve(history: History, *, limit: History = (), label: str = "loss", across: str = "global step") -> str:
    """Draw a curve, and its ``limit`` as a dashed line; empty for fewer than two points.

    ``label`` and ``across`` are the titles of the axes, as HTML.
    """
    points = _drawable(history)
    limit_points = _drawable(limit)
    if len(points) < 2:
        return ""
    first = points[0][0]
    last = max(points[-1][0], first + 1)
    values = [value for _, value in [*points, *limit_points]]
    low = min(values)
    # a flat curve also needs some height
    high = max(*values, low + 1e-3 * (1 + abs(low)))

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - first) / (last - first)

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)

    def line(points: History, style: str, inside: str = "") -> str:
        places = " ".join([f"{x(step):.1f},{y(value):.1f}" for step, value in points])
        return f'<polyline points="{places}" fill="none" {style}>{inside}</polyline>'

    drawn = f'<text x="{_LEFT}" y="11">{label}</text>'
    drawn += f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{across}</text>'
    for value in ticks(low, high, 5):
        drawn += (
            f'<path d="M{_LEFT} {y(value):.1f}H{_WIDTH - _RIGHT}" stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    for step in ticks(first, last, 5):
        if step == int(step):
            drawn += f'<text x="{x(step):.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{step:,.0f}</text>'
    if limit_points:
        drawn += line(limit_points, 'stroke="currentColor" stroke-dasharray="5 4"')
    last_step, last_value = points[-1]
    title = f"<title>{last_value:.4g} at step {last_step:,.0f}</title>"
    drawn += line(points, f'style="stroke:{LINE}" stroke-width="2" stroke-linejoin="round"', title)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" style="max-width:{_WIDTH}px;width:100%" role="img" '
        f'aria-label="{label}, over the {across}" fill="currentColor" font-size="11" font-family="sans-serif">'
        f"{drawn}</svg>"
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round numbers between ``low`` and ``high``."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    last = math.floor(high / step)
    return [round(step * index, 10) for index in range(first, last + 1)]


def bounded(part: float) -> float:
    # this is False for NaN
    return min(part, 1.0) if part > 0 else 0.0


def _drawable(history: History) -> list[tuple[float, float]]:
    """Return about `MAX_POINTS` of the points, the last one included."""
    # this also leaves out NaN
    points = [(step, value) for step, value in history if abs(value) < 1e6]
    if not points:
        return []
    stride = math.ceil(len(points) / MAX_POINTS)
    return [*points[:-1:stride], points[-1]]
