"""The coordinator's page: a `JobStatus` as HTML. Pure functions; every text from a volunteer is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from colab_swarm.markup import Labels, Metric, card, duration, exposition, legend, page, table, text, tiles
from colab_swarm.workunits.overview import JobStatus, UnitCounts, VolunteerRow
from colab_swarm.workunits.state import EpochEnded

WIDTH, HEIGHT = 760, 240

LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 36

MAX_POINTS = 400

FEWEST_EPOCHS = 4

"""Room for so many from the beginning, so that the first ones do not look like the end."""

STEPS = (0.01, 0.02, 0.05, 0.1, 0.2)


def accuracy_svg(epochs: Sequence[EpochEnded], target: float | None) -> str:
    """Mean accuracy of each epoch over the band from its lowest to its highest, and the target; empty without any."""
    known = [one for one in epochs if math.isfinite(one.accuracy)]
    if not known:
        return ""
    shown = [*known[:: math.ceil(len(known) / MAX_POINTS)], known[-1]]
    edges = [edge for one in shown for edge in (one.low, one.high)] + ([target] if target is not None else [])
    low, high = max(0.0, min(edges) - 0.02), min(1.0, max(edges) + 0.02)
    last = max(shown[-1].epoch, FEWEST_EPOCHS)

    def x(epoch: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (epoch - 1) / (last - 1)

    def y(accuracy: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - accuracy) / (high - low)

    band = [(one.epoch, one.high) for one in shown] + [(one.epoch, one.low) for one in reversed(shown)]
    line = [(one.epoch, one.accuracy) for one in shown]
    around, along = (" ".join(f"{x(e):.1f},{y(a):.1f}" for e, a in points) for points in (band, line))
    parts = [_level(y(level), f"{level:.0%}") for level in _levels(low, high)]
    parts += [
        f'<text x="{x(epoch):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{epoch}</text>'
        for epoch in range(1, last + 1, max(1, math.ceil(last / 12)))
    ]
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 3}" text-anchor="middle">epoch</text>')
    if target is not None:
        parts.append(f'<path class="target" d="M{LEFT} {y(target):.1f}H{WIDTH - RIGHT}"/>')
    parts.append(f'<polygon class="band" points="{around}"/><polyline class="mean" points="{along}"/>')
    end = shown[-1]
    parts.append(
        f'<circle class="dot" cx="{x(end.epoch):.1f}" cy="{y(end.accuracy):.1f}" r="4">'
        f"<title>epoch {end.epoch}: {end.accuracy:.1%}, {end.low:.1%} to {end.high:.1%}</title></circle>"
    )
    label = f"Accuracy over epochs, {end.accuracy:.1%} in epoch {end.epoch}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" aria-label="{label}" font-size="12">'
        f"{''.join(parts)}</svg>"
    )


def _levels(low: float, high: float) -> list[float]:
    """About five round ones between two."""
    step = next((step for step in STEPS if (high - low) / step <= 6), STEPS[-1])
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _level(y: float, text: str) -> str:
    return (
        f'<path class="level" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )


STYLE = """
.lead { max-width: 46em; margin-bottom: 12px; }
.bar { display: flex; height: 18px; border-radius: 9px; overflow: hidden; background: var(--line); margin: 4px 0 8px; }
.bar span { height: 100%; } .keys { display: flex; flex-wrap: wrap; gap: 2px 16px; } .keys .key { margin-left: 0; }
.assimilated { background: var(--assistant); } .queued { background: var(--catching); }
.training { background: var(--trainer); }
.waiting { background: var(--line); } .key.waiting { border: 1px solid var(--soft); }
.mean { fill: none; stroke: var(--trainer); stroke-width: 2; stroke-linejoin: round; } .dot { fill: var(--trainer); }
.band { fill: var(--trainer); fill-opacity: .18; } .level { stroke: var(--line); }
.target { stroke: var(--assistant); stroke-width: 1.5; stroke-dasharray: 6 4; }
.rule { display: inline-block; width: 16px; height: 0; border-top: 2px dashed var(--assistant);
  margin: 0 5px 3px 12px; }
.mark { background: var(--trainer); } .range { background: var(--trainer); opacity: .3; }
code { background: var(--back); padding: 1px 5px; border-radius: 4px; }
.now { margin-top: 12px; } .nowrap { white-space: nowrap; }
.scroll { overflow-x: auto; } .scroll th, .scroll td { white-space: nowrap; padding-left: 12px; }
.scroll th:first-child, .scroll td:first-child { white-space: normal; min-width: 120px; padding-left: 0; }
"""

MAX_ROWS = 50

PRESENT_S = 600.0

"""A volunteer of whom nothing was heard for longer is not counted."""

PHASES = {
    "assimilated": "done",
    "queued": "trained, waiting for a parameter server",
    "training": "with a volunteer",
    "waiting": "not begun",
}


def render_page(status: JobStatus) -> str:
    """The whole page."""
    lost = "The coordinator does not answer; this is what it said last."
    return page(text(status.name), render_live(status), lost=lost, style=STYLE)


def render_live(status: JobStatus) -> str:
    """The part of the page that changes."""
    samples = sum(status.rows)
    return (
        f"<h1>{text(status.name)}</h1>"
        f'<p class="soft lead">A model of {status.numel:,} numbers is trained here by volunteers on '
        f"{samples:,} samples. Each takes a <b>unit</b>, one of {len(status.rows)} parts of the data, trains a copy of "
        "the model on it and sends the copy back; a parameter server blends it into the model. When all "
        "units were trained once, an <b>epoch</b> is over.</p>"
        f"{_fault(status)}{_progress(status)}{_tiles(status)}{_accuracy(status)}{_volunteers(status)}{_help(status)}"
        f'<p class="soft">This coordinator has been up for {duration(status.at - status.since)}. '
        "The same figures for programs: <code>/status.json</code> and <code>/metrics</code>.</p>"
    )


def _fault(status: JobStatus) -> str:
    told = f"the store does not answer: {text(status.fault)}" if status.fault else ""
    if status.server_deaths and not status.servers and not status.overview.finished:
        told = told or (
            "the parameter servers end again and again. What the coordinator prints, or "
            "<code>parameter-servers.log</code> in its folder, tells why."
        )
    return f'<p class="warning">Training waits, {told}</p>' if told else ""


def _progress(status: JobStatus) -> str:
    view, units = status.overview, status.overview.units
    if view.finished:
        title = f"Finished after epoch {len(view.epochs)}: {text(view.finished)}"
        units = UnitCounts(waiting=0, training=0, queued=0, assimilated=len(status.rows))
    else:
        title = f"Epoch {view.epoch} of {view.max_epochs}"
        title += " at most" if status.target_accuracy is not None else ""
    counts = {phase: getattr(units, phase) for phase in PHASES}
    whole = sum(counts.values()) or 1
    bars = "".join(
        f'<span class="{phase}" style="width:{100 * number / whole:.2f}%"></span>'
        for phase, number in counts.items()
    )
    keys = "".join(
        f"<span>{legend([(f'<b>{counts[phase]}</b> {words}', phase)])}</span>"
        for phase, words in PHASES.items()
    )
    said = f"{units.assimilated} of {whole} units done"
    bar = (
        f'<div class="bar" role="progressbar" aria-label="{said}" aria-valuemin="0" aria-valuemax="{whole}" '
        f'aria-valuenow="{units.assimilated}">{bars}</div>'
    )
    return card(title, f'{bar}<div class="keys soft">{keys}</div>')


def _tiles(status: JobStatus) -> str:
    view, update_s = status.overview, status.update_s
    ended = [one.accuracy for one in view.epochs if math.isfinite(one.accuracy)]
    present = sum(status.at - one.last_seen < PRESENT_S for one in view.volunteers)
    shown = {
        "accuracy": f"{ended[-1]:.1%}" if ended else "–",
        "volunteers": f"{present}",
        "units/hour": f"{status.units_per_s * 3600:,.0f}" if status.units_per_s else "–",
        "samples/s": f"{status.samples_per_s:,.0f}" if status.units_per_s else "–",
        "update": _ms(update_s[0]) if update_s else "–",
        "servers": f"{status.servers}",
    }
    said = "An update blends one result into the model"
    said += f"; 95 % of them took less than {_ms(update_s[1])}." if update_s else "."
    return f'<div class="now">{tiles(shown)}</div><p class="soft">{said}</p>'


def _ms(seconds: float) -> str:
    if seconds >= 9.95:
        return f"{seconds:,.0f} s"
    return f"{seconds * 1000:,.0f} ms" if seconds >= 0.00995 else f"{seconds * 1000:.1f} ms"


def _accuracy(status: JobStatus) -> str:
    target = status.target_accuracy
    chart = accuracy_svg(status.overview.epochs, target)
    keys = legend([("mean of the epoch", "mark"), ("lowest to highest", "range")])
    if target is not None:
        keys += f'<span class="nowrap"><span class="rule"></span>target {target:.1%}</span>'
    missing = '<p class="soft">Known when the first epoch is over.</p>'
    return card(f"Accuracy on unseen data {keys}", chart or missing)


def _volunteers(status: JobStatus) -> str:
    rows = [_row(one, status.at) for one in status.overview.volunteers[:MAX_ROWS]]
    more = len(status.overview.volunteers) - len(rows)
    columns = ("volunteer", "reliability", "units done", "refused", "late", "in hand", "last seen")
    after = f'<p class="soft">and {more:,} more</p>' if more else ""
    return card("Volunteers", f'<div class="scroll">{table(columns, rows)}</div>{after}')


def _row(one: VolunteerRow, now: float) -> tuple[str, ...]:
    return (
        f'{text(one.name or "without a name", 40)} <span class="soft">{text(one.volunteer[:8])}</span>',
        reliability(one, now),
        f"{one.accepted:,}",
        f"{one.rejected:,}",
        f"{one.expired:,}",
        f"{one.in_flight:,}",
        f"{duration(now - one.last_seen)} ago",
    )


def reliability(one: VolunteerRow, now: float) -> str:
    """In a word and a number; or that it is new, or for how long it is banned."""
    if one.banned_until is not None and one.banned_until > now:
        return f"banned for {duration(one.banned_until - now)}"
    if not one.accepted + one.rejected + one.expired:
        return "new"
    words = "high" if one.reliability >= 0.9 else "fair" if one.reliability >= 0.6 else "low"
    return f"{words} ({one.reliability:.0%})"


def _help(status: JobStatus) -> str:
    if status.overview.finished:
        return ""
    return card(
        "How to volunteer",
        "<p>Ask the organizer for the link. In a notebook: <code>cs.workunits.volunteer(link)</code> after "
        "<code>import colab_swarm as cs</code>; in a shell: <code>colab-swarm volunteer LINK</code>. "
        "You can stop whenever you like: what you leave goes to somebody else.</p>",
    )


def render_prometheus(status: JobStatus) -> str:
    """The figures of the job, one a line."""
    return exposition(_metrics(status))


def _metrics(status: JobStatus) -> Iterator[Metric]:
    view = status.overview
    job: Labels = (("job", status.name),)
    yield "job_uptime_seconds", "gauge", {job: status.at - status.since}
    yield "job_epoch", "gauge", {job: view.epoch}
    yield "job_finished", "gauge", {job: view.finished is not None}
    yield "job_store_fault", "gauge", {job: bool(status.fault)}
    ended = [one.accuracy for one in view.epochs if math.isfinite(one.accuracy)]
    yield "job_accuracy", "gauge", {job: ended[-1]} if ended else {}
    units = {name: float(getattr(view.units, name)) for name in view.units.__dataclass_fields__}
    yield "job_units", "gauge", {(*job, ("state", state)): number for state, number in units.items()}
    yield "job_assimilated_units_total", "counter", {job: status.version}
    yield "job_units_per_second", "gauge", {job: status.units_per_s}
    yield "job_samples_per_second", "gauge", {job: status.samples_per_s}
    update_s = dict(zip(("0.5", "0.95"), status.update_s or (), strict=False))
    yield "job_update_seconds", "gauge", {(*job, ("quantile", q)): value for q, value in update_s.items()}
    yield "job_parameter_servers", "gauge", {job: status.servers}
    yield "job_parameter_server_deaths_total", "counter", {job: status.server_deaths}
    yield "job_backlog", "gauge", {job: status.backlog}
    yield "job_volunteers", "gauge", {job: len(view.volunteers)}
