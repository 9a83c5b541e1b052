"""Chunks of saved experts on disk, named by their BLAKE3 hash, and which saves they belong to.

A chunk that several saves share lies here once, so an expert of which little has changed costs little. Chunks that
belong to no save are deleted. What is read is checked against its hash, so nothing is synced to disk: a chunk that a
power cut garbled is dropped when it is read, and other copies take its place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from blake3 import blake3

from colab_swarm.errors import StateError
from colab_swarm.net.peers import UNDECODABLE, Buffer

logger = logging.getLogger(__name__)
DIGEST_BYTES = 32
SAVES_OF_ONE = 2
"""Of one expert by one owner: the new one, and the one before until the new one is known to be safe."""


def digest_of(data: Buffer) -> bytes:
    """The name of a chunk."""
    return blake3(data).digest()


def cut_digests(joined: bytes) -> list[bytes]:
    """Digests that were joined."""
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


class ChunkStore:
    """Chunks in a folder; those that nobody holds are deleted. Safe from any thread."""

    def __init__(self, folder: Path) -> None:
        """The folder is made at the first chunk; what is in it is not held yet: see `sweep`."""
        self._folder = folder
        self._holds: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def __contains__(self, digest: bytes) -> bool:
        return self._path(digest).exists()

    def put(self, data: Buffer) -> bytes:
        """Keep a chunk, whole or not at all; returns its digest.

        Raises:
            StateError: the disk is full or cannot be written.
        """
        digest = digest_of(data)
        path = self._path(digest)
        if not path.exists():
            write_whole(path, data)
        return digest

    def get(self, digest: bytes) -> bytes | None:
        """The chunk; None if it is not here or was garbled, in which case it is dropped."""
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if digest_of(data) == digest:
            return data
        logger.warning("dropped %s: its contents do not match their hash", path)
        _delete(path)
        return None

    def hold(self, digests: Collection[bytes]) -> None:
        """These are needed, whether they are here yet or not, until `release`."""
        with self._lock:
            self._holds.update(digests)

    def release(self, digests: Collection[bytes]) -> None:
        """End what `hold` began; deletes those that nobody else needs."""
        with self._lock:
            self._holds.subtract(digests)
            for digest in digests:
                if self._holds[digest] <= 0:
                    del self._holds[digest]
                    _delete(self._path(digest))

    def sweep(self) -> None:
        """Delete every chunk that nobody holds, and what a killed process left half-written."""
        with self._lock:
            needed = {digest.hex() for digest in self._holds}
            for path in [*self._folder.glob("??/*")]:
                if path.name not in needed:
                    _delete(path)

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._folder / name[:2] / name


class Save(msgspec.Struct, frozen=True):
    """One saved state of one expert.

    Attributes:
        owner: id of the peer that hosted and saved it.
        uid: of the expert.
        step: updates in its weights.
        manifest: digest of the chunk that says what the state is made of.
        pieces: digests of all its chunks, the manifest first, joined.
        size_bytes: of all of them.
        at: swarm time when its owner last wanted it, seconds.
    """

    owner: bytes
    uid: str
    step: int
    manifest: bytes
    pieces: bytes
    size_bytes: int
    at: float

    @property
    def digests(self) -> frozenset[bytes]:
        """Of all its chunks."""
        return frozenset(cut_digests(self.pieces))


class Shelf:
    """The saves on this peer's disk: its own, and those it keeps for others within a quota.

    Used on one thread; its `chunks` on any.
    """

    def __init__(self, folder: Path, *, me: bytes, quota_bytes: int) -> None:
        """``me`` owns the saves that the quota does not bound. One process uses a folder at a time."""
        self.chunks = ChunkStore(folder / "chunks")
        self._folder = folder / "saves"
        self._me, self._quota_bytes = me, quota_bytes
        self._coming_bytes = 0
        self._saves: dict[Path, Save] = {}
        for path in self._folder.glob("*.save"):
            self._load(path)
        self.chunks.sweep()

    def _load(self, path: Path) -> None:
        try:
            save = msgspec.msgpack.decode(path.read_bytes(), type=Save)
            missing = sum(digest not in self.chunks for digest in save.digests)
        except (OSError, *UNDECODABLE) as error:
            logger.warning("dropped %s, which cannot be read: %s", path, error)
            _delete(path)
            return
        if missing:  # those that are left may still help, together with other holders
            logger.warning("%d chunks of %s at step %d are missing here", missing, save.uid, save.step)
        self._saves[path] = save
        self.chunks.hold(save.digests)

    def saves(self, uid: str | None = None) -> list[Save]:
        """Those of one expert, or all; newest step first."""
        found = (save for save in [*self._saves.values()] if uid in (None, save.uid))
        return sorted(found, key=lambda save: (save.step, save.at), reverse=True)

    @property
    def kept_bytes(self) -> int:
        """What is kept for others; safe from any thread."""
        return sum(save.size_bytes for save in self.saves() if save.owner != self._me)

    @property
    def room_bytes(self) -> int:
        """What more may be kept for others."""
        return max(0, self._quota_bytes - self.kept_bytes - self._coming_bytes)

    @contextmanager
    def receiving(self, save: Save) -> Iterator[None]:
        """While a save's chunks come in they have their place, and are not deleted.

        Raises:
            StateError: there is no room for it.
        """
        counted = 0 if save.owner == self._me or self._path(save) in self._saves else save.size_bytes
        if counted > self.room_bytes:
            raise StateError(f"{self.room_bytes:,} bytes are left here, {save.size_bytes:,} are needed")
        digests = save.digests
        self._coming_bytes += counted
        self.chunks.hold(digests)
        try:
            yield
        finally:
            self._coming_bytes -= counted
            self.chunks.release(digests)

    def add(self, save: Save) -> None:
        """All its chunks are here: keep it from now on; of more than two by its owner the oldest goes.

        Raises:
            StateError: the disk is full or cannot be written.
        """
        path = self._path(save)
        write_whole(path, msgspec.msgpack.encode(save))
        if path not in self._saves:
            self.chunks.hold(save.digests)
        self._saves.pop(path, None)
        self._saves[path] = save
        self._drop(self._of(save.owner, save.uid)[:-SAVES_OF_ONE])

    def settle(self, owner: bytes, uid: str, manifest: bytes) -> None:
        """This save is safe elsewhere too: the owner needs no other of the expert."""
        mine = self._of(owner, uid)
        if any(save.manifest == manifest for _, save in mine):
            self._drop([(path, save) for path, save in mine if save.manifest != manifest])

    def expire(self, before: float) -> None:
        """Drop what nobody has wanted since ``before``, swarm time in seconds."""
        self._drop([(path, save) for path, save in self._saves.items() if save.at < before])

    def _path(self, save: Save) -> Path:
        return self._folder / f"{save.manifest.hex()[:32]}-{save.owner.hex()[:16]}.save"

    def _of(self, owner: bytes, uid: str) -> list[tuple[Path, Save]]:
        """In the order in which they came or were wanted again."""
        found = ((p, save) for p, save in self._saves.items() if (save.owner, save.uid) == (owner, uid))
        return sorted(found, key=lambda entry: entry[1].at)

    def _drop(self, entries: list[tuple[Path, Save]]) -> None:
        for path, save in entries:
            _delete(path)
            del self._saves[path]
            self.chunks.release(save.digests)


def write_whole(path: Path, data: Buffer) -> None:
    """Write a file so that it holds all of ``data`` or is as it was; its folder is made if need be.

    Raises:
        StateError: the disk is full or cannot be written; nothing is left behind.
    """
    partial = path.with_name(f"{path.name}.{threading.get_ident()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        _delete(partial)
        raise StateError(
            f"cannot write {path}: {error.strerror}; free some space or name another folder"
        ) from error


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):  # gone already, or a disk that failed: it is told where it matters
        path.unlink()
