"""This peer as a member of a round: what it knows, and what members send each other when."""

import asyncio
import math
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from colab_swarm.averaging.group import Group, GroupMember, chunk_values
from colab_swarm.averaging.reducer import DIGEST_BYTES, SpanLedger
from colab_swarm.averaging.standing import Standing
from colab_swarm.errors import require
from colab_swarm.events import MemberTrace
from colab_swarm.net.peers import Message, PeerId, Peers
from colab_swarm.tensors.vector import Vector

LARGEST_MEAN = 100.0  # most times that a mean is larger than any contribution is believed to be
LEFT_OUT = "a reducer did not receive its whole contribution"


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
    # `digest_of` a mean that was recovered, as its reducer had encoded it
    digest: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""


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
    claimed_s: float = 0.0  # the same, by what the members say of their lines
    most_rms: float = math.inf  # in a chunk of any contribution, unless this peer's is as large
    standing: Standing = field(default_factory=lambda: Standing(PeerId(b"")))


class Trace:
    """Begin and end of the ``sent``, ``received`` and ``means`` of each member, see `MemberTrace`, and all bytes."""

    def __init__(self, group: Group, *, now: float) -> None:
        self.began_at = now
        self.sent_bytes = 0
        self.received_bytes = 0
        self._group = group
        self._times: dict[tuple[str, int], tuple[float, float]] = {}
        self._dropped: dict[int, str] = {}

    def on_traffic(self, kind: str, member: int, now: float) -> None:
        since = now - self.began_at
        began, _ = self._times.get((kind, member), (since, since))
        self._times[kind, member] = began, since

    def on_dropped(self, member: int, reason: str) -> None:
        self._dropped.setdefault(member, reason[:200])

    def ended_s(self) -> list[float]:
        """Return when each other member's contribution had arrived; where none did, its means."""
        for wanted in ("received", "means"):
            ended = []
            for (kind, member), (_, end_s) in self._times.items():
                if kind == wanted and member not in self._dropped:
                    ended.append(end_s)
            if ended:
                return ended
        return []

    def members(self, incomplete: Container[int]) -> tuple[MemberTrace, ...]:
        """Return the traces; some reducer left the ``incomplete`` out, and it alone knows why."""
        total = sum(member.share for member in self._group.members) or 1.0
        traces = []
        for index, member in enumerate(self._group.members):
            dropped = self._dropped.get(index, "")
            if not dropped and index in incomplete:
                dropped = LEFT_OUT
            trace = MemberTrace(
                peer=member.id.hex(),
                samples=member.samples,
                share=member.share / total,
                sent=self._times.get(("sent", index)),
                received=self._times.get(("received", index)),
                means=self._times.get(("means", index)),
                dropped=dropped,
            )
            traces.append(trace)
        return tuple(traces)


class RoundMember:
    """This peer as a member of a round: what the parts of its `AllReduce` share.

    Raises ValueError if this peer is no member. What changes, by member, and who writes it:

    - ``ledger``, with the vector: the span server, the collection and the recovery place means.
    - ``heard_at``: the span server and the collection, by `on_heard`; all at once after this process was stopped.
    - ``streaming``, the members that opened a stream here: the span server.
    - ``lost``, reducers that failed here before all their means arrived: the collection; at an assistant, those that it
      was asked to recover: the recovery.
    - ``settled``, set when a reducer's own means have arrived here or will not, and ``final``, when no other member's
      will either: the span server for its own span, `AllReduce` for the others, and the end of the round for all.

    ``scratch`` is memory for one chunk, for use without an await.
    """

    def __init__(
        self,
        peers: Peers,
        group: Group,
        vector: Vector,
        settings: AveragingSettings,
        usual: Usual,
        *,
        now: float,
    ) -> None:
        me = group.index_of(peers.id)
        if me is None:
            raise ValueError("only a member can take part in a round")
        self.peers = peers
        self.group = group
        self.me = me
        self.settings = settings
        self.usual = usual
        self.ledger = SpanLedger(group, vector)
        self.trace = Trace(group, now=now)
        longest = min(chunk_values(group.terms.codec, group.terms.mean_codec), group.terms.numel)
        self.scratch = np.empty(longest, np.float32)
        self.contributors = frozenset(i for i, member in enumerate(group.members) if member.weight > 0)
        self.heard_at = dict.fromkeys(range(len(group.members)), now)
        self.streaming: set[int] = set()
        self.lost: set[int] = set()
        self.settled = [asyncio.Event() for _ in group.members]
        self.final = [asyncio.Event() for _ in group.members]

    @property
    def others(self) -> list[int]:
        """The other members, starting after this one, so that each begins with another."""
        count = len(self.group.members)
        return [*range(self.me + 1, count), *range(self.me)]

    def member(self, index: int) -> GroupMember:
        return self.group.members[index]

    @property
    def contributes(self) -> bool:
        return self.me in self.contributors

    def on_heard(self, member: int, now: float) -> None:
        self.heard_at[member] = now

    def silent_s(self, member: int, now: float) -> float:
        return now - self.heard_at[member]

    def check_missing(self, mean: Chunk) -> None:
        """Raise ValueError if a mean lacks members that have nothing to contribute, or do not exist."""
        missing = frozenset(mean.missing)
        require(missing <= self.contributors, "its mean lacks members that contribute nothing")
