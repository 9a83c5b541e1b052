"""Replicas of expert saves: each save is on its host's disk and at a few other peers, the *holders*.

Holding. A holder announces itself in the DHT. It receives a save by a stream: first the manifest,
to which it answers with the chunks it lacks, then those chunks. So a save with few changes costs
little, and a save that is there already is only renewed. A holder keeps the newest two saves per
expert and owner. It drops saves that were not renewed for a day.

Saving. The owner writes the chunks to its disk, sends them to holders, previous ones first, and publishes a signed
record. The record names the save, and before it the last one that as many peers hold as should. So after the loss of
the host and all holders but one, only the steps since the last save are lost.

Finding. Any peer may claim a save of any step in the DHT. So claims are tried from the highest step
down, and a save that is incomplete or does not fit is skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from blake3 import blake3

from colab_swarm.dht.service import RunServices, is_sound
from colab_swarm.errors import CallRefused, PeerError, StateError
from colab_swarm.moe.grid import Grid, Index
from colab_swarm.moe.saves import SAVES_OF_ONE, ReplicaStore, save_of
from colab_swarm.net.peers import Buffer, Contact, Message, PeerId, Peers, Refusal, Role, Stream, short
from colab_swarm.tensors.chunks import (
    CHUNK_TIMEOUT_S,
    MAX_CHUNKS,
    MAX_STEP,
    ChunkDownload,
    Digest,
    FetchChunks,
    Manifest,
    Snapshot,
    StateChunk,
    receive_chunk,
    send_chunks,
)

logger = logging.getLogger(__name__)
MAX_HOLDERS = 8
KEPT_S = 24 * 3600.0  # a save that is not renewed is dropped; also the longest life of a record
RENEWALS = 24  # of an unchanged save during its life
ANNOUNCE_S = 60.0  # between two announcements of a holder
PROBE_S = 10.0  # timeout of the first request to a holder
PATIENCE_S = 60.0  # a holder that was unreachable is not called for so long


class HolderRecord(Message, frozen=True):
    """A peer that keeps saves for others; signed, under its own subkey."""

    addresses: tuple[str, ...]
    room_bytes: int


class KeepSave(Message, frozen=True):
    """Opens a stream that brings a save; ``manifest`` is the digest of its first chunk."""

    manifest: bytes


class LackedChunks(Message, frozen=True):
    """The chunks of a save that the holder lacks, by their place in the manifest."""

    places: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_CHUNKS)]


class SaveKept(Message, frozen=True):
    """Confirms that the save is complete here."""


class FetchSave(FetchChunks, frozen=True):
    """Opens a stream of chunks of any saves, manifests included."""


class SavePlace(Message, frozen=True):
    """A save and its holders."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEP)]  # optimizer steps in its weights
    manifest: Digest  # digest of its first chunk
    holders: Annotated[tuple[Contact, ...], msgspec.Meta(max_length=MAX_HOLDERS + 1)]  # peers that have it

    def __post_init__(self) -> None:
        if not all(map(is_sound, self.holders)):
            raise ValueError("record of a save with invalid holders")


class SaveRecord(Message, frozen=True):
    """An expert's newest save and the last safe one; signed, under its owner's subkey."""

    saves: Annotated[tuple[SavePlace, ...], msgspec.Meta(max_length=SAVES_OF_ONE)]


class SavedIndices(Message, frozen=True):
    """The experts of a grid that a peer has saved; signed, under its own subkey."""

    indices: tuple[Index, ...]


class ReplicaService:
    """Keeps saves for other peers, and finds peers that keep ours. One per peer, on the event loop."""

    def __init__(self, services: RunServices, store: ReplicaStore) -> None:
        """Serve calls from now on; `start` announces it."""
        self.store = store
        self._services, self._peers = services, services.peers
        self._key = f"{services.run_id}/expert-holders"
        self._task: asyncio.Task[None] | None = None
        self._peers.serve_stream(KeepSave, self._receive_save, role=Role.WORKER)
        self._peers.serve_stream(FetchSave, self._send_chunks, role=Role.WORKER)

    async def start(self) -> None:
        """Announce regularly, until `stop`, that this peer keeps saves. Idempotent."""
        if self._task is None:
            await self._announce(3 * ANNOUNCE_S)
            self._task = asyncio.create_task(self._keep_announcing(), name="hold saved experts")

    async def stop(self) -> None:
        """Stop serving, and withdraw the announcement."""
        announced = self._task is not None
        self.kill()
        if announced:
            await self._announce(0.5)

    def kill(self) -> None:
        """Stop serving without withdrawing the announcement, as a crash would."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        for kind in (KeepSave, FetchSave):
            self._peers.unserve(kind)

    async def others(self) -> dict[PeerId, HolderRecord]:
        """Return the other peers that keep saves now."""
        found = await self._services.dht.published(self._key, HolderRecord)
        found.pop(self._peers.id, None)
        return found

    async def _keep_announcing(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S * self._services.rng.uniform(0.8, 1.2))
            self.store.expire(self._peers.time() - KEPT_S)
            try:
                await self._announce(3 * ANNOUNCE_S)
            except PeerError as error:
                logger.info("could not announce that this peer keeps saved experts: %s", error)

    async def _announce(self, ttl_s: float) -> None:
        addresses = self._peers.contact.addresses
        if addresses:  # a peer that cannot be dialled could not return a save
            record = HolderRecord(addresses, self.store.room_bytes)
            await self._services.dht.publish(self._key, record, ttl_s=ttl_s)

    async def _receive_save(self, opening: KeepSave, stream: Stream) -> None:
        try:
            head = await receive_chunk(stream, opening.manifest)
            manifest = Manifest.decode(head)
            with self.store.adding(save_of(manifest, stream.peer, at=self._peers.time())):
                await asyncio.to_thread(self.store.put, head)
                places = {manifest.digest(place): place for place in range(manifest.chunks)}
                lacked = {digest: place for digest, place in places.items() if digest not in self.store}
                await stream.send(LackedChunks(tuple(lacked.values())))
                for digest, place in lacked.items():
                    chunk = await receive_chunk(stream, digest, manifest.length(place))
                    await asyncio.to_thread(self.store.put, chunk)
        except (StateError, TimeoutError) as error:
            raise Refusal(str(error) or "the save arrived too slowly") from error
        await stream.send(SaveKept())
        await stream.end()

    async def _send_chunks(self, request: FetchSave, stream: Stream) -> None:
        await send_chunks(request, stream, lambda digest: asyncio.to_thread(self.store.get, digest))


async def send_save(
    peers: Peers, holder: PeerId, saved: Snapshot, *, timeout_s: float = CHUNK_TIMEOUT_S
) -> int:
    """Send a save to a holder; return how many bytes of chunks it lacked. ``timeout_s`` is per chunk.

    Raises PeerError: the holder failed or refused.
    """
    sent_bytes = 0
    try:
        opening, now = KeepSave(saved.root), asyncio.get_running_loop().time
        async with (
            asyncio.timeout(timeout_s) as limit,
            await peers.stream(holder, opening, timeout_s=timeout_s) as stream,
        ):
            await stream.send(StateChunk(), saved.head)
            lacked, _ = await stream.receive(LackedChunks)
            if not {*lacked.places} <= {*range(saved.manifest.chunks)}:
                raise PeerError("the holder requests chunks that do not exist")
            for place in lacked.places:
                chunk = memoryview(saved.blob.data)[saved.manifest.span(place)]
                limit.reschedule(now() + timeout_s)
                await stream.send(StateChunk(), chunk)
                sent_bytes += len(chunk)
            limit.reschedule(now() + timeout_s)
            await stream.receive(SaveKept)
    except TimeoutError as error:
        raise PeerError(f"holder {short(holder)} took longer than {timeout_s:.0f} s for a chunk") from error
    return sent_bytes


@dataclass(frozen=True)
class SaveResult:
    """Result of a save."""

    step: int  # optimizer steps in its weights
    holders: frozenset[PeerId]  # other peers that have it
    sent_bytes: int  # chunks that the holders lacked
    at: float  # swarm time, seconds
    fault: str | None = None  # why it is not on this peer's disk or not in the DHT; None if it is in both


class ExpertSaves:
    """Saves this peer's experts, and finds saves of any peer's experts."""

    def __init__(self, services: RunServices, store: ReplicaStore, *, copies: int) -> None:
        """``copies``: number of holders to use, if there are as many; at most `MAX_HOLDERS`."""
        self.results: dict[str, SaveResult] = {}
        self.safe: dict[str, SavePlace] = {}  # the newest save that reached its full number of holders
        self._failed_at: dict[PeerId, float] = {}  # swarm time
        self._services, self._peers = services, services.peers
        self._store, self._copies = store, copies

    def due(self, uid: str, step: int, others: Mapping[PeerId, HolderRecord]) -> bool:
        """Return True if a save would store newer steps, reach more holders, or renew an old record."""
        last = self.results.get(uid)
        if last is None or last.step != step or last.fault:
            return True
        lacking = len(last.holders) < min(self._copies, len(others))
        age_s = self._peers.time() - last.at
        return lacking or not last.holders <= others.keys() or age_s > KEPT_S / RENEWALS

    async def save(self, saved: Snapshot, others: Mapping[PeerId, HolderRecord]) -> SaveResult:
        """Save on this disk and at holders among ``others``, then publish it; a fault is part of the result."""
        uid, step = saved.manifest.subject.decode(), saved.manifest.step
        fault = await self.write(saved)
        holders, sent_bytes = await self._spread(saved, others)
        result = SaveResult(step, frozenset(holders), sent_bytes, self._peers.time(), fault)
        contacts = [*map(self._peers.contact_of, sorted(holders))] + [self._peers.contact] * (not fault)
        place = SavePlace(step, saved.root, tuple(contacts))
        former = self.safe.get(uid, place)
        saves = (place,) if former.manifest == place.manifest else (place, former)
        if not (contacts and await self._publish(self._key(uid, "save"), SaveRecord(saves))):
            return replace(result, fault=fault or f"no peer stored the record of the save of {uid}")
        self.results[uid] = result
        # Former holders count even while they are away: a save with few holders is no safe one after an outage.
        reachable = max(len(others), len({contact.id for contact in former.holders} - {self._peers.id}))
        if former is place or len(holders) >= min(self._copies, reachable):
            self.safe[uid] = place
        return result

    async def write(self, saved: Snapshot) -> str | None:
        """Save on this disk; return the error text, or None."""
        save = save_of(saved.manifest, self._peers.id, at=self._peers.time())
        chunks: list[Buffer] = [saved.head, *saved.chunks.values()]
        try:
            with self._store.adding(save):
                await asyncio.to_thread(lambda: [*map(self._store.put, chunks)])
        except StateError as error:
            logger.warning("%s at step %d is not on disk: %s", save.uid, save.step, error)
            return str(error)
        return None

    async def _spread(
        self, saved: Snapshot, others: Mapping[PeerId, HolderRecord]
    ) -> tuple[list[PeerId], int]:
        """Send a save to enough holders; return them, and the bytes they lacked.

        Former holders come first, then the others in an order that depends on the expert: this spreads the load.
        """
        uid, size_bytes = saved.manifest.subject.decode(), saved.manifest.size_bytes
        last = self.results.get(uid)
        known = last.holders if last else frozenset()
        since = self._peers.time() - PATIENCE_S
        able = [
            (peer not in known, blake3(uid.encode() + peer).digest(), peer)
            for peer, record in others.items()
            if (peer in known or record.room_bytes >= size_bytes)
            and self._failed_at.get(peer, since) <= since
        ]
        holders: list[PeerId] = []
        total_bytes = 0
        for _, _, holder in sorted(able):
            if len(holders) == self._copies:
                break
            try:
                total_bytes += await send_save(self._peers, holder, saved)
                holders.append(holder)
            except PeerError as error:
                logger.info("%s does not keep %s: %s", short(holder), uid, error)
                if not isinstance(error, CallRefused):  # the other experts need not wait for it too
                    self._failed_at[holder] = self._peers.time()
        return holders, total_bytes

    # -- finding

    async def publish_saved(self, grid: Grid, uids: Iterable[str]) -> None:
        """Publish which experts of a grid this peer has saved, so that others can take them over."""
        indices = SavedIndices(tuple(sorted(map(grid.index, uids))))
        await self._publish(self._key(grid.prefix, "saves"), indices)

    async def saved(self, grid: Grid) -> set[str]:
        """Return the experts of a grid that any peer has saved."""
        records = await self._services.dht.published(self._key(grid.prefix, "saves"), SavedIndices)
        named = [set(map(grid.uid, record.indices)) for record in records.values()]
        return set[str]().union(*(uids for uids in named if all(map(grid.contains, uids))))

    async def claims(self, uid: str) -> list[tuple[PeerId, SavePlace]]:
        """Return all saves of an expert on this disk or claimed in the DHT, with their owners; highest step first.

        Any peer may claim anything, so no claim replaces that of another owner.
        """
        claims = {
            (save.owner, save.manifest): (PeerId(save.owner), SavePlace(save.step, save.manifest, ()))
            for save in self._store.saves(uid)
        }
        records = await self._services.dht.published(self._key(uid, "save"), SaveRecord)
        for owner, record in records.items():
            for place in record.saves:
                claims[owner, place.manifest] = owner, place
                for contact in place.holders:
                    self._peers.learn(contact)
        return sorted(claims.values(), key=lambda claim: claim[1].step, reverse=True)

    async def fetch(self, uid: str, place: SavePlace, *, limit_bytes: int) -> Snapshot:
        """Return a save from this disk and its holders, several in parallel; every chunk matches its hash.

        Raises StateError: the save is not what was claimed, larger than ``limit_bytes``, or incomplete.
        """
        head, holders = await self._probe(uid, place)
        manifest = Manifest.decode(head)
        if (manifest.subject, manifest.step) != (
            uid.encode(),
            place.step,
        ) or manifest.size_bytes > limit_bytes:
            raise StateError(f"a save of {uid} is of another expert or step, or larger than the expert")
        download = ChunkDownload(self._peers, manifest, FetchSave)
        await asyncio.to_thread(download.fill, self._store.get)
        await download.run(holders)
        return Snapshot(manifest, download.blob)

    async def _probe(self, uid: str, place: SavePlace) -> tuple[bytes, list[PeerId]]:
        """Return the manifest's chunk and the holders that sent it; dead holders cost one timeout together."""
        heads = [await asyncio.to_thread(self._store.get, place.manifest)]
        holders = [contact.id for contact in place.holders if contact.id != self._peers.id]
        answers = await asyncio.gather(*(self._head(peer, place.manifest) for peer in holders))
        heads += answers
        for head in heads:
            if head is not None:
                return head, [peer for peer, answer in zip(holders, answers, strict=True) if answer]
        raise StateError(f"none of {len(holders)} holders has {uid} at step {place.step}")

    async def _head(self, holder: PeerId, manifest: bytes) -> bytes | None:
        try:
            request = FetchSave((manifest,))
            async with await self._peers.stream(holder, request, timeout_s=PROBE_S) as stream:
                return bytes(await receive_chunk(stream, manifest, timeout_s=PROBE_S))
        except (PeerError, StateError, TimeoutError) as error:
            logger.info("holder %s has no such save: %s", short(holder), error)
            return None

    async def _publish(self, key: str, record: Message) -> int:
        return await self._services.dht.publish(key, record, ttl_s=KEPT_S)

    def _key(self, name: str, kind: str) -> str:
        return f"{self._services.run_id}/experts/{name}/{kind}"
