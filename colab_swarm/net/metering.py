"""Traffic of a node: meters per peer and in total, limits that all links share, and a speed test between two peers.

    asking peer                      answering peer
    MeasureSpeed  ------------------>
    Beat          <----------------->  Beat             `BEATS` times: round-trip time
    Burst, payload ----------------->
                  <------------------  TransferReport   upload, again with larger bursts
    Burst(0)      ------------------>
                  <----------------->                   the same the other way: download

Bursts grow fourfold from `FIRST_BYTES` until one takes `ENOUGH_S` or has the agreed size, and the
last burst gives the rate. So a slow link needs a second or two, and a fast one carries at most 4/3
of the size. An answering peer runs one test at a time, and each peer gets one in `PAUSE_S`.
"""

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from colab_swarm.errors import PeerTimeout, ProtocolError
from colab_swarm.net.addresses import MAX_BOOK_ENTRIES
from colab_swarm.net.carrier import LinkType, NodeSettings, Path, RateMeter, TokenBucket, Traffic
from colab_swarm.net.link import Link
from colab_swarm.net.peers import LinkStatistics, Message, PeerId, Peers, Refusal, Stream, short

MAX_SIZE_BYTES = 32 << 20
FIRST_BYTES = 64 << 10
GROWTH = 4
ENOUGH_S = 0.5
PAUSE_S = 10.0
BEATS = 3
ANSWER_TIMEOUT_S = 60.0
PIECE = bytes(120 << 10)
"""One packet, no copy."""


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
            links=len(links),
        )


class MeasureSpeed(Message, frozen=True):
    """Opens a test of at most ``size_bytes`` each way."""

    size_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.size_bytes <= MAX_SIZE_BYTES:
            raise ValueError(f"size_bytes={self.size_bytes} is not in 1 to {MAX_SIZE_BYTES}")


class Beat(Message, frozen=True):
    """Measures the round trip, or carries a piece of a burst."""


class Burst(Message, frozen=True):
    """Announces a burst of payload; 0 bytes end this direction."""

    size_bytes: int


class TransferReport(Message, frozen=True):
    """A burst took ``seconds``, from its announcement to its last byte."""

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
        self._peers = peers
        self._busy = False
        self._tested_at: dict[PeerId, float] = {}
        peers.serve_stream(MeasureSpeed, self._answer)

    def close(self) -> None:
        self._peers.unserve(MeasureSpeed)

    async def _answer(self, test: MeasureSpeed, stream: Stream) -> None:
        now = asyncio.get_running_loop().time()
        self._tested_at = {each: at for each, at in self._tested_at.items() if now - at < PAUSE_S}
        if stream.peer in self._tested_at:
            raise Refusal(f"one speed test in {PAUSE_S:g} s: wait a moment")
        if self._busy:
            raise Refusal("a speed test with another peer is running: wait a moment")
        self._tested_at[stream.peer] = now
        self._busy = True
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                for _ in range(BEATS):
                    await stream.receive(Beat)
                    await stream.send(Beat())
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
        ValueError: size_bytes is out of range.
    """
    test, loop, rtts_s = MeasureSpeed(size_bytes), asyncio.get_running_loop(), []
    try:
        async with asyncio.timeout(timeout_s), await peers.stream(peer, test, timeout_s=timeout_s) as stream:
            for _ in range(BEATS):
                began_at = loop.time()
                await stream.send(Beat())
                await stream.receive(Beat)
                rtts_s.append(loop.time() - began_at)
            upload_bps = await _send_bursts(stream, size_bytes)
            download_bps = await _absorb(stream, size_bytes)
    except TimeoutError:
        raise PeerTimeout(f"the speed test with {short(peer)} did not end in {timeout_s:g} s") from None
    return Speed(upload_bps, download_bps, min(rtts_s))


async def _send_bursts(stream: Stream, limit_bytes: int) -> float:
    size_bytes = min(FIRST_BYTES, limit_bytes)
    while True:
        await stream.send(Burst(size_bytes))
        for begin in range(0, size_bytes, len(PIECE)):
            await stream.send(Beat(), PIECE[: size_bytes - begin])
        took, _ = await stream.receive(TransferReport)
        if took.seconds >= ENOUGH_S or size_bytes >= limit_bytes:
            break
        size_bytes = min(GROWTH * size_bytes, limit_bytes)
    await stream.send(Burst(0))
    return _bps(size_bytes, took.seconds)


async def _absorb(stream: Stream, limit_bytes: int) -> float:
    loop = asyncio.get_running_loop()
    allowed_bytes, rate_bps = 2 * limit_bytes, 0.0
    while size_bytes := (await stream.receive(Burst))[0].size_bytes:
        allowed_bytes -= size_bytes
        began_at, missing_bytes = loop.time(), size_bytes
        while missing_bytes > 0 and allowed_bytes >= 0:
            missing_bytes -= len((await stream.receive(Beat))[1])
        if missing_bytes or allowed_bytes < 0:
            raise ProtocolError(f"{short(stream.peer)} sends more than was agreed in a speed test")
        took_s = loop.time() - began_at
        await stream.send(TransferReport(took_s))
        rate_bps = _bps(size_bytes, took_s)
    return rate_bps


def _bps(size_bytes: int, seconds: float) -> float:
    return size_bytes * 8 / seconds if seconds else float("inf")
