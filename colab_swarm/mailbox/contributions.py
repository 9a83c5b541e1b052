"""Encode the contributions to a bucket's rounds in pieces, check and average them. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from colab_swarm.errors import require
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.objects import ManifestEntry, PseudoGradient
from colab_swarm.tensors.codecs import BLOCK_VALUES, MAX_BLOCKS, Codec, Floats
from colab_swarm.tensors.vector import Vector

PIECE = BLOCK_VALUES * MAX_BLOCKS  # number of values that are encoded together


@dataclass(frozen=True)
class StoredContribution:
    """A contribution that this peer has read and checked: it is complete, finite, and signed by a member."""

    place: StoredObject
    head: PseudoGradient
    content: memoryview
    digest: bytes
    norm: float

    @property
    def entry(self) -> ManifestEntry:
        """The entry for this contribution in a manifest."""
        head = self.head
        return ManifestEntry(head.member, head.round, self.digest, head.weight, head.samples, head.seconds)


def encode(codec: Codec, vector: Vector) -> bytes:
    content = bytearray()
    for at in range(0, vector.numel, PIECE):
        content += vector.encode(at, min(at + PIECE, vector.numel), codec)
    return bytes(content)


def encoded_bytes(codec: Codec, numel: int) -> int:
    whole, last = divmod(numel, PIECE)
    return whole * codec.encoded_bytes(PIECE) + codec.encoded_bytes(last)


def pieces(codec: Codec, content: memoryview, numel: int) -> Iterable[tuple[slice, memoryview]]:
    """Yield the span and the encoded bytes of each piece of a vector. If ``content`` is empty, so are the bytes."""
    begin = 0
    for at in range(0, numel, PIECE):
        count = min(PIECE, numel - at)
        end = begin + codec.encoded_bytes(count)
        yield slice(at, at + count), content[begin:end]
        begin = end


def decode(codec: Codec, content: memoryview, numel: int) -> Iterable[tuple[slice, Floats]]:
    """Yield the span and the decoded values of each piece of a vector; raise ValueError if the vector is invalid."""
    expected = encoded_bytes(codec, numel)
    require(len(content) == expected, f"{len(content)} encoded bytes, {expected} expected")
    for span, piece in pieces(codec, content, numel):
        yield span, codec.decode(piece, span.stop - span.start)


def norm_of(codec: Codec, content: memoryview, numel: int) -> float:
    """Return the norm of an encoded vector; raise ValueError if the vector is invalid or not finite."""
    squares = 0.0
    for _, piece in decode(codec, content, numel):
        squares += float(piece.astype(np.float64) @ piece)
    require(math.isfinite(squares), "it has values that are not finite")
    return math.sqrt(squares)


def mean_of(
    entries: Sequence[ManifestEntry],
    contributions: Mapping[bytes, StoredContribution],
    codec: Codec,
    out: Floats,
) -> Floats:
    """Write the weighted mean ``sum_i w_i v_i / sum_i w_i`` to ``out``, bit-equal at all peers.

    NumPy multiplies and adds float32 values in the order of the entries, and never fuses the two operations.
    """
    out.fill(0.0)
    total = math.fsum(entry.weight for entry in entries)
    for entry in entries:
        factor = np.float32(entry.weight / total)
        for span, piece in decode(codec, contributions[entry.digest].content, out.size):
            out[span] += piece * factor
    return out
