"""The progress of a job, as shown to people and programs, and its page. Pure functions; texts are escaped."""

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
from colab_swarm.workunits.state import EpochEnded, JobState, Measured, Unit, UnitState

MAX_MARKS = 400
"""Units shown one by one."""
PRESENT_S = 600.0
"""A volunteer that has been silent for longer counts as gone."""


@dataclass(frozen=True)
class VolunteerRow:
    """One volunteer: its id in hex, the name it chose, its reliability (0 to 1), and numbers of units.

    Times are seconds since the epoch; ``banned_until`` is None if it is not banned.
    """

    volunteer: str
    name: str
    reliability: float
    accepted: int
    rejected: int
    expired: int
    in_flight: int
    banned_until: float | None
    last_seen: float


@dataclass(frozen=True)
class UnitCounts:
    """Units of the epoch: waiting for a volunteer, in training, queued for a parameter server, assimilated."""

    waiting: int
    training: int
    queued: int
    assimilated: int


@dataclass(frozen=True)
class UnitMark:
    """One unit of the epoch.

    ``state`` is ``waiting``, ``training``, ``queued`` (for a parameter server) or ``assimilated``;
    or the unit waits again because its last ``volunteer`` was ``late`` or its result ``rejected``.
    ``staleness``: results assimilated while it was trained.
    """

    state: str
    volunteer: str = ""
    staleness: int | None = None


@dataclass(frozen=True)
class JobOverview:
    """A job.

    Attributes:
        epoch, max_epochs: the current epoch, from 1, and the plan's last one.
        finished: why the job ended; None before.
        volunteers: all so far, by their accepted units.
        epochs, measured: the epochs that ended, and this epoch's accuracies so far.
        unit_s, update_s: durations of the latest units, from assignment to result, and of the latest updates.
        assimilated_at: times of the latest assimilations, seconds since the epoch.
        marks: the first units of this epoch, `MAX_MARKS` at most, by subset.
    """

    epoch: int
    max_epochs: int
    finished: str | None
    units: UnitCounts
    volunteers: tuple[VolunteerRow, ...]
    epochs: tuple[EpochEnded, ...]
    measured: tuple[Measured, ...]
    unit_s: tuple[float, ...]
    update_s: tuple[float, ...]
    assimilated_at: tuple[float, ...]
    marks: tuple[UnitMark, ...] = ()

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy of the newest epoch that has one."""
        return next((one.accuracy for one in reversed(self.epochs) if math.isfinite(one.accuracy)), None)

    def units_per_minute(self, now: float) -> float:
        """Return the rate of the latest assimilations; 0 if there were none."""
        if not self.assimilated_at or now <= self.assimilated_at[0]:
            return 0.0
        return 60 * len(self.assimilated_at) / (now - self.assimilated_at[0])


def overview_of(state: JobState, epoch: int, max_epochs: int, now: float) -> JobOverview:
    """Return ``state`` as shown to people, with the units of ``epoch``."""
    rows = [
        VolunteerRow(
            volunteer=name,
            name=one.name,
            reliability=one.standing.reliability,
            accepted=one.standing.accepted,
            rejected=one.standing.rejected,
            expired=one.standing.expired,
            in_flight=len(one.out),
            banned_until=one.standing.banned_until if one.standing.banned_until > now else None,
            last_seen=one.last_seen,
        )
        for name, one in state.volunteers.items()
    ]
    units = [state.units[Unit(epoch, subset)] for subset in range(state.subsets)]
    assimilated = sum(unit.assimilated for unit in units)
    accepted = sum(unit.accepted is not None for unit in units)
    training = sum(bool(unit.live()) for unit in units)
    return JobOverview(
        epoch=epoch,
        max_epochs=max_epochs,
        finished=state.finished,
        units=UnitCounts(len(units) - accepted - training, training, accepted - assimilated, assimilated),
        volunteers=tuple(sorted(rows, key=lambda row: -row.accepted)),
        epochs=tuple(state.epochs),
        measured=tuple(state.measured.get(epoch, {}).values()),
        unit_s=tuple(state.unit_s),
        update_s=tuple(state.update_s),
        assimilated_at=tuple(state.assimilated_at),
        marks=tuple(_mark(unit, state) for unit in units[:MAX_MARKS]),
    )


def _mark(unit: UnitState, state: JobState) -> UnitMark:
    last = unit.replicas[-1] if unit.replicas else None
    whose = next((one for one in unit.replicas if one.assignment == unit.accepted), last)
    if unit.accepted is not None:
        shown = "assimilated" if unit.assimilated else "queued"
    elif unit.live():
        shown = "training"
    else:
        shown = {"expired": "late", "rejected": "rejected"}.get(last.fate if last else "", "waiting")
    name = state.volunteer(whose.volunteer).name or whose.volunteer[:8] if whose else ""
    return UnitMark(shown, name, unit.staleness)


@dataclass(frozen=True)
class JobStatus:
    """A job and its coordinator. Times are seconds since the epoch.

    Attributes:
        since: start of this coordinator.
        rows: samples of each subset.
        local_epochs: passes over its subset that a unit makes.
        numel, version: values of the model, and results assimilated so far.
        servers, server_deaths: parameter servers that run, and that died.
        backlog: accepted results that wait for a parameter server.
        fault: the store's current error; empty while it works.
    """

    name: str
    at: float
    since: float
    target_accuracy: float | None
    rows: tuple[int, ...]
    local_epochs: int
    numel: int
    version: int
    servers: int
    server_deaths: int
    backlog: int
    fault: str
    overview: JobOverview

    @property
    def units_per_s(self) -> float:
        """Rate of the latest assimilations."""
        return 0.0 if self.overview.finished else self.overview.units_per_minute(self.at) / 60

    @property
    def samples_per_s(self) -> float:
        """Rate of trained samples, each local epoch counted."""
        return self.units_per_s * self.local_epochs * sum(self.rows) / len(self.rows)

    @property
    def update_s(self) -> tuple[float, float] | None:
        """Median and 95th percentile of the latest updates' durations; None before the first."""
        ordered = sorted(self.overview.update_s)
        if not ordered:
            return None
        return ordered[len(ordered) // 2], ordered[min(len(ordered) * 95 // 100, len(ordered) - 1)]


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
