"""Traffic of a node: meters per peer and in total, limits that all links share, and a speed test between two peers.

    asking peer                      answering peer
    MeasureSpeed  ------------------>
    bursts of BurstPart ---------------->
                  <------------------  TransferReport after each: upload
                  <----------------->  the same the other way: download

Bursts grow fourfold from `FIRST_BYTES` until one takes `ENOUGH_S` or has the agreed size, as both ends
see by the report, and the last burst gives the rate. So a slow link needs a second or two, and a fast
one carries at most 4/3 of the size. An answering peer runs one test at a time, and each peer gets one
in `PAUSE_S`.
"""

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from colab_swarm.errors import PeerTimeout, ProtocolError
from colab_swarm.net.addresses import MAX_BOOK_ENTRIES, VisitLimit
from colab_swarm.net.carrier import LinkType, NodeSettings, Path, RateMeter, TokenBucket, Traffic
from colab_swarm.net.link import Link
from colab_swarm.net.peers import LinkStatistics, Message, PeerId, Peers, Refusal, Stream, refuse_if, short

MAX_SIZE_BYTES = 32 << 20
FIRST_BYTES = 64 << 10
GROWTH = 4
ENOUGH_S = 0.5
PAUSE_S = 10.0
ANSWER_TIMEOUT_S = 60.0
PART = bytes(120 << 10)  # one packet, no copy


class Metering:
    """Counts and limits the traffic of a node's links; ``tunnelled`` counts bytes sent through its own tunnel."""

    def __init__(self, settings: NodeSettings, clock: Callable[[], float]) -> None:
        self._clock, self._settings = clock, settings
        self._upload: list[TokenBucket] = []  # shared with all links
        self._download: list[TokenBucket] = []
        self.limit(None)
        self._sent, self._received, self.tunnelled = RateMeter(), RateMeter(), RateMeter()
        self._by_relay: dict[PeerId, RateMeter] = {}
        self._by_peer: dict[PeerId, tuple[RateMeter, RateMeter]] = {}

    def limit(self, rate_bps: float | None) -> None:
        """Limit all links together, open ones included, to ``rate_bps`` bits per second in each direction.

        The limits of the settings stay; None leaves only them.
        """
        limits = (self._upload, self._settings.upload_bps), (self._download, self._settings.download_bps)
        for buckets, set_bps in limits:
            rates = [rate for rate in (rate_bps, set_bps) if rate is not None]
            buckets[:] = [TokenBucket(min(rates), self._clock())] if rates else []

    def relayed_bytes(self) -> dict[PeerId, int]:
        """Return the bytes that each relay carried for this peer, both ways."""
        return {relay: meter.total_bytes for relay, meter in self._by_relay.items()}

    def traffic(self, peer: PeerId, path: Path, *, dialled: bool) -> Traffic:
        """Return the meters and limits of a new link to the peer."""
        sent, received = self._by_peer.setdefault(peer, (RateMeter(), RateMeter()))
        if len(self._by_peer) > MAX_BOOK_ENTRIES:
            del self._by_peer[next(iter(self._by_peer))]
        out, into = [sent, self._sent], [received, self._received]
        if path.way is LinkType.TUNNEL and not dialled:
            out.append(self.tunnelled)
        if path.relay is not None:
            carried = self._by_relay.setdefault(path.relay, RateMeter())
            out.append(carried)
            into.append(carried)
        return Traffic(out, into, self._upload, self._download)

    def statistics(self, peer: PeerId | None, links: Sequence[Link]) -> LinkStatistics:
        """Return the totals of one peer, or of all; ``links`` are those open now."""
        totals = self._sent, self._received
        sent, received = totals if peer is None else self._by_peer.get(peer, (RateMeter(), RateMeter()))
        rtts_s = [link.rtt_s for link in links if link.rtt_s is not None]
        return LinkStatistics(
            sent_bytes=sent.total_bytes,
            received_bytes=received.total_bytes,
            rtt_s=statistics.median(rtts_s) if rtts_s else None,
            upload_bps=sent.peak_bps,
            download_bps=received.peak_bps,
        )


class MeasureSpeed(Message, frozen=True):
    """Opens a test of at most ``size_bytes`` each way."""

    size_bytes: Annotated[int, msgspec.Meta(gt=0, le=MAX_SIZE_BYTES)]


class BurstPart(Message, frozen=True):
    """Begins a burst, without a payload, or carries a part of it."""


class TransferReport(Message, frozen=True):
    """A burst took ``seconds``, from its beginning to its last byte."""

    seconds: Annotated[float, msgspec.Meta(ge=0.0)]


@dataclass(frozen=True)
class Speed:
    """Bits per second to and from a peer, as the receiving end saw them, and the round-trip time in seconds."""

    upload_bps: float
    download_bps: float
    rtt_s: float


class SpeedTests:
    """Answers the speed tests of other peers, within bounds."""

    def __init__(self, peers: Peers) -> None:
        self._busy = False
        self._tests = VisitLimit(1, PAUSE_S)
        peers.serve_stream(MeasureSpeed, self._answer)

    async def _answer(self, test: MeasureSpeed, stream: Stream) -> None:
        refuse_if(self._busy, "a speed test with another peer is running: wait a moment")
        refuse_if(
            not self._tests.admit(stream.peer, asyncio.get_running_loop().time()),
            f"one speed test in {PAUSE_S:g} s: wait a moment",
        )
        self._busy = True
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await _absorb(stream, test.size_bytes)
                await _send_bursts(stream, test.size_bytes)
        except TimeoutError:
            raise Refusal(f"a speed test may take {ANSWER_TIMEOUT_S:g} s") from None
        finally:
            self._busy = False


async def measure(peers: Peers, peer: PeerId, *, size_bytes: int = 4 << 20, timeout_s: float = 15.0) -> Speed:
    """Measure the speed to ``peer`` and back with at most ``size_bytes`` each way; takes a second or two each way.

    Raises:
        PeerError: the peer cannot be reached, is lost, too slow, does not serve tests, or refuses one now.
    """
    test = MeasureSpeed(size_bytes)
    try:
        async with asyncio.timeout(timeout_s), await peers.stream(peer, test, timeout_s=timeout_s) as stream:
            rtt_s = peers.statistics(peer).rtt_s or 0.0
            upload_bps = await _send_bursts(stream, size_bytes)
            download_bps = await _absorb(stream, size_bytes)
    except TimeoutError:
        raise PeerTimeout(f"the speed test with {short(peer)} did not end in {timeout_s:g} s") from None
    return Speed(upload_bps, download_bps, rtt_s)


def _sizes(limit_bytes: int) -> Iterator[int]:
    size_bytes = FIRST_BYTES
    while size_bytes < limit_bytes:
        yield size_bytes
        size_bytes *= GROWTH
    yield limit_bytes


async def _send_bursts(stream: Stream, limit_bytes: int) -> float:
    rate_bps = 0.0
    for size_bytes in _sizes(limit_bytes):
        await stream.send(BurstPart())
        for begin in range(0, size_bytes, len(PART)):
            await stream.send(BurstPart(), PART[: size_bytes - begin])
        took_s = (await stream.receive(TransferReport))[0].seconds
        rate_bps = size_bytes * 8 / max(took_s, 1e-9)
        if took_s >= ENOUGH_S:
            break
    return rate_bps


async def _absorb(stream: Stream, limit_bytes: int) -> float:
    clock, rate_bps = asyncio.get_running_loop().time, 0.0
    for missing_bytes in _sizes(limit_bytes):
        await stream.receive(BurstPart)
        began_at, size_bytes = clock(), missing_bytes
        while missing_bytes > 0:
            missing_bytes -= len((await stream.receive(BurstPart))[1])
        if missing_bytes:
            raise ProtocolError(f"{short(stream.peer)} sends more than was agreed in a speed test")
        took_s = clock() - began_at
        await stream.send(TransferReport(took_s))
        rate_bps = size_bytes * 8 / max(took_s, 1e-9)
        if took_s >= ENOUGH_S:
            break
    return rate_bps
