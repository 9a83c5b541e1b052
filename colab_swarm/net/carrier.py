"""Parts of a link: settings, the path to the peer, and the carrier in memory that replaces a network.

A *carrier* transports the messages of a link: a WebSocket, or memory.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Protocol, Self, TypeAlias

from colab_swarm.errors import require
from colab_swarm.net.addresses import is_address
from colab_swarm.net.noise import Keys
from colab_swarm.net.peers import MAX_ADDRESSES, MAX_RUN_ID_BYTES, Contact, PeerId, Role, short

HostPort: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class NodeSettings:
    """Settings of `colab_swarm.net.node.Node`.

    Attributes:
        run_id: name of the run, at most 64 bytes; peers of another run are refused.
        host, port: where to listen. An empty host means every interface, IPv4 and IPv6; port 0 takes a free port.
        listen: whether to accept links. A node that does not listen (client mode) only dials; others call it over the
            links that it has opened.
        announce: addresses that others can dial, like ``ws://203.0.113.7:4500``; None: the interfaces' addresses.
        iroh: how others reach this peer by iroh: at its IP addresses (``direct``), through the free relays of
            iroh's makers (``public``), or through the iroh relay at this https address. None: iroh is only used to
            dial others.
        iroh_relays: whether this peer dials peers that wait at an iroh relay.
        upload_bps, download_bps: limits over all links, bits per second; None for no limit.
        keep_alive_s: seconds between two pings of a link; a link that is silent for three times as long is closed.
    """

    run_id: str = ""
    host: str = ""
    port: int = 0
    listen: bool = True
    announce: tuple[str, ...] | None = None
    iroh: str | None = None
    iroh_relays: bool = True
    upload_bps: float | None = None
    download_bps: float | None = None
    keep_alive_s: float = 10.0

    def __post_init__(self) -> None:
        fits = len(self.run_id.encode()) <= MAX_RUN_ID_BYTES
        require(fits, f"run_id={self.run_id!r} is over {MAX_RUN_ID_BYTES} bytes")
        require(0 <= self.port < 1 << 16, f"port={self.port} is not a port: 1 to 65535, or 0 for a free one")
        announce = self.announce or ()
        for address in announce:
            require(is_address(address), f"{address!r} is not an address: ws://HOST:PORT is expected")
        iroh_is_valid = self.iroh in (None, "direct", "public") or str(self.iroh).startswith("https://")
        text = f"iroh={self.iroh!r} is not 'direct', 'public' or an https address of an iroh relay"
        require(iroh_is_valid, text)
        require(len(announce) <= MAX_ADDRESSES, f"{len(announce)} addresses are over {MAX_ADDRESSES}")


class LinkType(StrEnum):
    """How a link reaches the other end."""

    DIRECT = "direct"
    IROH = "iroh"
    TUNNEL = "tunnel"
    RELAYED = "relayed"


@dataclass(frozen=True)
class Path:
    """The way by which a link reaches the other end.

    Attributes:
        way: the type of link.
        relay: the relay of a relayed link.
        remote: the other end of the TCP connection; None for a carrier in memory.
        address: the address that was dialled; empty at the end that was dialled.
    """

    way: LinkType = LinkType.DIRECT
    relay: PeerId | None = None
    remote: HostPort | None = None
    address: str = ""

    @property
    def seen_host(self) -> str:
        """IP address of the other end; empty behind a relay or a tunnel, which hide this address."""
        if self.remote is None or self.way is not LinkType.DIRECT:
            return ""
        return self.remote[0]

    def __str__(self) -> str:
        if self.relay is None:
            return self.way.value
        return f"{self.way.value} by {short(self.relay)}"


@dataclass(frozen=True)
class Remote:
    """The peer at the other end of a link, as its handshake showed it.

    Attributes:
        membership: the membership that the peer showed last; it gives the ``role``.
        time: the peer's clock when it sent its Hello.
        keys: the keys for encryption; None if packets are not encrypted.
    """

    contact: Contact
    public_key: bytes = b""
    membership: bytes = b""
    role: Role = Role.WORKER
    time: float = 0.0
    keys: Keys | None = field(default=None, repr=False)
    path: Path = Path()


class Receiver(Protocol):
    """Takes the messages and events of a carrier."""

    def on_message(self, data: memoryview) -> None:
        """Take one message; the memory is only valid during the call."""

    def on_writable(self, writable: bool) -> None:
        """Note that the send buffer is full, or has room again."""

    def on_lost(self, reason: str) -> None:
        """Note that the connection is gone; this is the last call, and is made only once."""


class Loopback:
    """One end of a carrier in memory, for a peer's link to itself and for the simulator; it encrypts nothing."""

    remote_end: HostPort | None = None
    other: Self

    def __init__(self) -> None:
        self.receiver: Receiver
        self.open = True
        self._loop = asyncio.get_running_loop()
        self.read_at = self._loop.time()

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return 0

    def send_bytes(self, data: bytes) -> int:
        if self.open:
            self.carry(len(data), partial(self.other._deliver, memoryview(data)))
        return len(data)

    def carry(self, size_bytes: int, arrive: Callable[[], None]) -> None:
        """Call ``arrive()`` at the other end, after everything that was sent before."""
        self._loop.call_soon(arrive)

    def close(self, reason: str = "") -> None:
        if self.open:
            self.open = False
            self.carry(0, partial(self.other._lose, reason))

    abort = close

    def pause_reading(self) -> None:
        """Do nothing, because no limit applies in memory."""

    resume_reading = pause_reading

    async def wait_closed(self) -> None:
        """Return immediately."""

    def _deliver(self, message: memoryview) -> None:
        self.read_at = self._loop.time()
        if self.open:
            self.receiver.on_message(message)

    def _lose(self, reason: str) -> None:
        if self.open:
            self.open = False
            self.receiver.on_lost(reason)
