"""An encrypted link to one peer: calls, streams and their handlers over a carrier and a `Mux`."""

from __future__ import annotations

import asyncio
import logging
import statistics
import struct
from collections import deque
from collections.abc import Callable
from functools import partial

from colab_swarm.errors import CallRefused, PeerLost, PeerTimeout, ProtocolError
from colab_swarm.events import EventLog
from colab_swarm.net.answers import Answers
from colab_swarm.net.carrier import Carrier, Cipher, LinkLimits, Remote, Traffic
from colab_swarm.net.frames import Frame, Kind
from colab_swarm.net.mux import Failure, Mux, encode_opening
from colab_swarm.net.peers import UNDECODABLE, Buffer, Message, PeerId, R, short
from colab_swarm.net.services import Services
from colab_swarm.net.stream import LinkStream, decoder_of

logger = logging.getLogger(__name__)
MAX_BACKLOG_BYTES = 64 << 20
RTT_SAMPLES = 5
LEAVE_TIMEOUT_S = 30.0
_TOKEN = struct.Struct("<d")


class Link:
    """One link. Lives from the end of the handshake until ``on_lost``.

    Args:
        remote: who is at the other end.
        carrier, cipher: how bytes travel and are sealed.
        dialled: whether this end opened the link.
        services: calls and streams this end answers, one registry each.
        traffic: meters and budgets.
        limits: bounds on counts.
        events: gets a `Fault` when a handler fails.
    """

    def __init__(
        self,
        remote: Remote,
        *,
        carrier: Carrier,
        cipher: Cipher,
        dialled: bool,
        services: tuple[Services, Services],
        traffic: Traffic,
        limits: LinkLimits,
        events: EventLog,
    ) -> None:
        self.remote, self.dialled = remote, dialled
        self.peer: PeerId = remote.contact.id
        self.mux = Mux(initiator=dialled, max_streams=limits.max_streams, max_calls=limits.max_calls)
        self._carrier, self._cipher, self._traffic, self._limits = carrier, cipher, traffic, limits
        self._loop = asyncio.get_running_loop()
        self.opened_at = self.heard_at = self.used_at = self._loop.time()
        self._rtts_s: deque[float] = deque(maxlen=RTT_SAMPLES)
        self._calls: dict[int, asyncio.Future[memoryview]] = {}
        self._streams: dict[int, LinkStream] = {}
        self._answers = Answers(self, services, events)
        self._flush_scheduled = False
        self._resume: asyncio.TimerHandle | None = None
        self._turn = asyncio.Lock()
        self._writable = asyncio.Event()
        self._writable.set()
        self.lost: str | None = None
        self.on_closed: Callable[[Link], None] = lambda link: None

    def __repr__(self) -> str:
        state = repr(self.mux) if self.lost is None else f"lost: {self.lost}"
        how = f"{self.remote.path}, {'dialled' if self.dialled else 'accepted'}"
        return f"Link({short(self.peer)}, {how}, {state})"

    @property
    def leaving(self) -> bool:
        """Whether the link takes no new calls or streams."""
        return self.lost is not None or self.mux.leaving or self.mux.peer_leaving

    @property
    def rtt_s(self) -> float | None:
        """Median of the last round-trip times, seconds."""
        return statistics.median(self._rtts_s) if self._rtts_s else None

    def add_rtt(self, rtt_s: float) -> None:
        """Count a measured round trip."""
        self._rtts_s.append(rtt_s)

    async def call(self, message: Message, reply: type[R], *, timeout_s: float) -> R:
        """See `Peers.call`."""
        opening = encode_opening(message)
        if len(self._calls) >= self._limits.max_calls:
            raise CallRefused("busy", f"{len(self._calls)} calls to {short(self.peer)} are pending already")
        self._require_open()
        id = self.mux.call(opening)
        self.flush_soon()
        answer = self._calls[id] = self._loop.create_future()
        timer = self._loop.call_later(timeout_s, self._expire, id, type(message).__name__, timeout_s)
        try:
            body = await answer
        except asyncio.CancelledError:
            self._give_up(id)
            raise
        finally:
            timer.cancel()
        try:
            return decoder_of(reply).decode(body)  # type: ignore[no-any-return]
        except UNDECODABLE as error:
            text = f"the answer of {short(self.peer)} is no {reply.__name__}: {error}"
            raise ProtocolError(text) from error

    def _expire(self, id: int, name: str, timeout_s: float) -> None:
        answer = self._give_up(id)
        if answer is not None and not answer.done():
            text = f"{short(self.peer)} did not answer {name} in {timeout_s:.3g} s"
            answer.set_exception(PeerTimeout(text))

    def _give_up(self, id: int) -> asyncio.Future[memoryview] | None:
        self.mux.cancel(id)
        self.flush_soon()
        return self._calls.pop(id, None)

    def open_stream(self, opening: Message) -> LinkStream:
        """Open a stream at once.

        Raises:
            PeerLost: the link is closed or closing.
        """
        self._require_open()
        stream = LinkStream(self, self.mux.open(encode_opening(opening)))
        self.add_stream(stream)
        return stream

    def add_stream(self, stream: LinkStream) -> None:
        """From now on, what comes for the stream goes to it."""
        self._streams[stream.id] = stream
        self.flush_soon()

    def _forget_if_over(self, id: int) -> None:
        if not self.mux.knows_stream(id):
            self._streams.pop(id, None)

    @property
    def ready(self) -> bool:
        """Whether bulk data may be sent now: the carrier has room and the budgets allow."""
        return self._writable.is_set() and (not self._traffic.upload or self._upload_delay() <= 0)

    async def wait_ready(self) -> None:
        """Return when `ready`, in the order of asking."""
        async with self._turn:
            while not self.ready:
                if not self._writable.is_set():
                    await self._writable.wait()
                else:
                    await asyncio.sleep(self._upload_delay())

    def send_item(self, id: int, message: bytes, payload: Buffer) -> None:
        """Seal and send an item now; ``payload`` may be reused afterwards."""
        self.touch()
        self.mux.send(id, message, payload)
        self._flush()

    def consumed(self, id: int, cost: int) -> None:
        """The application took an item."""
        self.mux.consumed(id, cost)
        self.flush_soon()

    def end_stream(self, id: int) -> None:
        """Say END."""
        self.mux.end(id)
        self._forget_if_over(id)
        self.flush_soon()

    def reset_stream(self, id: int, code: str, text: str) -> None:
        """Say RESET and forget the stream."""
        self.mux.reset(id, code, text)
        self._streams.pop(id, None)
        self.flush_soon()

    def touch(self) -> None:
        """The link is in use."""
        self.used_at = self._loop.time()

    def ping(self) -> None:
        """Measure the round trip."""
        self.mux.ping(_TOKEN.pack(self._loop.time()))
        self.flush_soon()

    def leave(self) -> None:
        """Take nothing new; close when what runs is done, at both ends."""
        if self.lost is None:
            if not self.mux.leaving:
                self.touch()
            self.mux.leave()
            self.flush_soon()
            self.close_if_done()

    def outstays(self, now: float) -> bool:
        """Whether this end left a quiet link long ago and the peer does not answer that it leaves too."""
        return self.mux.leaving and self.mux.quiet and now - self.used_at > LEAVE_TIMEOUT_S

    def close(self, reason: str) -> None:
        """Send what is queued, then close; calls and streams fail with `PeerLost`."""
        if self.lost is None:
            self._flush()
            self._carrier.close(reason)
            self._lose(reason)

    def abort(self, reason: str) -> None:
        """Close at once."""
        self._carrier.abort(reason)
        self._lose(reason)

    async def wait_closed(self, *, timeout_s: float) -> None:
        """Return when the carrier is closed and no handler runs; the carrier is aborted at the deadline."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._carrier.wait_closed()
        except TimeoutError:
            self._carrier.abort("the peer does not close")
            await self._carrier.wait_closed()

    def tasks(self) -> list[asyncio.Task[None]]:
        """Tasks of handlers that run now."""
        return list(self._answers.tasks)

    def on_message(self, data: memoryview) -> None:
        """The carrier received a sealed packet."""
        if self.lost is not None:
            return
        now = self.heard_at = self._loop.time()
        for meter in self._traffic.received:
            meter.add(len(data), now)
        try:
            for frame in self.mux.on_packet(self._cipher.open(data)):
                self._on_frame(frame)
                if self.lost is not None:
                    return
        except ProtocolError as error:
            logger.warning("link to %s broke the protocol: %s", short(self.peer), error)
            self.abort(str(error))
            return
        self.flush_soon()
        if self._traffic.download:
            self._throttle_download(len(data), now)

    def on_writable(self, writable: bool) -> None:
        """The carrier's buffer filled up, or has room again."""
        if writable:
            self._writable.set()
        else:
            self._writable.clear()

    def on_lost(self, reason: str) -> None:
        """The carrier is gone."""
        self._lose(reason)

    def _on_frame(self, frame: Frame) -> None:
        kind, id = frame.kind, frame.id
        if kind is Kind.ITEM:
            self._streams[id].on_item(frame.message, frame.payload)
        elif kind is Kind.CALL:
            self._answers.on_call(id, frame.message)
        elif kind is Kind.REPLY:
            answer = self._calls.pop(id)
            if not answer.done():
                answer.set_result(frame.message)
        elif kind is Kind.PONG:
            if len(frame.message) == _TOKEN.size:
                self.add_rtt(max(0.0, self._loop.time() - _TOKEN.unpack(frame.message)[0]))
        elif kind is Kind.LEAVING:
            self.leave()
        else:
            self._on_rare_frame(frame)
        self.close_if_done()

    def _on_rare_frame(self, frame: Frame) -> None:
        kind, id = frame.kind, frame.id
        if kind is Kind.ERROR:
            answer = self._calls.pop(id)
            if not answer.done():
                answer.set_exception(CallRefused(*self._failure(frame)))
        elif kind is Kind.CANCEL:
            self._answers.cancel(id)
        elif kind is Kind.OPEN:
            self._answers.on_open(LinkStream(self, id), frame.message)
        elif kind is Kind.CREDIT:
            self._streams[id].on_credit()
        elif kind is Kind.END:
            self._streams[id].on_end()
            self._forget_if_over(id)
        elif kind is Kind.RESET:
            code, text = self._failure(frame)
            reset = code == "reset"
            self._streams.pop(id).on_fault(PeerLost(f"reset by {text}") if reset else CallRefused(code, text))

    def _failure(self, frame: Frame) -> tuple[str, str]:
        try:
            failure: Failure = decoder_of(Failure).decode(frame.message)
        except UNDECODABLE as error:
            raise ProtocolError(f"an undecodable failure: {error}") from error
        return failure.code, f"{short(self.peer)}: {failure.text}"

    def _require_open(self) -> None:
        if self.leaving:
            raise PeerLost(f"the link to {short(self.peer)} is closed: {self.lost or 'leaving'}")
        self.touch()

    def flush_soon(self) -> None:
        """Flush once per turn of the event loop, so that what is queued together travels together."""
        if self.mux.queued and not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self.lost is not None:
            return
        for packet in self.mux.take():
            seal = partial(self._cipher.seal_into, packet)
            size = self._carrier.send(len(packet) + self._cipher.overhead_bytes, seal)
            now = self._loop.time()
            for meter in self._traffic.sent:
                meter.add(size, now)
            for bucket in self._traffic.upload:
                bucket.take(size, now)
        if self._carrier.backlog_bytes > MAX_BACKLOG_BYTES:
            self.abort(f"{MAX_BACKLOG_BYTES} bytes are waiting and the peer does not read")

    def _upload_delay(self) -> float:
        now = self._loop.time()
        return max(bucket.delay(now) for bucket in self._traffic.upload)

    def _throttle_download(self, size: int, now: float) -> None:
        for bucket in self._traffic.download:
            bucket.take(size, now)
        delay = max(bucket.delay(now) for bucket in self._traffic.download)
        if delay > 0:
            self._carrier.pause_reading()
            if self._resume is not None:  # an earlier message of the same read asked for a shorter pause
                self._resume.cancel()
            self._resume = self._loop.call_later(delay, self._carrier.resume_reading)

    def close_if_done(self) -> None:
        """Close if both ends are leaving and nothing runs."""
        if self.mux.leaving and self.mux.peer_leaving and self.mux.quiet and not self._answers.tasks:
            self.close("no longer needed")

    def _lose(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        text = f"the link to {short(self.peer)} is lost: {reason}"
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(PeerLost(text))
        for stream in self._streams.values():
            stream.on_fault(PeerLost(text))
        self._answers.on_lost()
        self._calls.clear()
        self._writable.set()
        self.on_closed(self)
