"""A simulated link: reliable, ordered, as slow as its peers' connections, and how it breaks.

A message leaves through the sender's upload pipe, first in, first out. It travels for the pair's
latency and enters through the receiver's download pipe; its first bit may enter before its last one
leaves. A lost message costs a retransmission. During a partition, messages wait at the far end: TCP
delivers them once the partition heals.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import msgspec

from colab_swarm.errors import PeerError, PeerLost, ProtocolError
from colab_swarm.net.mux import STREAM_WINDOW_BYTES, decoder_of, item_cost
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
from colab_swarm.sim.faults import Trap
from colab_swarm.sim.profiles import HostProfile, NetworkProfile

OVERHEAD_BYTES = 100  # headers of TCP/IP, WebSocket, frame and seal
RETRANSMISSION_S = 0.2
BUSY_BYTES = 1 << 16  # a second with less traffic says nothing about a connection's rate
BACKLOG_BYTES = 1 << 18  # what a stream may queue at its sender's connection, as in a socket's buffers


class Pipe:
    """One direction of a peer's connection: transfers follow each other."""

    def __init__(self, rate_bps: float) -> None:
        self.rate_bps, self.free_at, self.total_bytes = rate_bps, 0.0, 0
        self.peak_bps: float | None = None
        self._second, self._second_bytes = -1, 0

    def transfer(self, size_bytes: int, now: float, *, slowness: float) -> tuple[float, float]:
        """Queue ``size_bytes``; return when the first and the last bit pass."""
        begin = max(now, self.free_at)
        self.free_at = begin + size_bytes * 8 * slowness / self.rate_bps
        self.total_bytes += size_bytes
        if int(self.free_at) != self._second:
            self._second, self._second_bytes = int(self.free_at), 0
        self._second_bytes += size_bytes
        if self._second_bytes >= BUSY_BYTES:
            self.peak_bps = max(self.peak_bps or 0.0, self._second_bytes * 8.0)
        return begin, self.free_at


class Connection:
    """How one peer is connected to the network; ``slowness`` multiplies its transfer times and latency."""

    def __init__(self, name: str, host: HostProfile) -> None:
        self.name, self._host = name, host
        self.upload, self.download = Pipe(host.upload_bps), Pipe(host.download_bps)
        self.slowness = 1.0

    def limit(self, rate_bps: float | None) -> None:
        """Carry at most ``rate_bps`` in each direction, and never more than the profile allows."""
        most = math.inf if rate_bps is None else rate_bps
        self.upload.rate_bps = min(self._host.upload_bps, most)
        self.download.rate_bps = min(self._host.download_bps, most)


class Conditions:
    """The state of a simulated network that its links read: the profile and the faults in force.

    Attributes:
        loss: share of messages that need a retransmission.
        latency_factor, width: multiply the profile's latency and bandwidths.
    """

    def __init__(self, profile: NetworkProfile, seed: int) -> None:
        self.profile, self.rng = profile, random.Random(seed)
        self.loss, self.latency_factor, self.width = profile.loss, 1.0, 1.0
        self._groups: tuple[frozenset[str], ...] = ()
        self._traps: list[Trap] = []

    def separated(self, one: str, other: str) -> bool:
        """Return True if a partition lies between two peers."""
        if not self._groups:
            return False
        sides = [next((group for group in self._groups if name in group), None) for name in (one, other)]
        return None not in sides and sides[0] is not sides[1]

    def on_message(self, message: Message, sender: str, receiver: str) -> None:
        """Fire the faults that wait for this message, just before the receiver gets it."""
        for trap in [trap for trap in self._traps if trap.matches(message, sender, receiver)]:
            self._traps.remove(trap)
            trap.fire()


@dataclass
class _Lane:
    """One direction of a link: the messages in flight, in order. Timers say when, the queues say which is next."""

    sender: Connection
    receiver: Connection
    travelling: deque[tuple[int, float]] = field(default_factory=deque)  # size_bytes, last_bit_at
    in_flight: deque[tuple[Message | None, Callable[[], None]]] = field(default_factory=deque)
    arrival_at: float = 0.0
    held_up: int = 0
    sent_bytes: int = 0


class UnansweredCall:
    """A call that waits for its reply; ``handler`` answers it at the other end."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.handler: asyncio.Task[None] | None = None

    def answer(self, body: bytes) -> None:
        if not self.reply.done():
            self.reply.set_result(body)

    def fail(self, error: PeerError) -> None:
        self.cancel()
        if not self.reply.done():
            self.reply.set_exception(error)

    def cancel(self) -> None:
        if self.handler is not None:
            self.handler.cancel()


class SimLink:
    """The link between two peers; both hold the same object. A peer's link to itself has latency 0.

    Attributes:
        waiting: the calls and streams that fail when the link breaks.
    """

    def __init__(
        self, conditions: Conditions, ends: tuple[Connection, Connection], *, latency_s: float
    ) -> None:
        self.ends, self.latency_s, self.alive = ends, latency_s, True
        # a set would fail them in an order that no seed decides
        self.waiting: dict[UnansweredCall | SimStream, None] = {}
        self._conditions, self._loop = conditions, asyncio.get_running_loop()
        self._lanes = {end: _Lane(end, other) for end, other in (ends, ends[::-1])}

    def other(self, end: Connection) -> Connection:
        """Return the opposite end."""
        return self._lanes[end].receiver

    @property
    def rtt_s(self) -> float:
        """Round-trip time without jitter."""
        slowness = max(end.slowness for end in self.ends)
        return 2 * self.latency_s * slowness * self._conditions.latency_factor

    def carry(
        self,
        sender: Connection,
        size_bytes: int,
        deliver: Callable[[], None],
        *,
        message: Message | None = None,
    ) -> float:
        """Send ``size_bytes`` to the other end, then call ``deliver()``; never if the link breaks first.

        Scripted faults see ``message``; without one it is a control frame of the link.

        Returns:
            When the last bit leaves the sender, in loop time.

        Raises:
            PeerLost: the link is already broken.
        """
        lane = self._lanes[sender]
        if not self.alive:
            raise PeerLost(f"the link to {lane.receiver.name} is broken")
        size_bytes += OVERHEAD_BYTES
        lane.sent_bytes += size_bytes
        lane.in_flight.append((message, deliver))
        slowness = sender.slowness / self._conditions.width
        first_bit_at, last_bit_at = sender.upload.transfer(size_bytes, self._loop.time(), slowness=slowness)
        delay_s = self._delay_s()
        lane.arrival_at = max(lane.arrival_at, first_bit_at + delay_s)
        lane.travelling.append((size_bytes, last_bit_at + delay_s))
        self._loop.call_at(lane.arrival_at, self._arrive, lane)
        return last_bit_at

    def _delay_s(self) -> float:
        if not self.latency_s:
            return 0.0
        conditions, delay_s = self._conditions, self.rtt_s / 2
        if conditions.profile.jitter_s:
            jitter_s = conditions.rng.expovariate(1 / conditions.profile.jitter_s)
            delay_s += jitter_s * conditions.latency_factor
        while conditions.loss and conditions.rng.random() < conditions.loss:
            delay_s += max(RETRANSMISSION_S, self.rtt_s)
        return delay_s

    def _arrive(self, lane: _Lane) -> None:
        if self.alive:
            size_bytes, last_bit_at = lane.travelling.popleft()
            end, now = lane.receiver, self._loop.time()
            slowness = end.slowness / self._conditions.width
            _, passed_at = end.download.transfer(size_bytes, now, slowness=slowness)
            self._loop.call_at(max(passed_at, last_bit_at), self._deliver, lane)

    def _deliver(self, lane: _Lane) -> None:
        if not self.alive:
            return
        if self._conditions.separated(lane.sender.name, lane.receiver.name):
            lane.held_up += 1
            return
        message, deliver = lane.in_flight.popleft()
        if message is not None:
            self._conditions.on_message(message, lane.sender.name, lane.receiver.name)
        if self.alive:  # a scripted fault may just have broken it
            deliver()

    def resume(self) -> None:
        """Deliver what a healed partition had held up."""
        for lane in self._lanes.values():
            held_up, lane.held_up = lane.held_up, 0
            for _ in range(held_up):
                self._deliver(lane)

    def cut(self) -> None:
        """Break the link: messages in flight are lost. The ends notice later, by `fail_waiting`."""
        self.alive = False
        for lane in self._lanes.values():
            lane.in_flight.clear()
            lane.travelling.clear()

    def fail_waiting(self, text: str) -> None:
        """Fail all calls and streams of this link with `PeerLost`."""
        waiting, self.waiting = self.waiting, {}
        for one in waiting:
            one.fail(PeerLost(text))

    def statistics(self, end: Connection) -> LinkStatistics:
        """Return the figures as seen from ``end``; rates are those of its whole connection."""
        return LinkStatistics(
            sent_bytes=self._lanes[end].sent_bytes,
            received_bytes=self._lanes[self.other(end)].sent_bytes,
            rtt_s=self.rtt_s,
            upload_bps=end.upload.peak_bps,
            download_bps=end.download.peak_bps,
            links=int(self.alive),
        )


def encode(message: Message) -> bytes:
    """Encode a message as on the wire.

    Raises:
        ValueError: it is over `MAX_MESSAGE_BYTES`.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} takes {len(body)} bytes, limit {MAX_MESSAGE_BYTES}")
    return body


def decode(body: bytes, kind: type[M]) -> M:
    """Decode a message of type ``kind``.

    Raises:
        ProtocolError: the body is not valid.
    """
    try:
        message: M = decoder_of(kind).decode(body)
        return message
    except UNDECODABLE as error:
        raise ProtocolError(f"not a valid {kind.__name__}: {error}") from error


class SimStream:
    """One end of a stream, ``twin`` the other; implements `colab_swarm.net.peers.Stream`."""

    twin: SimStream

    def __init__(self, link: SimLink, end: Connection, peer: PeerId) -> None:
        self._link, self._end, self.peer = link, end, peer
        self._inbox: deque[tuple[bytes, bytes]] = deque()
        self._error: PeerError | None = None
        self._ended = self._peer_ended = self._discarding = False
        self._unread_bytes = 0  # credit taken by our items that the peer has not yet confirmed as read
        self._read_bytes = 0  # items that we read and have not yet confirmed
        self._changed = asyncio.Event()
        self._leaving: deque[tuple[float, int]] = deque()  # when its last bit leaves, size_bytes
        self._leaving_bytes = 0
        link.waiting[self] = None

    async def send(self, message: Message, payload: Buffer = b"") -> None:
        body, data = encode(message), bytes(payload)
        if len(data) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"payload of {len(data)} bytes, limit {MAX_PAYLOAD_BYTES}")
        self._check_sending()
        while self._unread_bytes >= STREAM_WINDOW_BYTES:
            await self._wait()
            self._check_sending()
        loop = asyncio.get_running_loop()
        while self._leaving_bytes > BACKLOG_BYTES and self._error is None:
            left_at, size_bytes = self._leaving.popleft()
            self._leaving_bytes -= size_bytes
            if left_at > loop.time():
                await asyncio.sleep(left_at - loop.time())
        self._check_sending()
        self._unread_bytes += item_cost(body, data)
        size_bytes = len(body) + len(data)
        on_item = partial(self.twin._on_item, body, data)
        self._leaving.append((self._link.carry(self._end, size_bytes, on_item, message=message), size_bytes))
        self._leaving_bytes += size_bytes

    def _check_sending(self) -> None:
        if self._ended:
            raise ValueError("send after end")
        if self._error is not None:
            raise PeerLost(str(self._error)) from self._error

    async def receive(self, kind: type[M]) -> tuple[M, memoryview]:
        while not self._inbox:
            if self._error is not None:
                raise self._error
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
        if self._error is None and not self._ended:
            self._ended = True
            self._link.carry(self._end, 0, self.twin._on_end)
            self._close_if_over()

    async def leave(self) -> None:
        """End our side and discard what still arrives, so that the peer does not wait for credit."""
        self._discarding = True
        while self._inbox:
            self._give_credit(item_cost(*self._inbox.popleft()))
        await self.end()

    def reset(self, reason: str = "") -> None:
        self.refuse(PeerLost(f"{self._end.name} reset the stream: {reason}"))

    def refuse(self, error: PeerError) -> None:
        """Drop the stream; the other end fails with ``error``."""
        if self._error is None and self._link.alive:
            self._link.carry(self._end, 0, partial(self.twin.fail, error))
        self.fail(PeerLost(str(error)))

    def fail(self, error: PeerError) -> None:
        """Raise ``error`` from every later call, unless the stream has failed before."""
        if self._error is None:
            self._error = error
            self._inbox.clear()
            self._link.waiting.pop(self, None)
            self._changed.set()

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
            self._changed.set()

    def _on_end(self) -> None:
        self._peer_ended = True
        self._close_if_over()
        self._changed.set()

    def _on_credit(self, read_bytes: int) -> None:
        self._unread_bytes -= read_bytes
        self._changed.set()

    def _give_credit(self, read_bytes: int) -> None:
        self._read_bytes += read_bytes
        if self._read_bytes >= STREAM_WINDOW_BYTES // 2 and self._link.alive:
            self._link.carry(self._end, 0, partial(self.twin._on_credit, self._read_bytes))
            self._read_bytes = 0

    def _close_if_over(self) -> None:
        if self._ended and self._peer_ended:
            self._link.waiting.pop(self, None)

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
