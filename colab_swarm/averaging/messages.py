"""The messages that members of a round send each other, and the time limits of a round."""

from dataclasses import dataclass

from colab_swarm.net.peers import Message


class ReduceSpan(Message, frozen=True):
    """Opens the stream from a member to a reducer: the member sends its contribution, the reducer the means."""

    round_id: bytes


class RecallSpan(Message, frozen=True):
    """Opens a stream that returns the ``wanted`` chunks of a lost reducer's span, in this order.

    If the member has no mean of a chunk, it sends its own values if ``contributions`` is True, else an empty payload.
    """

    round_id: bytes
    reducer: int
    wanted: tuple[int, ...]
    contributions: bool


class Chunk(Message, frozen=True):
    """Chunk ``index`` of a span: a contribution or, if ``averaged``, a mean; without either, the payload is empty."""

    index: int
    averaged: bool = False
    missing: tuple[int, ...] = ()  # members of positive weight that are not in the mean
    codec: str = ""  # empty for the group's codec; a mean may be sparse16


@dataclass(frozen=True)
class AveragingSettings:
    """Time limits of a round, in seconds."""

    round_timeout_s: float = 120.0  # for the whole round, or three times its forecast if longer
    patience_s: float = 5.0  # for a member whose usual time is not known
    dial_timeout_s: float = 3.0  # for reaching a member
