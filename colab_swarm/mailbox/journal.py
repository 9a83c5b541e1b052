"""Reads, checks, signs and writes the objects of one model of a run. Repeats requests while a store is away."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np

from colab_swarm.errors import BucketAway, BucketError, PeerError, ProtocolError, StateError, require
from colab_swarm.events import EventLog, Fault, Notice, PeerRefused
from colab_swarm.mailbox.bucket import Bucket, StoredObject
from colab_swarm.mailbox.chain import WINDOW, RoundChain, StateHead
from colab_swarm.mailbox.contributions import StoredContribution, encoded_bytes, mean_of, norm_of
from colab_swarm.mailbox.decide import LEAST_PAUSE_S, MOST_PAUSE_S, ClosedRound, RoundListing, Seen, standing
from colab_swarm.mailbox.objects import (
    CARD,
    HEADER_BYTES,
    LEFT,
    MANIFEST,
    PLACE,
    STATE_PLACE,
    Card,
    Farewell,
    H,
    PseudoGradient,
    RoundManifest,
    content_digest,
    require_version,
    round_of,
    seal,
    start_bytes,
    unseal,
    unseal_start,
)
from colab_swarm.net.peers import PeerId, Role, remember
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.chunks import Manifest, Snapshot
from colab_swarm.tensors.codecs import Floats, codec_of
from colab_swarm.training.records import LINEAGE_BYTES
from colab_swarm.training.settings import PeerServices, TrainingSettings, most_state_bytes

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
READS_AT_ONCE = 16
LISTED_ROUNDS = 16  # a peer sees other branches that are at most this many rounds behind it
_MAX_TOLD = 1000
RoleOf: TypeAlias = Callable[[bytes, bytes, float], Role]
"""``role_of(key, membership, at)`` returns a member's role at a time, or raises `PeerError` if there is none."""


class Statements:
    """Reads the statements that training members wrote in a ``bucket`` about the model of ``prefix``."""

    def __init__(self, bucket: Bucket, prefix: str, role_of: RoleOf) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._role_of = role_of

    def opened(self, place: StoredObject, data: bytes | None, kind: type[H]) -> tuple[H, memoryview]:
        """Return the statement and content of an object; raise `PeerError` or ValueError if it does not count."""
        require(data is not None, "it is not there", ProtocolError)
        statement, content = unseal(data or b"", kind)
        self._require_author(place, statement)
        return statement, content

    async def head(self, place: StoredObject, kind: type[H]) -> H | None:
        """Read only the start of an object; return its statement, or None if it is invalid."""
        data = await self._start(place, HEADER_BYTES)
        end = start_bytes(data)
        if len(data) < end <= min(place.size_bytes, kind.most_bytes):
            data = await self._start(place, end)
        try:
            statement, _ = unseal_start(data, kind)
            self._require_author(place, statement)
        except (PeerError, ValueError):
            return None
        return statement

    async def card(self) -> Card | None:
        """Return the card with the peers' agreement, or None if there is no card.

        Raises `ProtocolError` if the card cannot be read.
        """
        places = [place for place in await self._bucket.list("card") if place.path == CARD]
        if not places:
            return None
        data = await self._start(places[0], Card.most_bytes)
        require_version(data)
        try:
            card, _ = self.opened(places[0], data, Card)
        except (PeerError, ValueError) as error:
            raise ProtocolError(f"{CARD} in {self._bucket.address} is damaged: {error}") from error
        return card

    async def _start(self, place: StoredObject, most_bytes: int) -> bytes:
        """Return the bytes of an object, at most the first ``most_bytes``."""
        if place.size_bytes <= most_bytes:
            return await self._bucket.read(place.path) or b""
        return await self._bucket.read(place.path, most_bytes) or b""

    def _require_author(self, place: StoredObject, statement: H) -> None:
        role = self._role_of(statement.key, statement.membership, place.modified_at)
        require(statement.prefix == self._prefix, "it is of another model", ProtocolError)
        require(role >= Role.WORKER, "its writer is no member that trains", ProtocolError)
        is_own = statement.path_part in place.path
        require(is_own, "it is another member's, or another round's", ProtocolError)


class Journal:
    """Reads what the members of a collaboration have written in a ``bucket``, and writes this peer's objects.

    ``until()`` returns the loop time until which this peer waits for a bucket that does not answer.
    """

    def __init__(
        self,
        bucket: Bucket,
        services: PeerServices,
        settings: TrainingSettings,
        numel: int,
        until: Callable[[], float],
    ) -> None:
        self.bucket = bucket
        self.codec = codec_of(settings.communication.compression)
        self.numel = numel
        self.statements = Statements(bucket, settings.prefix, services.peers.role_by)
        self.listed_at = loop_now()  # when the last look had its list of objects
        self._peers = services.peers
        self._events: EventLog = services.events
        self._prefix = settings.prefix
        self._until = until
        self._is_away = False
        self._forgave_at = -math.inf  # when faults were last forgotten
        self._told: dict[StoredObject, None] = {}  # objects whose fault was reported

    def signed(self, kind: type[H], content: bytes | memoryview = b"", **fields: Any) -> bytes:
        """Return the bytes of an object with a statement that this peer signs."""
        statement = kind(
            prefix=self._prefix,
            key=self._peers.public_key,
            membership=self._peers.membership,
            content=content_digest(content) if content else b"",
            **fields,
        )
        return seal(statement.signed(self._peers.sign), content)

    async def patiently(
        self, ask: Callable[P, Coroutine[Any, Any, T]], *given: P.args, **more: P.kwargs
    ) -> T:
        """Repeat a request until the bucket answers; raise `BucketError` if the bucket refuses this peer.

        Raises `BucketAway` if the bucket does not answer before ``until()``.
        """
        pause_s = LEAST_PAUSE_S
        while True:
            try:
                answer = await ask(*given, **more)
            except BucketAway as error:
                if loop_now() >= self._until():
                    raise
                if not self._is_away:
                    self._events.emit(Fault(loop_now(), "the bucket", f"{error}; it is asked again"))
                self._is_away = True
                await asyncio.sleep(min(pause_s, self._until() - loop_now()))
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
                continue
            if self._is_away:
                self._is_away = False
                self._events.emit(Notice(loop_now(), "the bucket answers again"))
            return answer

    async def agreed_card(self, own: bytes) -> Card:
        """Return the card that the peers of this model have agreed on. The first peer writes its ``own`` card."""
        await self.bucket.create(CARD, own)
        card = await self.statements.card()
        if card is None:
            raise BucketError(f"{self.bucket.address} does not show {CARD}, which this peer has written")
        return card

    async def look(self, chain: RoundChain, seen: Seen) -> None:
        """List the last rounds, and read all objects that a decision on the chain's next round needs."""
        first = max(chain.round - LISTED_ROUNDS, 0)
        places = await self.patiently(self.bucket.list, "rounds", f"rounds/{first:08d}")
        self.listed_at = loop_now()
        if self.listed_at > self._forgave_at + chain.grace_s:
            # Read objects with faults again: the answer may have been cut off, or a synced folder may be complete now.
            self._forgave_at = self.listed_at
            seen.faults.clear()
        seen.listing = RoundListing.of(places)
        await self._read_for(chain, seen)

    async def follow(self, chain: RoundChain, seen: Seen) -> AsyncIterator[ClosedRound]:
        """Yield the closed rounds after ``chain``, in order."""
        await self.look(chain, seen)
        while (closed := standing(chain, seen)) is not None:
            yield closed
            chain = closed.after
            seen.forget(chain)
            await self._read_for(chain, seen)

    async def _read_for(self, chain: RoundChain, seen: Seen) -> None:
        # Not all together, because all would be in memory before the first is checked.
        turns = asyncio.Semaphore(READS_AT_ONCE)

        async def read_in_turn(place: StoredObject) -> None:
            async with turns:
                await self._read(place, seen)

        await asyncio.gather(*map(read_in_turn, seen.unread(chain)))

    async def _read(self, place: StoredObject, seen: Seen) -> None:
        name = place.path.rpartition("/")[2]
        try:
            if name.startswith(MANIFEST):
                data, manifest, _ = await self.whole(place, RoundManifest)
                seen.manifests[place] = manifest, content_digest(data)
            elif name.endswith(LEFT):
                _, seen.farewells[place], _ = await self.whole(place, Farewell)
            else:
                seen.contributions[place] = await self.contribution(place)
        except (PeerError, ValueError) as error:
            seen.faults[place] = str(error)
            self.tell(place, str(error))

    async def contribution(self, place: StoredObject) -> StoredContribution:
        """Read a contribution; raise `PeerError` or ValueError if it does not count."""
        content_bytes = encoded_bytes(self.codec, self.numel)
        data, head, content = await self.whole(place, PseudoGradient, content_bytes)
        norm = await asyncio.to_thread(norm_of, self.codec, content, self.numel)
        return StoredContribution(place, head, content, content_digest(data), norm)

    async def whole(
        self, place: StoredObject, kind: type[H], content_bytes: int = 0
    ) -> tuple[bytes, H, memoryview]:
        """Return an object, its statement and its content; raise `PeerError` or ValueError if it does not count."""
        require(place.size_bytes > content_bytes, "it is cut off", ProtocolError)
        require(place.size_bytes <= kind.most_bytes + content_bytes, "it is too large", ProtocolError)
        data = await self.patiently(self.bucket.read, place.path)
        statement, content = self.statements.opened(place, data, kind)
        return data or b"", statement, content

    def tell(self, place: StoredObject, fault: str, author: PeerId | None = None) -> None:
        """Report once an object that does not count. ``author`` is the member that signed it, if known."""
        if place in self._told:
            return
        remember(self._told, place, None, _MAX_TOLD)
        logger.info("%s does not count: %s", place.path, fault)
        if author is None:
            self._events.emit(Fault(loop_now(), "the bucket", f"{place.path} does not count: {fault}"))
        else:
            self._events.emit(PeerRefused(loop_now(), author.hex(), place.path, fault))

    def mean(self, closed: ClosedRound, out: Floats) -> Floats:
        return mean_of(closed.manifest.entries, closed.contributions, self.codec, out)

    async def leave(self, chain: RoundChain) -> None:
        """Write a farewell, so that no round waits for this peer."""
        path = f"{chain.folder}/{self._peers.id.hex()}{LEFT}"
        await self.bucket.create(path, self.signed(Farewell, base=chain.base))

    async def first_or_newest_state(
        self, own: Callable[[], Snapshot], is_distrusted: Callable[[PeerId], bool]
    ) -> tuple[RoundChain, Snapshot | None]:
        """Return the chain at the newest readable state, and this state.

        If a distrusted member wrote the newest state, prefer the state before it. If the bucket has no state, write
        this peer's ``own`` state as the first state, and return None as the state. Raises `StateError` if there are
        states, but none can be read.
        """
        while True:
            places = await self.states()
            distrusted = [await self._is_by(place, is_distrusted) for place in places[:2]]
            if distrusted == [True, False]:
                # The members keep all rounds since the last but one state.
                places[:2] = [places[1], places[0]]
            newest = await self.newest_state(places)
            if newest is not None:
                return newest
            first = await asyncio.to_thread(own)
            step = first.manifest.step
            chain = RoundChain(step, {step: first.root}, closed_at=self.bucket.now())
            if await self.write_state(chain, first):
                return chain, None
            await asyncio.sleep(LEAST_PAUSE_S)

    async def newest_state(
        self, places: list[StoredObject], left: Mapping[int, str] | None = None
    ) -> tuple[RoundChain, Snapshot] | None:
        """Return the chain at the newest of these states that can be read, and this state; None if there is none.

        ``left`` has the folders of a branch by round. If given, skip states that lead to this branch. Without
        ``left``, raise `StateError` if there are states, but none can be read.
        """
        fault = ""
        for place in places:
            if left is not None and not await self._leads_elsewhere(place, left):
                continue
            try:
                return await self._state(place)
            except (PeerError, StateError, ValueError) as error:
                fault = str(error)
                self.tell(place, fault)
        require(left is not None or not places, f"no state in the bucket can be read: {fault}", StateError)
        return None

    async def _is_by(self, place: StoredObject, is_distrusted: Callable[[PeerId], bool]) -> bool:
        """Return True if a distrusted member wrote a state."""
        head = await self.statements.head(place, StateHead)
        return head is not None and is_distrusted(head.member)

    async def _leads_elsewhere(self, place: StoredObject, left: Mapping[int, str]) -> bool:
        head = await self.statements.head(place, StateHead)
        if head is None:
            return False
        chain = head.chain
        async for closed in self.follow(chain, Seen()):
            chain = closed.after
        return left.get(chain.round) != chain.folder

    async def _state(self, place: StoredObject) -> tuple[RoundChain, Snapshot]:
        fits = 0 < place.size_bytes <= most_state_bytes(self.numel)
        require(fits, "its size is wrong", ProtocolError)
        data = await self.bucket.read(place.path)
        head, blob = self.statements.opened(place, data, StateHead)
        manifest = Manifest.decode(head.manifest)
        values = np.frombuffer(blob, np.uint8).copy()
        state = await asyncio.to_thread(Snapshot.of, manifest.subject, manifest.step, values)
        chain = head.chain
        fits = state.head == head.manifest and manifest.step == chain.round
        require(fits, "its state is another", ProtocolError)
        follows = manifest.subject == chain.base[:LINEAGE_BYTES]
        if chain.is_first:
            follows = state.root == chain.base
        require(follows, "it is not of the rounds before it", ProtocolError)
        return chain, Snapshot(state.manifest, state.blob, (head.member,))

    async def states(self) -> list[StoredObject]:
        """Return the places of states, the newest first."""
        places = await self.bucket.list("states")
        return [place for place in reversed(places) if STATE_PLACE.fullmatch(place.path)]

    async def write_state(self, chain: RoundChain, snapshot: Snapshot) -> bool:
        """Write a state; return False if another peer has written it before."""
        blob = memoryview(snapshot.blob.data)
        data = await asyncio.to_thread(self.signed, StateHead, blob, chain=chain, manifest=snapshot.head)
        return await self.bucket.create(chain.state_path, data)

    async def trim(self, round: int) -> None:
        """Keep the two newest states up to ``round``; delete older states, and rounds that the kept states do not need.

        Keep all objects that are newer than the older of these two states.
        """
        states = [place for place in await self.states() if round_of(place.path) <= round]
        if len(states) < 2:
            return
        kept = states[1]
        first = round_of(kept.path) - 1 - WINDOW
        rounds = [place for place in await self.bucket.list("rounds") if PLACE.fullmatch(place.path)]
        old = [place.path for place in states[2:] if place.modified_at < kept.modified_at]
        for place in rounds:
            # The objects of another branch that is behind were written later, so they stay.
            if round_of(place.path) < first and place.modified_at < kept.modified_at:
                old.append(place.path)
        await self.bucket.delete(old)
