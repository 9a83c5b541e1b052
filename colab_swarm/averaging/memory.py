"""What a peer keeps from one search for a group to the next, and what it asks its owner. No I/O.

A peer looks for the group of a step (`search`) and forms groups for others (`organizer`). Both read and write
one `RoundMemory`, and both ask one `SwarmView`.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from colab_swarm.averaging.group import Group, RoundTerms
from colab_swarm.averaging.standing import Standing
from colab_swarm.net.patience import LeftOut
from colab_swarm.net.peers import Contact, PeerId, remember

# Groups, and rounds with their callers, that a peer remembers.
KEPT_ROUNDS = 4
# How long a group counts for those that ask again: a run may come back to its step later.
REMEMBERED_S = 180.0
# An answer to a call, and a candidate after its promise, may take this long at least, and before any was seen.
_LEAST_USUAL_S = 0.1
_FIRST_USUAL_S = 2.0


class Contacts(Protocol):
    """Where each peer can be dialled, as far as this peer knows; `net.peers.Peers` has it."""

    @property
    def id(self) -> PeerId: ...

    @property
    def contact(self) -> Contact: ...

    def contact_of(self, peer: PeerId) -> Contact: ...


class SwarmView(Protocol):
    """What the owner of a matchmaker knows about its swarm.

    An owner may inherit the answers that say nothing: any peer may take any time, all groups stand.
    """

    async def expected(self, step: int, lineage: bytes) -> Sequence[PeerId]:
        """Return the peers that should take part in a round, with or without this one."""
        ...

    def on_called(self, terms: RoundTerms, caller: PeerId) -> float | None:
        """Return the seconds until this peer can join a caller's round, or None if it will not come."""
        ...

    def believed_s(self, peer: PeerId) -> float:
        """Return how long ``peer`` may take until it can join a round."""
        return math.inf

    def stands(self, step: int, lineage: bytes) -> bool:
        """Return whether the swarm still follows the group that this peer had."""
        return True

    def terms(self, step: int, lineage: bytes) -> RoundTerms | None:
        """Return this peer's own terms of a round; None: those of its first caller count."""
        return None


class UsualTime:
    """The time to wait for a usual event: ``first_s``, or ``most_s``, until a time is learned."""

    def __init__(self, least_s: float, most_s: float, first_s: float | None = None) -> None:
        self._least_s = least_s
        self._most_s = most_s
        self._times_s: deque[float] = deque(maxlen=32)
        self.seconds = most_s if first_s is None else first_s

    def learn(self, seconds: float) -> None:
        self._times_s.append(seconds)
        median_s = statistics.median(self._times_s)
        deviation_s = statistics.median(abs(time_s - median_s) for time_s in self._times_s)
        patience_s = median_s + 5 * max(deviation_s, median_s / 5)
        self.seconds = min(max(self._least_s, patience_s), self._most_s)


class RoundMemory:
    """What one peer has learned in its rounds; ``now`` is monotonic seconds.

    Attributes:
        standing: what others' delays have cost this peer. Searches charge organizers, the organizer
            charges candidates, and the owner lets peers earn after each round.
        dishonest: organizers of invalid groups. Searches add them; other collaborations share it.
        answers: how long linked peers usually take to answer a call. The organizer teaches it
            when it closes a formation.
        lateness: how long peers usually come after their promise. Taught as ``answers``.
        forming: how long it usually takes from a question to the group, whoever organizes; infinite before the first.
            Searches teach it.
    """

    def __init__(
        self, standing: Standing, dishonest: LeftOut[PeerId], *, call_timeout_s: float, slack_s: float
    ) -> None:
        self.standing = standing
        self.dishonest = dishonest
        self.answers = UsualTime(_LEAST_USUAL_S, call_timeout_s, _FIRST_USUAL_S)
        self.lateness = UsualTime(_LEAST_USUAL_S, slack_s, _FIRST_USUAL_S)
        self.forming = UsualTime(_LEAST_USUAL_S, math.inf)
        # The last groups with this peer, by step and lineage, and since when. `keep` adds one that this peer
        # found or formed. `forget` drops one that brought no mean, or that a search refused.
        self._groups: dict[tuple[int, bytes], tuple[Group, float]] = {}

    def keep(self, group: Group, now: float) -> None:
        remember(self._groups, group.terms.key, (group, now), KEPT_ROUNDS)

    def forget(self, step: int, lineage: bytes) -> None:
        self._groups.pop((step, lineage), None)

    def group_of(self, step: int, lineage: bytes, now: float) -> Group | None:
        """Return the group of a step if this peer was in it a short time ago."""
        entry = self._groups.get((step, lineage))
        if entry is None:
            return None
        group, since = entry
        return group if now - since < REMEMBERED_S else None

    def members_of(self, step: int) -> set[PeerId]:
        """Return the members of all remembered groups of a step."""
        groups = [group for group, _ in self._groups.values() if group.terms.step == step]
        return {member.id for group in groups for member in group.members}
