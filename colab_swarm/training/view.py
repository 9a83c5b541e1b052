"""This peer's view of the other peers by their records, groups and links, and the swarm's branch. Pure.

- A *lineage* is a chain of digests: of the first parameters, and of every mean since then in its encoded form. Equal
  lineages mean equal parameters, except for rounding (see `comparison`).
- The *branch* is a step and a lineage. The step is the highest step that at least half of the live trainers have
  reached. The lineage is the most common lineage of these trainers at this step. If two lineages are equally common,
  the lineage of the run's authority counts, else the lineage of the peer with the smallest id. A peer that is not on
  the branch loads the state of the branch.
- A record may be half a minute old. So after a step, the contributors' new state replaces the state in their older
  records. A peer whose link broke does not count until it writes a newer record.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from colab_swarm.averaging.forming import branch_of
from colab_swarm.dht.service import DHT, Found
from colab_swarm.net.node import Node
from colab_swarm.net.patience import LeftOut
from colab_swarm.net.peers import Contact, PeerId, Role
from colab_swarm.runtime import loop_now
from colab_swarm.training.pace import SwarmPace
from colab_swarm.training.records import (
    AssistantRecord,
    ProgressRecord,
    Rates,
    differing,
    read_participants,
)

WATCHING = ProgressRecord(0, b"", 0.0, 0.0, syncing=True, name="")
"""The record that stands for this peer while it does not train."""
_KEPT_STEPS = 4096  # number of this peer's last steps whose lineages are remembered
_DISTRUST_S = 300.0  # how long a donor is not asked after the first time that it gave a bad state
_MAX_DISTRUST_S = 6 * 3600.0
_MOST_ASSISTANTS = 16
_URGENT = ("syncing", "paused", "organizer")  # if one changes, the record is published immediately
_JUST_BROKEN_S = 2.0  # records that are up to this much newer than the break of the link do not count


@dataclass(frozen=True)
class Branch:
    """The swarm's step and lineage.

    ``holders`` are the peers that have shown this state. ``peers`` are the holders, and the other trainers at the
    holders' organizers.
    """

    step: int
    lineage: bytes
    peers: frozenset[PeerId]
    holders: frozenset[PeerId]


class SwarmView:
    """The records of this peer, of the other trainers and of assistants.

    ``round_samples`` is the number of samples of all peers together from one round to the next.

    Attributes:
        own: this peer's record; the trainer replaces it.
        others: the records of the other trainers that count.
        assistants: the records of the assistants that are believed to be alive.
        found: the roles of all peers that have a record.
        news: an event that is set when new records were read.
        urgent: an event that is set when ``own`` should be published immediately.
        averaged: True once this peer has taken a step together with another peer.
        unreachable: number of other trainers that do not count, because neither they nor this peer can be dialled.
    """

    def __init__(
        self, me: PeerId, own: ProgressRecord, prefix: str = "", *, round_samples: float = 0.0
    ) -> None:
        self.me = me
        self.own = own
        self.prefix = prefix
        self.round_samples = round_samples
        self.others: dict[PeerId, ProgressRecord] = {}
        self.assistants: dict[PeerId, AssistantRecord] = {}
        self.found: Mapping[PeerId, Found] = {}
        self.news = asyncio.Event()
        self.urgent = asyncio.Event()
        self.averaged = False
        self.unreachable = 0
        self.pace = SwarmPace()
        self._path = {own.step: own.lineage}  # this peer's lineage at each step
        self._lost: dict[PeerId, float] = {}  # the swarm time of the last record of a peer whose link broke
        self._distrusted = LeftOut[PeerId](_DISTRUST_S, _MAX_DISTRUST_S)

    # What happens.

    async def refresh(self, dht: DHT, peers: Node) -> None:
        """Read all records; raises `PeerError` if they cannot be read now."""
        records, assistants, self.found = await read_participants(dht, self.prefix)
        self.on_records(records, now=loop_now())
        self.on_assistants(assistants)
        self.leave_out_unreachable(peers)

    def on_records(self, records: Mapping[PeerId, ProgressRecord], *, now: float) -> None:
        """Take the records that were just read; where the known record of a peer is newer, keep the known record."""
        fresh = {}
        for peer, record in records.items():
            if peer == self.me or record.told_at <= self._lost.get(peer, -math.inf):
                continue
            self._lost.pop(peer, None)
            known = self.others.get(peer)
            if known is not None and known.told_at > record.told_at:
                record = known
            fresh[peer] = record
        self.others = fresh
        self.news.set()

    def on_assistants(self, assistants: Mapping[PeerId, AssistantRecord]) -> None:
        """Take the records of the run's assistants; ignore assistants that only help another collaboration."""
        alive = {}
        for peer, record in sorted(assistants.items()):
            helps_here = record.addresses and record.collaboration in ("", self.prefix)
            if helps_here and record.told_at > self._lost.get(peer, -math.inf):
                alive[peer] = record
        self.assistants = dict(list(alive.items())[:_MOST_ASSISTANTS])

    def leave_out_unreachable(self, peers: Node) -> None:
        """If no trainer can be dialled, and there is no assistant, keep only the records of linked peers."""
        addresses = [peers.contact.addresses, *(record.addresses for record in self.others.values())]
        self.unreachable = 0
        if self.assistants or any(addresses):
            return
        linked = peers.linked()
        met = {peer: record for peer, record in self.others.items() if peer in linked}
        self.unreachable = len(self.others) - len(met)
        self.others = met

    def on_step(self, samples: Mapping[PeerId, float], *, now: float, swarm_now: float) -> None:
        """Note that this peer and the contributors took a step; ``samples`` has each contributor's samples."""
        self.pace.on_round(samples, now=now)
        for peer in samples:
            record = self.others.get(peer)
            if record is not None:
                self.averaged = True
                self.others[peer] = msgspec.structs.replace(
                    record, step=self.own.step, lineage=self.own.lineage, syncing=False, told_at=swarm_now
                )

    def on_lost(self, peer: PeerId, *, swarm_now: float) -> bool:
        """Ignore a peer until it writes a newer record; return True if it was a trainer."""
        trainer = self.others.pop(peer, None)
        assistant = self.assistants.pop(peer, None)
        if trainer is not None or assistant is not None:
            self._lost[peer] = swarm_now + _JUST_BROKEN_S
        return trainer is not None

    def update(self, **changes: object) -> None:
        """Change fields of this peer's record."""
        before = self.own
        self.own = msgspec.structs.replace(before, **changes)
        if any(getattr(self.own, name) != getattr(before, name) for name in _URGENT):
            self.urgent.set()

    def advance(self, lineage: bytes, rates: Rates = ()) -> None:
        """Move this peer one step further, after it applied a mean."""
        step = self.own.step + 1
        self.own = msgspec.structs.replace(self.own, step=step, lineage=lineage, rates=rates)
        self._path[step] = lineage
        if len(self._path) > _KEPT_STEPS:
            del self._path[min(self._path)]

    def leap(self, step: int, lineage: bytes, *, syncing: bool) -> None:
        """Move this peer to a state that it has loaded or, with ``syncing``, that it still needs."""
        self.pace.begin_again()
        self.own = msgspec.structs.replace(self.own, step=step, lineage=lineage, syncing=syncing, rates=())
        self._path = {step: lineage}
        self.urgent.set()

    def distrust(self, peers: Iterable[PeerId], *, now: float) -> None:
        """Ask these peers for no state for some time, which doubles each time."""
        for peer in peers:
            self._distrusted.fail(peer, now)

    def distrusts(self, peer: PeerId, now: float) -> bool:
        return self._distrusted.holds(peer, now)

    # What it comes to.

    @property
    def all(self) -> Mapping[PeerId, ProgressRecord]:
        return {self.me: self.own, **self.others}

    def _authorized(self, peer: PeerId) -> bool:
        return peer in self.found and self.found[peer].role >= Role.AUTHORITY

    def branch(self) -> Branch:
        """Return the branch of the live trainers, or this peer's own state if no peer has a state."""
        own = self.own
        states = {}
        records = list(self.all.items())
        for peer, record in records:
            if not record.syncing and not record.paused:
                states[peer] = record.step, record.lineage
        if not states:
            states = {peer: (record.step, record.lineage) for peer, record in records if not record.syncing}
        if not states:
            return Branch(own.step, own.lineage, frozenset(), frozenset())
        step = branch_of(states, self._authorized)[0]
        reached = {}
        for peer, (there, lineage) in states.items():
            if there == step:
                reached[peer] = step, lineage
            elif there > step and self._path.get(there) == lineage and step in self._path:
                reached[peer] = step, self._path[step]
        lineage = branch_of(reached, self._authorized)[1]
        holders = frozenset(peer for peer, state in reached.items() if state[1] == lineage)
        organizers = {self.all[peer].organizer for peer in holders} - {b""}
        members = holders.union(
            peer for peer, record in records if not record.syncing and record.organizer in organizers
        )
        return Branch(step, lineage, members, holders)

    @property
    def behind(self) -> bool:
        """True if this peer's lineage differs from the branch's, or if this peer is two or more steps behind.

        A peer that is one step ahead of the others only waits. A peer that is one step behind may still be in their
        round.
        """
        branch = self.branch()
        if self.own.step < branch.step - 1:
            return True
        return branch.step in self._path and self._path[branch.step] != branch.lineage

    def organizers(self, own: Contact) -> list[Contact]:
        """Return the peers that may organize, the best first; this peer is one of them.

        First come the organizers that the other peers of the branch have, the most common first. Then come the trainers
        that can be dialled, by the time of joining, on the branch first, and then the assistants.
        """
        branch = self.branch().peers
        named = Counter(self.all[peer].organizer for peer in branch - {self.me})
        named.pop(PeerId(b""), None)
        contacts = {peer: Contact(peer, record.addresses) for peer, record in self.others.items()}
        contacts |= {peer: Contact(peer, record.addresses) for peer, record in self.assistants.items()}
        contacts[self.me] = own
        trainers = sorted(self.all, key=lambda peer: (peer not in branch, self.all[peer].joined_at, peer))
        order = [peer for peer, _ in named.most_common()]
        order += [peer for peer in trainers if contacts[peer].addresses]
        order += sorted(self.assistants)
        order += [self.me]
        return [contacts[peer] for peer in dict.fromkeys(order) if peer in contacts]

    @property
    def other_organizers(self) -> set[PeerId]:
        """The organizers at which the other trainers stand, except this peer."""
        return {record.organizer for record in self.others.values() if record.organizer} - {self.me}

    def disagreement(self) -> str:
        """Return a text on the settings in which this peer differs from most peers on the branch; empty if none.

        The text is always empty once this peer has averaged with others: from then on, no record can refuse this peer.
        """
        own = self.own
        if self.averaged or not own.agreement:
            return ""
        branch = sorted(self.branch().peers)
        votes = Counter[object]()
        for peer in branch:
            if self.all[peer].agreement:
                votes[self.all[peer].agreement] += len(branch) if self._authorized(peer) else 1
        if not votes:
            return ""
        agreement = max(votes, key=lambda choice: votes[choice])
        return differing(agreement, own.agreement)  # type: ignore[arg-type]

    @property
    def min_peers(self) -> int:
        """Number of peers that must train before the first step.

        A peer that names no number takes the number of the run's authority. Without an authority's record, it takes the
        number of the first peer that joined. The result is the lowest number of all peers.
        """
        records = self.all.values()
        authorities = [self.all[peer] for peer in self.all if self._authorized(peer)]
        first = min(authorities or records, key=lambda record: record.joined_at)
        return min(record.min_peers or first.min_peers or 1 for record in records)

    @property
    def training(self) -> list[str]:
        """The names of the peers that train now, this peer included."""
        return [self.own.name, *sorted(record.name for record in self.others.values() if record.computes)]

    @property
    def there(self) -> dict[PeerId, ProgressRecord]:
        """The records of the peers that train now, with this peer's if it trains. Thread-safe."""
        return {peer: record for peer, record in list(self.all.items()) if record.computes}

    def live(self, linked: Collection[PeerId]) -> set[PeerId]:
        """Return the other trainers that compute now and whose link is up."""
        return {peer for peer, record in self.others.items() if record.computes and peer in linked}

    # For people.

    def samples_per_s(self) -> float:
        """Return the sum of the peers' speeds of computing, which exclude the time of waiting and of rounds."""
        return sum(record.samples_per_s for record in self.there.values())

    def samples(self, now: float) -> float:
        """Return about how many samples all peers together have computed since the last round."""
        return min(self.pace.since_round_s(now) * self.samples_per_s(), self.round_samples)

    def seconds_to_batch(self, now: float) -> float:
        """Return about how many seconds remain until the batch is full; infinite while no speed is known."""
        speed = self.samples_per_s()
        return max(0.0, self.round_samples - self.samples(now)) / speed if speed else math.inf
