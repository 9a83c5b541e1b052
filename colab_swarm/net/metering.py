"""A node's traffic: meters for each peer and in all, and the budgets that all links share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from colab_swarm.net.addresses import MAX_BOOK_ENTRIES
from colab_swarm.net.budget import RateMeter, TokenBucket
from colab_swarm.net.carrier import Path, Traffic, Way
from colab_swarm.net.link import Link
from colab_swarm.net.peers import LinkStatistics, PeerId
from colab_swarm.net.settings import NodeSettings


class Metering:
    """Counts what goes over a node's links, and bounds it."""

    def __init__(self, settings: NodeSettings, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._settings = settings
        self._upload: list[TokenBucket] = []  # shared with all links
        self._download: list[TokenBucket] = []
        self.limit(None)
        self._sent, self._received, self._tunnelled = RateMeter(), RateMeter(), RateMeter()
        self._by_relay: dict[PeerId, RateMeter] = {}
        self._by_peer: dict[PeerId, tuple[RateMeter, RateMeter]] = {}

    def limit(self, rate_bps: float | None) -> None:
        """All links together, those that stand included, carry at most so many bits per second in each direction, nor
        more than the settings say; None: as the settings say."""
        settings, now = self._settings, self._clock()
        limits = (self._upload, settings.upload_bps), (self._download, settings.download_bps)
        for buckets, set_bps in limits:
            rates = [rate for rate in (rate_bps, set_bps) if rate is not None]
            buckets[:] = [TokenBucket(min(rates), now)] if rates else []

    @property
    def tunnelled_bytes(self) -> int:
        """Bytes sent through this peer's own tunnel."""
        return self._tunnelled.total_bytes

    def relayed_bytes(self) -> dict[PeerId, int]:
        """Bytes that each relay carried for this peer, both ways."""
        return {relay: meter.total_bytes for relay, meter in self._by_relay.items()}

    def traffic(self, peer: PeerId, path: Path, *, dialled: bool) -> Traffic:
        """Where a new link to the peer counts."""
        sent, received = self._by_peer.setdefault(peer, (RateMeter(), RateMeter()))
        if len(self._by_peer) > MAX_BOOK_ENTRIES:
            del self._by_peer[next(iter(self._by_peer))]
        out = [sent, self._sent]
        into = [received, self._received]
        if path.way is Way.TUNNEL and not dialled:
            out.append(self._tunnelled)
        if path.relay is not None:
            carried = self._by_relay.setdefault(path.relay, RateMeter())
            out.append(carried)
            into.append(carried)
        return Traffic(out, into, self._upload, self._download)

    def statistics(self, peer: PeerId | None, links: Sequence[Link]) -> LinkStatistics:
        """Of one peer, or of all; ``links`` are those open now."""
        totals = self._sent, self._received
        sent, received = totals if peer is None else self._by_peer.get(peer, (RateMeter(), RateMeter()))
        rtts_s = [link.rtt_s for link in links if link.rtt_s is not None]
        return LinkStatistics(
            sent_bytes=sent.total_bytes,
            received_bytes=received.total_bytes,
            rtt_s=statistics.median(rtts_s) if rtts_s else None,
            upload_bps=sent.peak_bps,
            download_bps=received.peak_bps,
            links=len(links),
        )
