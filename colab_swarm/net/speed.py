"""The speed test between two peers:

    MeasureSpeed             -------->
    bursts of `BurstPart`    -------->
                             <--------  `TransferReport` after each: upload
                             <------->  the same the other way: download

The first burst has `_FIRST_BYTES`, and each further burst is four times as large, up to the agreed size. A burst that
takes at least `_ENOUGH_S` or has the agreed size is the last one, and gives the rate; both ends know this from its
report. So the test of a slow link takes a second or two. A fast link carries 4/3 of the agreed size in each direction
if the size is 4 MiB, the default, and always less than 7/3 of it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import msgspec

from colab_swarm.errors import PeerTimeout, ProtocolError, require
from colab_swarm.net.node import Node
from colab_swarm.net.patience import VisitLimit
from colab_swarm.net.peers import Message, PeerId, Refusal, Stream, short
from colab_swarm.runtime import loop_now

MAX_SIZE_BYTES = 32 << 20
_FIRST_BYTES = 64 << 10
_ENOUGH_S = 0.5
PAUSE_S = 10.0
_ANSWER_TIMEOUT_S = 60.0
# A payload of this size fits in one packet and is not copied.
_PART = bytes(120 << 10)


class MeasureSpeed(Message, frozen=True):
    """Opens a speed test with bursts of at most ``size_bytes`` in each direction."""

    size_bytes: Annotated[int, msgspec.Meta(gt=0, le=MAX_SIZE_BYTES)]


class BurstPart(Message, frozen=True):
    """Begins a burst if it has no payload; else contains a part of the burst."""


class TransferReport(Message, frozen=True):
    """Reports that a burst took ``seconds``, from its beginning to its last byte."""

    seconds: Annotated[float, msgspec.Meta(ge=0.0)]


@dataclass(frozen=True)
class Speed:
    """Bits per second to and from a peer, measured at the receiving end, and the round-trip time in seconds."""

    upload_bps: float
    download_bps: float
    rtt_s: float


class SpeedTests:
    """Answers the speed tests of other peers: one at a time, and each peer at most once in `PAUSE_S`."""

    def __init__(self, peers: Node) -> None:
        self._busy = False
        self._tests = VisitLimit(1, PAUSE_S)
        peers.serve_stream(MeasureSpeed, self._answer)

    async def _answer(self, test: MeasureSpeed, stream: Stream) -> None:
        require(not self._busy, "a speed test with another peer is running: wait a moment", Refusal)
        admitted = self._tests.admit(stream.peer, loop_now())
        require(admitted, f"one speed test in {PAUSE_S:g} s: wait a moment", Refusal)
        self._busy = True
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await _rate_bps(partial(_absorb, stream), test.size_bytes)
                await _rate_bps(partial(_send, stream), test.size_bytes)
        except TimeoutError:
            raise Refusal(f"a speed test may take {_ANSWER_TIMEOUT_S:g} s") from None
        finally:
            self._busy = False


async def measure(peers: Node, peer: PeerId, *, size_bytes: int = 4 << 20, timeout_s: float = 15.0) -> Speed:
    """Measure the speed to ``peer`` and back with bursts of at most ``size_bytes``, in a second or two per direction.

    Raises PeerError if the peer cannot be reached, is lost, is too slow or refuses the test, and ValueError if the size
    is not allowed.
    """
    require(0 < size_bytes <= MAX_SIZE_BYTES, f"size_bytes={size_bytes} is not in 1 to {MAX_SIZE_BYTES}")
    test = MeasureSpeed(size_bytes)
    try:
        async with asyncio.timeout(timeout_s), await peers.stream(peer, test, timeout_s=timeout_s) as stream:
            rtt_s = peers.statistics(peer).rtt_s or 0.0
            upload_bps = await _rate_bps(partial(_send, stream), size_bytes)
            download_bps = await _rate_bps(partial(_absorb, stream), size_bytes)
    except TimeoutError:
        raise PeerTimeout(f"the speed test with {short(peer)} did not end in {timeout_s:g} s") from None
    return Speed(upload_bps, download_bps, rtt_s)


async def _rate_bps(burst: Callable[[int], Awaitable[float]], limit_bytes: int) -> float:
    """Return the rate of the last burst; ``burst(size_bytes)`` makes a burst and returns how many seconds it took."""
    size_bytes = min(_FIRST_BYTES, limit_bytes)
    took_s = await burst(size_bytes)
    while size_bytes < limit_bytes and took_s < _ENOUGH_S:
        size_bytes = min(4 * size_bytes, limit_bytes)
        took_s = await burst(size_bytes)
    return size_bytes * 8 / max(took_s, 1e-9)


async def _send(stream: Stream, size_bytes: int) -> float:
    await stream.send(BurstPart())
    for begin in range(0, size_bytes, len(_PART)):
        await stream.send(BurstPart(), _PART[: size_bytes - begin])
    report, _ = await stream.receive(TransferReport)
    return report.seconds


async def _absorb(stream: Stream, missing_bytes: int) -> float:
    clock = asyncio.get_running_loop().time
    await stream.receive(BurstPart)
    began_at = clock()
    while missing_bytes > 0:
        _, payload = await stream.receive(BurstPart)
        missing_bytes -= len(payload)
    fault = f"{short(stream.peer)} sends more than was agreed in a speed test"
    require(not missing_bytes, fault, ProtocolError)
    took_s = clock() - began_at
    await stream.send(TransferReport(took_s))
    return took_s
