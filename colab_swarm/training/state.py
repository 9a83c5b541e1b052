"""The training state: in a file, and shared with late joiners in hashed chunks.

A donor is a peer that gives its state to a late joiner. The donor serves a copy of the state (a *snapshot*), so it
trains on meanwhile. Donors on one branch hold equal states, so a late joiner may take each chunk from any of them
(`colab_swarm.tensors.chunks`).

Some late joiners cannot reach a trainer, because neither can be dialled. Then an assistant that is linked to both uses
a `Mirror`, which forwards the manifest and the chunks, and holds one chunk at a time in memory. The `Mirror` of a
backbone also gives the backbone's own checkpoint when no trainer is left.
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

# A tensor's data type, as torch prints it but without "torch.", and its shape.
Kind: TypeAlias = tuple[str, tuple[int, ...]]

_ASKED = 4  # number of donors that are asked together for their manifests
_AGREED_S = 1.0  # how long the other donors are awaited, once two donors have answered
_MIRROR_TIMEOUT_S = CHUNK_TIMEOUT_S / 3  # for one donor; a late joiner waits for two
_REMEMBERED = 4
_KINDS_TIMEOUT_S = 5.0  # for the first chunks of a state


def save_checkpoint(path: str | Path, state: Any) -> None:
    """Write a training state so that ``path`` holds either the whole state or its old content.

    The state is anything that `flatten` takes, such as a dictionary whose values are results of ``state_dict()``.
    Raises `StateError` if the disk is full, `TypeError` if a part cannot be saved without pickle.
    """
    write_state(Path(path), file_parts(state))


def load_checkpoint(path: str | Path) -> Any:
    """Read the state that `save_checkpoint` wrote, into new memory.

    Raises FileNotFoundError, or `StateError` if the file is truncated, damaged or no checkpoint of this package.
    """
    return unpack(read_state(Path(path)), finite=False)


class CheckpointFolder(StepFiles):
    """A folder with the last checkpoints of one run; a save deletes older ones.

    A later session continues from the checkpoint that was saved last, even if training had gone back to an earlier
    step. In that case, the files of later steps are set aside: ``.aside`` is added to their names. To continue from
    such a file, rename it.
    """

    def save(self, step: int, state: Any) -> Path:
        """Write a checkpoint, set aside checkpoints of later steps, and delete the oldest beyond ``keep``.

        Raises `StateError` if the file cannot be written.
        """
        return self.write(step, file_parts(state))

    def write(self, step: int, parts: Sequence[memoryview]) -> Path:
        """Write a checkpoint whose file has the content ``parts``, as `file_parts` returns them."""
        path = self.file_of(step)
        write_state(path, parts)
        self.set_aside(path)
        self.prune(path)
        return path

    def latest(self) -> Any:
        """Return the state of the last readable checkpoint, or None; skip damaged checkpoints with a warning."""
        return self.newest(load_checkpoint)


class DonorsSilent(StateError):
    """No donor answered in time, because they are slow, frozen or gone. No donor refused."""


class DescribeState(Message, frozen=True):
    """Request a donor's manifest of one ``step``; -1 asks for the donor's current step."""

    prefix: str
    step: int = -1


class FetchState(FetchChunks, frozen=True):
    """Open a stream of chunks of the snapshot with this ``root`` (the digest of its manifest)."""

    prefix: str
    root: bytes


class StateSharing:
    """Serves this peer's snapshots, and downloads those of other peers.

    ``await provide()`` takes a snapshot of the current step. If there is no state, it returns None or raises
    `StateError`.
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
        # after a failure, the next call continues the incomplete download
        self.download = partial(download_state, self._peers, prefix, begun=self._begun)
        router.serve(prefix, DescribeState, self._describe, Role.VIEWER)
        router.serve_stream(prefix, FetchState, self._send_chunks, Role.VIEWER)

    def close(self) -> None:
        self._router.unserve(self._prefix, DescribeState, FetchState)
        self._snapshot = None
        self._begun.clear()

    def outdate(self) -> None:
        """Take a new snapshot for the next late joiner. Downloads in progress continue."""
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
    """Download the state that most of the asked donors hold, from all donors that hold it.

    ``begun`` keeps an incomplete download, by the state's root, from one call to the next. ``timeout_s`` is the limit
    for each donor.

    Raises `StateError` if no donor had a state, if all donors were lost before the download was complete, if the state
    has more than ``limit_bytes``, or if its step is before ``least_step``. Raises `DonorsSilent` if no donor answers.
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
    """Return the types and shapes of the donors' parameters and buffers, by name; empty if no donor answers."""
    ask = DescribeState(prefix)
    try:
        manifest, holders = await _agree_on_state(peers, ask, donors, timeout_s=_KINDS_TIMEOUT_S)
        request = partial(FetchState, prefix=prefix, root=manifest.root)
        beginning = ChunkDownload(peers, manifest, request, chunks=REQUEST_CHUNKS)
        await beginning.run(holders, _KINDS_TIMEOUT_S)
        entries, _, _ = decode_head(beginning.blob.data)
    except (StateError, ValueError):  # for example if the head of the file needs more chunks
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
    """Ask four donors; return the manifest that most of them give, and the donors that hold this state.

    If no donor of the four gives a manifest, the next four are asked. Four are asked together, because a moment later
    each donor may be at another step. After the first manifest, the other donors have `silence_s` seconds to answer;
    after each further manifest, `_AGREED_S`. Raises `StateError` without a manifest, `DonorsSilent` if none refused.
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
    """Raise `StateError` if an untrusted snapshot cannot be read, or if its manifest has a wrong step or lineage."""
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

    ``await stored()`` returns a checkpoint, or None while there are trainers. ``await donors()`` returns the trainers.
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
        self._held: dict[bytes, list[PeerId]] = {}  # the donors that hold a state, by the state's root

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
