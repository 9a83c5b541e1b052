"""A store in this process' memory: gone with it. For tests, and for jobs that may be lost."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from colab_swarm.workunits.entries import Accepted, AnyEntry
from colab_swarm.workunits.store import Parameters, Stopwatch, Update, assimilated, check_size, not_begun
from colab_swarm.workunits.weights import Floats


class MemoryStore:
    """A job's state in memory; safe to use from several threads, assimilations follow one another."""

    shared = False

    def __init__(self, job: str) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._log: list[AnyEntry] = []
        self._blobs: dict[str, bytes] = {}
        self._queue: dict[str, Accepted] = {}  # by assignment, oldest first
        self._held_until: dict[str, float] = {}  # by assignment
        self._stopwatch = Stopwatch()
        self._parameters: Parameters | None = None

    def begin(self, first: Floats) -> None:
        """See `Store.begin`."""
        with self._lock:
            if self._parameters is None:
                self._parameters = Parameters(0, _frozen(first.copy()))
            check_size(self._job, len(self._parameters.values), first)

    def append(
        self,
        entries: Sequence[AnyEntry],
        *,
        put: Mapping[str, bytes] | None = None,
        drop: Collection[str] = (),
    ) -> None:
        """See `Store.append`."""
        with self._lock:
            self._log += entries
            self._queue |= {entry.assignment: entry for entry in entries if isinstance(entry, Accepted)}
            self._blobs |= put or {}
            for name in drop:
                self._blobs.pop(name, None)

    def entries(self, after: int = 0) -> list[tuple[int, AnyEntry]]:
        """See `Store.entries`."""
        with self._lock:
            return list(enumerate(self._log[after:], after + 1))

    def blob(self, name: str) -> bytes:
        """See `Store.blob`."""
        return self._blobs[name]

    def parameters(self) -> Parameters:
        """See `Store.parameters`."""
        if self._parameters is None:
            raise not_begun(self._job)
        return self._parameters

    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        """See `Store.claim`."""
        with self._lock:
            for assignment, accepted in self._queue.items():
                if self._held_until.get(assignment, now) <= now:
                    self._held_until[assignment] = now + lease_s
                    return self._stopwatch.start(accepted)
            return None

    def assimilate(self, accepted: Accepted, update: Update, *, server: str, now: float) -> int | None:
        """See `Store.assimilate`."""
        with self._lock:
            if accepted.assignment not in self._queue:
                return None
            began, old = self._stopwatch.began(accepted), self.parameters()
            new = Parameters(old.version + 1, _frozen(update(old.values)))
            self._log.append(assimilated(accepted, new.version, server=server, now=now, began=began))
            self._parameters = new
            del self._queue[accepted.assignment]
            self._held_until.pop(accepted.assignment, None)
            self._blobs.pop(accepted.result, None)
            return new.version

    def waiting(self) -> int:
        """See `Store.waiting`."""
        return len(self._queue)

    def close(self) -> None:
        """See `Store.close`."""


def _frozen(values: Floats) -> Floats:
    frozen = values.astype(np.float32, copy=False)
    frozen.flags.writeable = False
    return frozen
