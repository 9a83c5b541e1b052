"""How far the swarm is: who trains on which branch, how many samples are in, when the batch is full.

A pure core over the peers' progress records. The rules that keep a swarm together:

- Two peers hold equal parameters exactly when their *lineages* are equal: the lineage is a digest chained over the
  initial parameters and every averaged gradient applied since.
- The *branch* of the swarm is the highest step that at least half of the training peers have reached, and on that
  step the lineage held by most of them (ties: that of the smallest peer id; digests depend on how a processor rounds,
  and a simulation goes the same way on all). A peer that is not on the branch catches up by downloading the state; so
  one liar, one clock or one lucky minority never moves the swarm. Peers that cannot be dialled have no vote while
  others can: among themselves they could neither form a round nor give their state. Peers that could not give the
  state of the step that they claim have no vote for `DISTRUST_S`. Peers that are paused have none either: they stay
  where they are, which must not hold the others back.
- The batch is full when the samples of the peers on the branch reach the target (DeDLOC, section 3.1: accumulation
  at one's own pace, one step per target batch). News of others is a moment old, so their count is carried on at
  their speed, for a moment only: a peer that sleeps or is gone must not fill the batch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from colab_swarm.averaging.group import MAX_STEP
from colab_swarm.dht.service import DHT, is_sound
from colab_swarm.net.peers import Contact, M, Message, PeerId, Peers

LINEAGE_BYTES = 16

MAX_LOCAL_STEPS = 64

CARRY_ON_S = 3.0

"""For how long a peer's count is carried on after its last news."""

DISTRUST_S = 300.0

LAST_WORDS_S = 10.0

"""A record that comes up so soon after its writer's link broke was written before."""

READS_OF_GRACE = 5

"""Reads of the records for which news from a round outweighs a peer's own, older record."""


class ProgressRecord(Message, frozen=True):
    """What a peer tells the swarm, signed, under its own subkey.

    Attributes:
        step: updates applied to its parameters.
        lineage: digest of its parameters' history.
        samples: accumulated for the next step.
        samples_per_s: its own speed.
        syncing: it has no state yet; it takes part with weight 0 and reduces nothing.
        reduces: others can reach it, and it takes a share of the averaging.
        name: for people.
        addresses: where it can be dialled.
        loss: mean loss of the samples, if told.
        local_steps: that it wants to take between two rounds, at least.
        paused: it computes nothing for now; no round waits for it, but it gives its state.
        upload_bps, download_bps: bits per second that its line was seen to carry, for people; None before that.
    """

    step: int
    lineage: bytes
    samples: float
    samples_per_s: float
    syncing: bool
    reduces: bool
    name: str
    addresses: tuple[str, ...] = ()
    loss: float | None = None
    local_steps: int = 1
    upload_bps: float | None = None
    download_bps: float | None = None
    paused: bool = False

    def __post_init__(self) -> None:
        numbers = (self.samples, self.samples_per_s, self.upload_bps or 0.0, self.download_bps or 0.0)
        if (
            not 0 <= self.step < MAX_STEP
            or any(not 0 <= number < 1e12 for number in numbers)
            or len(self.lineage) > LINEAGE_BYTES
            or not 1 <= self.local_steps <= MAX_LOCAL_STEPS
        ):
            raise ValueError("progress record out of range")


@dataclass(frozen=True)
class Branch:
    """Where the swarm is; ``peers`` train there now."""

    step: int
    lineage: bytes
    peers: frozenset[PeerId]


class Progress:
    """The swarm's progress as this peer knows it."""

    def __init__(
        self, me: PeerId, own: ProgressRecord, *, target_batch_size: float, local: bool = False
    ) -> None:
        """``local``: peers take steps of their own between two rounds."""
        self.me, self._local = me, local
        self.own = own
        self._before: bytes | None = None  # the own lineage a step ago, if this peer made that step
        self.target_batch_size = target_batch_size
        self._told: Mapping[PeerId, ProgressRecord] = {}  # the records read last
        self._others: dict[PeerId, ProgressRecord] = {}  # those that count, with what rounds taught since
        self._learnt: dict[PeerId, tuple[ProgressRecord, int]] = {}
        self._news_at: dict[PeerId, float] = {}
        self._distrusted: dict[PeerId, float] = {}  # until when
        self._lost: dict[
            PeerId, tuple[ProgressRecord | None, float]
        ] = {}  # what they told last, and when it broke

    @property
    def records(self) -> Mapping[PeerId, ProgressRecord]:
        """All live records, the own one included."""
        return {self.me: self.own, **self._others}

    def advance(self, lineage: bytes, *, samples: float = 0.0) -> None:
        """This peer applied a mean: it is one step further, and has so many samples for the next."""
        self._before = self.own.lineage
        self.own = msgspec.structs.replace(self.own, step=self.own.step + 1, lineage=lineage, samples=samples)

    def leap(self, step: int, lineage: bytes, *, syncing: bool) -> None:
        """This peer goes on from another's state, or from a saved one."""
        self._before = None
        self.own = msgspec.structs.replace(self.own, step=step, lineage=lineage, samples=0.0, syncing=syncing)

    def on_records(
        self, records: Mapping[PeerId, ProgressRecord], *, linked: Container[PeerId] = (), now: float
    ) -> None:
        """Take the live records just read.

        What a round taught us outlives a few reads of an older record. Who was lost counts again when it is
        ``linked`` or, after `LAST_WORDS_S`, tells something new: its last record may live for a minute.
        """
        self._distrusted = {peer: until for peer, until in self._distrusted.items() if until > now}
        lost: dict[PeerId, tuple[ProgressRecord | None, float]] = {}
        for peer, (last, since) in self._lost.items():
            told = records.get(peer)
            old_news = told is not None and told == last
            if peer not in linked and (old_news or now - since < LAST_WORDS_S):
                lost[peer] = told, since
        fresh = {peer: r for peer, r in records.items() if peer != self.me and peer not in lost}
        self._lost, self._told = lost, records
        for peer, (learnt, reads_left) in list(self._learnt.items()):
            if peer not in fresh or fresh[peer].step >= learnt.step or reads_left == 0:
                del self._learnt[peer]
            else:
                self._learnt[peer] = (learnt, reads_left - 1)
                fresh[peer] = learnt
        for peer, record in fresh.items():
            if record != self._others.get(peer):
                self._news_at[peer] = now
        self._others = fresh

    def on_round(self, members: Iterable[PeerId], step: int, lineage: bytes, *, now: float) -> None:
        """A round of ``members`` ended and took them to ``step``: no need to wait for their records."""
        for peer in members:
            known = self._others.get(peer)
            if known is not None and not known.syncing and known.step < step:
                learnt = msgspec.structs.replace(known, step=step, lineage=lineage, samples=0.0)
                self._others[peer] = learnt
                self._learnt[peer] = (learnt, READS_OF_GRACE)
                self._news_at[peer] = now

    def on_lost(self, peer: PeerId, *, now: float) -> None:
        """The link of the peer broke: it does not count until it is linked again or tells something new."""
        self._learnt.pop(peer, None)
        self._others.pop(peer, None)
        self._lost[peer] = self._told.get(peer), now

    def distrust(self, peers: Iterable[PeerId], *, now: float) -> None:
        """These could not give the state of the step that they claim: they have no vote for a while."""
        self._distrusted |= dict.fromkeys(peers, now + DISTRUST_S)

    def trust_all(self) -> None:
        """Give everybody the vote back."""
        self._distrusted.clear()

    def branch(self) -> Branch:
        """The swarm's branch; the own one while nobody else trains."""
        trusted = {peer: r for peer, r in self.records.items() if peer not in self._distrusted}
        return branch_of(trusted) or Branch(self.own.step, self.own.lineage, frozenset())

    @property
    def behind(self) -> bool:
        """This peer is not on the branch, nor one step ahead of it because it ended a round first.

        Whoever is further ahead made steps without the branch: nobody would follow.
        """
        branch = self.branch()
        if self.own.step == branch.step:
            return self.own.lineage != branch.lineage
        ahead = self.own.step == branch.step + 1 and self._before in (branch.lineage, None)
        return not ahead

    def stands(self, step: int, lineage: bytes) -> bool:
        """Whether the swarm follows the group that this peer had at a step, or may yet.

        It does not if this peer took that step and the branch is there yet: the group was this peer, or a few.
        """
        branch = self.branch()
        return self.own.step <= step or (branch.step, branch.lineage) != (step, lineage)

    def samples(self, now: float) -> float:
        """Samples accumulated by all peers on the own branch for the next step."""
        mine = self.own.samples if not self.own.syncing else 0.0
        others = list(self._others.items())  # panels ask from another thread, while somebody leaves
        return mine + sum(self._carried_on(p, r, now) for p, r in others if self._on_own_branch(r))

    def _carried_on(self, peer: PeerId, record: ProgressRecord, now: float) -> float:
        age_s = min(max(now - self._news_at.get(peer, now), 0.0), CARRY_ON_S)
        return record.samples + age_s * record.samples_per_s

    def samples_per_s(self) -> float:
        """Speed of all training peers together."""
        return sum(r.samples_per_s for r in self.records.values() if not (r.syncing or r.paused))

    def seconds_to_batch(self, now: float) -> float:
        """Estimate of when the batch is full; infinite while no speed is known."""
        missing = max(0.0, self.round_samples - self.samples(now))
        speed = self.samples_per_s()
        return 0.0 if missing == 0 else missing / speed if speed > 0 else float("inf")

    def batch_full(self, now: float) -> bool:
        """The target batch is in, or as many as there are local steps: time for a round."""
        return self.samples(now) >= self.round_samples

    @property
    def local_steps(self) -> int:
        """Between two rounds: as many as the peer wants that wants most, where peers take any."""
        return max(record.local_steps for record in self.records.values()) if self._local else 1

    @property
    def round_samples(self) -> float:
        """Samples of all peers together from one round to the next."""
        return self.target_batch_size * self.local_steps

    def participants(self, step: int, lineage: bytes) -> list[PeerId]:
        """Who is expected at the round of ``step``: the branch's trainers and those about to get its state."""
        return participants_of(self.records, step, lineage)

    @property
    def paused(self) -> frozenset[PeerId]:
        """Who stands still."""
        return frozenset(peer for peer, record in self.records.items() if record.paused)

    def _on_own_branch(self, record: ProgressRecord) -> bool:
        absent = record.syncing or record.paused
        return not absent and record.step == self.own.step and record.lineage == self.own.lineage


def branch_of(records: Mapping[PeerId, ProgressRecord]) -> Branch | None:
    """The branch that these records elect; None if nobody trains."""
    trainers = {peer: record for peer, record in records.items() if not record.syncing}
    if not trainers:
        return None
    ordered = [trainers[peer] for peer in sorted(trainers)]
    awake = [record for record in ordered if not record.paused] or ordered
    voters = [record for record in awake if record.reduces] or awake
    for step in sorted({record.step for record in voters}, reverse=True):
        if 2 * sum(record.step >= step for record in voters) >= len(voters):
            break
    votes = Counter(record.lineage for record in voters if record.step == step)
    lineage = votes.most_common(1)[0][0]  # of equals the first
    there = (peer for peer, record in trainers.items() if (record.step, record.lineage) == (step, lineage))
    return Branch(step, lineage, frozenset(there))


def participants_of(records: Mapping[PeerId, ProgressRecord], step: int, lineage: bytes) -> list[PeerId]:
    """Those at a step and lineage, and those that catch up; none that is paused."""
    awake = ((peer, record) for peer, record in records.items() if not record.paused)
    return sorted(p for p, r in awake if r.syncing or (r.step == step and r.lineage == lineage))


logger = logging.getLogger(__name__)

MAX_ASSISTANTS = 16


class AssistantRecord(Message, frozen=True):
    """A peer that reduces and hands on the state for a run's collaborations; signed, under its own subkey.

    Attributes:
        name: for people.
        addresses: where it can be dialled.
        collaboration: prefix of the only one that it helps; empty: any of the run.
        told_at: its swarm time; a record that is not newer is no sign of life.
    """

    name: str
    addresses: tuple[str, ...]
    collaboration: str
    told_at: float


class Assistants:
    """A collaboration's assistants as one peer knows them."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._records: dict[PeerId, AssistantRecord] = {}
        self._lost: dict[PeerId, float] = {}  # when it last told

    @property
    def records(self) -> Mapping[PeerId, AssistantRecord]:
        """Those believed alive."""
        return self._records

    def on_records(self, records: Mapping[PeerId, AssistantRecord]) -> None:
        """Take the live records just read; one from before its writer was lost does not count."""
        alive = {
            peer: record
            for peer, record in sorted(records.items())
            if record.addresses
            and record.collaboration in ("", self._prefix)
            and record.told_at > self._lost.get(peer, float("-inf"))
        }
        self._records = dict(list(alive.items())[:MAX_ASSISTANTS])
        self._lost = {peer: at for peer, at in self._lost.items() if peer in records and peer not in alive}

    def on_lost(self, peer: PeerId) -> None:
        """Its link broke: it does not count until it tells again."""
        if record := self._records.pop(peer, None):
            self._lost[peer] = record.told_at


def progress_key(prefix: str) -> str:
    """Where the trainers of a collaboration tell their progress."""
    return f"{prefix}/progress"


def assistants_key(prefix: str) -> str:
    """Where the assistants of a run tell that they are there; ``prefix``: of any of its collaborations."""
    return f"{prefix.partition('/')[0]}/assistants"


async def read_progress(dht: DHT, peers: Peers, prefix: str) -> dict[PeerId, ProgressRecord]:
    """The live progress records of a collaboration."""
    return await _read(dht, peers, progress_key(prefix), ProgressRecord)


async def read_assistants(dht: DHT, peers: Peers, prefix: str) -> dict[PeerId, AssistantRecord]:
    """The live records of a run's assistants."""
    return await _read(dht, peers, assistants_key(prefix), AssistantRecord)


async def _read(dht: DHT, peers: Peers, key: str, kind: type[M]) -> dict[PeerId, M]:
    """The records that are sound, by peer; what they say of addresses is learnt."""
    records: dict[PeerId, M] = {}
    for subkey, found in (await dht.get(key)).items():
        try:
            record = msgspec.convert(found.value, kind, strict=False)
        except (msgspec.ValidationError, ValueError) as error:
            logger.info("record of %s ignored: %s", subkey.hex()[:8], error)
            continue
        contact = Contact(PeerId(subkey), record.addresses)  # type: ignore[attr-defined]
        if is_sound(contact):
            peers.learn(contact)
            records[contact.id] = record
    return records
