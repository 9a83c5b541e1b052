"""The objects of one model of a run: looked at, signed and written. The bucket is asked until it answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np

from colab_swarm.errors import BucketAway, BucketError, PeerError, ProtocolError, StateError, require
from colab_swarm.events import Fault, Notice
from colab_swarm.mailbox.branches import Branches
from colab_swarm.mailbox.bucket import Bucket, StoredObject
from colab_swarm.mailbox.reader import (
    Reader,
    existing,
    first_card,
    read_statement,
    require_trainer,
    start_of,
)
from colab_swarm.mailbox.rounds import (
    CARD,
    HEADER_BYTES,
    LEFT,
    MOST_PLACES,
    PLACE,
    STATE_PLACE,
    WINDOW,
    Card,
    ClosedRound,
    Farewell,
    H,
    PseudoGradient,
    RoundChain,
    RoundListing,
    RoundManifest,
    StateHead,
    content_digest,
    elsewhere,
    encoded_bytes,
    folder_of,
    mean_of,
    numbered,
    round_of,
    round_of_state,
    seal,
    start_bytes,
    unseal,
    unseal_start,
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
STATE_HEAD_BYTES = 1 << 24  # of a state's object before its values, at most


class Journal:
    """What the members of a collaboration have written, and this one writes, in a ``bucket``.

    ``until()`` is when this peer no longer waits for a bucket that is away, loop time. ``is_distrusted(member)``: it
    gave a state that was false.
    """

    def __init__(
        self,
        bucket: Bucket,
        services: PeerServices,
        settings: TrainingSettings,
        numel: int,
        until: Callable[[], float],
        is_distrusted: Callable[[PeerId], bool],
    ) -> None:
        self.bucket = bucket
        self._services = services
        self._prefix = settings.prefix
        self.codec = codec_of(settings.compression)
        self.numel = numel
        self._until = until
        self._is_distrusted = is_distrusted
        self.reader = Reader(self._fetch, services, settings.prefix, self.codec, numel)
        self._away = False
        self._faulty_states: dict[StoredObject, str] = {}  # that do not count, and why
        self._state_heads: dict[StoredObject, StateHead] = {}
        self._refused: set[PeerId] = set()  # authors of states that cannot be read
        self._known_states: set[int] = set()  # rounds of states that this peer wrote or read

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

    async def _fetch(self, path: str) -> bytes | None:
        return await self.patiently(self.bucket.read, path)

    async def read_card(self, own: bytes) -> Card:
        """Return what the peers of this model have agreed on; ``own`` if this peer is the first.

        The first card that a member wrote stands. Raises `ProtocolError` if another version of the package did.
        """
        role_of = self._services.peers.role_by
        for attempt in range(MOST_PLACES):
            card = await first_card(self.bucket, self._prefix, role_of, self.reader.tell_fault)
            if card is not None:
                return card
            await self.bucket.create(numbered(CARD, attempt), own)
        raise BucketError(f"{self.bucket.address} has no place left for this model: it is full of garbage")

    async def contribute(self, path: str, data: bytes) -> tuple[str, bool]:
        """Write a contribution, and return its place, and True if it is ``data``.

        Another one of this peer stays: an earlier session wrote it. Objects of others in its place are passed over.
        """
        me = self._services.peers.id
        place = path
        for _ in range(MOST_PLACES):
            if await self.patiently(self.bucket.create, place, data):
                return place, True
            places = await self.patiently(self.bucket.list, path.rpartition("/")[0])
            taken = RoundListing.of(places).at(place)
            held = b""
            if taken is not None and taken.size_bytes <= len(data) + HEADER_BYTES:
                held = existing(await self._fetch(taken.path))
            if held == data:
                return place, True
            with suppress(ProtocolError):
                head, _ = unseal(held, PseudoGradient)
                if head.member == me and path.startswith(folder_of(head.round, head.base)):
                    return place, False
            place = elsewhere(path)
        raise BucketAway(f"others wrote to all places of this peer's contribution, {path}")

    async def read_state(self, own: Callable[[], Snapshot]) -> tuple[RoundChain, Snapshot | None]:
        """Return where the run was and its state then; the one of most members that can be read.

        Without any, this peer's ``own`` becomes the first one; then the state is None.
        """
        while True:
            state = await self.state_of_most()
            if state is not None:
                return state
            first = await asyncio.to_thread(own)
            chain = RoundChain.begin(first.manifest.step, first.root, now=self.bucket.now())
            if await self.write_state(chain, first):
                return chain, None

    async def state_of_most(self, after: int = -1, more_than: int = -1) -> tuple[RoundChain, Snapshot] | None:
        """Return a state that can be read of those later than a round, if there are any, and its chain.

        It is the one on whose branch most members contributed, ``more_than`` so many. Of equal ones it is the newest,
        by a member that is not distrusted.
        """
        places = await self._states()
        while True:
            rounds = [round_of_state(place.path) for place in places]
            first = max(min(rounds, default=0) - 1 - WINDOW, 0)
            listing = RoundListing.of(await self.bucket.list("rounds", f"rounds/{first:08d}"))
            best = await self._best_of(places, listing, after, more_than)
            if best is None:
                newest_fault = next(iter(self._faulty_states.values()), "")
                require(
                    after >= 0 or not places,
                    f"no state in the bucket can be read: {newest_fault}",
                    StateError,
                )
                return None
            place, head = best
            try:
                branches = Branches(listing, self.reader.readings)
                chain = await self.reader.answer(partial(branches.retraced, head.chain, place.modified_at))
                snapshot = await self._read_state_at(place)
            except (PeerError, StateError, ValueError) as error:
                self._refused.add(head.member)
                self._refuse_state(place, str(error), head.member)
                continue
            self._known_states.add(round_of_state(place.path))
            return chain, snapshot

    def _refuse_state(self, place: StoredObject, fault: str, author: PeerId | None = None) -> None:
        remember(self._faulty_states, place, fault, MAX_REMEMBERED)
        self.reader.tell_fault(place, fault, author)

    async def _best_of(
        self, places: Sequence[StoredObject], listing: RoundListing, after: int, more_than: int
    ) -> tuple[StoredObject, StateHead] | None:
        counts: dict[bytes, int] = {}
        best: tuple[StoredObject, StateHead] | None = None
        best_rank = (0, False)
        for place in places:
            if round_of_state(place.path) <= after or place in self._faulty_states:
                continue
            try:
                head = await self._state_head(place)
            except (PeerError, ValueError) as error:
                self._refuse_state(place, str(error))
                continue
            base = head.chain.base
            if base not in counts:
                counts[base] = len(await self._members_on(head.chain, listing))
            members = counts[base]
            is_trusted = head.member not in self._refused and not self._is_distrusted(head.member)
            rank = (members, is_trusted)
            if members > more_than and (best is None or rank > best_rank):
                best = place, head
                best_rank = rank
        return best

    async def _state_head(self, place: StoredObject) -> StateHead:
        """Return what a state says, by the start of its object. Raises `ProtocolError`."""
        head = self._state_heads.get(place)
        if head is None:
            require(0 < place.size_bytes <= most_state_bytes(self.numel), "its size is wrong", ProtocolError)
            data = await start_of(self.bucket, place, HEADER_BYTES)
            end = start_bytes(data)
            if len(data) < end <= min(place.size_bytes, STATE_HEAD_BYTES):
                data = await start_of(self.bucket, place, end)
            head, _ = unseal_start(data, StateHead)
            role = self._services.peers.role_by(head.key, head.membership, place.modified_at)
            require_trainer(head, self._prefix, role)
            require(head.chain.round == round_of_state(place.path), "it is of another round", ProtocolError)
            remember(self._state_heads, place, head, MAX_REMEMBERED)
        return head

    async def _members_on(self, chain: RoundChain, listing: RoundListing) -> set[PeerId]:
        """Return the members that contributed to a chain's round: they hold its last manifest."""
        least_bytes = encoded_bytes(self.codec, self.numel)
        role_of = self._services.peers.role_by
        heads = await asyncio.gather(
            *[
                read_statement(self.bucket, place, PseudoGradient, self._prefix, role_of)
                for place in listing.contributions.get(chain.folder, [])
                if place.size_bytes > least_bytes
            ]
        )
        members = set[PeerId]()
        for head in heads:
            if head is not None and (head.round, head.base) == (chain.round, chain.base):
                members.add(head.member)
        return members

    async def _read_state_at(self, place: StoredObject) -> Snapshot:
        data = existing(await self.bucket.read(place.path))
        head, blob = self.reader.opened(data, StateHead, place.modified_at)
        manifest = Manifest.decode(head.manifest)
        values = np.frombuffer(blob, np.uint8).copy()
        state = Snapshot.of(manifest.subject, manifest.step, manifest.layout, values)
        chain = head.chain
        fits = state.head == head.manifest and manifest.step == chain.round
        require(fits, "its state is another", ProtocolError)
        follows = manifest.subject == chain.base[:LINEAGE_BYTES]
        is_first = chain.round - 1 not in chain.digests
        if is_first:
            follows = state.root == chain.base
        require(follows, "it is not of the rounds before it", ProtocolError)
        return Snapshot(state.manifest, state.blob, (head.member,))

    async def _states(self) -> list[StoredObject]:
        """Return the places of states, the newest round first; of a round the first place first."""
        places = []
        for place in await self.bucket.list("states"):
            if STATE_PLACE.fullmatch(place.path):
                places.append(place)
        return sorted(places, key=lambda place: round_of_state(place.path), reverse=True)

    async def write_state(self, chain: RoundChain, snapshot: Snapshot) -> bool:
        """Write a state; False if it would be the first one, and another peer was first."""
        path = f"states/{chain.round:08d}"
        is_first = chain.round - 1 not in chain.digests
        if is_first:
            # Only behind garbage: a state that another peer has written since is the first.
            garbage = {place.path for place in self._faulty_states}
            paths = [numbered(path, attempt) for attempt in range(MOST_PLACES)]
            path = next((place for place in paths if place not in garbage), paths[-1])
        elif any(place.path == path for place in await self._states()):
            path = elsewhere(path)
        blob = memoryview(snapshot.blob.data)
        data = await asyncio.to_thread(self.signed, StateHead, blob, chain=chain, manifest=snapshot.head)
        written = await self.bucket.create(path, data)
        if written:
            self._known_states.add(chain.round)
        return written

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
        return mean_of(closed.manifest.entries, closed.contributions, self.numel, self.codec.name, out)

    async def trim(self, round: int) -> None:
        """Delete what is older than the last state before ``round`` that this peer wrote or read.

        States of others may be false, or garbage.
        """
        first = max((state for state in self._known_states if state < round), default=0)
        self._known_states = {state for state in self._known_states if state >= first}
        old = []
        for place in await self._states():
            if round_of_state(place.path) < first:
                old.append(place.path)
        for place in await self.bucket.list("rounds"):
            if PLACE.fullmatch(place.path) and round_of(place.path) < first - 1 - WINDOW:
                old.append(place.path)
        await self.bucket.delete(old)
