"""The swarm's progress: its branch, the samples for the next step, and when the batch is full.

A pure core over the peers' progress records. The rules that keep a swarm together:

- Equal *lineages*, digests of the first parameters and every mean since, mean equal parameters.
- The *branch* of the swarm is the highest step that at least half of the training peers have
  reached, and on that step the lineage that most of them hold (ties: that of the smallest peer id).
  The others catch up. So one liar, one clock or one lucky minority never moves the swarm.
- Without a vote: peers that cannot be dialled while others can (no round would form, no state be
  given), silent ones (frozen or cut off) from which nothing came since, those at a step that the
  swarm cannot have reached yet, those that could not give their state (for `DISTRUST_S`, then twice
  as long), and paused or idle ones.
- The batch is full when the samples of the peers on the branch reach the target (DeDLOC, section
  3.1). Records are a moment old, so counts are extrapolated at the peers' speed, for
  3 s at most: a peer that is gone must not fill the batch.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from blake3 import blake3

from colab_swarm.dht.service import DHT, Found
from colab_swarm.net.patience import LeftOut
from colab_swarm.net.peers import PeerId, Peers, Role
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.records import (
    LINEAGE_BYTES,
    AssistantRecord,
    ProgressRecord,
    differing,
    read_participants,
)
from colab_swarm.training.sketch import StateSketch

_EXTRAPOLATE_S = 3.0
DISTRUST_S = 300.0  # at first
_MAX_DISTRUST_S = 6 * 3600.0  # of peers that fail again and again
_SHORT = 0.8  # a round that is less full makes early calls suspect
_RECENT_ROUNDS = 10  # rounds in which such a one counts
_KNOWN_ROUNDS = 3  # common rounds that give a peer its vote
_SEEN_S = 6 * 3600.0  # after the last one it loses the vote
FEW_STEPS = 4  # lead of the others that is always believed
RECENT_S = 600.0  # a peer with a vote and no common round in this time has left
_TIE = 0.01  # weight of all votes that decide ties only
LAST_RECORD_S = 10.0  # newer records within 10 s of a lost link predate it
_READS_OF_GRACE = 5  # reads for which a round's result outweighs a peer's own, older record
_FIRST_PROMISE_S = 2.0  # before any micro-batch is known
_MIN_PROMISE_S = 0.25
PLAUSIBLE = 8.0  # times the median time or speed: more is not believed

_THREADS_PAY_BYTES = 1 << 20


def next_lineage(lineage: bytes, mean: Floats) -> bytes:
    """Return the lineage after applying ``mean``; equal on all peers that got the same mean."""
    threads = blake3.AUTO if mean.nbytes > _THREADS_PAY_BYTES else 1
    return blake3(lineage, max_threads=threads).update(mean.data.cast("B")).digest(LINEAGE_BYTES)


C = TypeVar("C")


def most_voted(choices: Iterable[tuple[C, float]], default: C) -> C:
    """Return the choice with most votes, of equals the first; ``default`` without any."""
    votes: dict[C, float] = {}
    for choice, vote in choices:
        votes[choice] = votes.get(choice, 0.0) + vote
    return max(votes, key=lambda one: votes[one], default=default)


def _median_step(steps: Iterable[tuple[int, float]]) -> int:
    """Return the highest step that at least half of the votes have reached."""
    ahead = sorted(steps, key=lambda one: -one[0])
    half = sum(vote for _, vote in ahead) / 2
    reached = 0.0
    for step, vote in ahead:
        reached += vote
        if reached >= half > 0:
            return step
    return ahead[-1][0]  # the votes weigh nothing, or their sums differ by rounding


WATCHING = ProgressRecord(0, b"", 0.0, 0.0, syncing=True, reduces=False, name="")
"""The own record of a peer that does not train."""


@dataclass(frozen=True)
class Branch:
    """The swarm's step and lineage; ``peers`` train there now."""

    step: int
    lineage: bytes
    peers: frozenset[PeerId]


class Progress:
    """The swarm's progress as this peer knows it; peers take ``local_steps`` from one round to the next."""

    def __init__(
        self,
        me: PeerId,
        own: ProgressRecord,
        prefix: str = "",
        target_batch_size: float = 0.0,
        *,
        local_steps: int = 1,
    ) -> None:
        self.me = me
        self.own = own
        self.prefix = prefix
        self.local_steps = local_steps
        self.target_batch_size = target_batch_size
        self.assistants: dict[PeerId, AssistantRecord] = {}  # believed alive
        self._before: bytes | None = None  # the own lineage a step ago, if this peer made that step
        self._read: Mapping[PeerId, ProgressRecord] = {}  # the records as last read
        self._others: dict[PeerId, ProgressRecord] = {}  # those that count, updated by rounds
        self._learnt: dict[PeerId, tuple[ProgressRecord, int]] = {}  # and the reads for which it counts
        self._updated_at: dict[PeerId, float] = {}
        self._lost: dict[PeerId, tuple[ProgressRecord | None, float]] = {}  # when
        self._lost_assistants: dict[PeerId, float] = {}  # time of the last record
        self._distrusted = LeftOut[PeerId](DISTRUST_S, _MAX_DISTRUST_S)
        self._doubted: frozenset[PeerId] = frozenset()  # suspects, and those too far ahead
        self._no_vote: Set[PeerId] = frozenset()  # doubted or distrusted, at the last reading
        self._seen: dict[PeerId, tuple[int, float]] = {}  # rounds in which a peer contributed, last when
        self._found: Mapping[PeerId, Found] = {}  # roles and vouchers
        self._read_at = -math.inf
        self._usual_speed = math.inf
        self._usual_batch_s = 0.0
        self._step_at: dict[PeerId, tuple[int, float]] = {}  # a peer's step, and when it was not there yet
        self._kept: dict[PeerId, float] = {}  # the part of its announced samples that a peer contributed
        self._filled: deque[float] = deque(maxlen=_RECENT_ROUNDS)  # parts of the batch that rounds had

    @property
    def records(self) -> Mapping[PeerId, ProgressRecord]:
        return {self.me: self.own, **self._others}

    async def refresh(self, dht: DHT, peers: Peers, suspects: Iterable[PeerId] = ()) -> None:
        """Read all records; raises `PeerError` if they cannot be read now."""
        records, assistants, self._found = await read_participants(dht, self.prefix)
        self.on_records(records, linked=peers.linked(), suspects=suspects, now=loop_now())
        lost = self._lost_assistants
        alive = {
            peer: record
            for peer, record in sorted(assistants.items())
            if record.addresses
            and record.collaboration in ("", self.prefix)
            and record.told_at > lost.get(peer, -math.inf)
        }
        self.assistants = dict(list(alive.items())[:16])
        self._lost_assistants = {p: at for p, at in lost.items() if p in assistants}

    def on_records(
        self,
        records: Mapping[PeerId, ProgressRecord],
        *,
        linked: Container[PeerId] = (),
        suspects: Iterable[PeerId] = (),
        now: float,
    ) -> None:
        """Take the live records just read; to a peer with a state, ``suspects`` have no vote.

        A lost peer counts again if, after `LAST_RECORD_S`, it has a new record, or is ``linked`` and absent.
        """
        self._seen = {peer: one for peer, one in self._seen.items() if now - one[1] < _SEEN_S}
        self._step_at = {peer: one for peer, one in self._step_at.items() if peer in records}
        self._kept = {peer: one for peer, one in self._kept.items() if peer in records}
        self._lost = {
            peer: (records.get(peer), since)
            for peer, (last, since) in self._lost.items()
            if now - since < LAST_RECORD_S
            or (last is not None and records.get(peer) == last and not (last.absent and peer in linked))
        }
        self._read = records
        fresh = {peer: r for peer, r in records.items() if peer != self.me and peer not in self._lost}
        self._learnt = {
            peer: (learnt, reads_left - 1)
            for peer, (learnt, reads_left) in self._learnt.items()
            if peer in fresh and fresh[peer].step < learnt.step and reads_left
        }
        fresh |= {peer: learnt for peer, (learnt, _) in self._learnt.items()}
        self._updated_at |= {peer: now for peer, r in fresh.items() if r != self._others.get(peer)}
        for peer, r in fresh.items():
            if self._step_at.get(peer, (None, now))[0] != r.step:
                self._step_at[peer] = r.step, self._read_at
        self._read_at = now
        speeds = [r.samples_per_s for r in (self.own, *fresh.values()) if r.samples_per_s]
        batches_s = [r.batch_s for r in (self.own, *fresh.values()) if r.batch_s]
        self._usual_speed = statistics.median_low(speeds or [math.inf])
        self._usual_batch_s = statistics.median_low(batches_s or [0.0])
        self._others = fresh
        self._doubted = frozenset(suspects if self.own.step else ()) | self._far_ahead(now)
        self._no_vote = self._doubted | self._distrusted.ends(now).keys()

    def _far_ahead(self, now: float) -> set[PeerId]:
        """Return the peers at a step that the swarm cannot have reached since this peer's last round."""
        step_s = self._seconds_for(self.round_samples)
        credible = self.own.step + FEW_STEPS
        most_s = PLAUSIBLE * (now - self._seen.get(self.me, (0, -math.inf))[1])
        trainers = {peer: r.step for peer, r in self._others.items() if not r.syncing}
        far = {peer for peer, step in trainers.items() if (step - credible) * step_s > most_s}
        return far if len(far) < len(trainers) else set()  # if all are, it is this process that slept

    def on_round(
        self,
        members: Iterable[PeerId],
        step: int,
        lineage: bytes,
        *,
        samples: Mapping[PeerId, float] | None = None,
        now: float,
    ) -> None:
        """Take the result of a round: its ``members`` have applied the mean of those with ``samples``."""
        samples = samples or {}
        self._filled.append(sum(samples.values()) / self.round_samples)
        for peer, r in self._others.items() if samples else ():
            announced = min(r.samples, self._believed_samples(peer, r, now))
            if announced and r.step == step - 1:
                kept = min(1.0, samples.get(peer, 0.0) / announced)
                self._kept[peer] = (self._kept.get(peer, 1.0) + kept) / 2
        # Rounds of a minority give no votes: it would be the majority in its own eyes, and a fork would last.
        recent = {peer for peer in self._known(self._seen) if now - self._seen[peer][1] < RECENT_S}
        trainers = {peer for peer, r in self._others.items() if not (r.absent or r.syncing)}
        votes = self._votes(sorted({self.me, *recent, *trainers}))
        counts = 2 * sum(votes.get(peer, 0.0) for peer in sorted({self.me, *samples})) > sum(votes.values())
        for peer in samples:
            self._seen[peer] = self._seen.get(peer, (0, now))[0] + counts, now
        for peer in members:
            known = self._others.get(peer)
            if known is not None and not known.syncing and known.step < step:
                learnt = msgspec.structs.replace(known, step=step, lineage=lineage, samples=0.0)
                self._others[peer] = learnt
                self._updated_at[peer] = now
                self._step_at[peer] = (step, now)
                self._learnt[peer] = (learnt, _READS_OF_GRACE)

    def on_lost(self, peer: PeerId, *, now: float) -> bool:
        """Ignore a peer until it is linked again or publishes a new record; return whether it trained."""
        self._learnt.pop(peer, None)
        trained = self._others.pop(peer, None)
        assistant = self.assistants.pop(peer, None)
        if assistant is not None:
            self._lost_assistants[peer] = assistant.told_at
        if trained or assistant:
            self._lost[peer] = self._read.get(peer), now
        return trained is not None

    def distrust(self, peers: Iterable[PeerId], *, now: float) -> None:
        """Take the vote of peers that could not give the state that they claim, for twice as long each time."""
        for peer in peers:
            self._distrusted.fail(peer, now)
        self._no_vote = self._doubted | self._distrusted.ends(now).keys()

    def disagreement(self) -> str:
        """Return the settings in which this peer differs from most peers on the branch, or nothing.

        Once it has averaged with others, no stranger's record can tell it that it is wrong.
        """
        if self._seen.keys() - {self.me}:
            return ""
        records = self.records
        votes = self._votes(sorted(self.branch().peers))
        agreements = ((records[peer].agreement, vote) for peer, vote in votes.items())
        elected = most_voted((one for one in agreements if one[0]), ())
        return differing(elected, self.own.agreement) if elected and self.own.agreement else ""

    @property
    def donors_remain(self) -> bool:
        """True if some other peer has a state, by a live record, even if it is silent or lost now."""
        return any(peer != self.me and not r.syncing for peer, r in self._read.items())

    @property
    def shared(self) -> bool:
        """True if another peer holds this one's parameters, by its record."""
        return any((r.step, r.lineage) == (self.own.step, self.own.lineage) for r in self._others.values())

    def trust_all(self) -> None:
        self._distrusted = LeftOut[PeerId](DISTRUST_S, _MAX_DISTRUST_S)
        self._no_vote = self._doubted

    def advance(self, lineage: bytes, *, samples: float = 0.0) -> None:
        """Move this peer one step further, after it applied a mean; ``samples`` count for the next step."""
        self._before = self.own.lineage
        self.own = msgspec.structs.replace(self.own, step=self.own.step + 1, lineage=lineage, samples=samples)

    def leap(self, step: int, lineage: bytes, *, syncing: bool) -> None:
        self._before = None
        if step < self.own.step:  # a checkpoint was loaded: the others are rightly far ahead
            self._seen.pop(self.me, None)
        self.own = msgspec.structs.replace(self.own, step=step, lineage=lineage, samples=0.0, syncing=syncing)

    def branch(self) -> Branch:
        """Return the branch that the records elect, or the own while no other peer trains."""
        records = sorted(self.records.items())
        trainers = {peer: r for peer, r in records if not r.syncing and peer not in self._no_vote}
        if not trainers:
            return Branch(self.own.step, self.own.lineage, frozenset())
        active = {peer: r for peer, r in trainers.items() if not r.absent} or trainers
        voters = {peer: r for peer, r in active.items() if r.reduces} or active
        votes = self._votes(voters)
        step = _median_step((r.step, votes[peer]) for peer, r in voters.items())
        lineages = ((r.lineage, votes[peer]) for peer, r in voters.items() if r.step == step)
        lineage = most_voted(lineages, self.own.lineage)
        on_it = (peer for peer, r in trainers.items() if (r.step, r.lineage) == (step, lineage))
        return Branch(step, lineage, frozenset(on_it))

    def account_of(self, peer: PeerId) -> bytes:
        """Return the account that bears the waits for a peer: its own once it is known, else its voucher's."""
        return peer if peer == self.me or self._known([peer]) else b"voucher " + self._voucher_of(peer)

    def _voucher_of(self, peer: PeerId) -> bytes:
        return self._found[peer].voucher if peer in self._found else peer

    def _votes(self, voters: Iterable[PeerId]) -> dict[PeerId, float]:
        """Return the weight of each vote: one for each peer that this one averaged with, if there are any.

        Of the others, all for whom one invitation vouches share a vote, as a member may be many; it decides ties.
        Those that take part have equal votes: after a partition both sides would follow themselves, and with one
        vote for a whole class its founder's old record would call all others back.
        """
        known = self._known(voters)
        vouchers = {peer: self._voucher_of(peer) for peer in voters}
        sizes = Counter(vouchers.values())
        counted = known and known | {self.me}
        votes = {}
        for peer, voucher in vouchers.items():
            vote = 1.0 if peer in counted else 0.0
            votes[peer] = vote + _TIE / sizes[voucher] / len(sizes)
        return votes

    def _known(self, peers: Iterable[PeerId]) -> set[PeerId]:
        return {peer for peer in peers if self._seen.get(peer, (0, 0.0))[0] >= _KNOWN_ROUNDS} - {self.me}

    @property
    def behind(self) -> bool:
        """True if this peer is neither on the branch nor one step ahead as it ended a round first."""
        branch = self.branch()
        if self.own.step == branch.step:
            return self.own.lineage != branch.lineage
        # A peer that is further ahead took steps without the branch: no other peer would follow.
        return self.own.step != branch.step + 1 or self._before not in (branch.lineage, None)

    def sketches(self) -> tuple[dict[PeerId, StateSketch], dict[PeerId, float]]:
        """Return the other trainers' sketches and votes; the authority outvotes all others."""
        voters = {peer: r for peer, r in self._others.items() if r.sketch and peer not in self._no_vote}
        votes = self._votes(voters)
        for peer in voters:
            if peer in self._found and self._found[peer].role >= Role.AUTHORITY:
                votes[peer] += len(voters)
        return {peer: r.sketch for peer, r in voters.items() if r.sketch}, votes

    def stands(self, step: int, lineage: bytes) -> bool:
        """Return True if the swarm follows, or may still follow, the group that this peer had at a step."""
        branch = self.branch()
        # Not if this peer took that step and the branch is still there: they were a few.
        return self.own.step <= step or (branch.step, branch.lineage) != (step, lineage)

    def participants(self, step: int, lineage: bytes) -> set[PeerId]:
        """Return the peers at a step and lineage, and those that catch up; none that are absent."""
        active = ((peer, r) for peer, r in self.records.items() if not r.absent)
        return {peer for peer, r in active if r.syncing or (r.step, r.lineage) == (step, lineage)}

    def waiting(self, step: int, lineage: bytes) -> set[PeerId]:
        """Return the other trainers at a step and lineage that compute."""
        others = ((peer, r) for peer, r in self._others.items() if not (r.absent or r.syncing))
        return {peer for peer, r in others if (r.step, r.lineage) == (step, lineage)}

    def samples(self, now: float) -> float:
        """Return the samples of all peers on the own branch for the next step."""
        # a copy: panels call this too
        own = self.own
        others = list(self._others.items())
        return sum(
            (
                self._believed_samples(peer, r, now) * self._kept.get(peer, 1.0)
                for peer, r in others
                if not (r.syncing or r.absent) and (r.step, r.lineage) == (own.step, own.lineage)
            ),
            0.0 if own.syncing else own.samples,
        )

    def longest_s(self) -> float:
        """Return how long the slowest peers that are believed take for a micro-batch."""
        return PLAUSIBLE * self._usual_batch_s

    def believed_s(self, peer: PeerId) -> float:
        """Return how long a round may wait for a peer: two of its micro-batches, at most `PLAUSIBLE` median ones."""
        if not self._usual_batch_s:
            return _FIRST_PROMISE_S
        record = self.records.get(peer)
        own_s = 2 * record.batch_s if record else 0.0
        return max(_MIN_PROMISE_S, min(own_s or math.inf, self.longest_s()))

    def _believed_samples(self, peer: PeerId, r: ProgressRecord, now: float) -> float:
        """Return a peer's samples now: as it says, but no more than it could compute since its last step."""
        old_s = min(max(now - self._updated_at.get(peer, now), 0.0), _EXTRAPOLATE_S)
        return min(r.samples + old_s * r.samples_per_s, self._computable(peer, r, now))

    def _computable(self, peer: PeerId, r: ProgressRecord, now: float) -> float:
        usual = PLAUSIBLE * self._usual_speed
        speed = min(r.samples_per_s or usual, usual)
        batch_s = min(r.batch_s, PLAUSIBLE * self._usual_batch_s)
        computed_s = now - self._step_at.get(peer, (0, -math.inf))[1] + 2 * batch_s
        return speed * computed_s if math.isfinite(speed) else math.inf

    def samples_per_s(self, *, most: float = math.inf) -> float:
        return sum(min(r.samples_per_s, most) for r in self.records.values() if not (r.syncing or r.absent))

    def seconds_to_batch(self, now: float) -> float:
        """Return when the batch will be full; infinite while no speed is known."""
        return self._seconds_for(self.round_samples - self.samples(now))

    def _seconds_for(self, missing: float) -> float:
        if missing <= 0:
            return 0.0
        speed = self.samples_per_s(most=max(PLAUSIBLE * self._usual_speed, self.own.samples_per_s))
        return missing / speed if speed > 0 else math.inf

    def early_s(self, now: float) -> float:
        """Return how many seconds too early a call is; 0 unless a round was short lately, as records may be old."""
        others = self.waiting(self.own.step, self.own.lineage)
        most = sum(self._computable(peer, self._others[peer], now) for peer in sorted(others))
        early_s = self._seconds_for(self.round_samples - self.own.samples - most)
        return early_s + self.own.batch_s if early_s and min(self._filled, default=1.0) < _SHORT else 0.0

    def batch_full(self, now: float) -> bool:
        return self.samples(now) >= self.round_samples

    @property
    def round_samples(self) -> float:
        """Samples of all peers together from one round to the next."""
        return self.target_batch_size * self.local_steps
