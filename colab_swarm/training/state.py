"""Sharing the training state: a late joiner fetches hashed chunks of a snapshot from several donors at once.

The snapshot is a copy, so a donor trains on while it serves, and shares no lock with averaging.
Donors on one branch hold equal states, so their chunks are interchangeable. A chunk is accepted by
its digest only: a donor that lies, stalls or vanishes costs the chunks in flight and nothing else.

A `Mirror` passes on the state of trainers that a late joiner cannot reach, because both only dial
out. Both are linked to an assistant, which forwards manifest and chunks over the trainer's own
link. It stores none of them, and holds one chunk in memory at a time. A backbone's assistant gives
a checkpoint of its own when no trainer is left.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from colab_swarm.averaging.group import MAX_STEP
from colab_swarm.averaging.matchmaking import PrefixRouter
from colab_swarm.errors import PeerError, StateError
from colab_swarm.net.peers import (
    MAX_PAYLOAD_BYTES,
    UNDECODABLE,
    Message,
    PeerId,
    Peers,
    Refusal,
    Role,
    Stream,
    StreamEnded,
    short,
)
from colab_swarm.tensors.statedict import KINDS, TensorBytes

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18
MAX_CHUNKS = 4096
MAX_STATE_BYTES = MAX_CHUNKS * MAX_PAYLOAD_BYTES
BATCH_CHUNKS = 8
CALL_TIMEOUT_S = 30.0
DONORS = 4
PATIENCE_S = CALL_TIMEOUT_S / 3
"""A mirror's timeout for a donor; the late joiner's own must be longer than two of them."""
MIRROR_DONORS = 2
REMEMBERED = 4
ALIGNMENT_BYTES = 64
MAX_PARTS = 1_000_000

_NUMPY_KINDS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
_BFLOAT16_EXPONENT = 0x7F80


class DescribeState(Message, frozen=True):
    """Request a donor's manifest of one ``step``, or of the current one with -1."""

    prefix: str
    step: int = -1


class StateManifest(Message, frozen=True):
    """Description of a snapshot.

    Attributes:
        step, lineage: of the state.
    """

    step: int
    lineage: bytes
    skeleton: bytes  # everything that is not tensor bytes, encoded by the owner of the state
    size_bytes: int  # of all tensors together
    chunk_bytes: int  # of each chunk but the last
    digests: bytes  # SHA-256 of each chunk, 32 bytes each, joined

    def __post_init__(self) -> None:
        if not 0 <= self.size_bytes <= MAX_STATE_BYTES or not 0 < self.chunk_bytes <= MAX_PAYLOAD_BYTES:
            raise ValueError("manifest sizes out of range")
        if len(self.digests) != 32 * self.chunks or not 0 <= self.step < MAX_STEP:
            raise ValueError("manifest does not add up")

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.size_bytes // self.chunk_bytes)

    @property
    def root(self) -> bytes:
        """Digest of the whole snapshot: donors with the same root are interchangeable."""
        return hashlib.sha256(self.digests + self.skeleton + self.lineage).digest()

    def span(self, chunk: int) -> slice:
        """Return the byte range of a chunk in the blob."""
        return slice(chunk * self.chunk_bytes, min((chunk + 1) * self.chunk_bytes, self.size_bytes))


class FetchChunks(Message, frozen=True):
    """Open a stream of these chunks of the snapshot with this root."""

    prefix: str
    root: bytes
    chunks: tuple[int, ...]


class ChunkOf(Message, frozen=True):
    """One chunk; its bytes are the item's payload."""

    chunk: int


@dataclass(frozen=True)
class Snapshot:
    """A copy of the training state: the manifest and its tensors' bytes."""

    manifest: StateManifest
    blob: NDArray[np.uint8]
    donors: tuple[PeerId, ...] = ()

    @classmethod
    def of(cls, *, step: int, lineage: bytes, skeleton: bytes, blob: NDArray[np.uint8]) -> Snapshot:
        """Cut and hash a blob (SHA-256, about 1.5 GB/s: call it off the event loop).

        Raises:
            StateError: the state is too large to be shared.
        """
        chunk_bytes = max(CHUNK_BYTES, -(-blob.nbytes // MAX_CHUNKS))
        if chunk_bytes > MAX_PAYLOAD_BYTES:
            raise StateError(
                f"a training state of {blob.nbytes:,} bytes is over the {MAX_STATE_BYTES:,} that peers share"
            )
        view = memoryview(blob.data)
        digests = b"".join(
            hashlib.sha256(view[at : at + chunk_bytes]).digest() for at in range(0, blob.nbytes, chunk_bytes)
        )
        return cls(StateManifest(step, lineage, skeleton, blob.nbytes, chunk_bytes, digests), blob)


class StateSharing:
    """Serves this peer's snapshots and downloads other peers'.

    Args:
        provide: ``await provide()`` takes a fresh snapshot of the current step, or raises `StateError`.
    """

    def __init__(self, router: PrefixRouter, prefix: str, provide: Callable[[], Awaitable[Snapshot]]) -> None:
        self._router, self._peers = router, router.peers
        self._prefix = prefix
        self._provide = provide
        self._snapshot: Snapshot | None = None
        self._fresh = False
        self._taking = asyncio.Lock()
        router.serve(prefix, DescribeState, self._describe, Role.VIEWER)
        router.serve_stream(prefix, FetchChunks, self._send_chunks, Role.VIEWER)

    def close(self) -> None:
        """Stop serving."""
        self._router.unserve(self._prefix, DescribeState, FetchChunks)
        self._snapshot = None

    def outdate(self) -> None:
        """Take a new snapshot for the next late joiner, as the state changed. Downloads in progress continue."""
        self._fresh = False

    async def _describe(self, _peer: PeerId, ask: DescribeState) -> StateManifest:
        async with self._taking:  # concurrent late joiners share one copy
            held = self._snapshot
            if held is None or (not self._fresh and ask.step != held.manifest.step):
                try:
                    held = self._snapshot = await self._provide()
                except StateError as error:
                    raise Refusal(str(error)) from error
                self._fresh = True
        if ask.step not in (-1, held.manifest.step):
            raise Refusal(f"the state of step {ask.step} is gone, this peer is at step {held.manifest.step}")
        return held.manifest

    async def _send_chunks(self, ask: FetchChunks, stream: Stream) -> None:
        held = self._snapshot
        if held is None or held.manifest.root != ask.root:
            raise Refusal("that snapshot is gone")
        await send_chunks(held, ask, stream)

    async def download(self, donors: Sequence[PeerId]) -> Snapshot:
        """See `download_state`."""
        return await download_state(self._peers, self._prefix, donors)


async def download_state(peers: Peers, prefix: str, donors: Sequence[PeerId]) -> Snapshot:
    """Fetch the state of the first donor that answers, from all donors that hold the same state.

    Raises:
        StateError: no donor had a state, or all were lost before it was complete.
    """
    ask = DescribeState(prefix)
    manifest, holders, refusals = await agree_on_state(
        peers, ask, donors, limit=DONORS, timeout_s=CALL_TIMEOUT_S
    )
    if manifest is None:
        raise StateError(f"none of {len(donors)} donors gave its state: {'; '.join(refusals) or 'no donors'}")
    fetch = _Fetch(peers, prefix, manifest)
    while fetch.missing and holders:  # the remaining donors send the chunks of a lost one
        alive = await asyncio.gather(*(fetch.work(donor) for donor in holders))
        holders = [donor for donor, kept in zip(holders, alive, strict=True) if kept]
    if fetch.missing:
        raise StateError(f"{fetch.missing} of {manifest.chunks} chunks of the state could not be fetched")
    return Snapshot(manifest, fetch.blob, tuple(sorted(fetch.used)))


async def send_chunks(held: Snapshot, ask: FetchChunks, stream: Stream) -> None:
    """Send the requested chunks and end the stream."""
    for chunk in ask.chunks:
        if not 0 <= chunk < held.manifest.chunks:
            raise Refusal(f"there is no chunk {chunk}")
        await stream.send(ChunkOf(chunk), memoryview(held.blob.data)[held.manifest.span(chunk)])
    await stream.end()


async def agree_on_state(
    peers: Peers, ask: DescribeState, donors: Sequence[PeerId], *, limit: int, timeout_s: float
) -> tuple[StateManifest | None, list[PeerId], list[str]]:
    """Return the first donor's manifest, up to ``limit`` donors that hold the same state, and all refusals."""
    manifest: StateManifest | None = None
    holders: list[PeerId] = []
    refusals: list[str] = []
    for donor in donors:
        if len(holders) == limit:
            break
        try:
            answer = await peers.call(donor, ask, StateManifest, timeout_s=timeout_s)
        except PeerError as error:
            refusals.append(f"{short(donor)}: {error}")
            continue
        if manifest is None or answer.root == manifest.root:
            manifest = answer
            holders.append(donor)
            ask = msgspec.structs.replace(ask, step=manifest.step)
    return manifest, holders, refusals


def check_chunk(manifest: StateManifest, chunk: int, payload: memoryview, pending: Sequence[int]) -> None:
    """Raise `StateError` unless this is one of the ``pending`` chunks with the right digest."""
    digest = manifest.digests[32 * chunk : 32 * chunk + 32]
    if chunk not in pending or hashlib.sha256(payload).digest() != digest:
        raise StateError(f"the donor sent a wrong chunk {chunk}")


class _Fetch:
    """A queue of chunks to fetch, shared by one worker per donor: a fast donor sends more."""

    def __init__(self, peers: Peers, prefix: str, manifest: StateManifest) -> None:
        self._peers = peers
        self._prefix = prefix
        self._manifest = manifest
        self._queue = list(reversed(range(manifest.chunks)))
        self.blob: NDArray[np.uint8] = np.empty(manifest.size_bytes, np.uint8)
        self.missing = manifest.chunks
        self.used: set[PeerId] = set()

    async def work(self, donor: PeerId) -> bool:
        """Fetch until the queue is empty; returns False if the donor failed, and puts its chunks back."""
        while self._queue:
            pending = [self._queue.pop() for _ in range(min(BATCH_CHUNKS, len(self._queue)))]
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self._fetch(donor, pending)
            except (PeerError, TimeoutError, StateError) as error:
                logger.info("donor %s dropped: %s", short(donor), error)
                self._queue.extend(pending)
                return False
        return True

    async def _fetch(self, donor: PeerId, pending: list[int]) -> None:
        ask = FetchChunks(self._prefix, self._manifest.root, tuple(pending))
        async with await self._peers.stream(donor, ask, timeout_s=CALL_TIMEOUT_S) as stream:
            while pending:
                try:
                    item, payload = await stream.receive(ChunkOf)
                except StreamEnded as error:
                    raise StateError("the donor ended early") from error
                check_chunk(self._manifest, item.chunk, payload, pending)
                memoryview(self.blob.data)[self._manifest.span(item.chunk)] = payload
                pending.remove(item.chunk)
                self.missing -= 1
                self.used.add(donor)


# --- layout of a snapshot -------------------------------------------------------------------------------------------


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's name, type as torch calls it, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The skeleton of a snapshot: the plain part of the state, and the tensors in the order of the blob."""

    skeleton: bytes
    tensors: tuple[TensorEntry, ...]


def decode_layout(data: bytes) -> Layout:
    """Decode a snapshot's skeleton, or raise `StateError`."""
    try:
        return msgspec.msgpack.decode(data, type=Layout)
    except UNDECODABLE as error:
        raise StateError(f"the donor's state cannot be read: {error}") from error


def room(size_bytes: int) -> int:
    """Return the bytes that a tensor takes in the blob."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def tensors_of(snapshot: Snapshot) -> tuple[dict[str, TensorBytes], str]:
    """Return an untrusted snapshot as tensors (views of its blob) and skeleton, as `write_tensors` takes them.

    Raises:
        StateError: it does not add up, is not of the step that it claims, or holds values that are not finite.
    """
    layout = decode_layout(snapshot.manifest.skeleton)
    tensors: dict[str, TensorBytes] = {}
    for entry, span in zip(layout.tensors, spans(layout.tensors, snapshot.blob.nbytes), strict=True):
        tensors[entry.name] = TensorBytes(entry.dtype, entry.shape, memoryview(snapshot.blob.data)[span])
    state = _checked_state(layout.skeleton, tensors, len(layout.tensors))
    if _step_and_lineage(state) != (snapshot.manifest.step, snapshot.manifest.lineage):
        raise StateError("the donor's state is not of the step that it claims")
    return tensors, layout.skeleton.decode()


def snapshot_of(tensors: Mapping[str, TensorBytes], skeleton: str) -> Snapshot:
    """Return the snapshot of a state that was read from a file; raises `StateError` if it is not a training state."""
    entries = tuple(TensorEntry(name, tensor.kind, tensor.shape) for name, tensor in tensors.items())
    state = _checked_state(skeleton.encode(), tensors, len(entries))
    blob = np.zeros(sum(room(tensor.data.nbytes) for tensor in tensors.values()), np.uint8)
    for span, tensor in zip(spans(entries, blob.nbytes), tensors.values(), strict=True):
        memoryview(blob.data)[span] = tensor.data
    layout = msgspec.msgpack.encode(Layout(skeleton.encode(), entries))
    step, lineage = _step_and_lineage(state)
    return Snapshot.of(step=step, lineage=lineage, skeleton=layout, blob=blob)


def spans(entries: Sequence[TensorEntry], size_bytes: int) -> Iterator[slice]:
    """Yield the byte range of each tensor in a blob."""
    at = 0
    for entry in entries:
        if entry.dtype not in KINDS or any(side < 0 for side in entry.shape):
            raise StateError(f"the donor's state has a tensor of unknown kind {entry.dtype!r}")
        tensor_bytes = math.prod(entry.shape) * KINDS[entry.dtype][1]
        if tensor_bytes > size_bytes - at:
            raise StateError("the donor's state is shorter than it says")
        yield slice(at, at + tensor_bytes)
        at += room(tensor_bytes)


def _checked_state(skeleton: bytes, tensors: Mapping[str, TensorBytes], count: int) -> dict[str, Any]:
    """Return the top-level entries of the state, if the skeleton names exactly these tensors and they are finite."""
    try:
        decoded = msgspec.json.decode(skeleton)
        state = dict(decoded["dict"])
    except (*UNDECODABLE, LookupError, TypeError, ValueError) as error:
        raise StateError(f"this is not the state of a collaboration: {error}") from error
    if len(tensors) != count or _named(decoded) != tensors.keys():
        raise StateError("the state's skeleton does not name exactly its tensors")
    for name, tensor in tensors.items():
        if not _finite(tensor):
            raise StateError(f"the state holds NaN or infinite values in {name[:80]!r}")
    return state


def _named(skeleton: Any) -> set[str]:
    """Return the names of the tensors in a skeleton."""
    names: set[str] = set()
    parts = [skeleton]
    for _ in range(MAX_PARTS):
        if not parts:
            return names
        match parts.pop():
            case {"tensor": str(name)}:
                names.add(name)
            case {"tuple": list(items)} | {"dict": list(items)} | list(items):
                parts += items
    raise StateError(f"the state has more than {MAX_PARTS:,} parts")


def _finite(tensor: TensorBytes) -> bool:
    if not tensor.data.nbytes:  # numpy takes no empty buffer
        return True
    if tensor.kind == "bfloat16":
        bits = np.frombuffer(tensor.data, np.uint16)
        return not bool(((bits & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT).any())
    if tensor.kind in _NUMPY_KINDS:
        return bool(np.isfinite(np.frombuffer(tensor.data, _NUMPY_KINDS[tensor.kind])).all())
    return True


def _step_and_lineage(state: Mapping[str, Any]) -> tuple[int, bytes]:
    step = state.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise StateError("the state does not say its step")
    try:
        return step, base64.b64decode(state["lineage"]["bytes"], validate=True)
    except (LookupError, TypeError, ValueError) as error:
        raise StateError("the state does not say its lineage") from error


class Mirror:
    """Gives late joiners a state that this peer does not have itself.

    Args:
        prefix: of the collaboration.
        donors: ``await donors()``: trainers on the collaboration's branch.
        on_sent: ``on_sent(size_bytes)``, after each chunk.
        stored: ``await stored()``: a checkpoint to give in place of the trainers' state; None while there are trainers.
    """

    def __init__(
        self,
        router: PrefixRouter,
        prefix: str,
        *,
        donors: Callable[[], Awaitable[list[PeerId]]],
        on_sent: Callable[[int], None],
        stored: Callable[[], Awaitable[Snapshot | None]] | None = None,
    ) -> None:
        self._router, self._peers = router, router.peers
        self._prefix = prefix
        self._donors, self._on_sent, self._stored = donors, on_sent, stored
        self._given: Snapshot | None = None  # the checkpoint that late joiners are fetching
        self._held: dict[bytes, tuple[StateManifest, list[PeerId]]] = {}  # by root: the state and its donors
        router.serve(prefix, DescribeState, self._describe, Role.VIEWER)
        router.serve_stream(prefix, FetchChunks, self._send_chunks, Role.VIEWER)

    def close(self) -> None:
        """Stop serving."""
        self._router.unserve(self._prefix, DescribeState, FetchChunks)

    async def _describe(self, peer: PeerId, ask: DescribeState) -> StateManifest:
        self._given = None if self._stored is None else await self._stored()
        if self._given is not None and ask.step in (-1, self._given.manifest.step):
            return self._given.manifest
        donors = [donor for donor in await self._donors() if donor not in (peer, self._peers.id)]
        manifest, holders, refusals = await agree_on_state(
            self._peers, ask, donors, limit=MIRROR_DONORS, timeout_s=PATIENCE_S
        )
        if manifest is None:
            raise Refusal(f"no trainer linked to this assistant gave its state: {'; '.join(refusals)[:500]}")
        self._held.pop(manifest.root, None)
        self._held[manifest.root] = manifest, holders
        while len(self._held) > REMEMBERED:
            del self._held[next(iter(self._held))]
        return manifest

    async def _send_chunks(self, ask: FetchChunks, stream: Stream) -> None:
        if self._given is not None and self._given.manifest.root == ask.root:
            await send_chunks(self._given, ask, stream)
            return
        if ask.root not in self._held:
            raise Refusal("that snapshot is gone")
        manifest, holders = self._held[ask.root]
        pending = list(dict.fromkeys(ask.chunks))
        for holder in holders:
            try:
                await self._forward(manifest, holder, pending, stream)
            except (PeerError, TimeoutError, StateError) as error:
                logger.debug("donor %s failed: %s", short(holder), error)
        if pending:
            raise Refusal(f"no trainer could give {len(pending)} of the chunks")
        await stream.end()

    async def _forward(
        self, manifest: StateManifest, holder: PeerId, pending: list[int], stream: Stream
    ) -> None:
        if not pending:
            return
        ask = FetchChunks(self._prefix, manifest.root, tuple(pending))
        async with await self._peers.stream(holder, ask, timeout_s=PATIENCE_S) as source:
            while pending:
                async with asyncio.timeout(PATIENCE_S):
                    item, payload = await source.receive(ChunkOf)
                check_chunk(manifest, item.chunk, payload, pending)
                await stream.send(item, payload)
                pending.remove(item.chunk)
                self._on_sent(len(payload))
