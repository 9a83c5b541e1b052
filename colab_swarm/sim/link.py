"""A simulated link: reliable, ordered, as slow as its peers' connections, and how it breaks.

A message leaves through its sender's upload pipe (first in, first out), travels for the pair's latency
and enters through the receiver's download pipe; its first bit may enter before its last one leaves. A lost
message costs a retransmission. While the two are partitioned, messages wait at the far end: TCP repeats them
after the partition heals.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from colab_swarm.errors import PeerError, PeerLost, ProtocolError
from colab_swarm.net.mux import STREAM_WINDOW_BYTES, item_cost
from colab_swarm.net.peers import (
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    UNDECODABLE,
    Buffer,
    LinkStatistics,
    M,
    Message,
    PeerId,
    StreamEnded,
)
from colab_swarm.sim.profiles import HostProfile, NetworkProfile

OVERHEAD_BYTES = 100

"""Headers of TCP/IP, WebSocket, frame and seal."""

RETRANSMISSION_S = 0.2

BUSY_BYTES = 1 << 16

"""A second that moved less says nothing about a connection's rate."""


class Pipe:
    """One direction of a peer's connection: transfers follow each other."""

    def __init__(self, rate_bps: float) -> None:
        self.rate_bps = rate_bps
        self.slowness = self.width = 1.0
        self.free_at = 0.0
        self.total_bytes = 0
        self.peak_bps: float | None = None
        self._second, self._second_bytes = -1, 0

    def transfer(self, size_bytes: int, now: float) -> tuple[float, float]:
        """Queue ``size_bytes``; returns when its first and its last bit pass."""
        begin = max(now, self.free_at)
        self.free_at = begin + size_bytes * 8 * self.slowness / (self.rate_bps * self.width)
        self._measure(size_bytes, int(self.free_at))
        return begin, self.free_at

    def _measure(self, size_bytes: int, second: int) -> None:
        self.total_bytes += size_bytes
        if second != self._second:
            self._second, self._second_bytes = second, 0
        self._second_bytes += size_bytes
        if self._second_bytes >= BUSY_BYTES:
            self.peak_bps = max(self.peak_bps or 0.0, self._second_bytes * 8.0)


class Connection:
    """How one peer is connected to the world."""

    def __init__(self, name: str, host: HostProfile) -> None:
        self.name, self._host = name, host
        self.upload = Pipe(host.upload_bps)
        self.download = Pipe(host.download_bps)

    def limit(self, rate_bps: float | None) -> None:
        """Carry at most so many bits per second in each direction, nor more than the profile says."""
        most = math.inf if rate_bps is None else rate_bps
        self.upload.rate_bps = min(self._host.upload_bps, most)
        self.download.rate_bps = min(self._host.download_bps, most)

    @property
    def slowness(self) -> float:
        """1 undisturbed; a fault multiplies transfer times and latency by it."""
        return self.upload.slowness

    def slow(self, factor: float) -> None:
        """Make both directions ``factor`` times slower than their profile."""
        self.upload.slowness = self.download.slowness = factor

    def widen(self, factor: float) -> None:
        """Let both directions carry ``factor`` times as much as their profile says; the latency stays."""
        self.upload.width = self.download.width = factor


class Breakable(Protocol):
    """Whoever waits for something to come over a link."""

    def fail(self, error: PeerError) -> None:
        """The link broke."""


class World(Protocol):
    """What a link needs to know of its network."""

    profile: NetworkProfile
    rng: random.Random
    loss: float
    latency_factor: float

    def separated(self, one: str, other: str) -> bool:
        """Whether a partition lies between two peers."""

    def delivering(self, message: Message, sender: str, receiver: str) -> None:
        """Called just before ``message`` is handed over; scripted faults may fire."""


@dataclass
class _Lane:
    """One direction of a link: what is on its way, in order. Timers say when, the queues say which is next."""

    sender: Connection
    receiver: Connection
    travelling: deque[tuple[int, float]] = field(default_factory=deque)  # size_bytes, last_bit_at
    in_flight: deque[tuple[Message | None, Callable[[], None]]] = field(default_factory=deque)
    arrival_at: float = 0.0
    held_up: int = 0
    sent_bytes: int = 0


class SimLink:
    """The link between two peers; both hold the same object. Latency 0 is a peer's link to itself."""

    def __init__(self, world: World, ends: tuple[Connection, Connection], *, latency_s: float) -> None:
        self.ends = ends
        self.latency_s = latency_s
        self.alive = True
        self.guests: dict[Breakable, None] = {}  # a set would fail them in an order that no seed decides
        self._world = world
        self._loop = asyncio.get_running_loop()
        self._lanes = {end: _Lane(end, other) for end, other in (ends, ends[::-1])}

    def other(self, end: Connection) -> Connection:
        """The opposite end."""
        return self._lanes[end].receiver

    @property
    def rtt_s(self) -> float:
        """Round-trip time without jitter."""
        slowness = max(end.slowness for end in self.ends)
        return 2 * self.latency_s * slowness * self._world.latency_factor

    def carry(
        self,
        sender: Connection,
        size_bytes: int,
        deliver: Callable[[], None],
        *,
        message: Message | None = None,
    ) -> float:
        """Bring ``size_bytes`` to the other end, then ``deliver()``; never, if the link breaks first.

        Returns when the last bit leaves the sender, in loop time.

        Scripted faults see ``message``; without one it is a control frame of the link.

        Raises:
            PeerLost: the link is already broken.
        """
        lane = self._lanes[sender]
        if not self.alive:
            raise PeerLost(f"the link to {lane.receiver.name} is broken")
        size_bytes += OVERHEAD_BYTES
        lane.sent_bytes += size_bytes
        lane.in_flight.append((message, deliver))
        first_bit_at, last_bit_at = sender.upload.transfer(size_bytes, self._loop.time())
        delay_s = self._delay_s()
        lane.arrival_at = max(lane.arrival_at, first_bit_at + delay_s)
        lane.travelling.append((size_bytes, last_bit_at + delay_s))
        self._loop.call_at(lane.arrival_at, self._arrive, lane)
        return last_bit_at

    def _delay_s(self) -> float:
        """One-way delay of the next message, seconds."""
        if not self.latency_s:
            return 0.0
        world = self._world
        delay_s = self.rtt_s / 2
        if world.profile.jitter_s:
            delay_s += world.rng.expovariate(1 / world.profile.jitter_s) * world.latency_factor
        while world.loss and world.rng.random() < world.loss:
            delay_s += max(RETRANSMISSION_S, self.rtt_s)
        return delay_s

    def _arrive(self, lane: _Lane) -> None:
        """The first bit is at the receiver's door."""
        if self.alive:
            size_bytes, last_bit_at = lane.travelling.popleft()
            _, passed_at = lane.receiver.download.transfer(size_bytes, self._loop.time())
            self._loop.call_at(max(passed_at, last_bit_at), self._deliver, lane)

    def _deliver(self, lane: _Lane) -> None:
        """The next message is in."""
        if not self.alive:
            return
        if self._world.separated(lane.sender.name, lane.receiver.name):
            lane.held_up += 1
            return
        message, deliver = lane.in_flight.popleft()
        if message is not None:
            self._world.delivering(message, lane.sender.name, lane.receiver.name)
        if self.alive:  # a scripted fault may just have broken it
            deliver()

    def resume(self) -> None:
        """Deliver what a healed partition had held up."""
        for lane in self._lanes.values():
            held_up, lane.held_up = lane.held_up, 0
            for _ in range(held_up):
                self._deliver(lane)

    def cut(self) -> None:
        """Break the link: what is on its way is lost. Nobody is told yet."""
        self.alive = False
        for lane in self._lanes.values():
            lane.in_flight.clear()
            lane.travelling.clear()

    def fail_guests(self, text: str) -> None:
        """Tell whoever waits for something from this link that it broke."""
        guests, self.guests = self.guests, {}
        for guest in guests:
            guest.fail(PeerLost(text))

    def statistics(self, end: Connection) -> LinkStatistics:
        """As seen from ``end``; rates are totals of its whole connection."""
        return LinkStatistics(
            sent_bytes=self._lanes[end].sent_bytes,
            received_bytes=self._lanes[self.other(end)].sent_bytes,
            rtt_s=self.rtt_s,
            upload_bps=end.upload.peak_bps,
            download_bps=end.download.peak_bps,
            links=int(self.alive),
        )


BACKLOG_BYTES = 1 << 18

"""What a stream may queue at its sender's connection: a socket's buffers are as small."""


@cache
def _decoder(kind: type[Message]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def encode(message: Message) -> bytes:
    """The message as it would be on the wire.

    Raises:
        ValueError: it is over `MAX_MESSAGE_BYTES`.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} takes {len(body)} bytes, limit {MAX_MESSAGE_BYTES}")
    return body


def decode(body: bytes, kind: type[M]) -> M:
    """Read a message of type ``kind`` from the wire.

    Raises:
        ProtocolError: it is none.
    """
    try:
        message: M = _decoder(kind).decode(body)
        return message
    except UNDECODABLE as error:
        raise ProtocolError(f"not a valid {kind.__name__}: {error}") from error


class SimStream:
    """One end of a stream; ``twin`` is the other."""

    twin: SimStream

    def __init__(self, link: SimLink, end: Connection, peer: PeerId) -> None:
        self._link, self._end, self._peer = link, end, peer
        self._inbox: deque[tuple[bytes, bytes]] = deque()
        self._error: PeerError | None = None
        self._ended = self._peer_ended = self._discarding = False
        self._unread_bytes = 0  # what items not yet known to be read take from our credit
        self._read_bytes = 0  # the same of those that we read, not yet told
        self._waiting: list[asyncio.Future[None]] = []
        self._leaving: deque[tuple[float, int]] = deque()  # when its last bit leaves, size_bytes
        self._leaving_bytes = 0
        link.guests[self] = None

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        return self._peer

    async def send(self, message: Message, payload: Buffer = b"") -> None:
        """See `Stream.send`; waits while the receiver has much to read, or the connection much to carry."""
        body, data = encode(message), bytes(payload)
        if len(data) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"payload of {len(data)} bytes, limit {MAX_PAYLOAD_BYTES}")
        self._check_sending()
        while self._unread_bytes >= STREAM_WINDOW_BYTES:
            await self._wait()
            self._check_sending()
        await self._wait_ready()
        self._check_sending()
        self._unread_bytes += item_cost(body, data)
        size_bytes = len(body) + len(data)
        on_item = partial(self.twin._on_item, body, data)
        left_at = self._link.carry(self._end, size_bytes, on_item, message=message)
        self._leaving.append((left_at, size_bytes))
        self._leaving_bytes += size_bytes

    async def _wait_ready(self) -> None:
        """Wait while much of this stream has not left this peer."""
        clock = asyncio.get_running_loop().time
        while self._leaving_bytes > BACKLOG_BYTES and self._error is None:
            left_at, size_bytes = self._leaving.popleft()
            self._leaving_bytes -= size_bytes
            if left_at > clock():
                await asyncio.sleep(left_at - clock())

    async def receive(self, kind: type[M]) -> tuple[M, memoryview]:
        """Wait for the next item."""
        while not self._inbox:
            self._check()
            if self._peer_ended:
                raise StreamEnded(f"{self._link.other(self._end).name} ended the stream")
            await self._wait()
        body, data = self._inbox.popleft()
        self._give_credit(item_cost(body, data))
        try:
            return decode(body, kind), memoryview(data)
        except ProtocolError as error:
            self.reset(str(error))
            raise

    async def end(self) -> None:
        """Say that nothing more will be sent; nothing happens if the stream is over."""
        if self._error is None and not self._ended:
            self._ended = True
            self._link.carry(self._end, 0, self.twin._on_end)
            self._leave_if_over()

    async def leave(self) -> None:
        """End our side; what still comes is thrown away, so that the peer does not wait for credit."""
        self._discarding = True
        while self._inbox:
            self._give_credit(item_cost(*self._inbox.popleft()))
        await self.end()

    def reset(self, reason: str = "") -> None:
        """Drop the stream both ways."""
        self.refuse(PeerLost(f"{self._end.name} reset the stream: {reason}"))

    def refuse(self, error: PeerError) -> None:
        """Drop the stream; the other end fails with ``error``."""
        if self._error is None and self._link.alive:
            self._link.carry(self._end, 0, partial(self.twin.fail, error))
        self.fail(PeerLost(str(error)))

    def fail(self, error: PeerError) -> None:
        """Everything from now on raises ``error``, if nothing went wrong before."""
        if self._error is None:
            self._error = error
            self._inbox.clear()
            self._link.guests.pop(self, None)
            self._wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.leave()
        else:
            self.reset(kind.__name__)

    def _on_item(self, body: bytes, data: bytes) -> None:
        if self._discarding:
            self._give_credit(item_cost(body, data))
        elif self._error is None:
            self._inbox.append((body, data))
            self._wake()

    def _on_end(self) -> None:
        self._peer_ended = True
        self._leave_if_over()
        self._wake()

    def _on_credit(self, read_bytes: int) -> None:
        self._unread_bytes -= read_bytes
        self._wake()

    def _give_credit(self, read_bytes: int) -> None:
        self._read_bytes += read_bytes
        if self._read_bytes >= STREAM_WINDOW_BYTES // 2 and self._link.alive:
            self._link.carry(self._end, 0, partial(self.twin._on_credit, self._read_bytes))
            self._read_bytes = 0

    def _leave_if_over(self) -> None:
        if self._ended and self._peer_ended:
            self._link.guests.pop(self, None)

    def _check_sending(self) -> None:
        if self._ended:
            raise ValueError("send after end")
        if self._error is not None:
            raise PeerLost(str(self._error)) from self._error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _wait(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
