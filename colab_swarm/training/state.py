"""Giving a newcomer the training state: hashed chunks of a snapshot, fetched from several donors at once.

A lane of its own: the snapshot is a copy, so a donor trains on while it serves, and no lock is shared
with averaging. Donors on one branch hold equal states, so their chunks are interchangeable and a chunk is accepted
only by its digest: a donor that lies, stalls or vanishes costs the chunks in flight and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from colab_swarm.averaging.group import MAX_STEP
from colab_swarm.averaging.rooms import Rooms
from colab_swarm.errors import PeerError, StateError
from colab_swarm.net.peers import (
    MAX_PAYLOAD_BYTES,
    Message,
    PeerId,
    Peers,
    Refusal,
    Role,
    Stream,
    StreamEnded,
    short,
)

logger = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 18
MAX_CHUNKS = 4096
MAX_STATE_BYTES = MAX_CHUNKS * MAX_PAYLOAD_BYTES
BATCH_CHUNKS = 8
CALL_TIMEOUT_S = 30.0
DONORS = 4


class DescribeState(Message, frozen=True):
    """Ask a donor for its manifest; ``step`` asks for that step only, -1 for the current one."""

    prefix: str
    step: int = -1


class Manifest(Message, frozen=True):
    """What a snapshot is made of.

    Attributes:
        step, lineage: whose state it is.
        skeleton: everything that is not tensor bytes, encoded by the owner of the state.
        size_bytes: of all tensors together.
        chunk_bytes: of each chunk but the last.
        digests: SHA-256 of each chunk, 32 bytes each, joined.
    """

    step: int
    lineage: bytes
    skeleton: bytes
    size_bytes: int
    chunk_bytes: int
    digests: bytes

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
        """Where a chunk lies in the blob, bytes."""
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

    manifest: Manifest
    blob: NDArray[np.uint8]
    donors: tuple[PeerId, ...] = ()

    @classmethod
    def of(cls, *, step: int, lineage: bytes, skeleton: bytes, blob: NDArray[np.uint8]) -> Snapshot:
        """Cut and hash a blob (SHA-256, about 1.5 GB/s: call it off the loop).

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
        return cls(Manifest(step, lineage, skeleton, blob.nbytes, chunk_bytes, digests), blob)


Provide = Callable[[], Awaitable[Snapshot]]


class StateSharing:
    """Serves this peer's snapshots and downloads other peers'."""

    def __init__(self, rooms: Rooms, prefix: str, provide: Provide) -> None:
        """``provide()`` takes a fresh snapshot of the current step, or raises `StateError` while there is none."""
        self._rooms, self._peers = rooms, rooms.peers
        self._prefix = prefix
        self._provide = provide
        self._snapshot: Snapshot | None = None
        self._fresh = False
        self._taking = asyncio.Lock()
        rooms.serve(prefix, DescribeState, self._describe, Role.VIEWER)
        rooms.serve_stream(prefix, FetchChunks, self._send_chunks, Role.VIEWER)

    def close(self) -> None:
        """Stop serving."""
        self._rooms.unserve(self._prefix, DescribeState)
        self._rooms.unserve(self._prefix, FetchChunks)
        self._snapshot = None

    def outdate(self) -> None:
        """The state moved on: the next newcomer gets a new snapshot. One still being fetched stays served."""
        self._fresh = False

    async def _describe(self, _peer: PeerId, ask: DescribeState) -> Manifest:
        async with self._taking:  # newcomers that come together share one copy
            held = self._snapshot
            if held is None or (not self._fresh and ask.step != held.manifest.step):
                try:
                    held = self._snapshot = await self._provide()
                except StateError as error:
                    raise Refusal(str(error)) from error
                self._fresh = True
        if ask.step not in (-1, held.manifest.step):
            raise Refusal(f"the state of step {ask.step} is gone, step {held.manifest.step} is here")
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
    """Fetch the state of the first donor that answers, from all donors that hold the same one.

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
    while fetch.missing and holders:  # what a lost donor owed goes to those that are left
        alive = await asyncio.gather(*(fetch.work(donor) for donor in holders))
        holders = [donor for donor, kept in zip(holders, alive, strict=True) if kept]
    if fetch.missing:
        raise StateError(f"{fetch.missing} of {manifest.chunks} chunks of the state could not be fetched")
    return Snapshot(manifest, fetch.blob, tuple(sorted(fetch.used)))


async def send_chunks(held: Snapshot, ask: FetchChunks, stream: Stream) -> None:
    """Send the chunks that are asked for, and end the stream."""
    for chunk in ask.chunks:
        if not 0 <= chunk < held.manifest.chunks:
            raise Refusal(f"there is no chunk {chunk}")
        await stream.send(ChunkOf(chunk), memoryview(held.blob.data)[held.manifest.span(chunk)])
    await stream.end()


async def agree_on_state(
    peers: Peers, ask: DescribeState, donors: Sequence[PeerId], *, limit: int, timeout_s: float
) -> tuple[Manifest | None, list[PeerId], list[str]]:
    """The manifest of the first donor that answers, up to ``limit`` donors that hold it, and why others do not."""
    manifest: Manifest | None = None
    holders: list[PeerId] = []
    refusals: list[str] = []
    for donor in donors:
        if len(holders) == limit:
            break
        try:
            answer = await peers.call(donor, ask, Manifest, timeout_s=timeout_s)
        except PeerError as error:
            refusals.append(f"{short(donor)}: {error}")
            continue
        if manifest is None or answer.root == manifest.root:
            manifest = answer
            holders.append(donor)
            ask = msgspec.structs.replace(ask, step=manifest.step)
    return manifest, holders, refusals


def check_chunk(manifest: Manifest, chunk: int, payload: memoryview, pending: Sequence[int]) -> None:
    """Raises `StateError` unless this is one of the ``pending`` chunks, and right."""
    digest = manifest.digests[32 * chunk : 32 * chunk + 32]
    if chunk not in pending or hashlib.sha256(payload).digest() != digest:
        raise StateError(f"the donor sent a wrong chunk {chunk}")


class _Fetch:
    """Chunks still to fetch, shared by one worker per donor: a fast donor ends up giving more."""

    def __init__(self, peers: Peers, prefix: str, manifest: Manifest) -> None:
        self._peers = peers
        self._prefix = prefix
        self._manifest = manifest
        self._queue = list(reversed(range(manifest.chunks)))
        self.blob: NDArray[np.uint8] = np.empty(manifest.size_bytes, np.uint8)
        self.missing = manifest.chunks
        self.used: set[PeerId] = set()

    async def work(self, donor: PeerId) -> bool:
        """Fetch until nothing is left; False if the donor failed: what it did not deliver goes back to the queue."""
        while self._queue:
            batch = [self._queue.pop() for _ in range(min(BATCH_CHUNKS, len(self._queue)))]
            pending = list(batch)
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self._fetch(donor, tuple(batch), pending)
            except (PeerError, TimeoutError, StateError) as error:
                logger.info("donor %s dropped: %s", short(donor), error)
                self._queue.extend(pending)
                return False
        return True

    async def _fetch(self, donor: PeerId, batch: tuple[int, ...], pending: list[int]) -> None:
        ask = FetchChunks(self._prefix, self._manifest.root, batch)
        async with await self._peers.stream(donor, ask, timeout_s=CALL_TIMEOUT_S) as stream:
            while pending:
                try:
                    item, payload = await stream.receive(ChunkOf)
                except StreamEnded as error:
                    raise StateError("the donor ended early") from error
                self._accept(item.chunk, payload, pending)
                self.used.add(donor)

    def _accept(self, chunk: int, payload: memoryview, pending: list[int]) -> None:
        check_chunk(self._manifest, chunk, payload, pending)
        memoryview(self.blob.data)[self._manifest.span(chunk)] = payload
        pending.remove(chunk)
        self.missing -= 1
