"""What this peer knows of the others: their latest records, corrected by rounds and by lost links. Pure.

A record is a moment old. So a round's result outweighs the older record of a peer that was in it,
for a few reads, and a peer whose link broke is ignored until it publishes a newer record.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping

import msgspec

from colab_swarm.dht.service import Found
from colab_swarm.net.peers import PeerId, Role
from colab_swarm.training.records import AssistantRecord, ProgressRecord, Rates

LAST_RECORD_S = 10.0  # newer records within 10 s of a lost link predate it
_READS_OF_GRACE = 5  # reads for which a round's result outweighs a peer's own, older record
_MOST_ASSISTANTS = 16


class KnownRecords:
    """The records of this peer, of the other trainers and of assistants.

    ``own`` is replaced by the trainer; ``others`` at each reading, by rounds and by lost links. Two events are
    signals to tasks on the event loop: ``news`` to the trainer, that a round may be due; ``urgent`` to the one that
    publishes ``own``, that the others should hear of it at once.
    """

    def __init__(self, me: PeerId, own: ProgressRecord) -> None:
        self.me = me
        self.own = own
        self.others: dict[PeerId, ProgressRecord] = {}  # those that count
        self.assistants: dict[PeerId, AssistantRecord] = {}  # believed alive
        self.news = asyncio.Event()
        self.urgent = asyncio.Event()
        self.found: Mapping[PeerId, Found] = {}  # roles and vouchers, as last read
        # A peer's step, and a time when it was not there yet.
        self.step_at: dict[PeerId, tuple[int, float]] = {}
        self.updated_at: dict[PeerId, float] = {}
        self.before: bytes | None = None  # the own lineage a step ago, if this peer made that step
        self._read: Mapping[PeerId, ProgressRecord] = {}  # the records as last read
        self._read_at = -math.inf
        # The record by a round's result, and the reads for which it still counts.
        self._learnt: dict[PeerId, tuple[ProgressRecord, int]] = {}
        # Of a peer whose link broke: its last record, and when.
        self._lost: dict[PeerId, tuple[ProgressRecord | None, float]] = {}
        self._lost_assistants: dict[PeerId, float] = {}  # time of the last record

    @property
    def all(self) -> Mapping[PeerId, ProgressRecord]:
        return {self.me: self.own, **self.others}

    @property
    def donors_remain(self) -> bool:
        """True if some other peer has a state, by a live record, even if it is silent or lost now."""
        return any(not record.syncing for peer, record in self._read.items() if peer != self.me)

    @property
    def shared(self) -> bool:
        """True if some other peer is where this one is: they can train on together."""
        here = (self.own.step, self.own.lineage)
        return any((record.step, record.lineage) == here for record in self.others.values())

    def on_records(
        self, records: Mapping[PeerId, ProgressRecord], *, linked: Container[PeerId] = (), now: float
    ) -> None:
        """Take the live records just read.

        A lost peer counts again if, after `LAST_RECORD_S`, it has a new record, or is ``linked`` and absent.
        """
        for peer in self.step_at.keys() - records.keys():
            del self.step_at[peer]
        self._lost = {
            peer: (records.get(peer), since)
            for peer, (last, since) in self._lost.items()
            if now - since < LAST_RECORD_S or _is_old(records.get(peer), last, linked=peer in linked)
        }
        fresh: dict[PeerId, ProgressRecord] = {}
        for peer, record in records.items():
            if peer != self.me and peer not in self._lost:
                fresh[peer] = record
        self._learnt = {
            peer: (learnt, reads_left - 1)
            for peer, (learnt, reads_left) in self._learnt.items()
            if peer in fresh and fresh[peer].step < learnt.step and reads_left
        }
        for peer, (learnt, _) in self._learnt.items():
            fresh[peer] = learnt
        for peer, record in fresh.items():
            if record != self.others.get(peer):
                self.updated_at[peer] = now
            known_step, _ = self.step_at.get(peer, (None, now))
            if known_step != record.step:
                self.step_at[peer] = (record.step, self._read_at)
        self._read = records
        self._read_at = now
        self.others = fresh

    def on_assistants(self, assistants: Mapping[PeerId, AssistantRecord], prefix: str) -> None:
        """Take the live records of the run's assistants; those of another collaboration do not count.

        Where there are too many, vouchers take turns: one invitation admits any number.
        """
        alive: list[tuple[int, PeerId, AssistantRecord]] = []
        turns = Counter[bytes]()
        for peer, record in sorted(assistants.items()):
            helps_here = record.addresses and record.collaboration in ("", prefix)
            if helps_here and record.told_at > self._lost_assistants.get(peer, -math.inf):
                voucher = self.found[peer].voucher if peer in self.found else peer
                alive.append((turns[voucher], peer, record))
                turns[voucher] += 1
        self.assistants = {peer: record for _, peer, record in sorted(alive)[:_MOST_ASSISTANTS]}
        for peer in self._lost_assistants.keys() - assistants.keys():
            del self._lost_assistants[peer]

    def on_round(self, members: Iterable[PeerId], step: int, lineage: bytes, *, now: float) -> None:
        """Move the ``members`` of a round, which have applied its mean, to its step and lineage."""
        for peer in members:
            record = self.others.get(peer)
            if record is not None and not record.syncing and record.step < step:
                learnt = msgspec.structs.replace(record, step=step, lineage=lineage, samples=0.0, rates=())
                self.others[peer] = learnt
                self.updated_at[peer] = now
                self.step_at[peer] = (step, now)
                self._learnt[peer] = (learnt, _READS_OF_GRACE)

    def on_lost(self, peer: PeerId, *, now: float) -> bool:
        """Ignore a peer until it is linked again or publishes a new record; return whether it trained."""
        self._learnt.pop(peer, None)
        trainer = self.others.pop(peer, None)
        assistant = self.assistants.pop(peer, None)
        if assistant is not None:
            self._lost_assistants[peer] = assistant.told_at
        if trainer is not None or assistant is not None:
            self._lost[peer] = self._read.get(peer), now
        return trainer is not None

    def update(self, **changes: object) -> None:
        """Change fields of the own record."""
        before = self.own
        self.own = msgspec.structs.replace(before, **changes)
        if changes.keys() & {"syncing", "paused", "idle"} and self.own != before:
            self.urgent.set()

    def advance(self, lineage: bytes, *, samples: float = 0.0, rates: Rates = ()) -> None:
        """Move this peer one step further, after it applied a mean; ``samples`` count for the next step."""
        self.before = self.own.lineage
        step = self.own.step + 1
        self.own = msgspec.structs.replace(self.own, step=step, lineage=lineage, samples=samples, rates=rates)

    def leap(self, step: int, lineage: bytes, *, syncing: bool) -> None:
        """Move this peer to a state that it has loaded or, ``syncing``, still needs."""
        self.before = None
        self.own = msgspec.structs.replace(
            self.own, step=step, lineage=lineage, samples=0.0, syncing=syncing, rates=()
        )

    @property
    def min_peers(self) -> int:
        """How many peers must train before the first step: as this peer asks for, or the run's authority.

        Where that one does not train, the first to join by its own account decides.
        """
        authors = [peer for peer, author in self.found.items() if author.role >= Role.AUTHORITY]
        records = [self.all[peer] for peer in authors if peer in self.all] or self.all.values()
        first = min(records, key=lambda record: record.joined_at)
        return self.own.min_peers or first.min_peers or 1

    @property
    def training(self) -> list[str]:
        """The names of the peers that train now, this one included."""
        return [self.own.name, *sorted(record.name for record in self.others.values() if record.computes)]

    @property
    def there(self) -> dict[PeerId, ProgressRecord]:
        """The records of the peers that train with this one now, its own included. Thread-safe."""
        own_step = self.own.step
        return {peer: record for peer, record in list(self.all.items()) if record.there(own_step)}

    def participants(self, step: int, lineage: bytes) -> set[PeerId]:
        """Return the peers at a step and lineage, and those that catch up; none that are absent."""
        members = set[PeerId]()
        for peer, record in self.all.items():
            here = (record.step, record.lineage) == (step, lineage)
            if not record.absent and (record.syncing or here):
                members.add(peer)
        return members

    def waiting(self, step: int, lineage: bytes) -> set[PeerId]:
        """Return the other trainers at a step and lineage that compute."""
        computing = ((peer, record) for peer, record in self.others.items() if record.computes)
        return {peer for peer, record in computing if (record.step, record.lineage) == (step, lineage)}


def _is_old(record: ProgressRecord | None, last: ProgressRecord | None, *, linked: bool) -> bool:
    """Return True if a lost peer's record is still its last one; a ``linked``, absent peer publishes no other."""
    return last is not None and record == last and not (last.absent and linked)
