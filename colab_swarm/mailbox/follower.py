"""Follow the rounds of a bucket: contribute, and wait until a round is over.

In a *look*, a peer lists the objects of the last rounds, and reads the objects that a decision needs.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from colab_swarm.errors import PeerError
from colab_swarm.events import EventLog, Notice, Waited
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.chain import WINDOW, RoundChain
from colab_swarm.mailbox.contributions import encode, pieces
from colab_swarm.mailbox.decide import (
    LEAST_PAUSE_S,
    Close,
    ClosedRound,
    Decision,
    Follow,
    LoadState,
    RoundListing,
    Seen,
    Wait,
    decide,
    late_s,
    others_elsewhere,
)
from colab_swarm.mailbox.journal import LISTED_ROUNDS, Journal
from colab_swarm.mailbox.objects import PseudoGradient, RoundManifest
from colab_swarm.net.patience import Patience
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.codecs import Codec
from colab_swarm.tensors.vector import Vector
from colab_swarm.training.records import ProgressRecord, StateSketch
from colab_swarm.training.settings import RoundInput

logger = logging.getLogger(__name__)
FRESH_S = 1.0  # maximum age of the look by which a round is closed
_MOST_ROUNDS = 32.0  # maximum number of rounds for which a late member is not awaited
TELL_S = 3.0  # how long a peer waits for a late round before it tells the user


@dataclass
class _Written:
    """This peer's contribution in the bucket, until a manifest lists it or the contribution is too old."""

    round: int
    path: str
    # The whole object, to write it again if it is deleted.
    data: bytes
    # Its encoded values, which show what compression cut off; empty if an earlier session wrote the object.
    content: bytes
    # When it was written by this peer's clock; None once the store's time of the object is known.
    written_at: float | None = None
    # The object as the last look showed it.
    place: StoredObject | None = None


@dataclass(frozen=True)
class Counted:
    """The effect of a closed round on a contribution."""

    closed: ClosedRound
    counted: bool  # True if the round lists the contribution
    over: bool  # True if no later round can list it


class ChainFollower:
    """Follows the rounds of a bucket. ``until()`` returns the loop time until which the trainer waits."""

    def __init__(
        self,
        journal: Journal,
        events: EventLog,
        me: PeerId,
        until: Callable[[], float],
        name_of: Callable[[PeerId], str],
    ) -> None:
        # The chain of this peer. None if it is not read yet, or if most members build on another branch.
        self.chain: RoundChain | None = None
        # A state that leads to those members, until `begin`.
        self.later: tuple[RoundChain, Snapshot] | None = None
        # What this peer has read of the last rounds.
        self.seen = Seen()
        # The folders of the last rounds that this peer has followed since `begin`.
        self._branch: dict[int, str] = {}
        # Whether some members were on another branch at the last look.
        self.has_others_elsewhere = False
        # States that were tried already, to find one that leads to those members.
        self._tried: list[StoredObject] = []
        # Minimum number of contributors with which this peer closes the run's first round.
        self.min_peers = 1
        self._journal = journal
        self._me = me
        self._events = events
        # Here "seconds" are numbers of rounds.
        self._patience = Patience[PeerId](1.0, longest_s=_MOST_ROUNDS)
        self._until = until
        self._name_of = name_of
        self._own: _Written | None = None
        # When this peer learnt of the last manifest.
        self._followed_at = loop_now()
        # How long the last contribution took to upload.
        self._upload_s = 0.0
        # The last round that the user was told is late, and the last one whose contribution was written again.
        self._late_round = -1
        self._restored_round = -1

    @property
    def is_awaited(self) -> bool:
        """True if the other members wait for this peer until it says farewell."""
        is_listed = self.chain is not None and self._me in self.chain.members
        return is_listed or self._own is not None

    def begin(self, chain: RoundChain) -> None:
        """Continue from the round of a state."""
        self.chain = chain
        self.later = None
        self._branch = chain.folders
        self._own = None
        self._on_chain(chain)

    def on_round(self, closed: ClosedRound) -> None:
        """Continue with the next round, after the mean of this one was applied."""
        self.chain = closed.after
        oldest = closed.after.round - LISTED_ROUNDS
        branch = self._branch | closed.after.folders
        self._branch = {round: folder for round, folder in branch.items() if round >= oldest}
        self._on_chain(closed.after)

    def _on_chain(self, chain: RoundChain) -> None:
        self.seen.forget(chain)
        self._followed_at = loop_now()
        if not chain.is_first:
            self.min_peers = 1

    async def write(
        self, contribution: RoundInput, record: ProgressRecord, sketch: StateSketch | None
    ) -> int:
        """Write the contribution, and return its round.

        If a manifest may still list an earlier contribution, write nothing and return the earlier contribution's round.
        """
        chain = self.chain
        journal = self._journal
        assert chain is not None
        if not contribution.weight:
            return chain.round
        earlier = self._own
        vector = contribution.vector
        if earlier is not None and chain.may_count(self._me, earlier.round):
            await asyncio.to_thread(_keep_loss, vector, journal.codec, earlier.content)
            return earlier.round
        content = await asyncio.to_thread(encode, journal.codec, vector)
        data = journal.signed(
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
        path = f"{chain.folder}/{self._me.hex()}"
        began_at = loop_now()
        # Set before the upload, because the store's answer may get lost.
        own = _Written(chain.round, path, data, content)
        self._own = own
        is_new = await journal.patiently(journal.bucket.create, path, data)
        self._upload_s = loop_now() - began_at
        if is_new:
            own.written_at = loop_now()
            return chain.round
        places = await journal.patiently(journal.bucket.list, chain.folder)
        place = RoundListing.of(places).at(path)
        if place is not None:
            with suppress(PeerError, ValueError):
                own.data, _, _ = await journal.whole(place, PseudoGradient, len(content))
        if own.data != data:
            # An earlier session of this peer has contributed to this round, and that contribution counts.
            own.content = b""
            await asyncio.to_thread(_keep_loss, vector, journal.codec, b"")
        return chain.round

    async def next_round(self, contribution: RoundInput, round: int) -> Counted | None:
        """Wait until a round is over, or close it if this is due.

        Returns the effect of the round on this peer's contribution to ``round``. Returns None if the trainer does not
        wait any longer, or if this peer must catch up.
        """
        chain = self.chain
        journal = self._journal
        assert chain is not None
        began_at = loop_now()
        while True:
            action = await self._decide(chain)
            pause_s = LEAST_PAUSE_S
            match action:
                case Follow(closed):
                    self._settle(chain, closed)
                    counted = closed.counts(self._me, round)
                    is_too_old = closed.manifest.round >= round + WINDOW
                    over = counted or not contribution.weight or is_too_old
                    if over:
                        self._own = None
                    return Counted(closed, counted, over)
                case LoadState():
                    self.chain = None
                    return None
                case Close():
                    for place, fault in action.faults.items():
                        journal.tell(place, fault, self.seen.author_of(place))
                    data = journal.signed(
                        RoundManifest, round=chain.round, base=chain.base, entries=action.entries
                    )
                    if await journal.patiently(journal.bucket.create, action.path, data):
                        continue
                case Wait():
                    pause_s = action.pause_s
                    self._tell_late(chain, action, loop_now() - began_at)
            if loop_now() >= self._until():
                return None
            await asyncio.sleep(min(pause_s, self._until() - loop_now()))

    async def _decide(self, chain: RoundChain) -> Decision:
        """Look at the bucket, and return what to do next.

        If most members build on another branch, search for a state that leads to them.
        """
        journal = self._journal
        await journal.look(chain, self.seen)
        was_restored = await self._restore()
        if was_restored or loop_now() > journal.listed_at + FRESH_S:
            # While this peer was reading, others may have written contributions that a manifest must list, too.
            await journal.look(chain, self.seen)
        self._find_own()
        self.has_others_elsewhere = bool(others_elsewhere(chain, self._branch, self.seen, self._me))
        may_leave = True
        while True:
            action = decide(
                chain,
                self.seen,
                journal.bucket.now(),
                me=self._me,
                branch=self._branch,
                min_peers=self.min_peers,
                left_out=self._left_out(chain),
                may_leave=may_leave,
            )
            if not isinstance(action, LoadState):
                return action
            states = await journal.patiently(journal.states)
            if states != self._tried:
                self._tried = states
                self.later = await journal.patiently(journal.newest_state, states, self._branch)
            if self.later is not None:
                text = f"the others went on without this peer, or on another branch: it gives up round {chain.round}"
                logger.warning("%s", text)
                self._events.emit(Notice(loop_now(), text, logged=True))
                return action
            may_leave = False
            await journal.look(chain, self.seen)

    def _left_out(self, chain: RoundChain) -> set[PeerId]:
        return {member for member in chain.members if not self._patience.is_awaited(member, chain.round)}

    def _settle(self, chain: RoundChain, closed: ClosedRound) -> None:
        """Stop waiting for members for which the round had to wait; wait again for members that were in time."""
        own = self._own
        contributed_at = 0.0
        if own is not None and own.place is not None:
            contributed_at = own.place.modified_at
        awaited = set(chain.members) - self._left_out(chain) - {self._me}
        waited_s = late_s(chain, self.seen, closed, awaited, contributed_at)
        for member in self._patience.on_late(waited_s.keys(), {self._me, *awaited}, closed.after.round):
            what = "its contribution to a round"
            self._events.emit(Waited(loop_now(), member.hex(), what, waited_s[member]))
        for entry in closed.manifest.entries:
            is_in_time = entry.round == chain.round and entry.member not in waited_s
            if is_in_time:
                self._patience.on_counted(entry.member)

    def _tell_late(self, chain: RoundChain, wait: Wait, waited_s: float) -> None:
        """Tell the user once for which members a late round waits."""
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

    async def _restore(self) -> bool:
        """Write this peer's contribution again if it was deleted or damaged; return True if it was written."""
        own = self._own
        journal = self._journal
        listing = self.seen.listing
        if own is None or listing.latest > own.round + WINDOW:
            # The other members are further, and may have deleted old rounds.
            return False
        place = listing.at(own.path)
        if place is not None and place not in self.seen.faults:
            return False
        if place is None:
            what = "deleted from"
            written = await journal.patiently(journal.bucket.create, own.path, own.data)
        else:
            what = "damaged in"
            await journal.patiently(journal.bucket.replace, own.path, own.data)
            written = True
        was_there = own.place is not None or place is not None
        if written and was_there and own.round != self._restored_round:
            self._restored_round = own.round
            text = (
                f"this peer's contribution to round {own.round} was {what} {journal.bucket.address}, and is "
                "written again: does somebody's program or a rule of the store delete objects there?"
            )
            logger.warning("%s", text)
            self._events.emit(Notice(loop_now(), text, logged=True))
        return written

    def _find_own(self) -> None:
        """Find this peer's contribution in the last look, and set the store's clock by it."""
        own = self._own
        if own is None:
            return
        place = self.seen.listing.at(own.path)
        if place is None:
            return
        own.place = place
        if own.written_at is not None:
            self._journal.bucket.on_time(place.modified_at, own.written_at)
            own.written_at = None  # only once, because others may overwrite the object


def _keep_loss(vector: Vector, codec: Codec, content: bytes) -> None:
    """Keep as error feedback what the encoded ``content`` lacks of the vector. If it is empty, keep all values."""
    for span, piece in pieces(codec, memoryview(content), vector.numel):
        vector.keep_loss(span.start, span.stop, codec, piece)
