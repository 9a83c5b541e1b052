"""Settings of an elastic group, and its results step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypedDict

from colab_swarm.elastic.schedulers import Scheduler, Synchronous
from colab_swarm.net.peers import Message
from colab_swarm.tensors.codecs import BLOCK_VALUES, MAX_BLOCKS, codec_of

MAX_PEERS = 16
BUCKET_BYTES = 120 << 10
"""An encoded bucket is one packet on a peer link."""
EXCESS = 1.1


class ElasticOptions(TypedDict, total=False):
    """Options of an elastic optimizer; see `ElasticSettings`."""

    scheduler: Scheduler
    compression: str
    error_feedback: bool
    wait_s: float


@dataclass(frozen=True)
class ElasticSettings:
    """Settings of a group. All members use the same.

    Attributes:
        prefix: name of the group; peers with the same prefix train one model.
        peers: size of the group, 2 to 16.
        scheduler: decides when a peer continues with its next step.
        compression: gradients on the wire: float32, float16, bfloat16, int8, onebit, or ``topk:0.01``.
        error_feedback: add what compression cut off to the next gradient; without it, a lossy codec has no bound.
        wait_s: how long to wait for the other peers when the group is formed.
    """

    prefix: str
    peers: int
    scheduler: Scheduler = field(default_factory=Synchronous)
    compression: str = "float32"
    error_feedback: bool = True
    wait_s: float = 300.0

    def __post_init__(self) -> None:
        if not 2 <= self.peers <= MAX_PEERS:
            raise ValueError(f"peers={self.peers}: an elastic group has 2 to {MAX_PEERS}")
        if not self.wait_s > 0:
            raise ValueError(f"wait_s={self.wait_s}: pass seconds, such as 300")
        codec_of(self.compression)

    @property
    def bucket_values(self) -> int:
        """Most values of a bucket."""
        codec, sizes = codec_of(self.compression), range(MAX_BLOCKS, 0, -1)
        fitting = (n for n in sizes if codec.encoded_bytes(n * BLOCK_VALUES) <= BUCKET_BYTES)
        return next(fitting) * BLOCK_VALUES

    def terms(self, sizes: list[int], schema: bytes) -> str:
        """Return what all members must agree on, as readable text."""
        return (
            f"{self.peers} peers, {self.scheduler!r}, {self.compression}, error_feedback={self.error_feedback}, "
            f"{sum(sizes)} values in {len(sizes)} buckets, model {schema.hex()[:8]}"
        )


@dataclass(frozen=True)
class ElasticStep:
    """Result of one step at this peer.

    Attributes:
        step: from 0, since the group was formed.
        waited_s: from the end of its own backward pass until the scheduler let it continue.
        missing: share of the others' values of this step that had not arrived.
        inconsistency: distance of this peer's parameters from the group's, divided by the learning rate: the root mean
            square over recent steps whose gradients have all arrived.
        bound: the theory's limit for it, with M and sigma as estimated so far; None: unknown for this codec.
        lost: numbers of the lost members.
    """

    step: int
    waited_s: float
    missing: float
    inconsistency: float
    bound: float | None
    lost: tuple[int, ...]

    @property
    def passed(self) -> bool:
        """Whether the inconsistency is above its bound by more than the uncertainty of a mean over few steps."""
        return self.bound is not None and self.inconsistency > EXCESS * self.bound > 0


@dataclass(frozen=True)
class ElasticSnapshot:
    """State of one member of a group.

    Attributes:
        scheduler: its scheduler with settings.
        member, members: its number, and the group's size at its start.
        steps: the latest, oldest first.
        left: whether it has left the group.
    """

    scheduler: str
    member: int
    members: int
    steps: tuple[ElasticStep, ...]
    left: bool

    @property
    def passed(self) -> bool:
        """Whether the last measured inconsistency is above its bound."""
        return bool(self.steps) and self.steps[-1].passed


class Piece(Message, frozen=True):
    """One bucket of a gradient; its encoded values are the payload.

    Attributes:
        squares: squared norm of the values before compression.
        residual_squares: squared norm of what compression keeps back for the next step.
    """

    step: int
    bucket: int
    squares: float = 0.0
    residual_squares: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.squares < math.inf and 0 <= self.residual_squares < math.inf):
            raise ValueError(f"a bucket of squared norms {self.squares} and {self.residual_squares}")
