"""An encrypted link to one peer: calls, streams and their handlers over a carrier and a `Mux`."""

import asyncio
import logging
import statistics
import struct
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from colab_swarm.errors import CallRefused, PeerError, PeerLost, PeerTimeout, ProtocolError
from colab_swarm.events import EventLog, Fault, Notice
from colab_swarm.markup import plain
from colab_swarm.net.carrier import LinkType, Loopback, Remote
from colab_swarm.net.mux import (
    ENCODER,
    FAILURE,
    MAX_CALLS,
    Frame,
    FrameKind,
    Handler,
    Mux,
    ServiceTable,
    decoder_of,
    encode_opening,
)
from colab_swarm.net.noise import TAG_BYTES
from colab_swarm.net.patience import LeftOut
from colab_swarm.net.peers import (
    MAX_MESSAGE_BYTES,
    UNDECODABLE,
    Buffer,
    M,
    Message,
    PeerId,
    R,
    Refusal,
    Stream,
    item_cost,
    short,
)
from colab_swarm.net.traffic import Traffic

if TYPE_CHECKING:
    from colab_swarm.net.websocket import WebSocket

logger = logging.getLogger(__name__)
# Maximum number of handlers of a link. A cancelled call frees its number before its handler has ended, so the limits
# of `Mux` are not enough.
MAX_TASKS = 2048
_MAX_BACKLOG_BYTES = 64 << 20
# Maximum length of an error text from the peer, which people will read.
_MAX_FAILURE_CHARS = 1000
_SIMULTANEOUS_S = 10.0
# If only this end leaves a link, and the link is unused, it is closed after this time.
LEAVE_TIMEOUT_S = 30.0
# Maximum number of unread bytes on all streams of one peer, and on all streams of the node.
PEER_UNREAD_BYTES = 16 << 20
UNREAD_BYTES = 256 << 20
RECOUNT_BYTES = 1 << 20
_TOKEN = struct.Struct("<d")


def fail(waiting: asyncio.Future[Any], error: Exception) -> None:
    """Let a future raise ``error``, unless it is done. It is no problem if no task waits for the future any more."""
    if not waiting.done():
        waiting.set_exception(error)
        # Reading the exception marks it as seen; else asyncio would log it.
        waiting.exception()


class Unread:
    """Limits the unread bytes of all streams of a node: `PEER_UNREAD_BYTES` for each peer, `UNREAD_BYTES` in all.

    If a limit is exceeded, the peer with the most unread bytes loses its fullest stream, which is reset as busy. The
    bytes are counted after each `RECOUNT_BYTES` received, when new handlers have begun. A stream does not count if a
    task waits for its items, because it is about to become empty.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._since_bytes = 0
        # Unlike a set, this keeps the order in which streams were added.
        self._streams: WeakKeyDictionary[Stream, None] = WeakKeyDictionary()
        self._named = LeftOut[PeerId](60.0, 3600.0)

    def add(self, stream: Stream, more_bytes: int) -> None:
        """Count bytes that a stream received."""
        stream.held_bytes += more_bytes
        self._streams[stream] = None
        self._since_bytes += more_bytes
        if self._since_bytes >= RECOUNT_BYTES:
            self._since_bytes = 0
            self._loop.call_soon(self._bound)

    def _bound(self) -> None:
        while True:
            unread = [stream for stream in self._streams if stream.held_bytes and stream.unread()]
            by_peer = Counter[PeerId]()
            for stream in unread:
                by_peer[stream.peer] += stream.held_bytes
            peer, most_bytes = max(by_peer.items(), key=lambda held: held[1], default=(None, 0))
            if most_bytes <= PEER_UNREAD_BYTES and by_peer.total() <= UNREAD_BYTES:
                break
            fullest = max(
                (stream for stream in unread if stream.peer == peer), key=lambda stream: stream.held_bytes
            )
            text = f"{short(fullest.peer)} sent {fullest.held_bytes / 2**20:.1f} MiB that nobody takes"
            fullest.reset("too much is unread", "busy")
            now = self._loop.time()
            if self._named.fail(fullest.peer, now) is not None:
                self._events.emit(Notice(now, f"{text}: its stream was reset"))
        self._streams = WeakKeyDictionary({stream: None for stream in self._streams if stream.held_bytes})


class Link:
    """One link, from the end of the handshake until ``on_lost``; ``dialled`` is True if this end opened it.

    If the link is lost, the handlers of the peer's calls are cancelled; the handlers of the peer's streams get
    `PeerLost` instead. ``services`` are the node's tables for calls and for streams. ``traffic`` counts and limits the
    bytes sent and received. If a handler fails, a `Fault` is emitted to ``events``. ``unread`` limits the bytes that
    were received and not read yet; all links of the node share this limit.
    """

    def __init__(
        self,
        remote: Remote,
        *,
        carrier: "WebSocket | Loopback",
        dialled: bool,
        services: tuple[ServiceTable, ServiceTable],
        traffic: tuple[Traffic, Traffic],
        events: EventLog,
        unread: Unread,
        on_closed: Callable[["Link"], None],
    ) -> None:
        self.remote = remote
        self.dialled = dialled
        self.peer: PeerId = remote.contact.id
        self.mux = Mux(partial(Stream, self), initiator=dialled)
        self.carrier = carrier
        self._keys = remote.keys
        self._events = events
        self._sent, self._received = traffic
        self._services = services
        self._unread = unread
        self._loop = asyncio.get_running_loop()
        self.opened_at = self._loop.time()
        self.used_at = self.opened_at
        self.rtts_s: deque[float] = deque(maxlen=5)
        # Tasks are cancelled in the order of their start, which a dict keeps, unlike a set.
        self.tasks: dict[asyncio.Task[None], None] = {}
        self._flush_scheduled = False
        self._resume: asyncio.TimerHandle | None = None
        self._turn = asyncio.Lock()
        self._writable = asyncio.Event()
        self._writable.set()
        self.lost: str | None = None
        self._on_closed = on_closed

    def __repr__(self) -> str:
        opening = "dialled" if self.dialled else "accepted"
        state = repr(self.mux) if self.lost is None else f"lost: {self.lost}"
        return f"Link({short(self.peer)}, {self.remote.path}, {opening}, {state})"

    @property
    def leaving(self) -> bool:
        """True if the link takes no new calls or streams."""
        return self.lost is not None or self.mux.leaving or self.mux.peer_leaving

    @property
    def rtt_s(self) -> float | None:
        """Median of the last round-trip times, seconds."""
        return statistics.median(self.rtts_s) if self.rtts_s else None

    async def call(self, message: Message, reply: type[R], *, timeout_s: float) -> R:
        """Call the peer: see `Node.call`."""
        opening = encode_opening(message)
        if len(self.mux.calls) >= MAX_CALLS:
            raise CallRefused("busy", f"{MAX_CALLS} calls to {short(self.peer)} are pending already")
        self._require_open()
        answer: asyncio.Future[memoryview] = self._loop.create_future()
        id = self.mux.call(opening, answer)
        self.flush_soon()
        # A separate timer takes 5 us less than asyncio.timeout.
        timer = self._loop.call_later(timeout_s, fail, answer, TimeoutError())
        try:
            return self.decode(reply, await answer)
        except TimeoutError:
            text = f"{short(self.peer)} did not answer {type(message).__name__} in {timeout_s:.3g} s"
            raise PeerTimeout(text) from None
        finally:
            timer.cancel()
            self.mux.cancel(id)
            self.flush_soon()

    def open_stream(self, opening: Message) -> Stream:
        """Open a stream immediately; raises `PeerLost` if the link is closed or closing."""
        self._require_open()
        stream = self.mux.open(encode_opening(opening))
        self.flush_soon()
        return stream

    @property
    def ready(self) -> bool:
        """True if bulk data may be sent now: the carrier has room, and the bandwidth limits allow it."""
        return self._writable.is_set() and self._sent.delay(self._loop.time()) <= 0

    async def wait_ready(self) -> None:
        """Wait until the link is `ready`; tasks continue in the order of their calls."""
        async with self._turn:
            while not self.ready:
                if not self._writable.is_set():
                    await self._writable.wait()
                else:
                    await asyncio.sleep(self._sent.delay(self._loop.time()))

    def send_item(self, stream: Stream, message: bytes, payload: Buffer) -> None:
        """Encrypt and send an item now; the memory of ``payload`` may be reused afterwards."""
        self.used_at = self._loop.time()
        self.mux.send(stream, message, payload)
        self._flush()

    def decode(self, kind: type[M], data: memoryview) -> M:
        """Decode a reply or an item of the peer; raises `ProtocolError`."""
        try:
            message: M = decoder_of(kind).decode(data)
            return message
        except UNDECODABLE as error:
            text = f"what {short(self.peer)} sent is not a valid {kind.__name__}: {error}"
            raise ProtocolError(text) from error

    def _on_opening(self, frame: Frame, stream: Stream) -> None:
        id = frame.id
        call_services, stream_services = self._services
        is_call = frame.kind is FrameKind.CALL
        services = call_services if is_call else stream_services
        try:
            if len(self.tasks) >= MAX_TASKS:
                raise CallRefused("busy", f"{len(self.tasks)} handlers still run for this link")
            handler, message = self.find_handler(services, frame.message)
        except CallRefused as error:
            refuse = self.mux.fail if is_call else self.mux.reset
            refuse(id, error.code, str(error))
            return
        if is_call:
            self.mux.serving[id] = self._start(self._answer(id, handler, message))
        else:
            self._unread.add(stream, len(frame.message))
            self._start(self._converse(stream, handler, message))

    def find_handler(self, services: ServiceTable, opening: memoryview) -> tuple[Handler, Any]:
        return services.find(opening, self.remote.role)

    def _start(self, handling: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.used_at = self._loop.time()
        task = self._loop.create_task(handling)
        self.tasks[task] = None
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        del self.tasks[task]
        self._close_if_done()

    async def _answer(self, id: int, handler: Handler, message: Any) -> None:
        try:
            reply = await handler(self.peer, message)
            body = ENCODER.encode(reply)
            if len(body) > MAX_MESSAGE_BYTES:
                raise ValueError(f"a reply of {len(body)} bytes is over {MAX_MESSAGE_BYTES}")
            self.mux.reply(id, body)
        except Refusal as error:
            self.mux.fail(id, "refused", str(error))
        except asyncio.CancelledError:
            self.mux.fail(id, "failed", "the handler was cancelled")
            raise
        except Exception as error:
            self.mux.fail(id, "failed", self._report("call handler", error))
        finally:
            # Scheduled now, because at the end of the task, other frames of this turn would be sent first.
            self.flush_soon()

    async def _converse(self, stream: Stream, handler: Handler, message: Any) -> None:
        try:
            await handler(message, stream)
            stream.leave()
        except Refusal as error:
            self.mux.reset(stream.id, "refused", str(error))
            self.flush_soon()
        except asyncio.CancelledError:
            stream.reset("the handler was cancelled")
            raise
        except PeerError as error:
            logger.debug("stream with %s ended early: %s", short(stream.peer), error)
            stream.reset(str(error))
        except Exception as error:
            self.mux.reset(stream.id, "failed", self._report("stream handler", error))
            self.flush_soon()

    def _report(self, where: str, error: Exception) -> str:
        logger.exception("%s failed, serving %s", where, short(self.peer))
        fault = Fault.of(self._loop.time(), where, error)
        self._events.emit(fault)
        return fault.text

    def ping(self) -> None:
        self.mux.ping(_TOKEN.pack(self._loop.time()))
        self.flush_soon()

    def leave(self) -> None:
        """Take no new calls or streams; the link closes when the present ones are over at both ends."""
        if self.lost is None:
            if not self.mux.leaving:
                self.used_at = self._loop.time()
            self.mux.leave()
            self.flush_soon()
            self._close_if_done()

    def close(self, reason: str) -> None:
        """Send the queued frames, then close the link; open calls and streams fail with `PeerLost`."""
        if self.lost is None:
            self._flush()
            self.carrier.close(reason)
            self.on_lost(reason)

    def abort(self, reason: str) -> None:
        self.carrier.abort(reason)
        self.on_lost(reason)

    async def wait_closed(self, *, timeout_s: float) -> None:
        """Wait until the carrier is closed; after ``timeout_s`` it is aborted."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.carrier.wait_closed()
        except TimeoutError:
            self.carrier.abort("the peer does not close")
            await self.carrier.wait_closed()

    def _require_open(self) -> None:
        if self.leaving:
            raise PeerLost(f"the link to {short(self.peer)} is closed: {self.lost or 'leaving'}")
        self.used_at = self._loop.time()

    def _close_if_done(self) -> None:
        # This runs for each frame, so the cheapest test, which is rarely true, comes first.
        if not (self.mux.leaving and self.mux.peer_leaving):
            return
        if self.mux.quiet and not self.tasks:
            self.close("no longer needed")

    def on_message(self, data: memoryview) -> None:
        if self.lost is not None:
            return
        now = self._loop.time()
        self._received.count(len(data), now)
        pause_s = self._received.delay(now)
        try:
            packet = data if self._keys is None else self._keys[1].decrypt(data)
            for frame, subject in self.mux.on_packet(packet):
                self._on_frame(frame, subject)
                if self.lost is not None:
                    return
        except ProtocolError as error:
            logger.warning("link to %s broke the protocol: %s", short(self.peer), error)
            self.abort(str(error))
            return
        self.flush_soon()
        if pause_s > 0:
            self.carrier.pause_reading()
            # An earlier message of the same read may have set a shorter pause.
            if self._resume is not None:
                self._resume.cancel()
            self._resume = self._loop.call_later(pause_s, self.carrier.resume_reading)

    def on_writable(self, writable: bool) -> None:
        if writable:
            self._writable.set()
        else:
            self._writable.clear()

    def on_lost(self, reason: str) -> None:
        """Let all calls and streams fail, because the carrier is gone. Idempotent."""
        if self.lost is not None:
            return
        self.lost = reason
        text = f"the link to {short(self.peer)} is lost: {reason}"
        for answer in self.mux.calls.values():
            fail(answer, PeerLost(text))
        for stream in self.mux.streams.values():
            stream.on_fault(PeerLost(text))
        for task in self.mux.serving.values():
            # In the simulator, a fault may come before the task is made.
            if task is not None:
                task.cancel()
        self._writable.set()
        self._on_closed(self)

    def _on_frame(self, frame: Frame, subject: Any) -> None:
        """Act on a frame; ``subject`` is the stream, the waiting call or the task that the frame concerns."""
        kind = frame.kind
        if kind is FrameKind.ITEM:
            subject.on_item(frame.message, frame.payload)
            self._unread.add(subject, item_cost(frame.message, frame.payload))
        elif kind is FrameKind.CALL or kind is FrameKind.OPEN:
            self._on_opening(frame, subject)
        elif kind is FrameKind.REPLY:
            if not subject.done():
                subject.set_result(frame.message)
        elif kind is FrameKind.PONG:
            if len(frame.message) == _TOKEN.size:
                (sent_at,) = _TOKEN.unpack(frame.message)
                self.rtts_s.append(max(0.0, self._loop.time() - sent_at))
        elif kind is FrameKind.LEAVING:
            self.leave()
        elif kind is FrameKind.CREDIT:
            subject.on_credit()
        elif kind is FrameKind.END:
            subject.wake()
        elif kind is FrameKind.CANCEL:
            subject.cancel()
        else:
            code, text = self._failure(frame)
            fault: PeerError = CallRefused(code, text)
            if kind is FrameKind.ERROR:
                fail(subject, fault)
            else:
                if code == "reset":
                    fault = PeerLost(f"reset by {text}")
                subject.on_fault(fault)
        self._close_if_done()

    def _failure(self, frame: Frame) -> tuple[str, str]:
        try:
            code, text = FAILURE.decode(frame.message)
        except UNDECODABLE as error:
            raise ProtocolError(f"an undecodable failure: {error}") from error
        lines = text[:_MAX_FAILURE_CHARS].split("\n")
        readable = "\n".join(map(plain, lines))
        return plain(code), f"{short(self.peer)}: {readable}"

    def flush_soon(self) -> None:
        """Send once per turn of the event loop, so that frames that are queued together share packets."""
        if self.mux.queue and not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self.lost is not None:
            return
        for packet in self.mux.take():
            if self._keys is None:
                size = self.carrier.send_bytes(packet)
            else:
                seal = partial(self._keys[0].encrypt_into, packet)
                size = cast("WebSocket", self.carrier).send(len(packet) + TAG_BYTES, seal)
            self._sent.count(size, self._loop.time())
        if self.carrier.backlog_bytes > _MAX_BACKLOG_BYTES:
            self.abort(f"{_MAX_BACKLOG_BYTES} bytes are waiting and the peer does not read")


class LinkTable:
    """The links of a node, by peer.

    As soon as two peers have a better link, they leave their relayed link, which closes when its calls and streams are
    over. If both peers dial at the same time, both use the link that the peer with the smaller id dialled. If a second
    link opens more than `_SIMULTANEOUS_S` after the first, it replaces the first, because the first no longer worked
    for the peer that dialled again.
    """

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._by_peer: dict[PeerId, list[Link]] = {}

    def __iter__(self) -> Iterator[Link]:
        # Copies are used, because other threads read the table.
        every_link: list[Link] = []
        for links in list(self._by_peer.values()):
            every_link += links
        return iter(every_link)

    def __len__(self) -> int:
        return sum(len(links) for links in self._by_peer.values())

    def peers(self) -> frozenset[PeerId]:
        return frozenset(self._by_peer)

    def of(self, peer: PeerId) -> list[Link]:
        return list(self._by_peer.get(peer, ()))

    def best(self, peer: PeerId) -> Link | None:
        """Return the link to use for a new call or stream, or None."""
        usable = [link for link in self._by_peer.get(peer, ()) if not link.leaving]
        # Most peers have only one link.
        if len(usable) == 1:
            return usable[0]
        if not usable:
            return None
        unrelayed = [link for link in usable if link.remote.path.way is not LinkType.RELAYED]
        rivals = unrelayed or usable
        newest_at = max(link.opened_at for link in rivals)
        simultaneous = [link for link in rivals if newest_at - link.opened_at < _SIMULTANEOUS_S]
        smaller_id_is_ours = self._own < peer

        def preference(link: Link) -> tuple[bool, float]:
            return link.dialled == smaller_id_is_ours, link.opened_at

        return max(simultaneous, key=preference)

    def add(self, link: Link) -> bool:
        """Add a link; return True if it is the first link to its peer."""
        links = self._by_peer.setdefault(link.peer, [])
        links.append(link)
        return len(links) == 1

    def remove(self, link: Link) -> bool:
        """Remove a link; return True if it was the last link to its peer."""
        links = self._by_peer.get(link.peer, [])
        if link in links:
            links.remove(link)
            if not links:
                del self._by_peer[link.peer]
                return True
        return False

    def full(self, limit: int) -> bool:
        """Return True if no link may be added: ``limit`` links are in use, or twice as many are not closed yet."""
        count = len(self)
        if count >= 2 * limit:
            return True
        return count >= limit and self.longest_unused() is None

    def longest_unused(self) -> Link | None:
        """Return the link without calls and streams that is unused for longest, or None."""
        quiet = [link for link in self if link.mux.quiet and not link.leaving]
        return min(quiet, key=lambda link: link.used_at, default=None)
