"""The training state: in a file, and shared with late joiners in hashed chunks.

A shared snapshot is a copy, so a donor trains on while it serves. Donors on one branch hold equal
states, so their chunks are interchangeable (`colab_swarm.tensors.chunks`).

A `Mirror` passes on the state of trainers that a late joiner cannot reach, because both only dial
out. An assistant linked to both forwards manifest and chunks, one at a time in memory. That of a
backbone gives a checkpoint of its own when no trainer is left.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.errors import PeerError, PeerLost, PeerTimeout, PeerUnreachable, StateError, require
from colab_swarm.files import StepFiles
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Message, PeerId, Refusal, Role, Stream, remember, short
from colab_swarm.tensors.chunks import (
    CHUNK_TIMEOUT_S,
    MAX_STATE_BYTES,
    REQUEST_CHUNKS,
    ChunkDownload,
    FetchChunks,
    Manifest,
    Snapshot,
    StateChunk,
    receive_chunk,
    send_chunks,
    silence_s,
)
from colab_swarm.tensors.statedict import (
    KIND_NAMES,
    Blob,
    decode_head,
    file_parts,
    read_state,
    require_finite,
    tensors_of,
    unflatten,
    unpack,
    write_state,
)

logger = logging.getLogger(__name__)

# Of a tensor: its data type, as torch prints it without "torch.", and its shape.
Kind: TypeAlias = tuple[str, tuple[int, ...]]

_ASKED = 4  # donors that are asked at once for what they hold
_AGREED_S = 1.0  # for the others, once two have answered
_MIRROR_TIMEOUT_S = CHUNK_TIMEOUT_S / 3  # for one donor; a late joiner waits for two
_REMEMBERED = 4
_KINDS_TIMEOUT_S = 5.0  # for the beginning of a state


def save_checkpoint(path: str | Path, state: Any) -> None:
    """Write a training state so that ``path`` holds either all of it or its old content.

    The state is anything that `flatten` takes, such as a dictionary with some ``state_dict()``.
    Raises `StateError` if the disk is full, `TypeError` if a part cannot be saved without pickle.
    """
    write_state(Path(path), file_parts(state))


def load_checkpoint(path: str | Path) -> Any:
    """Read the state that `save_checkpoint` wrote, into new memory.

    Raises FileNotFoundError, or `StateError` if it is truncated, damaged or not a checkpoint of this package.
    """
    return unpack(read_state(Path(path)), finite=False)


class CheckpointFolder(StepFiles):
    """The last checkpoints of one run; older ones are deleted after a save.

    The last saved one comes back, also after training went back to an earlier step. Files of later steps
    are set aside then: their names end in ``.aside``, and you can rename them to go on from there.
    """

    def save(self, step: int, state: Any) -> Path:
        """Write a checkpoint, set aside those of later steps, and delete those beyond ``keep``.

        Raises `StateError` if the disk refuses it.
        """
        return self.write(step, file_parts(state))

    def write(self, step: int, parts: Sequence[memoryview]) -> Path:
        """Save the file of a state, in parts as of `file_parts`."""
        path = self.file_of(step)
        write_state(path, parts)
        self.set_aside(path)
        self.prune(path)
        return path

    def latest(self) -> Any:
        """Return the state of the last saved readable checkpoint, or None; skips damaged ones with a warning."""
        return self.newest(load_checkpoint)


class DonorsSilent(StateError):
    """No donor answered in time: they are slow, frozen or gone. None refused."""


class DescribeState(Message, frozen=True):
    """Request a donor's manifest of one ``step``, or of the current one with -1."""

    prefix: str
    step: int = -1


class FetchState(FetchChunks, frozen=True):
    """Open a stream of chunks of the snapshot with this root."""

    prefix: str
    root: bytes


class StateSharing:
    """Serves this peer's snapshots and downloads other peers'.

    ``await provide()`` takes a snapshot of the current step; None or `StateError`: there is none.
    """

    def __init__(
        self, router: PrefixRouter, prefix: str, provide: Callable[[], Awaitable[Snapshot | None]]
    ) -> None:
        self._router = router
        self._peers = router.peers
        self._prefix = prefix
        self._provide = provide
        self._snapshot: Snapshot | None = None
        self._fresh = False
        self._taking = asyncio.Lock()
        self._begun: dict[bytes, ChunkDownload] = {}
        # after a failure, the next call goes on where this one stopped
        self.download = partial(download_state, self._peers, prefix, begun=self._begun)
        router.serve(prefix, DescribeState, self._describe, Role.VIEWER)
        router.serve_stream(prefix, FetchState, self._send_chunks, Role.VIEWER)

    def close(self) -> None:
        self._router.unserve(self._prefix, DescribeState, FetchState)
        self._snapshot = None
        self._begun.clear()

    def outdate(self) -> None:
        """Give the next late joiner a new snapshot. Downloads in progress continue."""
        self._fresh = False
        self._begun.clear()

    async def _describe(self, _peer: PeerId, ask: DescribeState) -> Manifest:
        async with self._taking:  # concurrent late joiners share one copy
            held = self._snapshot
            if held is None or (not self._fresh and ask.step != held.manifest.step):
                try:
                    held = self._snapshot = await self._provide()
                except StateError as error:
                    raise Refusal(str(error)) from error
                self._fresh = True
        if held is None or ask.step not in (-1, held.manifest.step):
            raise Refusal(f"the state of step {ask.step} is gone")
        return held.manifest

    async def _send_chunks(self, ask: FetchState, stream: Stream) -> None:
        held = self._snapshot
        if held is None or held.root != ask.root:
            raise Refusal("that snapshot is gone")
        await send_chunks(ask, stream, held.read)


async def download_state(
    peers: Node,
    prefix: str,
    donors: Sequence[PeerId],
    limit_bytes: int = MAX_STATE_BYTES,
    timeout_s: float = CHUNK_TIMEOUT_S,
    begun: dict[bytes, ChunkDownload] | None = None,
    *,
    least_step: int = 0,
) -> Snapshot:
    """Fetch the state that most donors hold, from all of these; it is of ``least_step`` or later.

    ``begun`` holds an incomplete download, by the state's root, from one call to the next. Raises
    `StateError` if no donor had a state, all were lost before it was complete, or it is over
    ``limit_bytes``; `DonorsSilent` if all are silent.
    """
    ask = DescribeState(prefix)
    manifest, holders = await _agree_on_state(
        peers, ask, donors, timeout_s=timeout_s, limit_bytes=limit_bytes
    )
    text = f"the donors are at step {manifest.step}, and the means since are those from step {least_step} on"
    require(manifest.step >= least_step, text, StateError)
    root = manifest.root
    begun = {} if begun is None else begun
    request = partial(FetchState, prefix=prefix, root=root)
    download = begun.get(root) or ChunkDownload(peers, manifest, request, title="the swarm's state")
    begun.clear()
    begun[root] = download
    await download.run(holders, timeout_s)
    begun.clear()
    return Snapshot(manifest, download.blob, tuple(sorted(download.used)))


async def kinds_at(peers: Node, prefix: str, donors: Sequence[PeerId]) -> dict[str, Kind]:
    """Return the types and shapes of the donors' parameters and buffers, by name; none if no donor answers."""
    ask = DescribeState(prefix)
    try:
        manifest, holders = await _agree_on_state(peers, ask, donors, timeout_s=_KINDS_TIMEOUT_S)
        request = partial(FetchState, prefix=prefix, root=manifest.root)
        beginning = ChunkDownload(peers, manifest, request, chunks=REQUEST_CHUNKS)
        await beginning.run(holders, _KINDS_TIMEOUT_S)
        entries, _, _ = decode_head(beginning.blob.data)
    except (StateError, ValueError):  # such as a head of more chunks
        return {}
    kinds = {}
    for path, entry in entries.items():
        part, _, name = path.partition("/")
        if part in ("parameters", "buffers"):
            kinds[name] = KIND_NAMES.get(entry.dtype, entry.dtype), entry.shape
    return kinds


async def _agree_on_state(
    peers: Node,
    ask: DescribeState,
    donors: Sequence[PeerId],
    *,
    timeout_s: float,
    limit_bytes: int = MAX_STATE_BYTES,
) -> tuple[Manifest, list[PeerId]]:
    """Return the manifest that most of four donors give, and those that hold it; the next four if none answers.

    They are asked at once: a moment later each would have another step. After the first answer the others have
    `silence_s`, after the second one `_AGREED_S`. Raises `StateError` without an answer, `DonorsSilent` if all are
    silent.
    """
    holders: dict[Manifest, list[PeerId]] = {}
    refusals: dict[PeerId, PeerError] = {}

    async def describe(donor: PeerId) -> None:
        try:
            answer = await peers.call(donor, ask, Manifest, timeout_s=timeout_s)
            require(answer.size_bytes <= limit_bytes, f"{answer.size_bytes:,} bytes are too many", PeerError)
            holders.setdefault(answer, []).append(donor)
        except PeerError as error:
            refusals[donor] = error

    for begin in range(0, len(donors), _ASKED):
        calls = {asyncio.create_task(describe(donor)): donor for donor in donors[begin : begin + _ASKED]}
        pending = set(calls)
        left_s: float | None = None
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                answers = sum(map(len, holders.values()))
                if answers > 1:
                    left_s = _AGREED_S
                elif answers:
                    left_s = silence_s(peers, map(calls.__getitem__, pending))
        finally:
            for call in pending:
                call.cancel()
        if holders:
            manifest = max(holders, key=lambda one: len(holders[one]))
            return manifest, holders[manifest]
    reasons = "; ".join(f"{short(donor)}: {error}" for donor, error in refusals.items())
    text = f"none of {len(donors)} donors gave its state: {reasons or 'no donors'}"
    silent = all(isinstance(one, PeerTimeout | PeerUnreachable | PeerLost) for one in refusals.values())
    raise DonorsSilent(text) if silent else StateError(text)


def check_snapshot(snapshot: Snapshot) -> None:
    """Raise `StateError` if an untrusted snapshot cannot be read, or is not of the step that it claims."""
    claimed = snapshot.manifest.step, snapshot.manifest.subject
    text = "the donor's state is not of the step that it claims"
    require(_step_and_lineage(snapshot.blob) == claimed, text, StateError)


def read_snapshot(path: Path) -> Snapshot:
    """Return the snapshot in a file; raises `StateError` if it is not a training state."""
    blob = read_state(path)
    step, lineage = _step_and_lineage(blob, path)
    return Snapshot.of(lineage, step, blob)


def _step_and_lineage(blob: Blob, source: object = "the donor's state") -> tuple[int, bytes]:
    tensors, skeleton = tensors_of(blob, source)
    require_finite(tensors)
    match unflatten(tensors, skeleton):
        case {"step": int(step), "lineage": bytes(lineage)} if step >= 0 and not isinstance(step, bool):
            return step, lineage
    raise StateError(f"{source} is not that of a collaboration: it does not say its step and lineage")


class Mirror(StateSharing):
    """Gives late joiners a state that this peer does not have itself.

    ``await stored()``: a checkpoint, None while there are trainers; ``await donors()``: these.
    """

    def __init__(
        self,
        router: PrefixRouter,
        prefix: str,
        stored: Callable[[], Awaitable[Snapshot | None]],
        donors: Callable[[], Awaitable[list[PeerId]]],
    ) -> None:
        super().__init__(router, prefix, stored)
        self._donors = donors
        self._held: dict[bytes, list[PeerId]] = {}  # by root: the donors of a state

    async def _describe(self, peer: PeerId, ask: DescribeState) -> Manifest:
        self._snapshot = await self._provide()  # the checkpoint that late joiners fetch now
        if self._snapshot is not None and ask.step in (-1, self._snapshot.manifest.step):
            return self._snapshot.manifest
        donors = [donor for donor in await self._donors() if donor not in (peer, self._peers.id)]
        try:
            manifest, held = await _agree_on_state(self._peers, ask, donors, timeout_s=_MIRROR_TIMEOUT_S)
        except StateError as error:
            raise Refusal(f"no trainer linked to this assistant gave its state: {error}"[:500]) from error
        remember(self._held, manifest.root, held, _REMEMBERED)
        return manifest

    async def _send_chunks(self, ask: FetchState, stream: Stream) -> None:
        stored = self._snapshot is not None and self._snapshot.root == ask.root
        if stored or ask.root not in self._held:
            return await super()._send_chunks(ask, stream)
        pending = [*ask.digests]
        for holder in self._held[ask.root]:
            request = msgspec.structs.replace(ask, digests=tuple(pending))
            try:
                async with await self._peers.stream(holder, request, timeout_s=_MIRROR_TIMEOUT_S) as source:
                    while pending:
                        chunk = await receive_chunk(source, pending[0], timeout_s=_MIRROR_TIMEOUT_S)
                        await stream.send(StateChunk(), chunk)
                        del pending[0]
                return await stream.end()
            except (PeerError, TimeoutError, StateError) as error:
                logger.debug("donor %s failed: %s", short(holder), error)
        raise Refusal(f"no trainer could give {len(pending)} of the chunks")
