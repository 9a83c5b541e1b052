"""The other members of a bucket's last round, and what they are believed to compute since. Pure."""

import math
import statistics

from colab_swarm.mailbox.rounds import ClosedRound, PseudoGradient
from colab_swarm.markup import plain
from colab_swarm.net.peers import PeerId, short
from colab_swarm.training.known import KnownRecords
from colab_swarm.training.records import PLAUSIBLE, ProgressRecord


class LastMembers:
    """What the other members of the last round said of themselves with their contributions.

    ``known`` has this peer's own record. `on_round` replaces all figures.
    """

    def __init__(self, known: KnownRecords) -> None:
        self._known = known
        self._heads: dict[PeerId, PseudoGradient] = {}

    def on_round(self, closed: ClosedRound) -> None:
        """Take the figures of a round that this peer follows."""
        self._heads = {}
        for contribution in closed.contributions.values():
            head = contribution.head
            if head.member != self._known.me:
                self._heads[head.member] = head

    def name_of(self, member: PeerId) -> str:
        """Return a member's name for people; its short id if none is known."""
        head = self._heads.get(member)
        if head is None or not head.name:
            return short(member)
        return plain(head.name)

    def speeds(self) -> dict[PeerId, float]:
        """Return the members' samples per second, as far as they are believed."""
        claims = {member: head.samples_per_s for member, head in self._heads.items()}
        most = PLAUSIBLE * statistics.median_low([self._known.own.samples_per_s, *claims.values()])
        return {member: min(claim, most) for member, claim in claims.items()}

    def samples(self) -> float:
        """Return all members' samples since the last round, if they compute as long as this peer."""
        own = self._known.own
        all_per_s = own.samples_per_s + sum(self.speeds().values())
        return own.samples * all_per_s / (own.samples_per_s or math.inf)

    def records(self) -> dict[PeerId, ProgressRecord]:
        """Return a record for each member, for people: none is heard of between two rounds."""
        own = self._known.own
        seconds = own.samples / (own.samples_per_s or math.inf)
        records = {}
        for member, speed in self.speeds().items():
            head = self._heads[member]
            records[member] = ProgressRecord(
                own.step,
                own.lineage,
                samples=seconds * speed,
                samples_per_s=speed,
                syncing=False,
                reduces=False,
                name=head.name,
                loss=head.loss,
                sketch=head.sketch,
            )
        return records
