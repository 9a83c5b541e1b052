"""The application's end of a stream over a link."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from colab_swarm.errors import PeerError, PeerLost, ProtocolError
from colab_swarm.net.mux import item_cost
from colab_swarm.net.peers import (
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    UNDECODABLE,
    Buffer,
    M,
    Message,
    PeerId,
    StreamEnded,
    short,
)

if TYPE_CHECKING:
    from colab_swarm.net.link import Link

_encoder = msgspec.msgpack.Encoder()


@lru_cache(maxsize=1024)
def decoder_of(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of a message type."""
    return msgspec.msgpack.Decoder(kind)


class LinkStream:
    """One stream of a link; implements `colab_swarm.net.peers.Stream`."""

    def __init__(self, link: Link, id: int) -> None:
        self._link, self.id = link, id
        self._inbox: deque[tuple[memoryview, memoryview]] = deque()
        self._fault: PeerError | None = None
        self._got_end = self._sent_end = self._discarding = False
        self._receiving: asyncio.Future[None] | None = None
        self._credit = asyncio.Event()

    def __repr__(self) -> str:
        state = "failed" if self._fault else f"inbox={len(self._inbox)}"
        return f"LinkStream({short(self.peer)}, {self.id}, {state})"

    @property
    def peer(self) -> PeerId:
        """The peer at the other end."""
        return self._link.peer

    async def send(self, message: Message, payload: Buffer = b"") -> None:
        """See `Stream.send`."""
        body = _encoder.encode(message)
        view = memoryview(payload)
        flat = view.cast("B") if view.nbytes else b""
        if len(body) > MAX_MESSAGE_BYTES or len(flat) > MAX_PAYLOAD_BYTES:
            limit = f"{MAX_MESSAGE_BYTES} + {MAX_PAYLOAD_BYTES}"
            raise ValueError(f"a stream item of {len(body)} + {len(flat)} bytes is over {limit}")
        while True:
            if self._sent_end:
                raise ValueError("send after end")
            if self._fault is not None:
                raise PeerLost(str(self._fault)) from self._fault
            if not self._link.mux.may_send(self.id):
                self._credit.clear()
                await self._credit.wait()
            elif not self._link.ready:
                await self._link.wait_ready()
            else:
                self._link.send_item(self.id, body, flat)
                return

    async def receive(self, kind: type[M]) -> tuple[M, memoryview]:
        """See `Stream.receive`."""
        while not self._inbox:
            if self._got_end:
                raise StreamEnded(f"peer {short(self.peer)} ended the stream")
            if self._fault is not None:
                raise self._fault
            await self._wait_item()
        message, payload = self._inbox.popleft()
        self._link.consumed(self.id, item_cost(message, payload))
        try:
            return decoder_of(kind).decode(message), payload
        except UNDECODABLE as error:
            self.reset("undecodable item")
            raise ProtocolError(f"an item from {short(self.peer)} is no {kind.__name__}: {error}") from error

    async def _wait_item(self) -> None:
        if self._receiving is not None:
            raise RuntimeError("two tasks receive from one stream")
        self._receiving = asyncio.get_running_loop().create_future()
        try:
            await self._receiving
        finally:
            self._receiving = None

    async def end(self) -> None:
        """See `Stream.end`."""
        self.end_soon()

    def end_soon(self) -> None:
        """Say that nothing more will be sent, without waiting."""
        self._sent_end = True
        self._link.end_stream(self.id)

    def reset(self, reason: str = "") -> None:
        """See `Stream.reset`."""
        self._link.reset_stream(self.id, "reset", reason)
        self.on_fault(PeerLost(f"the stream with {short(self.peer)} was reset here: {reason}"))

    def leave(self) -> None:
        """End our side; what still comes is thrown away, so that the peer does not wait for credit."""
        self._discarding = True
        while self._inbox:
            self._link.consumed(self.id, item_cost(*self._inbox.popleft()))
        if not self._sent_end:
            self.end_soon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.leave()
        else:
            self.reset(f"{kind.__name__}" if kind else "")

    def on_item(self, message: memoryview, payload: memoryview) -> None:
        """The link received an item."""
        if self._discarding:
            self._link.consumed(self.id, item_cost(message, payload))
            return
        if 2 * (len(message) + len(payload)) < memoryview(message.obj).nbytes:
            # a slice keeps its whole packet alive, of which the credit counts nothing
            message, payload = memoryview(bytes(message)), memoryview(bytes(payload))
        self._inbox.append((message, payload))
        self._wake()

    def on_credit(self) -> None:
        """The peer made room."""
        self._credit.set()

    def on_end(self) -> None:
        """The peer ended its side."""
        self._got_end = True
        self._wake()

    def on_fault(self, fault: PeerError) -> None:
        """The stream is lost; items that came before are still handed out."""
        self._fault = self._fault or fault
        self._credit.set()
        self._wake()

    def _wake(self) -> None:
        if self._receiving is not None and not self._receiving.done():
            self._receiving.set_result(None)
