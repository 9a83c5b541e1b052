"""A relay joins two connections into a circuit and copies bytes between them, within quotas; `Circuits` uses relays.

1. A peer that cannot be dialled keeps a link to the relay and reserves a place there: it sends `Reserve`
   every half minute.
2. A caller sends `OpenCircuit` to the relay, which sends a ticket to each end: `CircuitTicket` to
   the caller, `CircuitOffer` to the called peer. A peer that can be dialled needs no place: the relay dials it for
   callers that cannot dial it themselves, for example because their firewall only allows the https port.
3. Both ends connect to the relay's ordinary port and show their ticket as the first message. Then the
   relay sends `_GO` to the caller. From then on it copies messages without reading them.

The two ends do their handshake and encrypt through the circuit as over any connection. So the relay sees sizes,
times and the two peers, but no key and no content, and it spends no time on cryptography.
"""

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import msgspec

from colab_swarm.errors import PeerError, PeerLost, PeerUnreachable, require
from colab_swarm.markup import settings
from colab_swarm.net.addresses import host_of, is_address, is_local, is_loopback, relay_of
from colab_swarm.net.carrier import LinkType, Path
from colab_swarm.net.handshake import TICKET, Address, HandshakeReceiver, dial_any
from colab_swarm.net.node import Node
from colab_swarm.net.peers import CIRCUIT, Ack, Contact, Message, PeerId, Refusal, Role, short
from colab_swarm.net.traffic import TokenBucket, Traffic
from colab_swarm.net.websocket import MAX_MESSAGE_BYTES, SCRATCH_BYTES, WebSocket, write_message
from colab_swarm.runtime import wait_until

logger = logging.getLogger(__name__)
_TOKEN_BYTES = 16
_GO = b"go"
# A batch holds the messages of one read, and a fragment that was received before.
_BATCH_BYTES = SCRATCH_BYTES + MAX_MESSAGE_BYTES + 16
# Maximum number of peers with a place at a relay, and of open circuits there.
PLACES = 256
CIRCUITS = 256
CIRCUITS_PER_PEER = 32
# Links ping regularly, so a circuit without traffic for this time is dead.
_IDLE_S = 120.0
# If an end has not shown its ticket within this time, it will not connect.
_CONNECT_S = 15.0
_WANTED_PLACES = 2
# Time between two searches for relays: without a place, with one place, and with all wanted places.
RETRY_S = 1.0
_SECOND_PLACE_S = 5.0
_LOOK_EVERY_S = 30.0
CALL_TIMEOUT_S = 5.0
_OFFER_TIMEOUT_S = 10.0
_CANDIDATES = 8
# A place expires after this time unless it is reserved again.
_PLACE_S = 300.0
# This peer announces at most this many addresses for one relay.
_ENTRIES = 2
# The round-trip time to a relay where this peer has a place is multiplied by this, to avoid needless changes.
_HELD_BONUS = 0.7
_INSIDE = 4  # maximum number of addresses in `Inside`
_Id = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Token = Annotated[bytes, msgspec.Meta(min_length=_TOKEN_BYTES, max_length=_TOKEN_BYTES)]


class Reserve(Message, frozen=True):
    """Requests a place, so that others can reach the sender through the relay.

    The place lasts for 5 minutes or until the link closes, whichever is earlier.
    """


class OpenCircuit(Message, frozen=True):
    """Requests a circuit to ``peer``, which has a place at the relay or can be dialled by the relay."""

    peer: _Id


class CircuitTicket(Message, frozen=True):
    """The relay's answer: the caller must show ``token`` at the relay's port."""

    token: Token


class CircuitOffer(Message, frozen=True):
    """Tells a peer that ``peer`` calls it: the called peer must show ``token`` at the relay's port."""

    peer: _Id
    token: Token


class Inside(Message, frozen=True):
    """Call and answer: the sender's addresses in its local network, because both may be behind the same router."""

    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=_INSIDE)]


def is_inside(address: str) -> bool:
    """Return True for an IP address of a home or office network. Only these addresses of an `Inside` are dialled."""
    host = host_of(address)
    return is_address(address) and address.startswith("ws:") and is_local(host) and not is_loopback(host)


@dataclass(frozen=True)
class RelayQuota:
    """Limits for all circuits of a relay together; None for no limit.

    Attributes:
        total_bytes: maximum bytes since the relay started. After that all circuits end, and no more are opened.
        total_bps: maximum rate, in bits per second.
    """

    total_bytes: float | None = None
    total_bps: float | None = None

    def __repr__(self) -> str:
        return settings(self)


@dataclass(eq=False)
class Circuit:
    """One circuit; ``tokens`` maps each ticket that was not shown yet to the end that it belongs to (0 or 1)."""

    ends: tuple[PeerId, PeerId]
    opened_at: float
    used_at: float
    tokens: dict[bytes, int] = field(default_factory=dict)
    pumps: "dict[int, _Pump]" = field(default_factory=dict)


class RelayState:
    """Places, circuits and the bytes that they carried. Free of I/O. Requests that are not allowed raise `Refusal`."""

    def __init__(self, quota: RelayQuota, now: float) -> None:
        self.quota = quota
        # The time at which each place was last reserved.
        self.places: dict[PeerId, float] = {}
        self.circuits: set[Circuit] = set()
        self.carried_bytes = 0
        # The traffic of all circuits.
        self.traffic = Traffic()
        if quota.total_bps is not None:
            self.traffic = Traffic(buckets=[TokenBucket(quota.total_bps, now)])

    def reserve(self, peer: PeerId, now: float) -> None:
        full = peer not in self.places and len(self.places) >= PLACES
        require(not full, f"all {PLACES} places are taken", Refusal)
        self.places[peer] = now

    def open(self, caller: PeerId, called: PeerId, now: float, random: Callable[[int], bytes]) -> Circuit:
        require(len(self.circuits) < CIRCUITS, f"{CIRCUITS} circuits are open here", Refusal)
        for peer in (caller, called):
            count = sum(peer in circuit.ends for circuit in self.circuits)
            text = f"{CIRCUITS_PER_PEER} circuits of {short(peer)} are open here"
            require(count < CIRCUITS_PER_PEER, text, Refusal)
        require(not self.spent, f"this relay has carried {self.spent}", Refusal)
        circuit = Circuit((caller, called), opened_at=now, used_at=now)
        circuit.tokens = {random(_TOKEN_BYTES): 0, random(_TOKEN_BYTES): 1}
        self.circuits.add(circuit)
        return circuit

    @property
    def spent(self) -> str:
        """A text on the relay's limit in GB if it is used up; else empty."""
        most_bytes = self.quota.total_bytes
        if most_bytes is None or self.carried_bytes < most_bytes:
            return ""
        return f"its {most_bytes / 1e9:g} GB"

    def find(self, token: bytes) -> tuple[Circuit, int] | None:
        """Return the circuit and the end that a ticket belongs to; a ticket is valid only once."""
        for circuit in self.circuits:
            if token in circuit.tokens:
                return circuit, circuit.tokens.pop(token)
        return None

    def carry(self, circuit: Circuit, size: int, now: float) -> tuple[float, str | None]:
        """Count bytes; return the seconds until more may be read, and the reason why the circuit must end, or None."""
        circuit.used_at = now
        self.carried_bytes += size
        self.traffic.count(size, now)
        if self.spent:
            return 0.0, f"the relay has carried {self.spent}"
        return self.traffic.delay(now), None

    def overdue(self, now: float) -> dict[Circuit, str]:
        """Return the circuits that must end now, each with the reason."""
        reasons: dict[Circuit, str] = {}
        for circuit in self.circuits:
            age_s = now - circuit.opened_at
            if now - circuit.used_at > _IDLE_S:
                reasons[circuit] = "the circuit was silent"
            if len(circuit.pumps) < 2 and age_s > _CONNECT_S:
                reasons[circuit] = "the other end did not connect"
        return reasons


class Relay:
    """Relays for the peers of the run until `close`; others must be able to dial ``node``."""

    def __init__(self, node: Node, quota: RelayQuota = RelayQuota()) -> None:
        self._node = node
        self._loop = asyncio.get_running_loop()
        self.state = RelayState(quota, self._loop.time())
        self._batch = memoryview(bytearray(_BATCH_BYTES))
        self._batched_bytes = 0
        node.serve(Reserve, self._on_reserve, role=Role.REDUCER)
        node.serve(OpenCircuit, self._on_open)
        node.listener.on_ticket = self._on_ticket
        node.on_lost(self._on_lost)
        self._upkeep = node.spawn(self._expire())

    def close(self) -> None:
        self._upkeep.cancel()
        # Tickets are no longer accepted, so none must be issued.
        self._node.unserve(Reserve)
        self._node.unserve(OpenCircuit)
        self._node.listener.on_ticket = None
        for circuit in list(self.state.circuits):
            self.end(circuit, "the relay closed")

    async def _on_reserve(self, peer: PeerId, message: Reserve) -> Ack:
        self.state.reserve(peer, self._loop.time())
        self._node.pinned.add(peer)
        return Ack()

    def _on_lost(self, peer: PeerId) -> None:
        self.state.places.pop(peer, None)
        self._node.pinned.discard(peer)

    async def _on_open(self, peer: PeerId, message: OpenCircuit) -> CircuitTicket:
        called = PeerId(message.peer)
        require(called not in (peer, self._node.id), "a circuit must lead to a third peer", Refusal)
        reachable = called in self.state.places or self._node.contact_of(called).direct
        require(reachable, f"{short(called)} holds no place here", Refusal)
        circuit = self.state.open(peer, called, self._loop.time(), os.urandom)
        caller_token, called_token = circuit.tokens
        self._node.spawn(self._offer(circuit, called, CircuitOffer(peer, called_token)))
        return CircuitTicket(caller_token)

    async def _offer(self, circuit: Circuit, called: PeerId, offer: CircuitOffer) -> None:
        try:
            # If the called peer has no place here, this call dials it.
            await self._node.call(called, offer, Ack, timeout_s=_OFFER_TIMEOUT_S)
        except PeerError as error:
            self.end(circuit, str(error))

    def _on_ticket(self, ticket: bytes, socket: WebSocket) -> None:
        circuit_end = self.state.find(ticket.removeprefix(TICKET))
        if circuit_end is None:
            socket.close("this ticket is not valid, or no longer valid")
            return
        circuit, end = circuit_end
        pump = _Pump(self, circuit, socket)
        circuit.pumps[end] = pump
        socket.receiver = pump
        if len(circuit.pumps) == 2:
            caller = circuit.pumps[0]
            called = circuit.pumps[1]
            caller.other = called
            called.other = caller
            caller.socket.send_bytes(_GO)

    def add(self, data: memoryview) -> None:
        """Add a message to the batch of this read. It fits, because without a mask it is not larger than before."""
        self._batched_bytes += write_message(data, self._batch[self._batched_bytes :])

    def flush(self, socket: WebSocket) -> None:
        """Send all messages of a read by one write, which saves calls, and wake-ups of the receiver."""
        size = self._batched_bytes
        self._batched_bytes = 0
        if size and not socket.send_framed(self._batch[:size]):
            # The socket still sends from this memory, so the next batch needs new memory.
            self._batch = memoryview(bytearray(_BATCH_BYTES))

    def end(self, circuit: Circuit, reason: str) -> None:
        if circuit in self.state.circuits:
            self.state.circuits.remove(circuit)
            for pump in circuit.pumps.values():
                pump.socket.close(reason)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = self._loop.time()
            for peer, reserved_at in list(self.state.places.items()):
                if now - reserved_at > _PLACE_S:
                    self._on_lost(peer)
            for circuit, reason in self.state.overdue(now).items():
                self.end(circuit, reason)


@dataclass(eq=False)
class _Pump:
    """Receives at one end of a circuit and sends to the other end; it pauses if the other end or a quota is full."""

    relay: Relay
    circuit: Circuit
    socket: WebSocket
    other: "_Pump | None" = None
    _reasons_to_wait: set[str] = field(default_factory=set)
    _quota_timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.socket.after_read = self._flush

    def on_message(self, data: memoryview) -> None:
        if self.other is None:
            self.relay.end(self.circuit, "sent a message before the circuit was open")
            return
        self.relay.add(data)
        loop = asyncio.get_running_loop()
        delay_s, fault = self.relay.state.carry(self.circuit, len(data), loop.time())
        if fault is not None:
            self._flush()
            self.relay.end(self.circuit, fault)
        elif delay_s > 0:
            self._wait("quota")
            # An earlier message of the same read may have set a shorter pause.
            if self._quota_timer is not None:
                self._quota_timer.cancel()
            self._quota_timer = loop.call_later(delay_s, self._resume, "quota")

    def _flush(self) -> None:
        if self.other is not None:
            self.relay.flush(self.other.socket)

    def on_writable(self, writable: bool) -> None:
        if self.other is None:
            return
        if writable:
            self.other._resume("buffer")
        else:
            self.other._wait("buffer")

    def on_lost(self, reason: str) -> None:
        self.relay.end(self.circuit, f"the other end of the circuit is gone: {reason}")

    def _wait(self, reason: str) -> None:
        self._reasons_to_wait.add(reason)
        self.socket.pause_reading()

    def _resume(self, reason: str) -> None:
        self._reasons_to_wait.discard(reason)
        if not self._reasons_to_wait:
            self.socket.resume_reading()


def choose(
    rtts_s: dict[PeerId, float], reserved: Container[PeerId], places: int = _WANTED_PLACES
) -> list[PeerId]:
    """Return the relays with the shortest round trips; a relay where this peer has a place gets a bonus."""

    def distance(relay: PeerId) -> tuple[float, PeerId]:
        bonus = _HELD_BONUS if relay in reserved else 1.0
        return rtts_s[relay] * bonus, relay

    return sorted(rtts_s, key=distance)[:places]


class Circuits:
    """Lets a node dial through relays and, from `start` until `stop`, be dialled through them."""

    def __init__(
        self,
        node: Node,
        candidates: Callable[[], Awaitable[list[Contact]]],
        on_change: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self._node = node
        self._candidates = candidates
        self._on_change = on_change
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._look = asyncio.Event()
        self._looked = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        # Peers that are being dialled directly, to replace a link through a relay.
        self._leaving: set[PeerId] = set()
        # The circuit addresses at each relay.
        self.places: dict[PeerId, tuple[str, ...]] = {}
        node.open_circuit = self._open
        node.serve(CircuitOffer, self._on_offer, role=Role.REDUCER)
        node.serve(Inside, self._on_inside)
        node.on_lost(self._on_lost)

    def start(self) -> None:
        if self._keeping is None:
            self._keeping = self._node.spawn(self._keep())

    async def wait_looked(self, timeout_s: float) -> None:
        """Wait until all relays known at the start have been tried, or until the time is over."""
        await wait_until(self._loop.time() + timeout_s, self._looked)

    def stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        self._forget(list(self.places))

    async def _open(self, relay: Contact, peer: PeerId, receiver: HandshakeReceiver) -> WebSocket:
        self._node.learn(relay)
        ticket = await self._node.call(relay.id, OpenCircuit(peer), CircuitTicket, timeout_s=CALL_TIMEOUT_S)
        # The handshake begins when the relay reports that the other end is connected.
        receiver.held = True
        return await self._show(relay.id, ticket.token, receiver)

    async def _show(self, relay: PeerId, token: bytes, receiver: HandshakeReceiver) -> WebSocket:
        websocket = await self._node.connect(self._entries(relay)[0], receiver)
        websocket.send_bytes(TICKET + token)
        return websocket

    def _entries(self, relay: PeerId) -> list[str]:
        """Return the addresses at which the relay can be dialled; the address of the present link comes first."""
        addresses = list(self._node.contact_of(relay).addresses)
        path = self._node.path_to(relay)
        if path is not None and path.address:
            addresses.insert(0, path.address)
        direct = [address for address in dict.fromkeys(addresses) if relay_of(address) is None]
        require(direct, f"no address of relay {short(relay)} is known", PeerUnreachable)
        return direct

    async def _on_offer(self, relay: PeerId, offer: CircuitOffer) -> Ack:
        try:
            self._node.require_room()
        except PeerLost as error:
            raise Refusal(str(error)) from error
        self._node.spawn(self._accept(relay, offer))
        return Ack()

    async def _accept(self, relay: PeerId, offer: CircuitOffer) -> None:
        connect = partial(self._show, relay, offer.token)
        path = Path(LinkType.RELAYED, relay=relay)
        try:
            link = await self._node.shake_hands(connect, expected=None, path=path)
        except PeerError as error:
            logger.info("circuit of %s through %s: %s", short(PeerId(offer.peer)), short(relay), error)
            return
        await self.leave_relay(link.peer)

    async def leave_relay(self, peer: PeerId) -> None:
        """Replace a relayed link by a direct one, if the peer can be dialled or is behind the same router."""
        if peer in self._leaving or not self._is_relayed(peer):
            return
        self._leaving.add(peer)
        try:
            theirs = await self._node.call(peer, Inside(self._inside), Inside, timeout_s=CALL_TIMEOUT_S)
            addresses = [*self._node.contact_of(peer).addresses, *filter(is_inside, theirs.addresses)]
            # A tunnel is no better than a relay.
            direct = [
                address
                for address in addresses
                if relay_of(address) is None and not address.startswith("wss:")
            ]
            await dial_any(direct, partial(self._node.dial_direct, peer))
        except PeerError as error:
            logger.info("the link to %s stays relayed: %s", short(peer), error)
        finally:
            self._leaving.remove(peer)

    def _is_relayed(self, peer: PeerId) -> bool:
        path = self._node.path_to(peer)
        return path is not None and path.way is LinkType.RELAYED

    @property
    def _inside(self) -> tuple[str, ...]:
        """The addresses of this machine in its local network."""
        return tuple(filter(is_inside, self._node.listening()))[:_INSIDE]

    async def _on_inside(self, peer: PeerId, message: Inside) -> Inside:
        require(self._is_relayed(peer), "only a relayed link may be left", Refusal)
        return Inside(self._inside)

    async def _keep(self) -> None:
        while True:
            began_at = self._loop.time()
            self._look.clear()
            rtts_s = await self._survey()
            nearest = choose(rtts_s, self.places)
            # This also renews places that this peer has, because the relay may have dropped them.
            for relay in nearest:
                await self._reserve(relay)
            self._looked.set()
            if len(self.places) > _WANTED_PLACES:
                self._forget([relay for relay in self.places if relay not in nearest])
            if not self.places:
                wait_s = RETRY_S
            elif len(self.places) < _WANTED_PLACES:
                wait_s = _SECOND_PLACE_S
            else:
                wait_s = _LOOK_EVERY_S
            await wait_until(began_at + wait_s * self._rng.uniform(0.8, 1.2), self._look)
            # Wait for about a second in any case, because a relay may give a place and hang up, again and again.
            await asyncio.sleep(began_at + RETRY_S * self._rng.uniform(0.8, 1.0) - self._loop.time())

    async def _survey(self) -> dict[PeerId, float]:
        """Return round-trip times, in seconds, to the relays where this peer has a place, and to some candidates."""
        contacts = {contact.id: contact for contact in await self._candidates()}
        for contact in contacts.values():
            self._node.learn(contact)
        others = [relay for relay in contacts if relay not in self.places and relay != self._node.id]
        sample = self._rng.sample(others, min(_CANDIDATES, len(others)))
        relays = [*self.places, *sample]
        rtts_s = await asyncio.gather(*map(self._rtt, relays))
        return {relay: rtt_s for relay, rtt_s in zip(relays, rtts_s, strict=True) if rtt_s is not None}

    async def _rtt(self, relay: PeerId) -> float | None:
        try:
            if relay not in self._node.linked():
                await self._node.link_to(relay, CALL_TIMEOUT_S)
        except PeerError as error:
            logger.info("relay %s: %s", short(relay), error)
            return None
        return self._node.statistics(relay).rtt_s

    async def _reserve(self, relay: PeerId) -> None:
        try:
            await self._node.call(relay, Reserve(), Ack, timeout_s=CALL_TIMEOUT_S)
            entries = self._entries(relay)
        except PeerError as error:
            logger.info("no place at relay %s: %s", short(relay), error)
            self._forget([relay])
            return
        self._node.pinned.add(relay)
        # Public addresses come first, because others may not reach the relay at the address that this peer uses.
        entries.sort(key=lambda entry: (is_loopback(host_of(entry)), is_local(host_of(entry))))
        circuits = tuple(f"{entry}{CIRCUIT}{relay.hex()}" for entry in entries[:_ENTRIES])
        if self.places.get(relay) != circuits:
            self.places[relay] = circuits
            self._on_change()

    def _forget(self, relays: list[PeerId]) -> None:
        lost = [relay for relay in relays if relay in self.places]
        for relay in lost:
            del self.places[relay]
        self._node.pinned.difference_update(relays)
        if lost:
            self._on_change()

    def _on_lost(self, peer: PeerId) -> None:
        if peer in self.places:
            self._forget([peer])
            self._look.set()
