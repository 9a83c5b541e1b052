"""The kernel's part of the panel benchmark: a peer that trains, watched or not."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from colab_swarm.bench.overhead import memory_mib
from colab_swarm.events import MemberTrace, RoundFinished, StepFinished
from colab_swarm.notebook.panel import Panel
from colab_swarm.notebook.recorder import Header, Recorder
from colab_swarm.recipes.masked_lm import albert
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.layerwise import Lamb

SAMPLES, AVERAGE_EVERY = 2, 8
"""Of a micro-batch; micro-batches of one peer per global step."""
MEMBERS = 8


class Loop:
    """A peer's training loop."""

    def __init__(self, swarm: Swarm) -> None:
        torch.set_num_threads(1)
        self._model, batches = albert("tiny", batch_size=SAMPLES, sequence_length=128)
        self._batch = next(iter(batches))
        inner = Lamb(self._model.parameters(), lr=1e-3)
        self._optimizer = swarm.optimizer(inner, target_batch_size=2 * SAMPLES * AVERAGE_EVERY)

    def batch(self) -> float:
        """One micro-batch; returns the seconds that a global step took, which are no matter of the panel's."""
        loss = self._model(**self._batch).loss
        loss.backward()
        began = time.perf_counter()
        stepped = self._optimizer.step(samples=SAMPLES, loss=loss.item()) is not None
        return time.perf_counter() - began if stepped else 0.0

    def speed(self, seconds: float, after_each: Callable[[], None]) -> float:
        """Batches per second over so long, averaging left out."""
        began, batches, stepping_s = time.perf_counter(), 0, 0.0
        while (took_s := time.perf_counter() - began) < seconds + stepping_s:
            stepping_s += self.batch()
            after_each()
            batches += 1
        return batches / (took_s - stepping_s)


class Watched:
    """The peer alice and her panel."""

    def __init__(self, invite: str) -> None:
        from colab_swarm.swarm.joining import join

        self._swarm = join(invite, peer_name="alice")
        self._loop = Loop(self._swarm)
        self._folder = tempfile.TemporaryDirectory()
        self._step = 0
        # live though nobody looks: nbclient keeps the widgets' state as a page does
        self.panel = Panel(self._swarm.snapshot, self._swarm.leave, pause=lambda on: None, live=True)

    def ratio(self, seconds: float, *, first: int) -> float:
        """Speed while watched over speed while not; which comes ``first`` (1: watched) should change."""
        speeds = {watched: self._speed(seconds, watched) for watched in (first, 1 - first)}
        return speeds[1] / speeds[0]

    def _speed(self, seconds: float, watched: int) -> float:
        recording = self._recorder() if watched else nullcontext()
        with recording:
            return self._loop.speed(seconds, self.panel.tick if watched else lambda: None)

    def _recorder(self) -> Recorder:
        swarm, path = self._swarm, Path(self._folder.name) / "run.jsonl"
        header = Header.now(run=swarm.run, name=swarm.name, peer=swarm.id.hex(), at=time.monotonic())
        return Recorder(swarm.events, path, header)

    def refresh(self, times: int) -> tuple[float, float]:
        """Show so many different views; memory that the kernel grew by, MB, and processor time of one, seconds."""
        before, began, pretending_s = _used_mb(), time.process_time(), 0.0
        for _ in range(times):
            since = time.thread_time()
            self._pretend_round()
            pretending_s += time.thread_time() - since
            self.panel.refresh()
        spent_s = time.process_time() - began - pretending_s
        return _used_mb() - before, spent_s / times

    def _pretend_round(self) -> None:
        """A round and a step as they are in a group of eight."""
        self._step += 1
        now, peers = time.monotonic(), [f"{member:02x}" * 32 for member in range(MEMBERS)]
        part = (0.1, 0.2)
        members = tuple(MemberTrace(peer, 4.0, 1 / MEMBERS, part, part, part) for peer in peers)
        emit = self._swarm.events.emit
        contributors, samples = tuple(peers), 4.0 * MEMBERS
        emit(
            RoundFinished(
                now,
                self._step,
                MEMBERS,
                contributors,
                samples,
                spans_lost=0,
                kept_local=0,
                sent_bytes=1000,
                received_bytes=1000,
                seconds=0.5,
                averaging_s=0.3,
                members=members,
            )
        )
        emit(StepFinished(now, self._step, samples, 1 + 1 / self._step))


def _used_mb() -> float:
    """This process's own memory; libraries that others have loaded too do not count, where the system tells."""
    gc.collect()
    status = Path("/proc/self/status")
    if not status.exists():
        return memory_mib() * 1024**2 / 1e6
    own = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(own.split()[1]) * 1024 / 1e6
