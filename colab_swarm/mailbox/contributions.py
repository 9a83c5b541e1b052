"""The contributions to a bucket's rounds: encoded, judged, and the mean of them. Pure.

A contribution counts as much as its entry in the manifest says, and all peers apply the same mean.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from colab_swarm.averaging.group import swarm_loss
from colab_swarm.errors import require
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.rounds import ManifestEntry, PseudoGradient, RoundChain, RoundManifest
from colab_swarm.net.peers import PeerId
from colab_swarm.tensors.codecs import BLOCK_VALUES, MAX_BLOCKS, Codec, Floats
from colab_swarm.tensors.vector import Vector

PIECE = BLOCK_VALUES * MAX_BLOCKS  # values that are encoded at once
# Where a run has two members, neither is the median one: a notebook beside a laptop may count for so much more.
HEAVIEST_OF_TWO = 16.0
LONGEST_OF_TWO = 4.0


def encode(codec: Codec, vector: Vector) -> bytes:
    content = bytearray()
    for at in range(0, vector.numel, PIECE):
        content += vector.encode(at, min(at + PIECE, vector.numel), codec)
    return bytes(content)


def encoded_bytes(codec: Codec, numel: int) -> int:
    whole, last = divmod(numel, PIECE)
    return whole * codec.encoded_bytes(PIECE) + codec.encoded_bytes(last)


def pieces(codec: Codec, content: memoryview, numel: int) -> Iterable[tuple[slice, memoryview]]:
    """Yield the encoded pieces of a vector and their spans; of an empty ``content``, empty pieces."""
    begin = 0
    for at in range(0, numel, PIECE):
        count = min(PIECE, numel - at)
        end = begin + codec.encoded_bytes(count)
        yield slice(at, at + count), content[begin:end]
        begin = end


def decode(codec: Codec, content: memoryview, numel: int) -> Iterable[tuple[slice, Floats]]:
    """Yield the pieces of an encoded vector; raises ValueError if it is invalid."""
    expected = encoded_bytes(codec, numel)
    require(len(content) == expected, f"{len(content)} encoded bytes, {expected} expected")
    for span, piece in pieces(codec, content, numel):
        yield span, codec.decode(piece, span.stop - span.start)


def norm_of(codec: Codec, content: memoryview, numel: int) -> float:
    """Return the norm of an encoded vector; raises ValueError if it is invalid or not finite."""
    squares = 0.0
    for _, piece in decode(codec, content, numel):
        squares += float(piece.astype(np.float64) @ piece)
    require(math.isfinite(squares), "it has values that are not finite")
    return math.sqrt(squares)


@dataclass(frozen=True)
class Offer:
    """What a contribution would count for by itself: an entry without a scale, and its norm."""

    entry: ManifestEntry
    norm: float


@dataclass(frozen=True)
class ReadContribution:
    """A contribution as it was read: whole, signed by a member, and finite."""

    head: PseudoGradient
    content: memoryview
    digest: bytes
    norm: float

    @property
    def offer(self) -> Offer:
        head = self.head
        entry = ManifestEntry(
            head.member, head.round, self.digest, head.weight, 1.0, head.samples, head.seconds
        )
        return Offer(entry, self.norm)


def entries_of(chain: RoundChain, offers: Iterable[Offer]) -> tuple[ManifestEntry, ...]:
    """Return what different members' contributions count for in a round, in the mean's order.

    No member weighs more than the median one, and no contribution is longer than the median one.
    """
    ordered = sorted(offers, key=lambda offer: offer.entry.member)
    is_pair = len(ordered) == 2
    heaviest = 1.0
    longest = 1.0
    if is_pair and len(chain.members) <= 2:
        heaviest = HEAVIEST_OF_TWO
        longest = LONGEST_OF_TWO
    median_of = statistics.median_low if is_pair else statistics.median_high
    most_weight = heaviest * median_of(offer.entry.weight for offer in ordered)
    most_norm = longest * median_of(offer.norm for offer in ordered)
    entries = []
    for offer in ordered:
        scale = 1.0
        if offer.norm:
            scale = min(1.0, most_norm / offer.norm)
        weight = min(offer.entry.weight, most_weight)
        entries.append(msgspec.structs.replace(offer.entry, weight=weight, scale=scale))
    return tuple(entries)


def differs(chain: RoundChain, manifest: RoundManifest, offers: Sequence[Offer]) -> str:
    """Return what its entries say wrongly of the contributions, or nothing."""
    for expected, entry in zip(entries_of(chain, offers), manifest.entries, strict=True):
        weight_fits = math.isclose(expected.weight, entry.weight, rel_tol=1e-3)
        scale_fits = math.isclose(expected.scale, entry.scale, rel_tol=1e-3)
        rest = msgspec.structs.replace(expected, weight=entry.weight, scale=entry.scale)
        if not (weight_fits and scale_fits and rest == entry):
            return "its entries are not those of the contributions"
    return ""


def mean_of(
    entries: Sequence[ManifestEntry],
    contributions: Mapping[bytes, ReadContribution],
    codec: Codec,
    out: Floats,
) -> Floats:
    """Write the weighted mean ``sum_i w_i s_i v_i / sum_i w_i`` to ``out``, bit-equal at all peers.

    NumPy multiplies and adds float32 in the order of the entries; no instruction fuses the two.
    """
    out.fill(0.0)
    total = math.fsum(entry.weight for entry in entries) or 1.0
    for entry in entries:
        factor = np.float32(entry.weight * entry.scale / total)
        for span, piece in decode(codec, contributions[entry.digest].content, out.size):
            out[span] += piece * factor
    return out


@dataclass(frozen=True)
class ClosedRound:
    """A round that a manifest closes, with the chains before and after it."""

    before: RoundChain
    place: StoredObject  # of the manifest
    manifest: RoundManifest
    after: RoundChain
    contributions: dict[bytes, ReadContribution] = field(default_factory=dict)  # empty: not held

    @property
    def loss(self) -> float | None:
        """The swarm's loss of the round, equal at all peers, by its contributions."""
        entries = self.manifest.entries
        return swarm_loss((entry.weight, self.contributions[entry.digest].head.loss) for entry in entries)

    def counts(self, member: PeerId, round: int) -> bool:
        return any((entry.member, entry.round) == (member, round) for entry in self.manifest.entries)
