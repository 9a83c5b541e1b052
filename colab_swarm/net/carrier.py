"""Parts of a link: settings, the path to the peer, traffic, and what replaces a network on the own link."""

import asyncio
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Protocol, Self, TypeAlias

from colab_swarm.errors import require
from colab_swarm.net.addresses import MAX_BOOK_ENTRIES, is_address
from colab_swarm.net.noise import Keys
from colab_swarm.net.peers import (
    MAX_ADDRESSES,
    MAX_RUN_ID_BYTES,
    Contact,
    LinkStatistics,
    PeerId,
    Role,
    short,
)

# What a line must carry before its rate is known: less would be the rate of the talk on it.
_ENOUGH_BYTES = 1 << 20
_BUSY_BYTES_PER_S = 1 << 16
_IDLE_S = 2.0
REMEMBERED_RATES = 32  # a line may become slower
_BURST_S = 0.1
_MIN_BURST_BYTES = 1 << 16
HostPort: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class NodeSettings:
    """Settings of `colab_swarm.net.node.Node`.

    Attributes:
        run_id: name of the run, 64 bytes at most; peers of another run are refused.
        host, port: where to listen; an empty host is every interface, IPv4 and IPv6; port 0 takes a free one.
        listen: whether to accept links; a node that does not (client mode) dials, and is called back over its links.
        announce: addresses others can dial, like ``ws://203.0.113.7:4500``; None uses those of the interfaces.
        iroh: let others reach this peer by iroh: at its IP addresses (``direct``), through the free relays of
            iroh's makers (``public``), or through the iroh relay at this https address. None: it only dials.
        iroh_relays: whether it dials peers that wait at an iroh relay.
        upload_bps, download_bps: limits over all links, bits per second; None for no limit.
        keep_alive_s: seconds between pings of a link; one silent for three times as long is closed.
        idle_link_s: seconds until an unused link is closed, unless one of its ends cannot be dialled.
        max_links: links at once; beyond that the one unused for longest is closed, or new ones are refused.
        max_handshakes: accepted connections whose handshake is not complete.
        dial_timeout_s: seconds to dial one address, handshake included.
        handshake_timeout_s: seconds for an accepted connection to complete its handshake.
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
    idle_link_s: float = 300.0
    max_links: int = 256
    max_handshakes: int = 64
    dial_timeout_s: float = 10.0
    handshake_timeout_s: float = 10.0

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


class TokenBucket:
    """Keeps a flow at ``rate_bps`` bits per second on average, with bursts of 0.1 s (64 KiB at least)."""

    def __init__(self, rate_bps: float, now: float) -> None:
        require(rate_bps > 0, f"rate_bps={rate_bps}: a bandwidth limit must be positive")
        self._bytes_per_s = rate_bps / 8
        self._burst_bytes = max(self._bytes_per_s * _BURST_S, _MIN_BURST_BYTES)
        self._tokens_bytes = self._burst_bytes
        self._at = now

    def take(self, size_bytes: int, now: float) -> None:
        """Count bytes; they may exceed the tokens: the debt shows as a `delay`."""
        earned = (now - self._at) * self._bytes_per_s
        self._tokens_bytes = min(self._tokens_bytes + earned, self._burst_bytes) - size_bytes
        self._at = now

    def delay(self, now: float) -> float:
        """Return the seconds to wait before sending more; 0 while not in debt."""
        tokens_bytes = self._tokens_bytes + (now - self._at) * self._bytes_per_s
        return max(0.0, -tokens_bytes / self._bytes_per_s)


class RateMeter:
    """Counts bytes and remembers the rates of the last busy times, of which the best one counts.

    Handshakes and records of the DHT say nothing about a line. One that is always less busy is known by its rounds
    (`LinkBandwidth` of `training`).
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        self._busy_bps = deque[float](maxlen=REMEMBERED_RATES)
        self._window_bytes = 0
        self._window_at = float("-inf")
        self._added_at = float("-inf")

    def add(self, size_bytes: int, now: float) -> None:
        """Count bytes; `_ENOUGH_BYTES` in a row, over a second or more, give a rate."""
        self.total_bytes += size_bytes
        elapsed = now - self._window_at
        idle = now - self._added_at >= _IDLE_S
        if elapsed >= 1.0:
            idle |= self._window_bytes < _BUSY_BYTES_PER_S * elapsed
            enough = self._window_bytes >= _ENOUGH_BYTES
            if enough and not idle:
                self._busy_bps.append(self._window_bytes * 8 / elapsed)
            if enough or idle:
                self._window_bytes = 0
                self._window_at = now
        self._window_bytes += size_bytes
        self._added_at = now

    @property
    def peak_bps(self) -> float | None:
        return max(self._busy_bps, default=None)


@dataclass(frozen=True)
class Traffic:
    """One direction of a link: meters that count its bytes (the peer's, the node's), and buckets that limit them."""

    meters: Sequence[RateMeter] = ()
    buckets: Sequence[TokenBucket] = ()

    def count(self, size_bytes: int, now: float) -> None:
        for meter in self.meters:
            meter.add(size_bytes, now)
        for bucket in self.buckets:
            bucket.take(size_bytes, now)

    def delay(self, now: float) -> float:
        """Return the seconds to wait until every bucket allows more; 0 without buckets."""
        delay_s = 0.0
        for bucket in self.buckets:
            delay_s = max(delay_s, bucket.delay(now))
        return delay_s


class LinkType(StrEnum):
    """How a link reaches the other end."""

    DIRECT = "direct"
    IROH = "iroh"
    TUNNEL = "tunnel"
    RELAYED = "relayed"


@dataclass(frozen=True)
class Path:
    """The way of a link to the other end.

    Attributes:
        relay: the relay of a relayed link.
        remote: the other end of the TCP connection; None in memory.
        address: the dial address that worked; empty at the end that was dialled.
    """

    way: LinkType = LinkType.DIRECT
    relay: PeerId | None = None
    remote: HostPort | None = None
    address: str = ""

    @property
    def seen_host(self) -> str:
        """IP address of the other end; empty behind a relay or a tunnel, whose own address is all we see."""
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
        keys: None where packets are not sealed.
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
        """Note that the connection is gone; called once, last."""


class Loopback:
    """One end of a carrier in memory, as a peer's link to itself and the simulator have; seals nothing."""

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
        """Do nothing: no budget applies."""

    resume_reading = pause_reading

    async def wait_closed(self) -> None:
        """Return at once."""

    def _deliver(self, message: memoryview) -> None:
        self.read_at = self._loop.time()
        if self.open:
            self.receiver.on_message(message)

    def _lose(self, reason: str) -> None:
        if self.open:
            self.open = False
            self.receiver.on_lost(reason)


class Metering:
    """Counts and limits the traffic of a node's links; ``tunnelled`` counts bytes sent through its own tunnel."""

    def __init__(self, settings: NodeSettings, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._settings = settings
        # All links share the two lists, so `limit` changes their contents.
        self._upload: list[TokenBucket] = []
        self._download: list[TokenBucket] = []
        self.limit(None)
        self._sent = RateMeter()
        self._received = RateMeter()
        self.tunnelled = RateMeter()
        self._by_relay: dict[PeerId, RateMeter] = {}
        # The bytes sent to each peer, and those received from it.
        self._by_peer: dict[PeerId, tuple[RateMeter, RateMeter]] = {}

    def limit(self, rate_bps: float | None) -> None:
        """Limit all links together to ``rate_bps`` bits per second each way, besides the settings' limits."""
        self._upload[:] = self._buckets(rate_bps, self._settings.upload_bps)
        self._download[:] = self._buckets(rate_bps, self._settings.download_bps)

    def _buckets(self, *limits_bps: float | None) -> list[TokenBucket]:
        """Return a bucket for the lowest limit; none if no limit is set."""
        rates_bps = [limit_bps for limit_bps in limits_bps if limit_bps is not None]
        if not rates_bps:
            return []
        return [TokenBucket(min(rates_bps), self._clock())]

    def relayed_bytes(self) -> dict[PeerId, int]:
        """Return the bytes that each relay carried for this peer, both ways."""
        return {relay: meter.total_bytes for relay, meter in self._by_relay.items()}

    def traffic(self, peer: PeerId, path: Path, *, dialled: bool) -> tuple[Traffic, Traffic]:
        """Return the meters and limits of a new link to the peer, there and back."""
        sent, received = self._by_peer.setdefault(peer, (RateMeter(), RateMeter()))
        if len(self._by_peer) > MAX_BOOK_ENTRIES:
            oldest = next(iter(self._by_peer))
            del self._by_peer[oldest]
        outgoing = [sent, self._sent]
        incoming = [received, self._received]
        if path.way is LinkType.TUNNEL and not dialled:
            outgoing.append(self.tunnelled)
        if path.relay is not None:
            relayed = self._by_relay.setdefault(path.relay, RateMeter())
            outgoing.append(relayed)
            incoming.append(relayed)
        return Traffic(outgoing, self._upload), Traffic(incoming, self._download)

    def statistics(self, peer: PeerId | None, rtts_s: Sequence[float]) -> LinkStatistics:
        """Return the totals of one peer, or of all; ``rtts_s`` are those of its open links."""
        if peer is None:
            sent = self._sent
            received = self._received
        else:
            sent, received = self._by_peer.get(peer, (RateMeter(), RateMeter()))
        return LinkStatistics(
            sent_bytes=sent.total_bytes,
            received_bytes=received.total_bytes,
            rtt_s=statistics.median(rtts_s) if rtts_s else None,
            upload_bps=sent.peak_bps,
            download_bps=received.peak_bps,
        )
