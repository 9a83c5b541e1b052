"""What a peer that waits for a round does next, as one look at the bucket shows it. Pure.

`RoundView.next_action` goes by these rules, in this order:

1. The peer reads its own contribution: another member may have overwritten it.
2. If the next round was built on another manifest of the last one, the peer *loads a state*, to
   catch up. So it does if it would build that round without most members, and a later manifest is
   there that they may follow.
3. If a manifest closes the round, the peer *follows* it.
4. If most members follow a manifest that this peer cannot follow, it *seeks a state*, and loads it.
   So it does if nobody closed the round by its deadline, and a later one has a manifest: the peer
   may have slept. A state moves no peer that can follow the rounds, whatever it says.
5. If the run begins with more peers than contribute, the peer *waits* for them.
6. If the round is due, the peer *closes* it with a manifest of all contributions that can be read.
   But not if there is one that it cannot follow yet: it is awaited as long as the peer has patience
   with its author.
7. Else it *waits*.

Each of these questions raises `Unsettled` where it needs a step first, as those of `Branches` do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from colab_swarm.mailbox.branches import Branches, ObjectRejected
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.contributions import ClosedRound, Offer, entries_of
from colab_swarm.mailbox.rounds import MOST_MEMBERS, ManifestEntry, RoundChain
from colab_swarm.net.peers import PeerId

# between two looks at the bucket
LEAST_PAUSE_S = 0.5
MOST_PAUSE_S = 60.0
_BEGIN_PAUSE_S = 5.0  # at most, while the run waits for its first peers


@dataclass(frozen=True)
class Follow:
    """Apply the mean of a round that is over."""

    closed: ClosedRound


@dataclass(frozen=True)
class LoadState:
    """Read the newest state: the others went on without this peer, or on another manifest."""


@dataclass(frozen=True)
class SeekState:
    """Load a state later than the chain. Where there is none, ask again with ``may_leave=False``.

    Attributes:
        companions: how many other members contributed to the open round. The state must stand for
            more, or they and this peer go on by themselves.
    """

    companions: int


@dataclass(frozen=True)
class Close:
    """Write a manifest with these entries to the path, and no other before ``again_at``."""

    path: str
    entries: tuple[ManifestEntry, ...]
    again_at: float


@dataclass(frozen=True)
class Wait:
    """Look at the bucket again after a while.

    Attributes:
        pause_s: until then.
        late_members: for whom the round waits, if it takes longer than usual.
        most_s: then it goes on without them.
    """

    pause_s: float
    late_members: frozenset[PeerId] = frozenset()
    most_s: float = math.inf


Decision: TypeAlias = Follow | LoadState | SeekState | Close | Wait


@dataclass
class RoundView:
    """One look at the bucket, of a peer whose next round is that of ``chain``. Times are the store's.

    ``patience_s(member)`` says how long this peer waits for a member beyond the usual.
    """

    chain: RoundChain
    branches: Branches
    last: ClosedRound | None = None  # the round before; None where the chain is a state's
    own: StoredObject | None = None  # the peer's contribution that no manifest lists yet
    min_peers: int = 1  # contributors without whom this peer closes no round
    patience_s: Callable[[PeerId], float] = lambda member: math.inf

    def next_action(self, now: float, close_at: float = -math.inf, *, may_leave: bool = True) -> Decision:
        """Return what to do; before ``close_at``, this peer writes no manifest."""
        if self.own is not None:
            self.branches.readings.require([self.own])
        if self.is_replaced(now):
            return LoadState()
        closed = self.branches.closed(self.chain)
        if closed is not None:
            return Follow(closed)
        if may_leave and self.is_left(now):
            return SeekState(self._companions)
        if self.min_peers > 1 and len(self._present) < self.min_peers:
            return Wait(min(self._pause_s(now, math.inf), _BEGIN_PAUSE_S))
        due_at = max(self.due_at, self.reopens_at)
        if now < max(due_at, close_at):
            return self._wait(now, due_at)
        path = self.branches.listing.next_attempt(self.chain.folder)
        return Close(path, entries_of(self.chain, self.offers), again_at=now + self.chain.missing_s)

    @property
    def offers(self) -> list[Offer]:
        """Whole contributions that the round may list: the oldest of each member."""
        places = self.open_places
        readings = self.branches.readings
        readings.require(places)
        oldest: dict[PeerId, Offer] = {}
        for place in places:
            oldest.setdefault(place.member, readings.offers[place])
        return list(oldest.values())

    @property
    def open_places(self) -> list[StoredObject]:
        """The contributions that the round may list: of so many members, the last round's first."""
        places = self.branches.open_places(self.chain)
        names = dict.fromkeys(place.member for place in places)
        members = set(sorted(names, key=lambda member: member not in self.chain.members)[:MOST_MEMBERS])
        return [place for place in places if place.member in members]

    @property
    def due_at(self) -> float:
        """When the round may close, by the members that contributed or said farewell."""
        return self.chain.due_at(self._present, self.branches.gone(self.chain), self.patience_s)

    @property
    def reopens_at(self) -> float:
        """When another manifest may be written than those that cannot be followed."""
        unread = self._unread
        if not unread:
            return -math.inf
        if self.branches.has_majority_elsewhere(self.chain):
            return math.inf
        # Later ones cost no more time.
        first = unread[0]
        return first.place.modified_at + min(self.chain.missing_s, self.patience_s(first.manifest.member))

    def is_left(self, now: float) -> bool:
        """Return whether others went on without this peer, which cannot follow them."""
        if self.branches.has_majority_elsewhere(self.chain):
            return True
        return self.branches.listing.latest > self.chain.round and now >= self.chain.deadline

    def is_replaced(self, now: float) -> bool:
        """Return whether others follow another manifest of the last round than this peer."""
        last = self.last
        if last is None or len(self.branches.listing.manifests.get(last.before.folder, ())) < 2:
            return False
        # Colluders may soon build on a manifest that leaves others out. This peer has passed it over.
        others = self.branches.readings.passed_over.keys() - {last.place}
        built = [closed.place for closed in self.branches.built(last.before) if closed.place not in others]
        if built:
            return built[0] != last.place
        later = []
        for closed in self.branches.followable(last.before):
            if closed.place.modified_at > last.place.modified_at and closed.place not in others:
                later.append(closed)
        if last.place in self.branches.readings.faults:
            return bool(later)
        if later and self._is_alone(now):
            raise ObjectRejected(last.place, "most members went on from a later manifest")
        return False

    def late_s(self, closed: ClosedRound) -> dict[PeerId, float]:
        """Return how long this peer, after it contributed, waited for late members beyond the usual."""
        chain = self.chain
        usual_at = chain.late_at
        if self.own is not None:
            usual_at = max(usual_at, self.own.modified_at)
        came_at: dict[PeerId, float] = {}
        for place in self.open_places:
            came_at[place.member] = min(place.modified_at, came_at.get(place.member, math.inf))
        late_s = {}
        for member in chain.missing((), self.branches.gone(chain)):
            waited_s = min(came_at.get(member, math.inf), closed.place.modified_at) - usual_at
            if waited_s > 0 and (self.own is None or member != self.own.member):
                late_s[member] = waited_s
        return late_s

    def unread_s(self, closed: ClosedRound) -> dict[PeerId, float]:
        """Return how long a round waited for a manifest that cannot be followed, by its author."""
        unread = self._unread
        if not unread:
            return {}
        waited_s = closed.place.modified_at - unread[0].place.modified_at
        return {unread[0].manifest.member: min(waited_s, self.chain.missing_s)}

    @property
    def _unread(self) -> list[ClosedRound]:
        """The round's candidates that cannot be followed, the oldest first."""
        candidates = self.branches.candidates(self.chain)
        followable = self.branches.followable(self.chain)
        return [candidate for candidate in candidates if candidate not in followable]

    @property
    def _present(self) -> set[PeerId]:
        return {place.member for place in self.open_places}

    @property
    def _companions(self) -> int:
        offers = self.branches.readings.offers
        members = {place.member for place in self.open_places if place in offers}
        if self.own is not None:
            members.discard(self.own.member)
        return len(members)

    def _is_alone(self, now: float) -> bool:
        """Return whether this peer would close the round without most members of the last one."""
        gone = self.branches.gone(self.chain)
        return now >= self.due_at and not self.chain.is_quorum({*self._present, *gone})

    def _wait(self, now: float, due_at: float) -> Wait:
        pause_s = self._pause_s(now, due_at)
        if now < self.chain.late_at or due_at == math.inf:
            return Wait(pause_s)
        missing = self.chain.missing(self._present, self.branches.gone(self.chain))
        return Wait(pause_s, frozenset(missing), max(due_at - now, 0.0))

    def _pause_s(self, now: float, due_at: float) -> float:
        """Return the time to the next look: half of that to the round's likely end, or to its due time."""
        likely_s = abs(self.chain.closed_at + self.chain.pace_s - now) / 2
        return min(max(min(likely_s, due_at - now), LEAST_PAUSE_S), MOST_PAUSE_S)
