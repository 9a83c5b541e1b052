"""The work-unit panel: a `JobStatus` as text and as static HTML, for notebooks and terminals. Pure functions."""

from __future__ import annotations

import math
from functools import lru_cache

from colab_swarm.markup import aligned, count, duration, plain, text
from colab_swarm.notebook import squares, theme
from colab_swarm.notebook.squares import Drawing, box, cross, exclamation, path
from colab_swarm.workunits.overview import JobStatus, UnitMark, VolunteerRow
from colab_swarm.workunits.page import accuracy_svg, reliability

MAX_ROWS = 20
SQUARE, ACROSS = 15, 50
CHART = (
    "<style>.cs-view .mean{stroke:var(--blue);fill:none;stroke-width:2}.cs-view .band{fill:var(--blue);opacity:.2}"
    ".cs-view .dot{fill:var(--blue)}.cs-view .target{stroke:var(--amber);stroke-width:1.5;stroke-dasharray:6 4}"
    ".cs-view .level{stroke:var(--line)}</style>"
)
STATES = {
    "assimilated": "done",
    "queued": "to assimilate",
    "training": "training",
    "late": "late",
    "rejected": "rejected",
}
"""Words for states of a unit that have a square of their own; one that waits is empty."""
CHARACTERS = {
    "assimilated": "#",
    "queued": "=",
    "training": ">",
    "late": "!",
    "rejected": "x",
    "waiting": ".",
}
LOOKS = {
    "frame": 'fill="none" stroke="var(--line)"',
    "assimilated": 'fill="var(--green)"',
    "queued": 'fill="none" stroke="var(--green)" stroke-width="2"',
    "training": 'fill="var(--blue)"',
    "late": 'fill="none" stroke="var(--amber)" stroke-width="2.5"',
    "rejected": 'fill="none" stroke="var(--red)" stroke-width="2"',
}
COLUMNS = ("volunteer", "reliability", "units", "rejected", "late", "in hand")


def summary(status: JobStatus) -> str:
    """How the job goes, in one line."""
    overview = status.overview
    if overview.finished is not None:
        where = f"finished: {overview.finished}"
    else:
        done = f"{overview.units.assimilated} of {len(status.rows)} units"
        where = f"epoch {overview.epoch} of {overview.max_epochs}, {done}"
    accuracy = f", accuracy {overview.epochs[-1].accuracy:.3f}" if overview.epochs else ""
    return f"{status.name}: {where}{accuracy}, {count(len(overview.volunteers), 'volunteer')}"


def epoch_eta_s(status: JobStatus) -> float | None:
    """Seconds until the last unit of this epoch is assimilated, at the pace of the last minutes; None: not known."""
    left = len(status.rows) - status.overview.units.assimilated
    return left / status.units_per_s if status.units_per_s else None


def staleness(status: JobStatus) -> float | None:
    """How many other results came in while a unit of this epoch was trained, in the mean; None before the first."""
    known = [mark.staleness for mark in status.overview.marks if mark.staleness is not None]
    return sum(known) / len(known) if known else None


def figures(status: JobStatus) -> dict[str, str]:
    """What is told in numbers, by its name; what is not known is left out."""
    overview, eta_s, stale = status.overview, epoch_eta_s(status), staleness(status)
    ended = [one.accuracy for one in overview.epochs if math.isfinite(one.accuracy)]
    target = "" if status.target_accuracy is None else f", target {status.target_accuracy:.1%}"
    known = {
        f"accuracy{target}": f"{ended[-1]:.1%}" if ended else "",
        "epoch done in": "" if eta_s is None else duration(eta_s),
        "samples/s": f"{status.samples_per_s:,.0f}" if status.units_per_s else "",
        "staleness": "" if stale is None else f"{stale:.1f} updates",
        "parameter servers": "" if overview.finished else f"{status.servers}, {status.backlog} results wait",
    }
    return {name: value for name, value in known.items() if value}


# --- text ---------------------------------------------------------------------------------------------------------


def render_text(status: JobStatus) -> str:
    """As lines."""
    overview, lines = status.overview, [summary(status)]
    lines.append("  " + "; ".join(f"{name}: {value}" for name, value in figures(status).items()))
    if overview.finished is None:
        shown = "".join(CHARACTERS[mark.state] for mark in overview.marks)
        lines += [f"  {shown[begin : begin + 2 * ACROSS]}" for begin in range(0, len(shown), 2 * ACROSS)]
        words = {**STATES, "waiting": "waits"}
        if shown:
            key = "  ".join(f"{CHARACTERS[state]} {word}" for state, word in words.items())
            lines.append(f"  units: {key}{_more_units(status)}")
    rows = [_cells(row, status.at) for row in overview.volunteers[:MAX_ROWS]]
    lines += aligned([COLUMNS, *rows]) if rows else []
    told = [_more(status), plain(status.fault)]
    return "\n".join(lines + [f"  {line}" for line in told if line])


# --- HTML ---------------------------------------------------------------------------------------------------------


def render_html(status: JobStatus) -> str:
    """As one ``div``: figures, the units of the epoch, accuracy with the target, volunteers."""
    overview = status.overview
    rows = [tuple(map(text, _cells(row, status.at))) for row in overview.volunteers[:MAX_ROWS]]
    volunteers = theme.table(COLUMNS, rows, numbers=range(2, 6), label="volunteers") if rows else ""
    name, _, told = summary(status).partition(": ")
    fault = f'<p class="warn">the store does not answer: {text(status.fault)}</p>' if status.fault else ""
    more = f'<p class="soft">{_more(status)}</p>' if _more(status) else ""
    units = _units(status) if overview.finished is None else ""
    return theme.wrap(
        f"{theme.heading(text(name), text(told))}{fault}{theme.cards(figures(status))}{units}"
        f"{_accuracy(status)}{volunteers}{more}",
        f"work units of {plain(status.name)}",
    )


def _units(status: JobStatus) -> str:
    if not status.overview.marks:
        return ""
    label = f"{status.overview.units.assimilated} of {len(status.rows)} units done"
    key = {word: path(_shape(state, 0, 0), LOOKS[state]) for state, word in STATES.items()}
    after = f"empty: waits{_more_units(status)}"
    return _squares(status.overview.marks, label) + squares.key(key, "units: ", after)


@lru_cache(maxsize=2)
def _squares(marks: tuple[UnitMark, ...], label: str) -> str:
    """Drawn anew only when a unit has changed."""
    drawing = Drawing(LOOKS)
    for number, mark in enumerate(marks):
        x, y = number % ACROSS * SQUARE + 1, number // ACROSS * SQUARE + 1
        drawing.add("frame", box(x, y, SQUARE, SQUARE))
        if mark.state in STATES:
            drawing.add(mark.state, _shape(mark.state, x, y))
        drawing.tip(x, y, SQUARE, _tip(number, mark))
    width, height = min(len(marks), ACROSS) * SQUARE + 2, math.ceil(len(marks) / ACROSS) * SQUARE + 2
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f"{drawing.inside()}</svg>"
    )


def _shape(state: str, x: float, y: float) -> str:
    inner = SQUARE - 4
    shapes = {
        "assimilated": box(x + 2, y + 2, inner, inner),
        "queued": box(x + 3, y + 3, inner - 2, inner - 2),
        "training": box(x + 2, y + 2 + inner / 2, inner, inner / 2),
        "late": exclamation(x, y, SQUARE),
        "rejected": cross(x + 3, y + 3, inner - 2),
    }
    return shapes[state]


def _tip(number: int, mark: UnitMark) -> str:
    whose = f" by {plain(mark.volunteer, 40)}" if mark.volunteer else ""
    stale = "" if mark.staleness is None else f", {count(mark.staleness, 'update')} stale"
    return f"unit {number}: {STATES.get(mark.state, 'waits')}{whose}{stale}"


def _accuracy(status: JobStatus) -> str:
    chart = accuracy_svg(status.overview.epochs, status.target_accuracy)
    if not chart:
        return '<p class="soft">The accuracy is known when the first epoch is over.</p>'
    target = "" if status.target_accuracy is None else f"; dashed: the target, {status.target_accuracy:.1%}"
    return f'{CHART}{chart}<p class="soft">accuracy: mean of each epoch, lowest to highest shaded{target}</p>'


# --- both ---------------------------------------------------------------------------------------------------------


def _cells(row: VolunteerRow, now: float) -> tuple[str, ...]:
    return (
        plain(row.name or row.volunteer[:8], 40),
        reliability(row, now),
        *map(str, (row.accepted, row.rejected, row.expired, row.in_flight)),
    )


def _more(status: JobStatus) -> str:
    """How many volunteers are not listed."""
    more = len(status.overview.volunteers) - MAX_ROWS
    return f"and {more:,} more" if more > 0 else ""


def _more_units(status: JobStatus) -> str:
    more = len(status.rows) - len(status.overview.marks)
    return f"; and {more:,} more units" if more > 0 else ""
