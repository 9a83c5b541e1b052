"""Which manifests stand: the branches of a run's chain of rounds, as a listing and its objects show them. Pure.

Rules, in this order:

1. A manifest is a *candidate* of its round if it is sound (`RoundChain.fault_of`), and one of the first two of its
   author. Copies are none.
2. A candidate *can be followed* if all contributions that it lists were written before it, and can be read. Its
   entries must be those of the contributions, or it is no candidate.
3. Of these, the first one on which the next round was *built* closes the round: a candidate of the next round
   can be followed, too. If there are several, it is the one on which most of its members built.
4. If none was built on, the oldest one closes the round. It must list each member whose contribution could be read
   a usual round before it, or it is no candidate.

A question about a round may need an object that was not read yet, or find one that does not count. Then it
raises `Unsettled` with the step that comes first. After the step, ask again: what is known already is kept.
So each object is asked for once, and the work grows with the number of manifests, not with its square.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeAlias

from colab_swarm.errors import ProtocolError
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.rounds import (
    MOST_MEMBERS,
    WHOLE_SECOND_S,
    WINDOW,
    ClosedRound,
    ReadContribution,
    RoundChain,
    RoundListing,
    RoundManifest,
    differs,
    round_of,
)
from colab_swarm.net.peers import PeerId, short

CANDIDATES = 2  # of one author in a round: what the first one lists may be damaged since
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
    author: PeerId | None = None  # whose fault it is; None: nobody's


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
    candidates: list[ClosedRound] | None = None  # without their contributions; None: not known yet
    settled: bool = False
    closed: ClosedRound | None = None  # None also if no manifest closes it


class Branches:
    """The rounds of one listing, and the manifests that close them."""

    def __init__(self, listing: RoundListing, readings: Readings) -> None:
        self.listing = listing
        self.readings = readings
        self._forks: dict[tuple[bytes, float], Fork] = {}

    def after(self, chain: RoundChain) -> ClosedRound | Step | None:
        """Return the round of ``chain`` if a manifest closes it, or the step that must come first."""
        try:
            return self.closed(chain)
        except Unsettled as unsettled:
            return unsettled.step

    def closed(self, chain: RoundChain) -> ClosedRound | None:
        """Return the round of ``chain`` if a manifest closes it. Raises `Unsettled`."""
        fork = self._fork(chain)
        if not fork.settled:
            fork.closed = self._closed(fork)
            fork.settled = True
        return fork.closed

    def built(self, chain: RoundChain) -> list[ClosedRound]:
        """Return the candidates that can be followed, and on which the next round was built. Raises `Unsettled`."""
        if self.listing.latest <= chain.round:
            return []
        built = []
        for candidate in self.followable(chain):
            later = self.followable(candidate.after)
            if later:
                members = candidate.after.members
                builders = [len(_builders(closed).intersection(members)) for closed in later]
                built.append((max(builders), candidate))
        return [candidate for _, candidate in sorted(built, key=lambda pair: -pair[0])]

    def followable(self, chain: RoundChain) -> list[ClosedRound]:
        """Return the candidates of a round that can be followed, with their contributions. Raises `Unsettled`."""
        fork = self._fork(chain)
        rounds = []
        for candidate in self._candidates(fork):
            closed = self._with_contributions(fork, candidate)
            if closed is not None:
                rounds.append(closed)
        return rounds

    def candidates(self, chain: RoundChain) -> list[ClosedRound]:
        """Return what the round's sound manifests make of it, without contributions. Raises `Unsettled`."""
        return self._candidates(self._fork(chain))

    def has_majority_elsewhere(self, chain: RoundChain) -> bool:
        """Return whether most members went on from a manifest that this peer cannot follow. Raises `Unsettled`."""
        if self.listing.latest <= chain.round:
            return False
        for candidate in self.candidates(chain):
            for later in self.followable(candidate.after):
                if chain.members and chain.is_quorum(_builders(later)):
                    return True
        return False

    def retraced(self, chain: RoundChain, written_at: float) -> RoundChain | Step:
        """Return a state's chain as the manifests make it that its digests name: the rest of it may be false.

        Raises `ProtocolError` if a manifest is missing.
        """
        first = min(chain.digests)
        retraced = RoundChain.begin(first, chain.digests[first], now=min(chain.closed_at, written_at))
        while retraced.round < chain.round:
            fork = self._fork(retraced)
            try:
                self.readings.require(fork.manifests)
            except Unsettled as unsettled:
                return unsettled.step
            retraced = self._named(fork, chain.digests.get(retraced.round + 1))
        return retraced

    def _named(self, fork: Fork, digest: bytes | None) -> RoundChain:
        """Return the chain after the manifest with this digest."""
        for place in fork.manifests:
            if place in self.readings.manifests:
                manifest, named = self.readings.manifests[place]
                if named == digest:
                    return fork.chain.after(manifest, named, closed_at=place.modified_at)
        raise ProtocolError("a manifest before it is missing")

    def gone(self, chain: RoundChain) -> dict[PeerId, float]:
        """Return when members of the last round said farewell: this one need not wait for them. Raises `Unsettled`."""
        places: dict[StoredObject, PeerId] = {}
        for path, member in chain.farewells.items():
            place = self.listing.farewells.get(path)
            if place is not None:
                places[place] = member
        self.readings.require(places)
        gone: dict[PeerId, float] = {}
        for place, member in places.items():
            if place in self.readings.farewells:
                gone[member] = min(place.modified_at, gone.get(member, place.modified_at))
        return gone

    def open_places(self, chain: RoundChain) -> list[StoredObject]:
        """Return the contributions that the round may list, as far as they are not known to be faulty."""
        places = []
        for round, folder in sorted(chain.folders.items()):
            for place in self.listing.contributions.get(folder, ()):
                if chain.may_count(place.member, round) and place not in self.readings.faults:
                    places.append(place)
        return places

    def _fork(self, chain: RoundChain) -> Fork:
        # Two copies of a manifest have the same digest, and lead to chains that differ in their time alone.
        key = (chain.base, chain.closed_at)
        fork = self._forks.get(key)
        if fork is None:
            manifests = self.listing.manifests.get(chain.folder, [])
            fork = Fork(
                chain, sorted(manifests, key=lambda place: (place.modified_at, len(place.path), place.path))
            )
            self._forks[key] = fork
        return fork

    def _candidates(self, fork: Fork) -> list[ClosedRound]:
        if fork.candidates is None:
            self.readings.require(fork.manifests)
            gone = self.gone(fork.chain)
            fork.candidates = [
                self._candidate(fork.chain, place, gone) for place in self._first_of_each(fork)
            ]
        return fork.candidates

    def _first_of_each(self, fork: Fork) -> list[StoredObject]:
        """Return the manifests that may be candidates: the first ones of each author."""
        counts = Counter[PeerId]()
        digests = set[bytes]()
        places = []
        for place in fork.manifests:
            read = self.readings.manifests.get(place)
            if read is None:
                continue
            manifest, digest = read
            # Anybody can write copies.
            if digest in digests:
                continue
            digests.add(digest)
            counts[manifest.member] += 1
            if counts[manifest.member] <= CANDIDATES and place not in self.readings.faults:
                places.append(place)
        return places

    def _candidate(self, chain: RoundChain, place: StoredObject, gone: Mapping[PeerId, float]) -> ClosedRound:
        manifest, digest = self.readings.manifests[place]
        before = {member for member, at in gone.items() if at <= place.modified_at + WHOLE_SECOND_S}
        fault = chain.fault_of(manifest, written_at=place.modified_at, gone=before)
        if fault:
            raise Unsettled(Reject(place, fault, manifest.member))
        return ClosedRound(chain, place, manifest, chain.after(manifest, digest, closed_at=place.modified_at))

    def _drop(self, fork: Fork, closed: ClosedRound, fault: str) -> NoReturn:
        """Raise `Unsettled`: a candidate does not count."""
        fork.candidates = None
        raise Unsettled(Reject(closed.place, fault, closed.manifest.member))

    def _closed(self, fork: Fork) -> ClosedRound | None:
        followable = self.followable(fork.chain)
        if len(followable) == 1 and not self._omitted(followable[0]):
            # The next round's objects are read later.
            return followable[0]
        built = self.built(fork.chain)
        if built:
            return built[0]
        for closed in followable:
            omitted = self._omitted(closed)
            if not omitted:
                return closed
            names = ", ".join(map(short, sorted(omitted)))
            self._drop(fork, closed, f"it leaves out {names}, who contributed a usual round before")
        return None

    def _omitted(self, closed: ClosedRound) -> set[PeerId]:
        """Return the members that the manifest of a round should have listed. Raises `Unsettled`."""
        entries = closed.manifest.entries
        if len(entries) == MOST_MEMBERS:
            return set()
        listed = {entry.member for entry in entries}
        before = closed.place.modified_at - closed.before.settled_s
        places = []
        for place in self.open_places(closed.before):
            if place.member not in listed and place.modified_at <= before:
                places.append(place)
        self.readings.require(places)
        return {place.member for place in places if place in self.readings.contributions}

    def _with_contributions(self, fork: Fork, candidate: ClosedRound) -> ClosedRound | None:
        """Return the round with the contributions that count; None if they cannot all be read."""
        entries = candidate.manifest.entries
        digests = {entry.digest for entry in entries}
        listed = {(entry.member, entry.round) for entry in entries}
        places = []
        for round, folder in fork.chain.folders.items():
            for place in self.listing.contributions.get(folder, ()):
                was_there = place.modified_at <= candidate.place.modified_at + WHOLE_SECOND_S
                if was_there and (place.member, round) in listed:
                    places.append(place)
        self.readings.require(places)
        contributions: dict[bytes, ReadContribution] = {}
        for place in places:
            contribution = self.readings.contributions.get(place)
            if contribution is not None and contribution.digest in digests:
                contributions[contribution.digest] = contribution
        if digests != set(contributions):
            return None
        fault = differs(fork.chain, candidate.manifest, [contributions[entry.digest] for entry in entries])
        if fault:
            self._drop(fork, candidate, fault)
        return replace(candidate, contributions=contributions)


def _builders(closed: ClosedRound) -> set[PeerId]:
    """Return the members that contributed after the manifest before: contributions to older rounds prove nothing."""
    manifest = closed.manifest
    return {entry.member for entry in manifest.entries if entry.round == manifest.round}
