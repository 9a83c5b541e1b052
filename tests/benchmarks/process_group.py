"""Elastic groups over `torch.distributed`, for a group in one data centre or on one host.

Each direction of each pair of ranks has a thread, because gloo's calls block. All messages have one
size, known in advance. Nothing is encrypted, and ranks trust each other.
"""

import asyncio
import queue
import struct
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from colab_swarm.averaging.group import chunk_values
from colab_swarm.elastic.optimizer import ElasticOptimizer
from colab_swarm.elastic.steps import ElasticSettings, Piece, PieceExchange
from colab_swarm.errors import StateError, require
from colab_swarm.events import EventLog
from colab_swarm.net.peers import Buffer
from colab_swarm.runtime import Runtime
from colab_swarm.tensors.chunks import Manifest, Snapshot
from colab_swarm.tensors.codecs import codec_of
from colab_swarm.training.replica import Replica

HEADER = struct.Struct("<qqddq")  # step, bucket, squares, residual squares, and bytes of payload
GOODBYE = Piece(-1, 0)
GOODBYE_S = 5.0
SILENCE = timedelta(days=1)  # timeout of a live, silent rank; a dead one is noticed at once


def group_optimizer(optimizer: Optimizer, **options: Any) -> ElasticOptimizer:
    """Train elastically with all ranks of a `torch.distributed` job. Every rank calls it after ``init_process_group``.

    Args:
        optimizer: over the same parameters in the same order on all ranks; all ranks copy rank 0's values and state.
        **options: ``scheduler``, ``compression``, ``error_feedback``, ``wait_s``: see `ElasticSettings`.

    Raises `RuntimeError` if there is no process group, and `ValueError` if there are too few or too
    many ranks, or they have different settings.
    """
    require(
        dist.is_initialized(),
        "call torch.distributed.init_process_group(…) first; torchrun sets its environment",
        RuntimeError,
    )
    settings, events = ElasticSettings("", dist.get_world_size(), **options), EventLog()
    return ElasticOptimizer(Runtime.shared(), optimizer, settings, partial(_enter_ranks, events), events)


@asynccontextmanager
async def _enter_ranks(
    events: EventLog, settings: ElasticSettings, terms: str, replica: Replica
) -> "AsyncIterator[ProcessGroupExchange]":
    try:
        await asyncio.to_thread(_copy_first, terms, replica, timedelta(seconds=settings.wait_s))
    except RuntimeError as error:
        raise StateError(f"a rank is missing: see its output, restart all ranks ({error})") from error
    largest = codec_of(settings.compression).encoded_bytes(chunk_values(settings.compression))
    yield ProcessGroupExchange(events, largest_bytes=largest)


def _copy_first(terms: str, replica: Replica, timeout: timedelta) -> None:
    group = dist.new_group(backend="gloo", timeout=timeout)
    gathered: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(gathered, terms, group=group)
    different = sorted(set(gathered))
    require(len(different) == 1, f"ranks have different settings: {different}; give all the same")
    own = replica.snapshot()
    box: list[Manifest] = [own.manifest]
    dist.broadcast_object_list(box, 0, group=group)
    blob = own.blob if dist.get_rank() == 0 else np.empty(box[0].size_bytes, np.uint8)
    dist.broadcast(torch.from_numpy(blob), 0, group=group)
    if dist.get_rank():
        replica.load_snapshot(Snapshot(box[0], blob))


class ProcessGroupExchange(PieceExchange):
    """A rank's connections to the others; no payload exceeds ``largest_bytes``."""

    def __init__(self, events: EventLog, *, largest_bytes: int) -> None:
        super().__init__(events, dist.get_rank(), [f"rank {rank}" for rank in range(dist.get_world_size())])
        self._frame_bytes = HEADER.size + largest_bytes
        self._queues: dict[int, queue.SimpleQueue[torch.Tensor | None]] = {
            rank: queue.SimpleQueue() for rank in range(self.members) if rank != self.me
        }
        self._threads: list[threading.Thread] = []
        self._closed = False

    async def begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._group = await asyncio.to_thread(dist.new_group, backend="gloo", timeout=SILENCE)
        for rank in self._queues:
            for body in (self._send_to, self._receive_from):
                thread = threading.Thread(target=body, args=(rank,), name=f"elastic rank {rank}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def send(self, piece: Piece, payload: Buffer) -> None:
        frame, payload = np.zeros(self._frame_bytes, np.uint8), memoryview(payload).cast("B")
        HEADER.pack_into(
            frame.data, 0, piece.step, piece.bucket, piece.squares, piece.residual_squares, len(payload)
        )
        frame.data[HEADER.size : HEADER.size + len(payload)] = payload
        for rank, frames in self._queues.items():
            if rank not in self.lost:
                frames.put(torch.from_numpy(frame))

    async def close(self) -> None:
        """Wait for the goodbye of all other ranks as well: gloo cannot cancel a receive."""
        if not self._closed:
            self._closed = True
            self.send(GOODBYE, b"")
            self.kill()
            until = time.monotonic() + GOODBYE_S
            for thread in self._threads:
                await asyncio.to_thread(thread.join, max(0.0, until - time.monotonic()))
            if not any(thread.is_alive() for thread in self._threads):
                dist.destroy_process_group(self._group)
                del self._group

    def kill(self) -> None:
        for frames in self._queues.values():
            frames.put(None)

    def _send_to(self, rank: int) -> None:
        try:
            while (frame := self._queues[rank].get()) is not None:
                dist.send(frame, rank, group=self._group)
        except RuntimeError as error:
            self._report_lost(rank, error)

    def _receive_from(self, rank: int) -> None:
        try:
            while True:
                frame = torch.empty(self._frame_bytes, dtype=torch.uint8)
                dist.recv(frame, rank, group=self._group)
                *fields, size_bytes = HEADER.unpack_from(frame.numpy().data)
                if (piece := msgspec.convert(fields, Piece)) == GOODBYE:
                    self._loop.call_soon_threadsafe(self.lose, rank, "it left")
                    return
                payload = frame.numpy().data[HEADER.size : HEADER.size + size_bytes]
                self._loop.call_soon_threadsafe(self.steps.on_piece, rank, piece, payload)
        except (RuntimeError, msgspec.ValidationError) as error:
            self._report_lost(rank, error)

    def _report_lost(self, rank: int, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self.lose, rank, str(error).partition("\n")[0])

    def lose(self, index: int, reason: str) -> None:
        if not self._closed:
            super().lose(index, reason)
