"""What a coordinator tells of its job to people and machines."""

from __future__ import annotations

from dataclasses import dataclass

from colab_swarm.workunits.overview import JobOverview


@dataclass(frozen=True)
class JobStatus:
    """A job and its coordinator. Times are seconds since the epoch.

    Attributes:
        name: of the job.
        at, since: now, and when this coordinator started.
        target_accuracy: the job ends when an epoch's mean reaches it.
        rows: samples of each subset.
        local_epochs: how often a unit goes through its subset.
        numel: values of the model.
        version: of the parameters: results assimilated so far.
        servers, server_deaths: parameter servers at work, and those that ended unasked.
        backlog: accepted results that wait for a parameter server.
        fault: what is wrong with the store; empty while all is well.
        overview: epochs, units and volunteers.
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
        """Units assimilated lately."""
        return 0.0 if self.overview.finished else self.overview.units_per_minute(self.at) / 60

    @property
    def samples_per_s(self) -> float:
        """Samples trained lately, those of each local epoch counted."""
        return self.units_per_s * self.local_epochs * sum(self.rows) / len(self.rows)

    @property
    def update_s(self) -> tuple[float, float] | None:
        """What updates of the parameters took lately: median and 95th percentile; None if there were none."""
        ordered = sorted(self.overview.update_s)
        if not ordered:
            return None
        return ordered[len(ordered) // 2], ordered[min(len(ordered) * 95 // 100, len(ordered) - 1)]
