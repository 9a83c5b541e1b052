"""Saves of experts: an expert's state as hashed chunks, and the store of chunks on disk. Never pickle.

Format. The tensors of the state lie in one blob, in order, each at a multiple of 64 bytes. The blob is cut into chunks
of 256 KiB. A *manifest* names the expert, its step, the chunks, and the layout: the plain part of the state
(`colab_swarm.tensors.statedict`) and each tensor's type and shape. The manifest is a chunk too: its digest identifies
the whole save. Chunks and manifests come from strangers: everything is checked before use.

Store. Chunks are named by their BLAKE3 hash. Saves share equal chunks, so an expert with few changes costs little.
Chunks that belong to no save are deleted. Every read is checked against the hash, so writes are not synced: a chunk
damaged by a power cut is dropped when it is read, and other replicas replace it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from colab_swarm.errors import StateError
from colab_swarm.moe.grid import MAX_NAME_CHARS
from colab_swarm.net.peers import MAX_PAYLOAD_BYTES, UNDECODABLE, Buffer, Message
from colab_swarm.tensors.statedict import KINDS, decode_skeleton, encode_skeleton, flatten, unflatten

logger = logging.getLogger(__name__)

DIGEST_BYTES = 32
SAVES_OF_ONE = 2  # per expert and owner: the new one, and the one before until the new one is safe
CHUNK_BYTES = 1 << 18
MAX_CHUNKS = 1 << 14
MAX_STATE_BYTES = MAX_CHUNKS * CHUNK_BYTES
MAX_STEP = 1 << 48
ALIGNMENT_BYTES = 64


def digest_of(data: Buffer) -> bytes:
    """Return the name of a chunk."""
    return blake3(data).digest()


def cut_digests(joined: bytes) -> list[bytes]:
    """Split joined digests."""
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


class ChunkStore:
    """Chunks in a folder, with a count of references; unreferenced ones are deleted. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Create the folder at the first chunk; chunks already there have no reference yet, see `sweep`."""
        self._folder = folder
        self._holds: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def __contains__(self, digest: bytes) -> bool:
        return self._path(digest).exists()

    def put(self, data: Buffer) -> bytes:
        """Write a chunk atomically; return its digest. Raises StateError if the disk is full or cannot be written."""
        digest = digest_of(data)
        path = self._path(digest)
        if not path.exists():
            write_whole(path, data)
        return digest

    def get(self, digest: bytes) -> bytes | None:
        """Return the chunk; None if it is missing or damaged. A damaged one is deleted."""
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
        """Add a reference to these chunks, present or not, until `release`."""
        with self._lock:
            self._holds.update(digests)

    def release(self, digests: Collection[bytes]) -> None:
        """Remove a reference from these chunks, and delete those without any."""
        with self._lock:
            self._holds.subtract(digests)
            for digest in digests:
                if self._holds[digest] <= 0:
                    del self._holds[digest]
                    _delete(self._path(digest))

    def sweep(self) -> None:
        """Delete all unreferenced chunks, and partial files of a killed process."""
        with self._lock:
            needed = {digest.hex() for digest in self._holds}
            for path in [*self._folder.glob("??/*")]:
                if path.name not in needed:
                    _delete(path)

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._folder / name[:2] / name


class Save(msgspec.Struct, frozen=True):
    """One saved state of one expert."""

    owner: bytes  # id of the peer that hosted and saved it
    uid: str  # of the expert
    step: int  # optimizer steps in its weights
    manifest: bytes  # digest of the manifest's chunk
    joined: bytes  # digests of all its chunks, the manifest first, joined
    size_bytes: int  # of all of them
    at: float  # swarm time when its owner last renewed it, seconds

    @property
    def digests(self) -> frozenset[bytes]:
        """Digests of all its chunks."""
        return frozenset(cut_digests(self.joined))


class ReplicaStore:
    """The saves on this peer's disk: its own, and within a quota those of others.

    Used on one thread; its `chunks` on any.
    """

    def __init__(self, folder: Path, *, me: bytes, quota_bytes: int = 8 << 30) -> None:
        """The quota does not apply to saves owned by ``me``. Only one process may use a folder at a time."""
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
        if missing:  # the others may still help, together with other holders
            logger.warning("%d chunks of %s at step %d are missing here", missing, save.uid, save.step)
        self._saves[path] = save
        self.chunks.hold(save.digests)

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
        return max(0, self._quota_bytes - self.kept_bytes - self._coming_bytes)

    @contextmanager
    def receiving(self, save: Save) -> Iterator[None]:
        """Reserve space for a save while its chunks arrive, and keep them from deletion.

        Raises:
            StateError: there is not enough space.
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
        """Add a save whose chunks are all here; its owner's oldest saves beyond two are dropped.

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
        """Drop the owner's other saves of the expert, if this one is here."""
        mine = self._of(owner, uid)
        if any(save.manifest == manifest for _, save in mine):
            self._drop([(path, save) for path, save in mine if save.manifest != manifest])

    def expire(self, before: float) -> None:
        """Drop saves that were not renewed since ``before``, swarm time in seconds."""
        self._drop([(path, save) for path, save in self._saves.items() if save.at < before])

    def _path(self, save: Save) -> Path:
        return self._folder / f"{save.manifest.hex()[:32]}-{save.owner.hex()[:16]}.save"

    def _of(self, owner: bytes, uid: str) -> list[tuple[Path, Save]]:
        """Return an owner's saves of an expert, in the order of their last renewal."""
        found = ((p, save) for p, save in self._saves.items() if (save.owner, save.uid) == (owner, uid))
        return sorted(found, key=lambda entry: entry[1].at)

    def _drop(self, entries: list[tuple[Path, Save]]) -> None:
        for path, save in entries:
            _delete(path)
            del self._saves[path]
            self.chunks.release(save.digests)


def write_whole(path: Path, data: Buffer) -> None:
    """Write a file atomically; create its folder if needed.

    Raises:
        StateError: the disk is full or cannot be written; no partial file remains.
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


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's name, torch type name and shape; its offset follows from the tensors before it."""

    name: str
    kind: str
    shape: tuple[int, ...]


class SaveManifest(Message, frozen=True):
    """Contents of a saved state."""

    uid: str  # of the expert
    step: int  # optimizer steps in its weights
    skeleton: bytes  # the plain part of the state, JSON
    tensors: tuple[TensorPlace, ...]  # in the order of the blob
    size_bytes: int  # of the blob
    digests: bytes  # of the blob's chunks, joined

    def __post_init__(self) -> None:
        chunks = -(-self.size_bytes // CHUNK_BYTES)
        if not 0 <= self.size_bytes <= MAX_STATE_BYTES or len(self.digests) != DIGEST_BYTES * chunks:
            raise ValueError("a manifest's sizes do not add up")
        if not 0 <= self.step < MAX_STEP or len(self.uid) > 2 * MAX_NAME_CHARS:
            raise ValueError("a manifest's uid or step is out of range")

    @classmethod
    def decode(cls, data: bytes | memoryview) -> SaveManifest:
        """Decode a manifest's chunk. Raises StateError if it is not a valid manifest."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except UNDECODABLE as error:
            raise StateError(f"a saved expert's manifest cannot be read: {error}") from error

    def span(self, chunk: int) -> slice:
        """Return the bytes of the blob that a chunk contains."""
        return slice(chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self.size_bytes))


FrozenState: TypeAlias = tuple[bytes, tuple[TensorPlace, ...], NDArray[np.uint8]]
"""A copy of an expert's state: skeleton, tensors and blob, as in `SaveManifest`."""


@dataclass(frozen=True)
class SavedExpert:
    """A state cut into chunks."""

    manifest: SaveManifest
    blob: NDArray[np.uint8]

    @cached_property
    def head(self) -> bytes:
        """The manifest's chunk."""
        return msgspec.msgpack.encode(self.manifest)

    @cached_property
    def chunks(self) -> dict[bytes, memoryview]:
        """All chunks by digest, the manifest first; equal chunks once."""
        view, manifest = memoryview(self.blob.data), self.manifest
        chunks = enumerate(cut_digests(manifest.digests))
        return {digest_of(self.head): memoryview(self.head)} | {
            digest: view[manifest.span(chunk)] for chunk, digest in chunks
        }


def save_of(manifest: SaveManifest, owner: bytes, *, at: float) -> Save:
    """Return the store's entry for a save with this manifest; ``at``: swarm time, seconds."""
    head = msgspec.msgpack.encode(manifest)
    joined = digest_of(head) + manifest.digests
    size_bytes = len(head) + manifest.size_bytes
    return Save(owner, manifest.uid, manifest.step, joined[:DIGEST_BYTES], joined, size_bytes, at)


def freeze(state: Any) -> FrozenState:
    """Copy a state, so that its expert can continue to learn.

    Raises:
        TypeError, ValueError: part of the state cannot be saved without pickle, or it is nested too deep.
    """
    tensors, skeleton = flatten(state)
    places = tuple(
        TensorPlace(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    )
    spans, size_bytes = _spans(places)
    blob = np.zeros(size_bytes, np.uint8)
    for span, tensor in zip(spans, tensors.values(), strict=True):
        blob[span] = tensor.reshape(-1).view(torch.uint8).numpy()
    return encode_skeleton(skeleton), places, blob


def cut(uid: str, step: int, frozen: FrozenState) -> SavedExpert:
    """Hash a state's chunks (BLAKE3, some GB/s: call it off the loop).

    Raises:
        StateError: the state is too large to be shared.
    """
    skeleton, tensors, blob = frozen
    size_bytes = blob.nbytes
    if size_bytes > MAX_STATE_BYTES:
        raise StateError(f"{uid} has a state of {size_bytes:,} bytes; peers share up to {MAX_STATE_BYTES:,}")
    view = memoryview(blob.data)
    digests = b"".join(digest_of(view[at : at + CHUNK_BYTES]) for at in range(0, size_bytes, CHUNK_BYTES))
    saved = SavedExpert(SaveManifest(uid, step, skeleton, tensors, size_bytes, digests), blob)
    if len(saved.head) > MAX_PAYLOAD_BYTES:
        raise StateError(f"{uid} has a state of too many parts to be shared: {len(tensors):,} tensors")
    return saved


def thaw(saved: SavedExpert) -> Any:
    """Return the saved state; its tensors are views of the blob.

    Raises:
        StateError: the manifest is inconsistent, or values are not finite.
    """
    manifest, blob = saved.manifest, torch.from_numpy(saved.blob)
    if any(place.kind not in KINDS or min(place.shape, default=0) < 0 for place in manifest.tensors):
        raise StateError(f"the saved {manifest.uid} has a tensor of an unknown kind")
    spans, size_bytes = _spans(manifest.tensors)
    tensors: dict[str, torch.Tensor] = {}
    if size_bytes != manifest.size_bytes:
        raise StateError(f"the saved {manifest.uid} does not have the announced size")
    for place, span in zip(manifest.tensors, spans, strict=True):
        try:
            tensor = blob[span].view(getattr(torch, place.kind)).reshape(place.shape)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:  # such as (0, 2**64)
            raise StateError(f"the saved {manifest.uid} has an invalid tensor: {error}") from error
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise StateError(f"the saved {manifest.uid} holds NaN or infinite values in {place.name[:80]!r}")
        tensors[place.name] = tensor
    return unflatten(tensors, decode_skeleton(manifest.skeleton))


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
        case None, _:  # created by the first step
            return
        case bool() | int() | float() | str() | bytes(), None | bool() | int() | float() | str() | bytes():
            return
    raise StateError(
        f"the saved state does not fit this expert at {path or '/'!r}: another class or optimizer?"
    )


def _spans(places: Sequence[TensorPlace]) -> tuple[list[slice], int]:
    """Return each tensor's bytes in the blob, and the blob's size."""
    spans, at = [], 0
    for place in places:
        size_bytes = math.prod(place.shape) * KINDS[place.kind][1]
        spans.append(slice(at, at + size_bytes))
        at += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return spans, at
