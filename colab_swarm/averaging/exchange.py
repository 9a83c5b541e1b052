"""One round at one member: it contributes, collects the means, and reduces its own span.

One stream to each reducer: outgoing connections are enough. No task, timer or copy per chunk.
"""

import asyncio
import logging
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import numpy as np

from colab_swarm.averaging.group import Group, GroupMember, Span, chunk_values
from colab_swarm.averaging.reducer import SpanLedger, SpanReducer, root_mean_square
from colab_swarm.averaging.standing import AWAKE_S, CHAINED, Standing
from colab_swarm.errors import CallRefused, PeerError, PeerLost, require
from colab_swarm.events import MemberTrace
from colab_swarm.net.patience import allowance_s
from colab_swarm.net.peers import Message, PeerId, Peers, Role, Stream, StreamEnded, short
from colab_swarm.runtime import loop_now, wake
from colab_swarm.tensors.codecs import Buffer, Codec, ErrorFeedback, Floats, Precision, codec_of
from colab_swarm.tensors.sparse import SPARSE16, Sparse, drop_zeros, restore_zeros


@dataclass(frozen=True)
class AveragingSettings:
    """Timeouts of a round."""

    round_timeout_s: float = 120.0  # bound on the whole round, recovery included
    patience_s: float = 10.0  # silence of a member before anything is known about the usual time
    silence_s: float = 1.0  # of a line; a busy notebook stalls its peer
    dial_timeout_s: float = 3.0  # for reaching a member


LEAD = 0.01  # how far a stream may be ahead of the slowest one, as a share of its span
STALL_S = 2.0  # the other streams stop waiting for one that sent nothing for this time


class Pace:
    """Keeps the contributions to all reducers even: else a large span would start and end last. Pure.

    In a span of few chunks each one is a large part; these take turns, in the order of ``chunks``.
    """

    def __init__(self, chunks: Mapping[int, int], *, now: float) -> None:
        self._chunks = {reducer: count for reducer, count in chunks.items() if count}
        # how far a stream may be ahead: by up to a third of one of its chunks more, the later its turn
        self._lead = {
            r: LEAD + i / len(chunks) / count / 3 for i, (r, count) in enumerate(self._chunks.items())
        }
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


LEFT_OUT = "a reducer did not receive its whole contribution"


class Trace:
    """Begin and end of the ``sent``, ``received`` and ``means`` of each member; see `MemberTrace`."""

    def __init__(self, group: Group, *, now: float) -> None:
        self._group = group
        self._began_at = now
        self._times: dict[tuple[str, int], tuple[float, float]] = {}
        self._dropped: dict[int, str] = {}

    def on_traffic(self, kind: str, member: int, now: float) -> None:
        since = now - self._began_at
        self._times[kind, member] = self._times.get((kind, member), (since, since))[0], since

    def on_dropped(self, member: int, reason: str) -> None:
        self._dropped.setdefault(member, reason[:200])

    def ended_s(self) -> list[float]:
        """Return when each other member's contribution had arrived; where none did, its means."""
        for kind in ("received", "means"):
            if ended := [
                times[1] for (one, m), times in self._times.items() if one == kind and m not in self._dropped
            ]:
                return ended
        return []

    def members(self, incomplete: Container[int]) -> tuple[MemberTrace, ...]:
        """Return the traces; some reducer left the ``incomplete`` out, and it alone knows why."""
        total = sum(member.share for member in self._group.members) or 1.0
        traces = []
        for index, member in enumerate(self._group.members):
            dropped = self._dropped.get(index, "")
            if not dropped and index in incomplete:
                dropped = LEFT_OUT
            trace = MemberTrace(
                peer=member.id.hex(),
                samples=member.samples,
                share=member.share / total,
                sent=self._times.get(("sent", index)),
                received=self._times.get(("received", index)),
                means=self._times.get(("means", index)),
                dropped=dropped,
            )
            traces.append(trace)
        return tuple(traces)


logger = logging.getLogger(__name__)

_LARGEST_MEAN = 100.0  # most times that a reducer's mean is larger than any contribution is believed to be
_TICK_S = 0.1  # between two looks for late members


class ReduceSpan(Message, frozen=True):
    """Opens the stream from a member to a reducer: chunks of contributions up, chunks of means back."""

    round_id: bytes


class RecallSpan(Message, frozen=True):
    """Opens a stream that returns the ``wanted`` chunks of a lost reducer's span, in this order.

    Without a mean the member sends its own values with ``contributions``, else an empty payload.
    """

    round_id: bytes
    reducer: int
    wanted: tuple[int, ...]
    contributions: bool


class Chunk(Message, frozen=True):
    """Chunk ``index`` of a span: a contribution or, if ``averaged``, a mean; empty if there is none."""

    index: int
    averaged: bool = False
    missing: tuple[int, ...] = ()  # members of positive weight that are not in the mean
    codec: str = ""  # empty: the group's; a mean may be sparse16


@dataclass(frozen=True)
class UploadEncoding:
    """How a member encodes its contribution."""

    precision: str | None = None  # None: the group's codec
    fine: int | None = None  # values at the front that belong to small tensors (see `Precision`)
    feedback: ErrorFeedback | None = None  # records what compression cut off each value


@dataclass(frozen=True)
class Usual:
    """What is known from the rounds before."""

    round_s: float = math.inf  # until a member's contribution has come; infinite: not known yet
    most_rms: float = math.inf  # in a chunk of any contribution, unless this peer's is as large
    standing: Standing = field(default_factory=lambda: Standing(PeerId(b"")))


class AllReduce:
    """One round at one member, whose ``values`` become the means; an assistant only reduces.

    Raises ValueError if this peer is no member.
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
        me = group.index_of(peers.id)
        now = loop_now()
        if me is None:
            raise ValueError("only a member can take part in a round")
        self.group = group
        self.me = me
        self.settings = settings
        self.peers = peers
        self.ledger = SpanLedger(group, values)
        self.trace = Trace(group, now=now)
        self.usual = usual = usual or Usual()
        self.late_s: dict[int, float] = {}  # beyond the usual, by member
        # the begin, and when the own span was averaged
        self._since = now
        self._own_at = math.inf
        self._contributors = frozenset(i for i, one in enumerate(group.members) if one.weight > 0)
        self.began_at = now
        span = group.spans()[me]
        weights = [member.weight for member in group.members]
        sums = np.empty(span.numel, np.float32) if collects else values[span.start : span.stop]
        self.collects = collects
        self._released = False
        chunks = self.ledger.chunks[me]
        own = [values[chunk.start : chunk.stop] for chunk in chunks if weights[me]]
        self.reducer = SpanReducer(chunks, weights, sums, usual.most_rms, own=own)
        # per reducer: all means that it, or that any member, could give have arrived
        self.settled = [asyncio.Event() for _ in group.members]
        self.final = [asyncio.Event() for _ in group.members]
        self.recovering = [asyncio.Lock() for _ in group.members]
        self.lost: set[int] = set()  # reducers, before all of their means arrived
        self.exchange_s: float | None = None  # until the last other reducer was done or lost
        self.sent_bytes = self.received_bytes = self.serving = 0
        self.served = asyncio.Event()
        self._encoding = encoding = encoding or UploadEncoding()
        self._precision = Precision(encoding.precision or group.terms.codec, encoding.fine)
        self._mean_precision = Precision(group.terms.mean_codec, encoding.fine)
        # each member begins with another one
        spans = {i: len(self.ledger.chunks[i]) for i in (*range(me + 1, len(weights)), *range(me))}
        self._pace = Pace(spans, now=now)
        self._paced = asyncio.Event()
        longest = min(chunk_values(group.terms.codec, group.terms.mean_codec), group.terms.numel)
        self._scratch = np.empty(longest, np.float32)
        self._means: list[tuple[Chunk, Buffer]] = []  # of the own span, in the order of completion
        self._more_means = asyncio.Event()
        self._streaming: set[int] = set()
        self._heard_at = dict.fromkeys(range(len(weights)), now)
        self._limits: dict[int, asyncio.Timeout] = {}
        self._publish(self.reducer.finished())
        if not collects:
            for settled in self.settled[:me] + self.settled[me + 1 :]:
                settled.set()
            self._publish(self.reducer.drop(me))

    def member(self, index: int) -> GroupMember:
        return self.group.members[index]

    async def contribute_own(self) -> None:
        """Add the own contribution to the own reducer, yielding to the event loop in between."""
        chunks = self.ledger.chunks[self.me] if self.member(self.me).weight > 0 else ()
        try:
            for index, chunk in enumerate(chunks):
                self._take(self.me, *self.encoded(self.me, index, chunk))
                await asyncio.sleep(0)
        except ValueError as error:  # the codec cannot encode it
            self.drop(self.me, str(error))

    async def talk_to(self, reducer: int) -> None:
        peer = self.member(reducer).id
        try:
            async with asyncio.timeout(None) as self._limits[reducer]:
                try:
                    await self._converse(reducer)
                except PeerLost:
                    if peer not in self.peers.linked():
                        raise
                    await self._converse(reducer)  # one of two links was lost, not the peer
        except (PeerError, TimeoutError, ValueError) as error:
            silent_s = loop_now() - self._heard_at[reducer]
            reason = str(error) or f"too slow: no mean for {silent_s:.1f} s"
            if isinstance(error, CallRefused):
                reason = f"refused: {reason}"
            logger.debug("reducer %s is lost: %s", short(peer), reason)
            self.trace.on_dropped(reducer, reason)
        finally:
            del self._limits[reducer]
            if self.ledger.lacking(reducer):
                self.lost.add(reducer)
            self.settled[reducer].set()

    async def _converse(self, reducer: int) -> None:
        opening = ReduceSpan(self.group.round_id)
        peer = self.member(reducer).id
        async with await self.peers.stream(peer, opening, timeout_s=self.settings.dial_timeout_s) as stream:
            require(self.peers.role_of(peer) >= Role.REDUCER, "its role does not let it reduce")
            upload = asyncio.create_task(self._contribute(stream, reducer))
            try:
                await self._collect(stream, reducer)
            finally:
                upload.cancel()

    async def _contribute(self, stream: Stream, reducer: int) -> None:
        try:
            await self._send_chunks(stream, reducer)
            await stream.end()
        except PeerError as error:  # `_collect` sees the same and acts on it
            logger.debug("contribution to span %d broke off: %s", reducer, error)
        finally:
            self._pace.on_over(reducer)
            wake(self._paced)

    async def _send_chunks(self, stream: Stream, reducer: int) -> None:
        chunks = self.ledger.chunks[reducer] if self.member(self.me).weight > 0 else ()
        clock = asyncio.get_running_loop().time
        try:
            for index, chunk in enumerate(chunks):
                if not self.ledger.settled(reducer, index):
                    while not self._pace.may_send(reducer, now=clock()):
                        await self._paced.wait()
                    message, payload = self.encoded(reducer, index, chunk)
                    self.trace.on_traffic("sent", reducer, clock())
                    await stream.send(message, payload)
                    self.trace.on_traffic("sent", reducer, clock())
                    self.sent_bytes += len(payload)
                if self._pace.on_chunk(reducer, index, now=clock()):
                    wake(self._paced)
        except ValueError as error:  # the codec cannot encode it; the reducer counts the rest as missing
            logger.warning("this peer contributes nothing more to the round: %s", error)

    def _codec_to(self, reducer: int, chunk: Span) -> Codec:
        """Return a contribution's codec: the own span's is exact, but that would make a sparse mean dense."""
        codec = self._precision.at(chunk.start)
        return codec if reducer != self.me or isinstance(codec, Sparse) else codec_of("float32")

    def encoded(self, reducer: int, index: int, chunk: Span) -> tuple[Chunk, Buffer]:
        """Return this peer's contribution to a chunk; raises ValueError if the codec refuses it."""
        codec = self._codec_to(reducer, chunk)
        values = self.ledger.values[chunk.start : chunk.stop]
        payload = codec.encode(values)
        feedback = self._encoding.feedback
        if feedback is not None and codec.name != "float32":
            arrived = codec.decode(payload, len(values), scratch=self._scratch)
            feedback.cut_off(chunk.start, values, arrived)
        name = "" if codec.name == self.group.terms.codec else codec.name
        return Chunk(index, codec=name), payload

    async def _collect(self, stream: Stream, reducer: int) -> None:
        clock = asyncio.get_running_loop().time
        for _ in self.ledger.chunks[reducer]:
            message, payload = await stream.receive(Chunk)
            self._heard_at[reducer] = now = clock()
            self.trace.on_traffic("means", reducer, now)
            self.received_bytes += len(payload)
            self.check_missing(message)
            mean = None
            numel = self.ledger.chunk(reducer, message.index).numel
            if len(payload):
                name = message.codec or self.group.terms.mean_codec
                if name == SPARSE16:
                    name = "float16"
                    payload = restore_zeros(payload, numel)
                mean = codec_of(name).decode(payload, numel, scratch=self._scratch)
                if not (rms := root_mean_square(mean)) < _LARGEST_MEAN * self.usual.most_rms:  # NaN, too
                    text = f"the mean of chunk {message.index} is not finite, or far too large: {rms:.3g}"
                    raise ValueError(text)  # the others recover the span
            self.ledger.place(reducer, message.index, mean, message.missing)

    def check_missing(self, mean: Chunk) -> None:
        """Raise ValueError if a mean lacks members that have nothing to contribute, or do not exist."""
        missing = frozenset(mean.missing)
        require(missing <= self._contributors, "its mean lacks members that contribute nothing")

    async def serve(self, stream: Stream, member: int) -> None:
        self._streaming.add(member)
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
        clock = asyncio.get_running_loop().time
        try:
            while True:
                message, payload = await stream.receive(Chunk)
                self._heard_at[member] = now = clock()
                self.trace.on_traffic("received", member, now)
                self.received_bytes += len(payload)
                self._take(member, message, payload)
        except StreamEnded:
            self.drop(member, "it ended before its last chunk")

    async def _return_means(self, stream: Stream) -> None:
        try:
            for sent in range(len(self.ledger.chunks[self.me])):
                while sent == len(self._means):
                    await self._more_means.wait()
                message, payload = self._means[sent]
                await stream.send(message, payload)
                self.sent_bytes += len(payload)
            await stream.end()
        except PeerError as error:
            logger.debug("means for %s broke off: %s", short(stream.peer), error)

    def release(self) -> None:
        """Free the memory of an averaged span that nobody reads; the vector has the means, for late members."""
        if self.serving or self.reducer.unfinished:
            return
        self.reducer.sums = [
            self.ledger.values[chunk.start : chunk.stop] for chunk in self.ledger.chunks[self.me]
        ]
        for at, (mean, payload) in enumerate(self._means):
            if len(payload) and (mean.codec or self.group.terms.mean_codec) == "float32":
                self._means[at] = mean, codec_of("float32").encode(self.reducer.sums[mean.index])
        self._released = True

    def _take(self, member: int, message: Chunk, payload: Buffer) -> None:
        chunks = self.ledger.chunks[self.me]
        index = message.index
        try:
            numel = chunks[index].numel if 0 <= index < len(chunks) else 0
            codec = codec_of(message.codec or self.group.terms.codec)
            values = codec.decode(payload, numel, scratch=self._scratch)
            if self.reducer.on_chunk(member, index, values):
                self._publish([index])
        except ValueError as error:
            self.drop(member, str(error))

    def drop(self, member: int, reason: str) -> None:
        """Continue without the chunks that ``member`` did not deliver."""
        if member in self.reducer.awaited():
            logger.debug("contributor %s is out: %s", short(self.member(member).id), reason)
            self.trace.on_dropped(member, reason)
            self._publish(self.reducer.drop(member))

    def _publish(self, finished: list[int]) -> None:
        if finished:
            self.trace.on_traffic("means", self.me, loop_now())
        for index in finished:
            mean = self.reducer.mean(index)
            missing = self.reducer.missing(index)
            payload: Buffer = b""
            codec = self._mean_precision.at(self.ledger.chunk(self.me, index).start)
            name = "" if codec.name == self.group.terms.mean_codec else codec.name
            if mean is not None:
                payload = codec.encode(mean)
                mean = codec.decode(payload, len(mean), scratch=self._scratch)
                if codec.name == "float16" and (shorter := drop_zeros(payload)):
                    name = SPARSE16
                    payload = shorter
            self.ledger.place(self.me, index, mean, missing)
            self._means.append((Chunk(index, True, missing, name), payload))
        wake(self._more_means)
        if not self.reducer.unfinished:
            self._own_at = loop_now()
            self.settled[self.me].set()
            self.final[self.me].set()

    async def watch(self) -> None:
        """Go on without each member that is later than usual by more than it has earned."""
        sleep_s = _TICK_S
        while True:
            slept_at = loop_now()
            await asyncio.sleep(sleep_s)
            wake(self._paced)  # a stream may have stalled
            now = loop_now()
            sleep_s = _TICK_S
            if now - slept_at > sleep_s + AWAKE_S:  # this process was stopped: the others are not late
                self._since += now - slept_at
                self._heard_at = dict.fromkeys(self._heard_at, now)
            for member in [one for one in self.reducer.awaited() if one != self.me]:
                left_s = self.patience_s(member, now) - self._lateness_s(member, now, self._since)
                if left_s <= 0:
                    self.drop(member, f"too slow: nothing came for {now - self._heard_at[member]:.1f} s")
                    silent = member not in self._streaming or self._line_silence_s(member, now) > 0
                    if silent and member in self._limits:
                        self._limits[member].reschedule(now)  # it does not reduce either
                sleep_s = min(sleep_s, max(left_s, _TICK_S / 10))
            for reducer, limit in self._limits.items():
                # It may wait for the same contributor as this peer.
                late_s = self._lateness_s(reducer, now, self._own_at) if self._own_at <= now else 0.0
                left_s = CHAINED * self.patience_s(reducer, now) - late_s
                if late_s and left_s <= 0:
                    limit.reschedule(now)
                sleep_s = min(sleep_s, max(left_s, _TICK_S / 10))

    def patience_s(self, member: int, now: float) -> float:
        """Return how long to wait for a member beyond the usual: not at all if it is gone."""
        peer = self.member(member).id
        gone = member in self.lost and member not in self._streaming and peer not in self.peers.linked()
        return 0.0 if gone else self.usual.standing.patience_s(peer, now)

    def limit_s(self, member: int) -> float:
        """Return how long to wait for what a member gives in a recovery."""
        usual_s = min(self.usual.round_s, self.settings.patience_s)
        slow_s = allowance_s(self.peers, self.member(member).id)
        return usual_s + slow_s + CHAINED * self.patience_s(member, loop_now())

    def _lateness_s(self, member: int, now: float, since: float) -> float:
        """Return, and note, for how long the round has waited for a member beyond the usual."""
        round_s = now - max(since, self._since + self.usual.round_s)
        if self.usual.round_s == math.inf:
            round_s = now - max(since, self._heard_at[member]) - self.settings.patience_s
        silent_s = min(self._line_silence_s(member, now), now - since)
        late_s = max(round_s, silent_s, 0.0)
        self.late_s[member] = max(self.late_s.get(member, 0.0), late_s)
        return late_s

    def _line_silence_s(self, member: int, now: float) -> float:
        """Return how much longer than a slow line explains nothing came of a member.

        One that did not begin has more time: the group may come to it over anybody's slow line.
        """
        slow = [member] if member in self._streaming else range(len(self.group.members))
        allowed_s = self.settings.silence_s + max(
            allowance_s(self.peers, self.member(one).id) for one in slow
        )
        return now - max(self._heard_at[member], self.peers.read_at(self.member(member).id)) - allowed_s

    def on_lost(self, peer: PeerId) -> None:
        """Drop a peer whose link is lost if it cannot be dialled and has opened no stream."""
        member = self.group.index_of(peer)
        if member is not None and not self.member(member).addresses and member not in self._streaming:
            self.drop(member, "its link is lost")
