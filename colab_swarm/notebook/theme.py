"""The style of all views, for light and dark pages, and the pieces that views share.

Each view sets its own background and text colours, so it is readable on any page. Colours are those of Okabe and Ito,
distinct for colour-blind people, with a contrast of 4.5 to 1 for text. No view uses colour alone.
The functions are pieces of HTML: texts of other peers go through `markup.text` first.
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
# margins of a curve, in pixels
LEFT = 44
_BOTTOM = 36
_TOP = 20
_RIGHT = 12
_TEXT_BAR = 20  # characters of a bar in text
# the theme's blue; on a page without the theme, a blue for light and dark paper
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
# A view fills the available width, at most 860 pixels, and scrolls if it needs more. It has no width of its own, which
# would stretch the output around it. .cs-view.cs-view overrides a page's own rules for tables.
# Dark: where the page says so (JupyterLab, Colab, VS Code), or where it says nothing and the browser does.
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
    ".cs-view .card{flex:1 1 200px;background:var(--card);border-radius:6px;padding:6px 10px}"
    ".cs-view .cards .card{flex-basis:84px}"
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


def heading(title: str, state: str = "") -> str:
    return f'<p><b>{title}</b> <span class="soft">{state}</span></p>'


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = (), label: str = ""
) -> str:
    """Return a table; ``numbers`` are right-aligned columns, ``label`` is for screen readers."""
    right = dict.fromkeys(numbers, ' class="n"')
    head = ""
    for index, name in enumerate(columns):
        head += f'<th scope="col"{right.get(index, "")}>{name}</th>'
    if head:
        head = f"<thead><tr>{head}</tr></thead>"
    body = ""
    for first, *others in rows:
        body += f'<tr><th scope="row"{right.get(0, "")}>{first}</th>'
        for index, cell in enumerate(others, 1):
            body += f"<td{right.get(index, '')}>{cell}</td>"
        body += "</tr>"
    return f'<table aria-label="{label}">{head}<tbody>{body}</tbody></table>'


def bar(part: float, label: str, hue: str = "blue") -> str:
    percent = 100 * min(part, 1.0) if part > 0 else 0.0
    return (
        f'<span class="bar {hue}" role="img" aria-label="{label}" title="{label}">'
        f'<i style="width:{percent:.1f}%"></i></span>'
    )


def mark(hue: str, symbol: str, word: str) -> str:
    return f'<span class="{hue}" style="white-space:nowrap">{symbol} {word}</span>'


class Document:
    """A view as HTML and as text with the same content; all texts are escaped and bounded.

    ``title`` and ``state`` are the first line, ``line`` that of the text if it differs.
    """

    def __init__(self, title: str, state: str = "", *, label: str, line: str = "") -> None:
        self._label = label
        self._html: list[str] = []
        self._lines: list[str] = []
        if title:
            self._html.append(heading(markup.text(title), markup.text(state, MAX_CHARS)))
            self._lines.append(markup.plain(line or f"{title}: {state}", MAX_CHARS))

    def draw(self, html: str, *lines: str) -> None:
        self._html.append(html)
        self._lines += lines

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

    def bar(self, part: float, words: str, *, title: str, hue: str = "blue") -> None:
        label = markup.text(f"{title}: {words}")
        full = 0
        # not for NaN
        if part > 0:
            full = int(_TEXT_BAR * min(part, 1.0))
        filled = "#" * full + "." * (_TEXT_BAR - full)
        line = f"  [{filled}] {markup.plain(f'{title}: {words}')}"
        self.draw(f"<p>{label}{bar(part, label, hue)}</p>", line)

    def figures(self, figures: Mapping[str, str]) -> None:
        """Add figures, each under its name; a part after a line break is smaller."""
        cards = ""
        words = []
        for name, figure in figures.items():
            value, _, unit = figure.partition("\n")
            small = f'<small class="soft">{markup.text(unit)}</small>' if unit else ""
            card = f'<span class="soft">{name}</span><b>{markup.text(value)}{small}</b>'
            cards += f'<div class="card">{card}</div>'
            words.append(markup.plain(f"{name}: {value} {unit}".rstrip()))
        if words:
            self.draw(f'<div class="row cards">{cards}</div>', f"  {'; '.join(words)}")

    def table(
        self,
        columns: Sequence[str],
        items: Sequence[T],
        cells: Callable[[T], Sequence[Cell]],
        *,
        what: str,
        numbers: Sequence[int] = (),
    ) -> None:
        """Add a table of the first `MAX_ROWS` items, if any, and how many more ``what`` there are."""
        plain_rows: list[list[str]] = []
        html_rows: list[list[str]] = []
        for item in items[:MAX_ROWS]:
            pairs = [_text_and_html(cell) for cell in cells(item)]
            plain_rows.append([markup.plain(text) for text, _ in pairs])
            html_rows.append([html for _, html in pairs])
        if plain_rows:
            lines = markup.aligned([columns, *plain_rows])
            self.draw(table(columns, html_rows, numbers=numbers, label=what), *lines)
        if len(items) > MAX_ROWS:
            self.note(f"… and {len(items) - MAX_ROWS:,} more {what}")

    def html(self) -> str:
        label = html.escape(self._label)
        inside = f"<style>{STYLE}</style>{''.join(self._html)}"
        return f'<div class="cs-view" role="group" aria-label="{label}">{inside}</div>'

    def text(self) -> str:
        return "\n".join(self._lines)

    def bundle(self, widget: Any = None) -> dict[str, Any]:
        """Return what a cell shows: files the HTML, front-ends the widget (of ipywidgets 7 or 8)."""
        bundle: dict[str, Any] = {"text/plain": self.text(), "text/html": self.html()}
        if widget is not None:
            view = {"model_id": widget.model_id, "version_major": 2, "version_minor": 0}
            bundle["application/vnd.jupyter.widget-view+json"] = view
        return bundle


def _text_and_html(cell: Cell) -> tuple[str, str]:
    if isinstance(cell, str):
        return cell, markup.text(cell)
    return cell


def curve(
    history: History,
    *,
    limit: History = (),
    label: str = "loss",
    across: str = "global step",
    from_zero: bool = False,
    width: int = 550,
    height: int = 170,
) -> str:
    """Draw a curve, and its ``limit`` dashed; empty for fewer than two points.

    ``label`` and ``across`` are the titles of its axes, as HTML; width and height are pixels.
    """
    points = _drawable(history)
    limit_points = _drawable(limit)
    if len(points) < 2:
        return ""
    chart = _Chart([*points, *limit_points], points, width=width, height=height, from_zero=from_zero)
    axes = chart.axes()
    axes += f'<text x="{LEFT}" y="11">{label}</text>'
    axes += f'<text x="{width - _RIGHT}" y="{height - 4}" text-anchor="end">{across}</text>'
    bound = ""
    if limit_points:
        dashed = 'fill="none" stroke="currentColor" stroke-dasharray="5 4"/>'
        bound = f'<polyline points="{chart.line(limit_points)}" {dashed}'
    last_step, last_value = points[-1]
    return (
        f'<svg viewBox="0 0 {width} {height}" style="max-width:{width}px;width:100%" role="img" '
        f'aria-label="{label}, over the {across}" fill="currentColor" font-size="11" font-family="sans-serif">'
        f'{axes}{bound}<polyline points="{chart.line(points)}" fill="none" style="stroke:{LINE}" '
        f'stroke-width="2" stroke-linejoin="round"><title>{last_value:.4g} at step '
        f"{last_step:,.0f}</title></polyline></svg>"
    )


class _Chart:
    """The scale of a curve's axes: steps to the right, values upwards; ``points`` set the steps."""

    def __init__(self, drawn: History, points: History, *, width: int, height: int, from_zero: bool) -> None:
        self._width = width
        self._height = height
        values = [value for _, value in drawn]
        if from_zero:
            values.append(0.0)
        self._first = points[0][0]
        self._last = max(points[-1][0], self._first + 1)
        self._low = min(values)
        # a flat curve needs some height too
        self._high = max(*values, self._low + 1e-3 * (1 + abs(self._low)))

    def x(self, step: float) -> float:
        return LEFT + (self._width - LEFT - _RIGHT) * (step - self._first) / (self._last - self._first)

    def y(self, value: float) -> float:
        visible = min(max(value, self._low), self._high)
        return _TOP + (self._height - _TOP - _BOTTOM) * (self._high - visible) / (self._high - self._low)

    def line(self, points: History) -> str:
        left = self.x(0)
        step_width = self.x(1) - left
        return " ".join([f"{left + step_width * step:.1f},{self.y(value):.1f}" for step, value in points])

    def axes(self) -> str:
        drawn = ""
        for value in ticks(self._low, self._high, 5):
            y = self.y(value)
            drawn += (
                f'<path d="M{LEFT} {y:.1f}H{self._width - _RIGHT}" stroke="currentColor" stroke-opacity=".15"/>'
                f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
            )
        for step in ticks(self._first, self._last, 5):
            if step == int(step):
                x = self.x(step)
                drawn += f'<text x="{x:.1f}" y="{self._height - 20}" text-anchor="middle">{step:,.0f}</text>'
        return drawn


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round numbers between ``low`` and ``high``."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    last = math.floor(high / step)
    return [round(step * index, 10) for index in range(first, last + 1)]


def _drawable(history: History) -> list[tuple[float, float]]:
    """Return about `MAX_POINTS` of the points, the last one included."""
    # this leaves NaN out too
    points = [(step, value) for step, value in history if abs(value) < 1e6]
    if not points:
        return []
    stride = math.ceil(len(points) / MAX_POINTS)
    return [*points[:-1:stride], points[-1]]
