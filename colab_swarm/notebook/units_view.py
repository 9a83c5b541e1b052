"""Draw the panels of work units, for a coordinator and for a volunteer. Pure functions."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from colab_swarm.markup import count, duration, plain, size
from colab_swarm.notebook.page import Sample, StatusPage
from colab_swarm.notebook.panel import Views
from colab_swarm.notebook.theme import Document

if TYPE_CHECKING:
    from colab_swarm.workunits.client import VolunteerSnapshot
    from colab_swarm.workunits.state import JobStatus, VolunteerState

_ACROSS = 100  # units shown in one line
MARKS = {
    "assimilated": "# done",
    "queued": "= to assimilate",
    "training": "> training",
    "late": "! late",
    "rejected": "x rejected",
    "waiting": ". waits",
}
"""Character and words for each state of a unit."""
COLUMNS = ("volunteer", "reliability", "units", "rejected", "late", "in hand")
_MAX_FAULT_CHARS = 4000
_DYING = "the parameter servers end again and again: the coordinator's parameter-servers.log says why"
_HOW_TO = (
    "<h4>How to volunteer</h4>"
    "<p>Ask the organizer for the link. In a notebook: <code>cs.workunits.volunteer(link)</code> after "
    "<code>import colab_swarm as cs</code>; in a shell: <code>colab-swarm volunteer LINK</code>. "
    "You can stop at any time: your unfinished units go to other volunteers.</p>"
)


def figures(status: "JobStatus") -> dict[str, str]:
    """Return the known figures. The ETA is for the last unit of the epoch, at the recent rate."""
    figures = {}
    if status.accuracy is not None:
        name = "accuracy"
        if status.target_accuracy is not None:
            name += f", target {status.target_accuracy:.1%}"
        figures[name] = f"{status.accuracy:.1%}"
    if status.units_per_s:
        units_left = len(status.rows) - status.units["assimilated"]
        figures["epoch done in"] = duration(units_left / status.units_per_s)
        figures["samples/s"] = f"{status.samples_per_s:,.0f}"
    if status.staleness is not None:
        figures["staleness"] = f"{status.staleness:.1f} updates"
    if not status.finished:
        figures["parameter servers"] = f"{status.servers}, {status.backlog} results wait"
    return figures


def draw_job(status: "JobStatus") -> Document:
    if status.finished is not None:
        progress = f"finished: {status.finished}"
    else:
        done = f"{status.units['assimilated']} of {len(status.rows)} units"
        progress = f"epoch {status.epoch} of {status.max_epochs}, {done}"
    if status.epochs:
        progress += f", accuracy {status.epochs[-1].accuracy:.3f}"
    progress += f", {count(len(status.volunteers), 'volunteer')}"
    document = Document(status.name, progress, label=f"work units of {status.name}")
    if status.fault:
        document.warn(f"the store does not answer: {status.fault}")
    servers_die = status.server_deaths and not status.servers
    if servers_die and not status.finished:
        document.warn(_DYING)
    document.figures(figures(status))
    if status.marks and not status.over:
        marks = "".join([MARKS[mark][0] for mark in status.marks])
        document.code([marks[begin : begin + _ACROSS] for begin in range(0, len(marks), _ACROSS)])
        legend = f"units: {'  '.join(MARKS.values())}"
        units_beyond = len(status.rows) - len(marks)
        if units_beyond > 0:
            legend += f"; and {units_beyond:,} more units"
        document.note(legend)
    means = [(epoch.epoch, epoch.accuracy) for epoch in status.epochs]
    limit: list[tuple[float, float]] = []
    legend = "accuracy: mean of each epoch"
    if status.target_accuracy is not None:
        limit = [(epoch, status.target_accuracy) for epoch, _ in means]
        legend += f"; dashed: the target, {status.target_accuracy:.1%}"
    document.curve(means, legend=legend, limit=limit, label="accuracy", across="epoch")
    if len(means) < 2:
        document.note("The accuracy is drawn after the second epoch.")
    document.table(
        COLUMNS, status.volunteers, lambda row: _cells(row, status.at), numbers=range(2, 6), what="volunteers"
    )
    return document


def _cells(row: "VolunteerState", now: float) -> tuple[str, ...]:
    reliability = "new"
    if row.banned_until > now:
        reliability = f"banned for {duration(row.banned_until - now)}"
    elif row.accepted + row.rejected + row.expired:
        reliability = f"{1 - row.error_rate:.0%}"
    numbers = (row.accepted, row.rejected, row.expired, row.in_flight)
    return plain(row.name or row.volunteer[:8], 40), reliability, *map(str, numbers)


def _page(status: "JobStatus") -> list[Document]:
    about = Document(label="about this job")
    how_to = "" if status.finished else _HOW_TO
    about.draw(
        f"<p>Volunteers train a model of {status.numel:,} numbers on {sum(status.rows):,} samples. "
        f"Each takes a <b>unit</b>, one of {len(status.rows)} parts of the data, trains a copy of the model on it and "
        "sends the copy back; a parameter server blends it into the model. An <b>epoch</b> is over when all units "
        f"were trained once.</p>{how_to}"
        f'<p class="soft">This coordinator has been up for {duration(status.at - status.since)}. '
        "The same figures for programs: <code>/status.json</code> and <code>/metrics</code>.</p>"
    )
    return [draw_job(status), about]


def _metrics(status: "JobStatus") -> list[Sample]:
    job = {"job": status.name}
    samples: list[Sample] = [
        ("job_uptime_seconds", job, status.at - status.since),
        ("job_epoch", job, status.epoch),
        ("job_finished", job, status.over),
        ("job_store_fault", job, bool(status.fault)),
        ("job_units_per_second", job, status.units_per_s),
        ("job_samples_per_second", job, status.samples_per_s),
        ("job_parameter_servers", job, status.servers),
        ("job_backlog", job, status.backlog),
        ("job_volunteers", job, len(status.volunteers)),
        ("job_assimilated_units_total", job, status.version),
        ("job_parameter_server_deaths_total", job, status.server_deaths),
    ]
    if status.accuracy is not None:
        samples.append(("job_accuracy", job, status.accuracy))
    for state, units in status.units.items():
        samples.append(("job_units", {**job, "state": state}, units))
    durations_s = status.update_s
    if durations_s:
        for percent in (50, 95):
            quantile = {**job, "quantile": f"{percent / 100:g}"}
            samples.append(("job_update_seconds", quantile, durations_s[len(durations_s) * percent // 100]))
    return samples


JOB_VIEWS: "Views[JobStatus]" = Views(draw_job, who="coordinator", leave=("Stop", "Stopped"))


def status_page(look: "Callable[[], JobStatus]") -> "StatusPage[JobStatus]":
    return StatusPage(look, _page, _metrics, host="coordinator")


def draw_volunteer(snapshot: "VolunteerSnapshot") -> Document:
    parts = [snapshot.state]
    if snapshot.epoch:
        epoch = f"epoch {snapshot.epoch}"
        if snapshot.accuracy is not None:
            epoch += f", accuracy {snapshot.accuracy:.3f} after the last"
        parts.append(epoch)
    units = f"{count(snapshot.accepted, 'unit')} accepted"
    if snapshot.refused:
        units += f", {snapshot.refused:,} refused"
    if snapshot.surplus:
        units += f", {snapshot.surplus:,} came after another volunteer's"
    if snapshot.given_back:
        units += f", {snapshot.given_back:,} given back"
    state = "; ".join([*parts, units])
    document = Document(snapshot.job, state, label=f"volunteer for {snapshot.job}")
    for unit in snapshot.units:
        words = unit.phase
        part = 0.0
        if unit.batches:
            words += f" {unit.done:,} of {unit.batches:,} batches"
            part = unit.done / unit.batches
        if unit.loss is not None:
            words += f", loss {unit.loss:.3f}"
        document.bar(part, f"{words}, {duration(unit.seconds)}", title=unit.unit)
    contribution = {
        "contributed": f"{count(snapshot.samples, 'sample')} in {duration(snapshot.seconds)}",
        "downloaded": size(snapshot.received_bytes),
        "uploaded": size(snapshot.sent_bytes),
    }
    document.figures(contribution)
    if snapshot.refusal:
        document.warn(f"last refusal: {snapshot.refusal}")
    if snapshot.fault:
        document.code(snapshot.fault[-_MAX_FAULT_CHARS:].splitlines())
    return document


VOLUNTEER_VIEWS: "Views[VolunteerSnapshot]" = Views(
    draw_volunteer, who="volunteer", leave=("Stop", "Stopped")
)
