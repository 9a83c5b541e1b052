"""The objects of one model of a run: read and checked, signed and written, however long it takes."""

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
LISTED_ROUNDS = 16  # so far behind this peer is a branch that it can see
_MAX_TOLD = 1000
RoleOf: TypeAlias = Callable[[bytes, bytes, float], Role]
"""``role_of(key, membership, at)``: a member's role at a time; raises `PeerError` if it is none."""


class Statements:
    """What members that train wrote in a ``bucket`` about the model of ``prefix``."""

    def __init__(self, bucket: Bucket, prefix: str, role_of: RoleOf) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._role_of = role_of

    def opened(self, place: StoredObject, data: bytes | None, kind: type[H]) -> tuple[H, memoryview]:
        """Return a whole object's statement and content. Raises `PeerError` or ValueError."""
        require(data is not None, "it is not there", ProtocolError)
        statement, content = unseal(data or b"", kind)
        self._require_author(place, statement)
        return statement, content

    async def head(self, place: StoredObject, kind: type[H]) -> H | None:
        """Return the statement of an object by its start; None if it is something else."""
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
        """Return what the peers have agreed on, if they have. Raises `ProtocolError` if it cannot be read."""
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
        """Return an object, of a large one its first bytes."""
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
    """What the members of a collaboration have written, and this one writes, in a ``bucket``.

    ``until()`` is when this peer no longer waits for a bucket that is away, loop time.
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
        self._told: dict[StoredObject, None] = {}  # objects of which a fault was reported

    def signed(self, kind: type[H], content: bytes | memoryview = b"", **fields: Any) -> bytes:
        """Return an object of this peer."""
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
        """Ask the bucket until it answers; raises `BucketError` if it refuses this peer."""
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
        """Return what the peers of this model have agreed on; ``own`` if this peer is the first."""
        await self.bucket.create(CARD, own)
        card = await self.statements.card()
        if card is None:
            raise BucketError(f"{self.bucket.address} does not show {CARD}, which this peer has written")
        return card

    async def look(self, chain: RoundChain, seen: Seen) -> None:
        """Read all that a decision on the chain's next round needs."""
        first = max(chain.round - LISTED_ROUNDS, 0)
        places = await self.patiently(self.bucket.list, "rounds", f"rounds/{first:08d}")
        self.listed_at = loop_now()
        if self.listed_at > self._forgave_at + chain.grace_s:
            # An answer may have been cut off, and a synced folder may show the whole file by now.
            self._forgave_at = self.listed_at
            seen.faults.clear()
        seen.listing = RoundListing.of(places)
        await self._read_for(chain, seen)

    async def follow(self, chain: RoundChain, seen: Seen) -> AsyncIterator[ClosedRound]:
        """Yield the rounds that are over, from this place on."""
        await self.look(chain, seen)
        while (closed := standing(chain, seen)) is not None:
            yield closed
            chain = closed.after
            seen.forget(chain)
            await self._read_for(chain, seen)

    async def _read_for(self, chain: RoundChain, seen: Seen) -> None:
        # All at once would be in memory before any of them is judged.
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
        """Read a contribution. Raises `PeerError` or ValueError if it does not count."""
        content_bytes = encoded_bytes(self.codec, self.numel)
        data, head, content = await self.whole(place, PseudoGradient, content_bytes)
        norm = await asyncio.to_thread(norm_of, self.codec, content, self.numel)
        return StoredContribution(place, head, content, content_digest(data), norm)

    async def whole(
        self, place: StoredObject, kind: type[H], content_bytes: int = 0
    ) -> tuple[bytes, H, memoryview]:
        """Return an object, its statement and its content. Raises `PeerError` or ValueError."""
        require(place.size_bytes > content_bytes, "it is cut off", ProtocolError)
        require(place.size_bytes <= kind.most_bytes + content_bytes, "it is too large", ProtocolError)
        data = await self.patiently(self.bucket.read, place.path)
        statement, content = self.statements.opened(place, data, kind)
        return data or b"", statement, content

    def tell(self, place: StoredObject, fault: str, author: PeerId | None = None) -> None:
        """Report an object that does not count, once; ``author`` signed it, where that is known."""
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
        """Say that no round need wait for this peer."""
        path = f"{chain.folder}/{self._peers.id.hex()}{LEFT}"
        await self.bucket.create(path, self.signed(Farewell, base=chain.base))

    async def first_or_newest_state(self, own: Callable[[], Snapshot]) -> tuple[RoundChain, Snapshot | None]:
        """Return where the run was and its state then, the newest that can be read.

        Without any, this peer's ``own`` becomes the first one; then the state is None. Raises `StateError` if none
        can be read.
        """
        while True:
            newest = await self.newest_state(await self.states())
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
        """Return the newest of these states that can be read, and its chain; None if there is none.

        It must not lead to the branch that this peer has ``left``, of which this has the folders by round.
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
        """Write a state; False if another peer was first."""
        blob = memoryview(snapshot.blob.data)
        data = await asyncio.to_thread(self.signed, StateHead, blob, chain=chain, manifest=snapshot.head)
        return await self.bucket.create(chain.state_path, data)

    async def trim(self, round: int) -> None:
        """Delete what is older than the last state but one before ``round``, and was written before it."""
        states = [place for place in await self.states() if round_of(place.path) <= round]
        if len(states) < 2:
            return
        kept = states[1]
        first = round_of(kept.path) - 1 - WINDOW
        rounds = [place for place in await self.bucket.list("rounds") if PLACE.fullmatch(place.path)]
        old = [place.path for place in states[2:] if place.modified_at < kept.modified_at]
        for place in rounds:
            # Of another branch that is behind, all is newer.
            if round_of(place.path) < first and place.modified_at < kept.modified_at:
                old.append(place.path)
        await self.bucket.delete(old)
