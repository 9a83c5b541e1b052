"""Saves of experts: each is on its host's disk and at a few other peers, the *holders*.

A save is a state in chunks (`colab_swarm.tensors.chunks`); the hash of its manifest, a chunk too,
names it. Every read is checked, so writes are not synced. A holder gets the manifest and the chunks
that it lacks, and keeps the newest two saves per expert and owner, for a day.

The owner's signed record names its newest save, and before it the last one that has all its
holders: losing the host and all holders but one costs only the steps since the last save. Any peer
may claim a save of any step: claims are tried from the highest step down.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from blake3 import blake3

from colab_swarm.dht.service import BackgroundTasks, RunServices, is_sound
from colab_swarm.errors import PeerError, StateError, require
from colab_swarm.files import write_file
from colab_swarm.moe.grid import MAX_HOLDERS, Grid, Index
from colab_swarm.net.node import Node
from colab_swarm.net.peers import UNDECODABLE, Buffer, Contact, Message, PeerId, Refusal, Role, Stream, short
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
    digest_of,
    receive_chunk,
    send_chunks,
)

logger = logging.getLogger(__name__)
KEPT_S = 24 * 3600.0  # a save that is not renewed is dropped; also the longest life of a record
ANNOUNCE_S = 60.0  # between two announcements of a holder
PROBE_S = 10.0  # timeout of the first request to a holder
PATIENCE_S = 60.0  # pause before an unreachable or full holder is called again, and then last
ATTEMPTS = 4  # holders that a save tries, per copy
SAVES_OF_ONE = 2  # per expert and owner: the new one may not be in the DHT yet


class Save(msgspec.Struct, frozen=True):
    owner: bytes  # id of the peer that hosted and saved it
    uid: str  # of the expert
    step: int  # optimizer steps in its weights
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(min_length=1)]  # of its chunks, the manifest first
    size_bytes: int  # of all of them
    at: float  # swarm time when its owner last renewed it, seconds

    @classmethod
    def of(cls, manifest: Manifest, owner: bytes, *, at: float) -> "Save":
        head = msgspec.msgpack.encode(manifest)
        digests = (digest_of(head), *map(manifest.digest, range(manifest.chunks)))
        uid = manifest.subject.decode(errors="replace")  # a garbled one is no expert's
        return cls(owner, uid, manifest.step, digests, len(head) + manifest.size_bytes, at)


class ReplicaStore:
    """The saves on this peer's disk: those owned by ``me``, and within a quota those of others.

    Used by one process and one thread; `put` and `get` on any thread.
    """

    def __init__(self, folder: Path, *, me: bytes, quota_bytes: int = 8 << 30) -> None:
        self._chunks = folder / "chunks"
        self._folder = folder / "saves"
        self._me = me
        self._quota_bytes = quota_bytes
        self._writing = threading.Lock()  # of a chunk, which several saves may bring at once
        self._saves: dict[Path, Save] = {}
        self._coming: list[tuple[Save, int]] = []  # their chunks are being put, and the bytes they need
        for path in self._folder.glob("*.save"):
            try:
                self._saves[path] = msgspec.msgpack.decode(path.read_bytes(), type=Save)
            except (OSError, *UNDECODABLE) as error:
                logger.warning("dropped %s, which cannot be read: %s", path, error)
                _delete(path)
        needed = {digest.hex() for digest in self._needed()}
        for path in [*self._chunks.glob("??/*")]:  # partial files of a killed process, too
            if path.name not in needed:
                _delete(path)

    def __contains__(self, digest: bytes) -> bool:
        return self._chunk(digest).exists()

    def put(self, data: Buffer) -> bytes:
        """Write a chunk atomically; return its digest. Raises `StateError` if the disk refuses it."""
        digest = digest_of(data)
        with self._writing:
            if digest not in self:
                write_file(self._chunk(digest), [data])
        return digest

    def get(self, digest: bytes) -> bytes | None:
        """Return a chunk; None if it is missing or damaged. A damaged one is deleted."""
        path = self._chunk(digest)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if digest_of(data) == digest:
            return data
        logger.warning("dropped %s: its contents do not match their hash", path)
        _delete(path)
        return None

    def saves(self, uid: str | None = None) -> list[Save]:
        """Return the saves of one expert, or all; highest step first."""
        # a copy, since other threads may add saves
        saves = [*self._saves.values()]
        if uid is not None:
            saves = [save for save in saves if save.uid == uid]
        return sorted(saves, key=lambda save: (save.step, save.at), reverse=True)

    @property
    def room_bytes(self) -> int:
        """Bytes that are left for other peers' saves."""
        kept = sum(save.size_bytes for save in self._saves.values() if save.owner != self._me)
        return max(0, self._quota_bytes - kept - sum(size_bytes for _, size_bytes in self._coming))

    @contextlib.contextmanager
    def adding(self, save: Save) -> Iterator[None]:
        """Reserve space for a save while its chunks are put; then drop its owner's oldest beyond two.

        Raises `StateError` if there is not enough space, or the disk cannot be written.
        """
        path = self._folder / f"{save.digests[0].hex()[:32]}-{save.owner.hex()[:16]}.save"
        if save.owner == self._me or path in self._saves:
            size_bytes = 0
        else:
            size_bytes = save.size_bytes
        text = f"{self.room_bytes:,} bytes are left here, {size_bytes:,} are needed"
        require(size_bytes <= self.room_bytes, text, StateError)
        coming = save, size_bytes
        self._coming.append(coming)
        try:
            yield
            write_file(path, [msgspec.msgpack.encode(save)])
            self._saves[path] = save
            self._drop(self._paths_of(save.owner, save.uid)[:-SAVES_OF_ONE])
        finally:
            self._coming.remove(coming)
            self._sweep(save.digests)

    def expire(self, before: float) -> None:
        """Drop saves that were not renewed since ``before``, swarm time."""
        self._drop([path for path, save in self._saves.items() if save.at < before])

    def _chunk(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._chunks / name[:2] / name

    def _paths_of(self, owner: bytes, uid: str) -> list[Path]:
        """Return the files of an owner's saves of an expert, the oldest first."""
        paths = [path for path, save in self._saves.items() if (save.owner, save.uid) == (owner, uid)]
        return sorted(paths, key=lambda path: self._saves[path].at)

    def _drop(self, paths: Iterable[Path]) -> None:
        digests: set[bytes] = set()
        for path in paths:
            digests.update(self._saves.pop(path).digests)
            _delete(path)
        self._sweep(digests)

    def _needed(self) -> set[bytes]:
        needed: set[bytes] = set()
        for save in self._saves.values():
            needed.update(save.digests)
        for save, _ in self._coming:
            needed.update(save.digests)
        return needed

    def _sweep(self, digests: Iterable[bytes]) -> None:
        for digest in set(digests) - self._needed():
            _delete(self._chunk(digest))


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):  # deleted already, or a failing disk, which the next write reports
        path.unlink()


class KeepSave(Message, frozen=True):
    """Opens a stream that brings a save; ``manifest`` is the digest of its first chunk."""

    manifest: bytes


class LackedChunks(Message, frozen=True):
    """The chunks of a save that the holder lacks, by their place in the manifest; in the end none."""

    places: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_CHUNKS)]


class FetchSave(FetchChunks, frozen=True):
    """Opens a stream of chunks of any saves, manifests included."""


class SavePlace(Message, frozen=True):
    step: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEP)]  # optimizer steps in its weights
    manifest: Digest  # digest of its first chunk
    holders: Annotated[tuple[Contact, ...], msgspec.Meta(max_length=MAX_HOLDERS + 1)]  # peers that have it

    def __post_init__(self) -> None:
        require(all(map(is_sound, self.holders)), "record of a save with invalid holders")


class SaveRecord(Message, frozen=True):
    """An expert's newest save and the last safe one; published in the DHT."""

    saves: Annotated[tuple[SavePlace, ...], msgspec.Meta(max_length=SAVES_OF_ONE)]


@dataclass(frozen=True)
class SaveResult:
    step: int  # optimizer steps in its weights
    holders: frozenset[PeerId]  # other peers that have it
    at: float  # swarm time, seconds
    fault: str | None = None  # why it is not on this peer's disk or not in the DHT; None if it is in both


class ExpertSaves:
    """Saves this peer's experts, keeps saves for others, and finds those of any peer."""

    def __init__(self, services: RunServices, store: ReplicaStore) -> None:
        self.store = store
        self.results: dict[str, SaveResult] = {}  # of the last save of each expert
        self.safe: dict[str, SavePlace] = {}  # the newest save of each that reached enough holders
        self._failed_at: dict[PeerId, float] = {}  # swarm time
        self._peers = services.peers
        self._dht = services.dht
        self._run_id = services.run_id
        self._tasks = BackgroundTasks("hold saved experts", services.events, services.rng)
        self._peers.serve_stream(KeepSave, self._receive_save, role=Role.WORKER)
        send = partial(send_chunks, read=lambda digest: asyncio.to_thread(store.get, digest))
        self._peers.serve_stream(FetchSave, send, role=Role.WORKER)

    async def start(self) -> None:
        """Announce regularly, until `stop`, that this peer keeps saves."""
        self._tasks.every(ANNOUNCE_S, self._announce)  # first: an interrupt may end the other
        await self._announce()

    async def stop(self) -> None:
        self.kill()
        await self._announce(0.5)

    def kill(self) -> None:
        """Stop serving and withdraw nothing, as a crash would."""
        self._tasks.cancel()
        for kind in (KeepSave, FetchSave):
            self._peers.unserve(kind)

    async def others(self) -> Set[PeerId]:
        """Return the other peers that keep saves."""
        holders = await self._dht.published(f"{self._run_id}/expert-holders", Contact)
        return holders.keys() - {self._peers.id}

    async def _announce(self, ttl_s: float = 3 * ANNOUNCE_S) -> None:
        self.store.expire(self._peers.time() - KEPT_S)
        me = self._peers.contact
        if me.addresses:  # a peer that cannot be dialled could not return a save
            await self._dht.publish(f"{self._run_id}/expert-holders", me, ttl_s=ttl_s)

    async def _receive_save(self, opening: KeepSave, stream: Stream) -> None:
        try:
            head = await receive_chunk(stream, opening.manifest)
            manifest = Manifest.decode(head)
            with self.store.adding(Save.of(manifest, stream.peer, at=self._peers.time())):
                await asyncio.to_thread(self.store.put, head)
                lacked: dict[bytes, int] = {}
                for place in range(manifest.chunks):
                    if manifest.digest(place) not in self.store:
                        lacked[manifest.digest(place)] = place
                await stream.send(LackedChunks(tuple(lacked.values())))
                for digest, place in lacked.items():
                    chunk = await receive_chunk(stream, digest, manifest.length(place))
                    await asyncio.to_thread(self.store.put, chunk)
        except (StateError, TimeoutError) as error:
            raise Refusal(str(error) or "the save arrived too slowly") from error
        await stream.send(LackedChunks(()))
        await stream.end()

    def due(self, uid: str, step: int, others: Set[PeerId], copies: int) -> bool:
        """Return True if a save would store newer steps, reach more holders, or renew a record."""
        last = self.results.get(uid)
        if last is None or last.step != step or last.fault:
            return True
        lacking = len(last.holders) < min(copies, len(others)) or not last.holders <= others
        return lacking or self._peers.time() - last.at > KEPT_S / 24

    async def save(self, saved: Snapshot, others: Set[PeerId], copies: int) -> SaveResult:
        """Save on this disk and at ``copies`` of the others, then publish it."""
        uid = saved.manifest.subject.decode()
        step = saved.manifest.step
        fault = await self.write(saved)
        holders = await self._spread(saved, others, copies)
        contacts = [*map(self._peers.contact_of, sorted(holders))]
        if not fault:
            contacts.append(self._peers.contact)
        place = SavePlace(step, saved.root, tuple(contacts))
        former = self.safe.get(uid, place)
        record = SaveRecord((place,) if former.manifest == place.manifest else (place, former))
        if not (contacts and await self._dht.publish(self._key(uid, "save"), record, ttl_s=KEPT_S)):
            fault = fault or f"no peer stored the record of the save of {uid}"
        result = self.results[uid] = SaveResult(step, frozenset(holders), self._peers.time(), fault)
        # Former holders count even while they are away: a save with few holders is no safe one after an outage.
        reachable = max(len(others), len({contact.id for contact in former.holders} - {self._peers.id}))
        if contacts and (former is place or len(holders) >= min(copies, reachable)):
            self.safe[uid] = place
        return result

    async def write(self, saved: Snapshot) -> str | None:
        """Save on this disk; return the error text, or None."""
        chunks: list[Buffer] = [saved.head, *saved.chunks.values()]
        try:
            with self.store.adding(Save.of(saved.manifest, self._peers.id, at=self._peers.time())):
                await asyncio.to_thread(lambda: [*map(self.store.put, chunks)])
        except StateError as error:
            logger.warning("a save is not on disk: %s", error)
            return str(error)
        return None

    async def _spread(self, saved: Snapshot, others: Set[PeerId], copies: int) -> list[PeerId]:
        subject = saved.manifest.subject
        last = self.results.get(subject.decode())
        former = last.holders if last else frozenset()
        since = self._peers.time() - PATIENCE_S

        def rank(peer: PeerId) -> tuple[bool, float, bytes]:
            """Former holders first, then those that did not fail lately, then a random order of this expert."""
            return peer not in former, self._failed_at.get(peer, 0.0), blake3(subject + peer).digest()

        able = [peer for peer in others if self._failed_at.get(peer, since) <= since]
        holders: list[PeerId] = []
        for holder in sorted(able, key=rank)[: ATTEMPTS * copies]:
            if len(holders) == copies:
                break
            try:
                await send_save(self._peers, holder, saved)
                holders.append(holder)
            except PeerError as error:
                logger.info("%s keeps no save of %s: %s", short(holder), subject, error)
                self._failed_at[holder] = self._peers.time()  # the other experts need not try it, too
        return holders

    async def publish_saved(self, grid: Grid, uids: Iterable[str]) -> None:
        await self._dht.publish(self._key(grid.prefix, "saves"), sorted(map(grid.index, uids)), ttl_s=KEPT_S)

    async def saved(self, grid: Grid) -> set[str]:
        """Return the experts of a grid that any peer has saved."""
        records = await self._dht.published(self._key(grid.prefix, "saves"), tuple[Index, ...])
        saved: set[str] = set()
        for indices in records.values():
            uids = set(map(grid.uid, indices))
            if all(map(grid.contains, uids)):
                saved |= uids
        return saved

    async def claims(self, uid: str) -> list[tuple[PeerId, SavePlace]]:
        """Return the saves of an expert on this disk or claimed in the DHT, and owners; highest step first.

        Any peer may claim anything, so no claim replaces that of another owner.
        """
        claims: dict[tuple[bytes, bytes], tuple[PeerId, SavePlace]] = {}
        for save in self.store.saves(uid):
            place = SavePlace(save.step, save.digests[0], ())
            claims[save.owner, place.manifest] = PeerId(save.owner), place
        records = await self._dht.published(self._key(uid, "save"), SaveRecord)
        for owner, record in records.items():
            for place in record.saves:
                claims[owner, place.manifest] = owner, place
                for contact in place.holders:
                    self._peers.learn(contact)
        return sorted(claims.values(), key=lambda claim: claim[1].step, reverse=True)

    async def fetch(self, uid: str, place: SavePlace, *, limit_bytes: int) -> Snapshot:
        """Return a save from this disk and its holders, several in parallel.

        Raises `StateError` if it is not the claimed state, larger than ``limit_bytes``, or incomplete.
        """
        head = await asyncio.to_thread(self.store.get, place.manifest)
        holders = [contact.id for contact in place.holders if contact.id != self._peers.id]
        # dead holders cost one timeout together
        answers = await asyncio.gather(*(self._head(peer, place.manifest) for peer in holders))
        for answer in answers:
            head = head or answer
        if head is None:
            raise StateError(f"none of {len(holders)} holders has {uid} at step {place.step}")
        manifest = Manifest.decode(head)
        is_claimed = (manifest.subject, manifest.step) == (uid.encode(), place.step)
        text = f"a save of {uid} is of another expert or step, or larger than the expert"
        require(is_claimed and manifest.size_bytes <= limit_bytes, text, StateError)
        download = ChunkDownload(self._peers, manifest, FetchSave)
        await asyncio.to_thread(download.fill, self.store.get)
        await download.run(peer for peer, answer in zip(holders, answers, strict=True) if answer)
        return Snapshot(manifest, download.blob)

    async def _head(self, holder: PeerId, manifest: bytes) -> bytes | None:
        try:
            async with await self._peers.stream(holder, FetchSave((manifest,)), timeout_s=PROBE_S) as stream:
                return bytes(await receive_chunk(stream, manifest, timeout_s=PROBE_S))
        except (PeerError, StateError, TimeoutError) as error:
            logger.info("holder %s has no such save: %s", short(holder), error)
            return None

    def _key(self, name: str, kind: str) -> str:
        return f"{self._run_id}/experts/{name}/{kind}"


async def send_save(peers: Node, holder: PeerId, saved: Snapshot) -> None:
    """Send a holder the chunks that it lacks; raise `PeerError` if it fails, refuses or is slow."""
    now = asyncio.get_running_loop().time
    try:
        async with (
            asyncio.timeout(CHUNK_TIMEOUT_S) as limit,
            await peers.stream(holder, KeepSave(saved.root), timeout_s=CHUNK_TIMEOUT_S) as stream,
        ):
            await stream.send(StateChunk(), saved.head)
            lacked, _ = await stream.receive(LackedChunks)
            if not {*lacked.places} <= {*range(saved.manifest.chunks)}:
                raise PeerError("the holder requests chunks that do not exist")
            for place in lacked.places:
                limit.reschedule(now() + CHUNK_TIMEOUT_S)
                await stream.send(StateChunk(), memoryview(saved.blob.data)[saved.manifest.span(place)])
            limit.reschedule(now() + CHUNK_TIMEOUT_S)
            await stream.receive(LackedChunks)
    except TimeoutError as error:
        raise PeerError(f"holder {short(holder)} took longer than {CHUNK_TIMEOUT_S:.0f} s") from error
