r"""What happened to a job, as entries of its store's log.

The log is the job's memory: whoever reads it from the beginning knows every unit, volunteer and epoch. The
coordinator writes all of it but `Assimilated` and `Measured`, which the parameter servers write.

    Met -> Assigned -> Accepted -> Assimilated -> Measured        then EpochEnded, and at last Finished
              |  \-> Returned -> Accepted | Rejected             with replicas, until enough of them are back
              |  \-> Rejected                                    the result was no use: the unit goes to somebody else
              |---> Expired                                      its deadline passed: likewise
              \---> GaveBack                                     the volunteer left in good order: likewise

Times are seconds since the epoch, so that they mean the same after a restart.

Whom to trust with a unit: an error rate per volunteer, and bans for those whose results are no use.

The error rate is BOINC's (its validator's ``update_error_rate``): an exponential average that begins at 0.1. It
forgets faster here, within some ten units instead of twenty, because a job of notebooks lasts hours, not months. Who
is often preempted is unreliable and gets few units; only who sends bad results is banned.

What a job's log says: every unit, volunteer and epoch, built by applying the entries in their order.

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

import msgspec


class Unit(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One subset of the data in one epoch, both counted as people do: epochs from 1, subsets from 0."""

    epoch: int
    subset: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.subset}"


class Entry(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all entries. ``at``: when it happened."""

    at: float


class Met(Entry, frozen=True):
    """A volunteer came for the first time. ``volunteer``: its peer id in hex; ``name``: what it calls itself."""

    volunteer: str
    name: str


class Assigned(Entry, frozen=True):
    """A volunteer is to train a unit before ``deadline``.

    Attributes:
        assignment: random, 32 hex digits; the only thing that an upload names.
        version: of the parameters at that time.
    """

    unit: Unit
    assignment: str
    volunteer: str
    deadline: float
    version: int


class Returned(Entry, frozen=True):
    """The result of one replica is kept as blob ``result`` until enough of them are back."""

    assignment: str
    result: str


class Accepted(Entry, frozen=True):
    """The unit's result, blob ``result``, waits for a parameter server, which weighs its own copy by ``alpha``.

    Attributes:
        base: version of the parameters that training began with.
        change: how far training moved the parameters (L2 norm).
    """

    unit: Unit
    assignment: str
    result: str
    alpha: float
    base: int
    change: float


class Rejected(Entry, frozen=True):
    """The result was no use."""

    assignment: str
    reason: str


class Expired(Entry, frozen=True):
    """The deadline passed without a result."""

    assignment: str


class GaveBack(Entry, frozen=True):
    """The volunteer will not train it after all."""

    assignment: str


class Assimilated(Entry, frozen=True):
    """A parameter server has made the result part of the parameters, which have ``version`` since.

    Attributes:
        seconds: what the update took, from taking the result to the new parameters in the store.
    """

    unit: Unit
    assignment: str
    server: str
    version: int
    seconds: float


class Measured(Entry, frozen=True):
    """Accuracy on the validation samples after the unit's assimilation."""

    unit: Unit
    accuracy: float


class EpochEnded(Entry, frozen=True):
    """All units of an epoch are assimilated; mean, lowest and highest accuracy over its units."""

    epoch: int
    accuracy: float
    low: float
    high: float


class Finished(Entry, frozen=True):
    """The job is done."""

    reason: str


AnyEntry: TypeAlias = (
    Met
    | Assigned
    | Returned
    | Accepted
    | Rejected
    | Expired
    | GaveBack
    | Assimilated
    | Measured
    | EpochEnded
    | Finished
)

_decoder: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)


def encode_entry(entry: AnyEntry) -> bytes:
    """As stores keep it."""
    return msgspec.msgpack.encode(entry)


def decode_entry(data: bytes) -> AnyEntry:
    """What `encode_entry` made."""
    return _decoder.decode(data)


MEMORY = 0.9

FIRST_ERROR_RATE = 0.1

RELIABLE = 0.5

"""Below this reliability a volunteer gets few units, and none that failed before if others are there."""

BAN_RATE = 0.25

"""A volunteer is banned if about so many of its latest results were bad: three in a row, or every fourth."""

FIRST_BAN_S = 600.0

LONGEST_BAN_S = 86_400.0

FREE_RETURNS = 3

"""Whoever gives units back more often, with no result in between, gets none for a while: each fills the log."""

LONGEST_REST_S = 600.0


@dataclass
class Reliability:
    """How one volunteer did so far.

    Attributes:
        error_rate: share of its latest units that came to nothing, for whatever reason.
        bad_rate: share of its latest results that were bad.
        accepted, rejected, expired: units.
        bans: so far; each is twice as long as the one before.
        banned_until: seconds since the epoch.
        returns: how often it gave units back since its last good result, last at ``returned_at``.
        rests_until: it gets nothing before.
    """

    error_rate: float = FIRST_ERROR_RATE
    bad_rate: float = 0.0
    accepted: int = 0
    rejected: int = 0
    expired: int = 0
    bans: int = 0
    banned_until: float = -math.inf
    returns: int = 0
    returned_at: float = -math.inf
    rests_until: float = -math.inf

    @property
    def reliability(self) -> float:
        """Between 0 and 1."""
        return 1 - self.error_rate

    @property
    def proven(self) -> bool:
        """Whether it may have as many units as the plan allows: it did one, and most come back."""
        return self.accepted > 0 and self.reliability >= RELIABLE

    def on_accepted(self) -> None:
        """One of its results was good."""
        self.accepted += 1
        self.returns = 0
        self.error_rate *= MEMORY
        self.bad_rate *= MEMORY

    def on_expired(self) -> None:
        """One of its units did not come back in time."""
        self.expired += 1
        self._err()

    def on_gave_back(self, now: float) -> None:
        """It gave back a unit; several at once count as one."""
        if now > self.returned_at:
            self.returned_at = now
            self.returns += 1
        if self.returns > FREE_RETURNS:
            self.rests_until = now + min(LONGEST_REST_S, 2.0 ** min(self.returns - FREE_RETURNS, 32))

    def on_rejected(self, now: float) -> None:
        """One of its results was bad."""
        self.rejected += 1
        self._err()
        self.bad_rate = MEMORY * self.bad_rate + 1 - MEMORY
        if self.bad_rate > BAN_RATE:
            self.banned_until = now + min(LONGEST_BAN_S, FIRST_BAN_S * 2.0 ** min(self.bans, 32))
            self.bans += 1

    def _err(self) -> None:
        self.error_rate = MEMORY * self.error_rate + 1 - MEMORY


LATEST = 100

Fate: TypeAlias = Literal["out", "returned", "accepted", "rejected", "expired", "given back", "superseded"]


@dataclass
class UnitReplica:
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

    replicas: list[UnitReplica] = field(default_factory=list)
    accepted: str | None = None
    assimilated: bool = False
    staleness: int | None = None
    failed_by: dict[str, float] = field(default_factory=dict)

    def live(self) -> list[UnitReplica]:
        """Replicas whose results are here or awaited."""
        return [replica for replica in self.replicas if replica.live]

    def is_with(self, volunteer: str) -> bool:
        """Whether a volunteer has a live replica."""
        return any(replica.volunteer == volunteer for replica in self.live())

    def returned(self) -> list[UnitReplica]:
        """Replicas whose results wait for a majority."""
        return [replica for replica in self.replicas if replica.fate == "returned"]


@dataclass
class VolunteerState:
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
    replicas: dict[str, UnitReplica] = field(default_factory=dict)
    volunteers: dict[str, VolunteerState] = field(default_factory=dict)
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

    def volunteer(self, volunteer: str) -> VolunteerState:
        """Its record; an empty one if it never came."""
        return self.volunteers.get(volunteer) or VolunteerState()

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

    def _seen(self, volunteer: str, at: float) -> VolunteerState:
        record = self.volunteers.setdefault(volunteer, VolunteerState())
        record.last_seen = max(record.last_seen, at)
        return record

    def _assigned(self, entry: Assigned) -> None:
        if entry.unit not in self.units:
            raise ValueError(
                f"unit {entry.unit} is in the store, but not in a job of {self.subsets} subsets: it is another job's "
                "store; name another, or set plan.subsets as it was"
            )
        replica = UnitReplica(
            entry.assignment, entry.unit, entry.volunteer, entry.at, entry.deadline, entry.version
        )
        self.replicas[entry.assignment] = replica
        self.units[entry.unit].replicas.append(replica)
        self._seen(entry.volunteer, entry.at).out.add(entry.assignment)

    def _back(self, assignment: str, at: float) -> UnitReplica:
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
