"""Counts the traffic of links, measures its rate, and limits it."""

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from colab_swarm.errors import require
from colab_swarm.net.addresses import MAX_BOOK_ENTRIES
from colab_swarm.net.carrier import LinkType, NodeSettings, Path
from colab_swarm.net.peers import LinkStatistics, PeerId, remember

# How many bytes a line must carry before its rate is measured. With fewer bytes, the rate would be that of the demand.
_ENOUGH_BYTES = 1 << 20
_BUSY_BYTES_PER_S = 1 << 16
_IDLE_S = 2.0
REMEMBERED_RATES = 32  # older rates are forgotten, because a line may become slower
_BURST_S = 0.1
_MIN_BURST_BYTES = 1 << 16


class TokenBucket:
    """Limits a flow to ``rate_bps`` bits per second on average, with bursts of 0.1 s, or of 64 KiB if that is more."""

    def __init__(self, rate_bps: float, now: float) -> None:
        require(rate_bps > 0, f"rate_bps={rate_bps}: a bandwidth limit must be positive")
        self._bytes_per_s = rate_bps / 8
        self._burst_bytes = max(self._bytes_per_s * _BURST_S, _MIN_BURST_BYTES)
        self._tokens_bytes = self._burst_bytes
        self._at = now

    def take(self, size_bytes: int, now: float) -> None:
        """Count bytes. They may exceed the tokens; then `delay` is above 0."""
        earned = (now - self._at) * self._bytes_per_s
        self._tokens_bytes = min(self._tokens_bytes + earned, self._burst_bytes) - size_bytes
        self._at = now

    def delay(self, now: float) -> float:
        """Return the seconds to wait before sending more; 0 while there are tokens."""
        tokens_bytes = self._tokens_bytes + (now - self._at) * self._bytes_per_s
        return max(0.0, -tokens_bytes / self._bytes_per_s)


class RateMeter:
    """Counts bytes and remembers the rates of the last busy times; `peak_bps` is the highest of them.

    Handshakes and DHT records are too small to measure a line. If a line is never busy enough, its bandwidth is
    measured in rounds (`LinkBandwidth` in `training`).
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        self._busy_bps = deque[float](maxlen=REMEMBERED_RATES)
        self._window_bytes = 0
        self._window_at = float("-inf")
        self._added_at = float("-inf")

    def add(self, size_bytes: int, now: float) -> None:
        """Count bytes; `_ENOUGH_BYTES` without a pause, over at least a second, give a rate."""
        self.total_bytes += size_bytes
        elapsed = now - self._window_at
        idle = now - self._added_at >= _IDLE_S
        if elapsed >= 1.0:
            idle = idle or self._window_bytes < _BUSY_BYTES_PER_S * elapsed
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
    """One direction of a link: the meters that count its bytes, and the token buckets that limit them."""

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


class Metering:
    """Counts and limits the traffic of a node's links; ``tunnelled`` counts bytes sent through this peer's tunnel."""

    def __init__(self, settings: NodeSettings, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._settings = settings
        # All links share these two lists, so `limit` changes their contents in place.
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
        """Limit all links together to ``rate_bps`` bits per second in each direction; lower limits of settings stay."""
        settings = self._settings
        for buckets, limit_bps in (
            (self._upload, settings.upload_bps),
            (self._download, settings.download_bps),
        ):
            rates_bps = [rate for rate in (rate_bps, limit_bps) if rate is not None]
            buckets[:] = [TokenBucket(min(rates_bps), self._clock())] if rates_bps else []

    def relayed_bytes(self) -> dict[PeerId, int]:
        """Return the bytes that each relay carried for this peer, in both directions together."""
        return {relay: meter.total_bytes for relay, meter in self._by_relay.items()}

    def traffic(self, peer: PeerId, path: Path, *, dialled: bool) -> tuple[Traffic, Traffic]:
        """Return the meters and limits of a new link to the peer, for sending and for receiving."""
        sent, received = self._by_peer.get(peer) or (RateMeter(), RateMeter())
        remember(self._by_peer, peer, (sent, received), MAX_BOOK_ENTRIES)
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
        """Return the totals of one peer, or of all peers; ``rtts_s`` are the round-trip times of the open links."""
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
