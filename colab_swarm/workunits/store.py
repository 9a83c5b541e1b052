"""Where a job's state lives: its log, its parameters, the results that wait. It outlives the coordinator.

Every method is atomic and, where the store is durable, lasting when it returns: a process killed at any moment
leaves either all of a call or nothing. Stores are used by the coordinator and by the parameter servers at once, from
several threads and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from colab_swarm.workunits.entries import Accepted, AnyEntry
from colab_swarm.workunits.weights import Floats

Update: TypeAlias = Callable[[Floats], Floats]


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
