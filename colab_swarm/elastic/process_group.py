"""Buckets over `torch.distributed`: the same schedulers where a group lives in one data centre, or on one host.

Messages go from member to member through gloo, each direction of each pair in a thread of its own: gloo's calls block.
All are of one size, that of the largest bucket behind a header, so that a receiver knows it in advance. Unlike peer
links nothing is encrypted, and what ranks tell each other is trusted.
"""

from __future__ import annotations

import asyncio
import queue
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Unpack

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from colab_swarm.elastic.optimizer import ElasticOptimizer
from colab_swarm.elastic.settings import ElasticOptions, ElasticSettings, Piece, PieceExchange, PieceReceiver
from colab_swarm.errors import StateError
from colab_swarm.events import EventLog, PeerLeft
from colab_swarm.net.peers import Buffer
from colab_swarm.runtime import Runtime
from colab_swarm.training.replica import Replica
from colab_swarm.training.state import Snapshot, StateManifest

HEADER = struct.Struct("<qqddq")
"""Step, bucket, squares, residual squares, and bytes of payload."""
GOODBYE = Piece(-1, 0)
FAREWELL_S = 5.0
PATIENCE = timedelta(days=1)
"""With a rank that lives but is silent; one that dies is noticed at once."""


def group_optimizer(optimizer: Optimizer, **options: Unpack[ElasticOptions]) -> ElasticOptimizer:
    """Let all ranks of a `torch.distributed` job train elastically; every rank calls it, after ``init_process_group``.

    Args:
        optimizer: over the same parameters in the same order on all ranks; values and state become rank 0's.
        **options: ``scheduler``, ``codec``, ``error_feedback``, ``wait_s``: see `ElasticSettings`.

    Raises:
        RuntimeError: there is no process group.
        ValueError: there are too few or too many ranks, or they have different settings.
    """
    if not dist.is_initialized():
        raise RuntimeError("call torch.distributed.init_process_group(…) first; torchrun sets what it needs")
    settings, events = ElasticSettings("", dist.get_world_size(), **options), EventLog()
    return ElasticOptimizer(Runtime.shared(), optimizer, settings, Ranks(events), events)


class Ranks:
    """A way into the group of all ranks; an `Entrance`."""

    def __init__(self, events: EventLog) -> None:
        self._events = events

    async def enter(
        self,
        settings: ElasticSettings,
        terms: str,
        replica: Replica,
        receive: Callable[[PieceExchange], PieceReceiver],
    ) -> ProcessGroupExchange:
        """See `Entrance`."""
        try:
            await asyncio.to_thread(_level, terms, replica, timedelta(seconds=settings.wait_s))
        except RuntimeError as error:
            raise StateError(
                f"a rank was missed; its own output tells why. Start all ranks again. ({error})"
            ) from error
        largest = settings.wire.encoded_bytes(settings.bucket_values)
        exchange = ProcessGroupExchange(self._events, largest_bytes=largest)
        await exchange.begin(receive(exchange))
        return exchange


def _level(terms: str, replica: Replica, timeout: timedelta) -> None:
    """Check that all ranks have the same terms, and give them rank 0's parameters and optimizer state."""
    words = dist.new_group(backend="gloo", timeout=timeout)
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, terms, group=words)
    if len(set(told)) > 1:
        raise ValueError(
            f"ranks want to train differently: {sorted(set(told))}. Give all ranks the same settings"
        )
    own = replica.snapshot()
    box: list[StateManifest] = [own.manifest]
    dist.broadcast_object_list(box, 0, group=words)
    blob = own.blob if dist.get_rank() == 0 else np.empty(box[0].size_bytes, np.uint8)
    dist.broadcast(torch.from_numpy(blob), 0, group=words)
    if dist.get_rank():
        replica.load_snapshot(Snapshot(box[0], blob))


class ProcessGroupExchange:
    """A rank's lines to the others; an `PieceExchange`. Every rank makes one at the same time.

    Args:
        largest_bytes: of a payload.

    Attributes:
        me: this rank.
        members: how many ranks there are.
        lost: who is gone.
    """

    def __init__(self, events: EventLog, *, largest_bytes: int) -> None:
        self.me, self.members = dist.get_rank(), dist.get_world_size()
        self.lost: set[int] = set()
        self._events, self._frame_bytes = events, HEADER.size + largest_bytes
        self._queues: dict[int, queue.SimpleQueue[torch.Tensor | None]] = {
            rank: queue.SimpleQueue() for rank in range(self.members) if rank != self.me
        }
        self._threads: list[threading.Thread] = []
        self._closed = False

    async def begin(self, receiver: PieceReceiver) -> None:
        """See `PieceExchange`."""
        self._receiver, self._loop = receiver, asyncio.get_running_loop()
        self._group = await asyncio.to_thread(dist.new_group, backend="gloo", timeout=PATIENCE)
        for rank in self._queues:
            for body in (self._send_to, self._receive_from):
                thread = threading.Thread(target=body, args=(rank,), name=f"elastic rank {rank}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def send(self, piece: Piece, payload: Buffer) -> None:
        """See `PieceExchange`."""
        frame, payload = np.zeros(self._frame_bytes, np.uint8), memoryview(payload).cast("B")
        fields = piece.step, piece.bucket, piece.squares, piece.residual_squares, len(payload)
        HEADER.pack_into(frame.data, 0, *fields)
        frame.data[HEADER.size : HEADER.size + len(payload)] = payload
        for rank, frames in self._queues.items():
            if rank not in self.lost:
                frames.put(torch.from_numpy(frame))

    def drop(self, peer: int, reason: str) -> None:
        """See `PieceExchange`."""
        self._lose(peer, reason)

    async def close(self) -> None:
        """See `PieceExchange`. Waits for the other ranks' goodbye, too: gloo cannot be told to receive no more."""
        if not self._closed:
            self._closed = True
            self.send(GOODBYE, b"")
            self.kill()
            until = time.monotonic() + FAREWELL_S
            for thread in self._threads:
                await asyncio.to_thread(thread.join, max(0.0, until - time.monotonic()))
            if not any(thread.is_alive() for thread in self._threads):
                dist.destroy_process_group(self._group)
                del self._group

    def kill(self) -> None:
        """See `PieceExchange`."""
        for frames in self._queues.values():
            frames.put(None)

    def _send_to(self, rank: int) -> None:
        try:
            while (frame := self._queues[rank].get()) is not None:
                dist.send(frame, rank, group=self._group)
        except RuntimeError as error:
            self._tell_lost(rank, error)

    def _receive_from(self, rank: int) -> None:
        try:
            while True:
                frame = torch.empty(self._frame_bytes, dtype=torch.uint8)
                dist.recv(frame, rank, group=self._group)
                *fields, size_bytes = HEADER.unpack_from(frame.numpy().data)
                piece = Piece(*fields)
                if piece == GOODBYE:
                    self._loop.call_soon_threadsafe(self._lose, rank, "it has left")
                    return
                payload = frame.numpy().data[HEADER.size : HEADER.size + size_bytes]
                self._loop.call_soon_threadsafe(self._on_piece, rank, piece, payload)
        except RuntimeError as error:
            self._tell_lost(rank, error)

    def _on_piece(self, rank: int, piece: Piece, payload: memoryview) -> None:
        if rank not in self.lost:
            self._receiver.on_piece(rank, piece, payload)

    def _tell_lost(self, rank: int, error: RuntimeError) -> None:
        self._loop.call_soon_threadsafe(self._lose, rank, str(error).partition("\n")[0])

    def _lose(self, rank: int, reason: str) -> None:
        if rank not in self.lost and not self._closed:
            self.lost.add(rank)
            self._events.emit(PeerLeft(self._loop.time(), f"rank {rank}", reason))
            self._receiver.on_lost(rank, reason)
