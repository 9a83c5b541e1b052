"""Many calls and streams over one ordered link. Free of I/O: methods queue frames, and `take` packs them.

Rules:
- The end that dialled numbers its calls and streams 1, 3, 5 …, the other end 2, 4, 6 …; numbers only grow.
- A stream's receiver grants credit in bytes. An item may be sent while the credit is above zero, even if the item
  is larger than the credit. So at most `STREAM_WINDOW_BYTES` and one item of a stream wait
  at the receiver. `Unread` limits the sum over all streams.
- Each end may send on a stream until it has sent END. The stream is over after both ENDs or one RESET.
- A frame for a call or stream that is over is dropped. A frame with a number that was never used breaks the protocol.

`ServiceTable` finds the handler for a call or a stream that the peer opens.

Frames are the plaintext of an encrypted packet:

    packet   frames, each beginning at a multiple of 16 bytes; or one piece of a frame that is too big for a packet
    frame    header (16 bytes) | payload | message
    header   id u64 | payload length u32 | message length u24 | kind u8, little-endian

The payload follows directly after the header, so a float32 payload is aligned in memory. A packet stays
under 128 KiB, because from there on glibc's malloc uses mmap, and every packet would cost page faults. A
frame over `MAX_PACKET_BYTES` is cut into consecutive packets that contain nothing else.
"""

import enum
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import msgspec

from colab_swarm.errors import CallRefused, ProtocolError, require
from colab_swarm.net.peers import (
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    STREAM_WINDOW_BYTES,
    UNDECODABLE,
    Buffer,
    Message,
    Role,
    Stream,
    item_cost,
)

MAX_PACKET_BYTES = 124 << 10
HEADER = struct.Struct("<QII")
_ALIGNMENT = 16


class FrameKind(enum.IntEnum):
    """Kind of a frame; its id is the number of the call or the stream."""

    CALL = 1  # message: `_OPENING`
    REPLY = 2  # message: the reply
    ERROR = 3  # message: `FAILURE`; the call failed
    CANCEL = 4  # the caller no longer wants the reply
    OPEN = 5  # message: `_OPENING`
    ITEM = 6  # message and payload
    END = 7  # the sender ended its side of the stream
    RESET = 8  # message: `FAILURE`; the stream is dropped both ways
    CREDIT = 9  # message: u32, more bytes that may be sent on the stream
    PING = 10  # message: any bytes, which the other end returns in a PONG
    PONG = 11
    LEAVING = 12  # no new calls or streams; the link closes when the present ones are done


_KINDS = {int(kind): kind for kind in FrameKind}


class Frame(NamedTuple):
    """One decoded frame; message and payload are slices of the packet's memory."""

    kind: FrameKind
    id: int
    message: memoryview
    payload: memoryview


def encode(kind: int, id: int, message: Buffer = b"", payload: Buffer = b"") -> bytes:
    """Return the bytes of one frame (copies its parts)."""
    return b"".join((HEADER.pack(id, len(payload), len(message) << 8 | kind), payload, message))


def to_packets(frames: Iterable[bytes]) -> list[bytes]:
    """Pack frames into as few packets as their order allows; a frame alone in its packet is not copied."""
    packets: list[bytes] = []
    gathered: list[bytes] = []
    size = 0
    for frame in frames:
        padding = -size % _ALIGNMENT
        if gathered and size + padding + len(frame) > MAX_PACKET_BYTES:
            packets.append(b"".join(gathered))
            gathered = []
            size = 0
            padding = 0
        if len(frame) > MAX_PACKET_BYTES:
            packets += [frame[at : at + MAX_PACKET_BYTES] for at in range(0, len(frame), MAX_PACKET_BYTES)]
            continue
        if padding:
            gathered.append(bytes(padding))
        gathered.append(frame)
        size += padding + len(frame)
    if gathered:
        packets.append(gathered[0] if len(gathered) == 1 else b"".join(gathered))
    return packets


class FrameReader:
    """Cuts packets back into frames; it checks all lengths before it allocates memory."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._frame_bytes = 0

    def read(self, packet: Buffer) -> list[Frame]:
        """Return the frames that this packet completes; `ProtocolError` if one is bad."""
        if self._partial:
            return self._continue(packet)
        view = memoryview(packet)
        frames: list[Frame] = []
        at = 0
        end = len(view)
        while at < end:
            kind, id, message_bytes, payload_bytes = _read_header(view, at)
            content_at = at + HEADER.size
            message_at = content_at + payload_bytes
            at = message_at + message_bytes
            if at > end:
                self._frame_bytes = at - content_at + HEADER.size
                if frames or end != MAX_PACKET_BYTES:
                    raise ProtocolError(f"a frame of {self._frame_bytes} bytes is truncated")
                self._partial = bytearray(view)
                break
            frames.append(Frame(kind, id, view[message_at:at], view[content_at:message_at]))
            at += -at % _ALIGNMENT
        return frames

    def _continue(self, packet: Buffer) -> list[Frame]:
        self._partial += packet
        missing_bytes = self._frame_bytes - len(self._partial)
        if missing_bytes < 0 or (missing_bytes and len(packet) != MAX_PACKET_BYTES):
            raise ProtocolError(f"{len(packet)} bytes do not continue a frame of {self._frame_bytes} bytes")
        if missing_bytes:
            return []
        whole = self._partial
        self._partial = bytearray()
        return self.read(whole)


def _read_header(view: memoryview, at: int) -> tuple[FrameKind, int, int, int]:
    if len(view) - at < HEADER.size:
        raise ProtocolError("a frame header is truncated")
    id, payload_bytes, packed = HEADER.unpack_from(view, at)
    kind = _KINDS.get(packed & 0xFF)
    message_bytes = packed >> 8
    if kind is None:
        raise ProtocolError(f"unknown frame kind {packed & 0xFF}")
    # Only items have a payload.
    max_payload_bytes = MAX_PAYLOAD_BYTES if kind is FrameKind.ITEM else 0
    if message_bytes > MAX_MESSAGE_BYTES or payload_bytes > max_payload_bytes:
        raise ProtocolError(f"oversized {kind.name} frame: {message_bytes} and {payload_bytes} bytes")
    return kind, id, message_bytes, payload_bytes


# Maximum number of streams and of calls that a peer may have open; a hostile peer would open many.
MAX_STREAMS = 256
MAX_CALLS = 1024
_MAX_CREDIT_BYTES = 1 << 31
_MAX_PING_BYTES = 32
# An error text is cut to this length.
_MAX_TEXT_CHARS = 1000
_U32 = struct.Struct("<I")
ENCODER = msgspec.msgpack.Encoder()
Handler: TypeAlias = Callable[..., Awaitable[Any]]
# The name of a message's type, and the message.
_OPENING = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
# A code, of `CallRefused` or ``reset``, and a text.
FAILURE = msgspec.msgpack.Decoder(tuple[str, str])


@lru_cache(maxsize=1024)
def decoder_of(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


class ServiceTable:
    """Handlers by the name of the message's class."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[msgspec.msgpack.Decoder[Any], Handler, Role]] = {}

    def add(self, kind: type[Message], handler: Handler, role: Role) -> None:
        """Answer messages of ``kind`` from ``role`` or above; ValueError if the name is served already."""
        name = kind.__name__
        require(name not in self._by_name, f"a handler of {name} serves already; unserve it first")
        self._by_name[name] = (decoder_of(kind), handler, role)

    def remove(self, kind: type[Message]) -> None:
        self._by_name.pop(kind.__name__, None)

    def find(self, encoded: Buffer, role: Role) -> tuple[Handler, Any]:
        """Return the handler for an encoded opening, and its message; raises `CallRefused` if there is no handler."""
        try:
            name, body = _OPENING.decode(encoded)
            if name not in self._by_name:
                raise CallRefused("unknown", f"{name[:100]} is not served here")
            decoder, handler, least = self._by_name[name]
            if role < least:
                needed = f"{name} needs the role {least.name.lower()}; yours is {role.name.lower()}"
                raise CallRefused("refused", f"{needed}: ask for another invitation")
            return handler, decoder.decode(body)
        except UNDECODABLE as error:
            raise CallRefused("invalid", f"undecodable message: {error}") from error


class Mux:
    """The streams and calls at one end of a link; ``initiator`` is True at the end that dialled.

    If the peer opens more than `MAX_STREAMS` streams or `MAX_CALLS` calls, the others are refused as ``busy``.

    Attributes:
        streams: the open streams by number, made by ``make_stream(id)``.
        calls: for each call to the peer, the object that waits for its reply.
        serving: for each call of the peer, the object that answers it; None until the application sets it.
    """

    def __init__(self, make_stream: Callable[[int], Stream], *, initiator: bool) -> None:
        self._make_stream = make_stream
        self._next_id = 1 if initiator else 2
        self._last_theirs = 0 if initiator else -1
        self._reader = FrameReader()
        self.queue: list[bytes] = []
        self.streams: dict[int, Stream] = {}
        self._their_streams = 0
        self.calls: dict[int, Any] = {}
        self.serving: dict[int, Any] = {}
        self.leaving = False
        self.peer_leaving = False

    def __repr__(self) -> str:
        state = f"calls={len(self.calls)}, serving={len(self.serving)}, streams={len(self.streams)}"
        if self.leaving or self.peer_leaving:
            state += ", leaving"
        return f"Mux({state})"

    @property
    def quiet(self) -> bool:
        """True if no call or stream is open in either direction."""
        return not (self.calls or self.serving or self.streams)

    def take(self) -> list[bytes]:
        """Return the queued frames as packets, in order."""
        frames = self.queue
        self.queue = []
        return to_packets(frames)

    def call(self, opening: bytes, waiting: Any) -> int:
        """Queue a call with an encoded opening; return its number. `on_packet` yields ``waiting`` with the reply."""
        id = self._new_id()
        self.calls[id] = waiting
        self.queue.append(encode(FrameKind.CALL, id, opening))
        return id

    def cancel(self, id: int) -> None:
        """Give up a call: the peer's handler is cancelled, and a late reply is dropped."""
        if id in self.calls:
            del self.calls[id]
            self.queue.append(encode(FrameKind.CANCEL, id))

    def reply(self, id: int, body: bytes, kind: FrameKind = FrameKind.REPLY) -> None:
        """Answer a call of the peer, unless it was cancelled."""
        if id in self.serving:
            del self.serving[id]
            self.queue.append(encode(kind, id, body))

    def fail(self, id: int, code: str, text: str) -> None:
        """Answer a call of the peer with an error, unless it was cancelled."""
        self.reply(id, _failure(code, text), FrameKind.ERROR)

    def open(self, opening: bytes) -> Stream:
        """Open a stream with an encoded opening."""
        id = self._new_id()
        stream = self.streams[id] = self._make_stream(id)
        self.queue.append(encode(FrameKind.OPEN, id, opening))
        return stream

    def send(self, stream: Stream, message: bytes, payload: Buffer) -> None:
        """Queue an item; the stream must be open and have credit."""
        assert stream.id in self.streams and stream.credit_bytes > 0 and not stream.sent_end
        stream.credit_bytes -= item_cost(message, payload)
        self.queue.append(encode(FrameKind.ITEM, stream.id, message, payload))

    def consumed(self, stream: Stream, cost: int) -> None:
        """Grant credit for an item that the application took.

        Credit is granted in steps of an eighth of a window, so that equal senders stay equally fast.
        """
        if stream.got_end or stream.id not in self.streams:
            return
        stream.consumed_bytes += cost
        if stream.consumed_bytes >= STREAM_WINDOW_BYTES // 8:
            self.queue.append(encode(FrameKind.CREDIT, stream.id, _U32.pack(stream.consumed_bytes)))
            stream.window_bytes += stream.consumed_bytes
            stream.consumed_bytes = 0

    def end(self, stream: Stream) -> None:
        """End this side of the stream. Idempotent."""
        if not stream.sent_end and stream.id in self.streams:
            self.queue.append(encode(FrameKind.END, stream.id))
            if stream.got_end:
                self._forget(stream.id)
        stream.sent_end = True

    def reset(self, id: int, code: str = "reset", text: str = "") -> None:
        """Drop the stream in both directions. Idempotent."""
        if id in self.streams:
            self._forget(id)
            self.queue.append(encode(FrameKind.RESET, id, _failure(code, text)))

    def ping(self, token: bytes) -> None:
        """Request a PONG that carries ``token``."""
        self.queue.append(encode(FrameKind.PING, 0, token))

    def leave(self) -> None:
        """Start no new calls or streams; the link closes when all are over. Idempotent."""
        if not self.leaving:
            self.leaving = True
            self.queue.append(encode(FrameKind.LEAVING, 0))

    def on_packet(self, packet: Buffer) -> Iterator[tuple[Frame, Any]]:
        """Take a packet from the peer; yield the frames for the application. Close the link on `ProtocolError`.

        With each frame comes the stream that it concerns, or the object that waits for or answers its call; else True.
        Act on each frame before you take the next one, because a call or stream that is over gets no further frames.
        """
        for frame in self._reader.read(packet):
            subject = self._admit(frame)
            if subject is not None:
                yield frame, subject

    def _admit(self, frame: Frame) -> Any:
        """Return the stream or object that a frame concerns; None if the frame is dropped."""
        kind = frame.kind
        if kind is FrameKind.ITEM:
            return self._on_item(frame)
        if kind is FrameKind.CALL or kind is FrameKind.OPEN:
            return self._on_opening(frame)
        if kind is FrameKind.REPLY or kind is FrameKind.ERROR:
            return self._remove(self.calls, frame.id)
        if kind is FrameKind.CANCEL:
            return self._remove(self.serving, frame.id)
        if kind is FrameKind.PING:
            if len(frame.message) > _MAX_PING_BYTES:
                raise ProtocolError(f"a ping of {len(frame.message)} bytes")
            self.queue.append(encode(FrameKind.PONG, 0, frame.message))
            return None
        if kind is FrameKind.PONG:
            return True
        if kind is FrameKind.LEAVING:
            self.peer_leaving = True
            return True
        return self._on_stream_control(frame)

    def _on_opening(self, frame: Frame) -> Any:
        id = frame.id
        if id <= self._last_theirs or self._is_ours(id):
            raise ProtocolError(f"{frame.kind.name} with number {id} after {self._last_theirs}")
        self._last_theirs = id
        if frame.kind is FrameKind.CALL:
            self.serving[id] = None
            if len(self.serving) > MAX_CALLS:
                self.fail(id, "busy", f"{MAX_CALLS} calls are pending on this link")
                return None
            return True
        stream = self.streams[id] = self._make_stream(id)
        self._their_streams += 1
        if self._their_streams > MAX_STREAMS:
            self.reset(id, "busy", f"{MAX_STREAMS} streams are open on this link")
            return None
        return stream

    def _on_item(self, frame: Frame) -> Stream | None:
        stream = self._stream(frame)
        if stream is None:
            return None
        if stream.got_end:
            raise ProtocolError(f"an item on stream {frame.id} after its end")
        if stream.window_bytes <= 0:
            raise ProtocolError(f"an item on stream {frame.id} without credit")
        stream.window_bytes -= item_cost(frame.message, frame.payload)
        return stream

    def _on_stream_control(self, frame: Frame) -> Stream | None:
        stream = self._stream(frame)
        if stream is None:
            return None
        if frame.kind is FrameKind.RESET:
            self._forget(frame.id)
        elif frame.kind is FrameKind.END:
            if stream.got_end:
                raise ProtocolError(f"a second end of stream {frame.id}")
            stream.got_end = True
            if stream.sent_end:
                self._forget(frame.id)
        else:
            if len(frame.message) != _U32.size:
                raise ProtocolError("a credit frame of the wrong size")
            (more_bytes,) = _U32.unpack(frame.message)
            stream.credit_bytes += more_bytes
            if stream.credit_bytes > _MAX_CREDIT_BYTES:
                raise ProtocolError(f"stream {frame.id} got credit for {stream.credit_bytes} bytes")
        return stream

    def _stream(self, frame: Frame) -> Stream | None:
        stream = self.streams.get(frame.id)
        if stream is None:
            self._require_opened(frame.id)
        return stream

    def _remove(self, pending: dict[int, Any], id: int) -> Any:
        if id not in pending:
            self._require_opened(id)
        return pending.pop(id, None)

    def _require_opened(self, id: int) -> None:
        last_id = self._next_id - 1 if self._is_ours(id) else self._last_theirs
        if not 0 < id <= last_id:
            raise ProtocolError(f"a frame names call or stream {id}, which was never opened")

    def _is_ours(self, id: int) -> bool:
        return id % 2 == self._next_id % 2

    def _forget(self, id: int) -> None:
        del self.streams[id]
        if not self._is_ours(id):
            self._their_streams -= 1

    def _new_id(self) -> int:
        self._next_id += 2
        return self._next_id - 2


def encode_opening(message: Message) -> bytes:
    """Return an encoded opening with this message; raises `ValueError` if the opening is too big."""
    opening = ENCODER.encode((type(message).__name__, message))
    if len(opening) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(opening)} bytes is over {MAX_MESSAGE_BYTES}")
    return opening


def _failure(code: str, text: str) -> bytes:
    # The text of an exception may contain surrogates, which UTF-8 cannot encode.
    encodable = text[:_MAX_TEXT_CHARS].encode(errors="replace").decode()
    return ENCODER.encode((code, encodable))
