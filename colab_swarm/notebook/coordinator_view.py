"""The work-unit panel: a `JobStatus` as text and as static HTML, for notebooks and terminals. Pure functions."""

from __future__ import annotations

import html
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from colab_swarm.markup import count, duration, plain
from colab_swarm.notebook import theme
from colab_swarm.notebook.page import Sample, StatusPage
from colab_swarm.notebook.theme import Document

if TYPE_CHECKING:
    from colab_swarm.workunits.state import JobStatus, VolunteerRow

ACROSS = 100  # units in a line
STATES = {
    "assimilated": "# done",
    "queued": "= to assimilate",
    "training": "> training",
    "late": "! late",
    "rejected": "x rejected",
    "waiting": ". waits",
}
"""Character and words for each state of a unit."""
COLUMNS = ("volunteer", "reliability", "units", "rejected", "late", "in hand")
DYING = "the parameter servers end again and again: the coordinator's parameter-servers.log says why"
HOW_TO = (
    "<h4>How to volunteer</h4>"
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
        done = f"{overview.units['assimilated']} of {len(status.rows)} units"
        where = f"epoch {overview.epoch} of {overview.max_epochs}, {done}"
    accuracy = f", accuracy {overview.epochs[-1].accuracy:.3f}" if overview.epochs else ""
    return f"{status.name}: {where}{accuracy}, {count(len(overview.volunteers), 'volunteer')}"


def figures(status: JobStatus) -> dict[str, str]:
    """Return the known figures by name.

    The ETA is that of the epoch's last unit at the recent rate. Staleness is the mean number of
    results that arrived while a unit of this epoch was trained.
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
        _draw_units(shown, status)
    shown.draw(_accuracy(status))
    cells = partial(_cells, now=status.at)
    shown.table(COLUMNS, overview.volunteers, cells, numbers=range(2, 6), what="volunteers")
    return shown


def _draw_units(shown: Document, status: JobStatus) -> None:
    marks = "".join(STATES[mark.state][0] for mark in status.overview.marks)
    lines = [marks[begin : begin + ACROSS] for begin in range(0, len(marks), ACROSS)]
    drawn = "<br>".join(map(html.escape, lines))
    style = "font:13px ui-monospace,monospace;overflow-wrap:anywhere"
    shown.draw(f'<p style="{style}">{drawn}</p>', *(f"  {line}" for line in lines))
    more = len(status.rows) - len(status.overview.marks)
    shown.note(f"units: {'  '.join(STATES.values())}" + (f"; and {more:,} more units" if more > 0 else ""))


def draw_page(status: JobStatus) -> list[Document]:
    """Return the public page: an introduction for visitors around the job."""
    about = Document("", label="about this job")
    about.draw(
        f"<p>Volunteers train a model of {status.numel:,} numbers on {sum(status.rows):,} samples. "
        f"Each takes a <b>unit</b>, one of {len(status.rows)} parts of the data, trains a copy of the model on it and "
        "sends the copy back; a parameter server blends it into the model. An <b>epoch</b> is over when all units "
        f"were trained once.</p>{'' if status.overview.finished else HOW_TO}"
        f'<p class="soft">This coordinator has been up for {duration(status.at - status.since)}. '
        "The same figures for programs: <code>/status.json</code> and <code>/metrics</code>.</p>"
    )
    return [draw(status), about]


def metrics(status: JobStatus) -> list[Sample]:
    """Return the job's figures for Prometheus."""
    view, job = status.overview, {"job": status.name}
    quantiles = zip(("0.5", "0.95"), status.update_s or (), strict=False)
    known = [] if view.accuracy is None else [view.accuracy]
    return [
        ("job_uptime_seconds", job, status.at - status.since),
        ("job_epoch", job, view.epoch),
        ("job_finished", job, view.finished is not None),
        ("job_store_fault", job, bool(status.fault)),
        *(("job_accuracy", job, accuracy) for accuracy in known),
        *(("job_units", {**job, "state": name}, number) for name, number in view.units.items()),
        ("job_units_per_second", job, status.units_per_s),
        ("job_samples_per_second", job, status.samples_per_s),
        *(("job_update_seconds", {**job, "quantile": quantile}, value) for quantile, value in quantiles),
        ("job_parameter_servers", job, status.servers),
        ("job_backlog", job, status.backlog),
        ("job_volunteers", job, len(view.volunteers)),
        ("job_assimilated_units_total", job, status.version),
        ("job_parameter_server_deaths_total", job, status.server_deaths),
    ]


def status_page(look: Callable[[], JobStatus]) -> StatusPage[JobStatus]:
    """Return the page of a coordinator whose status ``look`` returns."""
    return StatusPage(look, lambda status: status.name, draw_page, metrics, host="coordinator")


def _accuracy(status: JobStatus) -> str:
    epochs, target = status.overview.epochs, status.target_accuracy
    mean = [(one.epoch, one.accuracy) for one in epochs]
    spread = [(one.epoch, one.low, one.high) for one in epochs]
    limit = [] if target is None else [(epoch, target) for epoch, _ in mean]
    if not (chart := theme.curve(mean, spread=spread, limit=limit, label="accuracy")):
        return '<p class="soft">The accuracy is drawn after the second epoch.</p>'
    dashed = "" if target is None else f"; dashed: the target, {target:.1%}"
    return f'{chart}<p class="soft">accuracy: mean of each epoch, lowest to highest shaded{dashed}</p>'


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
