"""Handing on the training state of trainers that newcomers cannot reach.

A newcomer that only dials out cannot ask trainers that only dial out. Both are linked to an assistant, which asks a
trainer over the trainer's own link and passes manifest and chunks on. It keeps none of them and reads none of them:
one chunk is in its memory at a time. Digests are checked, so that a donor that lies costs one chunk.

An assistant that keeps checkpoints gives its own when no trainer is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from colab_swarm.averaging.rooms import Rooms
from colab_swarm.errors import PeerError, StateError
from colab_swarm.net.peers import PeerId, Refusal, Role, Stream, short
from colab_swarm.training.state import (
    CALL_TIMEOUT_S,
    ChunkOf,
    DescribeState,
    FetchChunks,
    Manifest,
    Snapshot,
    agree_on_state,
    check_chunk,
    send_chunks,
)

logger = logging.getLogger(__name__)
PATIENCE_S = CALL_TIMEOUT_S / 3
"""With a donor; the newcomer's own patience must outlast that with two of them."""
DONORS = 2
REMEMBERED = 4


async def nothing_stored() -> Snapshot | None:
    """Of an assistant without checkpoints."""
    return None


class Mirror:
    """Gives newcomers a state that this peer does not have.

    Args:
        prefix: of the collaboration.
        donors: ``await donors()``: trainers on the collaboration's branch.
        on_sent: ``on_sent(size_bytes)``, after each chunk.
        stored: ``await stored()``: a checkpoint to give in place of the trainers' state; None while there are trainers.
    """

    def __init__(
        self,
        rooms: Rooms,
        prefix: str,
        *,
        donors: Callable[[], Awaitable[list[PeerId]]],
        on_sent: Callable[[int], None],
        stored: Callable[[], Awaitable[Snapshot | None]] = nothing_stored,
    ) -> None:
        self._rooms, self._peers = rooms, rooms.peers
        self._prefix = prefix
        self._donors = donors
        self._on_sent = on_sent
        self._stored = stored
        self._given: Snapshot | None = None  # the checkpoint that newcomers are fetching
        self._held: dict[bytes, tuple[Manifest, list[PeerId]]] = {}  # by root: the state, and who holds it
        rooms.serve(prefix, DescribeState, self._describe, Role.VIEWER)
        rooms.serve_stream(prefix, FetchChunks, self._send_chunks, Role.VIEWER)

    def close(self) -> None:
        """Hand nothing on any more."""
        self._rooms.unserve(self._prefix, DescribeState)
        self._rooms.unserve(self._prefix, FetchChunks)

    async def _describe(self, peer: PeerId, ask: DescribeState) -> Manifest:
        self._given = await self._stored()
        if self._given is not None and ask.step in (-1, self._given.manifest.step):
            return self._given.manifest
        donors = [donor for donor in await self._donors() if donor not in (peer, self._peers.id)]
        manifest, holders, refusals = await agree_on_state(
            self._peers, ask, donors, limit=DONORS, timeout_s=PATIENCE_S
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
                await self._pass_on(manifest, holder, pending, stream)
            except (PeerError, TimeoutError, StateError) as error:
                logger.debug("donor %s is out: %s", short(holder), error)
        if pending:
            raise Refusal(f"{len(pending)} chunks could not be had from any trainer")
        await stream.end()

    async def _pass_on(self, manifest: Manifest, holder: PeerId, pending: list[int], stream: Stream) -> None:
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
