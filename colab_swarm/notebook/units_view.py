"""The panels of work units, a coordinator's and a volunteer's. Pure functions."""

import html
from collections.abc import Callable
from typing import TYPE_CHECKING

from colab_swarm.markup import count, duration, plain, size
from colab_swarm.notebook import theme
from colab_swarm.notebook.page import Sample, StatusPage
from colab_swarm.notebook.theme import Document

if TYPE_CHECKING:
    from colab_swarm.workunits.client import VolunteerSnapshot
    from colab_swarm.workunits.state import JobStatus, VolunteerState

ACROSS = 100  # units in a line
MARKS = {  # character and words for each state of a unit
    "assimilated": "# done",
    "queued": "= to assimilate",
    "training": "> training",
    "late": "! late",
    "rejected": "x rejected",
    "waiting": ". waits",
}
COLUMNS = ("volunteer", "reliability", "units", "rejected", "late", "in hand")
DYING = "the parameter servers end again and again: the coordinator's parameter-servers.log says why"
HOW_TO = (
    "<h4>How to volunteer</h4>"
    "<p>Ask the organizer for the link. In a notebook: <code>cs.workunits.volunteer(link)</code> after "
    "<code>import colab_swarm as cs</code>; in a shell: <code>colab-swarm volunteer LINK</code>. "
    "You can stop at any time: your unfinished units go to other volunteers.</p>"
)


def job_line(status: "JobStatus") -> str:
    if status.finished is not None:
        where = f"finished: {status.finished}"
    else:
        done = f"{status.units['assimilated']} of {len(status.rows)} units"
        where = f"epoch {status.epoch} of {status.max_epochs}, {done}"
    accuracy = f", accuracy {status.epochs[-1].accuracy:.3f}" if status.epochs else ""
    return f"{status.name}: {where}{accuracy}, {count(len(status.volunteers), 'volunteer')}"


def figures(status: "JobStatus") -> dict[str, str]:
    """Return the known figures. The ETA is that of the epoch's last unit at the recent rate."""
    left = len(status.rows) - status.units["assimilated"]
    target = "" if status.target_accuracy is None else f", target {status.target_accuracy:.1%}"
    known = {
        f"accuracy{target}": "" if status.accuracy is None else f"{status.accuracy:.1%}",
        "epoch done in": duration(left / status.units_per_s) if status.units_per_s else "",
        "samples/s": f"{status.samples_per_s:,.0f}" if status.units_per_s else "",
        "staleness": "" if status.staleness is None else f"{status.staleness:.1f} updates",
        "parameter servers": "" if status.finished else f"{status.servers}, {status.backlog} results wait",
    }
    return {name: value for name, value in known.items() if value}


def draw_job(status: "JobStatus") -> Document:
    shown = Document(*job_line(status).split(": ", 1), label=f"work units of {plain(status.name)}")
    shown.warn(f"the store does not answer: {status.fault}" if status.fault else "")
    shown.warn(DYING if status.server_deaths and not status.servers and not status.finished else "")
    shown.figures(figures(status))
    if status.finished is None and status.marks:
        marks = "".join(MARKS[mark][0] for mark in status.marks)
        lines = [marks[begin : begin + ACROSS] for begin in range(0, len(marks), ACROSS)]
        style = "font:13px ui-monospace,monospace;overflow-wrap:anywhere"
        drawn = f'<p style="{style}">{"<br>".join(map(html.escape, lines))}</p>'
        shown.draw(drawn, *map("  {}".format, lines))
        more = len(status.rows) - len(marks)
        shown.note(f"units: {'  '.join(MARKS.values())}" + (f"; and {more:,} more units" if more > 0 else ""))
    shown.draw(_accuracy(status))
    shown.table(
        COLUMNS, status.volunteers, lambda row: _cells(row, status.at), numbers=range(2, 6), what="volunteers"
    )
    return shown


def _cells(row: "VolunteerState", now: float) -> tuple[str, ...]:
    reliability = f"{1 - row.error_rate:.0%}" if row.accepted + row.rejected + row.expired else "new"
    if row.banned_until > now:
        reliability = f"banned for {duration(row.banned_until - now)}"
    counts = map(str, (row.accepted, row.rejected, row.expired, row.in_flight))
    return (plain(row.name or row.volunteer[:8], 40), reliability, *counts)


def _accuracy(status: "JobStatus") -> str:
    target = status.target_accuracy
    mean = [(one.epoch, one.accuracy) for one in status.epochs]
    limit = [] if target is None else [(epoch, target) for epoch, _ in mean]
    if not (chart := theme.curve(mean, limit=limit, label="accuracy", across="epoch")):
        return '<p class="soft">The accuracy is drawn after the second epoch.</p>'
    dashed = "" if target is None else f"; dashed: the target, {target:.1%}"
    return f'{chart}<p class="soft">accuracy: mean of each epoch{dashed}</p>'


def _page(status: "JobStatus") -> list[Document]:
    about = Document("", label="about this job")
    about.draw(
        f"<p>Volunteers train a model of {status.numel:,} numbers on {sum(status.rows):,} samples. "
        f"Each takes a <b>unit</b>, one of {len(status.rows)} parts of the data, trains a copy of the model on it and "
        "sends the copy back; a parameter server blends it into the model. An <b>epoch</b> is over when all units "
        f"were trained once.</p>{'' if status.finished else HOW_TO}"
        f'<p class="soft">This coordinator has been up for {duration(status.at - status.since)}. '
        "The same figures for programs: <code>/status.json</code> and <code>/metrics</code>.</p>"
    )
    return [draw_job(status), about]


def _metrics(status: "JobStatus") -> list[Sample]:
    job, updates = {"job": status.name}, status.update_s
    quantiles = {"0.5": len(updates) // 2, "0.95": len(updates) * 95 // 100} if updates else {}
    known = [] if status.accuracy is None else [status.accuracy]
    return [
        ("job_uptime_seconds", job, status.at - status.since),
        ("job_epoch", job, status.epoch),
        ("job_finished", job, status.finished is not None),
        ("job_store_fault", job, bool(status.fault)),
        *(("job_accuracy", job, accuracy) for accuracy in known),
        *(("job_units", {**job, "state": name}, number) for name, number in status.units.items()),
        ("job_units_per_second", job, status.units_per_s),
        ("job_samples_per_second", job, status.samples_per_s),
        *(("job_update_seconds", {**job, "quantile": of}, updates[n]) for of, n in quantiles.items()),
        ("job_parameter_servers", job, status.servers),
        ("job_backlog", job, status.backlog),
        ("job_volunteers", job, len(status.volunteers)),
        ("job_assimilated_units_total", job, status.version),
        ("job_parameter_server_deaths_total", job, status.server_deaths),
    ]


def status_page(look: "Callable[[], JobStatus]") -> "StatusPage[JobStatus]":
    return StatusPage(look, lambda status: status.name, _page, _metrics, host="coordinator")


def volunteer_line(snapshot: "VolunteerSnapshot") -> str:
    return f"{plain(snapshot.job)}: {_state(snapshot)}"


def draw_volunteer(snapshot: "VolunteerSnapshot") -> Document:
    shown = Document(plain(snapshot.job), _state(snapshot), label=f"volunteer for {plain(snapshot.job)}")
    for unit in snapshot.units:
        if unit.unit:
            batches = f" {unit.done:,} of {unit.batches:,} batches" if unit.batches else ""
            loss = "" if unit.loss is None else f", loss {unit.loss:.3f}"
            words = f"{unit.phase}{batches}{loss}, {duration(unit.seconds)}"
            shown.bar(unit.done / unit.batches if unit.batches else 0.0, words, title=unit.unit)
    contribution = {
        "contributed": f"{count(snapshot.samples, 'sample')} in {duration(snapshot.seconds)}",
        "downloaded": size(snapshot.received_bytes),
        "uploaded": size(snapshot.sent_bytes),
    }
    shown.figures(contribution)
    shown.warn(f"last refusal: {snapshot.refusal}" if snapshot.refusal else "")
    if fault := snapshot.fault[-4000:]:
        shown.draw(f'<pre style="font-size:11px;overflow:auto">{html.escape(fault)}</pre>', fault)
    return shown


def _state(snapshot: "VolunteerSnapshot") -> str:
    epoch = ""
    if snapshot.epoch:
        accuracy = "" if snapshot.accuracy is None else f", accuracy {snapshot.accuracy:.3f} after the last"
        epoch = f"epoch {snapshot.epoch}{accuracy}; "
    others = {"refused": snapshot.refused, "given back": snapshot.given_back}
    units = [count(snapshot.accepted, "unit") + " accepted"]
    units += [f"{number:,} {what}" for what, number in others.items() if number]
    return f"{plain(snapshot.state)}; {epoch}{', '.join(units)}"
