"""Frames: the plaintext of an encrypted packet. Free of I/O.

    packet   frames, each beginning at a multiple of 16 bytes; or one piece of a frame too big for a packet
    frame    header (16 bytes) | payload | message
    header   id u64 | payload length u32 | message length u24 | kind u8, little-endian

The payload follows the header at once, so a float32 payload is aligned in memory. A packet stays under 128
KiB, where glibc's malloc would turn to mmap and every packet would cost page faults. A frame over
`MAX_PACKET_BYTES` is cut into consecutive packets that carry nothing else.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from typing import NamedTuple

from colab_swarm.errors import ProtocolError
from colab_swarm.net.peers import MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES, Buffer

MAX_PACKET_BYTES = 124 << 10
HEADER = struct.Struct("<QII")
ALIGNMENT = 16


class FrameKind(enum.IntEnum):
    """Kind of a frame; its id is the number of the call or the stream."""

    CALL = 1  # message: Opening
    REPLY = 2  # message: the reply
    ERROR = 3  # message: Failure; the call failed
    CANCEL = 4  # the caller no longer wants the reply
    OPEN = 5  # message: Opening
    ITEM = 6  # message and payload
    END = 7  # the sender ended its side of the stream
    RESET = 8  # message: Failure; the stream is dropped both ways
    CREDIT = 9  # message: u32, more bytes that may be sent on the stream
    PING = 10  # message: anything, comes back as PONG
    PONG = 11
    LEAVING = 12  # no new calls or streams; the link closes when the present ones are done


_KINDS = {int(kind): kind for kind in FrameKind}


class Frame(NamedTuple):
    """One decoded frame; both parts are slices of the packet's own memory."""

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
        padding = -size % ALIGNMENT
        if gathered and size + padding + len(frame) > MAX_PACKET_BYTES:
            packets.append(b"".join(gathered))
            gathered, size, padding = [], 0, 0
        if len(frame) > MAX_PACKET_BYTES:
            packets += [frame[at : at + MAX_PACKET_BYTES] for at in range(0, len(frame), MAX_PACKET_BYTES)]
            continue
        gathered += (bytes(padding), frame) if padding else (frame,)
        size += padding + len(frame)
    if gathered:
        packets.append(gathered[0] if len(gathered) == 1 else b"".join(gathered))
    return packets


class FrameReader:
    """Cuts packets back into frames; bounds lengths before it allocates memory."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._filled = 0

    def read(self, packet: Buffer) -> list[Frame]:
        """Return the frames that this packet completes.

        Raises:
            ProtocolError: truncated, oversized or unknown frames.
        """
        if self._partial:
            return self._continue(packet)
        view = memoryview(packet)
        frames: list[Frame] = []
        at, end = 0, len(view)
        while at < end:
            kind, id, message_bytes, payload_bytes = _read_header(view, at)
            content_at = at + HEADER.size
            message_at = content_at + payload_bytes
            at = message_at + message_bytes
            if at > end:
                self._begin(view, at - content_at + HEADER.size, alone=not frames)
                return frames
            frames.append(Frame(kind, id, view[message_at:at], view[content_at:message_at]))
            at += -at % ALIGNMENT
        return frames

    def _begin(self, view: memoryview, frame_bytes: int, *, alone: bool) -> None:
        if not alone or len(view) != MAX_PACKET_BYTES:
            raise ProtocolError(f"a frame of {frame_bytes} bytes is truncated")
        self._partial = bytearray(frame_bytes)
        self._partial[: len(view)] = view
        self._filled = len(view)

    def _continue(self, packet: Buffer) -> list[Frame]:
        filled = self._filled + len(packet)
        if filled > len(self._partial) or (filled < len(self._partial) and len(packet) != MAX_PACKET_BYTES):
            raise ProtocolError(f"{len(packet)} bytes do not continue a frame of {len(self._partial)} bytes")
        self._partial[self._filled : filled] = packet
        self._filled = filled
        if filled < len(self._partial):
            return []
        whole = memoryview(self._partial)
        self._partial = bytearray()
        kind, id, message_bytes, _ = _read_header(whole, 0)
        message_at = len(whole) - message_bytes
        return [Frame(kind, id, whole[message_at:], whole[HEADER.size : message_at])]


def _read_header(view: memoryview, at: int) -> tuple[FrameKind, int, int, int]:
    if len(view) - at < HEADER.size:
        raise ProtocolError("a frame header is truncated")
    id, payload_bytes, packed = HEADER.unpack_from(view, at)
    kind, message_bytes = _KINDS.get(packed & 0xFF), packed >> 8
    if kind is None:
        raise ProtocolError(f"unknown frame kind {packed & 0xFF}")
    max_payload_bytes = MAX_PAYLOAD_BYTES if kind is FrameKind.ITEM else 0
    if message_bytes > MAX_MESSAGE_BYTES or payload_bytes > max_payload_bytes:
        raise ProtocolError(f"oversized {kind.name} frame: {message_bytes} and {payload_bytes} bytes")
    return kind, id, message_bytes, payload_bytes
