"""The pure core of a reducer: weighted means of one span, chunk by chunk, as contributions arrive.

Rules:

- A chunk is finished when every member that is still expected has delivered it; its mean never changes after.
- A member that sends nonsense (NaN, wrong length, no such chunk) is banned: what it
  delivered in good order stays, nothing more is taken, and its weight leaves the mean of every chunk it did
  not deliver. The same holds for a member that is lost.
- A chunk that nobody contributed to (all weights zero, or all lost) has no mean: members keep their local
  values.
- Sums are float32 in order of arrival, of values already scaled by weight / total weight, so they cannot
  overflow.

State: a bit per member. ``_expected`` who still owes chunks; ``_delivered[chunk]`` who is in its sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from colab_swarm.averaging.partition import Span
from colab_swarm.tensors.codecs import Floats, all_finite


class SpanReducer:
    """Averages one span for the whole group.

    Args:
        chunks: the span's chunks, in order.
        weights: weight per member (`valid_weight`); a member of weight 0 is never expected to contribute.
        sums: float32 memory for the whole span; holds the means in the end.
    """

    def __init__(self, chunks: Sequence[Span], weights: Sequence[float], sums: Floats) -> None:
        origin = chunks[0].start if chunks else 0
        total = sum(weights) or 1.0
        self._weights = [weight / total for weight in weights]
        self._sums = [sums[chunk.start - origin : chunk.stop - origin] for chunk in chunks]
        self._scratch = np.empty(max((chunk.numel for chunk in chunks), default=0), np.float32)
        self._delivered = [0] * len(chunks)
        self._everyone = sum(1 << member for member, weight in enumerate(weights) if weight > 0)
        self._expected = self._everyone
        self.unfinished = set(range(len(chunks)))

    def start(self) -> list[int]:
        """Chunks that are finished before anything arrived: all, if nobody has a weight."""
        return self._settle()

    def on_chunk(self, member: int, chunk: int, values: Floats) -> bool:
        """Take one contribution; True if it finished the chunk. Ignored if it is not expected (any more).

        Raises:
            ValueError: the contribution is nonsense. Nothing was changed: `drop` the member.
        """
        bit = 1 << member
        if not self._expected & bit:
            return False
        self._check(chunk, values)
        if self._delivered[chunk] & bit:
            return False
        sums, weight = self._sums[chunk], self._weights[member]
        if self._delivered[chunk]:
            scaled = self._scratch[: len(sums)]
            np.multiply(values, weight, out=scaled)
            np.add(sums, scaled, out=sums)
        else:
            np.multiply(values, weight, out=sums)
        self._delivered[chunk] |= bit
        return self._finished(chunk)

    def drop(self, member: int) -> list[int]:
        """Expect nothing more of a member that is lost, banned or done; the chunks finished by that."""
        self._expected &= ~(1 << member)
        return self._settle()

    def mean(self, chunk: int) -> Floats | None:
        """The mean of a finished chunk (a view of ``sums``).

        None if nobody contributed to it, or if it overflowed: contributions at the end of float32's range.
        """
        assert chunk not in self.unfinished
        return self._sums[chunk] if self._delivered[chunk] and all_finite(self._sums[chunk]) else None

    def missing(self, chunk: int) -> tuple[int, ...]:
        """Members of positive weight that are not in the mean of ``chunk``."""
        absent = self._everyone & ~self._delivered[chunk]
        return (
            tuple(member for member in range(absent.bit_length()) if absent >> member & 1) if absent else ()
        )

    def awaited(self) -> list[int]:
        """Members that still owe chunks."""
        owing = 0
        for chunk in self.unfinished:
            owing |= self._expected & ~self._delivered[chunk]
        return [member for member in range(owing.bit_length()) if owing >> member & 1]

    def check_invariants(self) -> None:
        """For tests: finished chunks lack nobody expected, unfinished ones do."""
        for chunk, delivered in enumerate(self._delivered):
            assert not delivered & ~self._everyone
            assert (chunk in self.unfinished) == bool(
                self._expected & ~delivered
            ) or chunk not in self.unfinished

    def _check(self, chunk: int, values: Floats) -> None:
        if not 0 <= chunk < len(self._sums):
            raise ValueError(f"chunk {chunk} of {len(self._sums)} does not exist")
        if len(values) != len(self._sums[chunk]):
            raise ValueError(f"chunk {chunk} has {len(values)} values, {len(self._sums[chunk])} expected")
        if not all_finite(values):
            raise ValueError(f"chunk {chunk} has values that are not finite")

    def _settle(self) -> list[int]:
        return [chunk for chunk in sorted(self.unfinished) if self._finished(chunk)]

    def _finished(self, chunk: int) -> bool:
        """Whether nobody is awaited for ``chunk`` any more; if so, turn its sum into the mean."""
        delivered = self._delivered[chunk]
        if self._expected & ~delivered:
            return False
        self.unfinished.discard(chunk)
        if delivered and delivered != self._everyone:
            present = sum(weight for member, weight in enumerate(self._weights) if delivered >> member & 1)
            np.divide(self._sums[chunk], present, out=self._sums[chunk])
        return True
