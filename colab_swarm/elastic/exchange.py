"""How buckets of gradients get from each member of a group to all others: the interface."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from colab_swarm.elastic.settings import ElasticSettings
from colab_swarm.net.peers import Buffer, Message
from colab_swarm.training.replica import Replica


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


class Receiver(Protocol):
    """Whoever takes what the other members send. Called on the runtime's loop, and never raises."""

    def on_piece(self, peer: int, piece: Piece, payload: Buffer) -> None:
        """A bucket arrived."""

    def on_lost(self, peer: int, reason: str) -> None:
        """A member is gone, for good; called once."""


class Exchange(Protocol):
    """One member's lines to all others of its group. Used on the runtime's loop.

    Attributes:
        me: this member's number.
        members: how many there are.
    """

    me: int
    members: int

    async def begin(self, receiver: Receiver) -> None:
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

    def vanish(self) -> None:
        """End without a word, as a crash would."""


class Entrance(Protocol):
    """A way into a group."""

    async def enter(
        self, settings: ElasticSettings, terms: str, replica: Replica, receive: Callable[[Exchange], Receiver]
    ) -> Exchange:
        """Find the others, take over the first member's parameters and optimizer state, and begin.

        Args:
            terms: what all members must agree on.
            receive: what takes the others' buckets, given the exchange.

        Raises:
            StateError: the group did not come together.
            ValueError: another peer has other terms.
        """
