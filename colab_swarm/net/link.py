"""An encrypted link to one peer: calls, streams and their handlers over a carrier and a `Mux`."""

from __future__ import annotations

import asyncio
import logging
import statistics
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import msgspec

from colab_swarm.errors import CallRefused, PeerError, PeerLost, PeerTimeout, ProtocolError
from colab_swarm.events import EventLog, Fault
from colab_swarm.net.carrier import Carrier, Cipher, LinkLimits, Remote, Traffic
from colab_swarm.net.frames import Frame, FrameKind
from colab_swarm.net.mux import Failure, Mux, Opening, encode_opening
from colab_swarm.net.peers import (
    MAX_MESSAGE_BYTES,
    UNDECODABLE,
    Buffer,
    Message,
    PeerId,
    R,
    Refusal,
    Role,
    short,
)
from colab_swarm.net.stream import LinkStream, decoder_of

Handler: TypeAlias = Callable[..., Awaitable[Any]]

_opening_decoder = msgspec.msgpack.Decoder(Opening)


@dataclass(frozen=True)
class Service:
    """A handler, the decoder of the message it takes, and the least role that it serves."""

    decoder: msgspec.msgpack.Decoder[Any]
    handler: Handler
    role: Role


class Unserved(Exception):
    """No handler can take this opening.

    Attributes:
        code: ``unknown``, ``invalid``, ``refused`` or ``busy``, as in `CallRefused`.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class ServiceTable:
    """Handlers by the name of the message's class."""

    def __init__(self) -> None:
        self._by_name: dict[str, Service] = {}

    def add(self, kind: type[Message], handler: Handler, role: Role) -> None:
        """Answer messages of ``kind`` by peers of ``role`` or above.

        Raises:
            ValueError: they are answered already.
        """
        if kind.__name__ in self._by_name:
            raise ValueError(f"{kind.__name__} is served already; unserve it first")
        self._by_name[kind.__name__] = Service(decoder_of(kind), handler, role)

    def remove(self, kind: type[Message]) -> None:
        """Stop answering ``kind``."""
        self._by_name.pop(kind.__name__, None)

    def find(self, encoded: memoryview, role: Role) -> tuple[Handler, Any]:
        """The handler that takes an encoded `Opening` of a peer of this role, and the decoded message in it.

        Raises:
            Unserved: nobody serves it, or not to this role, or it does not decode.
        """
        try:
            opening = _opening_decoder.decode(encoded)
        except UNDECODABLE as error:
            raise Unserved("invalid", f"undecodable message: {error}") from error
        return self.find_named(opening.name, opening.body, role)

    def find_named(self, name: str, body: Buffer, role: Role) -> tuple[Handler, Any]:
        """Like `find`, for the two parts of an opening.

        Raises:
            Unserved: see `find`.
        """
        service = self._by_name.get(name)
        if service is None:
            raise Unserved("unknown", f"{name[:100]} is not served here")
        if role < service.role:
            needed = f"{name} needs the role {service.role.name.lower()}"
            raise Unserved("refused", f"{needed}; yours is {role.name.lower()}: ask for another invitation")
        try:
            return service.handler, service.decoder.decode(body)
        except UNDECODABLE as error:
            raise Unserved("invalid", f"undecodable message: {error}") from error


logger = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
MAX_TASKS = 2048


class CallResponder:
    """Runs handlers for one link. A lost link cancels call handlers; stream handlers see `PeerLost` instead.

    Args:
        link: where answers go.
        services: those for calls and those for streams.
        events: gets a `Fault` when a handler fails.
    """

    def __init__(self, link: Link, services: tuple[ServiceTable, ServiceTable], events: EventLog) -> None:
        self._link, self._events = link, events
        self._call_services, self._stream_services = services
        self._calls: dict[int, asyncio.Task[None]] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    def on_call(self, id: int, opening: memoryview) -> None:
        """The peer calls."""
        try:
            self._require_room()
            handler, message = self._call_services.find(opening, self._link.remote.role)
        except Unserved as error:
            self._link.mux.fail(id, error.code, str(error))
        else:
            self._calls[id] = self._start(self._answer(id, handler, message))

    def on_open(self, stream: LinkStream, opening: memoryview) -> None:
        """The peer opens a stream."""
        try:
            self._require_room()
            handler, message = self._stream_services.find(opening, self._link.remote.role)
        except Unserved as error:
            self._link.mux.reset(stream.id, error.code, str(error))
        else:
            self._link.add_stream(stream)
            self._start(self._converse(stream, handler, message))

    def cancel(self, id: int) -> None:
        """The peer no longer wants the answer."""
        self._calls.pop(id).cancel()

    def on_lost(self) -> None:
        """There is nobody left to answer."""
        for task in self._calls.values():
            task.cancel()

    def _require_room(self) -> None:
        """What the peer gave up it may begin anew, while the handler of the old still runs."""
        if len(self.tasks) >= MAX_TASKS:
            raise Unserved("busy", f"{len(self.tasks)} handlers still run for this link")

    def _start(self, handling: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._link.touch()
        task = asyncio.get_running_loop().create_task(handling)
        self.tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._link.flush_soon()
        self._link.close_if_done()

    async def _answer(self, id: int, handler: Handler, message: Any) -> None:
        mux, peer = self._link.mux, self._link.peer
        try:
            body = _encoder.encode(await handler(peer, message))
            if len(body) > MAX_MESSAGE_BYTES:
                raise ValueError(f"a reply of {len(body)} bytes is over {MAX_MESSAGE_BYTES}")
            mux.reply(id, body)
        except Refusal as error:
            mux.fail(id, "refused", str(error))
        except asyncio.CancelledError:
            mux.fail(id, "failed", "the handler was cancelled")
            raise
        except Exception as error:
            self._report("call handler", error)
            mux.fail(id, "failed", f"{type(error).__name__}: {error}")
        finally:
            self._calls.pop(id, None)

    async def _converse(self, stream: LinkStream, handler: Handler, message: Any) -> None:
        try:
            await handler(message, stream)
            stream.leave()
        except Refusal as error:
            self._link.reset_stream(stream.id, "refused", str(error))
        except asyncio.CancelledError:
            stream.reset("the handler was cancelled")
            raise
        except PeerError as error:
            logger.debug("stream with %s ended early: %s", short(stream.peer), error)
            stream.reset(str(error))
        except Exception as error:
            self._report("stream handler", error)
            self._link.reset_stream(stream.id, "failed", f"{type(error).__name__}: {error}")

    def _report(self, where: str, error: Exception) -> None:
        logger.exception("%s failed, serving %s", where, short(self._link.peer))
        at = asyncio.get_running_loop().time()
        self._events.emit(Fault(at, where, f"{type(error).__name__}: {error}"))


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
        services: tuple[ServiceTable, ServiceTable],
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
        self._answers = CallResponder(self, services, events)
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
        if kind is FrameKind.ITEM:
            self._streams[id].on_item(frame.message, frame.payload)
        elif kind is FrameKind.CALL:
            self._answers.on_call(id, frame.message)
        elif kind is FrameKind.REPLY:
            answer = self._calls.pop(id)
            if not answer.done():
                answer.set_result(frame.message)
        elif kind is FrameKind.PONG:
            if len(frame.message) == _TOKEN.size:
                self.add_rtt(max(0.0, self._loop.time() - _TOKEN.unpack(frame.message)[0]))
        elif kind is FrameKind.LEAVING:
            self.leave()
        else:
            self._on_rare_frame(frame)
        self.close_if_done()

    def _on_rare_frame(self, frame: Frame) -> None:
        kind, id = frame.kind, frame.id
        if kind is FrameKind.ERROR:
            answer = self._calls.pop(id)
            if not answer.done():
                answer.set_exception(CallRefused(*self._failure(frame)))
        elif kind is FrameKind.CANCEL:
            self._answers.cancel(id)
        elif kind is FrameKind.OPEN:
            self._answers.on_open(LinkStream(self, id), frame.message)
        elif kind is FrameKind.CREDIT:
            self._streams[id].on_credit()
        elif kind is FrameKind.END:
            self._streams[id].on_end()
            self._forget_if_over(id)
        elif kind is FrameKind.RESET:
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
