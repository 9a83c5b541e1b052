"""How peers become a group: the messages, the shares, and the pure core that decides when a group is formed.

One candidate is the *organizer* of a step: candidates are ranked by SHA-256 of (prefix, step, peer id) and
the first that is alive and willing organizes, so nobody negotiates. It opens a `GroupFormation`, calls the
candidates it knows, and closes when everyone who is coming has joined, at the latest when waiting longer
would be unfair to the others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from colab_swarm.errors import PeerError
from colab_swarm.net.peers import Contact, Message, PeerId, short
from colab_swarm.tensors.codecs import BLOCK_VALUES, MAX_BLOCKS, Codec, Precision

CHUNK_BYTES = 122_880

"""Encoded size of a chunk, at most: with its headers one packet of a link, and under malloc's mmap threshold."""


class Span(NamedTuple):
    """Values ``start`` to ``stop`` (exclusive) of the flat vector."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Values in the span."""
        return self.stop - self.start


def plan_spans(numel: int, shares: Sequence[float]) -> list[Span]:
    """Cut a flat vector of ``numel`` values into one consecutive span per group member.

    Member i reduces span i for the whole group (butterfly all-reduce, DeDLOC section 3.2).

    Args:
        numel: length of the vector, in values (not bytes).
        shares: relative share per member, >= 0, one at least > 0; a zero share gets an empty span.

    Returns:
        Spans in member order that tile ``[0, numel)`` without gaps.

    Raises:
        ValueError: if a share is negative or all are zero.
    """
    total = sum(shares)
    if not shares or not min(shares) >= 0 or not 0 < total < float("inf"):
        raise ValueError(f"shares must be >= 0, finite and not all 0, got {list(shares)}")
    spans: list[Span] = []
    passed, start = 0.0, 0
    last = max(member for member, share in enumerate(shares) if share > 0)
    for member, share in enumerate(shares):
        passed += share
        # Rounding may not leave values to a member behind the last one that reduces.
        stop = numel if member >= last else min(round(numel * (passed / total)), numel)
        spans.append(Span(start, stop))
        start = stop
    return spans


def chunk_values(*precisions: str) -> int:
    """Values per chunk so that none of ``precisions`` needs over `CHUNK_BYTES` for one; a multiple of 4096."""
    return min(_chunk_values(Precision(name).widest) for name in precisions)


def _chunk_values(codec: Codec) -> int:
    blocks = 1
    while blocks < MAX_BLOCKS and codec.encoded_bytes((blocks + 1) * BLOCK_VALUES) <= CHUNK_BYTES:
        blocks += 1
    return blocks * BLOCK_VALUES


def cut_chunks(span: Span, values: int) -> list[Span]:
    """Cut a span into chunks of ``values`` values; the last may be shorter, an empty span has none."""
    return [Span(start, min(start + values, span.stop)) for start in range(span.start, span.stop, values)]


def join_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The same values in as few spans as possible, ascending."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)


MAX_STEP = 1 << 48

MAX_NUMEL = 1 << 40

MAX_TEXT = 512

"""Bounds on what a stranger may tell: characters of a prefix, bytes of a digest."""

RefusalReason: TypeAlias = Literal["late", "resync", "invalid", "unreachable"]


class RoundRefused(PeerError):
    """This peer has no part in the round.

    Attributes:
        reason: ``late`` (formed without us), ``resync`` (the others are on another step or lineage),
            ``invalid`` (the ticket is nonsense), ``unreachable`` (no organizer in time).
    """

    def __init__(self, reason: RefusalReason, text: str) -> None:
        super().__init__(text)
        self.reason: RefusalReason = reason


class Ticket(Message, frozen=True):
    """What a peer brings to a round.

    ``weight`` (usually samples) may be 0: the peer only receives. ``lineage`` and ``schema`` are digests of
    the training history and of the vector's layout: all members have the same. ``reduces``: accepts
    connections. ``assists``: trains nothing and wants no means, it reduces for the others. ``upload_bps`` and
    ``download_bps`` are what its links were seen to carry, None before that.
    """

    prefix: str
    step: int
    lineage: bytes
    weight: float
    numel: int
    schema: bytes
    reduces: bool = True
    upload_bps: float | None = None
    download_bps: float | None = None
    codec: str = "float32"
    mean_codec: str = "float32"
    assists: bool = False
    samples_per_s: float = 0.0

    def __post_init__(self) -> None:
        digests = (self.lineage, self.schema)
        if not 0 <= self.step < MAX_STEP or not 0 <= self.numel < MAX_NUMEL:
            raise ValueError(f"a ticket for step {self.step} of {self.numel} values is out of range")
        if max(map(len, (self.prefix, *digests))) > MAX_TEXT:
            raise ValueError("a ticket's prefix, lineage or schema is too long")


class GroupMember(Message, frozen=True):
    """One member of a group; ``share`` is its part of the reducing, relative to the others'."""

    id: PeerId
    addresses: tuple[str, ...]
    weight: float
    share: float


class Group(Message, frozen=True):
    """Who averages what with whom; members are sorted by id, ``round_id`` has 16 bytes.

    ``predicted_s`` is how long the organizer expects averaging to take, None if it cannot know; ``explanation``
    says in a sentence why the shares are what they are.
    """

    round_id: bytes
    step: int
    lineage: bytes
    members: tuple[GroupMember, ...]
    numel: int
    codec: str = "float32"
    mean_codec: str = "float32"
    prefix: str = ""
    predicted_s: float | None = None
    explanation: str = ""

    def index_of(self, peer: PeerId) -> int | None:
        """Position of a peer among the members; None if it is none."""
        return next((index for index, member in enumerate(self.members) if member.id == peer), None)

    def spans(self) -> list[Span]:
        """The span each member reduces, in member order.

        Raises:
            ValueError: the shares make no sense.
        """
        return plan_spans(self.numel, [member.share for member in self.members])

    def check(self) -> None:
        """Refuse a group that no honest organizer forms.

        Raises:
            ValueError: the group is not valid; says why.
        """
        ids = [member.id for member in self.members]
        if len(self.round_id) != 16 or self.numel < 0 or ids != sorted(set(ids)):
            raise ValueError("a group needs a round id of 16 bytes and members sorted by id")
        Precision(self.codec), Precision(self.mean_codec)
        if not all(valid_weight(member.weight) for member in self.members):
            raise ValueError("a member has a weight that is negative, not finite or too large")
        if len(self.explanation) > MAX_TEXT or not self.explanation.isprintable():
            raise ValueError("a group's explanation is too long or not printable")
        self.spans()


class JoinRound(Message, frozen=True):
    """To the organizer: here I am. Answered when the group is formed."""

    ticket: Ticket
    contact: Contact

    @property
    def prefix(self) -> str:
        """The collaboration it is about."""
        return self.ticket.prefix


class Joined(Message, frozen=True):
    """The organizer's answer: the group, or who organizes instead, or why not."""

    group: Group | None = None
    organizer: Contact | None = None
    reason: RefusalReason | None = None
    text: str = ""


class RoundCall(Message, frozen=True):
    """From an organizer (or somebody looking for one): a round on these terms begins, are you coming?"""

    terms: Ticket

    @property
    def prefix(self) -> str:
        """The collaboration it is about."""
        return self.terms.prefix


class JoinEta(Message, frozen=True):
    """Ready in so many seconds; None: not coming. ``group``: the step has its group already."""

    ready_in_s: float | None = None
    group: Group | None = None


@dataclass(frozen=True)
class Sharing:
    """What a strategy decides.

    Attributes:
        shares: relative share per ticket, >= 0; at least one is > 0 if any ticket reduces.
        predicted_s: seconds the averaging will take; None: not known.
        explanation: one sentence for people.
    """

    shares: tuple[float, ...]
    predicted_s: float | None = None
    explanation: str = ""


class Strategy(Protocol):
    """Decides who reduces how much."""

    def __call__(self, tickets: Sequence[Ticket]) -> Sharing:
        """The shares of those who brought ``tickets``, in their order."""


def equal_shares(tickets: Sequence[Ticket]) -> Sharing:
    """Everyone who accepts connections reduces the same share."""
    return Sharing(tuple(float(ticket.reduces) for ticket in tickets))


def rank(prefix: str, step: int, peers: Iterable[PeerId]) -> list[PeerId]:
    """The peers in the order in which they would organize the round of ``step``: the same for everyone."""
    seed = prefix.encode() + step.to_bytes(8, "big", signed=True)
    return sorted(set(peers), key=lambda peer: hashlib.sha256(seed + peer).digest())


@dataclass(frozen=True)
class GroupFormationSettings:
    """How long an organizer waits.

    Attributes:
        window_s: for candidates that could not be called but may come by themselves.
        slack_s: beyond the time a candidate said it would need.
        max_window_s: in any case.
        call_timeout_s: for the answer to a call; a peer whose notebook is busy with Python answers late.
    """

    window_s: float = 2.0
    slack_s: float = 1.0
    max_window_s: float = 60.0
    call_timeout_s: float = 10.0


MIN_WEIGHT, MAX_WEIGHT = 1e-9, 1e9

"""Beyond, a ratio of two weights would not fit a float32."""


def valid_weight(weight: float) -> bool:
    """Whether a weight is 0, or between 10^-9 and 10^9."""
    return weight == 0 or MIN_WEIGHT <= weight < MAX_WEIGHT


class GroupFormation:
    """Who is coming to one round. Pure: time is an argument, `closes_at` says when to look again.

    Args:
        terms: the first ticket; all others must agree with its step, lineage, schema, length and codecs.
    """

    def __init__(self, terms: Ticket, *, now: float, settings: GroupFormationSettings) -> None:
        self._terms, self._settings, self._opened_at = terms, settings, now
        self._awaited: dict[PeerId, float] = {}  # until when
        self._joined: dict[PeerId, tuple[Ticket, Contact]] = {}

    @property
    def terms(self) -> Ticket:
        """The ticket that opened the gathering."""
        return self._terms

    @property
    def joined(self) -> frozenset[PeerId]:
        """Who is here."""
        return frozenset(self._joined)

    def on_called(self, peer: PeerId, *, now: float) -> None:
        """A candidate is being asked: wait for its answer."""
        self._await(peer, now + self._settings.call_timeout_s)

    def on_coming(self, peer: PeerId, ready_in_s: float, *, now: float) -> None:
        """A candidate said it will be here in ``ready_in_s``."""
        self._await(peer, now + max(0.0, ready_in_s) + self._settings.slack_s)

    def on_silent(self, peer: PeerId) -> None:
        """A candidate cannot be called but may come by itself (client mode): it has the window."""
        self._await(peer, self._opened_at + self._settings.window_s)

    def on_declined(self, peer: PeerId) -> None:
        """A candidate is not coming, or cannot be reached; if it is here already, it stays."""
        self._awaited.pop(peer, None)

    def on_lost(self, peer: PeerId) -> None:
        """Who was here gave up."""
        self._awaited.pop(peer, None)
        self._joined.pop(peer, None)

    def on_join(self, ticket: Ticket, contact: Contact) -> tuple[RefusalReason, str] | None:
        """Take a peer in, or say why not."""
        if not valid_weight(ticket.weight):
            return "invalid", f"weight {ticket.weight} is neither 0 nor in [1e-9, 1e9)"
        mine, theirs = self._terms, ticket
        if (mine.step, mine.lineage) != (theirs.step, theirs.lineage):
            return "resync", f"step {theirs.step} here is of another lineage: load the state from a peer"
        if (mine.numel, mine.schema, mine.codec, mine.mean_codec) != (
            theirs.numel,
            theirs.schema,
            theirs.codec,
            theirs.mean_codec,
        ):
            return "invalid", f"model or codec differs: {mine.numel} values as {mine.codec} are averaged here"
        self._awaited.pop(contact.id, None)
        self._joined[contact.id] = (ticket, contact)
        return None

    def closes_at(self) -> float:
        """When the gathering closes if nothing else happens; in the past or now: close it."""
        latest = max(self._awaited.values(), default=-math.inf)
        return min(latest, self._opened_at + self._settings.max_window_s)

    def form(self, round_id: bytes, strategy: Strategy) -> Group:
        """The group of those who are here. Who trains alone needs no assistant, nor to send anything.

        Raises:
            ValueError: nobody who trains is here, or several are but none accepts connections.
        """
        here = sorted(self._joined.items())
        trainers = [entry for entry in here if not entry[1][0].assists]
        if not trainers:
            raise ValueError("nobody who trains is here")
        if len(trainers) == 1:
            here, sharing = trainers, Sharing((1.0,))
        else:
            sharing = strategy([ticket for _, (ticket, _) in here])
        members = tuple(
            GroupMember(peer, contact.addresses, ticket.weight, share)
            for (peer, (ticket, contact)), share in zip(here, sharing.shares, strict=True)
        )
        t, told = self._terms, (sharing.predicted_s, sharing.explanation)
        group = Group(round_id, t.step, t.lineage, members, t.numel, t.codec, t.mean_codec, t.prefix, *told)
        group.check()
        return group

    def _await(self, peer: PeerId, until: float) -> None:
        if peer not in self._joined:
            self._awaited[peer] = until

    def __repr__(self) -> str:
        waiting = ", ".join(map(short, self._awaited)) or "nobody"
        return f"Gathering(step {self._terms.step}: {len(self._joined)} here, waiting for {waiting})"
