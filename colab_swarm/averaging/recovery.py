"""Recovering the span of a lost reducer within the round (DeDLOC section 3.2).

The first live reducer after it, in member order, is the *coordinator*. It takes a chunk's mean if any survivor has
it, or recomputes it from their contributions, in member order, as float32: all members end with
equal bits. They fetch the result from it, or from the next one if it is lost too.

It does not deadlock, because of what the two kinds of request wait for:

1. A coordinator asks for contributions. The answer waits until the member is done with the *lost reducer*.
2. A member fetches a mean. The answer waits until the *coordinator* has ended its own recovery, and that fetches
   from coordinators before it only.

An assistant collects no means; it recovers a span on request.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress

from colab_swarm.averaging.lateness import Lateness
from colab_swarm.averaging.member import LARGEST_MEAN, Chunk, RecallSpan, RoundMember
from colab_swarm.averaging.reducer import average_chunk, digest_of
from colab_swarm.averaging.upload import Upload
from colab_swarm.errors import PeerError, require
from colab_swarm.net.peers import Buffer, Refusal, Stream, short
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.codecs import Floats, all_finite, codec_of
from colab_swarm.tensors.sparse import drop_zeros

logger = logging.getLogger(__name__)


class Recovery:
    """Recovers the spans of lost reducers at one member; an assistant, which does not collect, when it is asked.

    ``_recovering`` lets an assistant recover each span once. ``_failed`` are the members that have refused,
    or were lost: they are not asked for another span.
    """

    def __init__(self, own: RoundMember, upload: Upload, lateness: Lateness, *, collects: bool) -> None:
        self.own = own
        self._upload = upload
        self._lateness = lateness
        self._collects = collects
        self._recovering = [asyncio.Lock() for _ in own.group.members]
        self._failed: set[int] = set()

    async def recover(self, reducer: int) -> None:
        """Get the missing chunks of a lost reducer's span, as far as members can give them."""
        own = self.own
        count = len(own.group.members)
        following = [(reducer + step) % count for step in range(1, count)]
        for coordinator in following:  # the live reducers, starting after the lost one
            if not own.ledger.lacking(reducer):
                return
            if not own.member(coordinator).share or coordinator in own.lost | self._failed:
                continue
            if coordinator == own.me:
                await self._recompute(reducer)
                return
            try:
                async with self._recall(coordinator, reducer, contributions=False) as stream:
                    for index in own.ledger.lacking(reducer):
                        message, values = await self._read(stream, reducer, index)
                        if message.averaged:
                            self._place(reducer, message, values)
            except (PeerError, TimeoutError, ValueError) as error:
                name = short(own.member(coordinator).id)
                logger.debug("coordinator %s of span %d is lost: %s", name, reducer, error)

    async def serve(self, opening: RecallSpan, stream: Stream) -> None:
        """Answer a `RecallSpan`; raises ValueError if it names a span or chunks that do not exist."""
        own = self.own
        require(0 <= opening.reducer < len(own.group.members), f"there is no span {opening.reducer}")
        for index in opening.wanted:
            own.ledger.chunk(opening.reducer, index)
        if opening.contributions:
            await own.settled[opening.reducer].wait()
        elif self._collects or opening.reducer == own.me:
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
            # Copied: the round may end, and its vector be reused, while the item waits for room.
            await stream.send(message, bytes(payload))
            own.trace.sent_bytes += len(payload)
        await stream.end()

    def _answer(self, opening: RecallSpan, index: int) -> tuple[Chunk, Buffer]:
        ledger = self.own.ledger
        chunk = ledger.chunk(opening.reducer, index)
        averaged = ledger.settled(opening.reducer, index)
        placed = ledger.result(opening.reducer, index)
        if placed.has_mean:
            message = Chunk(index, averaged, placed.missing, digest=placed.digest)
            return message, ledger.vector.read(*chunk).data.cast("B")
        if opening.contributions and self.own.contributes and not averaged:
            return self._upload.encoded(opening.reducer, index, chunk)
        return Chunk(index, averaged, placed.missing), b""

    async def _recompute(self, reducer: int) -> None:
        wanted = self.own.ledger.lacking(reducer)
        gone = {self.own.me, reducer, *self._failed}
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
        received: dict[int, tuple[Chunk, Floats | None]] = {}

        async def receive(member: int, stream: Stream) -> None:
            try:
                received[member] = await self._read(stream, reducer, index)
            except (PeerError, TimeoutError, ValueError) as error:
                logger.debug("survivor %s failed: %s", short(stream.peer), error)
                del streams[member]
                stream.reset(str(error))

        await asyncio.gather(*(receive(*survivor) for survivor in list(streams.items())))
        for member, (message, values) in sorted(received.items()):
            if not message.averaged:
                continue
            try:
                return self._place(reducer, message, values)
            except ValueError as error:
                logger.debug("%s gave no mean: %s", short(own.member(member).id), error)
                received[member] = message, None
        chunk = own.ledger.chunk(reducer, index)
        contributions = {member: values for member, (_, values) in received.items() if values is not None}
        with suppress(ValueError):  # it may not be finite
            message, payload = self._upload.encoded(reducer, index, chunk)
            codec = codec_of(message.codec or own.group.terms.codec)
            contributions[own.me] = codec.decode(payload, chunk.numel)
        weights = [member.weight for member in own.group.members]

        def own_values(_: int) -> Floats:
            return own.ledger.vector.read(*chunk)

        mean, lacking = average_chunk(chunk, weights, contributions, own.usual.most_rms, own=own_values)
        self._place(reducer, Chunk(index, True, lacking), mean, most_rms=math.inf)

    def _place(
        self, reducer: int, message: Chunk, mean: Floats | None, *, most_rms: float | None = None
    ) -> None:
        """Place a mean; raises ValueError if it cannot be one, as it is over ``most_rms``: by default the usual."""
        own = self.own
        exact = codec_of("float32")
        payload: Buffer = b""
        digest = digest_of(payload)
        if mean is not None:
            payload = exact.encode(mean)
            digest = self._digest_of_mean(mean, message.digest)
        if most_rms is None:
            most_rms = LARGEST_MEAN * own.usual.most_rms
        own.ledger.place(reducer, message.index, exact, payload, message.missing, digest, most_rms=most_rms)

    def _digest_of_mean(self, mean: Floats, claimed: bytes) -> bytes:
        """Return the digest of a mean, as its reducer encoded it; raises ValueError if it is not the ``claimed`` one.

        What a codec decodes, it encodes to the same bytes. So equal digests mean equal values, whoever gave them.
        Without a claim, as of a mean that was recomputed, it is the digest of the values.
        """
        if not claimed:
            return digest_of(codec_of("float32").encode(mean))
        mean_codec = self.own.group.terms.mean_codec
        names = {"float32", mean_codec}
        if mean_codec == "adaptive":
            names = {"float32", "float16", "int8"}
        for name in names:
            encoded = codec_of(name).encode(mean.copy())
            for payload in (encoded, drop_zeros(encoded) if name == "float16" else b""):
                if len(payload) and digest_of(payload) == claimed:
                    return claimed
        raise ValueError("the mean is not the one that its digest is of")

    @asynccontextmanager
    async def _recall(self, member: int, reducer: int, *, contributions: bool) -> AsyncIterator[Stream]:
        own = self.own
        wanted = tuple(own.ledger.lacking(reducer))
        opening = RecallSpan(own.group.round_id, reducer, wanted, contributions)
        peer = own.member(member).id
        timeout_s = own.settings.dial_timeout_s
        with self._charged(member):
            stream = await own.peers.stream(peer, opening, timeout_s=timeout_s)
        async with stream:
            yield stream

    @contextmanager
    def _charged(self, member: int) -> Iterator[None]:
        """Note a wait for a member in which nothing came of it."""
        began = loop_now()
        try:
            yield
        except (PeerError, TimeoutError) as error:
            if isinstance(error, PeerError):
                self._failed.add(member)
            self._lateness.on_late(member, loop_now() - began)
            raise

    async def _read(self, stream: Stream, reducer: int, index: int) -> tuple[Chunk, Floats | None]:
        own = self.own
        member = own.group.index_of(stream.peer)
        assert member is not None
        with self._charged(member):
            async with asyncio.timeout(self._lateness.recovery_s(member, loop_now())):
                message, payload = await stream.receive(Chunk)
        own.trace.received_bytes += len(payload)
        require(message.index == index, f"received chunk {message.index}, expected {index}")
        own.check_missing(message)
        if not len(payload):
            return message, None
        codec = codec_of("float32" if message.averaged else message.codec or own.group.terms.codec)
        values = codec.decode(payload, own.ledger.chunk(reducer, index).numel)
        require(all_finite(values), f"chunk {index} has values that are not finite")
        return message, values
