"""Replaces relayed links by direct ones: the other end dials back, or both ends punch a hole through their NATs.

    asking end                               answering end
    Upgrade(direct addresses, endpoints) ->  dials the addresses, if there are any
                                         <-  Endpoints
    Ready (to measure the round trip)    ->
                                         <-  Ready
    Ready: half a round trip from now    ->
    punches                                  punches

Endpoints are those of each end's own connection to the relay: as the relay sees it from outside,
and as it is in the peer's own network, for two peers behind one NAT. The asking end sends the first
handshake message on every connection that opens. An end that punches with another peer answers that
it is busy, and is tried again later. The link table prefers the new link, and both ends leave the
relayed one when its streams are over.

The answering end dials only addresses of the host at which the relay sees the asking end, or public ones if the relay
cannot tell. So a relayed peer cannot make it connect to machines in its own network.

**TCP hole punching.** A NAT lets in answers to what went out. So both ends send a SYN from the local port of their
connection to the relay, to the address at which the relay saw the other end:

- Where an unsolicited SYN is dropped, the later SYN finds the hole open and meets a socket that waits for it
  (simultaneous open, RFC 9293 section 3.5). So a connect that is not refused is left alone: another socket would start
  at another sequence number, which Linux's NAT rejects. For the same reason a SYN with a small TTL is of no use: the
  ICMP error ends its socket.
- Where it is answered by RST, which closes the hole, the SYNs must cross in flight: both ends connect on a common
  beat, known to half a round trip, again and again.
- A full cone NAT lets every SYN in: a listener on the port accepts it.

Nothing helps if a NAT takes a new port for every connection, unless the other is a full cone. On macOS all sockets of
a port need SO_REUSEPORT, which `bound_socket` sets everywhere; Windows has none, so nothing is punched there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import random
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from itertools import pairwise
from typing import Annotated

import msgspec

from colab_swarm.errors import PeerError, PeerUnreachable
from colab_swarm.net.addresses import (
    host_of,
    ip_of,
    is_address,
    is_local,
    is_loopback,
    is_public,
    may_dial_back,
    relay_of,
)
from colab_swarm.net.carrier import HostPort, LinkType, Path, Receiver
from colab_swarm.net.handshake import Address, dial_any
from colab_swarm.net.link import Link
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Message, PeerId, Refusal, Stream, short
from colab_swarm.net.websocket import CAN_PUNCH, WebSocket, bound_socket

logger = logging.getLogger(__name__)
MAX_TARGETS = 8
PUNCH_S = 4.0
"""Duration of one attempt."""
TALK_TIMEOUT_S = 10.0
DIAL_BACK_S = 3.0
TRIES = 3
ASKS = 40
"""Tries, and answers that the other end is busy."""
AGAIN_S = 180.0
"""Time between failed upgrades, while the relayed link is open."""
PAUSE_S = (0.5, 3.0)
FORGIVEN_S = 60.0
"""A peer whose attempts fail is answered `TRIES` times in this time."""
MAX_FAILED = 256
_MIN_BEAT_S = 0.15
_LATE_S = 0.002
"""Delay of an event loop's timers."""
_BACKLOG = 8


class Endpoint(Message, frozen=True):
    """Where to punch: an IP address and a TCP port."""

    host: Annotated[str, msgspec.Meta(max_length=45)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]

    @property
    def usable(self) -> bool:
        return self.family is not None and 0 < self.port < 1 << 16

    @property
    def family(self) -> socket.AddressFamily | None:
        """AF_INET or AF_INET6; None if the host is not a usable IP address (names are not looked up)."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return None
        if address.is_multicast or address.is_unspecified or address.is_link_local or "%" in self.host:
            return None  # the part after % names an interface of the other machine
        return socket.AF_INET if address.version == 4 else socket.AF_INET6


def plan_tries(
    now: float, until: float, *, rtt_s: float, answering: bool, rng: random.Random
) -> tuple[float, ...]:
    """Return when to connect, in loop time: beats that both ends share, further apart than a SYN and its refusal take.

    The asking end starts half a round trip after its signal, when the other end receives it. The two directions may
    differ in latency, so the asking end moves every other beat at random, by about half a round trip at most.

    Args:
        now, until: when the signal was sent, or received; when to end; loop time, seconds.
        rtt_s: of the signal's path, seconds.
        answering: True at the end that received the signal.
    """
    beat_s = max(_MIN_BEAT_S, 2 * rtt_s)
    begin_at = now if answering else now + rtt_s / 2
    count = max(0, math.ceil((until - begin_at) / beat_s))
    spread_s = rtt_s / 2 + _LATE_S
    shifts_s = [0.0 if answering or k % 2 == 0 else rng.uniform(-spread_s, spread_s) for k in range(count)]
    return tuple(begin_at + k * beat_s + shift_s for k, shift_s in enumerate(shifts_s))


async def punch(
    port: int, targets: Sequence[Endpoint], tries: Sequence[float], *, until: float
) -> AsyncGenerator[socket.socket, None]:
    """Yield every connection that opens from or to local ``port``, until ``until`` (loop time).

    The two ends need not see the same one first, and a stranger may connect: shake hands on all, use the first that
    becomes a link. Wrap this in `contextlib.aclosing`: leaving ends the attempts. The caller owns the sockets.

    Args:
        port: local port of a connection made with `bound_socket` to the relay.
        targets: endpoints of the other end, 8 at most are tried.
        tries: when to connect, from `plan_tries`.
    """
    loop = asyncio.get_running_loop()
    families = [(target, target.family) for target in targets[:MAX_TARGETS]]
    usable = {target: family for target, family in families if family is not None}
    found: asyncio.Queue[socket.socket | None] = asyncio.Queue()
    jobs = [_accept_all(family, port, found) for family in {*usable.values()}]
    jobs += [_connect_often(target, family, port, tries, found) for target, family in usable.items()]
    tasks = [loop.create_task(job) for job in jobs]
    end = loop.call_at(until, found.put_nowait, None)
    try:
        while (connected := await found.get()) is not None:
            yield connected
    finally:
        end.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while not found.empty():
            unclaimed = found.get_nowait()
            if unclaimed is not None:
                unclaimed.close()


async def _accept_all(
    family: socket.AddressFamily, port: int, found: asyncio.Queue[socket.socket | None]
) -> None:
    with suppress(OSError), bound_socket(family, port) as listener:
        listener.listen(_BACKLOG)
        while True:
            connected, _ = await asyncio.get_running_loop().sock_accept(listener)
            found.put_nowait(connected)


async def _connect_often(
    target: Endpoint,
    family: socket.AddressFamily,
    port: int,
    tries: Sequence[float],
    found: asyncio.Queue[socket.socket | None],
) -> None:
    loop = asyncio.get_running_loop()
    for at, following_at in pairwise((*tries, math.inf)):
        if following_at > loop.time():  # otherwise the last connect was pending for too long
            await asyncio.sleep(at - loop.time())
            with suppress(OSError):  # refused, unreachable, or the listener has the same connection already
                found.put_nowait(await _connect(target, family, port))


async def _connect(target: Endpoint, family: socket.AddressFamily, port: int) -> socket.socket:
    connecting = bound_socket(family, port)
    try:
        await asyncio.get_running_loop().sock_connect(connecting, (target.host, target.port))
        if connecting.getsockname() == connecting.getpeername():
            raise ConnectionRefusedError(f"{target} is this very socket")  # TCP can connect to itself
    except BaseException:
        connecting.close()
        raise
    return connecting


Endpoints = Annotated[tuple[Endpoint, ...], msgspec.Meta(max_length=MAX_TARGETS)]


class Upgrade(Message, frozen=True):
    """Opens the stream: direct addresses to dial, and endpoints to punch to."""

    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_TARGETS)]
    endpoints: Endpoints


class UpgradeReady(Message, frozen=True):
    """The next turn; the first answer holds its sender's endpoints, or says that it is busy."""

    endpoints: Endpoints = ()
    busy: bool = False


class _Busy(PeerError):
    """The other end upgrades a link to another peer."""


class _Silent(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()


class Upgrades:
    """Upgrades the relayed links of a node until `close`.

    Args:
        seen_at: returns where a relay sees this peer from outside; None if unknown.
        on_end: called with each peer and why the attempt failed, or None if it succeeded.
    """

    def __init__(
        self,
        node: Node,
        seen_at: Callable[[PeerId], HostPort | None],
        on_end: Callable[[PeerId, str | None], None],
        rng: random.Random,
    ) -> None:
        self._node, self._seen_at, self._on_end, self._rng = node, seen_at, on_end, rng
        self._loop = asyncio.get_running_loop()
        self._busy: set[PeerId] = set()
        self._failed: deque[tuple[float, PeerId]] = deque(maxlen=MAX_FAILED)
        self._punching = asyncio.Lock()
        node.linker.on_relayed = self._on_relayed
        node.serve_stream(Upgrade, self._on_upgrade)

    def close(self) -> None:
        self._node.linker.on_relayed = lambda link: None
        self._node.unserve(Upgrade)

    def _on_relayed(self, link: Link) -> None:
        if link.peer not in self._busy:
            self._node.linker.spawn(self._upgrade(link.peer))

    async def _upgrade(self, peer: PeerId) -> None:
        self._busy.add(peer)
        try:
            while True:
                fault = await self._try_often(peer)
                logger.info("upgrade of the link to %s: %s", short(peer), fault or "done")
                self._on_end(peer, fault)
                if fault is None or not self._node.linker.table.best(peer):
                    return
                await asyncio.sleep(AGAIN_S * self._rng.uniform(0.8, 1.2))  # NATs forget, or are restarted
        finally:
            self._busy.discard(peer)

    async def _try_often(self, peer: PeerId) -> str | None:
        """Return why it failed, or None. One try at a time: two would accept each other's connections."""
        fault: str | None = None
        tries = 0
        for _ in range(ASKS):
            async with self._punching:
                link = self._node.linker.table.best(peer)
                if link is None:
                    return fault or "the link was lost"
                try:
                    async with asyncio.timeout(TALK_TIMEOUT_S + PUNCH_S):
                        if self._relayed(peer):
                            await self._ask(link)
                    fault = f"no hole to {short(peer)} in {PUNCH_S:g} s: one of the two NATs may change ports"
                    tries += 1
                except _Busy:
                    fault = f"{short(peer)} upgraded other links for too long"
                except (PeerError, TimeoutError) as error:
                    fault = str(error) or "the exchange took too long"
                    tries += 1
            if not self._relayed(peer):
                return None
            if tries == TRIES:
                break
            await asyncio.sleep(self._rng.uniform(*PAUSE_S))
        return fault

    async def _ask(self, link: Link) -> None:
        port, endpoints = self._endpoints(link)
        addresses = tuple(one for one in self._node.contact.addresses if relay_of(one) is None)
        async with link.open_stream(Upgrade(addresses[:MAX_TARGETS], endpoints)) as stream:
            answer, _ = await stream.receive(UpgradeReady)
            if answer.busy:
                raise _Busy
            if not self._relayed(link.peer):
                return  # it dialled back
            rtt_s = await self._measure_rtt(stream, UpgradeReady())
        await self._punch(link.peer, port, answer.endpoints, rtt_s, answering=False)

    async def _measure_rtt(self, stream: Stream, ready: UpgradeReady) -> float:
        asked_at = self._loop.time()
        await stream.send(ready)
        await stream.receive(UpgradeReady)
        rtt_s = self._loop.time() - asked_at
        await stream.send(UpgradeReady())
        return rtt_s

    async def _on_upgrade(self, opening: Upgrade, stream: Stream) -> None:
        link = self._node.linker.table.best(stream.peer)
        if link is None or link.remote.path.way is not LinkType.RELAYED:
            raise Refusal("only a relayed link can be upgraded")
        forgiven_at = self._loop.time() - FORGIVEN_S
        if sum(peer == stream.peer and at > forgiven_at for at, peer in self._failed) >= TRIES:
            raise Refusal(f"{TRIES} upgrades failed in the last minute")
        if self._punching.locked():
            await stream.send(UpgradeReady(busy=True))
            return
        try:
            async with self._punching, asyncio.timeout(TALK_TIMEOUT_S + PUNCH_S):
                await self._answer(link, opening, stream)
        except TimeoutError:
            raise Refusal("the exchange took too long") from None
        finally:
            if self._relayed(stream.peer):
                self._failed.append((self._loop.time(), stream.peer))
        self._on_end(stream.peer, "the holes did not meet" if self._relayed(stream.peer) else None)

    async def _answer(self, link: Link, opening: Upgrade, stream: Stream) -> None:
        port, endpoints = self._endpoints(link)
        if await self._dial_back(stream.peer, opening.addresses, self._seen(link.remote.path)):
            endpoints = ()
        rtt_s = await self._measure_rtt(stream, UpgradeReady(endpoints))
        await stream.receive(UpgradeReady)
        await self._punch(stream.peer, port, opening.endpoints, rtt_s, answering=True)

    def _seen(self, path: Path) -> str:
        """Return the host at which the relay sees the other end, "" if it does not say.

        A relay may say anything. Its claim of a private address counts only if we see the relay at one ourselves.
        """
        to_relay = None if path.relay is None else self._node.path_to(path.relay)
        relay_host, host = "" if to_relay is None else to_relay.seen_host, path.caller_host
        outside = is_local(host) and not is_local(relay_host)
        return "" if outside or (is_loopback(host) and not is_loopback(relay_host)) else host

    async def _dial_back(self, peer: PeerId, addresses: tuple[str, ...], seen: str) -> bool:
        try:
            async with asyncio.timeout(DIAL_BACK_S):
                direct = [one for one in addresses if await _may_dial(one, seen)]
                await dial_any(direct, partial(self._node.linker.dial_direct, peer))
        except (PeerError, TimeoutError) as error:
            logger.info("no way back to %s: %s", short(peer), error)
            return False
        return True

    def _endpoints(self, link: Link) -> tuple[int, tuple[Endpoint, ...]]:
        relay = link.remote.path.relay
        path = None if relay is None else self._node.path_to(relay)
        if not CAN_PUNCH or relay is None or path is None or path.local is None or not path.address:
            return 0, ()
        seen = self._seen_at(relay)
        ends = dict.fromkeys(Endpoint(*end) for end in (seen, path.local) if end is not None)
        return path.local[1], tuple(end for end in ends if end.usable)  # a relay may say anything

    async def _punch(
        self, peer: PeerId, port: int, targets: tuple[Endpoint, ...], rtt_s: float, *, answering: bool
    ) -> None:
        if not port or not targets:
            raise PeerUnreachable("one of the two ends cannot punch holes")
        now = self._loop.time()
        until = now + PUNCH_S
        tries = plan_tries(now, until, rtt_s=rtt_s, answering=answering, rng=self._rng)
        linked = asyncio.Event()

        async def shake_hands_with_all() -> None:
            async with aclosing(punch(port, targets, tries, until=until)) as sockets:
                async for connected in sockets:
                    self._node.linker.spawn(self._shake_hands(connected, None if answering else peer, linked))

        punching = self._node.linker.spawn(shake_hands_with_all())
        waiting = self._node.linker.spawn(linked.wait())
        try:
            await asyncio.wait({punching, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            punching.cancel()
            waiting.cancel()

    async def _shake_hands(
        self, connected: socket.socket, expected: PeerId | None, linked: asyncio.Event
    ) -> None:

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
        path = self._node.path_to(peer)
        return path is None or path.way is LinkType.RELAYED


async def _may_dial(address: str, seen: str) -> bool:
    """Return True if a peer that its relay sees at ``seen`` may have us dial the address.

    Of names only a tunnel's may be dialled: its host must show the certificate of that name before we send anything.
    """
    host = host_of(address)
    if not is_address(address) or relay_of(address) is not None:
        return False
    if ip_of(host) is not None:
        return may_dial_back(address, seen) or (not seen and is_public(host))
    if not address.startswith("wss://"):
        return False
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(is_public(str(end[0])) for *_, end in found)
