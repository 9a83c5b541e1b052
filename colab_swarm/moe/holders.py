"""Peers keep saved experts for each other: who does tells so in the DHT, takes saves, and gives them back.

A save comes by a stream: first its manifest, to which the holder answers which chunks it lacks, then those. So a save
of which little has changed costs little, and one that is here already is only renewed. A holder keeps two saves of an
expert by one owner until the owner says that the newer one is safe, and drops what nobody has wanted for a day.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from colab_swarm.dht.service import is_sound
from colab_swarm.errors import PeerError, StateError
from colab_swarm.moe.calls import ExpertServices
from colab_swarm.moe.saves import (
    DIGEST_BYTES,
    MAX_CHUNKS,
    ReplicaStore,
    SavedExpert,
    SaveManifest,
    cut_digests,
    digest_of,
    save_of,
)
from colab_swarm.net.peers import Contact, Message, PeerId, Peers, Refusal, Role, Stream, short

logger = logging.getLogger(__name__)
FETCHED_AT_ONCE = 16


@dataclass(frozen=True)
class KeepingSettings:
    """How saved experts are kept.

    Attributes:
        quota_bytes: on this peer's disk for others.
        kept_s: a save that nobody has wanted for so long is dropped; a day is also the longest life of a record.
        tell_s: how often a holder tells that it is there.
        timeout_s: of carrying a chunk.
    """

    quota_bytes: int = 8 << 30
    kept_s: float = 24 * 3600.0
    tell_s: float = 60.0
    timeout_s: float = 30.0


class HolderRecord(Message, frozen=True):
    """A peer that keeps saved experts for others; signed, under its own subkey."""

    addresses: tuple[str, ...]
    room_bytes: int


class KeepSave(Message, frozen=True):
    """Open a stream that brings a save; ``manifest`` is the digest of its first chunk."""

    manifest: bytes


class SavePiece(Message, frozen=True):
    """A chunk; its bytes are the item's payload."""


class LackedPieces(Message, frozen=True):
    """Which chunks of a save the holder lacks, by their place in the manifest."""

    places: tuple[int, ...]


class SaveKept(Message, frozen=True):
    """The save is here, whole."""


class SettleSave(Message, frozen=True):
    """The caller's save with this manifest is safe: it needs no other of the expert."""

    uid: str
    manifest: bytes


class FetchPieces(Message, frozen=True):
    """Open a stream of the chunks with these digests, in their order."""

    digests: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(self.digests) > FETCHED_AT_ONCE or any(len(digest) != DIGEST_BYTES for digest in self.digests):
            raise ValueError("too many chunks, or none that there could be")


class ReplicaService:
    """Keeps saves for others, and finds others that keep ours. One for each peer."""

    def __init__(
        self, services: ExpertServices, shelf: ReplicaStore, settings: KeepingSettings = KeepingSettings()
    ) -> None:
        """Serves from now on; `start` tells others so."""
        self.settings, self.shelf = settings, shelf
        self._services, self._peers = services, services.peers
        self._task: asyncio.Task[None] | None = None
        self._peers.serve_stream(KeepSave, self._take, role=Role.WORKER)
        self._peers.serve_stream(FetchPieces, self._give, role=Role.WORKER)
        self._peers.serve(SettleSave, self._settle, role=Role.WORKER)

    async def start(self) -> None:
        """Tell others, again and again until `stop`, that this peer keeps saves."""
        if self._task is None:
            await self._tell(self._ttl_s)
            self._task = asyncio.create_task(self._keep_telling(), name="hold saved experts")

    async def stop(self) -> None:
        """Keep and give no more, and say so."""
        told = self._task is not None
        self.kill()
        if told:
            await self._tell(0.5)

    def kill(self) -> None:
        """Keep and give no more, without a word."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        for kind in (KeepSave, FetchPieces, SettleSave):
            self._peers.unserve(kind)

    # -- others' saves here

    async def _take(self, opening: KeepSave, stream: Stream) -> None:
        try:
            head = await self._receive(stream, opening.manifest)
            save = save_of(manifest := SaveManifest.decode(head), stream.peer, at=self._peers.time())
            with self.shelf.receiving(save):
                await asyncio.to_thread(self.shelf.chunks.put, head)
                await self._take_pieces(manifest, stream)
                self.shelf.add(save)
        except (StateError, TimeoutError) as error:
            raise Refusal(str(error) or "the save came too slowly") from error
        await stream.send(SaveKept())
        await stream.end()

    async def _take_pieces(self, manifest: SaveManifest, stream: Stream) -> None:
        digests, chunks = cut_digests(manifest.digests), self.shelf.chunks
        places = {digest: place for place, digest in reversed([*enumerate(digests)]) if digest not in chunks}
        lacked = sorted(places.values())
        await stream.send(LackedPieces(tuple(lacked)))
        for place in lacked:
            await asyncio.to_thread(chunks.put, await self._receive(stream, digests[place]))

    async def _receive(self, stream: Stream, digest: bytes) -> memoryview:
        async with asyncio.timeout(self.settings.timeout_s):
            _, payload = await stream.receive(SavePiece)
        if digest_of(payload) != digest:
            raise StateError(f"the chunk does not match its hash {digest.hex()[:8]}")
        return payload

    async def _give(self, ask: FetchPieces, stream: Stream) -> None:
        for digest in ask.digests:
            piece = await asyncio.to_thread(self.shelf.chunks.get, digest)
            if piece is None:
                raise Refusal(f"chunk {digest.hex()[:8]} is not here")
            await stream.send(SavePiece(), piece)
        await stream.end()

    async def _settle(self, owner: PeerId, told: SettleSave) -> SaveKept:
        self.shelf.settle(owner, told.uid, told.manifest)
        return SaveKept()

    # -- who keeps saves

    async def others(self) -> dict[PeerId, HolderRecord]:
        """The other peers that keep saves now."""
        found: dict[PeerId, HolderRecord] = {}
        for subkey, entry in (await self._services.dht.get(self._key)).items():
            try:
                record = msgspec.convert(entry.value, HolderRecord, strict=False)
            except (msgspec.ValidationError, ValueError) as error:
                logger.info("record of holder %s ignored: %s", subkey.hex()[:8], error)
                continue
            contact = Contact(PeerId(subkey), record.addresses)
            if is_sound(contact) and contact.id != self._peers.id:
                self._peers.learn(contact)
                found[contact.id] = record
        return found

    @property
    def _key(self) -> str:
        return f"{self._services.run_id}/expert-holders"

    @property
    def _ttl_s(self) -> float:
        return 3 * self.settings.tell_s

    async def _keep_telling(self) -> None:
        while True:
            await asyncio.sleep(self.settings.tell_s * self._services.rng.uniform(0.8, 1.2))
            self.shelf.expire(self._peers.time() - self.settings.kept_s)
            try:
                await self._tell(self._ttl_s)
            except PeerError as error:
                logger.info("could not tell that this peer keeps saved experts: %s", error)

    async def _tell(self, ttl_s: float) -> None:
        addresses = self._peers.contact.addresses
        if addresses:  # who cannot be dialled could not give anything back
            record = HolderRecord(addresses, self.shelf.room_bytes)
            await self._services.dht.store(self._key, record, subkey=self._peers.id, ttl_s=ttl_s, signed=True)


async def give_save(peers: Peers, holder: PeerId, saved: SavedExpert, *, timeout_s: float) -> int:
    """Let a holder keep a save; returns how many bytes of chunks it lacked.

    Raises:
        PeerError: it could not, or would not.
    """
    digest, *_ = saved.pieces
    sent_bytes = 0
    try:
        async with (
            asyncio.timeout(timeout_s) as limit,
            await peers.stream(holder, KeepSave(digest), timeout_s=timeout_s) as stream,
        ):
            await stream.send(SavePiece(), saved.head)
            lacked, _ = await stream.receive(LackedPieces)
            for place in _checked(lacked.places, saved.manifest):
                limit.reschedule(_now() + timeout_s)
                piece = memoryview(saved.blob.data)[saved.manifest.span(place)]
                await stream.send(SavePiece(), piece)
                sent_bytes += len(piece)
            limit.reschedule(_now() + timeout_s)
            await stream.receive(SaveKept)
    except TimeoutError as error:
        raise PeerError(f"holder {short(holder)} took longer than {timeout_s:.0f} s for a chunk") from error
    return sent_bytes


def _checked(places: Sequence[int], manifest: SaveManifest) -> Sequence[int]:
    chunks = len(manifest.digests) // DIGEST_BYTES
    if len(places) > MAX_CHUNKS or any(not 0 <= place < chunks for place in places):
        raise PeerError("the holder asks for chunks that there are not")
    return places


async def fetch_pieces(
    peers: Peers, holder: PeerId, digests: Sequence[bytes], *, timeout_s: float
) -> dict[bytes, bytes]:
    """Chunks from a holder, all right; those before a fault of the holder's, if it gave any.

    Raises:
        PeerError: it gave none.
    """
    found: dict[bytes, bytes] = {}
    try:
        async with (
            asyncio.timeout(timeout_s) as limit,
            await peers.stream(holder, FetchPieces(tuple(digests)), timeout_s=timeout_s) as stream,
        ):
            for digest in digests:
                _, payload = await stream.receive(SavePiece)
                if digest_of(payload) != digest:
                    raise PeerError(f"holder {short(holder)} gave a wrong chunk")
                found[digest] = bytes(payload)
                limit.reschedule(_now() + timeout_s)
    except (PeerError, TimeoutError) as error:
        if not found:
            raise PeerError(f"holder {short(holder)} gave nothing: {error}") from error
    return found


def _now() -> float:
    return asyncio.get_running_loop().time()
