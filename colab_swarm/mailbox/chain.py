"""The chain of a bucket's rounds, and when the next round may close. Pure.

A manifest closes each round. The manifest's digest is the *base* of the next round. Times are by the store's clock.
"""

import math
import statistics
from collections.abc import Collection
from typing import ClassVar

from colab_swarm.errors import require
from colab_swarm.mailbox.objects import (
    LEFT,
    MAX_PACE_S,
    MIN_PACE_S,
    Figure,
    Hash,
    Pace,
    Round,
    RoundManifest,
    Statement,
    folder_of,
)
from colab_swarm.net.peers import Message, PeerId

WINDOW = 2  # number of rounds after its own round in which a contribution may still be listed
# If most members are absent, a round waits for two usual rounds and a grace. The grace is a quarter of a usual round,
# within these limits, because a store needs a few seconds to answer even if the rounds are short.
LEAST_GRACE_S = 6.0
MOST_GRACE_S = 90.0
LEAST_PATIENCE_S = 2.5  # minimum additional time for a late minority


class RoundChain(Message, frozen=True):
    """A run's next ``round``, and the data of the last rounds."""

    round: Round
    digests: dict[int, Hash]  # by round r, the digest of the manifest before it, for the rounds of the window
    closed_at: Figure  # when the last manifest was written
    pace_s: Pace = MIN_PACE_S  # time of a usual round: the median time of the last round's contributors
    members: tuple[PeerId, ...] = ()  # members of the last round
    listed: tuple[tuple[PeerId, int], ...] = ()  # members and rounds of contributions that counted

    def __post_init__(self) -> None:
        require(self.round in self.digests, "a chain needs the digest of its last manifest")

    @property
    def base(self) -> bytes:
        return self.digests[self.round]

    @property
    def is_first(self) -> bool:
        """True if there is no round before this round. Then the base is the digest of a state."""
        return self.round - 1 not in self.digests

    @property
    def folders(self) -> dict[int, str]:
        """The folders of the rounds whose contributions may still count, by round."""
        return {round: folder_of(round, base) for round, base in self.digests.items()}

    @property
    def folder(self) -> str:
        return folder_of(self.round, self.base)

    @property
    def state_path(self) -> str:
        """Path of the state before this round. All first states have the same path, so the bucket keeps only one."""
        if self.is_first:
            return f"states/{self.round:08d}-first"
        return f"states/{self.round:08d}-{self.base[:8].hex()}"

    @property
    def farewells(self) -> dict[str, PeerId]:
        """Paths at which members of the last round may have said farewell since their last contribution."""
        last_rounds = dict(sorted(self.listed))
        members: dict[str, PeerId] = {}
        for round, folder in self.folders.items():
            for member in self.members:
                if round >= last_rounds.get(member, 0):
                    members[f"{folder}/{member.hex()}{LEFT}"] = member
        return members

    @property
    def grace_s(self) -> float:
        return min(max(self.pace_s / 4, LEAST_GRACE_S), MOST_GRACE_S)

    @property
    def late_at(self) -> float:
        """The time after which the round takes longer than usual."""
        return self.closed_at + self.pace_s + self.grace_s / 2

    @property
    def deadline(self) -> float:
        """The time from which the round may close even without the majority of the last round's members."""
        return self.closed_at + 2 * self.pace_s + self.grace_s

    def missing(self, present: Collection[PeerId], gone: Collection[PeerId] = ()) -> set[PeerId]:
        """Return the members of the last round for which this round waits."""
        return set(self.members).difference(present, gone)

    def due_at(
        self, present: Collection[PeerId], gone: Collection[PeerId], left_out: Collection[PeerId]
    ) -> float:
        """Return when the round may close with the members ``present``. If no member is missing, it may close now.

        The round waits longer than usual for a late minority, except for members that are ``left_out``. It does not
        close without any contribution.
        """
        if not present:
            return math.inf
        missing = self.missing(present, gone)
        if not missing:
            return self.closed_at
        if 2 * len(missing) >= len(self.members):
            return self.deadline
        if missing.issubset(left_out):
            return self.late_at
        return min(self.late_at + max(LEAST_PATIENCE_S, self.pace_s / 2), self.deadline)

    def may_count(self, member: PeerId, round: int) -> bool:
        return self.round - WINDOW <= round <= self.round and (member, round) not in self.listed

    def fault_of(self, manifest: RoundManifest) -> str:
        """Return the fault of a manifest, apart from its contributions, or an empty text."""
        members = [entry.member for entry in manifest.entries]
        if (manifest.round, manifest.base) != (self.round, self.base):
            return "it does not follow the manifest before"
        if members != sorted(set(members)):
            return "it lists a member twice"
        for entry in manifest.entries:
            if not self.may_count(entry.member, entry.round):
                return "it lists a contribution that counted before, or is too old"
        return ""

    def after(self, manifest: RoundManifest, digest: bytes, *, closed_at: float) -> "RoundChain":
        """Return the chain after this manifest. ``digest`` is the manifest's digest."""
        round = self.round + 1
        oldest = round - WINDOW
        digests = {number: base for number, base in self.digests.items() if number >= oldest}
        digests[round] = digest
        listed = [(member, number) for member, number in self.listed if number >= oldest]
        for entry in manifest.entries:
            if entry.round >= oldest:
                listed.append((entry.member, entry.round))
        pace_s = statistics.median_low(entry.seconds for entry in manifest.entries)
        return RoundChain(
            round,
            digests,
            closed_at,
            min(max(pace_s, MIN_PACE_S), MAX_PACE_S),
            tuple(entry.member for entry in manifest.entries),
            tuple(listed),
        )


class StateHead(Statement, frozen=True, kw_only=True):
    """``states/ROUND-BASE``: the head of a training state before that round. The state's bytes follow it."""

    chain: RoundChain
    manifest: bytes  # the manifest of the state's chunks
    most_bytes: ClassVar[int] = 1 << 24

    @property
    def path_part(self) -> str:
        return self.chain.state_path
