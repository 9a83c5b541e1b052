"""What a peer that waits for a round does next, as one look at the bucket shows it. Pure.

`RoundView.next_action` goes by these rules, in this order:

1. The peer reads its own contribution: another member may have overwritten it.
2. If the next round was built on another manifest of the last one, the peer *loads a state*, to catch up. So
   it does if it would build that round without most members, and they may follow another manifest.
3. If a manifest closes the round, the peer *follows* it.
4. If a later round has a manifest, the peer may have slept. It *seeks a state* that is later, and loads it.
5. If the run begins with more peers than contribute, the peer *waits* for them.
6. If the round is due, the peer *closes* it with a manifest of all contributions that can be read. But not if
   a manifest is there that others follow, or one that they may still follow as it is young.
7. Else it *waits*.

An action `Read` or `Reject` is a step: do it, and ask the same view again.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from colab_swarm.mailbox.branches import Branches, Step, Unsettled
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.rounds import (
    MOST_MEMBERS,
    ClosedRound,
    ManifestEntry,
    ReadContribution,
    RoundChain,
    entries_of,
)
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
    """Look for a state later than the chain, then ask again with the answer."""


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
    """One look at the bucket, of a peer whose next round is that of ``chain``. Times are the store's."""

    chain: RoundChain
    branches: Branches
    last: ClosedRound | None = None  # the round before; None where the chain is a state's
    own: StoredObject | None = None  # the peer's contribution that no manifest lists yet
    min_peers: int = 1  # contributors without whom this peer closes no round
    later_state: bool | None = None  # whether there is a state later than the chain; None: not sought yet

    def next_action(self, now: float, close_at: float = -math.inf) -> Decision | Step:
        """Return what to do; before ``close_at``, this peer writes no manifest."""
        try:
            return self._decide(now, close_at)
        except Unsettled as unsettled:
            return unsettled.step

    def _decide(self, now: float, close_at: float) -> Decision:
        if self.own is not None:
            self.branches.readings.require([self.own])
        if self.is_replaced(now):
            return LoadState()
        closed = self.branches.closed(self.chain)
        if closed is not None:
            return Follow(closed)
        if self.is_late and self.later_state is None:
            return SeekState()
        if self.is_late and self.later_state:
            return LoadState()
        if self.min_peers > 1 and len(self._present) < self.min_peers:
            return Wait(min(self._pause_s(now, math.inf), _BEGIN_PAUSE_S))
        due_at = max(self.due_at, self.reopens_at)
        if now < max(due_at, close_at):
            return self._wait(now, due_at)
        path = self.branches.listing.next_attempt(self.chain.folder)
        return Close(path, entries_of(self.contributions), again_at=now + self.chain.missing_s)

    @property
    def spoilt(self) -> bool:
        """Whether the own contribution does not count, as another member wrote to its place."""
        return self.own in self.branches.readings.faults

    @property
    def is_late(self) -> bool:
        """Whether a later round has a manifest, on whatever branch."""
        return self.branches.listing.latest > self.chain.round

    @property
    def open_places(self) -> list[StoredObject]:
        """The contributions that the round may list, as far as they are not known to be faulty."""
        faults = self.branches.readings.faults
        return [place for place in self._places if place not in faults][:MOST_MEMBERS]

    @property
    def contributions(self) -> list[ReadContribution]:
        """What the round may list, whole. Raises `Unsettled`."""
        places = self.open_places
        readings = self.branches.readings
        readings.require(places)
        return [readings.contributions[place] for place in places]

    @property
    def due_at(self) -> float:
        """When the round may close, by the members that contributed or said farewell. Raises `Unsettled`."""
        return self.chain.due_at(self._present, self.branches.gone(self.chain))

    @property
    def reopens_at(self) -> float:
        """When another manifest may be written; never if others follow one that is there. Raises `Unsettled`."""
        candidates = self.branches.candidates(self.chain)
        if not candidates:
            return -math.inf
        if self.branches.built(self.chain):
            return math.inf
        return candidates[-1].place.modified_at + self.chain.missing_s

    def is_replaced(self, now: float) -> bool:
        """Return whether others follow another manifest of the last round than this peer. Raises `Unsettled`."""
        last = self.last
        if last is None or len(self.branches.listing.manifests.get(last.before.folder, ())) < 2:
            return False
        built = self.branches.built(last.before)
        if built:
            return built[0].place != last.place
        if not self._is_alone(now):
            return False
        other = self.branches.closed(last.before)
        return other is not None and other.place != last.place

    @cached_property
    def _places(self) -> list[StoredObject]:
        rounds = {folder: round for round, folder in self.chain.folders.items()}
        places = []
        for place in self.branches.listing.contributions.values():
            round = rounds.get(place.folder)
            if round is not None and self.chain.may_count(place.member, round):
                places.append(place)
        return places

    @property
    def _present(self) -> set[PeerId]:
        return {place.member for place in self.open_places}

    def _is_alone(self, now: float) -> bool:
        """Return whether this peer would close the round without most members of the last one."""
        gone = self.branches.gone(self.chain)
        return now >= self.due_at and not self.chain.is_quorum(self._present | gone)

    def _wait(self, now: float, due_at: float) -> Wait:
        pause_s = self._pause_s(now, due_at)
        if now < self.chain.late_at or due_at == math.inf:
            return Wait(pause_s)
        missing = self.chain.missing(self._present, self.branches.gone(self.chain))
        return Wait(pause_s, frozenset(missing), max(due_at - now, 0.0))

    def _pause_s(self, now: float, due_at: float) -> float:
        """Return the time to the next look: half the time to the likely end of the round; less if it is due sooner."""
        likely_s = abs(self.chain.closed_at + self.chain.pace_s - now) / 2
        return min(max(min(likely_s, due_at - now), LEAST_PAUSE_S), MOST_PAUSE_S)
