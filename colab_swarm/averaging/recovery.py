"""Recovering the span of a lost reducer within the round (DeDLOC section 3.2).

The first live reducer after the lost reducer, in member order, is the *coordinator*. If a survivor (a live member) has
the mean of a chunk, the coordinator takes this mean. Else the coordinator recomputes the mean as float32 from the
survivors' contributions, in member order. The other members fetch the result from the coordinator, so all members end
with equal bits. If the coordinator is lost, too, the next reducer takes its place.

There is no deadlock, because the two kinds of request wait for different things:

1. A coordinator asks a member for its contribution. The member answers once its own exchange with the lost reducer is
   over.
2. A member asks a coordinator for a mean. The coordinator answers once its own recovery of the span is over. In this
   recovery it fetches means only from the reducers between the lost reducer and itself, in member order.

A mean is sent in the codec of its reducer. Encoding a decoded mean again gives the same bytes, so all members compute
their digests of the same bytes. An assistant, which reduces but does not train, needs no means. It recovers a span only
when another member asks for this span.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from colab_swarm.averaging.messages import Chunk, RecallSpan
from colab_swarm.averaging.reducer import average_chunk
from colab_swarm.errors import PeerError, require
from colab_swarm.net.patience import allowance_s
from colab_swarm.net.peers import Buffer, Refusal, Stream, short
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.codecs import Floats, codec_of

if TYPE_CHECKING:
    from colab_swarm.averaging.exchange import Round

logger = logging.getLogger(__name__)


class Recovery:
    """Recovers the spans of lost reducers at one member; at an assistant, only on another member's request."""

    def __init__(self, own: "Round") -> None:
        self.own = own
        # An assistant recovers each span only once.
        self._recovering = [asyncio.Lock() for _ in own.group.members]
        # Members that refused, were lost or were late; this member asks them for no other span.
        self._failed: set[int] = set()

    async def recover(self, reducer: int) -> None:
        """Fetch the missing chunks of a lost reducer's span from its coordinator, or recompute them as coordinator."""
        own = self.own
        count = len(own.group.members)
        following = [(reducer + step) % count for step in range(1, count)]
        for coordinator in following:  # the live reducers, starting after the lost one
            if not own.ledger.lacking(reducer):
                return
            if not own.group.members[coordinator].share or coordinator in own.lost | self._failed:
                continue
            if coordinator == own.me:
                await self._recompute(reducer)
                return
            try:
                async with self._recall(coordinator, reducer, contributions=False) as stream:
                    for index in own.ledger.lacking(reducer):
                        # The coordinator gets more time, because it may itself wait for survivors.
                        message, payload = await self._read(stream, index, own.lateness.longest_s())
                        if message.averaged:
                            own.place_mean(reducer, message, payload)
            except (PeerError, TimeoutError, ValueError) as error:
                name = short(own.id_of(coordinator))
                logger.debug("coordinator %s of span %d is lost: %s", name, reducer, error)

    async def serve(self, opening: RecallSpan, stream: Stream) -> None:
        """Answer a `RecallSpan`; raises ValueError if it names a span or chunks that do not exist."""
        own = self.own
        require(0 <= opening.reducer < len(own.group.members), f"there is no span {opening.reducer}")
        for index in opening.wanted:
            own.ledger.chunk(opening.reducer, index)
        if opening.contributions:
            await own.settled[opening.reducer].wait()
        elif own.collects or opening.reducer == own.me:
            await own.final[opening.reducer].wait()
        else:  # as an assistant: recover the span, once
            async with self._recovering[opening.reducer]:
                if not own.final[opening.reducer].is_set():
                    own.lost.add(opening.reducer)
                    await self.recover(opening.reducer)
                    own.final[opening.reducer].set()
        for index in opening.wanted:
            require(own.ledger.readable, "the round of this span is over", Refusal)
            message, payload = self._answer(opening, index)
            # Copied, because the vector may be reused for another round while this item waits to be sent.
            await stream.send(message, bytes(payload))
            own.trace.sent_bytes += len(payload)
        await stream.end()

    def _answer(self, opening: RecallSpan, index: int) -> tuple[Chunk, Buffer]:
        own = self.own
        chunk = own.ledger.chunk(opening.reducer, index)
        averaged = own.ledger.settled(opening.reducer, index)
        placed = own.ledger.result(opening.reducer, index)
        if placed.codec:
            mean = codec_of(placed.codec).encode(own.ledger.vector.read(*chunk))
            return Chunk(index, averaged, placed.missing, placed.codec), mean
        if opening.contributions and own.contributes and not averaged:
            return own.encoded(opening.reducer, index, chunk)
        return Chunk(index, averaged, placed.missing), b""

    async def _recompute(self, reducer: int) -> None:
        wanted = self.own.ledger.lacking(reducer)
        gone = {self.own.me, reducer, *self._failed, *self.own.silent}
        survivors = [member for member in range(len(self.own.group.members)) if member not in gone]
        streams: dict[int, Stream] = {}
        async with AsyncExitStack() as stack:
            recalls = [self._recall(member, reducer, contributions=True) for member in survivors]
            opened = await asyncio.gather(*map(stack.enter_async_context, recalls), return_exceptions=True)
            for member, stream in zip(survivors, opened, strict=True):
                if not isinstance(stream, BaseException):
                    streams[member] = stream
                elif not isinstance(stream, PeerError | TimeoutError):
                    raise stream
            for index in wanted:
                await self._recompute_chunk(streams, reducer, index)

    async def _recompute_chunk(self, streams: dict[int, Stream], reducer: int, index: int) -> None:
        own = self.own
        chunk = own.ledger.chunk(reducer, index)
        received: dict[int, tuple[Chunk, Buffer]] = {}

        async def receive(member: int, stream: Stream) -> None:
            try:
                received[member] = await self._read(stream, index)
            except (PeerError, TimeoutError, ValueError) as error:
                logger.debug("survivor %s failed: %s", short(stream.peer), error)
                del streams[member]
                stream.reset(str(error))

        await asyncio.gather(*(receive(*survivor) for survivor in list(streams.items())))
        with suppress(ValueError):  # this member's contribution may not be finite
            received[own.me] = own.encoded(reducer, index, chunk)
        contributions: dict[int, Floats] = {}
        for member, (message, payload) in sorted(received.items()):
            try:
                if message.averaged:
                    return own.place_mean(reducer, message, payload)
                if len(payload):
                    codec = codec_of(message.codec or own.group.terms.codec)
                    contributions[member] = codec.decode(payload, chunk.numel)
            except ValueError as error:
                logger.debug("%s gave nothing valid: %s", short(own.id_of(member)), error)
        weights = [member.weight for member in own.group.members]
        mean, missing = average_chunk(chunk, weights, contributions, own.most_rms)
        exact = codec_of("float32")
        own.ledger.place(reducer, index, exact, b"" if mean is None else exact.encode(mean), missing)

    @asynccontextmanager
    async def _recall(self, member: int, reducer: int, *, contributions: bool) -> AsyncIterator[Stream]:
        own = self.own
        wanted = tuple(own.ledger.lacking(reducer))
        opening = RecallSpan(own.group.round_id, reducer, wanted, contributions)
        timeout_s = own.settings.dial_timeout_s
        try:
            stream = await own.peers.stream(own.id_of(member), opening, timeout_s=timeout_s)
        except PeerError:
            self._failed.add(member)
            raise
        async with stream:
            yield stream

    async def _read(self, stream: Stream, index: int, more_s: float = 0.0) -> tuple[Chunk, Buffer]:
        """Return the next chunk from a survivor, which gets ``more_s`` seconds in addition to its limit."""
        own = self.own
        member = own.group.index_of(stream.peer)
        assert member is not None
        limit_s = own.lateness.limit_s(member) + allowance_s(own.peers.statistics(stream.peer).rtt_s)
        try:
            async with asyncio.timeout(limit_s + more_s):
                message, payload = await stream.receive(Chunk)
        except PeerError:
            self._failed.add(member)
            raise
        except TimeoutError:
            self._failed.add(member)
            own.lateness.on_late(member, loop_now())
            raise
        own.trace.received_bytes += len(payload)
        require(message.index == index, f"received chunk {message.index}, expected {index}")
        return message, payload
