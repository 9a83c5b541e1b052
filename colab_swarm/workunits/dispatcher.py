"""The coordinator's decisions about which volunteer trains which unit, and the log to which they are written.

A decision is a list of entries. The coordinator may be killed at any moment. So it first writes the entries to the
store's log, and then applies them. It makes one decision at a time. A decision reads `JobState` without changing it.
The rules:

- A machine that does not fulfil ``plan.needs`` gets no units.
- The coordinator assigns the units of an epoch when all units of the previous epoch are assimilated.
- A unit that expired, was rejected or was given back goes to another volunteer, preferably a reliable volunteer.
  A volunteer that failed the unit gets it again only after the others had time to take it.
- When all units of the epoch are handed out, an idle volunteer gets a copy of the unit that has been out
  longest, if this is longer than nine of ten units take. So an epoch does not wait for a volunteer
  that was preempted. If the coordinator made copies earlier, their volunteers would miss units of the next epoch.
- The first result of a unit and its copies counts. The coordinator refuses a later result without reading it. So
  nothing shows that this result is valid, and its volunteer gets no credit. A volunteer that took longer than nine of
  ten units take has failed the unit, as if its deadline had passed. Otherwise a volunteer that never answers would
  count as reliable.
- Replicas of a unit go to different volunteers. The unit is accepted when a majority of ``plan.replication`` results
  agree. If all replicas are back without a majority, the coordinator assigns one more replica.
"""

import asyncio
import logging
import math
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from colab_swarm.errors import StoreError
from colab_swarm.workunits.job import WorkPlan
from colab_swarm.workunits.messages import NOTHING, Resources
from colab_swarm.workunits.state import (
    Accepted,
    AnyEntry,
    Assigned,
    Began,
    EpochEnded,
    Expired,
    Finished,
    GaveBack,
    JobState,
    Rejected,
    Returned,
    Unit,
    UnitState,
    VolunteerState,
)
from colab_swarm.workunits.store import Blobs, ParameterStore

logger = logging.getLogger(__name__)
T = TypeVar("T")

PRESENT_S = 600.0
"""If a volunteer is silent for longer than this, the coordinator treats it as gone."""
FIRST_DEADLINE_S = 600.0
LONGEST_DEADLINE_S = 86_400.0
SLACK_S = 30.0
COPIES = 1
"""How many volunteers may train copies of a unit at the same time, in addition to the volunteers that it needs."""
FEW = 2
"""Most units that a new or unreliable volunteer may hold."""
MORE_REPLICAS = 3
"""If `plan.replication` results and this many more give no majority, the unit starts again."""
MEASURE_S = 30.0
"""How long an epoch waits for its accuracies. An accuracy does not come if its parameter server has died."""
SHORTEST_WAIT_S = 0.2
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
STALE = {
    "rejected": "its result was refused before",
    "given back": "you gave it back",
}
"""Why the coordinator does not wait for a result, by the fate of its assignment."""


class Dispatcher:
    """Decides for one job, without I/O. ``now`` is in seconds since the epoch (1970).

    ``subsets`` is the number of units in an epoch of the job. ``rng`` draws the names of assignments, which a peer
    must not be able to guess.
    """

    def __init__(self, plan: WorkPlan, subsets: int, rng: random.Random) -> None:
        self._plan = plan
        self._rng = rng
        self.state = JobState(subsets)

    @property
    def epoch(self) -> int:
        return min(self.state.epoch, self._plan.max_epochs)

    def assign(
        self, volunteer: str, *, now: float, name: str = "", resources: Resources = NOTHING
    ) -> Assigned | None:
        """Assign a unit to a volunteer; return None if there is no unit for this volunteer."""
        record = self.state.volunteer(volunteer)
        most = self._plan.in_flight
        if not record.proven:
            most = min(most, FEW)
        done = self.state.finished or self.state.epoch > self._plan.max_epochs
        busy = record.in_flight >= most or record.idle_until > now
        if done or busy or self.unfit(resources):
            return None
        unit = self._choice(record, volunteer, now)
        if unit is None:
            return None
        state = self.state.open[unit]
        version = self.state.version
        # replicas of a unit start from the same parameters
        if self._plan.replication > 1 and state.replicas:
            version = state.replicas[0].given.version
        return Assigned(
            at=now,
            unit=unit,
            assignment=f"{self._rng.getrandbits(128):032x}",
            volunteer=volunteer,
            name=name,
            deadline=now + self._deadline_s(state),
            version=version,
        )

    def unfit(self, resources: Resources) -> str:
        """Return why a machine with these ``resources`` gets no units, or an empty text if it gets units."""
        lacks = resources.lacks(self._plan.needs)
        if lacks:
            return f"this job needs {lacks}: volunteer with another machine"
        return ""

    def _choice(self, record: VolunteerState, volunteer: str, now: float) -> Unit | None:
        """Return the unit that is best for a volunteer, or None if the volunteer may train no unit.

        A proven volunteer first gets units that have failed. Any other volunteer gets these units last. Next come
        units whose data the volunteer has had before, and therefore has in its cache. Different volunteers begin at
        different units. If no other unit is left, the volunteer gets a copy of an overdue unit.
        """
        open_units = self.state.open
        patience_s = 0.0
        if self._has_others(volunteer, now):
            patience_s = 2 * self._poll_s()
        free = []
        for unit, state in open_units.items():
            # for a while, a volunteer does not get a unit that it failed, so that others can take it
            may_take = now >= state.failed_by.get(volunteer, -math.inf) + patience_s
            if may_take and self._missing(state) > 0 and not state.is_with(volunteer):
                free.append(unit)
        if not free:
            return self._overdue(volunteer, now)
        first = self._rng.randrange(len(free))
        known = self.state.known.get(volunteer, set())

        def rank(unit: Unit) -> tuple[bool, bool]:
            has_failed = bool(open_units[unit].failed_by)
            return has_failed != record.proven, unit.subset not in known

        return min(free[first:] + free[:first], key=rank)

    def _overdue(self, volunteer: str, now: float) -> Unit | None:
        """Return the overdue unit that has been out longest, and that this volunteer may train as a copy, or None."""
        overdue_s = self._overdue_s()
        out_since: dict[Unit, float] = {}
        for unit, state in self.state.open.items():
            times = [replica.given.at for replica in state.live() if replica.fate == "out"]
            took_part = state.is_with(volunteer) or volunteer in state.failed_by
            has_copies = self._missing(state) <= -COPIES
            if times and not took_part and not has_copies and now - min(times) > overdue_s:
                out_since[unit] = min(times)
        return min(out_since, key=out_since.__getitem__, default=None)

    def _has_others(self, volunteer: str, now: float) -> bool:
        """Return True if another volunteer is present and not banned."""
        for name, record in self.state.volunteers.items():
            present = record.last_seen > now - PRESENT_S
            if name != volunteer and present and record.banned_until <= now:
                return True
        return False

    def unacknowledged(self, volunteer: str, in_hand: Collection[str], *, now: float) -> Assigned | None:
        """Return an assignment that is not ``in_hand`` because the answer to the volunteer was lost, or None."""
        for name, replica in self.state.out.items():
            assigned = replica.given
            if assigned.volunteer == volunteer and assigned.deadline > now and name not in in_hand:
                return assigned
        return None

    def _missing(self, unit: UnitState) -> int:
        """Return how many more replicas of a unit are needed."""
        if unit.accepted:
            return 0
        wanted = max(self._plan.replication, len(unit.returned()) + 1)
        return wanted - len(unit.live())

    def _deadline_s(self, unit: UnitState) -> float:
        if self._plan.deadline_s is not None:
            return self._plan.deadline_s
        usual_s = FIRST_DEADLINE_S
        if self.state.unit_s:
            usual_s = 4 * self._overdue_s() + SLACK_S
        expired = sum(replica.fate == "expired" for replica in unit.replicas)
        return min(LONGEST_DEADLINE_S, usual_s * 2.0 ** min(expired, 16))

    def _overdue_s(self) -> float:
        """Return the time within which nine of ten volunteers return a unit; before the first result, infinity.

        Each volunteer counts once. So a volunteer that returns many units quickly does not set the deadlines of all
        others.
        """
        times = sorted(map(_usual_s, self.state.unit_s.values()))
        if not times:
            return math.inf
        return times[math.ceil(len(times) * 0.9) - 1]

    def _poll_s(self) -> float:
        usual_s = 10 * FIRST_WAIT_S
        if self.state.unit_s:
            usual_s = statistics.median(map(_usual_s, self.state.unit_s.values()))
        return min(LONGEST_WAIT_S, max(SHORTEST_WAIT_S, usual_s / 10))

    def wait_s(self, volunteer: str, *, now: float) -> float:
        """Return the seconds after which a volunteer without units asks again, spread at random."""
        record = self.state.volunteer(volunteer)
        if record.idle_until > now:
            return record.idle_until - now
        poll_s = self._poll_s() * self._rng.uniform(0.75, 1.25)
        deadlines = [replica.given.deadline for replica in self.state.out.values()]
        if deadlines:
            poll_s = min(poll_s, min(deadlines) - now)
        return max(SHORTEST_WAIT_S, poll_s)

    def ban_of(self, volunteer: str, *, now: float) -> tuple[str, str] | None:
        """Return why and how long a volunteer is banned, as code and text, or None if it is not banned."""
        record = self.state.volunteer(volunteer)
        if record.banned_until <= now:
            return None
        minutes = math.ceil((record.banned_until - now) / 60)
        return (
            "banned",
            f"{record.rejected} of your results were refused: no units for you in the next "
            f"{minutes} minutes; restart your notebook, then try again",
        )

    def refusal(self, assignment: str, volunteer: str, *, now: float) -> tuple[str, str] | None:
        """Return why a result is refused, as code and text, or None if it is wanted. A late result may be wanted."""
        replica = self.state.replicas.get(assignment)
        if replica is None or replica.given.volunteer != volunteer:
            return "unknown", "this assignment is not yours: ask for units"
        if self.state.finished:
            return "stale", f"the job is finished: {self.state.finished}"
        unit = self.state.units[replica.given.unit]
        still_wanted = self._missing(unit) > 0 and not unit.is_with(volunteer)
        if replica.fate == "out" or (replica.fate == "expired" and still_wanted):
            return None
        complete = replica.given.unit not in self.state.open
        if replica.fate == "superseded" or (replica.fate == "expired" and complete):
            return (
                "surplus",
                f"thank you: unit {replica.given.unit} is complete, other results came before yours",
            )
        if replica.fate == "expired":
            late_s = now - replica.given.deadline
            why = f"its deadline passed {late_s:.0f} s ago and another volunteer has it"
        else:
            why = STALE.get(replica.fate, "its result is here already")
        return "stale", f"unit {replica.given.unit} is not awaited from you: {why}; ask for other units"

    def expired(self, *, now: float) -> list[Expired]:
        """Expire assignments whose deadline has passed, and the assignments of banned volunteers."""
        expired = []
        for name, replica in self.state.out.items():
            volunteer = self.state.volunteers[replica.given.volunteer]
            if replica.given.deadline <= now or volunteer.banned_until > now:
                expired.append(Expired(at=now, assignment=name))
        return expired

    def give_back(self, volunteer: str, *, now: float) -> list[GaveBack]:
        """Take back all units of a volunteer that leaves."""
        out = self.state.out.items()
        return [
            GaveBack(at=now, assignment=name) for name, replica in out if replica.given.volunteer == volunteer
        ]

    def on_result(
        self, assignment: str, change: float, distance: Callable[[str, str], float], *, now: float
    ) -> list[AnyEntry]:
        """Decide on a valid result that is wanted.

        ``change`` is the L2 norm of the result's change of the unit's first parameters. ``distance`` returns the
        distance of two results, relative to the larger of their changes.
        """
        unit = self.state.replicas[assignment].given.unit
        alpha = self._plan.alpha_of(unit.epoch)
        accepted = Accepted(at=now, unit=unit, assignment=assignment, alpha=alpha, change=change)
        late = self._late(unit, assignment, now)
        if self._plan.replication == 1:
            return [*late, accepted]
        returned = Returned(at=now, assignment=assignment)
        results = [assignment]
        results += [replica.given.assignment for replica in self.state.units[unit].returned()]
        majority = self._majority(assignment, results, distance)
        quorum = self._plan.replication // 2 + 1
        if len(majority) >= quorum:
            odd = [name for name in results if name not in majority]
            reason = f"it differs from the {len(majority)} results that agree"
            return [returned, *_rejections(odd, reason, now), *late, accepted]
        if len(results) < self._plan.replication + MORE_REPLICAS:
            return [returned]
        reason = f"no {quorum} of {len(results)} results agree: raise plan.tolerance if they are honest"
        return [returned, *_rejections(results, reason, now)]

    def _late(self, unit: Unit, assignment: str, now: float) -> list[AnyEntry]:
        """Expire the unit's other assignments that have been out for longer than nine of ten units take."""
        late: list[AnyEntry] = []
        for replica in self.state.units[unit].live():
            is_late = replica.fate == "out" and now - replica.given.at > self._overdue_s()
            if is_late and replica.given.assignment != assignment:
                late.append(Expired(at=now, assignment=replica.given.assignment))
        return late

    def _majority(
        self, assignment: str, results: list[str], distance: Callable[[str, str], float]
    ) -> list[str]:
        """Return the largest group of results that agree with one result, which itself agrees with ``assignment``."""

        def agreeing(name: str) -> list[str]:
            return [
                other for other in results if other == name or distance(name, other) <= self._plan.tolerance
            ]

        return max(map(agreeing, agreeing(assignment)), key=len)

    def obsolete(self, entries: Sequence[AnyEntry]) -> set[str]:
        """Return the names of the blobs that the store no longer needs after ``entries`` are in the log."""
        names = {entry.result for entry in entries if isinstance(entry, Rejected)}
        for entry in entries:
            if isinstance(entry, Accepted) and self._plan.replication > 1:
                waiting = {replica.given.result for replica in self.state.units[entry.unit].returned()}
                names |= {f"base-{entry.unit}", *waiting - {entry.result}}
        return names

    def advance(self, *, now: float) -> list[AnyEntry]:
        """End the epoch and the job when their conditions are met."""
        if self.state.finished:
            return []
        reason = self._end_of_job()
        if reason:
            return [Finished(at=now, reason=reason)]
        epoch = len(self.state.epochs) + 1
        measured = self.state.measured.get(epoch, {})
        patience_until = self.state.done_at.get(epoch, math.inf) + MEASURE_S
        if len(measured) < self.state.subsets and now < patience_until:
            return []
        accuracies = list(measured.values()) or [math.nan]
        mean = statistics.fmean(accuracies)
        ended = EpochEnded(at=now, epoch=epoch, accuracy=mean, low=min(accuracies), high=max(accuracies))
        return [ended]

    def _end_of_job(self) -> str:
        """Return why the job ends after the epochs so far, or an empty text if the job continues."""
        epochs = self.state.epochs
        target = self._plan.target_accuracy
        if target is not None and epochs and epochs[-1].accuracy >= target:
            return f"accuracy {epochs[-1].accuracy:.3f} reached the target {target:g}"
        if len(epochs) >= self._plan.max_epochs:
            return f"all {self._plan.max_epochs} epochs are done"
        return ""


def _usual_s(times: Collection[float]) -> float:
    """Return the time within which one volunteer returns nine of ten units."""
    return sorted(times)[len(times) * 9 // 10]


def _rejections(assignments: Sequence[str], reason: str, now: float) -> list[AnyEntry]:
    return [Rejected(at=now, assignment=name, reason=reason) for name in assignments]


class JobLog:
    """The log of a job in its store. It gives the dispatcher's state. ``fault`` is the store's error, or empty."""

    def __init__(self, dispatcher: Dispatcher, store: ParameterStore) -> None:
        self.dispatcher = dispatcher
        self.store = store
        self.fault = ""
        self.finished = asyncio.Event()
        self._name = os.urandom(8).hex()
        self._begun = False
        self._lock = asyncio.Lock()
        self._position = 0

    async def begin(self) -> None:
        """Read the log, and take over the job from earlier coordinators."""
        await self._read()
        await self.write([Began(at=time.time(), coordinator=self._name)])
        self._begun = True

    @asynccontextmanager
    async def deciding(self) -> AsyncIterator[float]:
        """Lock the log, write the entries that are due, and yield the time.

        The block makes one decision, and passes it to `write`.
        """
        async with self._lock:
            await self._read()
            await self.write(self.dispatcher.expired(now=time.time()))
            while due := self.dispatcher.advance(now=time.time()):
                await self.write(due)
            yield time.time()

    async def write(
        self, entries: Sequence[AnyEntry], *, put: Blobs | None = None, drop: Collection[str] = ()
    ) -> None:
        """Append a decision with its blobs, and read it back. After a StoreError, the next decision reads the log."""
        if entries:
            await self._call(lambda: self.store.append(entries, put=put, drop=drop))
            await self._read()

    async def _read(self) -> None:
        state = self.dispatcher.state
        for position, entry in await self._call(lambda: self.store.entries(self._position)):
            state.apply(entry)
            self._position = position
        if self._begun and state.coordinator != self._name:
            self.fault = "another coordinator has taken over this job: stop this one"
            raise StoreError(self.fault)
        if state.finished is not None:
            self.finished.set()

    async def _call(self, method: Callable[[], T]) -> T:
        try:
            answer = await asyncio.to_thread(method)
        except (StoreError, msgspec.DecodeError) as error:
            if not self.fault:
                logger.warning("the store fails, volunteers wait: %s", error)
            self.fault = str(error)
            if isinstance(error, msgspec.DecodeError):
                self.fault = (
                    f"another version of colab-swarm wrote this job's log ({error}): resume the job with that "
                    "version, or give another folder and store"
                )
            raise StoreError(self.fault) from error
        self.fault = ""
        return answer
