"""A `JobStatus` as text and as static HTML, for notebooks and terminals; the status page shows more."""

from __future__ import annotations

from colab_swarm.markup import count, plain, table, text
from colab_swarm.workunits.status import JobStatus
from colab_swarm.workunits.svg import accuracy_svg

MAX_ROWS = 50
STYLE = (
    "<style>.job-view .mean{stroke:#4a78c0;fill:none;stroke-width:2}.job-view .band{fill:#4a78c0;opacity:.2}"
    ".job-view .dot{fill:#4a78c0}.job-view .target{stroke:#c0762a;stroke-dasharray:4 3}"
    ".job-view .level{stroke:currentColor;opacity:.15}.job-view text{fill:currentColor;font-size:12px}"
    ".job-view td,.job-view th{padding:1px 10px 1px 0}</style>"
)


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


def render_text(status: JobStatus) -> str:
    """As lines."""
    units, lines = status.overview.units, [summary(status)]
    if status.overview.finished is None:
        lines.append(
            f"  units: {units.waiting} wait, {units.training} in training, {units.queued} to assimilate, "
            f"{units.assimilated} done; {count(status.servers, 'parameter server')}"
        )
    lines += [
        f"  {plain(row.name or row.volunteer[:8], 40):<20} {count(row.accepted, 'unit')}, {row.rejected} rejected, "
        f"{row.expired} late, {row.in_flight} in hand"
        for row in status.overview.volunteers[:MAX_ROWS]
    ]
    told = [_more(status), plain(status.fault)]
    return "\n".join(lines + [f"  {line}" for line in told if line])


def render_html(status: JobStatus) -> str:
    """As one ``div``: a line, the accuracy of the epochs, the volunteers."""
    rows = [
        (
            text(row.name or row.volunteer[:8], 40),
            *map(str, (row.accepted, row.rejected, row.expired, row.in_flight)),
        )
        for row in status.overview.volunteers[:MAX_ROWS]
    ]
    columns = ("volunteer", "units", "rejected", "late", "in hand")
    return (
        f'<div class="job-view" style="font-family:sans-serif;font-size:13px;max-width:760px">{STYLE}'
        f"<p><b>{text(summary(status))}</b></p>"
        f"{accuracy_svg(status.overview.epochs, status.target_accuracy)}"
        f"{table(columns, rows) if rows else ''}{_more(status)}</div>"
    )


def _more(status: JobStatus) -> str:
    """How many volunteers are not listed."""
    more = len(status.overview.volunteers) - MAX_ROWS
    return f"and {more:,} more" if more > 0 else ""
