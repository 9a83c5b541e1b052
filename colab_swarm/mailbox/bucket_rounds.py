"""Rounds in a bucket, as a trainer takes part in them: nobody needs to be online with it."""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from colab_swarm.averaging.result import RoundResult
from colab_swarm.errors import BucketAway, BucketError, MismatchError, StateError, require
from colab_swarm.events import BatchDropped, MemberTrace, Notice, StateReceived
from colab_swarm.mailbox.branches import Branches, Step
from colab_swarm.mailbox.bucket import Bucket, StoredObject
from colab_swarm.mailbox.journal import Journal
from colab_swarm.mailbox.members import LastMembers
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
from colab_swarm.tensors.codecs import Codec, Floats
from colab_swarm.tensors.vector import HostVector
from colab_swarm.training.records import ProgressRecord, differing
from colab_swarm.training.rounds import CaughtUp, RoundOutcome, Rounds, TrainedModel
from colab_swarm.training.settings import PeerServices, RoundInput, TrainingSettings

STOP_S = 60.0  # for a state to be written by a peer that leaves


@dataclass
class _Written:
    """This peer's contribution in the bucket, until a manifest lists it or it is too old."""

    round: int
    # As it is there, to know what compression cut off; empty if an earlier session wrote it.
    content: bytes
    # When it was written, by this peer's clock; None: by an earlier session, or the store's time of it is known.
    written_at: float | None
    # True if another member has overwritten it.
    spoilt: bool = False


class BucketRounds(Rounds):
    """Rounds by the objects of a ``bucket``; what only links need is ignored.

    Raises ValueError if a setting does not go with a bucket. What changes, and when:

    - ``_chain``: `take_state` reads it, each applied round moves it on; None: not read yet, or a look found that others
      left it behind.
    - ``_last``: the round before it, by each applied round; None after `take_state`.
    - ``_later``: a state that a look found and `take_state` will use.
    - ``_own``: `contribute` writes it, each look its fields; None again before the mean that ends it, and after
      `take_state`.
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
        self._members = LastMembers(self.progress.known)
        self._chain: RoundChain | None = None
        self._last: ClosedRound | None = None
        self._later: tuple[RoundChain, Snapshot | None] | None = None
        self._own: _Written | None = None
        self._followed_at = loop_now()  # when this peer learnt of the last manifest
        self._closed: ClosedRound | None = None  # the round whose mean the trainer applies
        self._saving: asyncio.Task[None] | None = None  # a state
        self._refused: BucketError | None = None  # why a round failed; `check` raises it

    async def start(self) -> None:
        journal = self._journal
        await journal.bucket.require_conditional_writes()
        schema = self.model.schema
        agreed = self.progress.known.own.agreement
        theirs = await journal.read_card(journal.signed(Card, schema=schema, agreement=agreed))
        differences = differing(theirs.agreement, agreed)
        require(
            not differences and theirs.schema == schema,
            f"the run trains this model with other settings: {differences or 'another model'}. Use the run's, or "
            "pass another name=… to swarm.optimizer(…)",
            MismatchError,
        )

    async def stop(self) -> None:
        if self._saving is not None:
            await asyncio.wait([self._saving], timeout=STOP_S)
        chain = self._chain
        if chain is not None and (self._own is not None or self.services.peers.id in chain.members):
            with suppress(BucketError):
                await self._journal.leave(chain)
        self.kill()

    def kill(self) -> None:
        self._tasks.cancel()

    @property
    def bucket(self) -> Bucket:
        return self._journal.bucket

    @property
    def bucket_bytes(self) -> tuple[int, int]:
        return self.bucket.sent_bytes, self.bucket.received_bytes

    @property
    def behind(self) -> bool:
        return self._chain is None or self.progress.known.own.step != self._chain.round

    async def take_state(self, *, has_state: bool) -> CaughtUp | None:
        """Read the newest state and the rounds since then; the first peer writes its own state."""
        journal = self._journal
        began_at = loop_now()
        later = self._later
        self._later = None
        while True:
            if later is None:
                later = await journal.patiently(journal.read_state, self.model.snapshot)
            chain, snapshot = later
            later = None
            rounds = [closed async for closed in journal.follow(chain)]
            # If the own state became the first one while others went on from theirs, read again.
            if snapshot is not None or not rounds:
                break
        self._chain = chain
        self._last = None
        self._own = None
        self._followed_at = loop_now()
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
        values = np.empty(self.model.numel, np.float32)
        for closed in rounds:
            yield self._journal.mean(closed, values)

    def on_loaded(self, donors: tuple[PeerId, ...]) -> None:
        """Do nothing: rounds go on from the chain that `take_state` has read."""

    async def distrust(self, donors: Sequence[PeerId]) -> None:
        text = f"the state of {', '.join(map(short, donors))} does not load"
        self.services.events.emit(Notice(loop_now(), text))

    async def refresh(self) -> None:
        """Do nothing: the members' figures come with their contributions."""

    def check(self) -> None:
        refused = self._refused
        self._refused = None
        if refused is not None:
            raise refused

    def on_batch(self, samples: float) -> None:
        super().on_batch(samples)
        self._show_members()

    def samples(self, now: float, *, aside: bool) -> float:
        return self._members.samples()

    def round_due(self, now: float, *, waiting: bool) -> bool:
        # Each takes a part of the round by its speed, so that all end about the same time. One that has no more
        # data contributes what there is: no other peer's samples are waited for.
        if waiting and now < self.until:
            return True
        return self._members.samples() >= self.progress.forecast.round_samples

    async def contribute(self, contribution: RoundInput) -> AsyncGenerator[RoundOutcome, None]:
        """Write the contribution, and yield the means of the rounds until one counts it, or none will."""
        began_at = loop_now()
        bytes_before = self.bucket_bytes
        try:
            round = await self._write(contribution)
            while (closed := await self._next()) is not None:
                counted = closed.counts(self.services.peers.id, round)
                spoilt = self._own is not None and self._own.spoilt
                too_old = closed.manifest.round >= round + WINDOW
                over = counted or not contribution.weight or spoilt or too_old
                moved = [now - then for now, then in zip(self.bucket_bytes, bytes_before, strict=True)]
                result = _result(closed, moved, loop_now() - began_at)
                mean = await asyncio.to_thread(self._journal.mean, closed, contribution.vector.values)
                self._closed = closed
                if over:
                    self._own = None
                yield RoundOutcome(mean, result, counted=counted, over=over)
                if over:
                    if contribution.weight and not counted:
                        reason = "was overwritten" if spoilt else "came too late"
                        text = f"the contribution to round {round} {reason}"
                        self.services.events.emit(BatchDropped(loop_now(), text))
                    self.services.events.emit(result.event(began_at=began_at, now=loop_now()))
                    return
        except BucketAway:
            return
        except BucketError as error:
            self._refused = error

    async def on_applied(self, outcome: RoundOutcome) -> None:
        closed = self._closed
        assert closed is not None
        self._learn(closed)
        self._followed_at = loop_now()
        self.services.averager.on_round(outcome.result)
        if closed.after.round % STATE_ROUNDS == 0:
            snapshot = None
            if closed.manifest.member == self.services.peers.id:
                with suppress(StateError):  # the next writer saves the next one
                    snapshot = await asyncio.to_thread(self.model.snapshot)
            self._saving = self._tasks.spawn(self._save(closed.after, snapshot))

    async def _write(self, contribution: RoundInput) -> int:
        """Write the contribution, and return its round; one that no manifest lists yet goes first."""
        chain = self._chain
        journal = self._journal
        me = self.services.peers.id
        assert chain is not None
        if not contribution.weight:
            return chain.round
        own = self._own
        if own is None or not chain.may_count(me, own.round):
            content = await asyncio.to_thread(encode, journal.codec, contribution.vector.values)
            data = self._sealed(contribution, content, chain)
            path = f"{chain.folder}/{me.hex()}"
            written = await journal.patiently(self.bucket.create, path, data)
            if not written and await journal.patiently(self.bucket.read, path) != data:
                content = b""  # a contribution of an earlier session is there, and counts
            self._own = own = _Written(chain.round, content, loop_now() if written else None)
        await asyncio.to_thread(_keep_loss, contribution.vector, journal.codec, own.content)
        return own.round

    def _sealed(self, contribution: RoundInput, content: bytes, chain: RoundChain) -> bytes:
        record = self.progress.known.own
        return self._journal.signed(
            PseudoGradient,
            content,
            round=chain.round,
            base=chain.base,
            weight=contribution.weight,
            samples=contribution.samples,
            samples_per_s=record.samples_per_s,
            seconds=loop_now() - self._followed_at,
            name=record.name[:100],
            loss=contribution.loss,
        )

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
            if loop_now() >= self.until:
                return None
            await asyncio.sleep(min(pause_s, self.until - loop_now()))

    async def _decide(self, chain: RoundChain, close_at: float) -> Decision:
        """Look at the bucket, and return what to do next."""
        journal = self._journal
        branches = await journal.look(chain)
        view = RoundView(chain, branches, self._last, self._own_place(chain, branches))

        def ask() -> Decision | Step:
            return view.next_action(journal.bucket.now(), close_at)

        action: Decision = await journal.reader.answer(ask)
        if isinstance(action, SeekState):
            self._later = await journal.patiently(journal.newest_state, chain.round)
            view.later_state = self._later is not None
            action = await journal.reader.answer(ask)
        if self._own is not None:
            self._own.spoilt = view.spoilt
        return action

    def _own_place(self, chain: RoundChain, branches: Branches) -> StoredObject | None:
        """Return the own contribution that no manifest lists yet, and learn from it how the store's clock goes."""
        own = self._own
        if own is None:
            return None
        place = branches.listing.contributions.get(chain.path_of(self.services.peers.id, own.round))
        if place is not None and own.written_at is not None:
            self.bucket.on_time(place.modified_at, own.written_at)
            own.written_at = None  # others may overwrite it
        return place

    async def _save(self, chain: RoundChain, snapshot: Snapshot | None) -> None:
        """Write the state, if there is one, and delete what nobody needs any more."""
        with suppress(BucketError):  # the next writer saves the next one
            if snapshot is not None:
                await self._journal.write_state(chain, snapshot)
        with suppress(BucketError):  # the keys of most members may not delete
            await self._journal.trim(chain.round)

    def _learn(self, closed: ClosedRound) -> None:
        """Take the round as the last one, and its members' figures: for the panel, and this peer's part of a round."""
        self._chain = closed.after
        self._last = closed
        self._members.on_round(closed)
        self._show_members()
        self._journal.reader.readings.forget(closed)

    def _show_members(self) -> None:
        self.progress.on_records(self._members.records(), now=loop_now())


def _keep_loss(vector: HostVector, codec: Codec, content: bytes) -> None:
    """Keep as error feedback what the contribution that is in the bucket lacks."""
    feedback = vector.feedback
    values = vector.values
    if feedback is None:
        return
    feedback.cut_off(0, values, np.zeros_like(values))
    if content:
        for span, piece in decode(codec, memoryview(content), len(values)):
            feedback.cut_off(span.start, values[span], piece)


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
    how = "in a bucket, pass swarm.optimizer(…, local_steps=30, compression='sparseloco')"
    require(
        settings.local_steps > 1,
        f"local_steps={settings.local_steps}: {how}; each step would take several requests",
    )
    require(settings.compression != "adaptive", f"compression='adaptive' is for runs over links: {how}")
