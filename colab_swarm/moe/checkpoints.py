"""An expert's state as hashed chunks, and back; never pickle.

The state's tensors lie in one blob, each at a multiple of 64 bytes, in the order of the state; the blob is cut into
chunks of 256 KiB. A *manifest* names the expert, its step, the chunks, and the layout: the plain part of the state
(`colab_swarm.tensors.statedict`) and where each tensor lies. The manifest itself is a chunk, so that its digest stands
for the whole. Chunks and manifests come from strangers: all is checked before anybody uses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from colab_swarm.errors import StateError
from colab_swarm.moe.chunks import DIGEST_BYTES, Save, cut_digests, digest_of
from colab_swarm.moe.grid import MAX_NAME_CHARS
from colab_swarm.net.peers import MAX_PAYLOAD_BYTES, UNDECODABLE, Message
from colab_swarm.tensors.statedict import decode_skeleton, encode_skeleton, flatten, unflatten
from colab_swarm.tensors.tensorfile import KINDS

CHUNK_BYTES = 1 << 18
MAX_CHUNKS = 1 << 14
MAX_STATE_BYTES = MAX_CHUNKS * CHUNK_BYTES
MAX_STEP = 1 << 48
ALIGNMENT_BYTES = 64


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's name, type as torch calls it, and sides; its place follows from those before it."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * KINDS[self.kind][1]


class Manifest(Message, frozen=True):
    """What a saved state is made of.

    Attributes:
        uid, step: which expert, and updates in its weights.
        skeleton: the plain part of the state, JSON.
        tensors: in the blob's order.
        size_bytes: of the blob.
        digests: of the blob's chunks, joined.
    """

    uid: str
    step: int
    skeleton: bytes
    tensors: tuple[TensorPlace, ...]
    size_bytes: int
    digests: bytes

    def __post_init__(self) -> None:
        chunks = -(-self.size_bytes // CHUNK_BYTES)
        if not 0 <= self.size_bytes <= MAX_STATE_BYTES or len(self.digests) != DIGEST_BYTES * chunks:
            raise ValueError("a manifest's sizes do not add up")
        if not 0 <= self.step < MAX_STEP or len(self.uid) > 2 * MAX_NAME_CHARS:
            raise ValueError("a manifest's uid or step is out of range")

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Manifest:
        """Read a manifest's chunk.

        Raises:
            StateError: it is none.
        """
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except UNDECODABLE as error:
            raise StateError(f"a saved expert's manifest cannot be read: {error}") from error

    def span(self, chunk: int) -> slice:
        """Where a chunk lies in the blob, bytes."""
        return slice(chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self.size_bytes))


@dataclass(frozen=True)
class FrozenState:
    """A copy of an expert's state: its layout and its tensors' bytes."""

    skeleton: bytes
    tensors: tuple[TensorPlace, ...]
    blob: NDArray[np.uint8]


@dataclass(frozen=True)
class SavedExpert:
    """A state cut into chunks."""

    manifest: Manifest
    blob: NDArray[np.uint8]

    @cached_property
    def head(self) -> bytes:
        """The manifest's chunk."""
        return msgspec.msgpack.encode(self.manifest)

    @cached_property
    def pieces(self) -> dict[bytes, memoryview]:
        """All chunks by digest, the manifest first; equal chunks once."""
        view, manifest = memoryview(self.blob.data), self.manifest
        chunks = enumerate(cut_digests(manifest.digests))
        return {digest_of(self.head): memoryview(self.head)} | {
            digest: view[manifest.span(chunk)] for chunk, digest in chunks
        }

    def save_of(self, owner: bytes, *, at: float) -> Save:
        """What a shelf notes of it; ``at``: swarm time, seconds."""
        return save_of(self.manifest, owner, at=at)


def save_of(manifest: Manifest, owner: bytes, *, at: float) -> Save:
    """What a shelf notes of a save with this manifest."""
    head = msgspec.msgpack.encode(manifest)
    pieces = digest_of(head) + manifest.digests
    size_bytes = len(head) + manifest.size_bytes
    return Save(owner, manifest.uid, manifest.step, pieces[:DIGEST_BYTES], pieces, size_bytes, at)


def freeze(state: Any) -> FrozenState:
    """Copy a state, so that its owner may go on.

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
    return FrozenState(encode_skeleton(skeleton), places, blob)


def cut(uid: str, step: int, frozen: FrozenState) -> SavedExpert:
    """Hash a state's chunks (BLAKE3, some GB/s: call it off the loop).

    Raises:
        StateError: the state is too large to be shared.
    """
    size_bytes = frozen.blob.nbytes
    if size_bytes > MAX_STATE_BYTES:
        raise StateError(f"{uid} has a state of {size_bytes:,} bytes; peers share up to {MAX_STATE_BYTES:,}")
    view = memoryview(frozen.blob.data)
    digests = b"".join(digest_of(view[at : at + CHUNK_BYTES]) for at in range(0, size_bytes, CHUNK_BYTES))
    saved = SavedExpert(
        Manifest(uid, step, frozen.skeleton, frozen.tensors, size_bytes, digests), frozen.blob
    )
    if len(saved.head) > MAX_PAYLOAD_BYTES:
        raise StateError(f"{uid} has a state of too many parts to be shared: {len(frozen.tensors):,} tensors")
    return saved


def thaw(saved: SavedExpert) -> Any:
    """The state that was saved; its tensors are views of the blob.

    Raises:
        StateError: the manifest does not add up, or values are not finite.
    """
    manifest, blob = saved.manifest, torch.from_numpy(saved.blob)
    if any(place.kind not in KINDS or min(place.shape, default=0) < 0 for place in manifest.tensors):
        raise StateError(f"the saved {manifest.uid} has a tensor of an unknown kind")
    spans, size_bytes = _spans(manifest.tensors)
    tensors: dict[str, torch.Tensor] = {}
    if size_bytes != manifest.size_bytes:
        raise StateError(f"the saved {manifest.uid} is not as large as it says")
    for place, span in zip(manifest.tensors, spans, strict=True):
        try:
            tensor = blob[span].view(getattr(torch, place.kind)).reshape(place.shape)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:  # such as (0, 2**64)
            raise StateError(f"the saved {manifest.uid} has a tensor that cannot be: {error}") from error
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise StateError(f"the saved {manifest.uid} holds NaN or infinite values in {place.name[:80]!r}")
        tensors[place.name] = tensor
    return unflatten(tensors, decode_skeleton(manifest.skeleton))


def check_fit(found: Any, model: Any, path: str = "") -> None:
    """Raises `StateError` unless ``found`` is built like ``model``: the same entries, or fewer, of the same shapes.

    ``model`` is the state of an expert that took a step: one saved before its first has fewer entries.
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
        case None, _:  # what comes into being with the first step
            return
        case bool() | int() | float() | str() | bytes(), None | bool() | int() | float() | str() | bytes():
            return
    raise StateError(
        f"the saved state does not fit this expert at {path or '/'!r}: another class or optimizer?"
    )


def _spans(places: Sequence[TensorPlace]) -> tuple[list[slice], int]:
    """Where the tensors lie in the blob, and its size, bytes."""
    spans, at = [], 0
    for place in places:
        spans.append(slice(at, at + place.size_bytes))
        at += -(-place.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return spans, at
