"""A state as hashed chunks, fetched from several donors at the same time. Does not import torch.

Format. The *blob* of a state is the bytes of a safetensors file (`tensors.statedict`). A `Manifest`
contains the BLAKE3 hash of each chunk of the blob. The hash of the manifest is the *root*, which identifies the state.

Fetching. For each donor, a worker takes chunks from a common queue. After each quick answer the worker requests twice
as many chunks, up to `REQUEST_CHUNKS`; after a slow answer it begins again with one. A chunk is accepted only if its
hash and length are right. If a donor lies, stalls or vanishes, the other donors send its chunks in flight. Once a
worker finds the queue empty, the other donors have `silence_s` for their chunks in flight.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import msgspec
import numpy as np
from blake3 import blake3

from colab_swarm.errors import PeerError, StateError, require
from colab_swarm.net.node import Node
from colab_swarm.net.patience import allowance_s
from colab_swarm.net.peers import (
    MAX_PAYLOAD_BYTES,
    Buffer,
    Message,
    PeerId,
    Refusal,
    Stream,
    decoded,
    end_tasks,
    short,
)
from colab_swarm.tensors.statedict import Blob

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18
MAX_CHUNKS = 4096
MAX_STATE_BYTES = MAX_CHUNKS * MAX_PAYLOAD_BYTES
MAX_STEP = 1 << 48
DIGEST_BYTES = 32
REQUEST_CHUNKS = 8
CHUNK_TIMEOUT_S = 30.0  # for the chunks of one request to a donor, and for the first contact with the donor
SILENCE_S = 5.0  # how long a donor may be silent once another one has answered, or has nothing left to send
BAR_AFTER_S = 2.0  # a download that ends sooner shows no progress bar
QUICK_S = CHUNK_TIMEOUT_S / 8  # if a request takes less, the next one is for twice as many chunks

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


def digest_of(data: Buffer) -> bytes:
    return blake3(data).digest()


class Manifest(Message, frozen=True):
    """Description of a state in chunks; ``subject`` is a run's lineage, or an expert's name."""

    subject: Annotated[bytes, msgspec.Meta(max_length=256)]
    step: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEP)]  # number of optimizer steps in the state
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_STATE_BYTES)]  # size of the blob
    digests: bytes  # the digests of all chunks, joined

    def __post_init__(self) -> None:
        require(len(self.digests) == DIGEST_BYTES * self.chunks, "a manifest's sizes do not add up")

    @classmethod
    def decode(cls, data: Buffer) -> "Manifest":
        """Decode a stranger's manifest; raise StateError unless it is valid and encoded in the standard way."""
        manifest = decoded(data, cls, "the manifest of a state cannot be read", StateError)
        if msgspec.msgpack.encode(manifest) != data:  # else its hash would differ
            raise StateError("the manifest of a state is not encoded as we do")
        return manifest

    @property
    def chunks(self) -> int:
        return -(-self.size_bytes // chunk_bytes(self.size_bytes))

    @property
    def root(self) -> bytes:
        """Digest of the manifest, which identifies the whole state."""
        return digest_of(msgspec.msgpack.encode(self))

    def digest(self, chunk: int) -> bytes:
        return self.digests[DIGEST_BYTES * chunk : DIGEST_BYTES * (chunk + 1)]

    def span(self, chunk: int) -> slice:
        step = chunk_bytes(self.size_bytes)
        return slice(chunk * step, min((chunk + 1) * step, self.size_bytes))

    def length(self, chunk: int) -> int:
        step = chunk_bytes(self.size_bytes)
        return min(step, self.size_bytes - chunk * step)


def chunk_bytes(size_bytes: int) -> int:
    return max(CHUNK_BYTES, -(-size_bytes // MAX_CHUNKS))


@dataclass(frozen=True)
class Snapshot:
    """A copy of a state, its manifest, and the peers that sent it."""

    manifest: Manifest
    blob: Blob
    donors: tuple[PeerId, ...] = ()

    @classmethod
    def of(cls, subject: bytes, step: int, blob: Blob) -> "Snapshot":
        """Hash a packed state; raises StateError if it is too large.

        Hashing runs at a few GB/s, so do not call this on the event loop.
        """
        text = f"a state of {blob.nbytes:,} bytes is over the {MAX_STATE_BYTES:,} that peers share"
        require(blob.nbytes <= MAX_STATE_BYTES, text, StateError)
        view = memoryview(blob.data)
        size_bytes = chunk_bytes(blob.nbytes)
        digests = (digest_of(view[at : at + size_bytes]) for at in range(0, blob.nbytes, size_bytes))
        return cls(Manifest(subject, step, blob.nbytes, b"".join(digests)), blob)

    @cached_property
    def head(self) -> bytes:
        return msgspec.msgpack.encode(self.manifest)

    @cached_property
    def root(self) -> bytes:
        return digest_of(self.head)

    @cached_property
    def chunks(self) -> dict[bytes, memoryview]:
        """All chunks by digest; equal chunks are contained only once."""
        view = memoryview(self.blob.data)
        manifest = self.manifest
        return {manifest.digest(chunk): view[manifest.span(chunk)] for chunk in range(manifest.chunks)}

    async def read(self, digest: bytes) -> memoryview | None:
        return self.chunks.get(digest)


class FetchChunks(Message, frozen=True):
    """Opens a stream of the chunks with these digests, in this order. Subclasses add fields that name the state."""

    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=REQUEST_CHUNKS)]


class StateChunk(Message, frozen=True):
    """A chunk of a state; its bytes are the item's payload."""


async def send_chunks(
    request: FetchChunks, stream: Stream, read: Callable[[bytes], Awaitable[Buffer | None]]
) -> None:
    """Send the requested chunks, then end the stream; raises Refusal if ``await read(digest)`` returns None for one."""
    for digest in request.digests:
        chunk = await read(digest)
        if chunk is None:
            raise Refusal(f"chunk {digest.hex()[:8]} is not here")
        await stream.send(StateChunk(), chunk)
    await stream.end()


async def receive_chunk(
    stream: Stream, digest: bytes, size_bytes: int | None = None, *, timeout_s: float = CHUNK_TIMEOUT_S
) -> memoryview:
    """Return the next chunk of a stream; ``size_bytes`` is None if its length is not known.

    Raises StateError if its hash or length is wrong, TimeoutError or PeerError if it did not arrive.
    """
    async with asyncio.timeout(timeout_s):
        _, payload = await stream.receive(StateChunk)
    if size_bytes not in (None, len(payload)) or digest_of(payload) != digest:
        raise StateError(f"chunk {digest.hex()[:8]} does not match its hash or its length")
    return payload


def silence_s(peers: Node, donors: Iterable[PeerId]) -> float:
    """Return how long to wait for silent donors: `SILENCE_S`, and more if their lines are slow."""
    return SILENCE_S + max((allowance_s(peers.statistics(donor).rtt_s) for donor in donors), default=0.0)


@contextmanager
def progress_bar(size_bytes: int, title: str) -> Iterator[Callable[[int], object]]:
    """Yield a function that counts bytes for a progress bar, which is shown after `BAR_AFTER_S`.

    Without a ``title`` there is no bar.
    """
    if not title:
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(total=size_bytes, desc=title, unit="B", unit_scale=True, delay=BAR_AFTER_S, leave=False) as bar:
        yield bar.update


class ChunkDownload:
    """Downloads all chunks of a manifest, or the first ``chunks``, from any number of donors.

    If all donors are lost, the download can continue later with others. ``request(digests)`` makes the message that
    opens a stream of chunks. `run` fills ``blob``, and shows a progress bar with this ``title`` after `BAR_AFTER_S`.
    ``used`` are the donors that sent chunks.
    """

    def __init__(
        self,
        peers: Node,
        manifest: Manifest,
        request: Callable[[tuple[bytes, ...]], FetchChunks],
        *,
        chunks: int = MAX_CHUNKS,
        title: str = "",
    ) -> None:
        self._count = min(chunks, manifest.chunks)
        self._peers = peers
        self._manifest = manifest
        self._request = request
        self._title = title
        self._queue = list(reversed(range(self._count)))
        self.blob: Blob = np.empty(sum(map(manifest.length, self._queue)), np.uint8)
        self.used: set[PeerId] = set()

    def fill(self, read: Callable[[bytes], bytes | None]) -> None:
        """Take the chunks that ``read(digest)`` returns. ``read`` may block, so do not call this on the event loop."""
        missing: list[int] = []
        for chunk in self._queue:
            data = read(self._manifest.digest(chunk))
            if data is None or len(data) != self._manifest.length(chunk):
                missing.append(chunk)
            else:
                memoryview(self.blob.data)[self._manifest.span(chunk)] = data
        self._queue = missing

    async def run(self, donors: Iterable[PeerId], timeout_s: float = CHUNK_TIMEOUT_S) -> None:
        """Fetch the missing chunks; raises StateError if all donors are lost. Then you may call it again.

        ``timeout_s`` is the time limit for one request, which may ask for several chunks.
        """
        left = [*donors]
        with progress_bar(self.blob.nbytes, self._title) as self._on_bytes:
            while self._queue and left:  # the remaining donors send what a lost one did not
                left = await self._fetch_from(left, timeout_s)
        missing = f"{len(self._queue)} of {self._count} chunks did not arrive"
        require(not self._queue, missing, StateError)

    async def _fetch_from(self, donors: list[PeerId], timeout_s: float) -> list[PeerId]:
        """Request chunks until the queue is empty; return the donors that were not lost meanwhile."""
        workers = {asyncio.create_task(self._work(donor, timeout_s)): donor for donor in donors}
        pending = set(workers)
        limit_s: float | None = None
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                if any(worker.result() for worker in done):
                    limit_s = silence_s(self._peers, map(workers.__getitem__, pending))
        finally:
            await end_tasks(*pending)
        return [donor for worker, donor in workers.items() if worker not in pending and worker.result()]

    async def _work(self, donor: PeerId, timeout_s: float) -> bool:
        """Request chunks from one donor until the queue is empty; return False if the donor is lost."""
        count = 1
        now = asyncio.get_running_loop().time
        while self._queue:
            requested = [self._queue.pop() for _ in range(min(count, len(self._queue)))]
            began = now()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._fetch(donor, requested)
            except (PeerError, TimeoutError, StateError) as error:
                logger.info("donor %s dropped: %s", short(donor), error)
                return False
            finally:  # also if this task is cancelled
                self._queue += requested
            if now() - began < QUICK_S:
                count = min(2 * count, REQUEST_CHUNKS)
            else:
                count = 1
        return True

    async def _fetch(self, donor: PeerId, pending: list[int]) -> None:
        request = self._request(tuple(map(self._manifest.digest, pending)))
        async with await self._peers.stream(donor, request, timeout_s=CHUNK_TIMEOUT_S) as stream:
            while pending:
                chunk = pending[0]
                size_bytes = self._manifest.length(chunk)
                data = await receive_chunk(stream, self._manifest.digest(chunk), size_bytes)
                memoryview(self.blob.data)[self._manifest.span(chunk)] = data
                del pending[0]
                self.used.add(donor)
                self._on_bytes(size_bytes)
