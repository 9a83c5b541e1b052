"""A member's contribution on its way to the reducers: evenly paced, and encoded chunk by chunk."""

import asyncio
import logging
from collections.abc import Mapping

from colab_swarm.averaging.group import Span
from colab_swarm.averaging.member import Chunk, RoundMember, UploadEncoding
from colab_swarm.errors import PeerError
from colab_swarm.net.peers import Stream
from colab_swarm.runtime import loop_now, wake
from colab_swarm.tensors.codecs import Buffer, Codec, Precision, codec_of
from colab_swarm.tensors.sparse import Sparse

logger = logging.getLogger(__name__)

LEAD = 0.01  # how far a stream may be ahead of the slowest one, as a share of its span
STALL_S = 2.0  # the other streams stop waiting for one that sent nothing for this time


class Pace:
    """Keeps the contributions to all reducers even: else a large span would start and end last. Pure.

    In a span of few chunks each one is a large part; these take turns, in the order of ``chunks``.
    """

    def __init__(self, chunks: Mapping[int, int], *, now: float) -> None:
        self._chunks = {reducer: count for reducer, count in chunks.items() if count}
        # How far a stream may be ahead: by up to a third of one of its chunks more, the later its turn.
        self._lead = {}
        for turn, (reducer, count) in enumerate(self._chunks.items()):
            self._lead[reducer] = LEAD + turn / len(chunks) / count / 3
        self._sent = dict.fromkeys(self._chunks, 0.0)  # as a share of the span
        self._sent_at = dict.fromkeys(self._chunks, now)

    def may_send(self, reducer: int, *, now: float) -> bool:
        return self._sent[reducer] <= self._last(now) + self._lead[reducer]

    def on_chunk(self, reducer: int, index: int, *, now: float) -> bool:
        """Count a chunk as sent or skipped; returns True if that may let other streams send."""
        before = self._sent[reducer]
        self._sent[reducer] = (index + 1) / self._chunks[reducer]
        self._sent_at[reducer] = now
        return before < self._last(now)

    def on_over(self, reducer: int) -> None:
        self._sent[reducer] = 1.0

    def _last(self, now: float) -> float:
        moving = (sent for other, sent in self._sent.items() if now < self._sent_at[other] + STALL_S)
        return min(moving, default=1.0)


class Upload:
    """Sends this member's contribution to all reducers at once.

    The streams wait for their turn at ``_turn``, which every chunk that is sent, and `tick`, sets.
    """

    def __init__(self, own: RoundMember, encoding: UploadEncoding, *, now: float) -> None:
        self.own = own
        self._precision = Precision(encoding.precision or own.group.terms.codec, encoding.fine)
        self._pace = Pace({reducer: len(own.ledger.chunks[reducer]) for reducer in own.others}, now=now)
        self._turn = asyncio.Event()

    def tick(self) -> None:
        """Let the streams look again: another one may have stalled."""
        wake(self._turn)

    async def send(self, stream: Stream, reducer: int) -> None:
        """Send the contribution to one reducer's span, and end the stream's way there."""
        try:
            await self._send_chunks(stream, reducer)
            await stream.end()
        except PeerError as error:  # who receives the means sees the same and acts on it
            logger.debug("contribution to span %d broke off: %s", reducer, error)
        finally:
            self._pace.on_over(reducer)
            wake(self._turn)

    async def _send_chunks(self, stream: Stream, reducer: int) -> None:
        own = self.own
        chunks = own.ledger.chunks[reducer] if own.contributes else ()
        try:
            for index, chunk in enumerate(chunks):
                if not own.ledger.settled(reducer, index):
                    while not self._pace.may_send(reducer, now=loop_now()):
                        await self._turn.wait()
                    message, payload = self.encoded(reducer, index, chunk)
                    own.trace.on_traffic("sent", reducer, loop_now())
                    await stream.send(message, payload)
                    own.trace.on_traffic("sent", reducer, loop_now())
                    own.trace.sent_bytes += len(payload)
                if self._pace.on_chunk(reducer, index, now=loop_now()):
                    wake(self._turn)
        except ValueError as error:  # the codec cannot encode it; the reducer counts the rest as missing
            logger.warning("this peer contributes nothing more to the round: %s", error)

    def encoded(self, reducer: int, index: int, chunk: Span) -> tuple[Chunk, Buffer]:
        """Return this peer's contribution to a chunk; raises ValueError if the codec refuses it."""
        own = self.own
        codec = self._codec_to(reducer, chunk)
        payload = own.ledger.vector.encode(chunk.start, chunk.stop, codec)
        name = "" if codec.name == own.group.terms.codec else codec.name
        return Chunk(index, codec=name), payload

    def _codec_to(self, reducer: int, chunk: Span) -> Codec:
        """Return a contribution's codec: the own span's is exact, but that would make a sparse mean dense."""
        codec = self._precision.at(chunk.start)
        if reducer == self.own.me and not isinstance(codec, Sparse):
            return codec_of("float32")
        return codec
