"""Where a job's state lives: its log, its parameters, the results that wait. It outlives the coordinator.

Every method is atomic and, where the store is durable, lasting when it returns: a process killed at any moment
leaves either all of a call or nothing. Stores are used by the coordinator and by the parameter servers at once, from
several threads and processes. A call that raises `StoreError` because the store was lost on the way may have been done
or not: read the log again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from colab_swarm.errors import StoreError
from colab_swarm.workunits.entries import Accepted, AnyEntry, Assimilated
from colab_swarm.workunits.weights import Floats

Update: TypeAlias = Callable[[Floats], Floats]
"""Of the parameters, which are read-only and only lent; it returns new ones, which it gives away."""

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""For the environment of processes that assimilate: glibc keeps the memory of vectors, instead of asking the system for
it anew, which is 7,000 page faults and half of the processor's time per update of 5 M parameters."""


@dataclass(frozen=True)
class Parameters:
    """The server's parameters.

    Attributes:
        version: assimilations so far; under eventual consistency some of them may be lost in ``values``.
        values: read-only, (numel,).
    """

    version: int
    values: Floats


class Store(Protocol):
    """One job's state. Tensors are float32 vectors, blobs are bytes with a name."""

    shared: bool
    """Whether other processes can open it too."""

    def begin(self, first: Floats) -> None:
        """Put in the first parameters, as version 0, unless the job has some already.

        Raises:
            StoreError: it holds a job with another number of parameters.
        """

    def append(
        self, entries: Sequence[AnyEntry], *, put: Mapping[str, bytes] = ..., drop: Collection[str] = ()
    ) -> None:
        """Add to the log; keep the blobs ``put``, delete those named in ``drop``. Each `Accepted` is queued, too."""

    def entries(self, after: int = 0) -> list[tuple[int, AnyEntry]]:
        """The log beyond position ``after``, in order, each with its position, from 1 up (gaps are allowed)."""

    def blob(self, name: str) -> bytes:
        """What was put.

        Raises:
            KeyError: there is none of this name.
        """

    def parameters(self) -> Parameters:
        """The newest."""

    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        """The oldest accepted result that nobody holds, for ``server`` until ``now + lease_s``; None if none waits."""

    def assimilate(self, accepted: Accepted, update: Update, *, server: str, now: float) -> int | None:
        """Replace the parameters by ``update(parameters)``, log `Assimilated`, drop the result from queue and blobs.

        Returns:
            The new version; None, with nothing changed, if this unit was assimilated already.
        """

    def waiting(self) -> int:
        """Accepted results that are not assimilated."""

    def close(self) -> None:
        """Let go of files and connections; what was kept stays."""


class Stopwatch:
    """Since when results are in the hands of this process, for `Assimilated.seconds`."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}

    def start(self, accepted: Accepted) -> Accepted:
        """``accepted`` was claimed just now."""
        self._began[accepted.assignment] = time.perf_counter()
        return accepted

    def began(self, accepted: Accepted) -> float:
        """When it was claimed; now, if that was elsewhere. Forgets it."""
        return self._began.pop(accepted.assignment, time.perf_counter())


def assimilated(accepted: Accepted, version: int, *, server: str, now: float, began: float) -> Assimilated:
    """What `Store.assimilate` adds to the log; ``began``: by `Stopwatch`."""
    return Assimilated(
        at=now,
        unit=accepted.unit,
        assignment=accepted.assignment,
        server=server,
        version=version,
        seconds=time.perf_counter() - began,
    )


def check_size(job: str, numel: int, first: Floats) -> None:
    """Raise StoreError if a job of ``numel`` parameters is begun again with ``first``."""
    if numel != len(first):
        raise StoreError(
            f"the store holds a job {job!r} of {numel:,} parameters, but the model has {len(first):,}: "
            "give the job another name, or use another store"
        )


def not_begun(job: str) -> StoreError:
    """The error of reading parameters that nobody put in."""
    return StoreError(f"the store holds no job {job!r} yet: start its coordinator first")
