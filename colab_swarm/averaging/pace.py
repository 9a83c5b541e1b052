"""Contributions advance evenly towards all reducers, so that means flow back while contributions still flow out.

Each reducer has its own stream, and streams share a connection as equals: left alone, a small span is over long
before a large one, whose reducer idles at first and whose means come when this peer has nothing left to send.
"""

from __future__ import annotations

from collections.abc import Mapping

LEAD = 0.01
"""How far a stream may be ahead of the last one, as a share of its span."""
STALL_S = 2.0
"""A stream that sent nothing for so long is waited for by none."""


class Pace:
    """How far the contributions to each reducer are. Pure.

    Args:
        chunks: per reducer with a stream, how many chunks it is to get.
    """

    def __init__(self, chunks: Mapping[int, int], *, now: float) -> None:
        self._chunks = {reducer: count for reducer, count in chunks.items() if count}
        self._sent = dict.fromkeys(self._chunks, 0.0)  # as a share of the span
        self._sent_at = dict.fromkeys(self._chunks, now)

    def may_send(self, reducer: int, *, now: float) -> bool:
        """Whether the next chunk is in turn."""
        return self._sent[reducer] <= self._last(now) + LEAD

    def on_chunk(self, reducer: int, index: int, *, now: float) -> bool:
        """Chunk ``index`` went out, or need not; whether others may send now that could not before."""
        before = self._sent[reducer]
        self._sent[reducer] = (index + 1) / self._chunks[reducer]
        self._sent_at[reducer] = now
        return before < self._last(now)

    def on_over(self, reducer: int) -> None:
        """Nothing more is sent to this one."""
        self._sent[reducer] = 1.0

    def _last(self, now: float) -> float:
        sent_at = self._sent_at
        return min(
            (sent for other, sent in self._sent.items() if now < sent_at[other] + STALL_S), default=1.0
        )
