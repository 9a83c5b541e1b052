"""Which manifests stand: the branches of a run's chain of rounds, by a listing and its objects. Pure.

Rules, in this order:

1. A manifest is a *candidate* of its round if it is sound (`RoundChain.fault_of`), and one of the
   first two of its author. Copies are none.
2. A candidate *can be followed* if all contributions that it lists were written before it, and can
   be read. Its entries must be those of the contributions, or it is no candidate.
3. Of these, the first one on which the next round was *built* closes the round: a candidate of the
   next round can be followed, too. If there are several, it is the one on which most of its members
   built.
4. If none was built on, the oldest one closes the round. It must list each member whose contribution
   could be read a usual round before it, or it is no candidate.

A question about a round may need an object that was not read yet, or find one that does not count.
Then it raises `Unsettled`. Do that step, and ask again: what is known already is kept.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from colab_swarm.errors import ProtocolError
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.rounds import (
    MOST_MEMBERS,
    WHOLE_SECOND_S,
    WINDOW,
    ClosedRound,
    Farewell,
    ReadContribution,
    RoundChain,
    RoundListing,
    RoundManifest,
    differs,
    round_of,
)
from colab_swarm.net.peers import PeerId, short

CANDIDATES = 2  # of one author in a round: what the first one lists may be damaged since


class Unsettled(Exception):
    """The answer needs a step first."""


class ObjectsUnread(Unsettled):
    """The step: read these objects."""

    def __init__(self, places: Sequence[StoredObject]) -> None:
        super().__init__(places)
        self.places = places


class ObjectRejected(Unsettled):
    """The step: note that this object does not count.

    Attributes:
        author: whose fault it is; None: nobody's.
    """

    def __init__(self, place: StoredObject, fault: str, author: PeerId | None = None) -> None:
        super().__init__(place, fault)
        self.place = place
        self.fault = fault
        self.author = author


@dataclass
class Readings:
    """What this peer has read of the rounds: each object once."""

    contributions: dict[StoredObject, ReadContribution] = field(default_factory=dict)
    manifests: dict[StoredObject, tuple[RoundManifest, bytes]] = field(default_factory=dict)  # with digests
    farewells: dict[StoredObject, Farewell] = field(default_factory=dict)
    faults: dict[StoredObject, str] = field(default_factory=dict)  # of objects that do not count

    def __contains__(self, place: StoredObject) -> bool:
        known = place in self.contributions or place in self.manifests or place in self.farewells
        return known or place in self.faults

    def require(self, places: Iterable[StoredObject]) -> None:
        """Raise `ObjectsUnread` unless all of these were read."""
        unread = tuple(place for place in places if place not in self)
        if unread:
            raise ObjectsUnread(unread)

    def forget(self, last: ClosedRound) -> None:
        """Forget what matters no more after this round, such as contributions that counted before it."""
        for place, contribution in list(self.contributions.items()):
            head = contribution.head
            counts = contribution.digest in last.contributions
            if not counts and not last.after.may_count(head.member, head.round):
                del self.contributions[place]
        oldest = last.before.round - WINDOW
        for places in (self.manifests, self.farewells, self.faults):
            for place in list(places):
                if round_of(place.path) < oldest:
                    del places[place]


class Branches:
    """The rounds of one listing, and the manifests that close them. Its questions raise `Unsettled`."""

    def __init__(self, listing: RoundListing, readings: Readings) -> None:
        self.listing = listing
        self.readings = readings

    def closed(self, chain: RoundChain) -> ClosedRound | None:
        """Return the round of ``chain`` if a manifest closes it."""
        followable = self.followable(chain)
        if len(followable) == 1 and not self._omitted(followable[0]):
            # The next round's objects are read later.
            return followable[0]
        built = self.built(chain)
        if built:
            return built[0]
        for closed in followable:
            omitted = self._omitted(closed)
            if not omitted:
                return closed
            names = ", ".join(map(short, sorted(omitted)))
            fault = f"it leaves out {names}, who contributed a usual round before"
            raise ObjectRejected(closed.place, fault, closed.manifest.member)
        return None

    def built(self, chain: RoundChain) -> list[ClosedRound]:
        """Return the candidates that can be followed, and on which the next round was built."""
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
        """Return the candidates of a round that can be followed, with their contributions."""
        rounds = []
        for candidate in self.candidates(chain):
            closed = self._with_contributions(candidate)
            if closed is not None:
                rounds.append(closed)
        return rounds

    def candidates(self, chain: RoundChain) -> list[ClosedRound]:
        """Return what the round's sound manifests make of it, the oldest first, without contributions."""
        read = self._read_manifests(chain)
        gone = self.gone(chain)
        counts = Counter[PeerId]()
        candidates: dict[bytes, ClosedRound | None] = {}
        for place, manifest, digest in read:
            # Anybody can write copies.
            if digest in candidates:
                continue
            candidates[digest] = None
            counts[manifest.member] += 1
            if counts[manifest.member] > CANDIDATES or place in self.readings.faults:
                continue
            before = {member for member, at in gone.items() if at <= place.modified_at + WHOLE_SECOND_S}
            fault = chain.fault_of(manifest, written_at=place.modified_at, gone=before)
            if fault:
                raise ObjectRejected(place, fault, manifest.member)
            after = chain.after(manifest, digest, closed_at=place.modified_at)
            candidates[digest] = ClosedRound(chain, place, manifest, after)
        return [candidate for candidate in candidates.values() if candidate is not None]

    def has_majority_elsewhere(self, chain: RoundChain) -> bool:
        """Return whether most members went on from a manifest that this peer cannot follow."""
        if self.listing.latest <= chain.round:
            return False
        for candidate in self.candidates(chain):
            for later in self.followable(candidate.after):
                if chain.members and chain.is_quorum(_builders(later)):
                    return True
        return False

    def retraced(self, chain: RoundChain, written_at: float) -> RoundChain:
        """Return a state's chain as the manifests make it that its digests name: the rest may be false.

        Raises `ProtocolError` if a manifest is missing.
        """
        first = min(chain.digests)
        retraced = RoundChain.begin(first, chain.digests[first], now=min(chain.closed_at, written_at))
        while retraced.round < chain.round:
            retraced = self._named(retraced, chain.digests.get(retraced.round + 1))
        return retraced

    def _named(self, chain: RoundChain, named: bytes | None) -> RoundChain:
        """Return the chain after the manifest with this digest."""
        for place, manifest, digest in self._read_manifests(chain):
            if digest == named:
                return chain.after(manifest, digest, closed_at=place.modified_at)
        raise ProtocolError("a manifest before it is missing")

    def _read_manifests(self, chain: RoundChain) -> list[tuple[StoredObject, RoundManifest, bytes]]:
        """Return a round's readable manifests with their digests, the oldest first."""
        places = self.listing.manifests.get(chain.folder, ())
        self.readings.require(places)
        read = self.readings.manifests
        return [(place, *read[place]) for place in places if place in read]

    def gone(self, chain: RoundChain) -> dict[PeerId, float]:
        """Return when members of the last round said farewell: this one need not wait for them."""
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

    def _omitted(self, closed: ClosedRound) -> set[PeerId]:
        """Return the members that the manifest of a round should have listed."""
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

    def _with_contributions(self, candidate: ClosedRound) -> ClosedRound | None:
        """Return the round with the contributions that count; None if they cannot all be read."""
        entries = candidate.manifest.entries
        listed = {(entry.member, entry.round) for entry in entries}
        latest = candidate.place.modified_at + WHOLE_SECOND_S
        places = []
        for place in self.open_places(candidate.before):
            if place.modified_at <= latest and (place.member, round_of(place.path)) in listed:
                places.append(place)
        self.readings.require(places)
        read = self.readings.contributions
        by_digest = {read[place].digest: read[place] for place in places if place in read}
        contributions = {}
        for entry in entries:
            if entry.digest not in by_digest:
                return None
            contributions[entry.digest] = by_digest[entry.digest]
        listed_ones = [contributions[entry.digest] for entry in entries]
        fault = differs(candidate.before, candidate.manifest, listed_ones)
        if fault:
            raise ObjectRejected(candidate.place, fault, candidate.manifest.member)
        return replace(candidate, contributions=contributions)


def _builders(closed: ClosedRound) -> set[PeerId]:
    """Return the members that contributed after the manifest before: older contributions prove nothing."""
    manifest = closed.manifest
    return {entry.member for entry in manifest.entries if entry.round == manifest.round}
