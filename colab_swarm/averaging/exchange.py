"""One round at one member: it contributes to all spans, reduces its own span, and collects the means.

A member opens one stream to each other reducer. This stream carries the member's contribution to the reducer, and the
means back to the member. So a member that cannot be dialled can take part. A chunk needs no task, timer or copy of its
own.
"""

import asyncio
import logging
import math
from collections.abc import Mapping

import numpy as np

from colab_swarm.averaging.group import Group, Span, chunk_values
from colab_swarm.averaging.lateness import Key, Lateness
from colab_swarm.averaging.messages import AveragingSettings, Chunk, ReduceSpan
from colab_swarm.averaging.recovery import Recovery
from colab_swarm.averaging.reducer import SpanLedger, SpanReducer
from colab_swarm.averaging.result import GroupResult, RoundTrace
from colab_swarm.averaging.strategy import forecast_s
from colab_swarm.errors import CallRefused, PeerError, PeerLost, require
from colab_swarm.net.node import Node
from colab_swarm.net.patience import Patience, allowance_s
from colab_swarm.net.peers import PeerId, Role, Stream, StreamEnded, short
from colab_swarm.runtime import loop_now, wake
from colab_swarm.tensors.codecs import Buffer, Precision, codec_of
from colab_swarm.tensors.sparse import SPARSE16, Sparse, drop_zeros, restore_zeros
from colab_swarm.tensors.vector import HostVector, Vector

logger = logging.getLogger(__name__)

LEAD = 0.01  # how far a stream may be ahead of the slowest stream, as a part of its span
STALL_S = 1.0  # if a stream sent nothing for this time, the other streams stop waiting for it
TICK_S = 0.1  # between two checks for late members
AWAKE_S = 1.0  # a timer that is this late shows that the process was stopped
SILENT_S = 1.0  # a late contributor that sent nothing for this time is not awaited as a reducer either
CHAINED = 1.5  # factor on the limit of a reducer, because it may itself wait for a contributor
PREDICTED = 3.0  # a round may take this many times the seconds that the bandwidths predict
_MOST_ROUND_S = 3600.0  # maximum of that time, whatever bandwidths the members claim


class Pace:
    """Lets the uploads to all reducers advance evenly, each relative to its span. Pure.

    Otherwise the uploads to the largest spans would end last. If a span has few chunks, each chunk is a large part of
    the span. The uploads to such spans take turns, in the order of ``chunks``.
    """

    def __init__(self, chunks: Mapping[int, int], *, now: float) -> None:
        self._chunks = {reducer: count for reducer, count in chunks.items() if count}
        # How far each stream may be ahead: `LEAD`, and the later its turn, the more, up to a third of a chunk.
        self._lead = {}
        for turn, (reducer, count) in enumerate(self._chunks.items()):
            self._lead[reducer] = LEAD + turn / len(chunks) / count / 3
        self._sent = dict.fromkeys(self._chunks, 0.0)  # what each stream has sent, as a part of its span
        self._sent_at = dict.fromkeys(self._chunks, now)

    def may_send(self, reducer: int, *, now: float) -> bool:
        return self._sent[reducer] <= self._last(now) + self._lead[reducer]

    def on_chunk(self, reducer: int, index: int, *, now: float) -> bool:
        """Count a chunk as sent or skipped; return True if another stream may be allowed to send now."""
        before = self._sent[reducer]
        self._sent[reducer] = (index + 1) / self._chunks[reducer]
        self._sent_at[reducer] = now
        return before < self._last(now)

    def on_over(self, reducer: int) -> None:
        self._sent[reducer] = 1.0

    def _last(self, now: float) -> float:
        moving = (sent for other, sent in self._sent.items() if now < self._sent_at[other] + STALL_S)
        return min(moving, default=1.0)


class Round:
    """One round at one member: the means replace the values in this member's vector.

    Raises ValueError if this peer is no member.

    Args:
        fine: number of values at the front that belong to small tensors (see `Precision`).
        collects: False for an assistant, which only reduces, and collects no means.
        most_rms: maximum root mean square of a contribution or a mean.
    """

    def __init__(
        self,
        peers: Node,
        group: Group,
        vector: Vector,
        settings: AveragingSettings,
        patience: Patience[Key],
        fine: int | None = None,
        *,
        collects: bool = True,
        most_rms: float = math.inf,
    ) -> None:
        me = group.index_of(peers.id)
        if me is None:
            raise ValueError("only a member can take part in a round")
        now = loop_now()
        terms = group.terms
        self.peers = peers
        self.group = group
        self.me = me
        self.settings = settings
        self.collects = collects
        self.contributors = frozenset(i for i, member in enumerate(group.members) if member.weight > 0)
        # A round of a large model may take long over slow lines, while the trainer computes on.
        self._forecast_s = min(PREDICTED * forecast_s(group), _MOST_ROUND_S)
        self.limit_s = max(settings.round_timeout_s, self._forecast_s)
        self.ledger = SpanLedger(group, vector)
        self.trace = RoundTrace(group, now=now)
        self.lateness = Lateness(group, me, patience, now=now)
        self.recovery = Recovery(self)
        self.most_rms = most_rms
        self._exchange_s = math.inf  # seconds until every other reducer was done or lost
        self._digesting: asyncio.Future[None] | None = None

        # Reducers that failed here before all their means arrived; at an assistant, reducers whose spans it recovers.
        self.lost: set[int] = set()
        self.silent: set[int] = set()  # late members that sent nothing; they are asked for nothing more
        # For each reducer. ``settled`` is set when no further mean will arrive from the reducer itself, ``final`` when
        # no further mean of its span will arrive from any member.
        self.settled = [asyncio.Event() for _ in group.members]
        self.final = [asyncio.Event() for _ in group.members]
        self._waits: dict[int, asyncio.Timeout] = {}  # the wait for each reducer's means

        self._precision = Precision(terms.codec, fine)
        self._mean_precision = Precision(terms.mean_codec, fine)
        self._pace = Pace({reducer: len(self.ledger.chunks[reducer]) for reducer in self.others}, now=now)
        self._turn = asyncio.Event()  # streams wait for their turn to send

        longest = min(chunk_values(terms.codec, terms.mean_codec), terms.numel)
        self._scratch = np.empty(longest, np.float32)  # for one chunk; used without an await between
        self._streaming: set[int] = set()  # members that opened a stream here
        self._averaged_at = math.inf  # when all chunks of this member's span were averaged
        self._means: list[
            tuple[Chunk, Buffer]
        ] = []  # the encoded means, in the order in which they were finished; each stream sends them in this order
        self._more_means = asyncio.Event()
        self._released = False
        self.open_streams = 0  # number of streams that members have open here, for contributions or recovery
        self.idle = asyncio.Event()  # set when the last of these streams ends
        span = group.spans()[me]
        # A member needs its vector's values until the means arrive, so sums have their own memory. An assistant's
        # vector has no values.
        sums = np.empty(span.numel, np.float32) if collects else vector.read(*span)
        weights = [member.weight for member in group.members]
        self.reducer = SpanReducer(self.ledger.chunks[me], weights, sums, most_rms)
        self._publish(self.reducer.finished())
        if not collects:
            self._publish(self.reducer.drop(me))
            for reducer in self.others:
                self.settled[reducer].set()

    @property
    def others(self) -> list[int]:
        """The other members, in member order from this member on, so that no two members begin with the same."""
        count = len(self.group.members)
        return [*range(self.me + 1, count), *range(self.me)]

    @property
    def contributes(self) -> bool:
        return self.me in self.contributors

    def id_of(self, member: int) -> PeerId:
        return self.group.members[member].id

    async def run(self) -> None:
        """Take part until the vector has all means that exist, or until ``limit_s`` is over."""
        stop_listening = self.peers.on_lost(self._on_lost)
        awaited = self.final if self.collects else [self.final[self.me]]
        try:
            async with asyncio.timeout(self.limit_s), asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch())
                if self.collects:
                    tasks.create_task(self._contribute_own())
                    for reducer in self.others:
                        tasks.create_task(self._obtain(reducer))
                for final in awaited:
                    await final.wait()
                watch.cancel()
        except TimeoutError:
            logger.warning("the round of step %d timed out after %g s", self.group.terms.step, self.limit_s)
            for member in {*self.reducer.awaited(), *self.lost} - {self.me}:
                if member not in self.trace.dropped:
                    self.lateness.on_late(member, loop_now())
                self.trace.on_dropped(member, f"too slow: the round ended after {self.limit_s:g} s")
        finally:
            stop_listening()
            if self.collects:  # a late chunk must not change the values that the trainer applies
                self.ledger.writable = False
            for event in (*self.settled, *awaited):
                event.set()

    async def result(self) -> GroupResult:
        """Return the result of the round; call this when `run` has returned."""
        seconds = loop_now() - self.trace.began_at
        incomplete = self.ledger.incomplete()
        contributors = []
        for index, member in enumerate(self.group.members):
            if member.weight > 0 and index not in incomplete:
                contributors.append(member.id)
        kept_local: tuple[Span, ...] = ()
        digest = b""
        if self.collects:
            kept_local = self.ledger.kept_local()
            if self._digesting is not None:
                await self._digesting
            digest = await asyncio.to_thread(self.ledger.digest)
        spans = self.group.spans()
        return GroupResult(
            group=self.group,
            step=self.group.terms.step,
            announced={member.id: member.samples for member in self.group.members},
            contributors=tuple(contributors),
            spans_lost=tuple(spans[reducer] for reducer in sorted(self.lost)),
            kept_local=kept_local,
            sent_bytes=self.trace.sent_bytes,
            received_bytes=self.trace.received_bytes,
            seconds=seconds,
            exchange_s=min(seconds, self._exchange_s),
            members=self.trace.members(incomplete),
            gaps=self.ledger.gaps(),
            digest=digest,
        )

    # Contribute to a span, and collect its means.

    async def _contribute_own(self) -> None:
        """Add this member's contribution to its own span. Between two chunks, other tasks may run."""
        chunks = self.ledger.chunks[self.me] if self.contributes else ()
        try:
            for index, chunk in enumerate(chunks):
                self.take(self.me, *self.encoded(self.me, index, chunk))
                await asyncio.sleep(0)
        except ValueError as error:  # the codec cannot encode the values
            self._drop(self.me, str(error))

    async def _obtain(self, reducer: int) -> None:
        """Collect the means of a reducer's span; if the reducer is lost, recover the missing means."""
        if self.ledger.chunks[reducer]:
            await self._talk_to(reducer)
            self._exchange_s = loop_now() - self.trace.began_at
            if reducer in self.lost:
                await self.recovery.recover(reducer)
        self.settled[reducer].set()
        self.final[reducer].set()

    async def _talk_to(self, reducer: int) -> None:
        """Contribute to a reducer's span and collect its means; if a mean does not arrive, the reducer is lost."""
        peer = self.id_of(reducer)
        try:
            async with asyncio.timeout(None) as self._waits[reducer]:
                try:
                    await self._converse(reducer)
                except PeerLost:
                    if peer not in self.peers.linked():
                        raise
                    # There were two links to this peer, and only one was lost.
                    await self._converse(reducer)
        except (PeerError, TimeoutError, ValueError) as error:
            reason = str(error)
            if not reason:
                reason = f"too slow: no mean for {self._silent_s(reducer, loop_now()):.1f} s"
            if isinstance(error, CallRefused):
                reason = f"refused: {reason}"
            logger.debug("reducer %s is lost: %s", short(peer), reason)
            self.trace.on_dropped(reducer, reason)
        finally:
            del self._waits[reducer]
            if self.ledger.lacking(reducer):
                self.lost.add(reducer)
            self.settled[reducer].set()

    async def _converse(self, reducer: int) -> None:
        peer = self.id_of(reducer)
        opening = ReduceSpan(self.group.round_id)
        async with await self.peers.stream(peer, opening, timeout_s=self.settings.dial_timeout_s) as stream:
            require(self.peers.role_of(peer) >= Role.REDUCER, "its role does not let it reduce")
            upload = asyncio.create_task(self._upload(stream, reducer))
            try:
                for _ in self.ledger.chunks[reducer]:
                    message, payload = await stream.receive(Chunk)
                    now = loop_now()
                    self.lateness.heard_at[reducer] = now
                    self.trace.on_traffic("means", reducer, now)
                    self.trace.received_bytes += len(payload)
                    self.place_mean(reducer, message, payload)
            finally:
                upload.cancel()

    async def _upload(self, stream: Stream, reducer: int) -> None:
        """Send the contribution to one reducer's span, and end this direction of the stream."""
        try:
            await self._send_chunks(stream, reducer)
            await stream.end()
        except PeerError as error:  # the task that receives the means sees this error, too, and handles it
            logger.debug("contribution to span %d broke off: %s", reducer, error)
        finally:
            self._pace.on_over(reducer)
            wake(self._turn)

    async def _send_chunks(self, stream: Stream, reducer: int) -> None:
        chunks = self.ledger.chunks[reducer] if self.contributes else ()
        try:
            for index, chunk in enumerate(chunks):
                if not self.ledger.settled(reducer, index):
                    while not self._pace.may_send(reducer, now=loop_now()):
                        await self._turn.wait()
                    message, payload = self.encoded(reducer, index, chunk)
                    self.trace.on_traffic("sent", reducer, loop_now())
                    await stream.send(message, payload)
                    self.trace.on_traffic("sent", reducer, loop_now())
                    self.trace.sent_bytes += len(payload)
                if self._pace.on_chunk(reducer, index, now=loop_now()):
                    wake(self._turn)
        except ValueError as error:  # the codec cannot encode the values; the rest is missing at the reducer
            logger.warning("this peer contributes nothing more to the round: %s", error)

    def encoded(self, reducer: int, index: int, chunk: Span) -> tuple[Chunk, Buffer]:
        """Return this member's contribution to a chunk; raises ValueError if the codec cannot encode the values."""
        codec = self._precision.at(chunk.start)
        if reducer == self.me and not isinstance(codec, Sparse):
            # A member's contribution to its own span is exact, except with a sparse codec, whose mean must stay sparse.
            codec = codec_of("float32")
        return Chunk(index, codec=codec.name), self.ledger.vector.encode(chunk.start, chunk.stop, codec)

    def place_mean(self, reducer: int, message: Chunk, payload: Buffer) -> None:
        """Put a chunk's mean, which any member may have sent, into the vector; raises ValueError if it is invalid."""
        require(
            self.contributors.issuperset(message.missing), "its mean lacks members that contribute nothing"
        )
        name = message.codec or self.group.terms.mean_codec
        if name == SPARSE16 and len(payload):
            name = "float16"
            payload = restore_zeros(payload, self.ledger.chunk(reducer, message.index).numel)
        self.ledger.place(
            reducer, message.index, codec_of(name), payload, message.missing, most_rms=self.most_rms
        )

    # Reduce the own span.

    async def serve(self, stream: Stream, member: int) -> None:
        """Receive a member's contribution to this member's span, and send the means back."""
        self._streaming.add(member)
        self.lateness.heard_at[member] = loop_now()
        if self._released:  # the member is late, so it may still read when the vector has other values
            self._means = [(mean, bytes(payload)) for mean, payload in self._means]
            self._released = False
        returning = asyncio.create_task(self._return_means(stream))
        try:
            await self._take_all(stream, member)
            await returning
        except PeerError as error:
            self._drop(member, str(error))
            raise
        finally:
            returning.cancel()
            self._drop(member, "its stream is over")

    async def _take_all(self, stream: Stream, member: int) -> None:
        try:
            while True:
                message, payload = await stream.receive(Chunk)
                now = loop_now()
                self.lateness.heard_at[member] = now
                self.trace.on_traffic("received", member, now)
                self.trace.received_bytes += len(payload)
                self.take(member, message, payload)
        except StreamEnded:
            self._drop(member, "it ended before its last chunk")

    async def _return_means(self, stream: Stream) -> None:
        try:
            for sent in range(len(self.ledger.chunks[self.me])):
                while sent == len(self._means):
                    await self._more_means.wait()
                message, payload = self._means[sent]
                await stream.send(message, payload)
                self.trace.sent_bytes += len(payload)
            await stream.end()
        except PeerError as error:
            logger.debug("means for %s broke off: %s", short(stream.peer), error)

    def take(self, member: int, message: Chunk, payload: Buffer) -> None:
        """Add a member's contribution to a chunk; if the contribution is invalid, drop the member."""
        chunks = self.ledger.chunks[self.me]
        index = message.index
        numel = chunks[index].numel if 0 <= index < len(chunks) else 0
        try:
            codec = codec_of(message.codec or self.group.terms.codec)
            values = codec.decode(payload, numel, scratch=self._scratch)
            if self.reducer.on_chunk(member, index, values):
                self._publish([index])
        except ValueError as error:
            self._drop(member, str(error))

    def _drop(self, member: int, reason: str) -> None:
        """Finish the means without the chunks that ``member`` has not delivered."""
        if member in self.reducer.awaited():
            logger.debug("contributor %s is out: %s", short(self.id_of(member)), reason)
            self.trace.on_dropped(member, reason)
            self._publish(self.reducer.drop(member))

    def _publish(self, finished: list[int]) -> None:
        if finished:
            self.trace.on_traffic("means", self.me, loop_now())
        for index in finished:
            self._place_own(index)
        wake(self._more_means)
        if not self.reducer.unfinished:
            self._averaged_at = loop_now()
            self.settled[self.me].set()
            self.final[self.me].set()

    def _place_own(self, index: int) -> None:
        """Encode the mean of an own chunk; this member, too, takes the decoded mean, so that all have equal bits."""
        mean = self.reducer.mean(index)
        missing = self.reducer.missing(index)
        codec = self._mean_precision.at(self.ledger.chunk(self.me, index).start)
        encoded: Buffer = b""
        if mean is not None:
            encoded = codec.encode(mean)
        self.ledger.place(self.me, index, codec, encoded, missing)
        name = codec.name
        shorter = drop_zeros(encoded) if name == "float16" else b""
        if shorter:
            name = SPARSE16
            encoded = shorter
        self._means.append((Chunk(index, True, missing, name), encoded))

    def on_open(self) -> None:
        """Count a stream that a member has opened here."""
        self.open_streams += 1
        self.idle.clear()

    def on_close(self) -> None:
        self.open_streams -= 1
        if not self.open_streams:
            self.idle.set()

    def release(self) -> None:
        """Free the memory of the averaged span, if no member reads it; late members get the means from the vector."""
        if self.open_streams or self.reducer.unfinished:
            return
        vector = self.ledger.vector
        if not isinstance(vector, HostVector):
            # A vector on a device would return copies, which free nothing.
            return
        self.reducer.sums = [vector.read(*chunk) for chunk in self.ledger.chunks[self.me]]
        for at, (mean, payload) in enumerate(self._means):
            if len(payload) and mean.codec == "float32":
                self._means[at] = mean, codec_of("float32").encode(self.reducer.sums[mean.index])
        self._released = True

    # Wait for no member for too long.

    async def _watch(self) -> None:
        while True:
            slept_at = loop_now()
            await asyncio.sleep(TICK_S)
            now = loop_now()
            if now - slept_at > TICK_S + AWAKE_S:
                self.lateness.on_slept(now - slept_at, now)
            wake(self._turn)  # another stream may have stalled
            self._look_for_late_contributors(now)
            self._look_for_late_reducers(now)
            if self.collects and (self._digesting is None or self._digesting.done()):
                self._digesting = asyncio.ensure_future(asyncio.to_thread(self.ledger.digest_means))

    def _look_for_late_contributors(self, now: float) -> None:
        lateness = self.lateness
        awaited = self.reducer.awaited()
        only_left_out = lateness.left_out.issuperset(awaited)
        for member in awaited:
            is_lost = member in self.lost and member not in self._streaming
            if is_lost and self.id_of(member) not in self.peers.linked():
                self._drop(member, "its link is lost")
            elif member in lateness.left_out and only_left_out:
                self._drop(member, "it is left out, as it was late before")
            elif member != self.me and self._is_late(member, lateness.since, now):
                silent_s = self._silent_s(member, now)
                self._drop(member, f"too slow: nothing came for {silent_s:.1f} s")
                if silent_s >= SILENT_S:
                    self.silent.add(member)
                    self._give_up(member, now)

    def _look_for_late_reducers(self, now: float) -> None:
        lateness = self.lateness
        # While this peer waits for contributors, a reducer may wait for the same contributors. So a reducer's limit
        # begins when this peer's own span is averaged. A peer without a span cannot know when that would be, so it
        # waits for the forecast, or for the longest limit.
        begins_at = self._averaged_at
        if not self.ledger.chunks[self.me]:
            begins_at = lateness.since + max(self._forecast_s, lateness.longest_s())
        only_left_out = not self.reducer.unfinished and lateness.left_out.issuperset(self._waits)
        for reducer in [*self._waits]:
            is_left_out = reducer in lateness.left_out and only_left_out
            if is_left_out or self._is_late(reducer, begins_at, now, times=CHAINED):
                self._give_up(reducer, now)

    def _is_late(self, member: int, begins_at: float, now: float, *, times: float = 1.0) -> bool:
        """Return True, and note that the member is late, if it exceeds its limit and the time that the lines need."""
        heard_at = self.lateness.heard_at[member]
        # A chunk may take long over a slow line. At first all streams get an equal part of the line, so a first chunk
        # takes the round's time divided by the number of chunks. A later chunk may take any part of the round.
        line_s = self._forecast_s
        if heard_at == self.lateness.since:
            line_s /= max(map(len, self.ledger.chunks))
        late_at = max(begins_at, heard_at) + max(times * self.lateness.limit_s(member), line_s)
        if member in self.lateness.left_out or now < late_at:
            return False
        # Over the slow line of any other member, this member may have received the group late.
        slow_s = max(allowance_s(self.peers.statistics(self.id_of(other)).rtt_s) for other in self.others)
        if now < late_at + slow_s:
            return False
        self.lateness.on_late(member, now)
        return True

    def _give_up(self, reducer: int, now: float) -> None:
        """Stop waiting for a reducer's means."""
        wait = self._waits.get(reducer)
        if wait is not None and not wait.expired():
            self.lost.add(reducer)
            wait.reschedule(now)

    def _silent_s(self, member: int, now: float) -> float:
        return now - self.lateness.heard_at[member]

    def _on_lost(self, peer: PeerId) -> None:
        """Drop a contributor whose link is lost, if it cannot be dialled and has no stream open here."""
        member = self.group.index_of(peer)
        if member is None or member in self._streaming:
            return
        if not self.group.members[member].addresses:
            self._drop(member, "its link is lost")
