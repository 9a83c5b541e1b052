"""The pure core of a reducer: weighted means of one span, chunk by chunk, as contributions arrive.

- A chunk is finished when every expected member has delivered it. After that its mean never changes.
- The reducer drops a member that is lost, late, or sends invalid data: NaN, values whose root mean square is over
  ``most_rms``, a wrong length, or an unknown chunk. The chunks that the member delivered before stay in the means. The
  means of all other chunks do not include the member or its weight.
- A chunk without contributions has no mean, so members keep their local values.
- Sums are float32, in the order of arrival. Values are multiplied by weight / total weight before they are added, so
  that the sums cannot overflow.

The state consists of sets of members: ``_expected`` has the contributors that were not dropped, and
``_delivered[chunk]`` the members whose values are in this chunk's sum.
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
    """How a chunk was settled."""

    codec: str = ""  # codec of its mean; empty if there is no mean
    missing: tuple[int, ...] = ()  # members of positive weight that are not in the mean


class SpanLedger:
    """The vector of one member, and the state of each chunk of each reducer's span.

    When the round ends, the ledger becomes unwritable, because the trainer then applies the vector. When the next round
    ends, this ledger becomes unreadable, because the trainer then reuses its vector.
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
        """Return where chunk ``index`` of a reducer's span is in the vector; raises ValueError if it does not exist."""
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
        """Compute the digests of the encoded means that have arrived. Only one thread at a time may call this."""
        while self._undigested:
            place, mean = self._undigested.popleft()
            self._digests[place] = blake3(mean).digest(DIGEST_BYTES)

    def digest(self) -> bytes:
        """Return a digest of all values; it is equal at members that hold the same means of all chunks."""
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
        """Return the spans that have no mean and so keep this member's own values; neighbouring chunks are joined."""
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
        """Return the members whose values are missing in at least one settled chunk."""
        incomplete = set[int]()
        for placed in self._placed.values():
            incomplete.update(placed.missing)
        return incomplete

    def gaps(self) -> tuple[tuple[Span, tuple[int, ...]], ...]:
        """Return each chunk that lacks contributions, and the missing members; without a mean, these are all."""
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

    ``sums`` is float32 memory for the span. When all chunks are finished it contains the means. After the round,
    `Round.release` may replace it by views of the vector.
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
        """Add a member's contribution to a chunk, if it is expected; return True if the chunk is finished now.

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
        """Expect nothing more from a member; return the chunks that are finished now."""
        self._expected.discard(member)
        return self.finished()

    def mean(self, chunk: int) -> Floats | None:
        """Return the mean of a finished chunk, a view of ``sums``; None without contributions, or after an overflow."""
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
        """Return the chunks that become finished now; if all weights are 0, the first call returns all chunks."""
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
    """Average a lost reducer's chunk from ``contributions`` by member; return the mean, and its missing members."""
    sums = np.empty(chunk.numel, np.float32)
    again = SpanReducer([chunk], weights, sums, most_rms)
    for member, values in sorted(contributions.items()):
        with suppress(ValueError):  # the contribution may be invalid
            again.on_chunk(member, 0, values)
    for member in range(len(weights)):
        again.drop(member)
    return again.mean(0), again.missing(0)
