"""What the members of a round send each other, and the settings of a round."""

import math
from dataclasses import dataclass, field

from colab_swarm.averaging.standing import Standing
from colab_swarm.net.peers import Message, PeerId


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
    patience_s: float = 10.0  # silence of a member before anything is known about the usual time
    silence_s: float = 1.0  # of a line; a busy notebook stalls its peer
    dial_timeout_s: float = 3.0  # for reaching a member


@dataclass(frozen=True)
class UploadEncoding:
    """How a member encodes its contribution."""

    precision: str | None = None  # None: the group's codec
    fine: int | None = None  # values at the front that belong to small tensors (see `Precision`)


@dataclass(frozen=True)
class Usual:
    """What is known from the rounds before."""

    round_s: float = math.inf  # until a member's contribution has come; infinite: not known yet
    most_rms: float = math.inf  # in a chunk of any contribution, unless this peer's is as large
    standing: Standing = field(default_factory=lambda: Standing(PeerId(b"")))
