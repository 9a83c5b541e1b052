"""A peer's way along a bucket's rounds: it contributes, and waits until a round is over."""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from colab_swarm.events import EventLog, Notice, Waited
from colab_swarm.mailbox.branches import Branches
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.contributions import ClosedRound, encode, pieces
from colab_swarm.mailbox.journal import Journal, States
from colab_swarm.mailbox.rounds import WINDOW, PseudoGradient, RoundChain
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
from colab_swarm.net.patience import Patience
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.codecs import Codec
from colab_swarm.tensors.vector import Vector
from colab_swarm.training.records import ProgressRecord, StateSketch
from colab_swarm.training.settings import RoundInput

logger = logging.getLogger(__name__)
FRESH_S = 1.0  # age of the look by which a round is closed, at most
_LEAST_PATIENCE_S = 2.5  # beyond the usual time of a round
_MOST_ROUNDS = 32.0  # in which a late member is not awaited
TELL_S = 3.0  # of a wait for a late round, before a word on it


@dataclass
class _Written:
    """This peer's contribution in the bucket, until a manifest lists it or it is too old."""

    round: int
    path: str
    # The whole object, to write it again if it is deleted.
    data: bytes
    # Its values, to know what compression cut off; empty if an earlier session wrote it.
    content: bytes
    # When it was written, by this peer's clock. None: an earlier session wrote it, or the store's time
    # of it is known.
    written_at: float | None
    # By the last look; None: not there.
    place: StoredObject | None = None


@dataclass(frozen=True)
class Counted:
    """What a round that is over means for a contribution."""

    closed: ClosedRound
    counted: bool  # it lists the contribution
    over: bool  # no later round will
    spoilt: bool  # another member has overwritten the contribution


class ChainFollower:
    """Follows the rounds of a bucket. ``until()`` is when the trainer waits no longer, loop time.

    What changes, and when:

    - ``chain``: `begin` sets it, each `on_round` moves it on; None: not read yet, or a look found that
      others left it behind.
    - ``later``: a state that a look found; `begin` forgets it.
    - ``min_peers``: contributors without whom this peer closes no round. `BucketRounds` sets it, and
      the first `on_round` with so many resets it to 1.
    - ``_last``: the round before the chain's, by each `on_round`; None after `begin`.
    - ``_own``: `write` sets it, each look its fields; None again when it is over, and after `begin`.
    - ``_followed_at``: when this peer learnt of the last manifest, by `begin` and `on_round`.
    - ``_upload_s``: how long `write` took to upload the last contribution.
    - ``_listed_at``: when the last look had its list of objects.
    - ``_late_round``: the last round of which `_tell_late` said for whom it waits.
    - ``_restored_round``: the last round of which `_restore` said that the contribution was deleted.
    """

    def __init__(
        self,
        journal: Journal,
        states: States,
        events: EventLog,
        me: PeerId,
        until: Callable[[], float],
        name_of: Callable[[PeerId], str],
    ) -> None:
        self.chain: RoundChain | None = None
        self.later: tuple[RoundChain, Snapshot] | None = None
        self.min_peers = 1
        self._journal = journal
        self._states = states
        self._me = me
        self._events = events
        # Its times are rounds.
        self._patience = Patience[PeerId](1.0, longest_s=_MOST_ROUNDS)
        self._until = until
        self._name_of = name_of
        self._last: ClosedRound | None = None
        self._own: _Written | None = None
        self._followed_at = loop_now()
        self._upload_s = 0.0
        self._late_round = -1
        self._restored_round = -1
        self._listed_at = loop_now()

    @property
    def is_awaited(self) -> bool:
        """True if the others wait for this peer until it says farewell."""
        is_listed = self.chain is not None and self._me in self.chain.members
        return is_listed or self._own is not None

    def begin(self, chain: RoundChain) -> None:
        """Go on from the round of a state."""
        self.chain = chain
        self.later = None
        self._last = None
        self._own = None
        self._followed_at = loop_now()

    def on_round(self, closed: ClosedRound) -> None:
        """Go on to the next round, after the mean of this one was applied."""
        self.chain = closed.after
        self._last = replace(closed, contributions={})
        self._followed_at = loop_now()
        if len(closed.after.members) >= self.min_peers:
            self.min_peers = 1

    async def write(
        self, contribution: RoundInput, record: ProgressRecord, sketch: StateSketch | None
    ) -> int:
        """Write the contribution, and return its round; one that is not listed yet goes first."""
        chain = self.chain
        journal = self._journal
        assert chain is not None
        if not contribution.weight:
            return chain.round
        own = self._own
        vector = contribution.vector
        if own is not None and chain.may_count(self._me, own.round):
            await asyncio.to_thread(_keep_loss, vector, journal.codec, own.content)
            return own.round
        content = await asyncio.to_thread(encode, journal.codec, vector)
        data = self._sealed(contribution, content, chain, record, sketch)
        began_at = loop_now()
        path, written = await journal.contribute(f"{chain.folder}/{self._me.hex()}", data)
        self._upload_s = loop_now() - began_at
        written_at: float | None = loop_now()
        if written != data:
            # A contribution of an earlier session counts.
            content = b""
            written_at = None
            await asyncio.to_thread(_keep_loss, vector, journal.codec, content)
        self._own = _Written(chain.round, path, written, content, written_at)
        return chain.round

    def _sealed(
        self,
        contribution: RoundInput,
        content: bytes,
        chain: RoundChain,
        record: ProgressRecord,
        sketch: StateSketch | None,
    ) -> bytes:
        return self._journal.signed(
            PseudoGradient,
            content,
            round=chain.round,
            base=chain.base,
            weight=contribution.weight,
            samples=contribution.samples,
            samples_per_s=record.samples_per_s,
            seconds=loop_now() - self._followed_at + self._upload_s,
            name=record.name[:100],
            loss=contribution.loss,
            rates=record.rates,
            sketch=sketch,
        )

    async def next_round(self, contribution: RoundInput, round: int) -> Counted | None:
        """Wait until a round is over, and say what it means for the contribution to ``round``.

        None if the trainer waits no longer, or this peer must catch up.
        """
        closed = await self._next()
        if closed is None:
            return None
        counted = closed.counts(self._me, round)
        spoilt = self._own is not None and self._own.place in self._journal.reader.readings.faults
        too_old = closed.manifest.round >= round + WINDOW
        over = counted or not contribution.weight or spoilt or too_old
        if over:
            self._own = None
        return Counted(closed, counted, over, spoilt)

    async def _next(self) -> ClosedRound | None:
        """Wait until the round is over, and close it if that is due.

        None if this peer waits no longer, or others went on without it, and it must catch up.
        """
        chain = self.chain
        journal = self._journal
        assert chain is not None
        close_at = -math.inf  # when this peer may write another manifest
        began_at = loop_now()
        while True:
            action = await self._decide(chain, close_at)
            pause_s = LEAST_PAUSE_S
            if isinstance(action, Close) and loop_now() > self._listed_at + FRESH_S:
                # This peer has read contributions since, and must list those that came meanwhile.
                continue
            match action:
                case Follow(closed):
                    return closed
                case LoadState():
                    self.chain = None
                    return None
                case Close(again_at=again_at):
                    if await journal.close(chain, action):
                        close_at = again_at
                        continue
                case Wait():
                    pause_s = action.pause_s
                    self._tell_late(chain, action, loop_now() - began_at)
            if loop_now() >= self._until():
                return None
            await asyncio.sleep(min(pause_s, self._until() - loop_now()))

    def _tell_late(self, chain: RoundChain, wait: Wait, waited_s: float) -> None:
        """Say once for whom a round waits that takes longer than usual."""
        if chain.round == self._late_round or not wait.late_members or waited_s < TELL_S:
            return
        self._late_round = chain.round
        names = ", ".join(map(self._name_of, sorted(wait.late_members)))
        text = (
            f"round {chain.round} waits for {names}, {waited_s:.0f} s so far: it goes on in {wait.most_s:.0f} s "
            "at the latest"
        )
        logger.warning("%s", text)
        self._events.emit(Notice(loop_now(), text, logged=True))

    async def _decide(self, chain: RoundChain, close_at: float) -> Decision:
        """Look at the bucket, and return what to do next."""
        journal = self._journal
        branches = await journal.look(chain)
        if await self._restore(branches):
            branches = await journal.look(chain)
        self._listed_at = loop_now()
        own = self._own_place(branches)
        view = RoundView(chain, branches, self._last, own, self.min_peers, self._patience_s)

        def ask(*, may_leave: bool = True) -> Decision:
            return view.next_action(journal.bucket.now(), close_at, may_leave=may_leave)

        action = await journal.reader.answer(ask)
        if isinstance(action, SeekState):
            self.later = await journal.patiently(self._states.best, chain.round, action.companions)
            if self.later is not None:
                return LoadState()
            action = await journal.reader.answer(partial(ask, may_leave=False))
        if isinstance(action, Follow):
            self._settle(view, action.closed)
        return action

    def _patience_s(self, member: PeerId) -> float:
        chain = self.chain
        assert chain is not None
        # One invitation admits any number of members: each round another one would be absent.
        rounds = [round for other, round in chain.listed if other == member]
        if len(rounds) < 2 or not self._patience.is_awaited(member, chain.round):
            return 0.0
        return max(_LEAST_PATIENCE_S, chain.pace_s / 2)

    def _settle(self, view: RoundView, closed: ClosedRound) -> None:
        """Leave out the members for which a round waited, and await those again that it lists in time."""
        round = closed.after.round
        awaited = {self._me, *closed.before.members}
        late_s = view.late_s(closed)
        unread_s = view.unread_s(closed)
        for what, waited_s in (
            ("its contribution to a round", late_s),
            ("a manifest that can be followed", unread_s),
        ):
            for member in self._patience.on_late(waited_s.keys(), awaited, round):
                self._events.emit(Waited(loop_now(), member.hex(), what, waited_s[member]))
        for entry in closed.manifest.entries:
            if entry.member not in late_s and entry.member not in unread_s:
                self._patience.on_counted(entry.member)

    async def _restore(self, branches: Branches) -> bool:
        """Write the own contribution again if somebody has deleted it; return whether that was so."""
        own = self._own
        journal = self._journal
        if own is None or branches.listing.at(own.path) is not None:
            return False
        # others went on, and may have deleted old rounds
        if branches.listing.latest > own.round + WINDOW:
            return False
        if not await journal.patiently(journal.bucket.create, own.path, own.data):
            return False
        own.written_at = loop_now()
        if own.round != self._restored_round:
            self._restored_round = own.round
            text = (
                f"this peer's contribution to round {own.round} was deleted from {journal.bucket.address}, and is "
                "written again: does somebody's program or a rule of the store delete objects there?"
            )
            logger.warning("%s", text)
            self._events.emit(Notice(loop_now(), text, logged=True))
        return True

    def _own_place(self, branches: Branches) -> StoredObject | None:
        """Return the own contribution that is not listed yet, and set the store's clock by it."""
        own = self._own
        if own is None:
            return None
        own.place = branches.listing.at(own.path)
        if own.place is not None and own.written_at is not None:
            self._journal.bucket.on_time(own.place.modified_at, own.written_at)
            own.written_at = None  # others may overwrite it
        return own.place


def _keep_loss(vector: Vector, codec: Codec, content: bytes) -> None:
    """Keep as error feedback what the contribution that is in the bucket, if it is known, lacks."""
    for span, piece in pieces(codec, memoryview(content), vector.numel):
        vector.keep_loss(span.start, span.stop, codec, piece)
