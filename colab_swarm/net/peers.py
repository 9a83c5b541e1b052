"""What a service sees of the network: messages, calls and streams to peers, named by their id.

Real links (`colab_swarm.net.node`) and the simulator (`colab_swarm.sim`) both implement `Peers`, so
everything above runs unchanged on either. Rules that hold for both:

- A *call* is one message there and one back. A *stream* carries any number of items both ways; an item is a
  small message with an optional raw payload. Items arrive whole and in order or the stream fails with
  `PeerLost`.
- A stream that ends early is an error: `receive` raises `StreamEnded` only after the peer said `end()`.
- A handler's `Refusal` travels to the caller as `CallRefused(code="refused")`; any other exception as
  ``failed``. A call whose caller gave up or vanished is cancelled in the handler.
- Peers are dialled on demand: `call` and `stream` open a link if there is none and an address is known.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, NewType, Protocol, Self, TypeAlias, TypeVar

import msgspec

from colab_swarm.errors import PeerError

PeerId = NewType("PeerId", bytes)
"""SHA-256 of the peer's Ed25519 public key: 32 bytes."""

Buffer: TypeAlias = bytes | bytearray | memoryview
MAX_PAYLOAD_BYTES = 1 << 20
"""Largest raw payload of one stream item. Hot items are best at 120 KiB: one packet, no copy."""
MAX_MESSAGE_BYTES = 1 << 18
"""Largest encoded message of a call or a stream item."""
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises on a stranger's bytes: bad UTF-8 and endless nesting have no msgspec error of their own."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of everything sent between peers. Decoding validates; add new fields at the end with a default."""


class Role(IntEnum):
    """What a peer may do; each role may do what those before it may."""

    GUEST = 0
    """Ask the authority for a membership, and nothing else."""
    VIEWER = 1
    """Look things up, watch, download the model."""
    REDUCER = 2
    """Store records, take part in rounds without contributing, relay."""
    WORKER = 3
    """Contribute gradients."""
    AUTHORITY = 4
    """Admit others."""


CIRCUIT = "/relay/"
"""What an address through a relay has before the relay's id; see `colab_swarm.net.addresses.CircuitAddress`."""


class Contact(Message, frozen=True):
    """A peer's id and dial addresses, the best first; none if it cannot be dialled.

    Direct ones look like ``ws://203.0.113.7:4500`` or ``wss://HOST``; a circuit through a relay like
    ``ws://203.0.113.7:4500/relay/<64 hex digits of the relay's id>``.
    """

    id: PeerId
    addresses: tuple[str, ...] = ()

    @property
    def direct(self) -> bool:
        """Whether there is an address that needs no relay."""
        return not all(CIRCUIT in address for address in self.addresses)


M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)


class Refusal(Exception):
    """Raised by a handler to answer a call with ``CallRefused(code="refused", text)``."""


class StreamEnded(PeerError):
    """The peer ended its side of the stream in good order and nothing more will come."""


@dataclass(frozen=True)
class LinkStatistics:
    """Totals of all links to one peer, or of all peers.

    Attributes:
        sent_bytes, received_bytes: bytes on the wire.
        rtt_s: median of the last round-trip times, seconds; None if never measured.
        upload_bps, download_bps: peak rate seen over a busy second, bits per second; None if never busy.
        links: links open now.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    rtt_s: float | None = None
    upload_bps: float | None = None
    download_bps: float | None = None
    links: int = 0


class Stream(Protocol):
    """One conversation with a peer. Use as an async context manager: leaving by an exception resets it."""

    @property
    def peer(self) -> PeerId: ...

    async def send(self, message: Message, payload: Buffer = b"") -> None:
        """Send one item; waits while the peer has not made room. The payload may be reused after return.

        Raises:
            PeerLost: the link broke or the peer reset the stream.
            ValueError: the item is over `MAX_MESSAGE_BYTES` or `MAX_PAYLOAD_BYTES`, or this side was ended before.
        """

    async def receive(self, kind: type[M]) -> tuple[M, memoryview]:
        """Wait for the next item and decode it as ``kind``.

        Raises:
            StreamEnded: the peer ended its side.
            PeerLost: the link broke or the peer reset the stream.
            ProtocolError: the item is not a valid ``kind``; the stream is reset.
        """

    async def end(self) -> None:
        """Say that nothing more will be sent. Receiving goes on."""

    def reset(self, reason: str = "") -> None:
        """Drop the stream both ways; the peer's `receive` and `send` raise `PeerLost`. Idempotent."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End our side after a normal exit, reset after an exception or cancellation."""


CallHandler: TypeAlias = Callable[[PeerId, Any], Awaitable[Message]]
StreamHandler: TypeAlias = Callable[[Any, Stream], Awaitable[None]]


class Peers(Protocol):
    """The network as one peer sees it."""

    @property
    def id(self) -> PeerId: ...

    @property
    def contact(self) -> Contact:
        """How others reach this peer; no addresses in client mode."""

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature by this peer's key (64 bytes)."""

    @property
    def public_key(self) -> bytes:
        """This peer's Ed25519 public key (32 bytes); its SHA-256 is `id`."""

    def time(self) -> float:
        """Swarm time: seconds since the epoch, own clock moved by the median offset of the linked peers."""

    def learn(self, contact: Contact) -> None:
        """Remember where a peer can be dialled. Cheap; call it for every contact seen."""

    def contact_of(self, peer: PeerId) -> Contact:
        """What is known of the peer's addresses; an empty contact if nothing."""

    async def call(self, peer: PeerId, message: Message, reply: type[R], *, timeout_s: float) -> R:
        """Send ``message``, wait for the peer's reply of type ``reply``.

        Raises:
            PeerUnreachable, PeerLost, PeerTimeout, WrongPeer, CallRefused, ProtocolError: all `PeerError`.
        """

    async def stream(self, peer: PeerId, opening: Message, *, timeout_s: float) -> Stream:
        """Open a stream; ``opening`` chooses the handler there. ``timeout_s`` bounds the dialling only.

        Raises:
            PeerUnreachable, WrongPeer, PeerTimeout. A refused opening shows as `CallRefused` on the first
            receive.
        """

    def serve(
        self, kind: type[M], handler: Callable[[PeerId, M], Awaitable[Message]], *, role: Role = Role.VIEWER
    ) -> None:
        """Answer calls of type ``kind`` by peers of ``role`` or above with ``await handler(peer, message)``."""

    def serve_stream(
        self, kind: type[M], handler: Callable[[M, Stream], Awaitable[None]], *, role: Role = Role.VIEWER
    ) -> None:
        """Run ``await handler(opening, stream)`` for each stream opened with ``kind``; it owns the stream."""

    def role_of(self, peer: PeerId) -> Role:
        """What the peer may do, by the membership it showed on its link; ``GUEST`` without a link."""

    def unserve(self, kind: type[Message]) -> None:
        """Stop answering ``kind``."""

    def linked(self) -> frozenset[PeerId]:
        """Peers with an open link now."""

    def way_to(self, peer: PeerId) -> str:
        """How the link to a peer runs, in words: ``direct``, ``LAN``, ``relayed by 1a2b3c4d``; empty without one."""

    def statistics(self, peer: PeerId | None = None) -> LinkStatistics:
        """Of one peer, or of all."""

    def limit(self, rate_bps: float | None) -> None:
        """From now on, all links together carry at most so many bits per second in each direction; None: no limit."""

    def on_lost(self, listener: Callable[[PeerId], None]) -> Callable[[], None]:
        """Call ``listener(peer)`` when the last link to a peer is gone; returns a function that ends it."""

    async def close(self) -> None:
        """Cancel handlers, close all links. Idempotent."""


def short(peer: PeerId) -> str:
    """First 8 hex digits, for people."""
    return peer.hex()[:8]
