"""The coordinator's page: a `JobStatus` as HTML and for Prometheus. Pure functions; a volunteer's text is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from colab_swarm.markup import (
    Labels,
    Metric,
    card,
    duration,
    exposition,
    legend,
    milliseconds,
    page,
    table,
    text,
    tiles,
)
from colab_swarm.workunits.overview import PRESENT_S, JobStatus, UnitCounts, VolunteerRow
from colab_swarm.workunits.state import EpochEnded

WIDTH, HEIGHT = 760, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 36
MAX_POINTS = 400
MIN_EPOCHS = 4
"""Epochs that the chart has room for, so that a job's first ones do not look like its end."""
MAX_ROWS = 50
PHASES = {
    "assimilated": "done",
    "queued": "trained, waiting for a parameter server",
    "training": "with a volunteer",
    "waiting": "not begun",
}
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
.mark { background: var(--trainer); } .range { background: var(--trainer); opacity: .3; }
code { background: var(--back); padding: 1px 5px; border-radius: 4px; } .now { margin-top: 12px; }
.scroll { overflow-x: auto; } .scroll th, .scroll td { white-space: nowrap; padding-left: 12px; }
.scroll th:first-child, .scroll td:first-child { white-space: normal; min-width: 120px; padding-left: 0; }
"""
NO_CHART = '<p class="soft">Known when the first epoch is over.</p>'
HOW_TO = (
    "<p>Ask the organizer for the link. In a notebook: <code>cs.workunits.volunteer(link)</code> after "
    "<code>import colab_swarm as cs</code>; in a shell: <code>colab-swarm volunteer LINK</code>. "
    "You can stop at any time: your unfinished units go to other volunteers.</p>"
)


@dataclass(frozen=True)
class _Axes:
    """The chart's plane: epochs from 1 to ``last``, accuracies from ``low`` to ``high``."""

    last: int
    low: float
    high: float

    def x(self, epoch: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (epoch - 1) / (self.last - 1)

    def y(self, accuracy: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - accuracy) / (self.high - self.low)

    def points(self, pairs: Sequence[tuple[int, float]]) -> str:
        return " ".join(f"{self.x(epoch):.1f},{self.y(accuracy):.1f}" for epoch, accuracy in pairs)

    def line(self, kind: str, accuracy: float) -> str:
        return f'<path class="{kind}" d="M{LEFT} {self.y(accuracy):.1f}H{WIDTH - RIGHT}"/>'

    def grid(self) -> str:
        step = next((one for one in (0.01, 0.02, 0.05, 0.1) if (self.high - self.low) / one <= 6), 0.2)
        levels = [step * i for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        epochs = range(1, self.last + 1, math.ceil(self.last / 12))
        return "".join(
            f'{self.line("level", level)}<text x="{LEFT - 6}" y="{self.y(level) + 4:.1f}" text-anchor="end">'
            f"{level:.0%}</text>"
            for level in levels
        ) + "".join(
            f'<text x="{self.x(epoch):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{epoch}</text>'
            for epoch in epochs
        )


def accuracy_svg(epochs: Sequence[EpochEnded], target: float | None) -> str:
    """Draw each epoch's mean accuracy, the band from its lowest to its highest, and the target; empty without any."""
    known = [one for one in epochs if math.isfinite(one.accuracy)]
    if not known:
        return ""
    end = known[-1]
    shown = [*known[:: math.ceil(len(known) / MAX_POINTS)], end]
    edges = [edge for one in shown for edge in (one.low, one.high, target) if edge is not None]
    axes = _Axes(max(end.epoch, MIN_EPOCHS), max(0.0, min(edges) - 0.02), min(1.0, max(edges) + 0.02))
    band = [(one.epoch, one.high) for one in shown] + [(one.epoch, one.low) for one in reversed(shown)]
    mean = [(one.epoch, one.accuracy) for one in shown]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" font-size="12" '
        f'aria-label="Accuracy over epochs, {end.accuracy:.1%} in epoch {end.epoch}">'
        f"{axes.grid()}{'' if target is None else axes.line('target', target)}"
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 3}" text-anchor="middle">epoch</text>'
        f'<polygon class="band" points="{axes.points(band)}"/><polyline class="mean" points="{axes.points(mean)}"/>'
        f'<circle class="dot" cx="{axes.x(end.epoch):.1f}" cy="{axes.y(end.accuracy):.1f}" r="4">'
        f"<title>epoch {end.epoch}: {end.accuracy:.1%}, {end.low:.1%} to {end.high:.1%}</title></circle></svg>"
    )


def render_page(status: JobStatus) -> str:
    lost = "The coordinator does not answer; this is its last status."
    return page(text(status.name), render_live(status), lost=lost, style=STYLE)


def render_live(status: JobStatus) -> str:
    """Return the part of the page that changes."""
    view = status.overview
    keys = legend([("mean of the epoch", "mark"), ("lowest to highest", "range")])
    if status.target_accuracy is not None:
        keys += f" – – target {status.target_accuracy:.1%}"
    chart = accuracy_svg(view.epochs, status.target_accuracy)
    columns = ("volunteer", "reliability", "units done", "refused", "late", "in hand", "last seen")
    listed = f'<div class="scroll">{table(columns, [_row(one, status.at) for one in view.volunteers[:MAX_ROWS]])}</div>'
    if (more := len(view.volunteers) - MAX_ROWS) > 0:
        listed += f'<p class="soft">and {more:,} more</p>'
    return (
        f"<h1>{text(status.name)}</h1>"
        f'<p class="soft lead">Volunteers train a model of {status.numel:,} numbers on {sum(status.rows):,} samples. '
        f"Each takes a <b>unit</b>, one of {len(status.rows)} parts of the data, trains a copy of the model on it and "
        "sends the copy back; a parameter server blends it into the model. An <b>epoch</b> is over when all units "
        f"were trained once.</p>{_warning(status)}{_progress(status)}{_figures(status)}"
        f"{card(f'Accuracy on unseen data {keys}', chart or NO_CHART)}{card('Volunteers', listed)}"
        f"{'' if view.finished else card('How to volunteer', HOW_TO)}"
        f'<p class="soft">This coordinator has been up for {duration(status.at - status.since)}. '
        "The same figures for programs: <code>/status.json</code> and <code>/metrics</code>.</p>"
    )


def _warning(status: JobStatus) -> str:
    why = f"the store does not answer: {text(status.fault)}"
    if not status.fault:
        if not status.server_deaths or status.servers or status.overview.finished:
            return ""
        why = (
            "the parameter servers end again and again. The coordinator's output, or "
            "<code>parameter-servers.log</code> in its folder, says why."
        )
    return f'<p class="warning">Training waits, {why}</p>'


def _progress(status: JobStatus) -> str:
    view, units = status.overview, status.overview.units
    if view.finished:
        title = f"Finished after epoch {len(view.epochs)}: {text(view.finished)}"
        units = UnitCounts(waiting=0, training=0, queued=0, assimilated=len(status.rows))
    else:
        at_most = "" if status.target_accuracy is None else " at most"
        title = f"Epoch {view.epoch} of {view.max_epochs}{at_most}"
    counts = {phase: getattr(units, phase) for phase in PHASES}
    whole = sum(counts.values()) or 1
    bars = keys = ""
    for phase, number in counts.items():
        bars += f'<span class="{phase}" style="width:{100 * number / whole:.2f}%"></span>'
        keys += f"<span>{legend([(f'<b>{number}</b> {PHASES[phase]}', phase)])}</span>"
    return card(
        title,
        f'<div class="bar" role="progressbar" aria-label="{units.assimilated} of {whole} units done" aria-valuemin="0" '
        f'aria-valuemax="{whole}" aria-valuenow="{units.assimilated}">{bars}</div><div class="keys soft">{keys}</div>',
    )


def _figures(status: JobStatus) -> str:
    view, update_s = status.overview, status.update_s
    shown = {
        "accuracy": "–" if view.accuracy is None else f"{view.accuracy:.1%}",
        "volunteers": str(sum(status.at - one.last_seen < PRESENT_S for one in view.volunteers)),
        "units/hour": f"{status.units_per_s * 3600:,.0f}" if status.units_per_s else "–",
        "samples/s": f"{status.samples_per_s:,.0f}" if status.units_per_s else "–",
        "update": milliseconds(update_s[0]) if update_s else "–",
        "servers": str(status.servers),
    }
    tail = f"; 95 % of them took less than {milliseconds(update_s[1])}" if update_s else ""
    return f'<div class="now">{tiles(shown)}</div><p class="soft">An update blends one result into the model{tail}.</p>'


def _row(one: VolunteerRow, now: float) -> tuple[str, ...]:
    return (
        f'{text(one.name or "without a name", 40)} <span class="soft">{text(one.volunteer[:8])}</span>',
        reliability(one, now),
        *(f"{number:,}" for number in (one.accepted, one.rejected, one.expired, one.in_flight)),
        f"{duration(now - one.last_seen)} ago",
    )


def reliability(one: VolunteerRow, now: float) -> str:
    """Return a volunteer's reliability as a word and a number; or that it is new, or banned for how long."""
    if one.banned_until is not None and one.banned_until > now:
        return f"banned for {duration(one.banned_until - now)}"
    if not one.accepted + one.rejected + one.expired:
        return "new"
    word = "high" if one.reliability >= 0.9 else "fair" if one.reliability >= 0.6 else "low"
    return f"{word} ({one.reliability:.0%})"


def render_prometheus(status: JobStatus) -> str:
    """Return the job's figures in Prometheus's text format."""
    view = status.overview
    job: Labels = (("job", status.name),)
    gauges: dict[str, dict[Labels, float]] = {
        "uptime_seconds": {job: status.at - status.since},
        "epoch": {job: view.epoch},
        "finished": {job: view.finished is not None},
        "store_fault": {job: bool(status.fault)},
        "accuracy": {} if view.accuracy is None else {job: view.accuracy},
        "units": {(*job, ("state", phase)): float(getattr(view.units, phase)) for phase in PHASES},
        "units_per_second": {job: status.units_per_s},
        "samples_per_second": {job: status.samples_per_s},
        "update_seconds": {
            (*job, ("quantile", quantile)): value
            for quantile, value in zip(("0.5", "0.95"), status.update_s or (), strict=False)
        },
        "parameter_servers": {job: status.servers},
        "backlog": {job: status.backlog},
        "volunteers": {job: len(view.volunteers)},
    }
    counters = {"assimilated_units": status.version, "parameter_server_deaths": status.server_deaths}
    metrics: list[Metric] = [(f"job_{name}", "gauge", values) for name, values in gauges.items()]
    metrics += [(f"job_{name}_total", "counter", {job: value}) for name, value in counters.items()]
    return exposition(metrics)
