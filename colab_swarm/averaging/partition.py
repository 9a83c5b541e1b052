"""Which member reduces which span of the flat vector, and the chunks in which a span travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
