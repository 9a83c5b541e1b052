"""Replaces relayed links by direct ones: both ends punch a hole through their NATs.

    asking end                               answering end
    Upgrade(endpoints)                   ->
                                         <-  Upgrade(endpoints)
    Upgrade(round trip)                  ->  (half a round trip from now)
    punches                                  punches

Endpoints are those of each end's own connection to the relay: as the relay sees it, and as it is in
the peer's own network, for two peers behind one NAT. The asking end sends the first handshake
message on every connection that opens. An end that punches with another peer answers that it is
busy. The link table prefers the new link, and both ends leave the relayed one when its streams are
over.

**TCP hole punching.** A NAT lets in answers to what went out. So both ends send a SYN from the
local port of their connection to the relay, to the address at which the relay saw the other end:

- Where an unsolicited SYN is dropped, the later SYN finds the hole open and meets a socket that
  waits for it (simultaneous open, RFC 9293 section 3.5). So a connect that is not refused is left
  alone: another socket would start at another sequence number, which Linux's NAT rejects. A SYN
  with a small TTL is of no use: the ICMP error ends its socket.
- Where it is answered by RST, which closes the hole, the SYNs must cross in flight: both ends
  connect on a common beat, known to half a round trip, again and again.
- A full cone NAT lets every SYN in: a listener on the port accepts it.

Nothing helps if a NAT takes a new port for every connection, unless the other is a full cone. On
macOS all sockets of a port need SO_REUSEPORT (`bound_socket`); Windows has none: nothing is punched.
"""

import asyncio
import logging
import math
import random
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from typing import Annotated, TypeAlias

import msgspec

from colab_swarm.errors import PeerError, PeerUnreachable, require
from colab_swarm.net.addresses import ip_of, is_local
from colab_swarm.net.carrier import HostPort, LinkType, Path, Receiver
from colab_swarm.net.link import Link
from colab_swarm.net.node import Node
from colab_swarm.net.patience import VisitLimit
from colab_swarm.net.peers import Message, PeerId, Refusal, Stream, short
from colab_swarm.net.websocket import CAN_PUNCH, WebSocket, bound_socket
from colab_swarm.runtime import wait_until

logger = logging.getLogger(__name__)
# The address at which the relay sees the other end, and the one in its own network.
_MAX_TARGETS = 2
# One attempt takes this time at most.
PUNCH_S = 4.0
TALK_TIMEOUT_S = 10.0
TRIES = 3
# Tries, and answers that the other end is busy.
ASKS = 40
# The time between failed upgrades, while the relayed link is open.
AGAIN_S = 180.0
# The least and the longest pause between two tries.
PAUSE_S = (0.5, 3.0)
# A peer whose attempts fail is answered `TRIES` times in this time.
_FORGIVEN_S = 60.0
# The timers of an event loop are late by up to this time.
_TIMER_S = 0.002
_Host: TypeAlias = Annotated[str, msgspec.Meta(max_length=45)]
# An address and a port to punch.
Endpoint: TypeAlias = tuple[_Host, Annotated[int, msgspec.Meta(ge=1, le=65535)]]
_Endpoints: TypeAlias = Annotated[tuple[Endpoint, ...], msgspec.Meta(max_length=_MAX_TARGETS)]
_Take: TypeAlias = Callable[[socket.socket], object]


def family_of(endpoint: Endpoint) -> socket.AddressFamily | None:
    """Return AF_INET or AF_INET6; None if the endpoint is not usable (names are not looked up)."""
    host, port = endpoint
    ip = ip_of(host)
    # The part after % names an interface of the other machine.
    valid = "%" not in host and 0 < port < 1 << 16
    if ip is None or not valid:
        return None
    if ip.is_multicast or ip.is_unspecified or ip.is_link_local:
        return None
    return socket.AF_INET if ip.version == 4 else socket.AF_INET6


def allowed(targets: Sequence[Endpoint], own: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Leave out private addresses, unless the peer shares our NAT, as its public address would show.

    Otherwise a stranger could have us connect to other machines of our network. ``own`` begins with
    the address at which the relay sees us.
    """
    if own:
        our_host, _ = own[0]
        if is_local(our_host) or our_host in [host for host, _ in targets]:
            return tuple(targets)
    return tuple((host, port) for host, port in targets if not is_local(host))


def plan_tries(
    now: float, until: float, *, rtt_s: float, answering: bool, rng: random.Random
) -> tuple[float, ...]:
    """Return when to connect, in loop time: beats that both ends share.

    They are further apart than a SYN and its refusal take. The asking end starts half a round trip
    after its signal at ``now``, when the other end receives it. The two directions may differ in
    latency, so it moves every other beat at random, by about half a round trip at most.
    """
    beat_s = max(0.15, 2 * rtt_s)
    begin_at = now if answering else now + rtt_s / 2
    count = max(0, math.ceil((until - begin_at) / beat_s))
    spread_s = rtt_s / 2 + _TIMER_S
    tries: list[float] = []
    for beat in range(count):
        try_at = begin_at + beat * beat_s
        if beat % 2 == 1 and not answering:
            try_at += rng.uniform(-spread_s, spread_s)
        tries.append(try_at)
    return tuple(tries)


async def punch(port: int, targets: Sequence[Endpoint], tries: Sequence[float], take: _Take) -> None:
    """Give ``take`` every connection that opens from or to local ``port``, until this is cancelled.

    The two ends need not see the same one first, and a stranger may connect: shake hands on all, use
    the first that becomes a link. ``take`` owns the sockets. The ``port`` is that of a connection made
    with `bound_socket` to the relay; of the other end's ``targets`` 8 at most are tried, at ``tries``.
    """
    families: dict[Endpoint, socket.AddressFamily] = {}
    for target in targets[:_MAX_TARGETS]:
        family = family_of(target)
        if family is not None:
            families[target] = family
    async with asyncio.TaskGroup() as tasks:
        for listening_family in set(families.values()):
            tasks.create_task(_accept_all(listening_family, port, take))
        for target, target_family in families.items():
            tasks.create_task(_connect_often(target, target_family, port, tries, take))


async def _accept_all(family: socket.AddressFamily, port: int, take: _Take) -> None:
    with suppress(OSError), bound_socket(family, port) as listener:
        listener.listen()
        while True:
            connected, _ = await asyncio.get_running_loop().sock_accept(listener)
            take(connected)


async def _connect_often(
    target: Endpoint, family: socket.AddressFamily, port: int, tries: Sequence[float], take: _Take
) -> None:
    loop = asyncio.get_running_loop()
    for try_at, next_try_at in pairwise((*tries, math.inf)):
        # The last connect was pending until the next try.
        if next_try_at <= loop.time():
            continue
        await asyncio.sleep(try_at - loop.time())
        # An error says: refused, unreachable, or the listener has the same connection already.
        with suppress(OSError), ExitStack() as owned:
            connecting = owned.enter_context(bound_socket(family, port))
            await loop.sock_connect(connecting, target)
            # TCP can connect a socket to itself.
            if connecting.getsockname() != connecting.getpeername():
                owned.pop_all()
                take(connecting)


class Upgrade(Message, frozen=True):
    """Opens the stream, and each further turn: its sender's endpoints, or that it is busy; the round trip."""

    endpoints: _Endpoints = ()
    busy: bool = False
    rtt_s: Annotated[float, msgspec.Meta(ge=0.0, le=PUNCH_S)] = 0.0


class _Silent(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()


class Upgrades:
    """Upgrades a node's relayed links; ``on_end`` gets each peer and why it failed, or None."""

    def __init__(
        self,
        node: Node,
        seen_at: Callable[[PeerId], HostPort | None],
        on_end: Callable[[PeerId, str | None], None],
        rng: random.Random,
    ) -> None:
        self._node = node
        self._seen_at = seen_at
        self._on_end = on_end
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._busy: set[PeerId] = set()
        self._failures = VisitLimit(TRIES, _FORGIVEN_S)
        self._punching = asyncio.Lock()
        node.linker.on_relayed = self._on_relayed
        node.serve_stream(Upgrade, self._on_upgrade)

    def _on_relayed(self, link: Link) -> None:
        if link.peer not in self._busy:
            self._node.linker.spawn(self._upgrade(link.peer))

    async def _upgrade(self, peer: PeerId) -> None:
        self._busy.add(peer)
        fault: str | None = ""
        try:
            while fault is not None and self._node.linker.table.best(peer):
                fault = await self._try_often(peer)
                logger.info("upgrade of the link to %s: %s", short(peer), fault or "done")
                self._on_end(peer, fault)
                if fault is not None:
                    # NATs forget, or are restarted.
                    await asyncio.sleep(AGAIN_S * self._rng.uniform(0.8, 1.2))
        finally:
            self._busy.discard(peer)

    async def _try_often(self, peer: PeerId) -> str | None:
        """Punch with a peer a few times; return why it failed, or None."""
        fault = "the link was lost"
        tries = 0
        for _ in range(ASKS):
            # One try at a time: two would accept each other's connections.
            async with self._punching:
                link = self._node.linker.table.best(peer)
                if link is None:
                    return fault
                busy = False
                try:
                    async with asyncio.timeout(TALK_TIMEOUT_S + PUNCH_S):
                        busy = self._relayed(peer) and await self._ask(link)
                    fault = f"no hole to {short(peer)} in {PUNCH_S:g} s: one of the two NATs may change ports"
                    if busy:
                        fault = f"{short(peer)} was busy with other upgrades"
                except (PeerError, TimeoutError) as error:
                    fault = str(error) or "the exchange took too long"
            if not self._relayed(peer):
                return None
            if not busy:
                tries += 1
            if tries == TRIES:
                break
            await asyncio.sleep(self._rng.uniform(*PAUSE_S))
        return fault

    async def _ask(self, link: Link) -> bool:
        """Punch as the asking end; return whether the other end is busy instead."""
        port, endpoints = self._endpoints(link)
        async with link.open_stream(Upgrade(endpoints)) as stream:
            answer, _ = await stream.receive(Upgrade)
            if answer.busy:
                return True
            rtt_s = min(link.rtt_s or 0.0, PUNCH_S)
            await stream.send(Upgrade(rtt_s=rtt_s))
        await self._punch(link.peer, port, allowed(answer.endpoints, endpoints), rtt_s, answering=False)
        return False

    async def _on_upgrade(self, opening: Upgrade, stream: Stream) -> None:
        link = self._node.linker.table.best(stream.peer)
        if link is None or link.remote.path.way is not LinkType.RELAYED:
            raise Refusal("only a relayed link can be upgraded")
        if self._punching.locked():
            await stream.send(Upgrade(busy=True))
            return
        admitted = self._failures.admit(stream.peer, self._loop.time())
        require(admitted, f"{TRIES} upgrades failed in the last minute", Refusal)
        try:
            async with self._punching, asyncio.timeout(TALK_TIMEOUT_S + PUNCH_S):
                port, endpoints = self._endpoints(link)
                await stream.send(Upgrade(endpoints))
                begin, _ = await stream.receive(Upgrade)
                targets = allowed(opening.endpoints, endpoints)
                await self._punch(stream.peer, port, targets, begin.rtt_s, answering=True)
        except TimeoutError:
            raise Refusal("the exchange took too long") from None
        finally:
            if not self._relayed(stream.peer):
                self._failures.forgive(stream.peer)
        fault = "the holes did not meet" if self._relayed(stream.peer) else None
        self._on_end(stream.peer, fault)

    def _endpoints(self, link: Link) -> tuple[int, tuple[Endpoint, ...]]:
        """Return the local port to punch from, and this end's endpoints; 0 and none if it cannot punch."""
        relay = link.remote.path.relay
        if relay is None or not CAN_PUNCH:
            return 0, ()
        path = self._node.path_to(relay)
        # Only a connection that this end dialled has a port that can be shared.
        if path is None or path.local is None or not path.address:
            return 0, ()
        endpoints = [path.local]
        seen = self._seen_at(relay)
        if seen is not None:
            endpoints.insert(0, seen)
        # A relay may send anything as the address at which it sees this peer.
        usable = [endpoint for endpoint in endpoints if family_of(endpoint) is not None]
        _, port = path.local
        return port, tuple(dict.fromkeys(usable))

    async def _punch(
        self, peer: PeerId, port: int, targets: tuple[Endpoint, ...], rtt_s: float, *, answering: bool
    ) -> None:
        require(port and targets, "one of the two ends cannot punch holes", PeerUnreachable)
        now = self._loop.time()
        until = now + PUNCH_S
        tries = plan_tries(now, until, rtt_s=rtt_s, answering=answering, rng=self._rng)
        linked = asyncio.Event()
        expected = None if answering else peer
        spawn = self._node.linker.spawn

        def take(connected: socket.socket) -> None:
            spawn(self._greet(expected, linked, connected))

        punching = spawn(punch(port, targets, tries, take))
        try:
            await wait_until(until, linked)
        finally:
            punching.cancel()

    async def _greet(self, expected: PeerId | None, linked: asyncio.Event, connected: socket.socket) -> None:
        async def take_over(receiver: Receiver) -> WebSocket:
            transport, _ = await self._loop.create_connection(_Silent, sock=connected)
            scratch = self._node.linker.scratch
            return WebSocket(transport, scratch=scratch, client=expected is not None, receiver=receiver)

        try:
            await self._node.linker.shake_hands(take_over, expected=expected, path=Path(LinkType.PUNCHED))
            linked.set()
        except PeerError as error:
            logger.info("a punched connection became no link: %s", error)

    def _relayed(self, peer: PeerId) -> bool:
        """Return True if there is no better link to the peer than a relayed one."""
        path = self._node.path_to(peer)
        return path is None or path.way is LinkType.RELAYED
