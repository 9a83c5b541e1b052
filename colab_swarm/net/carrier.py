"""What a link stands on: a carrier of whole messages, a cipher, and the bounds of its traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from colab_swarm.net.peers import Contact, PeerId, Role, short

BURST_S = 0.1
MIN_BURST_BYTES = 1 << 16


class TokenBucket:
    """Keeps a flow at ``rate_bps`` bits per second on average, with bursts of 0.1 s (64 KiB at least).

    What has been sent is taken even if it exceeds the tokens; the debt shows as a `delay` before the next.
    """

    def __init__(self, rate_bps: float, now: float) -> None:
        if not rate_bps > 0:
            raise ValueError(f"rate_bps={rate_bps}: a bandwidth limit must be positive")
        self._bytes_per_s = rate_bps / 8
        self._burst_bytes = max(self._bytes_per_s * BURST_S, MIN_BURST_BYTES)
        self._tokens_bytes = self._burst_bytes
        self._at = now

    def take(self, size_bytes: int, now: float) -> None:
        """Account for bytes that went out (or came in)."""
        earned = (now - self._at) * self._bytes_per_s
        self._tokens_bytes = min(self._tokens_bytes + earned, self._burst_bytes) - size_bytes
        self._at = now

    def delay(self, now: float) -> float:
        """Seconds to wait before the next bytes may go; 0 while not in debt."""
        tokens_bytes = self._tokens_bytes + (now - self._at) * self._bytes_per_s
        return max(0.0, -tokens_bytes / self._bytes_per_s)


class RateMeter:
    """Counts bytes and remembers the best rate over a busy second."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.peak_bps: float | None = None
        self._window_bytes = 0
        self._window_at = float("-inf")

    def add(self, size_bytes: int, now: float) -> None:
        """Count bytes; windows of one to two seconds make a rate, longer ones were idle and make none."""
        self.total_bytes += size_bytes
        elapsed = now - self._window_at
        if elapsed >= 1.0:
            if elapsed < 2.0:
                self.peak_bps = max(self.peak_bps or 0.0, self._window_bytes * 8 / elapsed)
            self._window_bytes, self._window_at = 0, now
        self._window_bytes += size_bytes


HostPort = tuple[str, int]


class LinkType(StrEnum):
    """How a link reaches the other end."""

    DIRECT = "direct"
    PUNCHED = "punched"
    TUNNEL = "tunnel"
    RELAYED = "relayed"


@dataclass(frozen=True)
class Path:
    """How a link reaches the other end.

    Attributes:
        way: of the four.
        relay: who relays, if it is relayed.
        local, remote: IP address and port of both ends of the TCP connection, None in memory.
        address: the dial address that worked, empty where this end did not dial.
        caller_host: IP address at which the relay says it sees the caller, empty if it does not say.
    """

    way: LinkType = LinkType.DIRECT
    relay: PeerId | None = None
    local: HostPort | None = None
    remote: HostPort | None = None
    address: str = ""
    caller_host: str = ""

    @property
    def seen_host(self) -> str:
        """IP address of the other end; empty behind a relay or a tunnel, of which one sees the near end."""
        hidden = self.remote is None or self.way in (LinkType.RELAYED, LinkType.TUNNEL)
        return "" if hidden or self.remote is None else self.remote[0]

    def __str__(self) -> str:
        return self.way.value if self.relay is None else f"{self.way.value} by {short(self.relay)}"


@dataclass(frozen=True)
class Remote:
    """Who is at the other end of a link, what it may do, and how it is reached.

    Attributes:
        contact: its id, and where it says it can be dialled.
        public_key: Ed25519, 32 bytes.
        membership: what it showed, and shows now if that was renewed.
        role: what that makes it.
        path: how it is reached.
    """

    contact: Contact
    public_key: bytes = b""
    membership: bytes = b""
    role: Role = Role.WORKER
    path: Path = Path()


class Receiver(Protocol):
    """Who gets what a carrier receives."""

    def on_message(self, data: memoryview) -> None:
        """One message; the memory is only valid during the call."""

    def on_writable(self, writable: bool) -> None:
        """The send buffer filled up, or has room again."""

    def on_lost(self, reason: str) -> None:
        """The connection is gone; comes once, last."""


class Carrier(Protocol):
    """Carries whole messages; `colab_swarm.net.websocket.WebSocket` is one."""

    @property
    def backlog_bytes(self) -> int: ...

    def send(self, size: int, fill: Callable[[memoryview], None]) -> int:
        """Send one message of ``size`` bytes, which ``fill`` writes in place; returns bytes on the wire."""

    def close(self, reason: str = "") -> None: ...
    def abort(self, reason: str = "") -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    async def wait_closed(self) -> None: ...


class Cipher(Protocol):
    """Both directions' keys; `colab_swarm.net.noise.Keys` is one."""

    overhead_bytes: int

    def seal_into(self, plaintext: bytes, out: memoryview) -> None:
        """Write the sealed packet, ``overhead_bytes`` longer, into ``out``."""

    def open(self, ciphertext: memoryview) -> bytes: ...


@dataclass(frozen=True)
class LinkLimits:
    """Counts per link: streams the peer may have open, calls that may be pending each way."""

    max_streams: int = 256
    max_calls: int = 1024


@dataclass(frozen=True)
class Traffic:
    """Where a link's bytes are counted (the peer's meter, the node's), and the token buckets they draw on."""

    sent: Sequence[RateMeter] = ()
    received: Sequence[RateMeter] = ()
    upload: Sequence[TokenBucket] = ()
    download: Sequence[TokenBucket] = ()
