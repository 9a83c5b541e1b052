"""Saves of experts: an expert's state in chunks, and the store of chunks on disk.

Format. A save is a state in chunks (`colab_swarm.tensors.chunks`), and its manifest is a chunk too: its hash identifies
the whole save. All come from strangers and are checked before use.

Store. Chunks are named by their hash, so saves share equal ones. Chunks that belong to no save are deleted.
Every read is checked against the hash, so writes are not synced: a chunk damaged by a power cut is dropped when it is
read, and other replicas replace it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from colab_swarm.errors import StateError
from colab_swarm.net.peers import UNDECODABLE, Buffer
from colab_swarm.tensors.chunks import Digest, Manifest, digest_of

logger = logging.getLogger(__name__)

SAVES_OF_ONE = 2  # per expert and owner: the new one may not be in the DHT yet


class Save(msgspec.Struct, frozen=True):
    """One saved state of one expert."""

    owner: bytes  # id of the peer that hosted and saved it
    uid: str  # of the expert
    step: int  # optimizer steps in its weights
    digests: Annotated[
        tuple[Digest, ...], msgspec.Meta(min_length=1)
    ]  # of all its chunks, the manifest first
    size_bytes: int  # of all of them
    at: float  # swarm time when its owner last renewed it, seconds

    @property
    def manifest(self) -> bytes:
        """Digest of the manifest's chunk."""
        return self.digests[0]


class ReplicaStore:
    """The saves on this peer's disk: its own, and within a quota those of others.

    Used on one thread; `put` and `get` on any.
    """

    def __init__(self, folder: Path, *, me: bytes, quota_bytes: int = 8 << 30) -> None:
        """The quota does not apply to saves owned by ``me``. Only one process may use a folder at a time."""
        self._chunks, self._folder = folder / "chunks", folder / "saves"
        self._me, self._quota_bytes = me, quota_bytes
        self._saves: dict[Path, Save] = {}
        self._coming: list[tuple[Path, Save]] = []  # their chunks are being put
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
        """Write a chunk atomically; return its digest. Raises StateError if the disk is full or cannot be written."""
        digest = digest_of(data)
        if digest not in self:
            write_whole(self._chunk(digest), data)
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
        found = (save for save in [*self._saves.values()] if uid in (None, save.uid))
        return sorted(found, key=lambda save: (save.step, save.at), reverse=True)

    @property
    def kept_bytes(self) -> int:
        """Bytes of other peers' saves. Thread-safe."""
        return sum(save.size_bytes for save in self.saves() if save.owner != self._me)

    @property
    def room_bytes(self) -> int:
        """Bytes left for other peers' saves."""
        coming = {path: save for path, save in self._coming if save.owner != self._me}
        new_bytes = sum(save.size_bytes for path, save in coming.items() if path not in self._saves)
        return max(0, self._quota_bytes - self.kept_bytes - new_bytes)

    @contextmanager
    def adding(self, save: Save) -> Iterator[None]:
        """Reserve space for a save while its chunks are put; then add it, and drop its owner's oldest beyond two.

        Raises:
            StateError: there is not enough space, or the disk cannot be written.
        """
        path = self._folder / f"{save.manifest.hex()[:32]}-{save.owner.hex()[:16]}.save"
        counted = 0 if save.owner == self._me or path in self._saves else save.size_bytes
        if counted > self.room_bytes:
            raise StateError(f"{self.room_bytes:,} bytes are left here, {save.size_bytes:,} are needed")
        coming = path, save
        self._coming.append(coming)
        try:
            yield
            write_whole(path, msgspec.msgpack.encode(save))
            self._saves[path] = save
            self._drop(self._of(save.owner, save.uid)[:-SAVES_OF_ONE])
        finally:
            self._coming.remove(coming)
            self._sweep(save.digests)

    def expire(self, before: float) -> None:
        """Drop saves that were not renewed since ``before``, swarm time in seconds."""
        self._drop([path for path, save in self._saves.items() if save.at < before])

    def _chunk(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._chunks / name[:2] / name

    def _of(self, owner: bytes, uid: str) -> list[Path]:
        """Return an owner's saves of an expert, in the order of their last renewal."""
        found = (path for path, save in self._saves.items() if (save.owner, save.uid) == (owner, uid))
        return sorted(found, key=lambda path: self._saves[path].at)

    def _drop(self, paths: Iterable[Path]) -> None:
        dropped = [(path, self._saves.pop(path)) for path in paths]
        for path, _ in dropped:
            _delete(path)
        self._sweep(digest for _, save in dropped for digest in save.digests)

    def _needed(self) -> set[bytes]:
        saves = itertools.chain(self._saves.values(), (save for _, save in self._coming))
        return {digest for save in saves for digest in save.digests}

    def _sweep(self, digests: Iterable[bytes]) -> None:
        for digest in set(digests) - self._needed():
            _delete(self._chunk(digest))


def write_whole(path: Path, data: Buffer) -> None:
    """Write a file atomically; create its folder if needed.

    Raises StateError: the disk is full or cannot be written; no partial file remains.
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
    with contextlib.suppress(OSError):  # deleted already, or a failing disk, which the next write reports
        path.unlink()


def save_of(manifest: Manifest, owner: bytes, *, at: float) -> Save:
    """Return the store's entry for a save with this manifest; ``at``: swarm time, seconds."""
    head = msgspec.msgpack.encode(manifest)
    digests = (digest_of(head), *map(manifest.digest, range(manifest.chunks)))
    uid = manifest.subject.decode(errors="replace")  # a garbled one is no expert's
    return Save(owner, uid, manifest.step, digests, len(head) + manifest.size_bytes, at)


def check_fit(found: Any, model: Any, path: str = "") -> None:
    """Raise `StateError` unless ``found`` has the structure of ``model``: the same entries, or fewer, and shapes.

    ``model`` is the state of an expert that took a step: one saved before its first step has fewer entries.
    """
    match found, model:
        case torch.Tensor(), torch.Tensor() if found.shape == model.shape and found.dtype == model.dtype:
            return
        case Mapping(), Mapping() if found.keys() <= model.keys():
            for key in found:
                check_fit(found[key], model[key], f"{path}/{key}")
            return
        case list() | tuple(), list() | tuple() if len(found) == len(model):
            for i, (one, other) in enumerate(zip(found, model, strict=True)):
                check_fit(one, other, f"{path}/{i}")
            return
        case None, _ if path:  # created by the first step
            return
        case bool() | int() | float() | str() | bytes(), None | bool() | int() | float() | str() | bytes():
            return
    raise StateError(
        f"the saved state does not fit this expert at {path or '/'!r}: another class or optimizer?"
    )
