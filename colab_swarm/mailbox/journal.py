"""The objects of one model of a run: read, checked, signed and written. Peers lie; a fault is told of once."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import numpy as np

from colab_swarm.errors import BucketAway, PeerError, ProtocolError, StateError, require
from colab_swarm.events import Fault, Notice
from colab_swarm.mailbox.bucket import Bucket, StoredObject
from colab_swarm.mailbox.rounds import (
    CARD,
    HEADER_BYTES,
    LEFT,
    MISSING_S,
    MOST_MEMBERS,
    PLACE,
    STATE_PLACE,
    WINDOW,
    Card,
    ClosedRound,
    Farewell,
    H,
    Offer,
    PseudoGradient,
    RoundChain,
    RoundListing,
    RoundManifest,
    StateHead,
    content_digest,
    differs,
    encoded_bytes,
    entries_of,
    folder_of,
    mean_of,
    norm_of,
    seal,
    unseal,
)
from colab_swarm.net.peers import PeerId, Role, remember
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.chunks import Manifest, Snapshot
from colab_swarm.tensors.codecs import Floats, codec_of
from colab_swarm.training.settings import PeerServices, TrainingSettings, most_state_bytes

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
# between two looks at the bucket
LEAST_PAUSE_S = 0.5
MOST_PAUSE_S = 60.0
MANIFEST_BYTES = 1 << 20
MAX_REMEMBERED = 10_000


class Journal:
    """What the members of a collaboration have written, and this one writes, in a ``bucket``."""

    def __init__(
        self, bucket: Bucket, services: PeerServices, settings: TrainingSettings, numel: int
    ) -> None:
        self.bucket = bucket
        self._services = services
        self._prefix = settings.prefix
        self.codec = codec_of(settings.compression)
        self.numel = numel
        self.until = math.inf  # when this peer no longer waits for a bucket that is away
        self._away = False
        self._faulty: dict[StoredObject, str] = {}  # objects that do not count, and why
        self._read: dict[StoredObject, Offer] = {}
        self._gone: set[StoredObject] = set()  # farewells that were read

    def signed(self, kind: type[H], content: bytes | memoryview = b"", **fields: Any) -> bytes:
        peers = self._services.peers
        digest = content_digest(content) if content else b""
        statement = kind(
            prefix=self._prefix,
            key=peers.public_key,
            membership=peers.membership,
            content=digest,
            **fields,
        )
        return seal(statement.signed(peers.sign), content)

    def opened(self, data: bytes | None, kind: type[H], written_at: float) -> tuple[H, memoryview]:
        """Return a member's statement about this model, and its content; raises `ProtocolError` if it is none."""
        require(data is not None, "it is not there", ProtocolError)
        assert data is not None
        statement, content = unseal(data, kind)
        require(statement.prefix == self._prefix, "it is of another model", ProtocolError)
        role = self._services.peers.role_by(statement.key, statement.membership, written_at)
        require(role >= Role.WORKER, "its writer is no member that trains", ProtocolError)
        return statement, content

    async def patiently(
        self, ask: Callable[P, Coroutine[Any, Any, T]], *given: P.args, **more: P.kwargs
    ) -> T:
        """Ask the bucket until it answers; raises `BucketError` if it refuses this peer."""
        pause_s = LEAST_PAUSE_S
        while True:
            try:
                answer = await ask(*given, **more)
            except BucketAway as error:
                if loop_now() >= self.until:
                    raise
                if not self._away:
                    self._services.events.emit(Fault(loop_now(), "the bucket", f"{error}; it is asked again"))
                self._away = True
                await asyncio.sleep(min(pause_s, self.until - loop_now()))
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
                continue
            if self._away:
                self._away = False
                self._services.events.emit(Notice(loop_now(), "the bucket answers again"))
            return answer

    async def read_card(self, own: bytes) -> Card:
        """Return what the peers of this model have agreed on; ``own`` if this peer is the first."""
        await self.bucket.create(CARD, own)
        found = {one.path: one.modified_at for one in await self.bucket.list("card")}
        data = await self.bucket.read(CARD)
        return self.opened(data, Card, found.get(CARD, self.bucket.now()))[0]

    async def read_state(self, own: Callable[[], Snapshot]) -> tuple[RoundChain, Snapshot | None]:
        """Return where the run was and its state then, the newest that can be read.

        Without any, this peer's ``own`` becomes the first one; then the state is None.
        """
        if (newest := await self.newest_state()) is not None:
            return newest
        first = await asyncio.to_thread(own)
        chain = RoundChain.begin(first.manifest.step, first.root, now=self.bucket.now())
        if await self.write_state(chain, first):
            return chain, None
        return await self.read_state(own)

    async def newest_state(self, after: int = -1) -> tuple[RoundChain, Snapshot] | None:
        """Return the newest state that can be read of those later than a round, if there are any, and its chain."""
        found = await self._states()
        limit = most_state_bytes(self.numel)
        for round, one in reversed(found.items()):
            if round <= after or one in self._faulty:
                continue
            try:
                require(one.size_bytes <= limit, "it is too large", ProtocolError)
                head, blob = self.opened(await self.bucket.read(one.path), StateHead, one.modified_at)
                state = Manifest.decode(head.manifest)
                values = np.frombuffer(blob, np.uint8).copy()
                whole = Snapshot.of(state.subject, state.step, state.layout, values)
                fits = whole.head == head.manifest and state.step == head.chain.round == round
                require(fits, "its state is another", ProtocolError)
            except (PeerError, StateError, ValueError) as error:
                self._tell_fault(one, error)
                continue
            return head.chain, Snapshot(whole.manifest, whole.blob, (head.member,))
        none_readable = "no state in the bucket can be read: its writers may run another version"
        require(after >= 0 or not found, none_readable, StateError)
        return None

    async def _states(self) -> dict[int, StoredObject]:
        found = [(STATE_PLACE.fullmatch(one.path), one) for one in await self.bucket.list("states")]
        return {int(place[1]): one for place, one in found if place}

    async def write_state(self, chain: RoundChain, snapshot: Snapshot) -> bool:
        blob = memoryview(snapshot.blob.data)
        data = await asyncio.to_thread(self.signed, StateHead, blob, chain=chain, manifest=snapshot.head)
        return await self.bucket.create(f"states/{chain.round:08d}", data)

    async def follow(self, chain: RoundChain) -> AsyncIterator[ClosedRound]:
        """Yield the rounds that are over, from this place on."""
        while True:
            listing = await self.patiently(self.look, chain)
            before = chain
            while (one := await self.closed(chain, listing)) is not None:
                yield one
                chain = one.after
            if chain is before:
                return

    async def look(self, chain: RoundChain) -> RoundListing:
        """Return the objects of the rounds that may matter for the next one."""
        first = max(chain.round - WINDOW, 0)
        return RoundListing.of(await self.bucket.list("rounds", f"rounds/{first:08d}"))

    async def closed(self, chain: RoundChain, listing: RoundListing) -> ClosedRound | None:
        """Return the round of ``chain`` if a manifest closes it that can be followed."""
        ways = await self._ways(chain, listing)
        if len(ways) > 1:
            ways = await self._built(chain, listing) or ways[::-1]
        for way in ways:
            entries = way.manifest.entries
            places = [listing.contributions.get(chain.path_of(one.member, one.round)) for one in entries]
            offers = await self.offers([one for one in places if one is not None])
            if any(one.digest not in offers for one in entries):
                continue  # they may come yet
            if not (fault := differs(way.manifest, [offers[one.digest] for one in entries])):
                return replace(way, offers=offers)
            self._tell_fault(way.place, ProtocolError(fault))
            return await self.closed(chain, listing)
        return None

    async def _ways(self, chain: RoundChain, listing: RoundListing) -> list[ClosedRound]:
        """Return what the sound manifests of the round make of it, without the contributions."""
        ways = dict[StoredObject, ClosedRound]()
        gone = await self.gone(chain, listing)
        while unread := [one for one in listing.attempts(chain.folder, self._faulty) if one not in ways]:
            place = unread[0]
            try:
                require(place.size_bytes <= MANIFEST_BYTES, "it is too large", ProtocolError)
                data = await self.patiently(self.bucket.read, place.path)
                manifest, _ = self.opened(data, RoundManifest, place.modified_at)
                fault = chain.fault_of(manifest, written_at=place.modified_at, gone=gone)
                require(not fault, fault, ProtocolError)
            except PeerError as error:
                self._tell_fault(place, error)  # then later attempts count
                continue
            assert data is not None
            after = chain.after(manifest, content_digest(data), closed_at=place.modified_at)
            ways[place] = ClosedRound(chain, place, manifest, after)
        return list(ways.values())

    async def _built(self, chain: RoundChain, listing: RoundListing) -> list[ClosedRound]:
        """Return those of them on which the next round was built."""
        ways = await self._ways(chain, listing) if listing.latest > chain.round else []
        return [way for way in ways if await self.closed(way.after, listing)]

    def open_places(self, chain: RoundChain, listing: RoundListing) -> Sequence[StoredObject]:
        """Return the contributions that the round may list."""
        rounds = {folder: round for round, folder in chain.folders.items()}
        found = [one for one in listing.contributions.values() if one.folder in rounds]
        count = [one for one in found if chain.may_count(one.member, rounds[one.folder])]
        return [one for one in count if one not in self._faulty][:MOST_MEMBERS]

    async def gone(self, chain: RoundChain, listing: RoundListing) -> set[PeerId]:
        """Return the members of the last round for whom this one need not wait."""
        gone = set()
        for path, (member, base) in chain.farewells.items():
            place = listing.farewells.get(path)
            if place is None:
                continue
            if place not in self._gone and place not in self._faulty:
                await self._read_farewell(place, member, base)
            if place in self._gone:
                gone.add(member)
        return gone

    async def _read_farewell(self, place: StoredObject, member: PeerId, base: bytes) -> None:
        try:
            require(place.size_bytes <= HEADER_BYTES, "it is too large", ProtocolError)
            data = await self.patiently(self.bucket.read, place.path)
            farewell, _ = self.opened(data, Farewell, place.modified_at)
            own = (farewell.member, farewell.base) == (member, base)
            require(own, "it is another member's, or another round's", ProtocolError)
            self._gone.add(place)
        except PeerError as error:
            self._tell_fault(place, error)

    async def leave(self, chain: RoundChain) -> None:
        """Say that no round need wait for this peer."""
        path = f"{chain.folder}/{self._services.peers.id.hex()}{LEFT}"
        await self.bucket.create(path, self.signed(Farewell, base=chain.base))

    async def replaced(self, last: ClosedRound, listing: RoundListing, *, alone: bool) -> bool:
        """Return True if the next round was built on another manifest of the last one.

        Also if it was not built yet, and this peer would do so ``alone``: most others cannot follow this manifest.
        """
        if len(listing.manifests.get(last.before.folder, ())) < 2:
            return False
        if built := await self._built(last.before, listing):
            return built[0].place != last.place
        other = await self.closed(last.before, listing) if alone else None
        return other is not None and other.place != last.place

    async def reopens_at(self, chain: RoundChain, listing: RoundListing) -> float:
        """Return when another manifest of a round may be written; never if others follow the last one."""
        if not (ways := await self._ways(chain, listing)):
            return -math.inf
        return math.inf if await self._built(chain, listing) else ways[-1].place.modified_at + MISSING_S

    def forget(self, chain: RoundChain) -> None:
        """Forget the contributions that have counted or are too old."""
        read = self._read.items()
        self._read = {at: one for at, one in read if chain.may_count(one.head.member, one.head.round)}
        self._gone.clear()

    def mean(self, one: ClosedRound, out: Floats) -> Floats:
        return mean_of(one.manifest.entries, one.offers, self.numel, self.codec.name, out)

    async def trim(self, round: int) -> None:
        """Delete what is older than the state before that of ``round``."""
        states = await self._states()
        first = max((one for one in states if one < round), default=0)
        old = [one.path for at, one in states.items() if at < first]
        for one in await self.bucket.list("rounds"):
            if (at := PLACE.fullmatch(one.path)) and int(at[1]) < first - WINDOW:
                old.append(one.path)
        await self.bucket.delete(old)

    async def offers(self, places: Sequence[StoredObject]) -> dict[bytes, Offer]:
        """Read contributions; those that do not count are told of once and left out."""
        missing = [one for one in places if one not in self._read and one not in self._faulty]
        await asyncio.gather(*map(self._read_offer, missing))
        offers = {}
        for place in places:
            offer = self._read.get(place)
            if offer is not None:
                offers[offer.digest] = offer
        return offers

    async def _read_offer(self, place: StoredObject) -> None:
        try:
            require(place.size_bytes <= self._object_bytes, "it is too large", ProtocolError)
            data = await self.patiently(self.bucket.read, place.path)
            head, content = self.opened(data, PseudoGradient, place.modified_at)
            assert data is not None
            named = place.path == f"{folder_of(head.round, head.base)}/{head.member.hex()}"
            require(named, "it is another member's, or another round's", ProtocolError)
            require(head.weight > 0, "it has no weight", ProtocolError)
            norm = await asyncio.to_thread(norm_of, self.codec, content, self.numel)
        except (PeerError, ValueError) as error:
            self._tell_fault(place, error)
            return
        self._read[place] = Offer(head, content, content_digest(data), norm)

    @property
    def _object_bytes(self) -> int:
        return HEADER_BYTES + encoded_bytes(self.codec, self.numel)

    def _tell_fault(self, place: StoredObject, error: Exception) -> None:
        remember(self._faulty, place, str(error), MAX_REMEMBERED)
        text = f"{place.path} does not count: {error}"
        logger.info("%s", text)
        self._services.events.emit(Fault(loop_now(), "the bucket", text))

    async def close(self, chain: RoundChain, listing: RoundListing) -> bool:
        """Write a manifest of the readable contributions; False if they are too few, or another was first."""
        offers = await self.offers(self.open_places(chain, listing))
        present = {one.head.member for one in offers.values()}
        gone = await self.gone(chain, listing)
        if self.bucket.now() < chain.due_at(present, gone):
            return False
        entries = entries_of(offers.values())
        data = self.signed(RoundManifest, round=chain.round, base=chain.base, entries=entries)
        return await self.patiently(self.bucket.create, listing.next_attempt(chain.folder), data)
