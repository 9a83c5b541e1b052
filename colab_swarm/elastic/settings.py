"""How a group trains elastically, and what came of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

from colab_swarm.elastic.schedulers import Scheduler, Synchronous
from colab_swarm.net.peers import Buffer, Message
from colab_swarm.tensors.codecs import BLOCK_VALUES, Codec, codec_of
from colab_swarm.training.replica import Replica

MAX_PEERS = 16

BUCKET_BYTES = 120 << 10

"""A bucket, as it is encoded, is one packet on a peer link."""

MOST_BLOCKS = 64

EXCESS = 1.1


class ElasticOptions(TypedDict, total=False):
    """What an elastic optimizer takes besides; see `ElasticSettings`."""

    scheduler: Scheduler
    compression: str
    error_feedback: bool
    wait_s: float


@dataclass(frozen=True)
class ElasticSettings:
    """How a group trains. All its members use the same.

    Attributes:
        prefix: names the group; peers of one prefix train one model.
        peers: how many they are, 2 to 16.
        scheduler: when a peer goes on to its next step.
        compression: gradients on the wire: float32, float16, bfloat16, int8, onebit, or ``topk:0.01``.
        error_feedback: what compression cut off a gradient is added to the next; without it nothing is known of how
            far a lossy codec leads the peers off.
        wait_s: how long to wait for the others when the group is formed.
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
    def wire(self) -> Codec:
        """The codec."""
        return codec_of(self.compression)

    @property
    def bucket_values(self) -> int:
        """Values of a bucket, at most."""
        fitting = (
            n for n in range(MOST_BLOCKS, 0, -1) if self.wire.encoded_bytes(n * BLOCK_VALUES) <= BUCKET_BYTES
        )
        return next(fitting) * BLOCK_VALUES

    def terms(self, sizes: list[int], schema: bytes) -> str:
        """What all members must agree on, for people to compare."""
        return (
            f"{self.peers} peers, {self.scheduler!r}, {self.compression}, error_feedback={self.error_feedback}, "
            f"{sum(sizes)} values in {len(sizes)} buckets, model {schema.hex()[:8]}"
        )


@dataclass(frozen=True)
class ElasticStep:
    """What came of one step at this peer.

    Attributes:
        step: from 0, since the group was formed.
        waited_s: between the end of its own backward pass and the scheduler's consent.
        missing: share of the others' values of this step that had not arrived.
        inconsistency: how far this peer's parameters are from the group's, by learning rate: the root mean square over
            the last steps whose gradients have all arrived.
        bound: what the theory allows it to be, with M and sigma as estimated so far; None: nothing is known for this
            codec.
        lost: members (by number) that are gone.
    """

    step: int
    waited_s: float
    missing: float
    inconsistency: float
    bound: float | None
    lost: tuple[int, ...]

    @property
    def passed(self) -> bool:
        """Whether the inconsistency is above its bound, by more than means of few steps are uncertain."""
        return self.bound is not None and self.inconsistency > EXCESS * self.bound > 0


@dataclass(frozen=True)
class ElasticSnapshot:
    """One member of a group and how far it is off.

    Attributes:
        scheduler: that decides when it goes on, with its settings.
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
        """Whether the last measured inconsistency is above its bound; see `ElasticStep.passed`."""
        return bool(self.steps) and self.steps[-1].passed


class Piece(Message, frozen=True):
    """One bucket of a gradient; its encoded values are the payload.

    Attributes:
        squares: squared norm of the values before compression.
        residual_squares: of what compression has kept back of them, for the step after.
    """

    step: int
    bucket: int
    squares: float = 0.0
    residual_squares: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.squares < math.inf and 0 <= self.residual_squares < math.inf):
            raise ValueError(f"a bucket of squared norms {self.squares} and {self.residual_squares}")


class PieceReceiver(Protocol):
    """Whoever takes what the other members send. Called on the runtime's loop, and never raises."""

    def on_piece(self, peer: int, piece: Piece, payload: Buffer) -> None:
        """A bucket arrived."""

    def on_lost(self, peer: int, reason: str) -> None:
        """A member is gone, for good; called once."""


class PieceExchange(Protocol):
    """One member's lines to all others of its group. Used on the runtime's loop.

    Attributes:
        me: this member's number.
        members: how many there are.
    """

    me: int
    members: int

    async def begin(self, receiver: PieceReceiver) -> None:
        """Return when all members are ready to receive.

        Raises:
            StateError: one of them was lost meanwhile.
        """

    def send(self, piece: Piece, payload: Buffer) -> None:
        """Send a bucket to all others, without waiting. The payload must not change any more."""

    def drop(self, peer: int, reason: str) -> None:
        """Have nothing more to do with a member, which is told to the receiver as a loss."""

    async def close(self) -> None:
        """Send what is left to send, and say goodbye. Idempotent."""

    def kill(self) -> None:
        """End without a word, as a crash would."""


class GroupTransport(Protocol):
    """A way into a group."""

    async def enter(
        self,
        settings: ElasticSettings,
        terms: str,
        replica: Replica,
        receive: Callable[[PieceExchange], PieceReceiver],
    ) -> PieceExchange:
        """Find the others, take over the first member's parameters and optimizer state, and begin.

        Args:
            terms: what all members must agree on.
            receive: what takes the others' buckets, given the exchange.

        Raises:
            StateError: the group did not come together.
            ValueError: another peer has other terms.
        """
