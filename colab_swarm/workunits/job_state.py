"""What a job's log says: every unit, volunteer and epoch, built by applying the entries in their order.

There is no other state: a coordinator that was killed reads the log again and knows what it knew. A replica is one
assignment of a unit. It is ``out`` at a volunteer, then ``returned`` while a majority is waited for, and ends as
``accepted`` (also if it agreed with the one that was taken), ``rejected``, ``expired``, ``given back`` or
``superseded`` (its unit was accepted without it).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from colab_swarm.workunits.entries import (
    Accepted,
    AnyEntry,
    Assigned,
    Assimilated,
    EpochEnded,
    Expired,
    Finished,
    GaveBack,
    Measured,
    Met,
    Rejected,
    Returned,
    Unit,
)
from colab_swarm.workunits.reliability import Reliability

LATEST = 100
Fate: TypeAlias = Literal["out", "returned", "accepted", "rejected", "expired", "given back", "superseded"]


@dataclass
class Replica:
    """One assignment, and what became of it. ``result``: name of the blob, once it is back; times as in entries."""

    assignment: str
    unit: Unit
    volunteer: str
    began: float
    deadline: float
    version: int
    fate: Fate = "out"
    result: str = ""

    @property
    def live(self) -> bool:
        """Whether its result is here, or awaited."""
        return self.fate in {"out", "returned"}


@dataclass
class UnitState:
    """One unit of an epoch.

    Attributes:
        replicas: in the order they were assigned.
        accepted: the assignment whose result was taken; None so far.
        assimilated: whether it is part of the parameters.
        staleness: of an assimilated one, how many others were assimilated since its volunteer had the parameters.
        failed_by: who did not bring a result of use, and when it last did not.
    """

    replicas: list[Replica] = field(default_factory=list)
    accepted: str | None = None
    assimilated: bool = False
    staleness: int | None = None
    failed_by: dict[str, float] = field(default_factory=dict)

    def live(self) -> list[Replica]:
        """Replicas whose results are here or awaited."""
        return [replica for replica in self.replicas if replica.live]

    def is_with(self, volunteer: str) -> bool:
        """Whether a volunteer has a live replica."""
        return any(replica.volunteer == volunteer for replica in self.live())

    def returned(self) -> list[Replica]:
        """Replicas whose results wait for a majority."""
        return [replica for replica in self.replicas if replica.fate == "returned"]


@dataclass
class Volunteer:
    """One volunteer. ``out``: its assignments that are not back; ``last_seen``: by the log."""

    name: str = ""
    standing: Reliability = field(default_factory=Reliability)
    out: set[str] = field(default_factory=set)
    last_seen: float = -math.inf


def _latest() -> deque[float]:
    return deque(maxlen=LATEST)


@dataclass
class JobState:
    """All that a log says. ``subsets``: units of an epoch; the other attributes follow the entries.

    ``units`` has those of this epoch and of all before; ``open`` those that nothing was accepted for.
    """

    subsets: int
    units: dict[Unit, UnitState] = field(default_factory=dict)
    open: dict[Unit, UnitState] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    volunteers: dict[str, Volunteer] = field(default_factory=dict)
    assimilated: dict[int, int] = field(default_factory=dict)  # units by epoch
    done_at: dict[int, float] = field(default_factory=dict)  # when the last unit of an epoch was assimilated
    measured: dict[int, dict[Unit, Measured]] = field(default_factory=dict)  # by epoch
    epochs: list[EpochEnded] = field(default_factory=list)
    finished: str | None = None
    epoch: int = 1  # the first whose units are not all assimilated
    unit_s: deque[float] = field(default_factory=_latest)
    update_s: deque[float] = field(default_factory=_latest)
    assimilated_at: deque[float] = field(default_factory=_latest)

    def __post_init__(self) -> None:
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.open = {Unit(self.epoch, subset): UnitState() for subset in range(self.subsets)}
        self.units |= self.open

    def unit(self, unit: Unit) -> UnitState:
        """Its state; an empty one if its epoch did not begin."""
        return self.units.get(unit) or UnitState()

    def units_of(self, epoch: int) -> Iterator[tuple[Unit, UnitState]]:
        """All units of an epoch that began."""
        return ((unit, self.units[unit]) for unit in (Unit(epoch, subset) for subset in range(self.subsets)))

    def volunteer(self, volunteer: str) -> Volunteer:
        """Its record; an empty one if it never came."""
        return self.volunteers.get(volunteer) or Volunteer()

    def apply(self, entry: AnyEntry) -> None:
        """Take in the next entry of the log.

        Raises:
            ValueError: the log is of a job with other subsets.
        """
        match entry:
            case Met():
                self._seen(entry.volunteer, entry.at).name = entry.name
            case Assigned():
                self._assigned(entry)
            case Returned():
                replica = self._back(entry.assignment, entry.at)
                replica.fate, replica.result = "returned", entry.result
            case Accepted():
                self._accepted(entry)
            case Rejected() | Expired() | GaveBack():
                self._failed(entry)
            case Assimilated():
                self._assimilated(entry)
            case Measured():
                self.measured.setdefault(entry.unit.epoch, {})[entry.unit] = entry
            case EpochEnded():
                self.epochs.append(entry)
            case Finished():
                self.finished = entry.reason

    def _seen(self, volunteer: str, at: float) -> Volunteer:
        record = self.volunteers.setdefault(volunteer, Volunteer())
        record.last_seen = max(record.last_seen, at)
        return record

    def _assigned(self, entry: Assigned) -> None:
        if entry.unit not in self.units:
            raise ValueError(
                f"unit {entry.unit} is in the store, but not in a job of {self.subsets} subsets: it is another job's "
                "store; name another, or set plan.subsets as it was"
            )
        replica = Replica(
            entry.assignment, entry.unit, entry.volunteer, entry.at, entry.deadline, entry.version
        )
        self.replicas[entry.assignment] = replica
        self.units[entry.unit].replicas.append(replica)
        self._seen(entry.volunteer, entry.at).out.add(entry.assignment)

    def _back(self, assignment: str, at: float) -> Replica:
        """The replica, whose result has arrived."""
        replica = self.replicas[assignment]
        self._seen(replica.volunteer, at).out.discard(assignment)
        if replica.fate != "returned":
            self.unit_s.append(at - replica.began)
        return replica

    def _accepted(self, entry: Accepted) -> None:
        self._back(entry.assignment, entry.at)
        unit = self.units[entry.unit]
        unit.accepted = entry.assignment
        del self.open[entry.unit]
        for replica in unit.replicas:
            volunteer = self.volunteers[replica.volunteer]
            if replica.assignment == entry.assignment or replica.fate == "returned":
                replica.fate = "accepted"
                volunteer.standing.on_accepted()
            elif replica.fate == "out":
                replica.fate = "superseded"
                volunteer.out.discard(replica.assignment)

    def _failed(self, entry: Rejected | Expired | GaveBack) -> None:
        replica = self.replicas[entry.assignment]
        volunteer, unit = self.volunteers[replica.volunteer], self.units[replica.unit]
        volunteer.out.discard(entry.assignment)
        unit.failed_by[replica.volunteer] = entry.at
        if isinstance(entry, Expired):  # and nothing was heard of it
            replica.fate = "expired"
            volunteer.standing.on_expired()
            return
        self._seen(replica.volunteer, entry.at)
        if isinstance(entry, Rejected):
            replica.fate = "rejected"
            volunteer.standing.on_rejected(entry.at)
        else:
            replica.fate = "given back"
            volunteer.standing.on_gave_back(entry.at)

    def _assimilated(self, entry: Assimilated) -> None:
        unit = self.units[entry.unit]
        if unit.assimilated:
            raise ValueError(f"unit {entry.unit} was assimilated twice: this is a fault of the store")
        unit.assimilated = True
        unit.staleness = max(0, entry.version - 1 - self.replicas[entry.assignment].version)
        self.update_s.append(entry.seconds)
        self.assimilated_at.append(entry.at)
        self.assimilated[entry.unit.epoch] = self.assimilated.get(entry.unit.epoch, 0) + 1
        if self.assimilated.get(self.epoch) == self.subsets:
            self.done_at[self.epoch] = entry.at
            self.epoch += 1
            self._begin_epoch()

    def check_invariants(self) -> None:
        """Used by tests.

        Raises:
            AssertionError: the state contradicts itself.
        """
        for key, unit in self.units.items():
            assert key.epoch <= self.epoch, f"{key} was assigned before epoch {self.epoch} was done"
            assert not unit.assimilated or unit.accepted, f"{key} was assimilated, but not accepted"
            live = [replica.volunteer for replica in unit.live()]
            assert len(live) == len(set(live)), f"two replicas of {key} are one volunteer's"
            assert not (live and unit.accepted), f"{key} is accepted, and still awaited"
            assert (unit.accepted is None) == (key in self.open), f"{key} is not where it belongs"
        out = {name for name, replica in self.replicas.items() if replica.fate == "out"}
        assert out == set().union(*(volunteer.out for volunteer in self.volunteers.values()))
