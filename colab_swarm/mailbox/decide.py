"""Decides what a peer that waits for a round does next, from what the peer has read of the bucket. Pure.

A manifest is *sound* if it follows the previous manifest, lists each member once, and if all listed contributions can
be read and match its entries. The first sound manifest of a round counts, because the store keeps the first of two
writes. If a manifest is unsound, a peer waits for a grace, and then writes a manifest with the next number.
"""

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self, TypeAlias

from colab_swarm.averaging.group import swarm_loss
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.chain import WINDOW, RoundChain
from colab_swarm.mailbox.contributions import StoredContribution
from colab_swarm.mailbox.objects import (
    LEFT,
    MANIFEST,
    MOST_MEMBERS,
    PLACE,
    Farewell,
    ManifestEntry,
    RoundManifest,
    round_of,
)
from colab_swarm.net.peers import PeerId

# Limits of the pause between two looks at the bucket.
LEAST_PAUSE_S = 0.5
MOST_PAUSE_S = 60.0
_BEGIN_PAUSE_S = 5.0  # maximum pause while the run waits for its first peers
# A contribution whose norm is more than this many times the median comes from a broken peer, and would ruin the model.
MOST_LENGTH = 10_000.0


@dataclass(frozen=True)
class RoundListing:
    """The objects of the last rounds, by folder. Manifests are sorted by their number."""

    contributions: dict[str, list[StoredObject]] = field(default_factory=dict)
    manifests: dict[str, list[StoredObject]] = field(default_factory=dict)
    farewells: dict[str, StoredObject] = field(default_factory=dict)  # by path

    @classmethod
    def of(cls, places: Iterable[StoredObject]) -> Self:
        listing = cls()
        for place in sorted(places, key=lambda place: (len(place.path), place.path)):
            match = PLACE.fullmatch(place.path)
            if match is None:
                continue
            if match[2]:
                listing.contributions.setdefault(place.folder, []).append(place)
            elif place.path.endswith(LEFT):
                listing.farewells[place.path] = place
            else:
                listing.manifests.setdefault(place.folder, []).append(place)
        return listing

    @property
    def newest_at(self) -> float:
        """The time of the last contribution; 0 if there is none."""
        places = itertools.chain(*self.contributions.values())
        return max((place.modified_at for place in places), default=0.0)

    @property
    def latest(self) -> int:
        """The last round that has a manifest, on any branch; -1 if no round has a manifest."""
        return max(map(round_of, self.manifests), default=-1)

    def at(self, path: str) -> StoredObject | None:
        """Return the contribution at a path, or None."""
        for place in self.contributions.get(path.rpartition("/")[0], ()):
            if place.path == path:
                return place
        return None

    def next_manifest(self, folder: str) -> str:
        """Return the path of the next manifest in a round's folder."""
        taken = self.manifests.get(folder, ())
        number = 0
        if taken:
            number = 1 + int(taken[-1].path.rpartition(MANIFEST)[2])
        return f"{folder}/{MANIFEST}{number:02d}"


@dataclass(frozen=True)
class ClosedRound:
    """A round that a manifest closes, and the chain after it."""

    place: StoredObject  # the manifest's object
    manifest: RoundManifest
    after: RoundChain
    contributions: dict[bytes, StoredContribution]  # by digest

    @property
    def loss(self) -> float | None:
        """The swarm's mean loss in the round, equal at all peers."""
        entries = self.manifest.entries
        return swarm_loss((entry.weight, self.contributions[entry.digest].head.loss) for entry in entries)

    def counts(self, member: PeerId, round: int) -> bool:
        return any((entry.member, entry.round) == (member, round) for entry in self.manifest.entries)


@dataclass
class Seen:
    """What a peer has read of the rounds in its last ``listing``. An object that does not count has a fault."""

    listing: RoundListing = field(default_factory=RoundListing)
    manifests: dict[StoredObject, tuple[RoundManifest, bytes]] = field(default_factory=dict)  # with digests
    contributions: dict[StoredObject, StoredContribution] = field(default_factory=dict)
    farewells: dict[StoredObject, Farewell] = field(default_factory=dict)
    faults: dict[StoredObject, str] = field(default_factory=dict)

    def unread(self, chain: RoundChain) -> list[StoredObject]:
        """Return the objects of the listing that a decision on the chain's next round needs."""
        places = [*self.listing.manifests.get(chain.folder, ()), *self.open_places(chain)]
        places += [place for path, place in self.listing.farewells.items() if path in chain.farewells]
        known = (self.manifests, self.contributions, self.farewells, self.faults)
        return [place for place in places if not any(place in read for read in known)]

    def open_places(self, chain: RoundChain) -> list[StoredObject]:
        """Return the places of the contributions that the round may list, with the oldest round first."""
        places = []
        for round, folder in sorted(chain.folders.items()):
            for place in self.listing.contributions.get(folder, ()):
                if chain.may_count(place.member, round):
                    places.append(place)
        return places

    def open_contributions(self, chain: RoundChain) -> dict[PeerId, StoredContribution]:
        """Return each member's oldest contribution that the round may list, by member.

        If there are more than `MOST_MEMBERS` contributions, the last round's members have priority.
        """
        oldest: dict[PeerId, StoredContribution] = {}
        for place in self.open_places(chain):
            if place in self.contributions:
                oldest.setdefault(place.member, self.contributions[place])
        members = sorted(oldest, key=lambda member: (member not in chain.members, member))
        return {member: oldest[member] for member in sorted(members[:MOST_MEMBERS])}

    def author_of(self, place: StoredObject) -> PeerId | None:
        """Return the member that signed an object, or None if this member is unknown."""
        if place in self.manifests:
            return self.manifests[place][0].member
        if place in self.contributions:
            return place.member
        return None

    def gone(self, chain: RoundChain) -> set[PeerId]:
        """Return the members of the last round that said farewell, for which this round need not wait."""
        gone = set()
        for path, member in chain.farewells.items():
            if self.listing.farewells.get(path) in self.farewells:
                gone.add(member)
        return gone

    def forget(self, chain: RoundChain) -> None:
        """Forget objects that neither the chain's next round nor a later round needs."""
        oldest = chain.round - WINDOW
        for place, contribution in list(self.contributions.items()):
            if not chain.may_count(place.member, contribution.head.round):
                del self.contributions[place]
        for read in (self.manifests, self.farewells, self.faults):
            for place in [place for place in read if round_of(place.path) < oldest]:
                del read[place]


@dataclass(frozen=True)
class Follow:
    """Apply the mean of a round that is over."""

    closed: ClosedRound


@dataclass(frozen=True)
class LoadState:
    """Load the state that leads to the other members. They followed another manifest, or went on without this peer."""


@dataclass(frozen=True)
class Close:
    """Write a manifest with these entries to the path. Objects that have ``faults`` do not count."""

    path: str
    entries: tuple[ManifestEntry, ...]
    faults: dict[StoredObject, str]


@dataclass(frozen=True)
class Wait:
    """Look at the bucket again after a pause.

    Attributes:
        pause_s: seconds until the next look.
        late_members: members for which the round waits, if it takes longer than usual.
        most_s: seconds after which the round goes on without them.
    """

    pause_s: float
    late_members: frozenset[PeerId] = frozenset()
    most_s: float = math.inf


Decision: TypeAlias = Follow | LoadState | Close | Wait


def decide(
    chain: RoundChain,
    seen: Seen,
    now: float,
    *,
    me: PeerId,
    branch: Mapping[int, str],
    min_peers: int = 1,
    left_out: Collection[PeerId] = (),
    may_leave: bool = True,
) -> Decision:
    """Return what a peer does next.

    Args:
        chain: the peer's chain; its next round is the one to decide on.
        seen: what the peer has read, with all objects that `Seen.unread` names.
        now: the store's time, in seconds.
        branch: the folder of each round that this peer has followed.
        min_peers: minimum number of contributors with which this peer closes a round.
        left_out: members for which this peer waits no longer than usual.
        may_leave: False if there is no state that leads to the other members.
    """
    closed = standing(chain, seen)
    if closed is not None:
        return Follow(closed)
    # The clock of a peer that slept may be behind the newest object.
    now = max(now, seen.listing.newest_at)
    if may_leave and is_left(chain, branch, seen, now, me):
        return LoadState()
    contributions = seen.open_contributions(chain)
    pause_s = abs(chain.closed_at + chain.pace_s - now) / 2  # half of the time to the round's likely end
    if min_peers > 1 and len(contributions) < min_peers:
        return Wait(_bounded(min(pause_s, _BEGIN_PAUSE_S)))
    gone = seen.gone(chain)
    due_at = chain.due_at(contributions.keys(), gone, left_out)
    places = seen.listing.manifests.get(chain.folder)
    if places:
        # Contributions that an unsound manifest lists may be written again meanwhile.
        due_at = max(due_at, places[-1].modified_at + chain.grace_s)
    if now < due_at:
        pause_s = _bounded(min(pause_s, due_at - now))
        if now < chain.late_at or due_at == math.inf:
            return Wait(pause_s)
        late_members = chain.missing(contributions.keys(), gone)
        return Wait(pause_s, frozenset(late_members), due_at - now)
    faults = unsound(chain, seen)
    most_length = MOST_LENGTH * _median_length(contributions.values())
    entries = []
    for contribution in contributions.values():
        if contribution.norm > most_length:
            faults[contribution.place] = f"it is over {MOST_LENGTH:,.0f} times as long as the others"
        else:
            entries.append(contribution.entry)
    return Close(seen.listing.next_manifest(chain.folder), tuple(entries), faults)


def _median_length(contributions: Iterable[StoredContribution]) -> float:
    """Return the median of the norms that are not zero. Of an even number, take the larger middle norm."""
    norms = [contribution.norm for contribution in contributions if contribution.norm]
    if not norms:
        return 0.0
    return statistics.median_high(norms)


def standing(chain: RoundChain, seen: Seen) -> ClosedRound | None:
    """Return the round, closed by the manifest that counts; None if there is no sound manifest.

    The first sound manifest counts. But a synced folder may show two first manifests, or show a contribution only to
    some members. Then the manifest counts on which most members build.
    """
    faults = unsound(chain, seen)
    standing = None
    most_builders = -1
    for place in seen.listing.manifests.get(chain.folder, ()):
        if place in faults:
            continue
        manifest, digest = seen.manifests[place]
        after = chain.after(manifest, digest, closed_at=place.modified_at)
        builders = len(seen.listing.contributions.get(after.folder, ()))
        if builders > most_builders:
            most_builders = builders
            contributions = _listed(chain, manifest, seen)
            standing = ClosedRound(place, manifest, after, contributions)
    return standing


def unsound(chain: RoundChain, seen: Seen) -> dict[StoredObject, str]:
    """Return the manifests of a round that do not count, each with the reason."""
    faults = {}
    for place in seen.listing.manifests.get(chain.folder, ()):
        if place in seen.faults:
            faults[place] = seen.faults[place]
            continue
        manifest, _ = seen.manifests[place]
        fault = chain.fault_of(manifest)
        if not fault:
            contributions = _listed(chain, manifest, seen)
            for entry in manifest.entries:
                contribution = contributions.get(entry.digest)
                if contribution is None:
                    fault = "it lists a contribution that cannot be read"
                elif contribution.entry != entry:
                    fault = "its entries are not those of the contributions"
        if fault:
            faults[place] = fault
    return faults


def _listed(chain: RoundChain, manifest: RoundManifest, seen: Seen) -> dict[bytes, StoredContribution]:
    """Return the contributions that a manifest lists and that this peer has read, by digest."""
    digests = {entry.digest for entry in manifest.entries}
    listed = {}
    for place in seen.open_places(chain):
        contribution = seen.contributions.get(place)
        if contribution is not None and contribution.digest in digests:
            listed[contribution.digest] = contribution
    return listed


def others_elsewhere(
    chain: RoundChain, branch: Mapping[int, str], seen: Seen, me: PeerId
) -> dict[PeerId, float]:
    """Return the members whose newest contribution is on another branch than this peer's, and since when.

    ``branch`` has the folder of each round that this peer has followed.
    """
    newest: dict[PeerId, StoredObject] = {}
    first_at: dict[PeerId, float] = {}
    for place in itertools.chain(*seen.listing.contributions.values()):
        if place.member not in newest or place.modified_at > newest[place.member].modified_at:
            newest[place.member] = place
        if _is_elsewhere(place, chain, branch):
            first_at[place.member] = min(place.modified_at, first_at.get(place.member, math.inf))
    elsewhere = {}
    for member, place in newest.items():
        if member != me and _is_elsewhere(place, chain, branch):
            elsewhere[member] = first_at[member]
    return elsewhere


def _is_elsewhere(place: StoredObject, chain: RoundChain, branch: Mapping[int, str]) -> bool:
    round = round_of(place.path)
    return round > chain.round or branch.get(round, place.folder) != place.folder


def is_left(chain: RoundChain, branch: Mapping[int, str], seen: Seen, now: float, me: PeerId) -> bool:
    """Return True if, for at least a grace, more members build on another branch than on this peer's branch.

    If both branches have equally many members, the branch at the later round counts. If the rounds are equal too, the
    larger digest decides.
    """
    elsewhere = others_elsewhere(chain, branch, seen, me)
    if not elsewhere or now < min(elsewhere.values()) + chain.grace_s:
        return False
    members: set[PeerId] = set()
    furthest = ""
    for place in itertools.chain(*seen.listing.contributions.values()):
        members.add(place.member)
        if place.member in elsewhere and _is_elsewhere(place, chain, branch):
            furthest = max(furthest, place.folder)
    here = len(members.union([me])) - len(elsewhere)
    if len(elsewhere) == here:
        return furthest > chain.folder
    return len(elsewhere) > here


def late_s(
    chain: RoundChain, seen: Seen, closed: ClosedRound, awaited: Collection[PeerId], contributed_at: float
) -> dict[PeerId, float]:
    """Return how long the round waited for each late member.

    The time counts from the end of a usual round or from this peer's own contribution, whichever is later.
    """
    usual_at = max(chain.late_at, contributed_at)
    came_at: dict[PeerId, float] = {}
    for place in seen.open_places(chain):
        came_at[place.member] = min(place.modified_at, came_at.get(place.member, math.inf))
    late_s = {}
    for member in set(awaited) - seen.gone(chain):
        waited_s = min(came_at.get(member, math.inf), closed.place.modified_at) - usual_at
        if waited_s > 0:
            late_s[member] = waited_s
    return late_s


def _bounded(pause_s: float) -> float:
    return min(max(pause_s, LEAST_PAUSE_S), MOST_PAUSE_S)
