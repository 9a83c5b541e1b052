"""The messages by which peers form a group, and the spans that its members reduce.

A *lineage* is a chain of digests: it starts with the digest of the first parameters, and includes the digest of every
mean that was applied since. Equal lineages mean equal parameters. All contributors to a group have the same step and
the same lineage.
"""

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from operator import and_
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec

from colab_swarm.errors import PeerError, require
from colab_swarm.events import Bottleneck
from colab_swarm.net.peers import Contact, Message, PeerId
from colab_swarm.tensors.codecs import BLOCK_VALUES, MAX_BLOCKS, Precision

CHUNK_BYTES = 122_880  # maximum size of an encoded chunk: one packet of a link, below malloc's mmap threshold
MAX_STEP = 1 << 48
MAX_NUMEL = 1 << 40
MAX_TEXT = 512  # maximum characters of a prefix, and maximum bytes of a digest, in a message
# The ratio of two weights must fit in a float32.
_MIN_WEIGHT = 1e-9
_MAX_WEIGHT = 1e9
_MAX_LOSS = 1e30
_MOST_LOSSES = 100.0  # times the median loss

RefusalReason: TypeAlias = Literal["late", "resync", "invalid", "unreachable"]


class Span(NamedTuple):
    """Values ``start`` to ``stop`` (exclusive) of the flat vector."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def plan_spans(numel: int, shares: Sequence[float]) -> list[Span]:
    """Cut a flat vector of ``numel`` values into one consecutive span per member, without gaps.

    Member i reduces span i for the whole group (butterfly all-reduce, DeDLOC section 3.2). A zero
    share gets an empty span. Raises ValueError if a share is negative or not finite, or if all are zero.
    """
    passed = list(accumulate(shares))  # `sum` rounds differently, and the last stop must be exactly ``numel``
    if not shares or not min(shares) >= 0 or not 0 < passed[-1] < math.inf:
        raise ValueError(f"shares must be >= 0, finite and not all 0, got {list(shares)}")
    stops = [round(numel * (share / passed[-1])) for share in passed]
    return [Span(start, stop) for start, stop in pairwise([0, *stops])]


def chunk_values(*precisions: str) -> int:
    """Return the number of values per chunk, a multiple of 4096, for which each encoding fits in `CHUNK_BYTES`."""
    codecs = [Precision(name).widest for name in precisions]
    for blocks in range(MAX_BLOCKS, 1, -1):
        values = blocks * BLOCK_VALUES
        if all(codec.encoded_bytes(values) <= CHUNK_BYTES for codec in codecs):
            return values
    return BLOCK_VALUES


def cut_chunks(span: Span, values: int) -> list[Span]:
    return [Span(start, min(start + values, span.stop)) for start in range(span.start, span.stop, values)]


class RoundRefused(PeerError):
    """This peer cannot take part in the round, for ``reason``.

    ``late``: the group formed without this peer; ``resync``: it is at another step or lineage;
    ``invalid``: the ticket is not valid; ``unreachable``: no organizer answered in time.
    """

    def __init__(self, reason: RefusalReason, text: str) -> None:
        super().__init__(text)
        self.reason: RefusalReason = reason


_Digest = Annotated[bytes, msgspec.Meta(max_length=MAX_TEXT)]
_Flags = Annotated[bytes, msgspec.Meta(max_length=8192)]  # one bit for each tensor; empty if none is set


class RoundTerms(Message, frozen=True):
    """What a round averages; equal at all its members."""

    prefix: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    step: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEP)]
    lineage: _Digest  # digest chain of the training history
    numel: Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUMEL)]
    schema: _Digest = b""  # digest of the vector's layout
    codec: str = "float32"  # codec of contributions on the wire
    mean_codec: str = "float32"

    @property
    def key(self) -> tuple[int, bytes]:
        """Step and lineage, which together identify the round within its collaboration."""
        return self.step, self.lineage


class Ticket(Message, frozen=True):
    """A peer's offer to take part in a round."""

    terms: RoundTerms
    weight: float  # weight in the mean; a peer with weight 0 only receives
    reduces: bool = True  # the peer accepts connections
    upload_bps: float | None = None  # measured bandwidth of its links, bits per second; None: unknown
    download_bps: float | None = None
    assists: bool = False  # the peer trains nothing and needs no means; it only reduces
    metered: bool = False  # it pays for traffic by a relay or tunnel, so reduces only if all must
    unused: _Flags = b""  # the tensors for which it has no gradient
    loss: float | None = None  # mean loss of the samples
    samples: float = 0.0  # number of samples in its contribution, for people and for the batch
    rates: Annotated[tuple[float, ...], msgspec.Meta(max_length=8)] = ()  # learning rates
    # A sketch of its state, in some steps: see `colab_swarm.training.comparison`
    sketch: Annotated[tuple[float, ...], msgspec.Meta(max_length=60)] = ()
    changed: bool = False  # it reports that its parameters changed outside a step


class GroupMember(Message, frozen=True):
    """One member of a group; it reduces a part of the vector in proportion to its ``share``."""

    id: PeerId
    addresses: tuple[str, ...]
    weight: float
    share: float
    reduces: bool = True  # this field and the next six are those of its ticket
    upload_bps: float | None = None
    download_bps: float | None = None
    assists: bool = False
    metered: bool = False
    unused: _Flags = b""
    loss: float | None = None
    samples: float = 0.0


def offer_of(
    peer: Ticket | GroupMember,
) -> tuple[bool, float | None, float | None, bool, bool, bytes, float | None]:
    """Return a peer's offer to the round: the fields that its ticket and its entry in the group have in common."""
    speed = peer.upload_bps, peer.download_bps
    return peer.reduces, *speed, peer.assists, peer.metered, peer.unused, peer.loss


def swarm_loss(losses: Iterable[tuple[float, float | None]]) -> float | None:
    """Return the mean of the members' losses, weighted as in the round; None if no member sent a loss.

    A loss does not count if it is not finite, or more than a hundred times as large as the median. Other losses cannot
    be checked, so a member that lies can move the mean in proportion to its weight.
    """
    sent = []
    for weight, loss in losses:
        if weight and loss is not None and abs(loss) < _MAX_LOSS:
            sent.append((weight, loss))
    if not sent:
        return None
    most = _MOST_LOSSES * statistics.median_high(abs(loss) for _, loss in sent)
    counted = [(weight, loss) for weight, loss in sent if abs(loss) <= most]
    total = math.fsum(weight for weight, _ in counted)
    return math.fsum(weight / total * loss for weight, loss in counted)


def bits_of(flags: Sequence[bool]) -> bytes:
    """Return the flags as bits, the first flag in the lowest bit; empty if no flag is set."""
    return _bits(sum(1 << index for index, flag in enumerate(flags) if flag))


def _bits(number: int) -> bytes:
    return number.to_bytes(-(-number.bit_length() // 8), "little")


def flags_of(bits: bytes, count: int) -> list[bool]:
    """Return the first ``count`` flags of `bits_of`."""
    number = int.from_bytes(bits, "little")
    return [bool(number >> index & 1) for index in range(count)]


class Group(Message, frozen=True):
    """The members of one round, sorted by id, and the terms of their average."""

    seed: bytes  # 16 bytes; differs from group to group
    terms: RoundTerms
    members: tuple[GroupMember, ...]
    predicted_s: float | None = None  # expected seconds of averaging; None: the organizer has no measurements
    explanation: str = ""  # one sentence on the choice of shares
    bottleneck: Bottleneck = ""  # the bottleneck that the explanation names
    grants: tuple[float, ...] = ()  # samples of the next step that each member is granted
    holders: tuple[int, ...] = ()  # the members that hold the parameters; the others follow
    organizer: PeerId = PeerId(b"")  # organizer of the next step
    late: tuple[tuple[int, float], ...] = ()  # late members, and the seconds for which each was awaited
    witness: Ticket | None = None  # a ticket with the rates and the sketch of most members
    agreeing: tuple[int, ...] = ()  # the members that agree with the witness

    @property
    def round_id(self) -> bytes:
        """A digest of the whole group, 16 bytes: members that received different groups have no common round."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()[:16]

    def index_of(self, peer: PeerId) -> int | None:
        for index, member in enumerate(self.members):
            if member.id == peer:
                return index
        return None

    @property
    def unused(self) -> bytes:
        """A bit for each tensor, set if no contribution has a gradient for it."""
        masks = [int.from_bytes(member.unused, "little") for member in self.members if member.weight]
        return _bits(reduce(and_, masks, masks[0] if masks else 0))

    @property
    def loss(self) -> float | None:
        """The swarm's mean loss in this step, equal at all members."""
        return swarm_loss((member.weight, member.loss) for member in self.members)

    def spans(self) -> list[Span]:
        """Return each member's span; raises ValueError for invalid shares."""
        return plan_spans(self.terms.numel, [member.share for member in self.members])

    def check(self) -> None:
        """Raise ValueError if no honest organizer would form this group."""
        ids = [member.id for member in self.members]
        require(
            len(self.seed) == 16 and ids == sorted(set(ids)),
            "a group needs a seed of 16 bytes and members sorted by id",
        )
        for codec in (self.terms.codec, self.terms.mean_codec):
            # Raises ValueError for an unknown codec.
            Precision(codec)
        for member in self.members:
            require(
                valid_weight(member.weight) and valid_weight(member.samples),
                "a member has a weight, or samples, that are negative, not finite or too large",
            )
        predicted_s = self.predicted_s
        require(predicted_s is None or 0 < predicted_s < math.inf, "a round takes more than 0 s, and ends")
        require(
            len(self.explanation) <= MAX_TEXT and self.explanation.isprintable(),
            "a group's explanation is too long or not printable",
        )
        require(
            all(0 <= granted < _MAX_WEIGHT for granted in self.grants), "a grant is negative, or too large"
        )
        named = (*self.holders, *self.agreeing)
        require(all(0 <= index < len(ids) for index in named), "a group names members that it does not have")
        self.spans()


Samples = Annotated[float, msgspec.Meta(ge=0, lt=_MAX_WEIGHT)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]


class StepReport(Message, frozen=True):
    """A peer's report to the organizer: the state that the peer holds, and its part of the step."""

    step: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_STEP)]  # step of its state; -1: it has none, and follows
    lineage: _Digest
    counted: Samples = 0.0  # samples counted for the present step
    granted: Samples = 0.0  # the last grant that it received
    batch_samples: Samples = 0.0  # samples in a micro-batch; 0: not known
    batch_s: Seconds = 0.0  # time of a micro-batch; 0: not known
    age_s: Seconds = 0.0  # time since the present micro-batch began
    away: bool = (
        False  # it computes nothing for now: paused, without data, or in the step of another optimizer
    )
    final: bool = False  # it already computes for the next step
    averages: bool = False  # the round of its last contribution is not over
    ticket: Ticket | None = None  # set once it has computed the granted samples
    key: _Digest = b""  # id of its last group


class Attend(Message, frozen=True):
    """Opens a peer's stream to the organizer; the stream stays open until one of the two leaves.

    The peer sends `StepReport`, the organizer sends `News`.
    """

    contact: Contact
    key: _Digest  # id of its last group
    terms: RoundTerms  # step and lineage do not count here
    target: Samples  # samples of a step
    assistant: Ticket | None = None  # set by an assistant, which trains nothing and only reduces

    @property
    def prefix(self) -> str:
        return self.terms.prefix


class Whereabouts(Message, frozen=True):
    """Asks a peer for its organizer, and for the group that followed the group with this ``key``.

    If an organizer asks, ``members`` is the number of peers at this organizer that hold the state of its branch, and
    ``step`` is the step of this state.
    """

    prefix: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    key: _Digest
    members: int = 0
    step: int = -1


class News(Message, frozen=True):
    """A message from the organizer: a grant for the step after the group ``key``, or the group of this step.

    News also answer `Whereabouts`: then ``organizer`` is the peer that organizes, or None if none is known. They answer
    `Attend` in the same way if another peer organizes. Otherwise the answer to `Attend` contains the ``step`` of the
    first group in which the peer will be.
    """

    key: _Digest
    granted: float | None = None
    group: "Group | None" = None
    organizer: Contact | None = None
    refusal: str = ""
    step: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_STEP)] = -1


@dataclass(frozen=True)
class SharePlan:
    """A strategy's decision for a round."""

    shares: tuple[float, ...]  # relative share per ticket, >= 0; at least one is > 0 if any ticket reduces
    averaging_s: float = 0.0  # predicted seconds of one round; 0: not known
    explanation: str = ""  # one sentence for people
    bottleneck: Bottleneck = ""  # the bottleneck that the explanation names


Strategy: TypeAlias = Callable[[Sequence[Ticket]], SharePlan]  # a share for each ticket, in order


def equal_shares(tickets: Sequence[Ticket]) -> SharePlan:
    return SharePlan(tuple(map(float, reducing(tickets))))


def reducing(tickets: Sequence[Ticket]) -> list[bool]:
    """Return a flag for each ticket, True if its peer reduces.

    Peers that accept connections reduce; metered peers do so only if no other peer accepts connections.
    """
    free = [ticket.reduces and not ticket.metered for ticket in tickets]
    return free if any(free) else [ticket.reduces for ticket in tickets]


def valid_weight(weight: float) -> bool:
    return weight == 0 or _MIN_WEIGHT <= weight < _MAX_WEIGHT


def wrong_terms(terms: RoundTerms, target: float) -> str:
    """Return why no peer can train by these terms, or an empty text."""
    try:
        Precision(terms.codec)
        Precision(terms.mean_codec)
    except ValueError as error:
        return str(error)
    return "" if terms.numel and target > 0 else "a step without values or samples"


def wrong_numbers(ticket: Ticket) -> str:
    """Return a text on invalid numbers of a ticket, or an empty text."""
    for name, number in (("weight", ticket.weight), ("samples", ticket.samples)):
        if not valid_weight(number):
            return f"{name} {number} is neither 0 nor in [1e-9, 1e9)"
    return ""
