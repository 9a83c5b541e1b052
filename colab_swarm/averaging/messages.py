"""What the members of a round send each other, and how long they wait."""

from dataclasses import dataclass

from colab_swarm.net.peers import Message


class ReduceSpan(Message, frozen=True):
    """Opens the stream from a member to a reducer: chunks of contributions up, chunks of means back."""

    round_id: bytes


class RecallSpan(Message, frozen=True):
    """Opens a stream that returns the ``wanted`` chunks of a lost reducer's span, in this order.

    Without a mean the member sends its own values with ``contributions``, else an empty payload.
    """

    round_id: bytes
    reducer: int
    wanted: tuple[int, ...]
    contributions: bool


class Chunk(Message, frozen=True):
    """Chunk ``index`` of a span: a contribution or, if ``averaged``, a mean; empty if there is none."""

    index: int
    averaged: bool = False
    missing: tuple[int, ...] = ()  # members of positive weight that are not in the mean
    codec: str = ""  # empty: the group's; a mean may be sparse16


@dataclass(frozen=True)
class AveragingSettings:
    """Timeouts of a round."""

    round_timeout_s: float = 120.0  # bound on the whole round, recovery included
    patience_s: float = 5.0  # for a member of which nothing is known
    dial_timeout_s: float = 3.0  # for reaching a member
