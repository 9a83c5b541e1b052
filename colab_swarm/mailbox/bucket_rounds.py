"""Rounds in a bucket, for a trainer. No other peer needs to be online at the same time."""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress

import numpy as np

from colab_swarm.averaging.group import RoundTerms, Ticket
from colab_swarm.averaging.result import RoundResult
from colab_swarm.errors import BucketAway, BucketError, MismatchError, StateError, require
from colab_swarm.events import BatchDropped, MemberTrace, StateReceived
from colab_swarm.mailbox.bucket import Bucket
from colab_swarm.mailbox.chain import RoundChain
from colab_swarm.mailbox.decide import ClosedRound
from colab_swarm.mailbox.follower import ChainFollower
from colab_swarm.mailbox.journal import Journal
from colab_swarm.mailbox.objects import Card, PseudoGradient
from colab_swarm.markup import plain
from colab_swarm.net.peers import PeerId, short
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.vector import HostVector
from colab_swarm.training.records import (
    Agreement,
    Mean,
    ProgressRecord,
    Rates,
    StateSketch,
    StepTaken,
    differing,
)
from colab_swarm.training.rounds import CaughtUp, Ready, RoundOutcome, Rounds, TrainedModel, other_settings
from colab_swarm.training.settings import PeerServices, RoundInput, StepOffer, TrainingSettings

STATE_ROUNDS = 16  # number of rounds from one state in the bucket to the next
STOP_S = 60.0  # maximum time for which a peer that leaves still writes a state


class BucketRounds(Rounds):
    """Rounds by the objects of a ``bucket``. Ignores arguments that only rounds over links need.

    Raises ValueError if a setting cannot be used with a bucket.
    """

    def __init__(
        self,
        bucket: Bucket,
        services: PeerServices,
        settings: TrainingSettings,
        own: ProgressRecord,
        model: TrainedModel,
    ) -> None:
        super().__init__(services, settings, own, model)
        _check_settings(settings)
        self._journal = Journal(bucket, services, settings, model.numel, lambda: self.until)
        self._heads: dict[PeerId, PseudoGradient] = {}  # statements of the last round's other members
        self._follower = ChainFollower(
            self._journal, services.events, services.peers.id, lambda: self.until, self._name_of
        )
        self._rates: Rates = ()  # learning rates at this peer's last contribution
        self._closed: ClosedRound | None = None  # the round whose mean the trainer applies
        self._saving: asyncio.Task[None] | None = None  # writes a state
        self._saved_for_others = False  # whether a state was saved for the members on another branch
        self._refused: BucketError | None = None  # why a round failed; `check` raises it
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        journal = self._journal
        await journal.bucket.require_conditional_writes()
        schema = self.model.schema
        agreed = self.view.own.agreement
        asked = self.settings.min_peers
        theirs = await journal.agreed_card(
            journal.signed(Card, schema=schema, agreement=agreed, min_peers=asked or 1)
        )
        differences = differing(theirs.agreement, agreed)
        require(
            not differences and theirs.schema == schema,
            other_settings(differences or "another model"),
            MismatchError,
        )
        self._follower.min_peers = asked or theirs.min_peers

    def refusal_of(self, agreement: Agreement) -> str:
        # The bucket keeps the card, so a new optimizer must agree with this one.
        return other_settings(differing(self.view.own.agreement, agreement))

    async def stop(self) -> None:
        if self._saving is not None:
            await asyncio.wait([self._saving], timeout=STOP_S)
        chain = self._follower.chain
        if chain is not None and self._follower.is_awaited:
            with suppress(BucketError):
                await self._journal.leave(chain)
        self.kill()

    def kill(self) -> None:
        self._tasks.cancel()

    @property
    def bucket_bytes(self) -> tuple[int, int]:
        bucket = self._journal.bucket
        return bucket.sent_bytes, bucket.received_bytes

    @property
    def behind(self) -> bool:
        chain = self._follower.chain
        return chain is None or self.view.own.step != chain.round

    async def take_state(self, *, has_state: bool) -> CaughtUp | None:
        """Read the newest state and the rounds since then. If there is no state, write this peer's own state."""
        journal = self._journal
        began_at = loop_now()
        later: tuple[RoundChain, Snapshot | None] | None = self._follower.later
        while True:
            if later is None:
                later = await journal.patiently(
                    journal.first_or_newest_state, self.model.snapshot, self._is_distrusted
                )
            chain, snapshot = later
            later = None
            rounds = [closed async for closed in journal.follow(chain, self._follower.seen)]
            # If this peer's state became the first one while others went on from theirs, read again.
            if snapshot is not None or not rounds:
                break
        self._follower.begin(chain)
        if rounds:
            self._learn(rounds[-1])
        if snapshot is None:
            self.view.update(syncing=False)
            return None
        state = snapshot.manifest
        donors = tuple(donor.hex() for donor in snapshot.donors)
        seconds = loop_now() - began_at
        self.services.events.emit(StateReceived(loop_now(), state.step, donors, state.size_bytes, seconds))
        return snapshot, _means_of(rounds, journal)

    def _is_distrusted(self, member: PeerId) -> bool:
        return self.view.distrusts(member, loop_now())

    async def refresh(self) -> None:
        """Do nothing, because the members' figures come with their contributions."""

    def check(self) -> None:
        refused = self._refused
        self._refused = None
        if refused is not None:
            raise refused
        self.comparison.check()

    def count(self, samples: float, now: float) -> None:
        super().count(samples, now)
        # Each member computes a part of the round in proportion to its speed, so that all end at about the same time.
        share = self.share
        speed = share.samples / share.batch_s if share.batch_s else 0.0
        self.view.update(samples=share.counted, samples_per_s=speed)
        share.granted = self.view.round_samples * self._own_part()
        self._loop.call_soon_threadsafe(self._show_members)

    async def ready(
        self, offer: StepOffer, deadline: float = math.inf, *, idle: bool = False, final: bool = False
    ) -> Ready:
        # A peer without more data contributes what it has; it need not wait for samples of other peers.
        self.check()
        self._rates = offer.rates
        self.view.update(rates=offer.rates, loss=offer.loss)
        return Ready.CONTRIBUTE

    async def contribute(self, contribution: RoundInput) -> AsyncGenerator[RoundOutcome, None]:
        """Write the contribution; yield the rounds' means until one includes it, or until it is too old."""
        began_at = loop_now()
        bytes_before = self.bucket_bytes
        if contribution.samples and not contribution.weight and math.isinf(self.until):
            # The others may have no weight either, and then no round ends: look at the bucket once, and compute on.
            self.until = began_at
        try:
            round = await self._follower.write(contribution, self.view.own, self.comparison.shown_sketch)
            if self._follower.min_peers > 1:
                self.tell_begin(self._follower.min_peers, [self.view.own.name])
            while (end := await self._follower.next_round(contribution, round)) is not None:
                moved = [now - then for now, then in zip(self.bucket_bytes, bytes_before, strict=True)]
                result = _result(end.closed, moved, loop_now() - began_at)
                memory = contribution.host_memory
                values = await asyncio.to_thread(self._journal.mean, end.closed, memory)
                self._closed = end.closed
                mean = _mean_of(end.closed, HostVector(values))
                yield RoundOutcome(mean, result, counted=end.counted, over=end.over)
                if end.over:
                    if contribution.weight and not end.counted:
                        text = f"the contribution to round {round} came too late"
                        self.services.events.emit(BatchDropped(loop_now(), text))
                    self.services.events.emit(result.event(began_at=began_at, now=loop_now()))
                    return
        except BucketAway:
            return
        except BucketError as error:
            self._refused = error

    async def on_applied(self, outcome: RoundOutcome, taken: StepTaken) -> None:
        await super().on_applied(outcome, taken)
        closed = self._closed
        assert closed is not None
        if outcome.over:
            self.share.begin(self.share.granted)
            self.share.work(loop_now())
        self._learn(closed)
        self._compare(closed)
        self.comparison.on_sketch(taken.sketch)
        self.services.averager.on_round(outcome.result)
        is_saving = self._saving is not None and not self._saving.done()
        # Members on another branch need a state to change to this branch, because manifests between may be lost.
        self._saved_for_others &= self._follower.has_others_elsewhere
        is_asked = self._follower.has_others_elsewhere and not self._saved_for_others
        is_due = closed.after.round % STATE_ROUNDS == 0 or is_asked
        if is_due and not is_saving:
            snapshot = None
            is_confirmed = self.comparison.confirmed or len(closed.contributions) == 1
            if closed.manifest.member == self.services.peers.id and is_confirmed:
                with suppress(StateError):  # another member saves the next state
                    snapshot = await asyncio.to_thread(self.model.snapshot)
                    self._saved_for_others = is_asked
            self._saving = self._tasks.spawn(self._save(closed.after, snapshot))

    async def _save(self, chain: RoundChain, snapshot: Snapshot | None) -> None:
        """Write the state, if given, and delete objects that no peer needs any more."""
        with suppress(BucketError):  # another member saves the next state
            if snapshot is not None:
                await self._journal.write_state(chain, snapshot)
        with suppress(BucketError):  # most members' keys may have no right to delete
            await self._journal.trim(chain.round)

    def _learn(self, closed: ClosedRound) -> None:
        """Continue with the next round, and remember the figures of this round's members."""
        self._follower.on_round(closed)
        heads = [contribution.head for contribution in closed.contributions.values()]
        self._heads = {head.member: head for head in heads if head.member != self.view.me}
        self._show_members()

    def _compare(self, closed: ClosedRound) -> None:
        """Compare this peer's learning rates and state with those in the members' contributions."""
        tickets = {}
        for contribution in closed.contributions.values():
            head = contribution.head
            if head.round == closed.manifest.round:
                sketch = head.sketch or StateSketch(head.round, b"", ())
                terms = RoundTerms("", sketch.step, sketch.lineage, 0)
                tickets[head.member] = Ticket(terms, 1.0, rates=head.rates, sketch=sketch.values)
        self.comparison.on_tickets(tickets, self._rates)

    def _show_members(self) -> None:
        """Make a record of each member for the views, because members send nothing between two rounds."""
        own = self.view.own
        seconds = own.samples / (own.samples_per_s or math.inf)
        records = {}
        for member, head in self._heads.items():
            records[member] = ProgressRecord(
                own.step,
                own.lineage,
                samples=seconds * head.samples_per_s,
                samples_per_s=head.samples_per_s,
                syncing=False,
                name=head.name,
                loss=head.loss,
            )
        self.view.on_records(records, now=loop_now())

    def _name_of(self, member: PeerId) -> str:
        """Return a member's name for people, or its short id if no name is known."""
        head = self._heads.get(member)
        if head is None or not head.name:
            return short(member)
        return plain(head.name)

    def _own_part(self) -> float:
        """Return this peer's fraction of the speed of all members; 1 while this peer's speed is unknown."""
        own_per_s = self.view.own.samples_per_s
        if not own_per_s:
            return 1.0
        return own_per_s / (own_per_s + sum(head.samples_per_s for head in self._heads.values()))


def _means_of(rounds: Sequence[ClosedRound], journal: Journal) -> Iterator[Mean]:
    values = np.empty(journal.numel, np.float32)
    for closed in rounds:
        yield _mean_of(closed, HostVector(journal.mean(closed, values)))


def _mean_of(closed: ClosedRound, vector: HostVector) -> Mean:
    return Mean(vector, closed.after.base, loss=closed.loss, ends_chain=True)


def _result(closed: ClosedRound, moved_bytes: Sequence[int], seconds: float) -> RoundResult:
    samples = dict[PeerId, float]()
    for entry in closed.manifest.entries:
        samples[entry.member] = samples.get(entry.member, 0.0) + entry.samples
    announced = dict(sorted(samples.items()))
    # Each member computes the whole mean by itself.
    traces = tuple(MemberTrace(member.hex(), count, share=1.0) for member, count in announced.items())
    sent_bytes, received_bytes = moved_bytes
    return RoundResult(
        step=closed.manifest.round,
        announced=announced,
        contributors=tuple(announced),
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
        seconds=seconds,
        exchange_s=seconds,
        members=traces,
    )


def _check_settings(settings: TrainingSettings) -> None:
    how = "pass communication='sparseloco' to swarm.optimizer, or 'auto'"
    communication = settings.communication
    require(
        communication.local_steps > 1,
        f"the rounds of this run are in a bucket, where each step would take several requests: {how}. A step of the "
        "swarm is then a round of many local steps",
    )
    require(
        communication.compression != "adaptive",
        f"compression='adaptive' is for runs over links: in a bucket, {how}",
    )
