"""A `JobStatus` as text and HTML, for notebooks, terminals and the coordinator's status page. Pure functions."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from colab_swarm.markup import card, count, duration, page, plain, text
from colab_swarm.notebook.theme import Document

if TYPE_CHECKING:
    from colab_swarm.workunits.state import EpochEnded, JobStatus, UnitMark, VolunteerRow

ACROSS = 100  # units in a line
WIDTH, HEIGHT = 760, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 748, 12, 204  # of the chart's plane
MAX_POINTS = 400
MIN_EPOCHS = 4  # that the chart has room for, so that a job's first ones do not look like its end
CHART = (
    "<style>.cs-view .mean{stroke:var(--blue);fill:none;stroke-width:2}.cs-view .band{fill:var(--blue);opacity:.2}"
    ".cs-view .dot{fill:var(--blue)}.cs-view .target{stroke:var(--amber);stroke-width:1.5;stroke-dasharray:6 4}"
    ".cs-view .level{stroke:var(--line)}</style>"
)
STATES = {
    "assimilated": ("#", "done", "green"),
    "queued": ("=", "to assimilate", "green"),
    "training": (">", "training", "blue"),
    "late": ("!", "late", "amber"),
    "rejected": ("x", "rejected", "red"),
    "waiting": (".", "waits", "soft"),
}
"""Character, words and hue for each state of a unit."""
COLUMNS = ("volunteer", "reliability", "units", "rejected", "late", "in hand")
DYING = "the parameter servers end again and again: the coordinator's parameter-servers.log says why"
HOW_TO = (
    "<p>Ask the organizer for the link. In a notebook: <code>cs.workunits.volunteer(link)</code> after "
    "<code>import colab_swarm as cs</code>; in a shell: <code>colab-swarm volunteer LINK</code>. "
    "You can stop at any time: your unfinished units go to other volunteers.</p>"
)


def summary(status: JobStatus) -> str:
    """Return the progress of the job in one line."""
    overview = status.overview
    if overview.finished is not None:
        where = f"finished: {overview.finished}"
    else:
        done = overview.units["assimilated"]
        where = f"epoch {overview.epoch} of {overview.max_epochs}, {done} of {len(status.rows)} units"
    accuracy = f", accuracy {overview.epochs[-1].accuracy:.3f}" if overview.epochs else ""
    return f"{status.name}: {where}{accuracy}, {count(len(overview.volunteers), 'volunteer')}"


def figures(status: JobStatus) -> dict[str, str]:
    """Return the known figures by name.

    The ETA is that of the epoch's last unit at the recent rate. Staleness is the mean number of results that arrived
    while a unit of this epoch was trained.
    """
    overview = status.overview
    left = len(status.rows) - overview.units["assimilated"]
    stale = [mark.staleness for mark in overview.marks if mark.staleness is not None]
    target = "" if status.target_accuracy is None else f", target {status.target_accuracy:.1%}"
    known = {
        f"accuracy{target}": "" if overview.accuracy is None else f"{overview.accuracy:.1%}",
        "epoch done in": duration(left / status.units_per_s) if status.units_per_s else "",
        "samples/s": f"{status.samples_per_s:,.0f}" if status.units_per_s else "",
        "staleness": f"{sum(stale) / len(stale):.1f} updates" if stale else "",
        "parameter servers": "" if overview.finished else f"{status.servers}, {status.backlog} results wait",
    }
    return {name: value for name, value in known.items() if value}


def draw(status: JobStatus) -> Document:
    """Return the job: figures, the units of the epoch, accuracy with the target, volunteers."""
    overview = status.overview
    shown = Document(*summary(status).split(": ", 1), label=f"work units of {plain(status.name)}")
    shown.warn(f"the store does not answer: {status.fault}" if status.fault else "")
    shown.warn(DYING if status.server_deaths and not status.servers and not overview.finished else "")
    shown.figures(figures(status))
    if overview.finished is None and overview.marks:
        marks = "".join(STATES[mark.state][0] for mark in overview.marks)
        lines = [f"  {marks[begin : begin + ACROSS]}" for begin in range(0, len(marks), ACROSS)]
        shown.draw(_units(overview.marks), *lines)
        more = len(status.rows) - len(overview.marks)
        key = "  ".join(f"{character} {words}" for character, words, _ in STATES.values())
        shown.note(f"units: {key}" + (f"; and {more:,} more units" if more > 0 else ""))
    shown.draw(_accuracy(status))
    cells = partial(_cells, now=status.at)
    shown.table(COLUMNS, overview.volunteers, cells, numbers=range(2, 6), what="volunteers")
    return shown


def render_page(status: JobStatus) -> str:
    lost = "The coordinator does not answer; this is its last status."
    return page(text(status.name), render_live(status), lost=lost)


def render_live(status: JobStatus) -> str:
    """Return the part of the status page that changes: the view, with an introduction for visitors."""
    return (
        f"<h1>{text(status.name)}</h1>"
        f'<p class="soft">Volunteers train a model of {status.numel:,} numbers on {sum(status.rows):,} samples. '
        f"Each takes a <b>unit</b>, one of {len(status.rows)} parts of the data, trains a copy of the model on it and "
        "sends the copy back; a parameter server blends it into the model. An <b>epoch</b> is over when all units "
        f"were trained once.</p>{draw(status).html()}"
        f"{'' if status.overview.finished else card('How to volunteer', HOW_TO)}"
        f'<p class="soft">This coordinator has been up for {duration(status.at - status.since)}. '
        "The same figures for programs: <code>/status.json</code> and <code>/metrics</code>.</p>"
    )


@lru_cache(maxsize=2)
def _units(marks: tuple[UnitMark, ...]) -> str:
    """Return a character per unit, with words; drawn again only when a unit has changed."""
    drawn = "".join(
        f'<span class="{STATES[mark.state][2]}" title="{html.escape(_tip(number, mark))}">'
        f"{html.escape(STATES[mark.state][0])}</span>"
        for number, mark in enumerate(marks)
    )
    return f'<p style="font:15px ui-monospace,monospace;overflow-wrap:anywhere">{drawn}</p>'


def _tip(number: int, mark: UnitMark) -> str:
    by = f" by {plain(mark.volunteer, 40)}" if mark.volunteer else ""
    stale = "" if mark.staleness is None else f", {count(mark.staleness, 'update')} stale"
    return f"unit {number}: {STATES[mark.state][1]}{by}{stale}"


def _accuracy(status: JobStatus) -> str:
    chart = accuracy_svg(status.overview.epochs, status.target_accuracy)
    if not chart:
        return '<p class="soft">The accuracy is known after the first epoch.</p>'
    target = "" if status.target_accuracy is None else f"; dashed: the target, {status.target_accuracy:.1%}"
    return f'{CHART}{chart}<p class="soft">accuracy: mean of each epoch, lowest to highest shaded{target}</p>'


def accuracy_svg(epochs: Sequence[EpochEnded], target: float | None) -> str:
    """Draw each epoch's mean accuracy, the band from its lowest to its highest, and the target; empty without any."""
    known = [one for one in epochs if math.isfinite(one.accuracy)]
    if not known:
        return ""
    end = known[-1]
    shown = [*known[:: math.ceil(len(known) / MAX_POINTS)], end]
    edges = [edge for one in shown for edge in (one.low, one.high, target) if edge is not None]
    last, low, high = max(end.epoch, MIN_EPOCHS), max(0.0, min(edges) - 0.02), min(1.0, max(edges) + 0.02)

    def x(epoch: float) -> str:
        return f"{LEFT + (RIGHT - LEFT) * (epoch - 1) / (last - 1):.1f}"

    def y(accuracy: float, below: float = 0.0) -> str:
        return f"{TOP + (BOTTOM - TOP) * (high - accuracy) / (high - low) + below:.1f}"

    def line(kind: str, accuracy: float) -> str:
        return f'<path class="{kind}" d="M{LEFT} {y(accuracy)}H{RIGHT}"/>'

    step = next((one for one in (0.01, 0.02, 0.05, 0.1) if (high - low) / one <= 6), 0.2)
    grid = "" if target is None else line("target", target)
    for level in (step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)):
        grid += f'{line("level", level)}<text x="{LEFT - 6}" y="{y(level, 4)}" text-anchor="end">{level:.0%}</text>'
    for epoch in range(1, last + 1, math.ceil(last / 12)):
        grid += f'<text x="{x(epoch)}" y="{HEIGHT - 20}" text-anchor="middle">{epoch}</text>'
    mean = " ".join(f"{x(one.epoch)},{y(one.accuracy)}" for one in shown)
    band = [f"{x(one.epoch)},{y(one.high)}" for one in shown]
    band += [f"{x(one.epoch)},{y(one.low)}" for one in reversed(shown)]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" font-size="12" '
        f'aria-label="Accuracy over epochs, {end.accuracy:.1%} in epoch {end.epoch}">{grid}'
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 3}" text-anchor="middle">epoch</text>'
        f'<polygon class="band" points="{" ".join(band)}"/><polyline class="mean" points="{mean}"/>'
        f'<circle class="dot" cx="{x(end.epoch)}" cy="{y(end.accuracy)}" r="4">'
        f"<title>epoch {end.epoch}: {end.accuracy:.1%}, {end.low:.1%} to {end.high:.1%}</title></circle></svg>"
    )


def _cells(row: VolunteerRow, now: float) -> tuple[str, ...]:
    counts = map(str, (row.accepted, row.rejected, row.expired, row.in_flight))
    return (plain(row.name or row.volunteer[:8], 40), reliability(row, now), *counts)


def reliability(one: VolunteerRow, now: float) -> str:
    """Return a volunteer's reliability as a word and a number; or that it is new, or banned for how long."""
    if one.banned_until is not None and one.banned_until > now:
        return f"banned for {duration(one.banned_until - now)}"
    if not one.accepted + one.rejected + one.expired:
        return "new"
    word = "high" if one.reliability >= 0.9 else "fair" if one.reliability >= 0.6 else "low"
    return f"{word} ({one.reliability:.0%})"
