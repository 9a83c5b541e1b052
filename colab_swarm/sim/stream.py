"""A stream over a simulated link, with the same credit, limits and endings as a real one."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import cache, partial
from types import TracebackType
from typing import Any, Self

import msgspec

from colab_swarm.errors import PeerError, PeerLost, ProtocolError
from colab_swarm.net.mux import STREAM_WINDOW_BYTES, item_cost
from colab_swarm.net.peers import (
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    UNDECODABLE,
    Buffer,
    M,
    Message,
    PeerId,
    StreamEnded,
)
from colab_swarm.sim.link import Connection, Link

BACKLOG_BYTES = 1 << 18
"""What a stream may queue at its sender's connection: a socket's buffers are as small."""


@cache
def _decoder(kind: type[Message]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def encode(message: Message) -> bytes:
    """The message as it would be on the wire.

    Raises:
        ValueError: it is over `MAX_MESSAGE_BYTES`.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} takes {len(body)} bytes, limit {MAX_MESSAGE_BYTES}")
    return body


def decode(body: bytes, kind: type[M]) -> M:
    """Read a message of type ``kind`` from the wire.

    Raises:
        ProtocolError: it is none.
    """
    try:
        message: M = _decoder(kind).decode(body)
        return message
    except UNDECODABLE as error:
        raise ProtocolError(f"not a valid {kind.__name__}: {error}") from error


class SimStream:
    """One end of a stream; ``twin`` is the other."""

    twin: SimStream

    def __init__(self, link: Link, end: Connection, peer: PeerId) -> None:
        self._link, self._end, self._peer = link, end, peer
        self._inbox: deque[tuple[bytes, bytes]] = deque()
        self._error: PeerError | None = None
        self._ended = self._peer_ended = self._discarding = False
        self._unread_bytes = 0  # what items not yet known to be read take from our credit
        self._read_bytes = 0  # the same of those that we read, not yet told
        self._waiting: list[asyncio.Future[None]] = []
        self._leaving: deque[tuple[float, int]] = deque()  # when its last bit leaves, size_bytes
        self._leaving_bytes = 0
        link.guests[self] = None

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        return self._peer

    async def send(self, message: Message, payload: Buffer = b"") -> None:
        """See `Stream.send`; waits while the receiver has much to read, or the connection much to carry."""
        body, data = encode(message), bytes(payload)
        if len(data) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"payload of {len(data)} bytes, limit {MAX_PAYLOAD_BYTES}")
        self._check_sending()
        while self._unread_bytes >= STREAM_WINDOW_BYTES:
            await self._wait()
            self._check_sending()
        await self._wait_ready()
        self._check_sending()
        self._unread_bytes += item_cost(body, data)
        size_bytes = len(body) + len(data)
        on_item = partial(self.twin._on_item, body, data)
        left_at = self._link.carry(self._end, size_bytes, on_item, message=message)
        self._leaving.append((left_at, size_bytes))
        self._leaving_bytes += size_bytes

    async def _wait_ready(self) -> None:
        """Wait while much of this stream has not left this peer."""
        clock = asyncio.get_running_loop().time
        while self._leaving_bytes > BACKLOG_BYTES and self._error is None:
            left_at, size_bytes = self._leaving.popleft()
            self._leaving_bytes -= size_bytes
            if left_at > clock():
                await asyncio.sleep(left_at - clock())

    async def receive(self, kind: type[M]) -> tuple[M, memoryview]:
        """Wait for the next item."""
        while not self._inbox:
            self._check()
            if self._peer_ended:
                raise StreamEnded(f"{self._link.other(self._end).name} ended the stream")
            await self._wait()
        body, data = self._inbox.popleft()
        self._give_credit(item_cost(body, data))
        try:
            return decode(body, kind), memoryview(data)
        except ProtocolError as error:
            self.reset(str(error))
            raise

    async def end(self) -> None:
        """Say that nothing more will be sent; nothing happens if the stream is over."""
        if self._error is None and not self._ended:
            self._ended = True
            self._link.carry(self._end, 0, self.twin._on_end)
            self._leave_if_over()

    async def leave(self) -> None:
        """End our side; what still comes is thrown away, so that the peer does not wait for credit."""
        self._discarding = True
        while self._inbox:
            self._give_credit(item_cost(*self._inbox.popleft()))
        await self.end()

    def reset(self, reason: str = "") -> None:
        """Drop the stream both ways."""
        self.refuse(PeerLost(f"{self._end.name} reset the stream: {reason}"))

    def refuse(self, error: PeerError) -> None:
        """Drop the stream; the other end fails with ``error``."""
        if self._error is None and self._link.alive:
            self._link.carry(self._end, 0, partial(self.twin.fail, error))
        self.fail(PeerLost(str(error)))

    def fail(self, error: PeerError) -> None:
        """Everything from now on raises ``error``, if nothing went wrong before."""
        if self._error is None:
            self._error = error
            self._inbox.clear()
            self._link.guests.pop(self, None)
            self._wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.leave()
        else:
            self.reset(kind.__name__)

    def _on_item(self, body: bytes, data: bytes) -> None:
        if self._discarding:
            self._give_credit(item_cost(body, data))
        elif self._error is None:
            self._inbox.append((body, data))
            self._wake()

    def _on_end(self) -> None:
        self._peer_ended = True
        self._leave_if_over()
        self._wake()

    def _on_credit(self, read_bytes: int) -> None:
        self._unread_bytes -= read_bytes
        self._wake()

    def _give_credit(self, read_bytes: int) -> None:
        self._read_bytes += read_bytes
        if self._read_bytes >= STREAM_WINDOW_BYTES // 2 and self._link.alive:
            self._link.carry(self._end, 0, partial(self.twin._on_credit, self._read_bytes))
            self._read_bytes = 0

    def _leave_if_over(self) -> None:
        if self._ended and self._peer_ended:
            self._link.guests.pop(self, None)

    def _check_sending(self) -> None:
        if self._ended:
            raise ValueError("send after end")
        if self._error is not None:
            raise PeerLost(str(self._error)) from self._error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _wait(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
