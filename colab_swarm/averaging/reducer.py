"""The pure core of a reducer: weighted means of one span, chunk by chunk, as contributions arrive.

- A chunk is finished when every member that is still expected has delivered it. After that its mean never changes.
- A member is dropped if it is lost, or if it sends invalid data: NaN, values whose root mean square is over
  ``most_rms``, a wrong length, or an unknown chunk. Its chunks that have arrived stay in the means. Nothing more is
  accepted from it, and the means of all other chunks are taken without its weight.
- A chunk without contributions has no mean, so members keep their local values.
- Sums are float32, in the order of arrival. The values are scaled by weight / total weight before, so that
  the sums cannot overflow.

The state consists of sets of members: those in ``_expected`` still have to deliver chunks, and those in
``_delivered[chunk]`` are in this chunk's sum.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from colab_swarm.averaging.group import Group, Span, chunk_values, cut_chunks
from colab_swarm.tensors.codecs import Buffer, Codec, Floats
from colab_swarm.tensors.vector import Vector
from colab_swarm.tensors.vectors import root_mean_square

DIGEST_BYTES = 16


@dataclass(frozen=True)
class PlacedChunk:
    """The codec of a chunk's mean, which is empty if there is no mean, and the members that are missing in it."""

    codec: str = ""
    missing: tuple[int, ...] = ()


class SpanLedger:
    """The vector of one member, and the state of each chunk of each reducer's span.

    When the round ends, the ledger becomes unwritable, because the trainer then applies the vector. When the next round
    ends, the ledger becomes unreadable, because the trainer then reuses the vector.
    """

    def __init__(self, group: Group, vector: Vector) -> None:
        self.vector = vector
        self.writable = True
        self.readable = True
        size = chunk_values(group.terms.codec, group.terms.mean_codec)
        self.chunks = [cut_chunks(span, size) for span in group.spans()]
        self._placed: dict[tuple[int, int], PlacedChunk] = {}  # by reducer and chunk
        self._digests: dict[tuple[int, int], bytes] = {}
        # Encoded means that have no digest yet. The event loop adds them, and a pool thread removes them.
        self._undigested: deque[tuple[tuple[int, int], Buffer]] = deque()

    def chunk(self, reducer: int, index: int) -> Span:
        """Return the place of a chunk of a reducer's span; raises ValueError if there is none."""
        if not 0 <= reducer < len(self.chunks) or not 0 <= index < len(self.chunks[reducer]):
            raise ValueError(f"there is no chunk {index} of span {reducer}")
        return self.chunks[reducer][index]

    def place(
        self,
        reducer: int,
        index: int,
        codec: Codec,
        mean: Buffer,
        missing: tuple[int, ...],
        *,
        most_rms: float = math.inf,
    ) -> None:
        """Replace this member's values by the encoded mean, unless the chunk is settled or the round is over.

        ``mean`` is empty if the chunk has no mean. Raises the same errors as `Vector.take`.
        """
        chunk = self.chunk(reducer, index)
        if not self.writable or self.settled(reducer, index):
            return
        name = ""
        if len(mean):
            name = codec.name
            self.vector.take(*chunk, codec, mean, most_rms=most_rms)
            self._undigested.append(((reducer, index), mean))
        self._placed[reducer, index] = PlacedChunk(name, missing)

    def settled(self, reducer: int, index: int) -> bool:
        """Return True if the chunk's mean has arrived, or is known not to exist."""
        return (reducer, index) in self._placed

    def result(self, reducer: int, index: int) -> PlacedChunk:
        return self._placed.get((reducer, index), PlacedChunk())

    def digest_means(self) -> None:
        """Compute the digests of the encoded means that have arrived; only one thread at a time may call it."""
        while self._undigested:
            place, mean = self._undigested.popleft()
            self._digests[place] = blake3(mean).digest(DIGEST_BYTES)

    def digest(self) -> bytes:
        """Return a digest of all values, which is equal at members that hold the same means."""
        self.digest_means()
        whole = blake3()
        for reducer, chunks in enumerate(self.chunks):
            for index, chunk in enumerate(chunks):
                if self.result(reducer, index).codec:
                    whole.update(self._digests[reducer, index])
                else:
                    whole.update(self.vector.read(*chunk).data.cast("B"))
        return whole.digest(DIGEST_BYTES)

    def lacking(self, reducer: int) -> list[int]:
        return [index for index in range(len(self.chunks[reducer])) if not self.settled(reducer, index)]

    def kept_local(self) -> tuple[Span, ...]:
        """Return the values that are still this member's own, as the smallest number of spans."""
        kept: list[Span] = []
        for reducer, chunks in enumerate(self.chunks):
            for index, chunk in enumerate(chunks):
                if self.result(reducer, index).codec:
                    continue
                start = chunk.start
                if kept and kept[-1].stop == chunk.start:
                    start = kept.pop().start
                kept.append(Span(start, chunk.stop))
        return tuple(kept)

    def incomplete(self) -> Collection[int]:
        """Return the members that are missing in at least one mean."""
        incomplete = set[int]()
        for placed in self._placed.values():
            incomplete.update(placed.missing)
        return incomplete

    def gaps(self) -> tuple[tuple[Span, tuple[int, ...]], ...]:
        """Return the chunks in whose means members are missing, with these members; all members if there is no mean."""
        everyone = tuple(range(len(self.chunks)))
        gaps = []
        for reducer, chunks in enumerate(self.chunks):
            for index, chunk in enumerate(chunks):
                placed = self.result(reducer, index)
                missing = placed.missing if placed.codec else everyone
                if missing:
                    gaps.append((chunk, missing))
        return tuple(gaps)


class SpanReducer:
    """Averages the span of these ``chunks`` for the whole group; members of weight 0 send nothing.

    ``sums`` is float32 memory for the span, and contains the means in the end. Later `Round.release` replaces it by
    views of the vector.
    """

    def __init__(
        self, chunks: Sequence[Span], weights: Sequence[float], sums: Floats, most_rms: float = math.inf
    ) -> None:
        self._most_rms = most_rms
        self._mean_rms = [0.0] * len(chunks)
        origin = chunks[0].start if chunks else 0
        total = sum(weights) or 1.0
        self._weights = [weight / total for weight in weights]
        self.sums = [sums[chunk.start - origin : chunk.stop - origin] for chunk in chunks]
        widest = max((chunk.numel for chunk in chunks), default=0)
        self._scratch = np.empty(widest, np.float32)
        self._delivered: list[set[int]] = [set() for _ in chunks]
        self._everyone = frozenset(member for member, weight in enumerate(weights) if weight > 0)
        self._expected = set(self._everyone)
        self.unfinished = set(range(len(chunks)))

    def on_chunk(self, member: int, chunk: int, values: Floats) -> bool:
        """Add one contribution, if it is expected; return True if it finished the chunk.

        Raises ValueError, and changes nothing, if the contribution is invalid. Then call `drop` for the member.
        """
        if member not in self._expected:
            return False
        if not 0 <= chunk < len(self.sums):
            raise ValueError(f"chunk {chunk} of {len(self.sums)} does not exist")
        if len(values) != len(self.sums[chunk]):
            raise ValueError(f"chunk {chunk} has {len(values)} values, {len(self.sums[chunk])} expected")
        rms = root_mean_square(values)
        if not (math.isfinite(rms) and rms <= self._most_rms):
            raise ValueError(f"chunk {chunk} has values that are not finite, or far too large: {rms:.3g}")
        if member in self._delivered[chunk]:
            return False
        sums = self.sums[chunk]
        weight = self._weights[member]
        if self._delivered[chunk]:
            scaled = self._scratch[: len(sums)]
            np.multiply(values, weight, out=scaled)
            np.add(sums, scaled, out=sums)
        else:
            np.multiply(values, weight, out=sums)
        self._delivered[chunk].add(member)
        return self._finished(chunk)

    def drop(self, member: int) -> list[int]:
        """Expect nothing more from a member; returns the chunks that are finished by this."""
        self._expected.discard(member)
        return self.finished()

    def mean(self, chunk: int) -> Floats | None:
        """Return the mean of a finished chunk (a view of ``sums``); None if it has no contribution or overflowed."""
        if not self._delivered[chunk] or not math.isfinite(self._mean_rms[chunk]):
            return None
        return self.sums[chunk]

    @property
    def largest_rms(self) -> float:
        """The largest root mean square of a chunk's mean; 0 if there is no mean."""
        return max(filter(math.isfinite, self._mean_rms), default=0.0)

    def missing(self, chunk: int) -> tuple[int, ...]:
        return tuple(sorted(self._everyone - self._delivered[chunk]))

    def awaited(self) -> list[int]:
        """Return the members that still have to deliver a chunk."""
        awaited = set[int]()
        for chunk in self.unfinished:
            awaited |= self._expected - self._delivered[chunk]
        return sorted(awaited)

    def finished(self) -> list[int]:
        """Return the chunks that have just become finished; if all weights are 0, these are all chunks at first."""
        return [chunk for chunk in sorted(self.unfinished) if self._finished(chunk)]

    def _finished(self, chunk: int) -> bool:
        delivered = self._delivered[chunk]
        if self._expected - delivered:
            return False
        self.unfinished.discard(chunk)
        if delivered and delivered != self._everyone:
            present = sum(self._weights[member] for member in sorted(delivered))
            np.divide(self.sums[chunk], present, out=self.sums[chunk])
        if delivered:
            self._mean_rms[chunk] = root_mean_square(self.sums[chunk])
        return True


def average_chunk(
    chunk: Span,
    weights: Sequence[float],
    contributions: Mapping[int, Floats],
    most_rms: float = math.inf,
) -> tuple[Floats | None, tuple[int, ...]]:
    """Average a chunk again, from ``contributions`` by member; return its mean and the members missing in it."""
    sums = np.empty(chunk.numel, np.float32)
    again = SpanReducer([chunk], weights, sums, most_rms)
    for member, values in sorted(contributions.items()):
        with suppress(ValueError):  # the contribution may be invalid
            again.on_chunk(member, 0, values)
    for member in range(len(weights)):
        again.drop(member)
    return again.mean(0), again.missing(0)
