"""The coordinator's decisions, which volunteer trains which unit, and the log they are written to.

A decision is a list of entries. It takes effect when they are applied, after they are in the
store's log: the coordinator may be killed at any moment. Decisions are made one at a time, and read
`JobState` without changing it. The rules:

- The units of an epoch are assigned when all units of the epoch before are assimilated.
- A unit that expired, was rejected or given back goes to another volunteer, a reliable one first.
  A volunteer that failed it gets it again only after the others had time to take it.
- Replicas of a unit go to different volunteers. It is accepted once a majority of
  ``plan.replication`` agrees; until then one more replica is assigned.
"""

import asyncio
import logging
import math
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from colab_swarm.errors import StoreError
from colab_swarm.workunits.job import WorkPlan
from colab_swarm.workunits.state import (
    Accepted,
    AnyEntry,
    Assigned,
    EpochEnded,
    Expired,
    Finished,
    GaveBack,
    JobState,
    Rejected,
    Returned,
    ServerEntry,
    UnitState,
    encode_entry,
)
from colab_swarm.workunits.store import Blobs, ParameterStore

logger = logging.getLogger(__name__)
T = TypeVar("T")

PRESENT_S = 600.0  # a volunteer that has been silent for longer counts as gone
FIRST_DEADLINE_S = 600.0
SLACK_S = 30.0
FEW = 2  # units in flight of a volunteer that is new or unreliable
MORE_REPLICAS = 3  # than `plan.replication` without a majority: then the unit starts over
MEASURE_S = 30.0  # an epoch waits this long for its accuracies: after that their server has died
SHORTEST_WAIT_S, FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 1.0, 30.0


class Dispatcher:
    """Decide for one job, without I/O; ``now`` is seconds since the epoch. ``subsets`` are the
    SHA-256 of the data; ``rng`` draws names of assignments, which must not be guessed.
    """

    def __init__(self, plan: WorkPlan, subsets: Sequence[str], rng: random.Random) -> None:
        self._plan, self._subsets, self._rng = plan, tuple(subsets), rng
        self.state = JobState(len(self._subsets))

    @property
    def epoch(self) -> int:
        return min(self.state.epoch, self._plan.max_epochs)

    def assign(
        self, volunteer: str, count: int, held: Collection[str], *, now: float, name: str = ""
    ) -> list[Assigned]:
        """Assign up to ``count`` units to a volunteer that has the subsets of SHA-256 ``held``."""
        record, most = self.state.volunteer(volunteer), self._plan.in_flight
        proven = record.proven  # gets units that failed before first, others last
        room = min(count, (most if proven else min(most, FEW)) - record.in_flight)
        done = self.state.finished or self.state.epoch > self._plan.max_epochs
        if done or room <= 0 or record.idle_until > now:
            return []
        others = any(
            name != volunteer and other.last_seen > now - PRESENT_S and other.banned_until <= now
            for name, other in self.state.volunteers.items()
        )
        free = [pair for pair in self.state.open.items() if self._is_free(pair[1], volunteer, others, now)]
        first, replicated = self._rng.randrange(len(free) or 1), self._plan.replication > 1
        chosen = sorted(
            free[first:] + free[:first],
            key=lambda pair: (bool(pair[1].failed_by) != proven, self._subsets[pair[0].subset] not in held),
        )
        return [
            Assigned(
                at=now,
                unit=unit,
                assignment=f"{self._rng.getrandbits(128):032x}",
                volunteer=volunteer,
                name=name,
                deadline=now + self._deadline_s(state),
                # replicas of a unit start from the same parameters
                version=state.replicas[0].given.version
                if replicated and state.replicas
                else self.state.version,
            )
            for unit, state in chosen[:room]
        ]

    def unacknowledged(self, volunteer: str, in_hand: Collection[str], *, now: float) -> list[Assigned]:
        """Return assignments that a volunteer does not have ``in_hand``: their answer was lost."""
        return [
            replica.given
            for name, replica in self.state.out.items()
            if replica.given.volunteer == volunteer and replica.given.deadline > now and name not in in_hand
        ]

    def _missing(self, unit: UnitState) -> int:
        wanted = max(self._plan.replication, len(unit.returned()) + 1)
        return 0 if unit.accepted else wanted - len(unit.live())

    def _is_free(self, unit: UnitState, volunteer: str, others: bool, now: float) -> bool:
        """The volunteer that failed a unit leaves it to the ``others`` for a while."""
        own = others and now < unit.failed_by.get(volunteer, -math.inf) + 2 * self._poll_s()
        return self._missing(unit) > 0 and not unit.is_with(volunteer) and not own

    def _deadline_s(self, unit: UnitState) -> float:
        if self._plan.deadline_s is not None:
            return self._plan.deadline_s
        times = sorted(self.state.unit_s)
        usual_s = 4 * times[len(times) * 9 // 10] + SLACK_S if times else FIRST_DEADLINE_S
        expired = sum(replica.fate == "expired" for replica in unit.replicas)
        return min(86_400.0, usual_s * 2.0 ** min(expired, 16))

    def _poll_s(self) -> float:
        usual_s = statistics.median(self.state.unit_s or [10 * FIRST_WAIT_S])
        return min(LONGEST_WAIT_S, max(SHORTEST_WAIT_S, usual_s / 10))

    def wait_s(self, volunteer: str, *, now: float) -> float:
        """Return the seconds after which a volunteer without units asks again, spread at random."""
        record = self.state.volunteer(volunteer)
        if record.idle_until > now:
            return record.idle_until - now
        expiry_s = min((one.given.deadline - now for one in self.state.out.values()), default=math.inf)
        return max(SHORTEST_WAIT_S, min(self._poll_s() * self._rng.uniform(0.75, 1.25), expiry_s))

    def ban_of(self, volunteer: str, *, now: float) -> tuple[str, str] | None:
        """Return why and how long a volunteer is banned, as code and text; None if it is not."""
        standing = self.state.volunteer(volunteer)
        if standing.banned_until <= now:
            return None
        return (
            "banned",
            f"{standing.rejected} of your results were refused: no units for you in the next "
            f"{math.ceil((standing.banned_until - now) / 60)} minutes; restart your notebook, then try again",
        )

    def refusal(self, assignment: str, volunteer: str, *, now: float) -> tuple[str, str] | None:
        """Return why a result is refused, as code and text; a late one may still be wanted."""
        replica = self.state.replicas.get(assignment)
        if replica is None or replica.given.volunteer != volunteer:
            return "unknown", "this assignment is not yours: ask for units"
        if (ban := self.ban_of(volunteer, now=now)) is not None:
            return ban
        if self.state.finished:
            return "stale", f"the job is finished: {self.state.finished}"
        unit = self.state.units[replica.given.unit]
        late = replica.fate == "expired" and self._missing(unit) > 0 and not unit.is_with(volunteer)
        if replica.fate == "out" or late:
            return None
        reasons = {
            "rejected": "its result was refused before",
            "given back": "you gave it back",
            "superseded": "enough other results agree",
            "expired": f"its deadline passed {now - replica.given.deadline:.0f} s ago and another volunteer has it",
        }
        why = reasons.get(replica.fate, "its result is here already")
        return "stale", f"unit {replica.given.unit} is not awaited from you: {why}; ask for other units"

    def awaits(self, assignment: str, *, now: float) -> bool:
        replica = self.state.replicas.get(assignment)
        return replica is not None and self.refusal(assignment, replica.given.volunteer, now=now) is None

    def expired(self, *, now: float) -> list[Expired]:
        """Expire assignments whose deadline has passed, and those of banned volunteers."""
        return [
            Expired(at=now, assignment=name)
            for name, replica in self.state.out.items()
            if replica.given.deadline <= now
            or self.state.volunteers[replica.given.volunteer].banned_until > now
        ]

    def give_back(self, volunteer: str, assignments: Collection[str], *, now: float) -> list[GaveBack]:
        """Take back assignments of a volunteer; ignore those of others, or not out."""
        out = self.state.out
        return [
            GaveBack(at=now, assignment=name)
            for name in dict.fromkeys(assignments)
            if name in out and out[name].given.volunteer == volunteer
        ]

    def on_result(
        self, assignment: str, change: float, distance: Callable[[str, str], float], *, now: float
    ) -> list[AnyEntry]:
        """Decide on a valid result that is wanted. ``change`` is the L2 norm of its change of the
        parameters, ``distance`` that of two results, as a share of it.
        """
        unit, quorum = self.state.replicas[assignment].given.unit, self._plan.replication // 2 + 1
        alpha = self._plan.alpha_of(unit.epoch)
        accepted = Accepted(at=now, unit=unit, assignment=assignment, alpha=alpha, change=change)
        if self._plan.replication == 1:
            return [accepted]
        returned: list[AnyEntry] = [Returned(at=now, assignment=assignment)]
        results = [assignment, *(one.given.assignment for one in self.state.units[unit].returned())]

        def agreeing(mine: str) -> list[str]:
            return [one for one in results if one == mine or distance(mine, one) <= self._plan.tolerance]

        majority = max(map(agreeing, agreeing(assignment)), key=len)
        if len(majority) >= quorum:
            reason = f"it differs from the {len(majority)} results that agree"
            odd = [one for one in results if one not in majority]
            return [*returned, *(Rejected(at=now, assignment=one, reason=reason) for one in odd), accepted]
        if len(results) < self._plan.replication + MORE_REPLICAS:
            return returned
        reason = f"no {quorum} of {len(results)} results agree: raise plan.tolerance if they are honest"
        return [*returned, *(Rejected(at=now, assignment=one, reason=reason) for one in results)]

    def obsolete(self, entries: Sequence[AnyEntry]) -> set[str]:
        """Return the blobs that are no longer needed once ``entries`` are in the log."""
        names = {entry.result for entry in entries if isinstance(entry, Rejected)}
        for entry in entries:
            if isinstance(entry, Accepted) and self._plan.replication > 1:
                waiting = {replica.given.result for replica in self.state.units[entry.unit].returned()}
                names |= {f"base-{entry.unit}", *waiting - {entry.result}}
        return names

    def advance(self, *, now: float) -> list[AnyEntry]:
        ended, last = len(self.state.epochs) + 1, self._plan.max_epochs
        if self.state.finished:
            return []
        target, newest = self._plan.target_accuracy, self.state.epochs[-1:]
        if target is not None and newest and newest[0].accuracy >= target:
            return [
                Finished(at=now, reason=f"accuracy {newest[0].accuracy:.3f} reached the target {target:g}")
            ]
        if ended > last:
            return [Finished(at=now, reason=f"all {last} epochs are done")]
        measured = self.state.measured.get(ended, {})
        if len(measured) < len(self._subsets) and now < self.state.done_at.get(ended, math.inf) + MEASURE_S:
            return []
        found = [*measured.values()] or [math.nan]
        mean = statistics.fmean(found)
        return [EpochEnded(at=now, epoch=ended, accuracy=mean, low=min(found), high=max(found))]


class JobLog:
    """The log of a job in its store, from which the state follows; ``fault``: the store's error."""

    def __init__(self, dispatcher: Dispatcher, store: ParameterStore) -> None:
        self.dispatcher, self.store = dispatcher, store
        self.fault, self.finished = "", asyncio.Event()
        self._lock, self._position, self._up_to_date = asyncio.Lock(), 0, False
        self._mine: set[bytes] = set()  # entries written here and not read back yet

    @asynccontextmanager
    async def deciding(self) -> AsyncIterator[float]:
        """Hold the log for one decision, which `write` takes; give the time. What is due is written."""
        async with self._lock:
            await self._read()
            self._up_to_date = True
            await self.write(self.dispatcher.expired(now=time.time()))
            while due := self.dispatcher.advance(now=time.time()):
                await self.write(due)
            yield time.time()

    async def write(
        self, entries: Sequence[AnyEntry], *, put: Blobs | None = None, drop: Collection[str] = ()
    ) -> None:
        """Append a decision, with blobs, and read it back, also after a StoreError."""
        if entries:
            self._mine.update(map(encode_entry, entries))
            await self._call(lambda: self.store.append(entries, put=put, drop=drop))
            await self._read()

    async def _read(self) -> None:
        state = self.dispatcher.state
        for position, entry in await self._call(lambda: self.store.entries(self._position)):
            if not isinstance(entry, ServerEntry):
                written = encode_entry(entry)
                if self._up_to_date and written not in self._mine:  # the coordinator that began later wins
                    self.fault = "another coordinator has taken over this job: stop this one"
                    raise StoreError(self.fault)
                self._mine.discard(written)
            state.apply(entry)
            self._position = position
        if state.finished is not None:
            self.finished.set()

    async def _call(self, method: Callable[[], T]) -> T:
        try:
            answer = await asyncio.to_thread(method)
        except (StoreError, msgspec.DecodeError) as error:
            if not self.fault:
                logger.warning("the store fails, volunteers wait: %s", error)
            self.fault = (
                str(error)
                if isinstance(error, StoreError)
                else f"another version of colab-swarm wrote this job's log ({error}): resume the job with that "
                "version, or give another folder and store"
            )
            raise StoreError(self.fault) from error
        self.fault = ""
        return answer
