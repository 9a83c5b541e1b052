"""The progress of a job: a `JobStatus`, which people, programs and Prometheus get. Pure functions."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from colab_swarm.markup import Labels, Metric, exposition
from colab_swarm.workunits.state import EpochEnded, JobState, Measured, Unit, UnitState

MAX_MARKS = 400
"""Units shown one by one."""


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


def overview_of(state: JobState, epoch: int, max_epochs: int, now: float) -> JobOverview:
    """Return ``state`` as shown to people, with the units of ``epoch``."""
    rows = [
        VolunteerRow(
            volunteer=name,
            name=one.name,
            reliability=one.reliability,
            accepted=one.accepted,
            rejected=one.rejected,
            expired=one.expired,
            in_flight=len(one.out),
            banned_until=one.banned_until if one.banned_until > now else None,
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
        """Rate of the latest assimilations; 0 if there were none."""
        at = self.overview.assimilated_at
        return len(at) / (self.at - at[0]) if at and self.at > at[0] and not self.overview.finished else 0.0

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
        return ordered[len(ordered) // 2], ordered[len(ordered) * 95 // 100]


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
        "units": {(*job, ("state", name)): float(number) for name, number in asdict(view.units).items()},
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
