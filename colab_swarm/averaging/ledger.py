"""What one member has of a round: per chunk its own values, the mean, or the news that there is none."""

from __future__ import annotations

from collections.abc import Collection

from colab_swarm.averaging.group import Group
from colab_swarm.averaging.partition import Span, chunk_values, cut_chunks, join_spans
from colab_swarm.tensors.codecs import Floats

_LACKING, _MEAN, _NO_MEAN = 0, 1, 2


class Ledger:
    """The vector of one member, and the state of each chunk of each reducer's span.

    Args:
        values: this member's contribution (float32, flat); means replace it chunk by chunk.
    """

    def __init__(self, group: Group, values: Floats) -> None:
        self.values = values
        size = chunk_values(group.codec, group.mean_codec)
        self.chunks = [cut_chunks(span, size) for span in group.spans()]
        self._states = [bytearray(len(chunks)) for chunks in self.chunks]
        self._missing: dict[tuple[int, int], tuple[int, ...]] = {}

    def chunk(self, reducer: int, index: int) -> Span:
        """Where chunk ``index`` of a reducer's span lies.

        Raises:
            ValueError: there is no such chunk.
        """
        if not 0 <= reducer < len(self.chunks) or not 0 <= index < len(self.chunks[reducer]):
            raise ValueError(f"there is no chunk {index} of span {reducer}")
        return self.chunks[reducer][index]

    def place(self, reducer: int, index: int, mean: Floats | None, missing: tuple[int, ...]) -> None:
        """Replace own values by the mean (None: nobody contributed), unless the chunk is settled already.

        Raises:
            ValueError: there is no such chunk.
        """
        chunk = self.chunk(reducer, index)
        if self._states[reducer][index] != _LACKING:
            return
        if mean is not None:
            self.values[chunk.start : chunk.stop] = mean
        self._states[reducer][index] = _NO_MEAN if mean is None else _MEAN
        if missing:
            self._missing[reducer, index] = missing

    def settled(self, reducer: int, index: int) -> bool:
        """Whether the chunk's mean is here, or it is known that there is none."""
        return self._states[reducer][index] != _LACKING

    def has_mean(self, reducer: int, index: int) -> bool:
        """Whether the chunk's values are the mean."""
        return self._states[reducer][index] == _MEAN

    def missing(self, reducer: int, index: int) -> tuple[int, ...]:
        """Members whose values should be, but are not, in the mean of a chunk."""
        return self._missing.get((reducer, index), ())

    def lacking(self, reducer: int) -> list[int]:
        """Chunks of a span that are not settled."""
        return [index for index, state in enumerate(self._states[reducer]) if state == _LACKING]

    def kept_local(self) -> tuple[Span, ...]:
        """Values that are still this member's own."""
        return join_spans(
            [
                chunk
                for chunks, states in zip(self.chunks, self._states, strict=True)
                for chunk, state in zip(chunks, states, strict=True)
                if state != _MEAN
            ]
        )

    def incomplete(self) -> Collection[int]:
        """Members that are missing in at least one mean here."""
        return {member for missing in self._missing.values() for member in missing}
