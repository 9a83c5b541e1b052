"""One round at one member: it contributes, collects the means, and reduces its own span.

One stream to each reducer: outgoing connections are enough. No task, timer or copy per chunk.
"""

import asyncio
import logging

from colab_swarm.averaging.group import Group
from colab_swarm.averaging.lateness import SHORTEST_S, TICK_S, Lateness
from colab_swarm.averaging.messages import (
    AveragingSettings,
    Chunk,
    ReduceSpan,
    RoundMember,
    UploadEncoding,
    Usual,
)
from colab_swarm.averaging.reducer import root_mean_square
from colab_swarm.averaging.span_server import SpanServer
from colab_swarm.averaging.upload import Upload
from colab_swarm.errors import CallRefused, PeerError, PeerLost, require
from colab_swarm.net.peers import Peers, Role, Stream, short
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.codecs import Buffer, Floats, codec_of
from colab_swarm.tensors.sparse import SPARSE16, restore_zeros

logger = logging.getLogger(__name__)

_LARGEST_MEAN = 100.0  # most times that a reducer's mean is larger than any contribution is believed to be


class Collection:
    """Gets the means of the other members' spans, while the upload sends them this peer's contribution.

    ``ended[reducer]`` is set when all means that this reducer could give have arrived. ``_limits`` are the timeouts
    of the open streams, by reducer.
    """

    def __init__(self, own: RoundMember, upload: Upload, lateness: Lateness) -> None:
        self.own = own
        self._upload = upload
        self._lateness = lateness
        self.ended = [asyncio.Event() for _ in own.group.members]
        self._limits: dict[int, asyncio.Timeout] = {}

    async def talk_to(self, reducer: int) -> None:
        """Contribute to a reducer's span and collect its means; note it as lost if some did not arrive."""
        own = self.own
        peer = own.member(reducer).id
        try:
            async with asyncio.timeout(None) as self._limits[reducer]:
                try:
                    await self._converse(reducer)
                except PeerLost:
                    if peer not in own.peers.linked():
                        raise
                    # one of two links was lost, not the peer
                    await self._converse(reducer)
        except (PeerError, TimeoutError, ValueError) as error:
            reason = str(error)
            if not reason:
                reason = f"too slow: no mean for {self._lateness.silent_s(reducer, loop_now()):.1f} s"
            if isinstance(error, CallRefused):
                reason = f"refused: {reason}"
            logger.debug("reducer %s is lost: %s", short(peer), reason)
            own.trace.on_dropped(reducer, reason)
        finally:
            del self._limits[reducer]
            if own.ledger.lacking(reducer):
                own.lost.add(reducer)
            self.ended[reducer].set()

    async def _converse(self, reducer: int) -> None:
        own = self.own
        opening = ReduceSpan(own.group.round_id)
        peer = own.member(reducer).id
        async with await own.peers.stream(peer, opening, timeout_s=own.settings.dial_timeout_s) as stream:
            require(own.peers.role_of(peer) >= Role.REDUCER, "its role does not let it reduce")
            upload = asyncio.create_task(self._upload.send(stream, reducer))
            try:
                await self._collect(stream, reducer)
            finally:
                upload.cancel()

    async def _collect(self, stream: Stream, reducer: int) -> None:
        own = self.own
        for _ in own.ledger.chunks[reducer]:
            message, payload = await stream.receive(Chunk)
            now = loop_now()
            self._lateness.on_heard(reducer, now)
            own.trace.on_traffic("means", reducer, now)
            own.trace.received_bytes += len(payload)
            own.check_missing(message)
            mean = self._decoded(reducer, message, payload)
            own.ledger.place(reducer, message.index, mean, message.missing)

    def _decoded(self, reducer: int, message: Chunk, payload: Buffer) -> Floats | None:
        """Return a mean, None if there is none; raises ValueError if it cannot be one."""
        own = self.own
        numel = own.ledger.chunk(reducer, message.index).numel
        if not len(payload):
            return None
        name = message.codec or own.group.terms.mean_codec
        if name == SPARSE16:
            name = "float16"
            payload = restore_zeros(payload, numel)
        mean = codec_of(name).decode(payload, numel, scratch=own.scratch)
        rms = root_mean_square(mean)
        # False for NaN, too.
        is_credible = rms < _LARGEST_MEAN * own.usual.most_rms
        if not is_credible:
            # the others recover the span
            text = f"the mean of chunk {message.index} is not finite, or far too large: {rms:.3g}"
            raise ValueError(text)
        return mean

    def waiting_for(self) -> list[int]:
        """Return the reducers whose streams are open."""
        return list(self._limits)

    def give_up(self, reducer: int, now: float) -> None:
        """Wait no longer for a reducer's means."""
        if reducer in self._limits:
            self._limits[reducer].reschedule(now)


class AllReduce:
    """One round at one member, whose ``values`` become the means; an assistant, which does not collect, only reduces.

    The parts share ``own``, the `RoundMember`. ``final[reducer]`` is set when all means of its span that any member
    could give have arrived. Raises ValueError if this peer is no member.
    """

    def __init__(
        self,
        peers: Peers,
        group: Group,
        values: Floats,
        settings: AveragingSettings,
        *,
        encoding: UploadEncoding | None = None,
        collects: bool = True,
        usual: Usual | None = None,
    ) -> None:
        now = loop_now()
        encoding = encoding or UploadEncoding()
        self.own = RoundMember(peers, group, values, settings, usual or Usual(), now=now)
        self.collects = collects
        self.lateness = Lateness(self.own, now=now)
        self.upload = Upload(self.own, encoding, now=now)
        self.server = SpanServer(self.own, self.lateness, encoding.fine, collects=collects)
        self.collection = Collection(self.own, self.upload, self.lateness)
        self.final = [asyncio.Event() for _ in group.members]
        self.final[self.own.me] = self.server.done
        self.settled = self.collection.ended
        self.settled[self.own.me] = self.server.done
        self.recovering = [asyncio.Lock() for _ in group.members]
        # until the last other reducer was done or lost
        self.exchange_s: float | None = None
        if not collects:
            for settled in self.settled:
                if settled is not self.server.done:
                    settled.set()

    @property
    def group(self) -> Group:
        return self.own.group

    async def contribute_own(self) -> None:
        """Add the own contribution to the own reducer, yielding to the event loop in between."""
        own = self.own
        chunks = own.ledger.chunks[own.me] if own.contributes else ()
        try:
            for index, chunk in enumerate(chunks):
                message, payload = self.upload.encoded(own.me, index, chunk)
                self.server.take(own.me, message, payload)
                await asyncio.sleep(0)
        except ValueError as error:  # the codec cannot encode it
            self.server.drop(own.me, str(error))

    async def watch(self) -> None:
        """Go on without each member that is later than usual by more than it has earned."""
        sleep_s = TICK_S
        while True:
            slept_at = loop_now()
            await asyncio.sleep(sleep_s)
            self.upload.tick()
            now = loop_now()
            self.lateness.on_slept(now - slept_at, now)
            sleep_s = min([TICK_S, *self._look(now)])

    def _look(self, now: float) -> list[float]:
        """Drop who is too late; return for each other one when to look again."""
        times_s = []
        for member in self.server.reducer.awaited():
            if member == self.own.me:
                continue
            left_s = self.lateness.left_s(member, now)
            if left_s <= 0:
                silent_s = self.lateness.silent_s(member, now)
                self.server.drop(member, f"too slow: nothing came for {silent_s:.1f} s")
                if self.lateness.is_silent(member, now):
                    self.collection.give_up(member, now)
            times_s.append(max(left_s, SHORTEST_S))
        for reducer in self.collection.waiting_for():
            left_s = self.lateness.reducer_left_s(reducer, self.server.averaged_at, now)
            if left_s <= 0:
                self.collection.give_up(reducer, now)
            times_s.append(max(left_s, SHORTEST_S))
        return times_s
