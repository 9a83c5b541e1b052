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
   could be read a usual round before it, or it is passed over.

A question about a round may need an object that was not read yet, or find one that does not count.
Then it raises `Unsettled`. Do that step, and ask again: what is known already is kept.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from colab_swarm.errors import ProtocolError
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.contributions import ClosedRound, Offer, ReadContribution, differs
from colab_swarm.mailbox.rounds import (
    MOST_MEMBERS,
    WHOLE_SECOND_S,
    WINDOW,
    Farewell,
    RoundChain,
    RoundListing,
    RoundManifest,
    round_of,
)
from colab_swarm.net.peers import PeerId, remember, short

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
        may_stand: a manifest that is only passed over: the next round may be built on it.
    """

    def __init__(
        self, place: StoredObject, fault: str, author: PeerId | None = None, *, may_stand: bool = False
    ) -> None:
        super().__init__(place, fault)
        self.may_stand = may_stand
        self.place = place
        self.fault = fault
        self.author = author


@dataclass
class Readings:
    """What this peer has read of the rounds.

    Attributes:
        offers: what each contribution would count for.
        contributions: the one of each author that was read last. No other values are held, as a
            manifest lists an author once.
        manifests: with their digests.
        faults: why objects do not count.
        passed_over: why manifests close no round unless the next one is built on them.
    """

    offers: dict[StoredObject, Offer] = field(default_factory=dict)
    contributions: dict[PeerId, ReadContribution] = field(default_factory=dict)
    manifests: dict[StoredObject, tuple[RoundManifest, bytes]] = field(default_factory=dict)
    farewells: dict[StoredObject, Farewell] = field(default_factory=dict)
    faults: dict[StoredObject, str] = field(default_factory=dict)
    passed_over: dict[StoredObject, str] = field(default_factory=dict)

    def __contains__(self, place: StoredObject) -> bool:
        known = place in self.offers or place in self.manifests or place in self.farewells
        return known or place in self.faults

    def hold(self, place: StoredObject, contribution: ReadContribution) -> None:
        """Take a contribution that was read."""
        self.offers[place] = contribution.offer
        remember(self.contributions, contribution.head.member, contribution, MOST_MEMBERS)

    def reject(self, place: StoredObject, fault: str, *, may_stand: bool = False) -> None:
        """Take an object for one that does not count."""
        if may_stand:
            self.passed_over[place] = fault
        else:
            self.faults[place] = fault
            self.offers.pop(place, None)

    def require(self, places: Iterable[StoredObject]) -> None:
        """Raise `ObjectsUnread` unless all of these were read."""
        unread = tuple(place for place in places if place not in self)
        if unread:
            raise ObjectsUnread(unread)

    def forget(self, last: ClosedRound) -> None:
        """Forget what matters no more after this round, such as what counted before it."""
        counted = {entry.digest for entry in last.manifest.entries}
        for place, offer in list(self.offers.items()):
            entry = offer.entry
            if entry.digest not in counted and not last.after.may_count(entry.member, entry.round):
                del self.offers[place]
        for member, contribution in list(self.contributions.items()):
            if not last.after.may_count(member, contribution.head.round):
                del self.contributions[member]
        oldest = last.before.round - WINDOW
        for places in (self.manifests, self.farewells, self.faults, self.passed_over):
            for place in list(places):
                if round_of(place.path) < oldest:
                    del places[place]


class Branches:
    """The rounds of one listing, and what closes them. Each question may raise `Unsettled`."""

    def __init__(self, listing: RoundListing, readings: Readings) -> None:
        self.listing = listing
        self.readings = readings

    def closed(self, chain: RoundChain) -> ClosedRound | None:
        """Return the round of ``chain`` with its contributions, if a manifest closes it."""
        closed = self._standing(chain)
        if closed is None:
            return None
        return self._with_contributions(closed)

    def _standing(self, chain: RoundChain) -> ClosedRound | None:
        """Return what the manifest that stands makes of the round."""
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
            if closed.place not in self.readings.passed_over:
                names = ", ".join(map(short, sorted(omitted)))
                fault = f"it leaves out {names}, who contributed a usual round before"
                raise ObjectRejected(closed.place, fault, closed.manifest.member, may_stand=True)
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
        """Return the candidates of a round that can be followed."""
        return [candidate for candidate in self.candidates(chain) if self._can_follow(candidate)]

    def candidates(self, chain: RoundChain) -> list[ClosedRound]:
        """Return the round as each sound manifest would close it, the oldest first."""
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
        """Return a state's chain by the manifests that its digests name: the rest may be false.

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
        """Return the contributions that the round may list, but those that are known to be faulty."""
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
        return {place.member for place in places if place in self.readings.offers}

    def _can_follow(self, candidate: ClosedRound) -> bool:
        """Return whether all contributions that a candidate lists can be read."""
        offers = self._listed(candidate)
        entries = candidate.manifest.entries
        if not offers.keys() >= {entry.digest for entry in entries}:
            return False
        listed = [offers[entry.digest][1] for entry in entries]
        fault = differs(candidate.before, candidate.manifest, listed)
        if fault:
            raise ObjectRejected(candidate.place, fault, candidate.manifest.member)
        return True

    def _listed(self, candidate: ClosedRound) -> dict[bytes, tuple[StoredObject, Offer]]:
        """Return what can be read of the members and rounds that a candidate lists, by digests."""
        listed = {(entry.member, entry.round) for entry in candidate.manifest.entries}
        latest = candidate.place.modified_at + WHOLE_SECOND_S
        places = []
        for place in self.open_places(candidate.before):
            if place.modified_at <= latest and (place.member, round_of(place.path)) in listed:
                places.append(place)
        self.readings.require(places)
        offers = {}
        for place in places:
            offer = self.readings.offers[place]
            offers[offer.entry.digest] = place, offer
        return offers

    def _with_contributions(self, closed: ClosedRound) -> ClosedRound:
        """Return the round with its contributions; those that are no longer held are read again."""
        offers = self._listed(closed)
        contributions = {}
        unread = []
        for entry in closed.manifest.entries:
            held = self.readings.contributions.get(entry.member)
            if held is not None and held.digest == entry.digest:
                contributions[entry.digest] = held
            else:
                unread.append(offers[entry.digest][0])
        if unread:
            raise ObjectsUnread(unread)
        return replace(closed, contributions=contributions)


def _builders(closed: ClosedRound) -> set[PeerId]:
    """Return the members that followed the manifest before: older contributions prove nothing."""
    manifest = closed.manifest
    return {entry.member for entry in manifest.entries if entry.round == manifest.round}
