"""A member as the reducer of its own span: it takes the others' contributions and returns the means."""

import asyncio
import logging
import math
from collections.abc import Callable

import numpy as np

from colab_swarm.averaging.member import Chunk, RoundMember
from colab_swarm.averaging.reducer import SpanReducer, digest_of
from colab_swarm.errors import PeerError
from colab_swarm.net.peers import PeerId, Stream, StreamEnded, short
from colab_swarm.runtime import loop_now, wake
from colab_swarm.tensors.codecs import Buffer, Floats, Precision, codec_of
from colab_swarm.tensors.sparse import SPARSE16, drop_zeros
from colab_swarm.tensors.vector import HostVector

logger = logging.getLogger(__name__)


class SpanServer:
    """Reduces the own span for the whole group; ``averaged_at`` is when all of its chunks were averaged.

    ``_means`` are the encoded means, in the order of completion: each stream returns them in this order.
    ``open_streams`` counts the streams that members have open here, of contributions and of recoveries; ``idle`` is
    set when the last one ends.
    """

    def __init__(self, own: RoundMember, fine: int | None, *, collects: bool) -> None:
        self.own = own
        self._precision = Precision(own.group.terms.mean_codec, fine)
        vector = own.ledger.vector
        span = own.group.spans()[own.me]
        chunks = own.ledger.chunks[own.me]
        weights = [member.weight for member in own.group.members]
        contribution: Callable[[int], Floats] | None = None
        if own.contributes:
            contribution = self._own_values
        # A member that collects means into its vector needs its values until they arrive; an assistant's are empty.
        sums = np.empty(span.numel, np.float32) if collects else vector.read(*span)
        self.reducer = SpanReducer(chunks, weights, sums, own.usual.most_rms, own=contribution)
        self.averaged_at = math.inf
        self.open_streams = 0
        self.idle = asyncio.Event()
        self._means: list[tuple[Chunk, Buffer]] = []
        self._more_means = asyncio.Event()
        self._released = False
        self._publish(self.reducer.finished())
        if not collects:
            self._publish(self.reducer.drop(own.me))

    def _own_values(self, index: int) -> Floats:
        """Return this member's own values of a chunk, until the mean replaces them."""
        ledger = self.own.ledger
        return ledger.vector.read(*ledger.chunk(self.own.me, index))

    async def serve(self, stream: Stream, member: int) -> None:
        """Take a member's contribution, and return the means to it."""
        self.own.streaming.add(member)
        if self._released:  # it comes late, and may read when the vector has other values
            self._means = [(mean, bytes(payload)) for mean, payload in self._means]
            self._released = False
        returning = asyncio.create_task(self._return_means(stream))
        try:
            await self._take_all(stream, member)
            await returning
        except PeerError as error:
            self.drop(member, str(error))
            raise
        finally:
            returning.cancel()
            self.drop(member, "its stream is over")

    async def _take_all(self, stream: Stream, member: int) -> None:
        trace = self.own.trace
        try:
            while True:
                message, payload = await stream.receive(Chunk)
                now = loop_now()
                self.own.on_heard(member, now)
                trace.on_traffic("received", member, now)
                trace.received_bytes += len(payload)
                self.take(member, message, payload)
        except StreamEnded:
            self.drop(member, "it ended before its last chunk")

    async def _return_means(self, stream: Stream) -> None:
        try:
            for sent in range(len(self.own.ledger.chunks[self.own.me])):
                while sent == len(self._means):
                    await self._more_means.wait()
                message, payload = self._means[sent]
                await stream.send(message, payload)
                self.own.trace.sent_bytes += len(payload)
            await stream.end()
        except PeerError as error:
            logger.debug("means for %s broke off: %s", short(stream.peer), error)

    def take(self, member: int, message: Chunk, payload: Buffer) -> None:
        """Add a member's contribution to a chunk; a member that sends an invalid one is dropped."""
        own = self.own
        chunks = own.ledger.chunks[own.me]
        index = message.index
        numel = chunks[index].numel if 0 <= index < len(chunks) else 0
        try:
            codec = codec_of(message.codec or own.group.terms.codec)
            values = codec.decode(payload, numel, scratch=own.scratch)
            if self.reducer.on_chunk(member, index, values):
                self._publish([index])
        except ValueError as error:
            self.drop(member, str(error))

    def drop(self, member: int, reason: str) -> None:
        """Continue without the chunks that ``member`` did not deliver."""
        if member in self.reducer.awaited():
            logger.debug("contributor %s is out: %s", short(self.own.member(member).id), reason)
            self.own.trace.on_dropped(member, reason)
            self._publish(self.reducer.drop(member))

    def on_lost(self, peer: PeerId) -> None:
        """Drop a peer whose link is lost if it cannot be dialled and has opened no stream."""
        member = self.own.group.index_of(peer)
        if member is None or member in self.own.streaming:
            return
        if not self.own.member(member).addresses:
            self.drop(member, "its link is lost")

    def _publish(self, finished: list[int]) -> None:
        if finished:
            self.own.trace.on_traffic("means", self.own.me, loop_now())
        for index in finished:
            self._place(index)
        wake(self._more_means)
        if not self.reducer.unfinished:
            self.averaged_at = loop_now()
            self.own.settled[self.own.me].set()
            self.own.final[self.own.me].set()

    def _place(self, index: int) -> None:
        """Encode the mean of a chunk, and let this member take what the others will decode."""
        own = self.own
        mean = self.reducer.mean(index)
        missing = self.reducer.missing(index)
        codec = self._precision.at(own.ledger.chunk(own.me, index).start)
        name = "" if codec.name == own.group.terms.mean_codec else codec.name
        encoded: Buffer = b""
        if mean is not None:
            encoded = codec.encode(mean)
        payload = encoded
        shorter = drop_zeros(encoded) if codec.name == "float16" else b""
        if shorter:
            name = SPARSE16
            payload = shorter
        own.ledger.place(own.me, index, codec, encoded, missing, digest_of(payload))
        self._means.append((Chunk(index, True, missing, name), payload))

    def on_open(self) -> None:
        """Count a stream that a member has open here."""
        self.open_streams += 1
        self.idle.clear()

    def on_close(self) -> None:
        self.open_streams -= 1
        if not self.open_streams:
            self.idle.set()

    def release(self) -> None:
        """Free the memory of an averaged span that nobody reads; the vector has the means, for late members."""
        if self.open_streams or self.reducer.unfinished:
            return
        own = self.own
        if not isinstance(own.ledger.vector, HostVector):
            # It would give copies.
            return
        self.reducer.sums = [own.ledger.vector.read(*chunk) for chunk in own.ledger.chunks[own.me]]
        for at, (mean, payload) in enumerate(self._means):
            if len(payload) and (mean.codec or own.group.terms.mean_codec) == "float32":
                self._means[at] = mean, codec_of("float32").encode(self.reducer.sums[mean.index])
        self._released = True
