"""Which manifests stand: the branches of a run's chain of rounds, as a listing and its objects show them. Pure.

Rules, in this order:

1. A manifest is a *candidate* of its round if it is sound (`RoundChain.fault_of`), and `missing_s` younger
   than the candidate before it. An unsound one costs no time.
2. Of several candidates, those count on which the next round was *built*: a manifest closes the round after
   them, by these same rules. If none was built on, the youngest goes first.
3. Of these, the first one *closes* the round whose contributions can all be read. Its entries must be those
   of the contributions, or it is no candidate.

A question about a round may need an object that was not read yet, or find one that does not count. Then it
raises `Unsettled` with the step that comes first. After the step, ask again: what is known already is kept.
So each object is asked for once, and the work grows with the number of manifests, not with its square.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.rounds import (
    WINDOW,
    ClosedRound,
    ReadContribution,
    RoundChain,
    RoundListing,
    RoundManifest,
    differs,
    round_of,
)
from colab_swarm.net.peers import PeerId

MOST_FAULTS = 10_000  # beyond this, those of old rounds are forgotten


@dataclass(frozen=True)
class Read:
    """A step: read these objects."""

    places: tuple[StoredObject, ...]


@dataclass(frozen=True)
class Reject:
    """A step: note that this object does not count."""

    place: StoredObject
    fault: str


Step: TypeAlias = Read | Reject


class Unsettled(Exception):
    """The answer needs a step first."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.step = step


@dataclass
class Readings:
    """What this peer has read of the rounds: each object once."""

    contributions: dict[StoredObject, ReadContribution] = field(default_factory=dict)
    manifests: dict[StoredObject, tuple[RoundManifest, bytes]] = field(default_factory=dict)  # with digests
    farewells: set[StoredObject] = field(default_factory=set)
    faults: dict[StoredObject, str] = field(default_factory=dict)  # of objects that do not count

    def __contains__(self, place: StoredObject) -> bool:
        known = place in self.contributions or place in self.manifests or place in self.farewells
        return known or place in self.faults

    def require(self, places: Iterable[StoredObject]) -> None:
        """Raise `Unsettled` unless all of these were read."""
        unread = tuple(place for place in places if place not in self)
        if unread:
            raise Unsettled(Read(unread))

    def forget(self, last: ClosedRound) -> None:
        """Forget what matters no more after this round, such as contributions that counted before it."""
        chain = last.after
        oldest = chain.round - WINDOW
        for place, contribution in list(self.contributions.items()):
            head = contribution.head
            counts = contribution.digest in last.contributions
            if not counts and not chain.may_count(head.member, head.round):
                del self.contributions[place]
        for place in list(self.manifests):
            if round_of(place.path) < last.before.round:
                del self.manifests[place]
        if len(self.faults) > MOST_FAULTS:
            self.faults = {
                place: fault for place, fault in self.faults.items() if round_of(place.path) >= oldest
            }
        self.farewells = {place for place in self.farewells if round_of(place.path) >= oldest}


@dataclass(eq=False)
class Fork:
    """A round, and the manifests that may have closed it."""

    chain: RoundChain
    manifests: list[StoredObject]  # the oldest first
    gone: set[PeerId] | None = None  # members that said farewell; None: not known yet
    candidates: list[ClosedRound] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # of the candidates among the manifests
    position: int = 0  # of the next manifest to look at
    settled: bool = False
    closed: ClosedRound | None = None  # None also if no manifest closes it

    def add(self, candidate: ClosedRound) -> None:
        """Take the next manifest as a candidate, and pass over those that follow it too soon."""
        self.candidates.append(candidate)
        self.positions.append(self.position)
        self.position = bisect_left(
            self.manifests,
            candidate.place.modified_at + self.chain.missing_s,
            lo=self.position + 1,
            key=lambda place: place.modified_at + 1,  # S3 has whole seconds
        )

    def drop(self, candidate: ClosedRound) -> None:
        """Look at the manifests after a candidate again: it does not count, so others may."""
        index = self.candidates.index(candidate)
        self.position = self.positions[index] + 1
        del self.candidates[index:]
        del self.positions[index:]


class Branches:
    """The rounds of one listing, and the manifests that close them."""

    def __init__(self, listing: RoundListing, readings: Readings) -> None:
        self.listing = listing
        self.readings = readings
        self._forks: dict[tuple[bytes, float], Fork] = {}
        # A round is settled after the rounds that were built on it. So these wait, each for the one after it.
        self._waiting: list[Fork] = []

    def after(self, chain: RoundChain) -> ClosedRound | Step | None:
        """Return the round of ``chain`` if a manifest closes it, or the step that must come first."""
        try:
            return self.closed(chain)
        except Unsettled as unsettled:
            return unsettled.step

    def closed(self, chain: RoundChain) -> ClosedRound | None:
        """Return the round of ``chain`` if a manifest closes it. Raises `Unsettled`."""
        fork = self._fork(chain)
        if fork.settled:
            return fork.closed
        if self._waiting[:1] != [fork]:
            self._waiting = [fork]
        while self._waiting:
            latest = self._waiting[-1]
            later = self._unsettled_after(latest)
            if later is not None:
                self._waiting.append(later)
                continue
            latest.closed = self._first_closed(latest)
            latest.settled = True
            self._waiting.pop()
        return fork.closed

    def built(self, chain: RoundChain) -> list[ClosedRound]:
        """Return the candidates of the round on which the next one was built. Raises `Unsettled`."""
        if self.listing.latest <= chain.round:
            return []
        candidates = self.candidates(chain)
        return [candidate for candidate in candidates if self.closed(candidate.after) is not None]

    def candidates(self, chain: RoundChain) -> list[ClosedRound]:
        """Return what the round's sound manifests make of it, without contributions. Raises `Unsettled`."""
        return self._candidates(self._fork(chain))

    def gone(self, chain: RoundChain) -> set[PeerId]:
        """Return the members of the last round for whom this one need not wait. Raises `Unsettled`."""
        members: dict[StoredObject, PeerId] = {}
        for path, member in chain.farewells.items():
            place = self.listing.farewells.get(path)
            if place is not None:
                members[place] = member
        self.readings.require(members)
        return {members[place] for place in self.readings.farewells.intersection(members)}

    def _fork(self, chain: RoundChain) -> Fork:
        # Two copies of a manifest have the same digest, and lead to chains that differ in their time alone.
        key = (chain.base, chain.closed_at)
        fork = self._forks.get(key)
        if fork is None:
            manifests = self.listing.manifests.get(chain.folder, [])
            fork = Fork(chain, sorted(manifests, key=lambda place: (place.modified_at, place.path)))
            self._forks[key] = fork
        return fork

    def _candidates(self, fork: Fork) -> list[ClosedRound]:
        if fork.gone is None:
            fork.gone = self.gone(fork.chain)
        while fork.position < len(fork.manifests):
            place = fork.manifests[fork.position]
            if place in self.readings.faults:
                fork.position += 1
            else:
                fork.add(self._candidate(fork.chain, place, fork.gone))
        return fork.candidates

    def _candidate(self, chain: RoundChain, place: StoredObject, gone: set[PeerId]) -> ClosedRound:
        self.readings.require([place])
        manifest, digest = self.readings.manifests[place]
        fault = chain.fault_of(manifest, written_at=place.modified_at, gone=gone)
        if fault:
            raise Unsettled(Reject(place, fault))
        return ClosedRound(chain, place, manifest, chain.after(manifest, digest, closed_at=place.modified_at))

    def _unsettled_after(self, fork: Fork) -> Fork | None:
        """Return a later round that must be settled before this one, if there is any."""
        candidates = self._candidates(fork)
        if len(candidates) < 2 or self.listing.latest <= fork.chain.round:
            return None
        for candidate in candidates:
            later = self._fork(candidate.after)
            if not later.settled:
                return later
        return None

    def _first_closed(self, fork: Fork) -> ClosedRound | None:
        candidates = fork.candidates
        if len(candidates) > 1:
            built = [each for each in candidates if self._fork(each.after).closed is not None]
            candidates = built or candidates[::-1]
        for candidate in candidates:
            closed = self._with_contributions(fork, candidate)
            if closed is not None:
                return closed
        return None

    def _with_contributions(self, fork: Fork, candidate: ClosedRound) -> ClosedRound | None:
        """Return the round with the contributions that count; None if they cannot all be read, yet."""
        entries = candidate.manifest.entries
        places: list[StoredObject] = []
        for entry in entries:
            place = self.listing.contributions.get(fork.chain.path_of(entry.member, entry.round))
            if place is not None:
                places.append(place)
        self.readings.require(places)
        contributions: dict[bytes, ReadContribution] = {}
        for place in places:
            contribution = self.readings.contributions.get(place)
            if contribution is not None:
                contributions[contribution.digest] = contribution
        if any(entry.digest not in contributions for entry in entries):
            return None
        fault = differs(candidate.manifest, [contributions[entry.digest] for entry in entries])
        if fault:
            fork.drop(candidate)
            raise Unsettled(Reject(candidate.place, fault))
        return replace(candidate, contributions=contributions)
