"""The carrier: aiohttp does the WebSocket handshake (RFC 6455), then the protocol in this module takes the socket over.

The bytes on the wire stay legal WebSocket frames, so every proxy for WebSockets lets them pass. But
aiohttp's Python code no longer handles each message. Received bytes go into one buffer that all
links of a loop share, because reading and parsing happen in one synchronous step. The client masks
with the key zero, which does not change the bytes. A mask protects proxies from chosen plaintext,
and these bytes are ciphertext, so a real mask is not needed.

The takeover loses no bytes, because the client sends nothing before the answer to its request, and the
server sends nothing before the client's first message: see `dial` and `accept`.
"""

import asyncio
import base64
import hashlib
import os
from collections.abc import Callable
from typing import NamedTuple

import aiohttp
from aiohttp import web

from colab_swarm.errors import PeerLost, ProtocolError, require
from colab_swarm.net.carrier import HostPort, Receiver

SCRATCH_BYTES = 1 << 19
MAX_MESSAGE_BYTES = 126 << 10
_MAX_CONTROL_BYTES = 125
HIGH_WATER_BYTES = 1 << 18
# Maximum time for a closed connection to send its queued bytes.
LINGER_S = 10.0
_NO_FAREWELL = "its connection ended without a farewell: it was killed, or has lost its network"
_SWITCH = (
    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Accept: {}\r\n\r\n"
)
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
# Opcodes of RFC 6455, section 5.2.
_TEXT = 1
_BINARY = 2
_CLOSE = 8
_PING = 9
_PONG = 10
_NO_MASKS = (b"", b"\0\0\0\0")
# The status code of a close frame (RFC 6455, section 7.4.1) that may be used for any reason.
_POLICY_VIOLATION = 1008


class Head(NamedTuple):
    """Header of a frame (RFC 6455 section 5.2): the mask, and where the body begins and ends."""

    final: bool
    opcode: int
    mask: bytes
    begin: int
    end: int


def read_head(data: memoryview, at: int) -> Head | None:
    """Return the header of the frame at ``at``; None if more bytes are needed. Raises `ProtocolError` if it is bad."""
    available = len(data) - at
    if available < 2:
        return None
    first = data[at]
    second = data[at + 1]
    length = second & 0x7F
    begin = at + 2
    # The lengths 126 and 127 mean that the real length follows, in 2 or in 8 bytes.
    if length >= 126:
        begin += 2 if length == 126 else 8
        if begin > len(data):
            return None
        length = int.from_bytes(data[at + 2 : begin], "big")
    opcode = first & 0x0F
    max_bytes = _MAX_CONTROL_BYTES if opcode & 8 else MAX_MESSAGE_BYTES
    # The bits of 0x70 belong to extensions, and no extension is agreed on.
    if first & 0x70 or length > max_bytes:
        raise ProtocolError(f"WebSocket frame {first:#x} of {length} bytes")
    mask = b""
    if second & 0x80:
        begin += 4
        if begin > len(data):
            return None
        mask = bytes(data[begin - 4 : begin])
    return Head(first & 0x80 != 0, opcode, mask, begin, begin + length)


def unmask(data: memoryview, mask: bytes) -> memoryview:
    """Return the body without its mask; no copy if the mask is zero."""
    if mask in _NO_MASKS:
        return data
    size = len(data)
    repeated = mask * (size // 4 + 1)
    key = int.from_bytes(repeated[:size], "big")
    body = int.from_bytes(data, "big") ^ key
    return memoryview(body.to_bytes(size, "big"))


def write_head(opcode: int, size: int, *, masked: bool) -> bytes:
    """Return the header of a final frame; masked with the key zero."""
    mask_bit = 0
    mask = b""
    if masked:
        mask_bit = 0x80
        mask = b"\0\0\0\0"
    if size < 126:
        length = bytes((mask_bit | size,))
    elif size < 1 << 16:
        length = bytes((mask_bit | 126,)) + size.to_bytes(2, "big")
    else:
        length = bytes((mask_bit | 127,)) + size.to_bytes(8, "big")
    return bytes((0x80 | opcode,)) + length + mask


def write_message(data: memoryview, out: memoryview) -> int:
    """Write the frame of a message as a server sends it, unmasked; return its size."""
    head = write_head(_BINARY, len(data), masked=False)
    end = len(head) + len(data)
    out[: len(head)] = head
    out[len(head) : end] = data
    return end


class WebSocket(asyncio.BufferedProtocol):
    """A connection that was taken over from aiohttp; aiohttp's protocol still gets ``connection_lost``.

    ``scratch`` is memory of `SCRATCH_BYTES` to receive into, shared by all connections of the loop.
    ``client`` is True at the end that dialled; this end must mask its frames. ``after_read`` is called when the
    receiver has received all messages of a read.
    """

    def __init__(
        self, transport: asyncio.Transport, *, scratch: memoryview, client: bool, receiver: Receiver
    ) -> None:
        self.receiver = receiver
        self.response: aiohttp.ClientResponse | None = None
        self._transport = transport
        self._scratch = scratch
        self._client = client
        # True while the other end, which dialled, has sent no message yet.
        self._awaits_first = not client
        # The beginning of a frame whose other bytes have not arrived.
        self._partial = b""
        self._fragments = bytearray()
        self._fragmented = False
        self._reason = ""
        self._linger: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.read_at = self._loop.time()
        self.after_read: Callable[[], None] = lambda: None
        self._closed = self._loop.create_future()
        self._previous = transport.get_protocol()
        transport.set_protocol(self)
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        transport.resume_reading()

    @property
    def remote_end(self) -> HostPort | None:
        end = self._transport.get_extra_info("peername")
        if not end:
            return None
        # A socket for both families puts ::ffff: before IPv4 addresses.
        return end[0].removeprefix("::ffff:"), end[1]

    @property
    def backlog_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def send(self, size: int, fill: Callable[[memoryview], None]) -> int:
        """Send a message of ``size`` bytes, which ``fill`` writes; return the number of bytes on the wire."""
        head = write_head(_BINARY, size, masked=self._client)
        message = bytearray(len(head) + size)
        message[: len(head)] = head
        fill(memoryview(message)[len(head) :])
        return self._write(message)

    def send_framed(self, frames: memoryview) -> bool:
        """Send complete frames made by `write_message`; return True if their memory may be reused immediately."""
        self._write(frames)
        return not self.backlog_bytes

    def send_bytes(self, data: bytes) -> int:
        return self._write(write_head(_BINARY, len(data), masked=self._client) + data)

    def _write(self, frames: bytes | bytearray | memoryview) -> int:
        if not self._transport.is_closing():
            self._transport.write(frames)
        return len(frames)

    def close(self, reason: str = "") -> None:
        """Send the queued bytes and ``reason`` (at most 123 bytes, not encrypted), then close."""
        if not self._transport.is_closing():
            code = _POLICY_VIOLATION.to_bytes(2, "big")
            self._control(_CLOSE, code + reason.encode()[: _MAX_CONTROL_BYTES - len(code)])
            self._transport.close()
            self._linger = self._loop.call_later(LINGER_S, self._transport.abort)

    def abort(self, reason: str = "") -> None:
        self._reason = self._reason or reason
        self._transport.abort()

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    def get_buffer(self, sizehint: int) -> memoryview:
        begin = len(self._partial)
        self._scratch[:begin] = self._partial
        return self._scratch[begin:]

    def buffer_updated(self, nbytes: int) -> None:
        self.read_at = self._loop.time()
        data = self._scratch[: len(self._partial) + nbytes]
        self._partial = b""
        at = 0
        try:
            while (head := read_head(data, at)) is not None and head.end <= len(data):
                self._on_frame(head, unmask(data[head.begin : head.end], head.mask))
                at = head.end
                if self._transport.is_closing():
                    break
        except ProtocolError as error:
            self.abort(str(error))
        else:
            self._partial = bytes(data[at:])
        # Called after the last read, too, because messages before the end count.
        self.after_read()

    def _on_frame(self, head: Head, body: memoryview) -> None:
        if head.opcode & 8:
            self._on_control(head.opcode, body)
        elif head.opcode == _TEXT or (head.opcode == 0) != self._fragmented:
            raise ProtocolError(f"unexpected WebSocket frame with opcode {head.opcode}")
        elif head.final and not self._fragmented:
            self._awaits_first = False
            self.receiver.on_message(body)
        else:
            self._awaits_first = False
            self._fragments += body
            self._fragmented = not head.final
            fits = len(self._fragments) <= MAX_MESSAGE_BYTES
            require(fits, "a fragmented WebSocket message is oversized", ProtocolError)
            if head.final:
                whole = self._fragments
                self._fragments = bytearray()
                self.receiver.on_message(memoryview(whole))

    def _on_control(self, opcode: int, body: memoryview) -> None:
        # Refused before the first message, because a stranger could send pings without end, and each answer would wait.
        if opcode != _CLOSE and self._awaits_first:
            raise ProtocolError(f"a control frame with opcode {opcode} before the first message")
        if opcode == _PING and self.backlog_bytes <= HIGH_WATER_BYTES:
            self._control(_PONG, bytes(body))
        elif opcode == _CLOSE:
            self._reason = bytes(body[2:]).decode(errors="replace") or "closed by the peer"
            self._transport.close()

    def _control(self, opcode: int, body: bytes) -> None:
        self._transport.write(write_head(opcode, len(body), masked=self._client) + body)

    def pause_writing(self) -> None:
        self.receiver.on_writable(False)

    def resume_writing(self) -> None:
        self.receiver.on_writable(True)

    def connection_lost(self, exc: Exception | None) -> None:
        # aiohttp waits for this call at both ends; else its session and its server would never finish closing.
        self._previous.connection_lost(exc)
        if self.response is not None:
            self.response.close()
        if self._linger is not None:
            self._linger.cancel()
        if not self._closed.done():
            self._closed.set_result(None)
        self.receiver.on_lost(self._reason or str(exc or "") or _NO_FAREWELL)


async def dial(
    session: aiohttp.ClientSession, address: str, *, scratch: memoryview, receiver: Receiver
) -> WebSocket:
    """Open a WebSocket to ``ws://host:port``. Send one message, then wait for the answer before you send the next.

    Raises `PeerLost` if no WebSocket server answered, else `aiohttp.ClientError` or `OSError`.
    """
    key = base64.b64encode(os.urandom(16)).decode()
    headers = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": key,
        # Without this header, ngrok's free plan may answer with a web page for people.
        "ngrok-skip-browser-warning": "1",
    }
    url = "http" + address.removeprefix("ws")
    response = await session.get(url, headers=headers, allow_redirects=False)
    transport = getattr(response.connection, "transport", None)
    if response.status != 101 or response.headers.get("Sec-WebSocket-Accept") != _accept_key(key):
        response.close()
        raise PeerLost(f"{address} opens no link: HTTP status {response.status} {response.reason}")
    if not isinstance(transport, asyncio.Transport):
        raise PeerLost(f"{address} closed the connection at once")
    websocket = WebSocket(transport, scratch=scratch, client=True, receiver=receiver)
    # The response is kept, because it closes the connection when it is garbage-collected.
    websocket.response = response
    return websocket


def accept(request: web.BaseRequest, *, scratch: memoryview, receiver: Receiver) -> WebSocket:
    """Upgrade an HTTP request; the client sends the first message.

    Bytes that came together with the request are dropped, because a client must wait for the answer (RFC 6455, section
    4.1). Raises `PeerLost` if this is no handshake of a WebSocket.
    """
    key = request.headers.get("Sec-WebSocket-Key", "")
    is_handshake = request.method == "GET" and request.headers.get("Sec-WebSocket-Version") == "13" and key
    transport = request.transport
    if not is_handshake or not isinstance(transport, asyncio.Transport):
        raise PeerLost("the client opens no WebSocket")
    # Made before the answer, because aiohttp would queue all frames that a stranger sends.
    websocket = WebSocket(transport, scratch=scratch, client=False, receiver=receiver)
    transport.write(_SWITCH.format(_accept_key(key)).encode())
    return websocket


def _accept_key(key: str) -> str:
    """Return the value with which a server answers a client's key (RFC 6455, section 4.2.2)."""
    return base64.b64encode(hashlib.sha1((key + _GUID).encode()).digest()).decode()
