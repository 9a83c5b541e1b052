"""The network as a service sees it: messages, calls and streams to peers, which are named by their ids.

`colab_swarm.net.node.Node` implements it over WebSockets, and over the carriers of the simulator (`colab_swarm.sim`).
These rules hold for both:

- A *call* is one message and its reply. A *stream* carries any number of items both ways. An item is a small message
  with an optional raw payload. Items arrive whole and in order, or the stream fails with `PeerLost`.
- `receive` raises `StreamEnded` only after the peer called `end()`. If the stream breaks before, it raises `PeerLost`.
- If a handler raises `Refusal`, the caller gets `CallRefused(code="refused")`; for any other exception the code is
  ``failed``. A handler is cancelled when its caller gives up or is lost.
- Peers are dialled on demand: `call` and `stream` open a link if there is none and an address is known.
"""

import asyncio
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, NewType, Self, TypeAlias, TypeVar

import msgspec

from colab_swarm.errors import PeerError, PeerLost, ProtocolError, require

# The SHA-256 of the peer's Ed25519 public key: 32 bytes.
PeerId = NewType("PeerId", bytes)
K = TypeVar("K")
V = TypeVar("V")
Buffer: TypeAlias = bytes | bytearray | memoryview
# Maximum size of a stream item's payload. Payloads of at most 120 KiB are best: they fit in a packet, without a copy.
MAX_PAYLOAD_BYTES = 1 << 20
# Maximum size of the encoded message of a call or a stream item.
MAX_MESSAGE_BYTES = 1 << 18
STREAM_WINDOW_BYTES = 1 << 21
# Size of the Python objects of an item in memory.
ITEM_OVERHEAD_BYTES = 768
MAX_ADDRESSES = 16
MAX_RUN_ID_BYTES = 64
_encoder = msgspec.msgpack.Encoder()
# What msgspec may raise when it decodes a stranger's bytes.
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base class of all messages between peers. Decoding validates them. Add new fields at the end, with a default."""


class Ack(Message, frozen=True):
    """Empty reply of a call that returns nothing."""


class Role(IntEnum):
    """Rights of a peer; each role includes those before it."""

    GUEST = 0  # ask the authority for a membership, and nothing else
    VIEWER = 1  # look things up, watch, download the model
    REDUCER = 2  # store records, take part in rounds without contributing, relay
    WORKER = 3  # contribute gradients
    AUTHORITY = 4  # admit others


# Separates a relay's address from its id in the address of a circuit.
CIRCUIT = "/relay/"


class Contact(Message, frozen=True):
    """A peer's id, and the addresses at which it can be dialled, the best first; none if it cannot be dialled.

    Direct addresses look like ``ws://203.0.113.7:4500`` or ``wss://HOST``. The address of a circuit through a
    relay looks like ``ws://203.0.113.7:4500/relay/<64 hex digits of the relay's id>``.
    """

    id: PeerId
    addresses: tuple[str, ...] = ()

    @property
    def direct(self) -> bool:
        """True if at least one address needs no relay."""
        return not all(CIRCUIT in address for address in self.addresses)


M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)


class Refusal(Exception):
    """Raised by a handler to answer a call with ``CallRefused(code="refused", text)``."""


class StreamEnded(PeerError):
    """The peer ended its side of the stream; no more items follow."""


@dataclass(frozen=True)
class LinkStatistics:
    """Totals of all links to one peer, or of all peers."""

    # Bytes are counted on the wire.
    sent_bytes: int = 0
    received_bytes: int = 0
    # The median of the last round-trip times; None if none was measured.
    rtt_s: float | None = None
    # The highest rate during a busy time; None until a link has carried enough bytes to measure it.
    upload_bps: float | None = None
    download_bps: float | None = None


def item_cost(message: Buffer, payload: Buffer) -> int:
    """Return how many bytes of credit an item takes. Empty items also take some, so that their number is bounded."""
    return len(message) + len(payload) + ITEM_OVERHEAD_BYTES


class Stream:
    """Items to and from a peer. Use it as an async context manager: an exception resets the stream."""

    def __init__(self, link: Any, id: int) -> None:
        self._link = link
        self.id = id
        self.peer: PeerId = link.peer
        # The link's `Mux` changes the next five fields. Bytes that this end may still send; negative if the last item
        # was larger than the credit.
        self.credit_bytes = STREAM_WINDOW_BYTES
        # Bytes that the peer may still send, and bytes that the application took but that are not granted again yet.
        self.window_bytes = STREAM_WINDOW_BYTES
        self.consumed_bytes = 0
        self.sent_end = False
        self.got_end = False
        # The size of the peer's opening message, and of items that the application has not taken yet.
        self.held_bytes = 0
        self._inbox: deque[tuple[memoryview, memoryview]] = deque()
        self._fault: PeerError | None = None
        self._discarding = False
        self._receiving: asyncio.Future[None] | None = None
        self._has_credit = asyncio.Event()

    async def send(self, message: Message, payload: Buffer = b"") -> None:
        """Send one item when the peer has room for it. The caller may reuse the payload's memory after the return.

        Raises PeerLost if the link broke or the peer reset the stream, ValueError if the item is over
        `MAX_MESSAGE_BYTES` or `MAX_PAYLOAD_BYTES`, or this side has ended.
        """
        body = _encoder.encode(message)
        view = memoryview(payload)
        flat = view.cast("B") if view.nbytes else b""
        if len(body) > MAX_MESSAGE_BYTES or len(flat) > MAX_PAYLOAD_BYTES:
            limit = f"{MAX_MESSAGE_BYTES} + {MAX_PAYLOAD_BYTES}"
            raise ValueError(f"a stream item of {len(body)} + {len(flat)} bytes is over {limit}")
        while True:
            require(not self.sent_end, "send after end")
            if self._fault is not None:
                raise PeerLost(str(self._fault)) from self._fault
            if self.credit_bytes <= 0:
                self._has_credit.clear()
                await self._has_credit.wait()
            elif not self._link.ready:
                await self._link.wait_ready()
            else:
                self._link.send_item(self, body, flat)
                return

    async def receive(self, kind: type[M]) -> tuple[M, memoryview]:
        """Wait for the next item and decode it as ``kind``.

        Raises StreamEnded if the peer ended its side, PeerLost if the link broke or the peer reset the
        stream, ProtocolError if the item is not a valid ``kind``; then the stream is reset.
        """
        while not self._inbox:
            if self.got_end:
                raise StreamEnded(f"peer {short(self.peer)} ended the stream")
            if self._fault is not None:
                raise self._fault
            require(self._receiving is None, "two tasks receive from one stream", RuntimeError)
            self._receiving = asyncio.get_running_loop().create_future()
            try:
                await self._receiving
            finally:
                self._receiving = None
        message, payload = self._inbox.popleft()
        self._consume(message, payload)
        try:
            return self._link.decode(kind, message), payload
        except ProtocolError:
            self.reset("undecodable item")
            raise

    async def end(self) -> None:
        """End this side of the stream; receiving continues."""
        self._link.mux.end(self)
        self._link.flush_soon()

    def reset(self, reason: str = "", code: str = "reset") -> None:
        """Drop the stream in both directions, and unread items; `receive` and `send` raise `PeerLost`. Idempotent."""
        self._inbox.clear()
        self.held_bytes = 0
        self._link.mux.reset(self.id, code, reason)
        self._link.flush_soon()
        self.on_fault(PeerLost(f"the stream with {short(self.peer)} was reset here: {reason}"))

    def leave(self) -> None:
        """End this side and discard all further items, so that the peer does not wait for credit."""
        self._discarding = True
        while self._inbox:
            message, payload = self._inbox.popleft()
            self._consume(message, payload)
        self._link.mux.end(self)
        self._link.flush_soon()

    def _consume(self, message: memoryview, payload: memoryview) -> None:
        """Grant credit for an item that the application took."""
        cost = item_cost(message, payload)
        self.held_bytes -= cost
        self._link.mux.consumed(self, cost)
        self._link.flush_soon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.leave()
        else:
            self.reset(kind.__name__ if kind else "")

    def unread(self) -> bool:
        """Return True if no task waits for its items now."""
        return self._receiving is None

    def on_item(self, message: memoryview, payload: memoryview) -> None:
        if self._discarding:
            self._consume(message, payload)
            return
        if 2 * (len(message) + len(payload)) < memoryview(message.obj).nbytes:
            # Copied, because a slice keeps its whole packet in memory, but the credit counts only the slice.
            message = memoryview(bytes(message))
            payload = memoryview(bytes(payload))
        self._inbox.append((message, payload))
        self.wake()

    def on_credit(self) -> None:
        self._has_credit.set()

    def on_fault(self, fault: PeerError) -> None:
        """Let the stream fail; items that were received before are still delivered."""
        self._fault = self._fault or fault
        self._has_credit.set()
        self.wake()

    def wake(self) -> None:
        if self._receiving is not None and not self._receiving.done():
            self._receiving.set_result(None)


def short(peer: PeerId) -> str:
    """Return the first 8 hex digits of a peer's id, for display."""
    return peer.hex()[:8]


def decoded(data: Buffer, kind: type[V], problem: str, error: type[Exception]) -> V:
    """Decode a stranger's bytes; raise ``error`` with the ``problem`` if they are not valid."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE as fault:
        raise error(f"{problem}: {fault}") from fault


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended; results and exceptions are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def remember(entries: MutableMapping[K, V], key: K, value: V, most: int) -> None:
    """Put an entry last; if there are more than ``most`` entries, forget the first, which was put longest ago."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > most:
        oldest = next(iter(entries))
        del entries[oldest]
