"""A relay: joins two connections into a circuit and pumps bytes between them, within quotas.

1. A peer that cannot be dialled keeps a link to the relay and asks for a place: `Reserve`.
2. Whoever wants to reach it asks the relay: `OpenCircuit`. The relay gives a ticket to each end (`CircuitTicket`
   to the one that asked, `CircuitOffer` to the other).
   A peer that can be dialled needs no place: the relay links to it for callers that cannot (whose firewall only
   lets them dial the port of https, say).
3. Both connect to the relay's ordinary port and show their ticket as the first message. When both are there the
   relay says `GO` to the end that asked, and from then on copies messages unread.

The two ends shake hands and encrypt through the circuit as over any connection, so the relay sees sizes and
times, and who talks to whom, but no key and no content; and it spends no time on cryptography.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from colab_swarm.errors import PeerError
from colab_swarm.markup import settings
from colab_swarm.net.carrier import HostPort, TokenBucket
from colab_swarm.net.handshake import TICKET
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Message, PeerId, Refusal, Role, short
from colab_swarm.net.websocket import MAX_MESSAGE_BYTES, SCRATCH_BYTES, WebSocket, write_message

logger = logging.getLogger(__name__)
TOKEN_BYTES = 16
GO = b"go"
BATCH_BYTES = SCRATCH_BYTES + MAX_MESSAGE_BYTES + 16
"""One read, and a message that came in fragments before."""
TICKET_S = 15.0
"""How long the two ends may take to show their tickets."""
OFFER_TIMEOUT_S = 10.0
CIRCUITS_PER_PAIR = 4
"""So that nobody alone can use up all the circuits that another peer may have."""
IDLE_S = 120.0
"""A circuit that carries nothing for so long is dead: links ping. Ends that kill together close nothing."""
Id = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
Host = Annotated[str, msgspec.Meta(max_length=64)]


class Reserve(Message, frozen=True):
    """Keep a place for me: others may reach me through you."""


class Reserved(Message, frozen=True):
    """A place is kept for ``seconds``, as long as the link stands; the relay sees the peer at ``seen``."""

    seconds: float
    seen_host: Host
    seen_port: int


class OpenCircuit(Message, frozen=True):
    """I want to reach ``peer``, which has a place here."""

    peer: Id


class CircuitTicket(Message, frozen=True):
    """Show this at the relay's port; ``seen`` as in `Reserved`."""

    token: Token
    seen_host: Host
    seen_port: int


class CircuitOffer(Message, frozen=True):
    """``peer``, which I see at ``seen_host``, wants to reach you: show this ticket at my port."""

    peer: Id
    token: Token
    seen_host: Host = ""


class CircuitAccepted(Message, frozen=True):
    """The offer is taken."""


@dataclass(frozen=True)
class RelayQuota:
    """What a relay gives; None for no bound.

    Attributes:
        places: peers that may hold a place.
        circuits, circuits_per_peer: open at once, in all and for one peer.
        circuit_bytes, circuit_s: one circuit carries so much, for so long; then it is closed.
        circuit_bps, total_bps: bits per second of one circuit and of all.
        total_bytes: all circuits together, since the relay began; then it opens no more.
    """

    places: int = 256
    circuits: int = 256
    circuits_per_peer: int = 32
    circuit_bytes: float | None = None
    circuit_s: float | None = None
    circuit_bps: float | None = None
    total_bps: float | None = None
    total_bytes: float | None = None
    place_s: float = 300.0

    def __repr__(self) -> str:
        return settings(self)


@dataclass(eq=False)
class Circuit:
    """One circuit; ``tokens`` are those that have not been shown, with which end they stand for."""

    ends: tuple[PeerId, PeerId]
    opened_at: float
    used_at: float
    buckets: tuple[TokenBucket, ...]
    carried_bytes: int = 0
    tokens: dict[bytes, int] = field(default_factory=dict)
    sockets: dict[int, WebSocket] = field(default_factory=dict)


class RelayState:
    """Who holds a place, which circuits there are, what they carried. Pure; illegal moves raise `Refusal`."""

    def __init__(self, quota: RelayQuota, now: float) -> None:
        self.quota = quota
        self.places: dict[PeerId, float] = {}
        self.circuits: set[Circuit] = set()
        self.carried_bytes = 0
        self._total = () if quota.total_bps is None else (TokenBucket(quota.total_bps, now),)

    def reserve(self, peer: PeerId, now: float) -> None:
        """Keep a place for the peer, or keep it for longer."""
        self.places = {one: until for one, until in self.places.items() if until > now}
        if peer not in self.places and len(self.places) >= self.quota.places:
            raise Refusal(f"all {self.quota.places} places are taken")
        self.places[peer] = now + self.quota.place_s

    def has_place(self, peer: PeerId, now: float) -> bool:
        """Whether a place is kept for the peer."""
        return self.places.get(peer, 0.0) > now

    def open(self, caller: PeerId, called: PeerId, now: float, random: Callable[[int], bytes]) -> Circuit:
        """A circuit between two peers, with a ticket for each end."""
        quota = self.quota
        if len(self.circuits) >= quota.circuits:
            raise Refusal(f"{quota.circuits} circuits are open here")
        for peer in (caller, called):
            if sum(peer in circuit.ends for circuit in self.circuits) >= quota.circuits_per_peer:
                raise Refusal(f"{quota.circuits_per_peer} circuits of {short(peer)} are open here")
        if sum({caller, called} == {*circuit.ends} for circuit in self.circuits) >= CIRCUITS_PER_PAIR:
            raise Refusal(f"{CIRCUITS_PER_PAIR} circuits between the two are open here")
        if quota.total_bytes is not None and self.carried_bytes >= quota.total_bytes:
            raise Refusal(f"this relay has carried its {quota.total_bytes / 1e9:g} GB")
        own = () if quota.circuit_bps is None else (TokenBucket(quota.circuit_bps, now),)
        circuit = Circuit((caller, called), now, now, (*own, *self._total))
        circuit.tokens = {random(TOKEN_BYTES): 0, random(TOKEN_BYTES): 1}
        self.circuits.add(circuit)
        return circuit

    def find(self, token: bytes) -> tuple[Circuit, int] | None:
        """The circuit that a ticket is for and the end it stands for; a ticket is good once."""
        for circuit in self.circuits:
            if token in circuit.tokens:
                return circuit, circuit.tokens.pop(token)
        return None

    def carry(self, circuit: Circuit, size: int, now: float) -> tuple[float, str | None]:
        """Account for bytes: in how many seconds more may come, and why the circuit must end, if it must."""
        quota = self.quota
        circuit.used_at = now
        circuit.carried_bytes += size
        self.carried_bytes += size
        for bucket in circuit.buckets:
            bucket.take(size, now)
        if quota.circuit_bytes is not None and circuit.carried_bytes > quota.circuit_bytes:
            return 0.0, f"the relay carries {quota.circuit_bytes / 1e6:g} MB per circuit"
        if quota.total_bytes is not None and self.carried_bytes > quota.total_bytes:
            return 0.0, f"the relay has carried its {quota.total_bytes / 1e9:g} GB"
        return max((bucket.delay(now) for bucket in circuit.buckets), default=0.0), None

    def overdue(self, now: float) -> dict[Circuit, str]:
        """Circuits whose time is up, with the reason."""
        limit_s = self.quota.circuit_s
        late = {one: "nobody spoke" for one in self.circuits if now - one.used_at > IDLE_S}
        late |= {one: "the other end did not come" for one in self.circuits if self._stalled(one, now)}
        if limit_s is not None:
            text = f"the relay keeps a circuit for {limit_s:g} s"
            late |= {one: text for one in self.circuits if now - one.opened_at > limit_s}
        return late

    def _stalled(self, circuit: Circuit, now: float) -> bool:
        return len(circuit.sockets) < 2 and now - circuit.opened_at > TICKET_S


class Relay:
    """Relays for the peers of the run until `close`.

    Args:
        node: a peer that others can dial.
        quota: what it gives.
    """

    def __init__(self, node: Node, quota: RelayQuota = RelayQuota()) -> None:
        self._node = node
        self._loop = asyncio.get_running_loop()
        self.books = RelayState(quota, self._loop.time())
        self.batch = _Batch()
        node.serve(Reserve, self._on_reserve, role=Role.REDUCER)
        node.serve(OpenCircuit, self._on_open)
        node.linker.listener.on_ticket = self._on_ticket
        self._stop_listening = node.on_lost(self._on_lost)
        self._upkeep = node.linker.spawn(self._expire())

    def close(self) -> None:
        """End all circuits and relay no more."""
        self._stop_listening()
        self._upkeep.cancel()
        self._node.linker.listener.on_ticket = None
        self._node.unserve(Reserve)
        self._node.unserve(OpenCircuit)
        for circuit in list(self.books.circuits):
            self.end(circuit, "the relay closed")

    def __repr__(self) -> str:
        books = self.books
        return f"Relay({len(books.places)} places, {len(books.circuits)} circuits, {books.carried_bytes / 1e6:.1f} MB)"

    async def _on_reserve(self, peer: PeerId, message: Reserve) -> Reserved:
        self.books.reserve(peer, self._loop.time())
        return Reserved(self.books.quota.place_s, *self._seen(peer))

    def _seen(self, peer: PeerId) -> HostPort:
        path = self._node.path_to(peer)
        return (path and path.remote) or ("", 0)

    async def _on_open(self, peer: PeerId, message: OpenCircuit) -> CircuitTicket:
        called = PeerId(message.peer)
        if called in (peer, self._node.id):
            raise Refusal("a circuit leads to another peer than you and this relay")
        await self._require_reachable(called)
        circuit = self.books.open(peer, called, self._loop.time(), os.urandom)
        mine, theirs = circuit.tokens
        path = self._node.path_to(peer)
        offer = CircuitOffer(peer, theirs, "" if path is None else path.seen_host)
        self._node.linker.spawn(self._offer(circuit, called, offer))
        return CircuitTicket(mine, *self._seen(peer))

    async def _require_reachable(self, called: PeerId) -> None:
        if not self._node.contact_of(called).direct:
            if not self.books.has_place(called, self._loop.time()):
                raise Refusal(f"{short(called)} holds no place here")
        elif called not in self._node.linked():
            try:
                await self._node.linker.link_to(called, OFFER_TIMEOUT_S)
            except PeerError as error:
                raise Refusal(f"the relay does not reach it either: {error}") from error

    async def _offer(self, circuit: Circuit, called: PeerId, offer: CircuitOffer) -> None:
        try:
            await self._node.call(called, offer, CircuitAccepted, timeout_s=OFFER_TIMEOUT_S)
        except PeerError as error:
            self.end(circuit, str(error))

    def _on_ticket(self, ticket: bytes, socket: WebSocket) -> None:
        """A connection showed a ticket; from here on what it receives goes through the circuit."""
        found = self.books.find(ticket.removeprefix(TICKET))
        if found is None:
            socket.close("this ticket is not valid, or no longer")
            return
        circuit, end = found
        pump = socket.receiver = _Pump(self, circuit, socket)
        circuit.sockets[end] = socket
        if len(circuit.sockets) == 2:
            near, far = circuit.sockets[0], circuit.sockets[1]
            pumps = (near.receiver, far.receiver)
            assert isinstance(pumps[0], _Pump) and isinstance(pumps[1], _Pump)
            pumps[0].other, pumps[1].other = pumps[1], pumps[0]
            near.send_bytes(GO)
        logger.debug("%s at %s", pump, self)

    def end(self, circuit: Circuit, reason: str) -> None:
        """Close the circuit, if it is still open."""
        if circuit in self.books.circuits:
            self.books.circuits.remove(circuit)
            for socket in circuit.sockets.values():
                socket.close(reason)

    def _on_lost(self, peer: PeerId) -> None:
        self.books.places.pop(peer, None)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for circuit, reason in self.books.overdue(self._loop.time()).items():
                self.end(circuit, reason)


class _Batch:
    """The messages of one read, sent by one write: fewer system calls, and fewer times that the far end wakes."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(BATCH_BYTES))
        self._size = 0

    def add(self, data: memoryview) -> None:
        """One more message; it takes no more room than it took on its way here, for it is no longer masked."""
        self._size += write_message(data, self._memory[self._size :])

    def flush(self, socket: WebSocket) -> None:
        """Send them all."""
        size, self._size = self._size, 0
        if size and not socket.send_framed(self._memory[:size]):
            self._memory = memoryview(bytearray(BATCH_BYTES))  # the transport may still refer to the old


class _Pump:
    """Receives at one end of a circuit and sends to the other.

    Reading pauses while the other end's buffer is full, and while a bandwidth quota is used up.
    """

    def __init__(self, relay: Relay, circuit: Circuit, socket: WebSocket) -> None:
        self._relay, self._circuit, self.socket = relay, circuit, socket
        self._loop = asyncio.get_running_loop()
        self._reasons_to_wait: set[str] = set()
        self._quota_timer: asyncio.TimerHandle | None = None
        self.other: _Pump | None = None
        socket.after_read = self._flush

    def __repr__(self) -> str:
        return f"_Pump({self._circuit.carried_bytes} bytes)"

    def on_message(self, data: memoryview) -> None:
        """Copy to the other end."""
        if self.other is None:  # it speaks before the relay's word: no peer of ours does
            self._relay.end(self._circuit, "spoke too early")
            return

        self._relay.batch.add(data)
        delay_s, fault = self._relay.books.carry(self._circuit, len(data), self._loop.time())
        if fault is not None:
            self._flush()
            self._relay.end(self._circuit, fault)
        elif delay_s > 0:
            self._wait("quota")
            if self._quota_timer is not None:  # an earlier message of the same read asked for a shorter pause
                self._quota_timer.cancel()
            self._quota_timer = self._loop.call_later(delay_s, self._go_on, "quota")

    def _flush(self) -> None:
        """Send what this read has brought."""
        if self.other is not None:
            self._relay.batch.flush(self.other.socket)

    def on_writable(self, writable: bool) -> None:
        """This end's buffer filled up, or has room again: the other end waits."""
        if self.other is not None:
            (self.other._go_on if writable else self.other._wait)("buffer")

    def on_lost(self, reason: str) -> None:
        """This end is gone."""
        self._relay.end(self._circuit, f"the other end of the circuit is gone: {reason}")

    def _wait(self, reason: str) -> None:
        self._reasons_to_wait.add(reason)
        self.socket.pause_reading()

    def _go_on(self, reason: str) -> None:
        self._reasons_to_wait.discard(reason)
        if not self._reasons_to_wait:
            self.socket.resume_reading()
