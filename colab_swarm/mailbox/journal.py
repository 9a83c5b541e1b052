"""The objects of one model of a run: looked at, signed and written. The bucket is asked until it answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np

from colab_swarm.errors import BucketAway, PeerError, ProtocolError, StateError, require
from colab_swarm.events import Fault, Notice
from colab_swarm.mailbox.branches import Branches
from colab_swarm.mailbox.bucket import Bucket, StoredObject
from colab_swarm.mailbox.reader import Reader, existing
from colab_swarm.mailbox.rounds import (
    CARD,
    LEFT,
    PLACE,
    STATE_PLACE,
    WINDOW,
    Card,
    ClosedRound,
    Farewell,
    H,
    RoundChain,
    RoundListing,
    RoundManifest,
    StateHead,
    content_digest,
    mean_of,
    round_of,
    seal,
)
from colab_swarm.mailbox.view import LEAST_PAUSE_S, MOST_PAUSE_S, Close
from colab_swarm.net.peers import remember
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.chunks import Manifest, Snapshot
from colab_swarm.tensors.codecs import Floats, codec_of
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
        self.reader = Reader(self._fetch, services, settings.prefix, self.codec, numel)
        self._away = False
        self._faulty_states: dict[StoredObject, str] = {}  # that do not count, and why

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
        """Return what the peers of this model have agreed on; ``own`` if this peer is the first."""
        await self.bucket.create(CARD, own)
        written_at = self.bucket.now()
        for place in await self.bucket.list("card"):
            if place.path == CARD:
                written_at = place.modified_at
        data = existing(await self.bucket.read(CARD))
        card, _ = self.reader.opened(data, Card, written_at)
        return card

    async def read_state(self, own: Callable[[], Snapshot]) -> tuple[RoundChain, Snapshot | None]:
        """Return where the run was and its state then, the newest that can be read.

        Without any, this peer's ``own`` becomes the first one; then the state is None.
        """
        while True:
            newest = await self.newest_state()
            if newest is not None:
                return newest
            first = await asyncio.to_thread(own)
            chain = RoundChain.begin(first.manifest.step, first.root, now=self.bucket.now())
            if await self.write_state(chain, first):
                return chain, None

    async def newest_state(self, after: int = -1) -> tuple[RoundChain, Snapshot] | None:
        """Return the newest state that can be read of those later than a round, if there are any, and its chain."""
        places = await self._states()
        for round, place in reversed(places.items()):
            if round <= after or place in self._faulty_states:
                continue
            try:
                return await self._read_state_at(place, round)
            except (PeerError, StateError, ValueError) as error:
                remember(self._faulty_states, place, str(error), MAX_REMEMBERED)
                self.reader.tell_fault(place, str(error))
        newest_fault = next(iter(self._faulty_states.values()), "")
        require(after >= 0 or not places, f"no state in the bucket can be read: {newest_fault}", StateError)
        return None

    async def _read_state_at(self, place: StoredObject, round: int) -> tuple[RoundChain, Snapshot]:
        require(place.size_bytes <= most_state_bytes(self.numel), "it is too large", ProtocolError)
        data = existing(await self.bucket.read(place.path))
        head, blob = self.reader.opened(data, StateHead, place.modified_at)
        manifest = Manifest.decode(head.manifest)
        values = np.frombuffer(blob, np.uint8).copy()
        state = Snapshot.of(manifest.subject, manifest.step, manifest.layout, values)
        fits = state.head == head.manifest and manifest.step == head.chain.round == round
        require(fits, "its state is another", ProtocolError)
        return head.chain, Snapshot(state.manifest, state.blob, (head.member,))

    async def _states(self) -> dict[int, StoredObject]:
        states: dict[int, StoredObject] = {}
        for place in await self.bucket.list("states"):
            match = STATE_PLACE.fullmatch(place.path)
            if match is not None:
                states[int(match[1])] = place
        return states

    async def write_state(self, chain: RoundChain, snapshot: Snapshot) -> bool:
        blob = memoryview(snapshot.blob.data)
        data = await asyncio.to_thread(self.signed, StateHead, blob, chain=chain, manifest=snapshot.head)
        return await self.bucket.create(f"states/{chain.round:08d}", data)

    async def follow(self, chain: RoundChain) -> AsyncIterator[ClosedRound]:
        """Yield the rounds that are over, from this place on."""
        went_on = True
        while went_on:
            went_on = False
            branches = await self.look(chain)
            while (closed := await self.reader.answer(partial(branches.after, chain))) is not None:
                yield closed
                chain = closed.after
                went_on = True

    async def look(self, chain: RoundChain) -> Branches:
        """Return the objects of the rounds that may matter for the next one."""
        first = max(chain.round - WINDOW, 0)
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
        """Delete what is older than the state before that of ``round``."""
        states = await self._states()
        first = max((state for state in states if state < round), default=0)
        old = [place.path for state, place in states.items() if state < first]
        for place in await self.bucket.list("rounds"):
            if PLACE.fullmatch(place.path) and round_of(place.path) < first - WINDOW:
                old.append(place.path)
        await self.bucket.delete(old)
