"""A member's collection of the other spans' means, each over the stream that carries its contribution there."""

import asyncio
import logging

from colab_swarm.averaging.member import LARGEST_MEAN, Chunk, ReduceSpan, RoundMember
from colab_swarm.averaging.reducer import digest_of
from colab_swarm.averaging.upload import Upload
from colab_swarm.errors import CallRefused, PeerError, PeerLost, require
from colab_swarm.net.peers import Role, Stream, short
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.codecs import Buffer, codec_of
from colab_swarm.tensors.sparse import SPARSE16, restore_zeros

logger = logging.getLogger(__name__)


class Collection:
    """Gets the means of the other members' spans, while the upload sends them this peer's contribution.

    ``_limits`` are the timeouts of the open streams, by reducer.
    """

    def __init__(self, own: RoundMember, upload: Upload) -> None:
        self.own = own
        self._upload = upload
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
                reason = f"too slow: no mean for {own.silent_s(reducer, loop_now()):.1f} s"
            if isinstance(error, CallRefused):
                reason = f"refused: {reason}"
            logger.debug("reducer %s is lost: %s", short(peer), reason)
            own.trace.on_dropped(reducer, reason)
        finally:
            del self._limits[reducer]
            if own.ledger.lacking(reducer):
                own.lost.add(reducer)
            own.settled[reducer].set()

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
            own.on_heard(reducer, now)
            own.trace.on_traffic("means", reducer, now)
            own.trace.received_bytes += len(payload)
            own.check_missing(message)
            self._place(reducer, message, payload)

    def _place(self, reducer: int, message: Chunk, payload: Buffer) -> None:
        """Place a mean; raises ValueError if it cannot be one, and the others recover the span."""
        own = self.own
        digest = digest_of(payload)
        name = message.codec or own.group.terms.mean_codec
        if name == SPARSE16 and len(payload):
            name = "float16"
            payload = restore_zeros(payload, own.ledger.chunk(reducer, message.index).numel)
        most_rms = LARGEST_MEAN * own.usual.most_rms
        own.ledger.place(
            reducer, message.index, codec_of(name), payload, message.missing, digest, most_rms=most_rms
        )

    def waiting_for(self) -> list[int]:
        """Return the reducers whose streams are open."""
        return list(self._limits)

    def give_up(self, reducer: int, now: float) -> None:
        """Wait no longer for a reducer's means."""
        limit = self._limits.get(reducer)
        if limit is not None and not limit.expired():
            limit.reschedule(now)
