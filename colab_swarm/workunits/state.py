r"""The log of a job: its entries, and the state of units, volunteers and epochs that the entries give.

After a kill, a new coordinator reads the log from the start, and so has the state again. The coordinator writes all
entries except `Assimilated` and `Measured`, which the parameter servers write.

    Began, at each start of a coordinator
    Assigned -> Accepted -> Assimilated -> Measured               then EpochEnded, and at last Finished
       |  \-> Returned -> Accepted | Rejected             with replicas, until enough of them are back
       |  \-> Rejected                                    invalid result: the unit goes to another volunteer
       |---> Expired                                      its deadline passed: the unit goes to another volunteer
       \---> GaveBack                                     returned untrained: the unit goes to another volunteer

Each volunteer has an error rate, as in BOINC (``update_error_rate`` of its validator). The rate is an exponential
average that starts at 0.1 and forgets a unit after about ten more units. A volunteer that is often preempted becomes
unreliable and gets few units. Only a bad result leads to a ban.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import msgspec

from colab_swarm.errors import require


class Unit(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One subset of the data in one epoch: epochs count from 1, subsets from 0."""

    epoch: int
    subset: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.subset}"


class Entry(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An event at the time ``at``, in seconds since the epoch (1970). Such times stay valid after a restart."""

    at: float


class Began(Entry, frozen=True):
    """A coordinator with this random name begins or resumes the job. Earlier coordinators make no more decisions."""

    coordinator: str


class AssignmentEntry(Entry, frozen=True):
    """Base of the entries about an assignment, a random name of 32 hex digits. An upload contains only this name."""

    assignment: str

    @property
    def result(self) -> str:
        """Name of the blob with the result of the assignment."""
        return f"result-{self.assignment}"


class Assigned(AssignmentEntry, frozen=True):
    """A volunteer gets a unit to train, from the parameters of ``version``.

    ``volunteer`` is the volunteer's peer id in hex, and ``name`` is a name that the volunteer has chosen.
    """

    unit: Unit
    volunteer: str
    name: str
    deadline: float
    version: int


class Returned(AssignmentEntry, frozen=True):
    """The result of one replica has come. The store keeps it until enough results of the unit have come."""


class Accepted(AssignmentEntry, frozen=True):
    """A result is accepted and waits to be assimilated.

    ``alpha`` is the weight of the server's parameters, and ``change`` is the L2 norm of the change by training.
    """

    unit: Unit
    alpha: float
    change: float


class Rejected(AssignmentEntry, frozen=True):
    reason: str


class Expired(AssignmentEntry, frozen=True):
    """The deadline passed, the volunteer was banned, or the unit was overdue when another result came."""


class GaveBack(AssignmentEntry, frozen=True):
    """The volunteer will not train the unit."""


class Assimilated(AssignmentEntry, frozen=True):
    """A result became part of the parameters, which now have ``version``; the update took ``seconds``."""

    unit: Unit
    server: str
    version: int
    seconds: float


class Measured(Entry, frozen=True):
    """Accuracy on the validation samples after the unit's assimilation."""

    unit: Unit
    accuracy: float


class EpochEnded(Entry, frozen=True):
    """All units of an epoch are assimilated. The accuracies are the mean, lowest and highest over these units."""

    epoch: int
    accuracy: float
    low: float
    high: float


class Finished(Entry, frozen=True):
    reason: str


UnitEntry: TypeAlias = Assigned | Returned | Accepted | Rejected | Expired | GaveBack | Assimilated
AnyEntry: TypeAlias = Began | UnitEntry | Measured | EpochEnded | Finished
encode_entry = msgspec.msgpack.Encoder().encode
decode_entry = msgspec.msgpack.Decoder[AnyEntry](AnyEntry).decode
MEMORY = 0.9
"""Fraction of an error rate that remains after the next unit."""
BAN_RATE = 0.28
"""A bad result that raises the error rate above this value leads to a ban.

Three bad results in a row reach it. In the long run, one bad result in four reaches it too.
"""
FIRST_BAN_S = 600.0
LONGEST_BAN_S = 86_400.0
FREE_RETURNS = 3
"""After more returns of units than this without a good result in between, a volunteer must pause.

Units that come back again and again delay the epoch and fill the log.
"""
LONGEST_REST_S = 600.0


@dataclass
class VolunteerState:
    """Record of one volunteer. Times are seconds since the epoch (1970)."""

    volunteer: str = ""  # its peer id in hex
    name: str = ""  # chosen by the volunteer
    last_seen: float = -math.inf
    error_rate: float = 0.1  # fraction of the latest units whose result was bad or did not come
    # the next fields are numbers of units
    in_flight: int = 0
    accepted: int = 0
    rejected: int = 0
    expired: int = 0
    bans: int = 0  # number of bans so far; each is twice as long as the one before
    banned_until: float = -math.inf
    returns: int = 0  # times it gave units back, or was late, since its last good result
    returned_at: float = -math.inf  # the latest of these times
    rests_until: float = -math.inf

    @property
    def idle_until(self) -> float:
        """The time before which the volunteer gets no units."""
        return max(self.banned_until, self.rests_until)

    @property
    def proven(self) -> bool:
        """True for a reliable volunteer. It may hold as many units as the plan allows, and gets failed units first."""
        return self.accepted > 0 and self.error_rate <= 0.5

    def on_accepted(self) -> None:
        self.accepted += 1
        self.returns = 0
        self.error_rate *= MEMORY

    def on_expired(self, now: float) -> None:
        self.expired += 1
        self._on_error()
        self.on_gave_back(now)

    def on_gave_back(self, now: float) -> None:
        """Count a return of units; several units at the same time count as one return."""
        if now > self.returned_at:
            self.returned_at = now
            self.returns += 1
        if self.returns > FREE_RETURNS:
            doublings = min(self.returns - FREE_RETURNS, 32)
            self.rests_until = now + min(LONGEST_REST_S, 2.0**doublings)

    def on_rejected(self, now: float) -> None:
        self.rejected += 1
        self._on_error()
        if self.error_rate > BAN_RATE:
            self.banned_until = now + min(LONGEST_BAN_S, FIRST_BAN_S * 2.0 ** min(self.bans, 32))
            self.bans += 1

    def _on_error(self) -> None:
        # BOINC's update_error_rate
        self.error_rate = MEMORY * self.error_rate + 1 - MEMORY


MARKS = {"expired": "late", "rejected": "rejected"}
"""Marks of units that wait again, by the fate of their last assignment."""
MAX_MARKS = 400
"""Most units that are shown one by one."""
Fate: TypeAlias = Literal["out", "returned", "accepted", "rejected", "expired", "given back", "superseded"]


@dataclass
class UnitReplica:
    """A unit ``given`` to a volunteer.

    The fate is ``accepted`` also if the replica's result agreed with the accepted result. It is ``superseded`` if the
    coordinator accepted results of other volunteers without this one.
    """

    given: Assigned
    fate: Fate = "out"


@dataclass
class UnitState:
    """One unit of an epoch."""

    replicas: list[UnitReplica] = field(default_factory=list)  # all of them, oldest first
    accepted: bool = False  # whether one of its results is accepted
    staleness: int | None = None  # results assimilated between its start and its own; None before its own
    failed_by: dict[str, float] = field(default_factory=dict)  # when each volunteer last failed the unit

    def live(self) -> list[UnitReplica]:
        """Return the replicas whose results may still come, or came and wait for a majority."""
        return [replica for replica in self.replicas if replica.fate in {"out", "returned"}]

    def is_with(self, volunteer: str) -> bool:
        return any(replica.given.volunteer == volunteer for replica in self.live())

    def returned(self) -> list[UnitReplica]:
        return [replica for replica in self.replicas if replica.fate == "returned"]

    @property
    def mark(self) -> str:
        if self.staleness is not None:
            return "assimilated"
        if self.accepted:
            return "queued"
        if self.live():
            return "training"
        if not self.replicas:
            return "waiting"
        return MARKS.get(self.replicas[-1].fate, "waiting")


_latest: Callable[[], deque[float]] = partial(deque, maxlen=100)


@dataclass
class JobState:
    """The state of a job that results from its log. An epoch of the job has ``subsets`` units."""

    subsets: int
    coordinator: str = ""  # name of the newest coordinator
    units: dict[Unit, UnitState] = field(default_factory=dict)  # of this epoch and all before
    open: dict[Unit, UnitState] = field(default_factory=dict)  # units without an accepted result
    replicas: dict[str, UnitReplica] = field(default_factory=dict)  # by assignment
    out: dict[str, UnitReplica] = field(default_factory=dict)  # replicas that volunteers hold, by assignment
    volunteers: dict[str, VolunteerState] = field(default_factory=dict)  # by peer id
    known: dict[str, set[int]] = field(
        default_factory=lambda: defaultdict(set)
    )  # subsets that each volunteer had
    version: int = 0  # of the newest parameters
    assimilated: int = 0  # units of ``epoch``
    done_at: dict[int, float] = field(default_factory=dict)  # when an epoch's last unit was assimilated
    measured: dict[int, dict[Unit, float]] = field(default_factory=dict)  # accuracies by epoch
    epochs: list[EpochEnded] = field(default_factory=list)
    finished: str | None = None  # why the job ended; None before
    epoch: int = 0  # the first epoch whose units are not all assimilated
    # durations of each volunteer's latest units, from assignment to result
    unit_s: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(_latest))
    update_s: deque[float] = field(default_factory=_latest)  # durations of the latest updates
    changes: deque[float] = field(default_factory=_latest)  # of the latest accepted results (L2 norm)
    assimilated_at: deque[float] = field(default_factory=_latest)

    def __post_init__(self) -> None:
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self.open = {Unit(self.epoch, subset): UnitState() for subset in range(self.subsets)}
        self.units |= self.open
        self.assimilated = 0

    @property
    def backlog(self) -> int:
        """Number of accepted results that wait for a parameter server."""
        return self.subsets - len(self.open) - self.assimilated

    def volunteer(self, volunteer: str) -> VolunteerState:
        return self.volunteers.get(volunteer) or VolunteerState()

    def apply(self, entry: AnyEntry) -> None:
        """Apply the next entry of the log; raise ValueError if it belongs to a job with other subsets."""
        match entry:
            case Began():
                self.coordinator = entry.coordinator
            case Assigned():
                self._assigned(entry)
            case Returned():
                self._back(entry)
            case Accepted():
                self._accepted(entry)
            case Rejected() | Expired() | GaveBack():
                self._failed(entry)
            case Assimilated():
                self._assimilated(entry)
            case Measured():
                self.measured.setdefault(entry.unit.epoch, {})[entry.unit] = entry.accuracy
            case EpochEnded():
                self.epochs.append(entry)
            case Finished():
                self.finished = entry.reason

    def _seen(self, volunteer: str, at: float) -> VolunteerState:
        record = self.volunteers.setdefault(volunteer, VolunteerState(volunteer))
        record.last_seen = max(record.last_seen, at)
        return record

    def _assigned(self, entry: Assigned) -> None:
        require(
            entry.unit in self.units,
            f"unit {entry.unit} is in the store, but not in a job of {self.subsets} subsets: it is another job's "
            "store; name another, or set plan.subsets as it was",
        )
        replica = UnitReplica(entry)
        self.replicas[entry.assignment] = replica
        self.out[entry.assignment] = replica
        self.units[entry.unit].replicas.append(replica)
        volunteer = self._seen(entry.volunteer, entry.at)
        volunteer.in_flight += 1
        volunteer.name = entry.name
        self.known[entry.volunteer].add(entry.unit.subset)

    def _end(self, replica: UnitReplica, fate: Fate) -> VolunteerState:
        volunteer = self.volunteers[replica.given.volunteer]
        if self.out.pop(replica.given.assignment, None) is not None:
            volunteer.in_flight -= 1
        replica.fate = fate
        return volunteer

    def _back(self, entry: Returned | Accepted) -> None:
        replica = self.replicas[entry.assignment]
        self._seen(replica.given.volunteer, entry.at)
        if replica.fate != "returned":
            self.unit_s[replica.given.volunteer].append(entry.at - replica.given.at)
        self._end(replica, "returned")

    def _accepted(self, entry: Accepted) -> None:
        self._back(entry)
        unit = self.units[entry.unit]
        unit.accepted = True
        self.changes.append(entry.change)
        del self.open[entry.unit]
        for replica in unit.live():
            if replica.fate == "returned":
                self._end(replica, "accepted").on_accepted()
            else:
                self._end(replica, "superseded")

    def _failed(self, entry: Rejected | Expired | GaveBack) -> None:
        replica = self.replicas[entry.assignment]
        self.units[replica.given.unit].failed_by[replica.given.volunteer] = entry.at
        # an expired unit is no sign of life of its volunteer
        if isinstance(entry, Expired):
            self._end(replica, "expired").on_expired(entry.at)
            return
        self._seen(replica.given.volunteer, entry.at)
        if isinstance(entry, Rejected):
            self._end(replica, "rejected").on_rejected(entry.at)
        else:
            self._end(replica, "given back").on_gave_back(entry.at)

    def _assimilated(self, entry: Assimilated) -> None:
        unit = self.units[entry.unit]
        require(unit.staleness is None, f"unit {entry.unit} was assimilated twice: a fault of the store")
        start = self.replicas[entry.assignment].given.version
        unit.staleness = max(0, entry.version - 1 - start)
        self.version = max(self.version, entry.version)
        self.update_s.append(entry.seconds)
        self.assimilated_at.append(entry.at)
        self.assimilated += 1
        if self.assimilated == self.subsets:
            self.done_at[self.epoch] = entry.at
            self._begin_epoch()


@dataclass(frozen=True)
class JobStatus:
    """A job and its coordinator. Times are seconds since the epoch (1970)."""

    name: str
    at: float  # time of this status
    since: float  # start of this coordinator
    target_accuracy: float | None
    rows: tuple[int, ...]  # samples of each subset
    numel: int  # values of the model
    version: int  # results assimilated so far
    servers: int  # parameter servers that run
    server_deaths: int  # parameter servers that ended without being stopped
    backlog: int  # accepted results that wait for a parameter server
    fault: str  # the store's current error; empty while it works
    epoch: int  # counts from 1
    max_epochs: int
    finished: str | None  # why the job ended; None before
    volunteers: tuple[VolunteerState, ...]  # copies, sorted by accepted units
    epochs: tuple[EpochEnded, ...]  # epochs that have ended
    units: dict[str, int]  # number of units of the epoch by mark; units that failed count as waiting
    marks: tuple[str, ...]  # of the epoch's first `MAX_MARKS` units, by subset
    staleness: float | None  # mean over the epoch's units; None if unknown
    update_s: tuple[float, ...]  # durations of the latest updates, sorted
    units_per_s: float  # rate of the latest assimilations; 0 if there were none
    samples_per_s: float  # the same rate in samples; a sample counts once for each local epoch

    @property
    def over(self) -> bool:
        """True after the job has ended."""
        return self.finished is not None

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy of the newest epoch whose accuracy was measured, or None."""
        for epoch in reversed(self.epochs):
            if math.isfinite(epoch.accuracy):
                return epoch.accuracy
        return None
