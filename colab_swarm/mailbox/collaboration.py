"""A trainer's part in a run whose rounds are in a bucket: nobody needs to be online with it."""

import asyncio
import math
import statistics
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress

import numpy as np

from colab_swarm.averaging.result import RoundResult
from colab_swarm.errors import BucketAway, BucketError, MismatchError, require
from colab_swarm.events import BatchDropped, MemberTrace, Notice, StateReceived
from colab_swarm.mailbox.branches import Branches, Step
from colab_swarm.mailbox.bucket import Bucket, StoredObject
from colab_swarm.mailbox.journal import Journal
from colab_swarm.mailbox.rounds import (
    STATE_ROUNDS,
    WINDOW,
    Card,
    ClosedRound,
    PseudoGradient,
    RoundChain,
    decode,
    encode,
)
from colab_swarm.mailbox.view import (
    LEAST_PAUSE_S,
    Close,
    Decision,
    Follow,
    LoadState,
    RoundView,
    SeekState,
    Wait,
)
from colab_swarm.net.peers import PeerId, short
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.records import PLAUSIBLE, ProgressRecord, differing
from colab_swarm.training.rounds import CaughtUp, RoundOutcome, Rounds, TrainedModel
from colab_swarm.training.settings import PeerServices, RoundInput, TrainingSettings

STOP_S = 60.0  # for a state to be written by a peer that leaves


class BucketRounds(Rounds):
    """Rounds by the objects of a ``bucket``; what only links need is ignored.

    Raises ValueError if a setting does not go with a bucket.
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
        self._journal = Journal(bucket, services, settings, model.numel)
        self._chain: RoundChain | None = None  # None: not read yet
        self._last: ClosedRound | None = None  # None also where a state told the chain
        self._later: tuple[RoundChain, Snapshot | None] | None = None  # a state to go on from, already read
        self._since = loop_now()  # when this peer learnt of the last manifest
        self._put: int | None = None  # the round of the own contribution that no manifest lists yet
        self._spoilt = False  # whether it does not count, as another member wrote to its place
        self._content = b""  # of that one; empty if an earlier session wrote it
        self._put_at: float | None = None  # None: in an earlier session, or known by the store's clock
        self._saving: asyncio.Task[None] | None = None  # a state
        self._refused: BucketError | None = None  # why a round beside the trainer failed
        self._others: dict[PeerId, PseudoGradient] = {}  # of the last round's other members
        self._closed: ClosedRound | None = None  # the round whose mean the trainer applies

    async def start(self) -> None:
        journal = self._journal
        await journal.bucket.require_conditional_writes()
        schema = self.model.schema
        agreed = self.progress.known.own.agreement
        theirs = await journal.read_card(journal.signed(Card, schema=schema, agreement=agreed))
        told = differing(theirs.agreement, agreed)
        require(
            not told and theirs.schema == schema,
            f"the run trains this model with other settings: {told or 'another model'}. Use the run's, or pass "
            "another name=… to swarm.optimizer(…)",
            MismatchError,
        )

    async def stop(self) -> None:
        if self._saving is not None:
            await asyncio.wait([self._saving], timeout=STOP_S)
        if self._chain is not None and (
            self._put is not None or self.services.peers.id in self._chain.members
        ):
            with suppress(BucketError):
                await self._journal.leave(self._chain)
        self.kill()

    def kill(self) -> None:
        self._tasks.cancel()

    @property
    def bucket_bytes(self) -> tuple[int, int]:
        return self._journal.bucket.sent_bytes, self._journal.bucket.received_bytes

    @property
    def requests(self) -> int:
        """To the bucket, so far."""
        return self._journal.bucket.requests

    @property
    def behind(self) -> bool:
        return self._chain is None or self.progress.known.own.step != self._chain.round

    async def take_state(self, *, has_state: bool) -> CaughtUp | None:
        """Read the newest state and the rounds since then; the first peer writes its own state."""
        self._journal.until = self.until
        journal = self._journal
        began_at = loop_now()
        rounds = list[ClosedRound]()
        # of a peer that slept past a trim
        later = self._later
        self._later = None
        while True:
            if later is None:
                later = await journal.patiently(journal.read_state, self.model.snapshot)
            (chain, snapshot) = later
            later = None
            rounds = [one async for one in journal.follow(chain)]
            if snapshot is not None or not rounds:
                break
        self._chain = chain
        self._last = None
        self._put = None
        self._since = loop_now()
        if rounds:
            self._learn(rounds[-1])
        if snapshot is None:
            return None
        state = snapshot.manifest
        donors = tuple(donor.hex() for donor in snapshot.donors)
        seconds = loop_now() - began_at
        self.services.events.emit(StateReceived(loop_now(), state.step, donors, state.size_bytes, seconds))
        return snapshot, self._means(rounds)

    def _means(self, rounds: Sequence[ClosedRound]) -> Iterator[Floats]:
        values = np.empty(self._journal.numel, np.float32)
        return (self._journal.mean(one, values) for one in rounds)

    async def distrust(self, donors: Sequence[PeerId]) -> None:
        text = f"the state of {', '.join(map(short, donors))} does not load"
        self.services.events.emit(Notice(loop_now(), text))

    async def refresh(self) -> None:
        """Show the others' figures; they are read with each round."""
        self._show_others()

    def check(self) -> None:
        refused = self._refused
        self._refused = None
        if refused is not None:
            raise refused

    def samples(self, now: float, *, aside: bool) -> float:
        """Return the samples of all peers, as they compute as fast as in the last round."""
        own = self.progress.known.own
        all_per_s = own.samples_per_s + sum(self._speeds().values())
        return own.samples * all_per_s / (own.samples_per_s or math.inf)

    def round_due(self, now: float, *, waiting: bool) -> bool:
        # Each takes a part of the round by its speed, so that all end about the same time. One that has no more
        # data contributes what there is: no other peer's samples are waited for.
        if waiting and now < self.until:
            return True
        return self.samples(now, aside=False) >= self.progress.forecast.round_samples

    async def contribute(self, contribution: RoundInput) -> AsyncGenerator[RoundOutcome, None]:
        """Write the contribution, and yield the means of the rounds until one counts it, or none will."""
        self._journal.until = self.until
        began_at = loop_now()
        moved = self.bucket_bytes
        try:
            mine = await self._contribute(contribution)
            while (closed := await self._next()) is not None:
                me = self.services.peers.id
                counted = closed.counts(me, mine)
                weightless = not contribution.weight
                over = counted or weightless or self._spoilt or closed.manifest.round >= mine + WINDOW
                sent, received = (now - then for now, then in zip(self.bucket_bytes, moved, strict=True))
                result = self._result(closed, sent, received, loop_now() - began_at)
                mean = await asyncio.to_thread(self._journal.mean, closed, contribution.vector.values)
                self._closed = closed
                yield RoundOutcome(mean, result, counted=counted, over=over)
                if over:
                    self._put = None
                    if contribution.weight and not counted:
                        self._tell_dropped(mine)
                    self.services.events.emit(result.event(began_at=began_at, now=loop_now()))
                    return
        except BucketAway:
            return
        except BucketError as error:
            self._refused = error  # the trainer's next call raises it

    def _tell_dropped(self, round: int) -> None:
        reason = "was overwritten" if self._spoilt else "came too late"
        self.services.events.emit(BatchDropped(loop_now(), f"the contribution to round {round} {reason}"))

    async def _contribute(self, given: RoundInput) -> int:
        """Write the contribution, and return its round; one that no manifest lists yet goes first."""
        chain = self._chain
        own = self.progress.known.own
        journal = self._journal
        assert chain is not None
        if not given.weight:
            return chain.round
        if self._put is not None and chain.may_count(self.services.peers.id, self._put):
            await asyncio.to_thread(self._cut_off, given)
            return self._put
        content = await asyncio.to_thread(encode, journal.codec, given.vector.values)
        data = journal.signed(
            PseudoGradient,
            content,
            round=chain.round,
            base=chain.base,
            weight=given.weight,
            samples=given.samples,
            samples_per_s=own.samples_per_s,
            seconds=loop_now() - self._since,
            name=own.name[:100],
            loss=given.loss,
        )
        path = f"{chain.folder}/{self.services.peers.id.hex()}"
        written = await journal.patiently(journal.bucket.create, path, data)
        self._put = chain.round
        self._put_at = loop_now() if written else None
        if not written and await journal.patiently(journal.bucket.read, path) != data:
            content = b""  # one of an earlier session is there, and counts
        self._content = content
        await asyncio.to_thread(self._cut_off, given)
        return chain.round

    def _cut_off(self, given: RoundInput) -> None:
        """Keep as error feedback what the contribution that is in the bucket lacks."""
        feedback = given.vector.feedback
        journal = self._journal
        if feedback is None:
            return
        feedback.cut_off(0, given.vector.values, np.zeros_like(given.vector.values))
        if self._content:
            for span, piece in decode(journal.codec, memoryview(self._content), journal.numel):
                feedback.cut_off(span.start, given.vector.values[span], piece)

    async def _next(self) -> ClosedRound | None:
        """Wait until the round is over, and close it if that is due; None if this peer waits no longer.

        None also if others went on without this peer, which must catch up: on another manifest, or long ago.
        """
        chain = self._chain
        journal = self._journal
        assert chain is not None
        close_at = -math.inf  # when this peer may write another manifest
        while True:
            action = await self._decide(chain, close_at)
            pause_s = LEAST_PAUSE_S
            match action:
                case Follow(closed):
                    return closed
                case LoadState():
                    self._chain = None
                    return None
                case Close(again_at=again_at):
                    if await journal.close(chain, action):
                        close_at = again_at
                        continue
                case Wait():
                    pause_s = action.pause_s
            if loop_now() >= journal.until:
                return None
            await asyncio.sleep(min(pause_s, journal.until - loop_now()))

    async def _decide(self, chain: RoundChain, close_at: float) -> Decision:
        """Look at the bucket, and return what to do next."""
        journal = self._journal
        branches = await journal.look(chain)
        view = RoundView(chain, branches, self._last, self._own_place(branches))

        def ask() -> Decision | Step:
            return view.next_action(journal.bucket.now(), close_at)

        action: Decision = await journal.reader.answer(ask)
        if isinstance(action, SeekState):
            self._later = await journal.patiently(journal.newest_state, chain.round)
            view.later_state = self._later is not None
            action = await journal.reader.answer(ask)
        self._spoilt = view.spoilt
        return action

    def _own_place(self, branches: Branches) -> StoredObject | None:
        """Return the own contribution that no manifest lists yet, and learn from it how the store's clock goes."""
        chain = self._chain
        if self._put is None or chain is None:
            return None
        path = chain.path_of(self.services.peers.id, self._put)
        place = branches.listing.contributions.get(path)
        if place is not None and self._put_at is not None:
            self._journal.bucket.on_time(place.modified_at, self._put_at)
            self._put_at = None  # others may overwrite it
        return place

    async def on_applied(self, outcome: RoundOutcome) -> None:
        closed = self._closed
        assert closed is not None
        self._learn(closed)
        self._since = loop_now()
        self.services.averager.on_round(outcome.result)
        if closed.after.round % STATE_ROUNDS == 0:
            closed_here = closed.manifest.member == self.services.peers.id
            snapshot = await asyncio.to_thread(self.model.snapshot) if closed_here else None
            self._saving = self._tasks.spawn(self._save(closed.after, snapshot))

    async def _save(self, chain: RoundChain, snapshot: Snapshot | None) -> None:
        """Write the state, if there is one, and delete what nobody needs any more."""
        with suppress(BucketError):  # the next writer saves the next one
            if snapshot is not None:
                await self._journal.write_state(chain, snapshot)
        with suppress(BucketError):  # the keys of most members may not delete
            await self._journal.trim(chain.round)

    def _learn(self, one: ClosedRound) -> None:
        """Take the round as the last one, and its members' figures: for the panel, and this peer's part of a round."""
        self._chain = one.after
        self._last = one
        self._others = {}
        for contribution in one.contributions.values():
            head = contribution.head
            if head.member != self.services.peers.id:
                self._others[head.member] = head
        self._show_others()
        self._journal.reader.readings.forget(one)

    def _show_others(self) -> None:
        """Put the others' records beside the own one: they compute as long as this peer, as nobody hears of them."""
        own = self.progress.known.own
        seconds = own.samples / (own.samples_per_s or math.inf)
        records = {
            member: ProgressRecord(
                own.step,
                own.lineage,
                samples=seconds * speed,
                samples_per_s=speed,
                syncing=False,
                reduces=False,
                name=self._others[member].name,
                loss=self._others[member].loss,
            )
            for member, speed in self._speeds().items()
        }
        self.progress.on_records(records, now=loop_now())

    def _speeds(self) -> dict[PeerId, float]:
        """Return the samples per second of the last round's other members, as far as they are believed."""
        claims = {member: head.samples_per_s for member, head in self._others.items()}
        most = PLAUSIBLE * statistics.median_low([self.progress.known.own.samples_per_s, *claims.values()])
        return {member: min(claim, most) for member, claim in claims.items()}

    def _result(self, closed: ClosedRound, sent: int, received: int, seconds: float) -> RoundResult:
        samples = dict[PeerId, float]()
        for entry in closed.manifest.entries:
            samples[entry.member] = samples.get(entry.member, 0.0) + entry.samples
        counted = dict(sorted(samples.items()))
        # Each member computes the whole mean by itself.
        traces = tuple(MemberTrace(member.hex(), count, share=1.0) for member, count in counted.items())
        return RoundResult(
            step=closed.manifest.round,
            announced=counted,
            contributors=tuple(counted),
            sent_bytes=sent,
            received_bytes=received,
            seconds=seconds,
            exchange_s=seconds,
            members=traces,
        )


def _check_settings(settings: TrainingSettings) -> None:
    how = "in a bucket, pass swarm.optimizer(…, local_steps=30, compression='sparseloco')"
    require(
        settings.local_steps > 1,
        f"local_steps={settings.local_steps}: {how}; each step would take several requests",
    )
    require(settings.compression != "adaptive", f"compression='adaptive' is for runs over links: {how}")
