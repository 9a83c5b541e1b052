"""Rounds in a bucket: what is written there, when a round closes, what counts. Pure.

A round is closed by a *manifest*, which lists the contributions that count, with their weights and
scales. The first one that is written for a round stands. So all peers apply the same means in the
same order, and each contribution counts in one manifest or in none.
"""

import itertools
import math
import re
import statistics
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Self, TypeVar

import msgspec
import numpy as np
from blake3 import blake3

from colab_swarm.averaging.group import MAX_STEP
from colab_swarm.errors import ProtocolError, require
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.net.identity import id_of
from colab_swarm.net.membership import MAX_MEMBERSHIP_BYTES, Key, Signed
from colab_swarm.net.peers import Buffer, Message, PeerId, decoded
from colab_swarm.tensors.codecs import BLOCK_VALUES, MAX_BLOCKS, Codec, Floats, codec_of
from colab_swarm.training.records import Agreement
from colab_swarm.training.settings import HEAVIEST

H = TypeVar("H", bound="Statement")
PIECE = BLOCK_VALUES * MAX_BLOCKS  # values that are encoded at once
WINDOW = 2  # rounds after its own in which a contribution may still be listed
MOST_MEMBERS = 256  # of a round
MOST_NORM = 4.0  # median norms of a contribution; larger ones are scaled down
# A round waits for absent members for two usual rounds and this long, then closes without them. Longer than
# `MISSING_S`: a majority that cannot follow a manifest replaces it before a minority goes on.
GRACE_S = 90.0
PATIENCE = 1.5  # usual rounds after which it closes without a minority
MISSING_S = 60.0  # age of a manifest that cannot be followed, when another one may be written
MIN_PACE_S = 1.0
MAX_PACE_S = 6 * 3600.0
HEADER_BYTES = 1 << 16  # at most
PLACE: Final = re.compile(
    r"rounds/([0-9]{8})-[0-9a-f]{16}/(?:([0-9a-f]{64})|manifest-[0-9]{2,6}|[0-9a-f]{64}-left)"
)
CARD = "card/first"
LEFT = "-left"
STATE_PLACE: Final = re.compile(r"states/([0-9]{8})")
STATE_ROUNDS = 16  # from one state in the bucket to the next


def folder_of(round: int, base: bytes) -> str:
    """Return the folder of a round after the manifest with this digest: nobody can write there before that one."""
    return f"rounds/{round:08d}-{base[:8].hex()}"


Figure = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
Pace = Annotated[float, msgspec.Meta(ge=MIN_PACE_S, le=MAX_PACE_S)]
Round = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEP)]
Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Statement(Signed, frozen=True, kw_only=True):
    """What a member writes: signed, about one model of a run, with its membership."""

    prefix: Annotated[str, msgspec.Meta(max_length=200)]
    key: Key
    membership: Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERSHIP_BYTES)]
    content: Annotated[bytes, msgspec.Meta(max_length=32)] = b""  # digest of the rest of the object

    @property
    def member(self) -> PeerId:
        return id_of(self.key)


class Card(Statement, frozen=True, kw_only=True):
    """``card/first``: what the peers of a model have agreed on; the first one that is written stands."""

    schema: bytes
    agreement: Agreement


class PseudoGradient(Statement, frozen=True, kw_only=True):
    """``rounds/ROUND-BASE/MEMBER``: a pseudo-gradient, which follows encoded."""

    round: Round
    base: Hash  # digest of the manifest that this member's model was at
    weight: Figure
    samples: Figure
    samples_per_s: Figure  # of this member
    seconds: Figure  # since it knew that manifest
    name: Annotated[str, msgspec.Meta(max_length=100)]  # for people
    loss: float | None = None


class Farewell(Statement, frozen=True, kw_only=True):
    """``rounds/ROUND-BASE/MEMBER-left``: no round need wait for this member until it contributes again."""

    base: Hash


class ManifestEntry(Message, frozen=True):
    """A contribution that counts."""

    member: PeerId
    round: Round
    digest: Hash  # of the object
    weight: Figure
    scale: Annotated[float, msgspec.Meta(ge=0, le=1)]
    samples: Figure
    seconds: Figure


class RoundManifest(Statement, frozen=True, kw_only=True):
    """``rounds/ROUND-BASE/manifest-ATTEMPT``: closes a round."""

    round: Round
    base: Hash  # digest of the manifest before
    entries: Annotated[tuple[ManifestEntry, ...], msgspec.Meta(min_length=1, max_length=MOST_MEMBERS)]


class RoundChain(Message, frozen=True):
    """Where the run is: its next ``round``, and what is known of the last ones."""

    round: Round
    digests: dict[int, Hash]  # of the manifest before round r, for the rounds of the window
    closed_at: Figure  # the last manifest, by the store's clock
    pace_s: Pace = MAX_PACE_S / 2  # the median time of a round's contributors
    members: tuple[PeerId, ...] = ()  # of the last round
    listed: tuple[tuple[PeerId, int], ...] = ()  # members and rounds of contributions that counted

    def __post_init__(self) -> None:
        require(self.round in self.digests, "a chain needs the digest of its last manifest")

    @classmethod
    def begin(cls, round: int, root: bytes, *, now: float) -> Self:
        """Return the chain before the first round, of the state with this digest."""
        return cls(round, {round: root}, now)

    @property
    def base(self) -> bytes:
        return self.digests[self.round]

    @property
    def folders(self) -> dict[int, str]:
        """Of the rounds whose contributions may count."""
        return {round: folder_of(round, base) for round, base in self.digests.items()}

    @property
    def folder(self) -> str:
        return folder_of(self.round, self.base)

    @property
    def farewells(self) -> dict[str, tuple[PeerId, Hash]]:
        """Where members of the last round may have said farewell since they contributed: the member, and the base."""
        last = dict(sorted(self.listed))  # its last round, by member
        return {
            f"{folder}/{member.hex()}{LEFT}": (member, self.digests[round])
            for round, folder in self.folders.items()
            for member in self.members
            if round >= last.get(member, 0)
        }

    def path_of(self, member: PeerId, round: int) -> str:
        """Return where a member's contribution is; nowhere if it is too old."""
        return f"{self.folders.get(round)}/{member.hex()}"

    def due_at(self, present: Collection[PeerId], gone: Collection[PeerId] = ()) -> float:
        """Return when the round may close with these members; at once if all others of the last one have gone."""
        missing = set(self.members).difference(present, gone)
        if not present:
            return math.inf
        if not missing:
            return self.closed_at
        if self.is_quorum({*present, *gone}):
            return self.closed_at + PATIENCE * self.pace_s
        return self.deadline

    @property
    def deadline(self) -> float:
        """When a round may close without the majority of the last one's members."""
        return self.closed_at + 2 * self.pace_s + GRACE_S

    def is_quorum(self, members: Collection[PeerId]) -> bool:
        return 2 * len(set(self.members).intersection(members)) > len(self.members)

    def may_count(self, member: PeerId, round: int) -> bool:
        return self.round - WINDOW <= round <= self.round and (member, round) not in self.listed

    def fault_of(self, manifest: RoundManifest, *, written_at: float, gone: Collection[PeerId] = ()) -> str:
        """Return what is wrong with a manifest of this round, apart from its contributions; or nothing."""
        places = [(entry.member, entry.round) for entry in manifest.entries]
        if (manifest.round, manifest.base) != (self.round, self.base):
            return "it does not follow the manifest before"
        if places != sorted(set(places)) or not all(self.may_count(*place) for place in places):
            return "it lists a contribution twice, or one that is too old"
        late = written_at + 1.0 >= self.deadline  # S3 has whole seconds
        if not (late or not self.members or self.is_quorum({*gone, *(member for member, _ in places)})):
            return "it leaves out most members of the last round"
        return ""

    def after(self, manifest: RoundManifest, digest: bytes, *, closed_at: float) -> "RoundChain":
        entries = manifest.entries
        round = self.round + 1
        pace_s = statistics.median_low(entry.seconds for entry in entries)
        listed = [*self.listed, *((entry.member, entry.round) for entry in entries)]
        return RoundChain(
            round,
            {r: one for r, one in {**self.digests, round: digest}.items() if r >= round - WINDOW},
            closed_at,
            min(max(pace_s, MIN_PACE_S), MAX_PACE_S),
            tuple(sorted({entry.member for entry in entries})),
            tuple(one for one in listed if one[1] >= round - WINDOW),
        )


@dataclass(frozen=True)
class RoundListing:
    """The objects of the last rounds."""

    contributions: dict[str, StoredObject]  # by path
    manifests: dict[str, list[StoredObject]]  # by folder
    farewells: dict[str, StoredObject]  # by path
    latest: int  # round that has a manifest, on whatever branch; -1 if none has

    @classmethod
    def of(cls, found: Iterable[StoredObject]) -> "RoundListing":
        contributions: dict[str, StoredObject] = {}
        manifests: dict[str, list[StoredObject]] = {}
        farewells: dict[str, StoredObject] = {}
        for one in found:
            if (place := PLACE.fullmatch(one.path)) is None:
                continue
            if place[2]:
                contributions[one.path] = one
            elif one.path.endswith(LEFT):
                farewells[one.path] = one
            else:
                manifests.setdefault(one.folder, []).append(one)
        return cls(
            contributions, manifests, farewells, max((int(one[7:15]) for one in manifests), default=-1)
        )

    def next_attempt(self, folder: str) -> str:
        """Return the path of another manifest."""
        taken = {one.path for one in self.manifests.get(folder, ())}
        attempts = (f"{folder}/manifest-{number:02d}" for number in itertools.count())
        return next(path for path in attempts if path not in taken)

    def attempts(self, folder: str, faulty: Container[StoredObject]) -> list[StoredObject]:
        """Return the manifests of a round that may count: each is `MISSING_S` younger than the sound one before."""
        counted: list[StoredObject] = []
        for one in sorted(self.manifests.get(folder, ()), key=lambda one: one.modified_at):
            if one not in faulty and (
                not counted or one.modified_at + 1 >= counted[-1].modified_at + MISSING_S
            ):
                counted.append(one)
        return counted


class StateHead(Statement, frozen=True, kw_only=True):
    """``states/ROUND``: a training state before that round, whose blob follows."""

    chain: RoundChain
    manifest: bytes  # the state's own, in chunks


def seal(statement: Statement, content: Buffer = b"") -> bytes:
    """Return an object: the statement's length in 4 bytes, the statement, and the content that it names."""
    head = statement.encode()
    return b"".join((len(head).to_bytes(4, "big"), head, content))


def content_digest(content: Buffer) -> bytes:
    return blake3(content, max_threads=blake3.AUTO).digest()


def unseal(data: bytes, kind: type[H]) -> tuple[H, memoryview]:
    """Return a statement that its own key signed, and the content; raises `ProtocolError`."""
    length = int.from_bytes(data[:4], "big")
    require(4 + length <= len(data), f"an object of {len(data)} bytes is cut off", ProtocolError)
    head = data[4 : 4 + length]
    content = memoryview(data)[4 + length :]
    statement = decoded(head, kind, f"no readable {kind.__name__}", ProtocolError)
    require(statement.is_signed_by(statement.key), "its signature is wrong", ProtocolError)
    named = statement.content or content_digest(b"")
    require(content_digest(content) == named, "it is cut off or changed", ProtocolError)
    return statement, content


def encode(codec: Codec, values: Floats) -> bytes:
    return b"".join(codec.encode(values[at : at + PIECE]) for at in range(0, len(values), PIECE))


def encoded_bytes(codec: Codec, numel: int) -> int:
    whole, last = divmod(numel, PIECE)
    return whole * codec.encoded_bytes(PIECE) + codec.encoded_bytes(last)


def decode(codec: Codec, content: memoryview, numel: int) -> Iterable[tuple[slice, Floats]]:
    """Yield the pieces of an encoded vector; raises ValueError if it is invalid."""
    begin = 0
    for at in range(0, numel, PIECE):
        count = min(PIECE, numel - at)
        end = begin + codec.encoded_bytes(count)
        yield slice(at, at + count), codec.decode(content[begin:end], count)
        begin = end
    require(begin == len(content), f"{len(content)} encoded bytes, {begin} expected")


def norm_of(codec: Codec, content: memoryview, numel: int) -> float:
    """Return the norm of an encoded vector; raises ValueError if it is invalid or not finite."""
    squares = sum(float(piece.astype(np.float64) @ piece) for _, piece in decode(codec, content, numel))
    require(math.isfinite(squares), "it has values that are not finite")
    return math.sqrt(squares)


@dataclass(frozen=True)
class Offer:
    """A contribution as it was read: whole, signed by a member, and finite."""

    head: PseudoGradient
    content: memoryview
    digest: bytes
    norm: float


def entries_of(offers: Iterable[Offer]) -> tuple[ManifestEntry, ...]:
    """Return what the contributions count for, in the order of the mean.

    Nobody weighs more than `HEAVIEST` median members, and none is longer than `MOST_NORM` median ones.
    """
    ordered = sorted(offers, key=lambda offer: (offer.head.member, offer.head.round))
    weight = statistics.median_low(offer.head.weight for offer in ordered)
    norm = statistics.median_low(offer.norm for offer in ordered)
    entries = []
    for offer in ordered:
        head = offer.head
        scale = min(1.0, MOST_NORM * norm / offer.norm) if offer.norm else 1.0
        bounded_weight = min(head.weight, HEAVIEST * weight)
        entry = ManifestEntry(
            head.member, head.round, offer.digest, bounded_weight, scale, head.samples, head.seconds
        )
        entries.append(entry)
    return tuple(entries)


def differs(manifest: RoundManifest, offers: Sequence[Offer]) -> str:
    """Return what its entries say wrongly of the contributions, or nothing."""
    for mine, theirs in zip(entries_of(offers), manifest.entries, strict=True):
        if not (
            math.isclose(mine.weight, theirs.weight, rel_tol=1e-3)
            and math.isclose(mine.scale, theirs.scale, rel_tol=1e-3)
            and msgspec.structs.replace(mine, weight=theirs.weight, scale=theirs.scale) == theirs
        ):
            return "its entries are not those of the contributions"
    return ""


def mean_of(
    entries: Sequence[ManifestEntry], offers: Mapping[bytes, Offer], numel: int, codec: str, out: Floats
) -> Floats:
    """Write the weighted mean ``sum_i w_i s_i v_i / sum_i w_i`` to ``out``, bit-equal at all peers.

    NumPy multiplies and adds float32 in the order of the entries; no instruction fuses the two.
    """
    out.fill(0.0)
    total = math.fsum(entry.weight for entry in entries) or 1.0
    for entry in entries:
        factor = np.float32(entry.weight * entry.scale / total)
        for span, piece in decode(codec_of(codec), offers[entry.digest].content, numel):
            out[span] += piece * factor
    return out


@dataclass(frozen=True)
class ClosedRound:
    """A round that is over: its manifest, the contributions that count by their digests, and the chain after it."""

    before: RoundChain
    place: StoredObject  # of the manifest
    manifest: RoundManifest
    after: RoundChain
    offers: dict[bytes, Offer] = field(default_factory=dict)  # empty: not read yet

    def counts(self, member: PeerId, round: int) -> bool:
        return any((entry.member, entry.round) == (member, round) for entry in self.manifest.entries)
