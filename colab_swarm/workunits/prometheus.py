"""A `JobStatus` in the text format that Prometheus reads."""

from __future__ import annotations

import math
from collections.abc import Iterator

from colab_swarm.markup import Labels, Metric, exposition
from colab_swarm.workunits.status import JobStatus


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
