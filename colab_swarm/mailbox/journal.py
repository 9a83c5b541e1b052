"""The objects of one model of a run: looked at, signed and written, however long it takes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np

from colab_swarm.errors import BucketAway, BucketError, PeerError, ProtocolError, StateError, require
from colab_swarm.events import Fault, Notice
from colab_swarm.mailbox.branches import Branches
from colab_swarm.mailbox.bucket import Bucket, StoredObject
from colab_swarm.mailbox.contributions import ClosedRound, encoded_bytes, mean_of
from colab_swarm.mailbox.reader import Reader, Statements
from colab_swarm.mailbox.rounds import (
    CARD,
    LEFT,
    MOST_PLACES,
    PLACE,
    STATE_PLACE,
    WINDOW,
    Card,
    Farewell,
    H,
    PseudoGradient,
    RoundChain,
    RoundListing,
    RoundManifest,
    StateHead,
    content_digest,
    elsewhere,
    numbered,
    round_of,
    seal,
    state_path,
)
from colab_swarm.mailbox.view import LEAST_PAUSE_S, MOST_PAUSE_S, Close
from colab_swarm.net.peers import PeerId, remember
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.chunks import Manifest, Snapshot
from colab_swarm.tensors.codecs import Floats, codec_of
from colab_swarm.training.records import LINEAGE_BYTES
from colab_swarm.training.settings import PeerServices, TrainingSettings, most_state_bytes

T = TypeVar("T")
P = ParamSpec("P")
MAX_REMEMBERED = 10_000


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
        self._services = services
        self._prefix = settings.prefix
        self.codec = codec_of(settings.compression)
        self.numel = numel
        self._until = until
        self.statements = Statements(bucket, settings.prefix, services.peers.role_by)
        self.reader = Reader(
            lambda path: self.patiently(bucket.read, path),
            self.statements,
            services.events,
            self.codec,
            numel,
        )
        self._away = False

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
                if not self._away:
                    self._services.events.emit(Fault(loop_now(), "the bucket", f"{error}; it is asked again"))
                self._away = True
                await asyncio.sleep(min(pause_s, self._until() - loop_now()))
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
                continue
            if self._away:
                self._away = False
                self._services.events.emit(Notice(loop_now(), "the bucket answers again"))
            return answer

    async def read_card(self, own: bytes) -> Card:
        """Return what the peers of this model have agreed on; ``own`` if this peer is the first.

        The first card of a member stands. Raises `ProtocolError` if another version wrote it.
        """
        for attempt in range(MOST_PLACES):
            card = await self.statements.first_card(self.reader.tell_fault)
            if card is not None:
                return card
            await self.bucket.create(numbered(CARD, attempt), own)
        raise BucketError(f"{self.bucket.address} has no place left for this model: it is full of garbage")

    async def contribute(self, path: str, data: bytes) -> tuple[str, bytes]:
        """Write a contribution, and return its place, and what is there: ``data``, if this is the first.

        Another one of this peer stays: an earlier session wrote it. Objects of others in its place are
        passed over.
        """
        content_bytes = encoded_bytes(self.codec, self.numel)
        place = path
        for _ in range(MOST_PLACES):
            if await self.patiently(self.bucket.create, place, data):
                return place, data
            places = await self.patiently(self.bucket.list, path.rpartition("/")[0])
            taken = RoundListing.of(places).at(place)
            if taken is not None:
                with suppress(PeerError, ValueError):
                    written, _, _ = await self.reader.whole(taken, PseudoGradient, content_bytes)
                    return place, written
            place = elsewhere(path)
        raise BucketAway(f"others wrote to all places of this peer's contribution, {path}")

    async def follow(self, chain: RoundChain) -> AsyncIterator[ClosedRound]:
        """Yield the rounds that are over, from this place on."""
        went_on = True
        while went_on:
            went_on = False
            branches = await self.look(chain)
            while (closed := await self.reader.answer(partial(branches.closed, chain))) is not None:
                yield closed
                chain = closed.after
                went_on = True

    async def look(self, chain: RoundChain) -> Branches:
        """Return the objects of the rounds that may matter for the next one."""
        # Those of the last round, too: the peer may have followed the wrong manifest.
        first = max(chain.round - 1 - WINDOW, 0)
        places = await self.patiently(self.bucket.list, "rounds", f"rounds/{first:08d}")
        return Branches(RoundListing.of(places), self.reader.readings)

    async def close(self, chain: RoundChain, manifest: Close) -> bool:
        """Write a manifest; False if another peer was first."""
        data = self.signed(RoundManifest, round=chain.round, base=chain.base, entries=manifest.entries)
        return await self.patiently(self.bucket.create, manifest.path, data)

    async def leave(self, chain: RoundChain) -> None:
        """Say that no round need wait for this peer."""
        path = f"{chain.folder}/{self._services.peers.id.hex()}{LEFT}"
        await self.bucket.create(path, self.signed(Farewell, base=chain.base))

    def mean(self, closed: ClosedRound, out: Floats) -> Floats:
        return mean_of(closed.manifest.entries, closed.contributions, self.codec, out)


class States:
    """The states of a model in a bucket: which of them counts, and what is written and deleted.

    ``is_distrusted(member)``: it gave a state that was false.
    """

    def __init__(self, journal: Journal, is_distrusted: Callable[[PeerId], bool]) -> None:
        self._journal = journal
        self._bucket = journal.bucket
        self._is_distrusted = is_distrusted
        self._faults: dict[StoredObject, str] = {}  # of states that do not count
        self._refused: set[PeerId] = set()  # authors of states that cannot be read
        self._heads: dict[StoredObject, StateHead] = {}
        self._known: set[int] = set()  # rounds of states that this peer wrote or read

    async def first_or_best(self, own: Callable[[], Snapshot]) -> tuple[RoundChain, Snapshot | None]:
        """Return where the run was and its state then; the one of most members that can be read.

        Without any, this peer's ``own`` becomes the first one; then the state is None.
        """
        while True:
            state = await self.best()
            if state is not None:
                return state
            first = await asyncio.to_thread(own)
            chain = RoundChain.begin(first.manifest.step, first.root, now=self._bucket.now())
            if await self.write(chain, first):
                return chain, None

    async def best(self, after: int = -1, more_than: int = -1) -> tuple[RoundChain, Snapshot] | None:
        """Return a readable state that is later than a round, and its chain; None if there is none.

        It is the one on whose branch most members contributed, ``more_than`` so many. Of equal ones it
        is the newest, by a member that is not distrusted.
        """
        places = await self._places()
        while True:
            first = max(min(places.values(), default=0) - 1 - WINDOW, 0)
            listing = RoundListing.of(await self._bucket.list("rounds", f"rounds/{first:08d}"))
            later = [place for place, round in places.items() if round > after]
            best = await self._best_of(later, listing, more_than)
            if best is None:
                break
            place, head = best
            reader = self._journal.reader
            branches = Branches(listing, reader.readings)
            try:
                chain = await reader.answer(partial(branches.retraced, head.chain, place.modified_at))
                snapshot = await self._read(place)
            except (PeerError, StateError, ValueError) as error:
                self._refused.add(head.member)
                self._refuse(place, str(error), head.member)
                continue
            self._known.add(head.chain.round)
            return chain, snapshot
        newest_fault = next(iter(self._faults.values()), "")
        is_asked_for_any = after < 0 and bool(places)
        require(not is_asked_for_any, f"no state in the bucket can be read: {newest_fault}", StateError)
        return None

    async def _best_of(
        self, places: list[StoredObject], listing: RoundListing, more_than: int
    ) -> tuple[StoredObject, StateHead] | None:
        counts: dict[bytes, int] = {}
        best: tuple[StoredObject, StateHead] | None = None
        best_rank = (more_than, True)
        for place in places:
            if place in self._faults:
                continue
            try:
                head = await self._head(place)
            except (PeerError, ValueError) as error:
                self._refuse(place, str(error))
                continue
            chain = head.chain
            if chain.base not in counts:
                counts[chain.base] = len(await self._members_on(chain, listing))
            is_trusted = head.member not in self._refused and not self._is_distrusted(head.member)
            rank = (counts[chain.base], is_trusted)
            if rank > best_rank:
                best = place, head
                best_rank = rank
        return best

    def _refuse(self, place: StoredObject, fault: str, author: PeerId | None = None) -> None:
        remember(self._faults, place, fault, MAX_REMEMBERED)
        self._journal.reader.tell_fault(place, fault, author)

    async def _head(self, place: StoredObject) -> StateHead:
        """Return a state's statement. Raises `PeerError` or ValueError."""
        head = self._heads.get(place)
        if head is None:
            fits = 0 < place.size_bytes <= most_state_bytes(self._journal.numel)
            require(fits, "its size is wrong", ProtocolError)
            head = await self._journal.statements.head(place, StateHead)
            # Without what only reading the state needs: any member may write many, of 16 MiB each.
            head = msgspec.structs.replace(head, manifest=b"")
            remember(self._heads, place, head, MAX_REMEMBERED)
        return head

    async def _members_on(self, chain: RoundChain, listing: RoundListing) -> set[PeerId]:
        """Return the members that contributed to a chain's round: they hold its last manifest."""
        least_bytes = encoded_bytes(self._journal.codec, self._journal.numel)
        requests = []
        for place in listing.contributions.get(chain.folder, ()):
            if place.size_bytes > least_bytes:
                requests.append(self._journal.statements.readable_head(place, PseudoGradient))
        heads = await asyncio.gather(*requests)
        return {head.member for head in heads if head is not None}

    async def _read(self, place: StoredObject) -> Snapshot:
        data = await self._bucket.read(place.path)
        head, blob = self._journal.statements.opened(place, data, StateHead)
        manifest = Manifest.decode(head.manifest)
        values = np.frombuffer(blob, np.uint8).copy()
        state = Snapshot.of(manifest.subject, manifest.step, manifest.layout, values)
        chain = head.chain
        fits = state.head == head.manifest and manifest.step == chain.round
        require(fits, "its state is another", ProtocolError)
        follows = manifest.subject == chain.base[:LINEAGE_BYTES]
        if _is_first(chain):
            follows = state.root == chain.base
        require(follows, "it is not of the rounds before it", ProtocolError)
        return Snapshot(state.manifest, state.blob, (head.member,))

    async def _places(self) -> dict[StoredObject, int]:
        """Return the places of states with their rounds, the newest first."""
        rounds: dict[StoredObject, int] = {}
        for place in await self._bucket.list("states"):
            if STATE_PLACE.fullmatch(place.path):
                rounds[place] = round_of(place.path)
        return dict(sorted(rounds.items(), key=lambda item: -item[1]))

    async def write(self, chain: RoundChain, snapshot: Snapshot) -> bool:
        """Write a state; False if it would be the first one, and another peer was first."""
        path = state_path(chain.round)
        if _is_first(chain):
            # Only behind garbage: a state that another peer has written since is the first.
            garbage = {place.path for place in self._faults}
            paths = [numbered(path, attempt) for attempt in range(MOST_PLACES)]
            path = next((place for place in paths if place not in garbage), paths[-1])
        elif any(place.path == path for place in await self._places()):
            path = elsewhere(path)
        blob = memoryview(snapshot.blob.data)
        sign = self._journal.signed
        data = await asyncio.to_thread(sign, StateHead, blob, chain=chain, manifest=snapshot.head)
        written = await self._bucket.create(path, data)
        if written:
            self._known.add(chain.round)
        return written

    async def trim(self, round: int) -> None:
        """Delete what is older than the last state before ``round`` that this peer wrote or read.

        States of others may be false, or garbage.
        """
        first = max((state for state in self._known if state < round), default=0)
        self._known = {state for state in self._known if state >= first}
        old = []
        for place, state in (await self._places()).items():
            if state < first:
                old.append(place.path)
        for place in await self._bucket.list("rounds"):
            if PLACE.fullmatch(place.path) and round_of(place.path) < first - 1 - WINDOW:
                old.append(place.path)
        await self._bucket.delete(old)


def _is_first(chain: RoundChain) -> bool:
    """Return whether no round was before this chain's: its base is the digest of a state."""
    return chain.round - 1 not in chain.digests
