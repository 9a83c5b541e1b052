"""The messages between a volunteer and the coordinator, over HTTP; the page of `colab_swarm.workunits` lists them.

Bodies are msgpack of the messages below; data and parameters are safetensors files.
"""

from __future__ import annotations

import random
import re
from typing import Annotated, TypeAlias

import msgspec

from colab_swarm.net.membership import Signed
from colab_swarm.net.peers import Message

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
MAX_CODE_CHARACTERS = 1 << 20
MAX_BODY_BYTES = 64 << 10
"""Of a request that is no upload."""
MAX_UNITS = 64
MAX_HELD = 1024
MAX_SUBSET_BYTES = 1 << 31
MAX_WAIT_S = 1e6
Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
JobName: TypeAlias = Annotated[str, msgspec.Meta(pattern=f"^{NAME.pattern}$")]
"""It becomes part of a path at the volunteer."""
AssignmentId: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class Subset(Message, frozen=True):
    """A file of data: its SHA-256, size in bytes, and number of samples."""

    sha256: Digest
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_SUBSET_BYTES)]
    rows: int


class JobCard(Signed, frozen=True):
    """A job as volunteers see it, signed by its coordinator.

    ``key`` and ``membership`` are the coordinator's, ``code_sha256`` is empty if the job has no
    code, and ``schema`` is the head of a file of parameters (`Schema.head`).
    """

    run_id: str
    name: JobName
    key: bytes
    membership: bytes
    code_sha256: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")]
    local_epochs: Annotated[int, msgspec.Meta(ge=1)]
    batch_size: Annotated[int, msgspec.Meta(ge=1)]
    schema: bytes
    subsets: tuple[Subset, ...]


class AskForUnits(Message, frozen=True):
    """A request for up to ``count`` units, preferably of data in the volunteer's cache (``held``: SHA-256 of subsets).

    ``in_hand``: assignments the volunteer works on. Others assigned to it were lost on the way: send them again.
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_UNITS)]
    held: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_HELD)] = ()
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    in_hand: Annotated[tuple[AssignmentId, ...], msgspec.Meta(max_length=MAX_UNITS)] = ()


class GivenUnit(Message, frozen=True):
    """One unit: train the file at ``parameters`` (a path below /api) on ``data`` within ``deadline_s`` seconds."""

    assignment: AssignmentId
    epoch: int
    subset: int
    data: Digest
    parameters: str
    deadline_s: float
    seed: int


class GivenUnits(Message, frozen=True):
    """Units to train. If there are none, ask again in ``wait_s``, or stop if ``finished``.

    ``epoch`` is the job's current one, ``accuracy`` that of the last epoch that ended.
    """

    units: tuple[GivenUnit, ...] = ()
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 0.0
    finished: bool = False
    epoch: int = 0
    accuracy: float | None = None


class Taken(Message, frozen=True):
    """Progress of an upload: ``received`` bytes so far; ``accepted`` once it is complete and valid."""

    received: int
    accepted: bool = False


class GiveBack(Message, frozen=True):
    assignments: Annotated[tuple[AssignmentId, ...], msgspec.Meta(max_length=MAX_UNITS)]


class Problem(Message, frozen=True):
    """Why a request was refused: a code for programs, and a text that tells people what is wrong and what to do.

    The code is ``token``, ``banned``, ``unknown``, ``stale``, ``invalid``, ``size`` or ``busy``.
    """

    code: str
    text: str


class Refused(Exception):
    """A request is refused; ``received``: bytes of an upload so far, if its piece does not continue it."""

    def __init__(self, code: str, text: str, *, received: int | None = None) -> None:
        super().__init__(text)
        self.problem, self.received = Problem(code, text), received


MAX_ASKED_S = 900.0
"""The longest wait that the other side may request."""


class Backoff:
    """Wait times after failures in a row, doubling from ``first_s`` to ``most_s``.

    A wait lies between half and the whole of its length, so that peers drift apart.
    """

    def __init__(self, rng: random.Random, first_s: float = 1.0, most_s: float = 60.0) -> None:
        self._rng, self._first_s, self._next_s, self._most_s = rng, first_s, first_s, most_s

    def failed(self, asked_s: float = 0.0) -> float:
        """Return the seconds to wait now: at least ``asked_s``, which the other side requested."""
        wait_s = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._most_s)
        return max(wait_s, min(asked_s, MAX_ASKED_S))

    def succeeded(self) -> None:
        self._next_s = self._first_s
