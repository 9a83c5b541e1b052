"""Saves of experts: each save is on its host's disk and at a few other peers, the *holders*.

A save is a state in chunks (`colab_swarm.tensors.chunks`), named by its root hash. Its *owner* is the peer that hosted
the expert and saved it. A holder downloads the save from the owner. If another host takes the expert over, it downloads
the save from the holders in the same way. A downloader requests only chunks that are not on its disk. A holder keeps
the newest two saves per expert and owner, for a day.

The owner's signed record names two saves: the newest save and the last *safe* save. A save is safe if it has at least
as many holders as each save before it. So if the host and all holders except one are lost, only the steps since the
last safe save are lost. Any peer may claim to have a save of any step. A new host tries the claims in order, beginning
with the highest step.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from blake3 import blake3

from colab_swarm.dht.service import RunServices, is_sound
from colab_swarm.errors import PeerError, StateError, require
from colab_swarm.files import write_file
from colab_swarm.moe.grid import MAX_HOLDERS, Grid, Index
from colab_swarm.net.peers import (
    UNDECODABLE,
    Ack,
    Buffer,
    Contact,
    Message,
    PeerId,
    Refusal,
    Role,
    Stream,
    short,
)
from colab_swarm.runtime import BackgroundTasks, free_ram_bytes
from colab_swarm.tensors.chunks import (
    CHUNK_TIMEOUT_S,
    MAX_STATE_BYTES,
    MAX_STEP,
    REQUEST_CHUNKS,
    ChunkDownload,
    Digest,
    FetchChunks,
    Manifest,
    Snapshot,
    digest_of,
    send_chunks,
)
from colab_swarm.tensors.statedict import Blob

logger = logging.getLogger(__name__)
KEPT_S = 24 * 3600.0  # a save that is not renewed for this time is dropped; also the longest life of a record
ANNOUNCE_S = 60.0  # between two announcements of a holder
PROBE_S = 10.0  # timeout of the first request to a holder
PATIENCE_S = 60.0  # for this time, an unreachable or full holder is tried after all others
ATTEMPTS = 4  # how many holders a save tries for each copy
SAVES_OF_ONE = 2  # saves kept per expert and owner; two, because the newest may not be in the DHT yet


class Save(msgspec.Struct, frozen=True):
    owner: bytes  # id of the peer that hosted and saved it
    manifest: Manifest  # its subject is the expert's name
    at: float  # swarm time when its owner last renewed it, seconds

    @property
    def uid(self) -> str:
        return self.manifest.subject.decode(errors="replace")  # a garbled name belongs to no expert


class ReplicaStore:
    """The saves on this peer's disk: those that ``me`` owns, and saves of other peers within a quota. Thread-safe.

    Each save has a file with the state, and a file with the record. Only one process may use the folder. The store
    checks the hash of each chunk that it reads, so it need not sync its writes to the disk.
    """

    def __init__(self, folder: Path, *, me: bytes, quota_bytes: int = 8 << 30) -> None:
        self._folder = folder / "saves"
        self._me = me
        self._quota_bytes = quota_bytes
        self._changing = threading.Lock()
        self._saves: dict[Path, Save] = {}  # by the file of the state
        for record in self._folder.glob("*.save"):
            path = record.with_suffix(".safetensors")
            try:
                if path.exists():
                    self._saves[path] = msgspec.msgpack.decode(record.read_bytes(), type=Save)
            except (OSError, *UNDECODABLE) as error:
                logger.warning("dropped %s, which cannot be read: %s", record, error)
        for path in [*self._folder.glob("*")]:  # remaining files of a killed process
            if path.with_suffix(".safetensors") not in self._saves:
                _delete(path)

    def add(self, save: Save, blob: Blob) -> None:
        """Write or renew a save, and keep only the newest two saves of its expert and owner.

        Raises `StateError` if the quota has not enough space for a save of another peer, or if the disk refuses it.
        """
        path = self._path(save.owner, save.manifest.root)
        with self._changing:
            room_bytes = self.room_bytes(save.owner, save.manifest.root)
            text = f"{room_bytes:,} bytes are left here, {blob.nbytes:,} are needed"
            require(blob.nbytes <= room_bytes or save.owner == self._me, text, StateError)
            # write the record first: at the next start, a record without its file is dropped
            write_file(path.with_suffix(".save"), [msgspec.msgpack.encode(save)])
            if path not in self._saves:
                write_file(path, [blob.data])
            self._saves[path] = save
            same = [
                other for other, one in self._saves.items() if (one.owner, one.uid) == (save.owner, save.uid)
            ]
            self._drop(sorted(same, key=lambda other: self._saves[other].at)[:-SAVES_OF_ONE])

    def manifest(self, root: bytes) -> Manifest | None:
        """Return the manifest of a save of any owner, or None if the save is not on this disk."""
        return next((self._saves[path].manifest for path in self._files(root)), None)

    def read(self, root: bytes, digest: bytes) -> bytes | None:
        """Return a chunk of a save, or None if the chunk is missing or damaged. Delete a damaged save."""
        for path in self._files(root):
            manifest = self._saves[path].manifest
            chunks = [chunk for chunk in range(manifest.chunks) if manifest.digest(chunk) == digest]
            if not chunks:
                return None
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(manifest.span(chunks[0]).start)
                data = file.read(manifest.length(chunks[0]))
                if digest_of(data) == digest:
                    return data
            logger.warning("dropped %s: its contents do not match their hash", path)
            with self._changing:
                self._drop([path])
        return None

    def saves(self, uid: str | None = None) -> list[Save]:
        """Return the saves of one expert, or all saves, with the highest step first."""
        saves = [save for save in [*self._saves.values()] if uid in (None, save.uid)]
        return sorted(saves, key=lambda save: (save.manifest.step, save.at), reverse=True)

    def room_bytes(self, owner: bytes, root: bytes) -> int:
        """Return the number of bytes that the quota leaves for this save of another peer."""
        free_bytes = self._quota_bytes
        for path, save in [*self._saves.items()]:
            if save.owner != self._me and path != self._path(owner, root):
                free_bytes -= save.manifest.size_bytes
        return max(0, free_bytes)

    def expire(self, before: float) -> None:
        """Drop the saves that were last renewed before the swarm time ``before``."""
        with self._changing:
            self._drop([path for path, save in self._saves.items() if save.at < before])

    def _path(self, owner: bytes, root: bytes) -> Path:
        return self._folder / f"{root.hex()[:32]}-{owner.hex()[:16]}.safetensors"

    def _files(self, root: bytes) -> list[Path]:
        return [path for path in [*self._saves] if path.name.startswith(root.hex()[:32])]

    def _drop(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self._saves.pop(path, None)
            _delete(path.with_suffix(".save"))
            _delete(path)


def _delete(path: Path) -> None:
    with contextlib.suppress(
        OSError
    ):  # the file is gone already, or the disk fails and the next write reports it
        path.unlink()


class KeepSave(Message, frozen=True):
    """Asks a peer to download the caller's save with this root, and to keep it. The peer then answers `Ack`."""

    root: Digest


class DescribeSave(Message, frozen=True):
    """Asks a holder for the manifest with this root."""

    root: Digest


class FetchSave(FetchChunks, frozen=True):
    """Opens a stream of chunks of the save with this root."""

    root: Digest


class SavePlace(Message, frozen=True):
    step: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEP)]  # number of the expert's optimizer steps
    root: Digest
    holders: Annotated[tuple[Contact, ...], msgspec.Meta(max_length=MAX_HOLDERS + 1)]  # peers that have it

    def __post_init__(self) -> None:
        require(all(map(is_sound, self.holders)), "record of a save with invalid holders")


class SaveRecord(Message, frozen=True):
    """An expert's newest save and the last safe one; published in the DHT."""

    saves: Annotated[tuple[SavePlace, ...], msgspec.Meta(max_length=SAVES_OF_ONE)]


@dataclass(frozen=True)
class SaveResult:
    step: int  # number of the expert's optimizer steps
    holders: frozenset[PeerId]  # other peers that have the save
    at: float  # swarm time, seconds
    fault: str | None = (
        None  # why the save is not on this peer's disk or not in the DHT; None if it is in both
    )


class ExpertSaves:
    """Saves this peer's experts, keeps saves for other peers, and finds the saves of any peer."""

    def __init__(self, services: RunServices, store: ReplicaStore) -> None:
        self.store = store
        self.results: dict[str, SaveResult] = {}  # result of the last save of each expert
        self.safe: dict[
            str, SavePlace
        ] = {}  # of each expert, the newest save with as many holders as any before
        self._sent: dict[bytes, Snapshot] = {}  # saves that holders are downloading, by root
        self._failed_at: dict[PeerId, float] = {}  # when a holder last failed, swarm time
        self._keeping = asyncio.Lock()
        self._peers = services.peers
        self._dht = services.dht
        self._run_id = services.run_id
        self._tasks = BackgroundTasks("hold saved experts", services.events, services.rng)
        self._peers.serve(KeepSave, self._keep, role=Role.WORKER)
        self._peers.serve(DescribeSave, self._describe, role=Role.WORKER)
        self._peers.serve_stream(FetchSave, self._send, role=Role.WORKER)

    async def start(self) -> None:
        """Announce regularly, until `stop`, that this peer keeps saves."""
        self._tasks.every(
            ANNOUNCE_S, self._announce
        )  # begin this first, because an interrupt may end the next call
        await self._announce()

    async def stop(self) -> None:
        self.kill()
        await self._announce(0.5)

    def kill(self) -> None:
        """Stop serving without withdrawing announcements, as a crash would."""
        self._tasks.cancel()
        for kind in (KeepSave, DescribeSave, FetchSave):
            self._peers.unserve(kind)

    async def others(self) -> Set[PeerId]:
        """Return the other peers that keep saves."""
        holders = await self._dht.published(f"{self._run_id}/expert-holders", Contact)
        return holders.keys() - {self._peers.id}

    async def _announce(self, ttl_s: float = 3 * ANNOUNCE_S) -> None:
        await asyncio.to_thread(self.store.expire, self._peers.time() - KEPT_S)
        me = self._peers.contact
        if me.addresses:  # nobody could download a save from a peer that cannot be dialled
            await self._dht.publish(f"{self._run_id}/expert-holders", me, ttl_s=ttl_s)

    async def _keep(self, peer: PeerId, ask: KeepSave) -> Ack:
        try:
            async with self._keeping:  # one save at a time, because it is in memory during the download
                free_bytes = (free_ram_bytes() or MAX_STATE_BYTES) // 2
                limit_bytes = min(self.store.room_bytes(peer, ask.root), free_bytes)
                await self._store(peer, await self._download(ask.root, [peer], limit_bytes))
        except StateError as error:
            raise Refusal(str(error)) from error
        return Ack()

    async def _store(self, owner: PeerId, saved: Snapshot) -> None:
        save = Save(owner, saved.manifest, self._peers.time())
        await asyncio.to_thread(self.store.add, save, saved.blob)

    async def _describe(self, _peer: PeerId, ask: DescribeSave) -> Manifest:
        sent = self._sent.get(ask.root)
        manifest = sent.manifest if sent else self.store.manifest(ask.root)
        if manifest is None:
            raise Refusal(f"save {ask.root.hex()[:8]} is not here")
        return manifest

    async def _send(self, ask: FetchSave, stream: Stream) -> None:
        sent = self._sent.get(ask.root)

        async def read(digest: bytes) -> Buffer | None:
            if sent:
                return sent.chunks.get(digest)
            return await asyncio.to_thread(self.store.read, ask.root, digest)

        await send_chunks(ask, stream, read)

    def due(self, uid: str, step: int, others: Set[PeerId], copies: int) -> bool:
        """Return True if a save would store newer steps, repeat a failed one, reach more holders, or renew a record."""
        last = self.results.get(uid)
        if last is None or last.step != step or last.fault:
            return True
        lacking = len(last.holders) < min(copies, len(others)) or not last.holders <= others
        return lacking or self._peers.time() - last.at > KEPT_S / 24

    async def save(self, saved: Snapshot, others: Set[PeerId], copies: int) -> SaveResult:
        """Write a save on this disk and at ``copies`` of the ``others``, then publish its record."""
        uid = saved.manifest.subject.decode()
        step = saved.manifest.step
        fault = await self.write(saved)
        self._sent[saved.root] = saved
        try:
            holders = await self._spread(saved, others, copies)
        finally:
            del self._sent[saved.root]
        contacts = [*map(self._peers.contact_of, sorted(holders))]
        if not fault:
            contacts.append(self._peers.contact)
        place = SavePlace(step, saved.root, tuple(contacts))
        former = self.safe.get(uid, place)
        record = SaveRecord((place,) if former.root == place.root else (place, former))
        if not (contacts and await self._dht.publish(self._key(uid, "save"), record, ttl_s=KEPT_S)):
            fault = fault or f"no peer stored the record of the save of {uid}"
        result = self.results[uid] = SaveResult(step, frozenset(holders), self._peers.time(), fault)
        # a save with fewer holders than the one before, as after an outage, does not become the safe one
        if contacts and len(contacts) >= len(former.holders):
            self.safe[uid] = place
        return result

    async def write(self, saved: Snapshot) -> str | None:
        """Write a save on this disk; return None, or the text of the error."""
        try:
            await self._store(self._peers.id, saved)
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
            """Sort former holders first, then by the time of the last failure, then in an expert's random order."""
            return peer not in former, self._failed_at.get(peer, 0.0), blake3(subject + peer).digest()

        able = [peer for peer in others if self._failed_at.get(peer, since) <= since]
        # one timeout for each request of several chunks, and one for the first request
        timeout_s = CHUNK_TIMEOUT_S * (1 + saved.manifest.chunks / REQUEST_CHUNKS)
        holders: list[PeerId] = []
        for holder in sorted(able, key=rank)[: ATTEMPTS * copies]:
            if len(holders) == copies:
                break
            try:
                await self._peers.call(holder, KeepSave(saved.root), Ack, timeout_s=timeout_s)
                holders.append(holder)
            except PeerError as error:
                logger.info("%s keeps no save of %s: %s", short(holder), subject, error)
                self._failed_at[holder] = (
                    self._peers.time()
                )  # so that the saves of other experts do not try it
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
        """Return an expert's saves that are on this disk or claimed in the DHT, with their owners, highest step first.

        Any peer may make a false claim. So a claim never replaces the claim of another owner.
        """
        claims: dict[tuple[bytes, bytes], tuple[PeerId, SavePlace]] = {}
        for save in self.store.saves(uid):
            place = SavePlace(save.manifest.step, save.manifest.root, ())
            claims[save.owner, place.root] = PeerId(save.owner), place
        records = await self._dht.published(self._key(uid, "save"), SaveRecord)
        for owner, record in records.items():
            for place in record.saves:
                claims[owner, place.root] = owner, place
                for contact in place.holders:
                    self._peers.learn(contact)
        return sorted(claims.values(), key=lambda claim: claim[1].step, reverse=True)

    async def fetch(self, uid: str, place: SavePlace, *, limit_bytes: int) -> Snapshot:
        """Return a save. Read its chunks from this disk, and download the other chunks from its holders.

        Raises `StateError` if the save is not the claimed state, is larger than ``limit_bytes``, or is incomplete.
        """
        holders = [contact.id for contact in place.holders if contact.id != self._peers.id]
        saved = await self._download(place.root, holders, limit_bytes)
        is_claimed = (saved.manifest.subject, saved.manifest.step) == (uid.encode(), place.step)
        require(is_claimed, f"a save of {uid} at step {place.step} is of another expert or step", StateError)
        return saved

    async def _download(self, root: bytes, holders: Sequence[PeerId], limit_bytes: int) -> Snapshot:
        # all holders are asked together, so all dead holders together cost one timeout
        answers = await asyncio.gather(*(self._ask(holder, root) for holder in holders))
        manifest = self.store.manifest(root)
        for answer in answers:
            manifest = manifest or answer
        if manifest is None:
            raise StateError(f"none of {len(holders)} holders has the save {root.hex()[:8]}")
        size_bytes = manifest.size_bytes
        require(size_bytes <= limit_bytes, f"a save of {size_bytes:,} bytes, {limit_bytes:,} fit", StateError)
        download = ChunkDownload(self._peers, manifest, partial(FetchSave, root=root))
        await asyncio.to_thread(download.fill, partial(self.store.read, root))
        await download.run(holder for holder, answer in zip(holders, answers, strict=True) if answer)
        return Snapshot(manifest, download.blob)

    async def _ask(self, holder: PeerId, root: bytes) -> Manifest | None:
        try:
            manifest = await self._peers.call(holder, DescribeSave(root), Manifest, timeout_s=PROBE_S)
        except PeerError as error:
            logger.info("holder %s has no such save: %s", short(holder), error)
            return None
        return manifest if manifest.root == root else None

    def _key(self, name: str, kind: str) -> str:
        return f"{self._run_id}/experts/{name}/{kind}"
