"""From a relayed link to a better one: the other end dials back, or both punch a hole, agreed over the relayed link.

    asking end                               asked end
    Upgrade(direct addresses, endpoints) ->  dials the addresses, if there are any
                                         <-  Endpoints
    Ready (to measure the round trip)    ->
                                         <-  Ready
    Ready: half a round trip from now    ->
    punches                                  punches

Endpoints are those of each end's own connection to the relay: as the relay sees it from outside, and as it is in
the peer's own network, for two peers behind one NAT. The asking end shakes hands first on every connection that
comes up. An end that punches with another peer already says that it is busy, and is asked again. The link table
prefers the new link, and both ends leave the relayed one when its streams are over.

The asked end dials only addresses of the host at which the relay sees the asking end; if the relay cannot tell,
public ones. So a relayed peer cannot have it knock at machines in its own network.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from typing import Annotated

import msgspec

from colab_swarm.errors import PeerError, PeerUnreachable
from colab_swarm.net.addresses import (
    CircuitAddress,
    host_of,
    is_address,
    is_ip,
    is_local,
    is_loopback,
    is_public,
    may_dial_back,
)
from colab_swarm.net.carrier import HostPort, LinkType, Path, Receiver
from colab_swarm.net.handshake import dial_any
from colab_swarm.net.link import Link
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Message, PeerId, Refusal, Stream, short
from colab_swarm.net.punch import CAN_PUNCH, MAX_TARGETS, Endpoint, plan_tries, punch
from colab_swarm.net.websocket import WebSocket

logger = logging.getLogger(__name__)
PUNCH_S = 4.0
"""How long one attempt goes on."""
TALK_TIMEOUT_S = 10.0
DIAL_BACK_S = 3.0
TRIES = 3
ASKS = 40
"""Tries, and answers that the other end is busy."""
AGAIN_S = 180.0
"""After an upgrade that failed, as long as the relayed link is there."""
PAUSE_S = (0.5, 3.0)
FORGIVEN_S = 60.0
"""A peer whose attempts fail all the same is answered no more often than `TRIES` times in this time."""
MAX_FAILED = 256
Endpoints = Annotated[tuple[Endpoint, ...], msgspec.Meta(max_length=MAX_TARGETS)]
Address = Annotated[str, msgspec.Meta(max_length=256)]


class Upgrade(Message, frozen=True):
    """Opens the talk: dial me there, or find me here."""

    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_TARGETS)]
    endpoints: Endpoints


class UpgradeReady(Message, frozen=True):
    """The next turn of the talk; the first answer says where its sender may be found, or that it is busy."""

    endpoints: Endpoints = ()
    busy: bool = False


class Upgrades:
    """Upgrades the relayed links of a node until `close`.

    Args:
        seen_at: where a relay sees this peer, from outside; None if it has not told.
        on_end: called with each peer and why the attempt failed, or None if it has not.
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
        """Upgrade nothing more."""
        self._node.linker.on_relayed = lambda link: None
        self._node.unserve(Upgrade)

    def _on_relayed(self, link: Link) -> None:
        if link.peer not in self._busy:
            self._node.linker.spawn(self._ask(link.peer))

    async def _ask(self, peer: PeerId) -> None:
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
        """Why it failed, or None. One at a time: two punches from one port would catch each other's connections."""
        fault: str | None = None
        tries = 0
        for _ in range(ASKS):
            async with self._punching:
                link = self._node.linker.table.best(peer)
                if link is None or link.remote.path.way is not LinkType.RELAYED:
                    return fault or "the link was lost" if link is None else None
                try:
                    fault = await self._try(link)
                    tries += 1
                except _Busy:
                    fault = f"{short(peer)} upgraded other links for too long"
            if fault is None or tries == TRIES:
                break
            await asyncio.sleep(self._rng.uniform(*PAUSE_S))
        return fault

    async def _try(self, link: Link) -> str | None:
        """Why it failed, or None.

        Raises:
            _Busy: the other end is at it with another peer.
        """
        try:
            async with asyncio.timeout(TALK_TIMEOUT_S + PUNCH_S):
                await self._talk(link)
            fault = f"no hole to {short(link.peer)} in {PUNCH_S:g} s: one of the two NATs may change ports"
        except _Busy:
            raise
        except (PeerError, TimeoutError) as error:
            fault = str(error) or "the talk took too long"
        return fault if self._relayed(link.peer) else None

    async def _talk(self, link: Link) -> None:
        port, endpoints = self._endpoints(link)
        addresses = tuple(one for one in self._node.contact.addresses if CircuitAddress.parse(one) is None)
        async with link.open_stream(Upgrade(addresses[:MAX_TARGETS], endpoints)) as stream:
            answer, _ = await stream.receive(UpgradeReady)
            if answer.busy:
                raise _Busy
            if not self._relayed(link.peer):
                return  # it dialled back
            asked_at = self._loop.time()
            await stream.send(UpgradeReady())
            await stream.receive(UpgradeReady)
            rtt_s = self._loop.time() - asked_at
            await stream.send(UpgradeReady())
        await self._punch(link.peer, port, answer.endpoints, rtt_s, asked=False)

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
            async with self._punching:
                await self._answer(link, opening, stream)
        except TimeoutError:
            raise Refusal("the talk took too long") from None
        finally:
            if self._relayed(stream.peer):
                self._failed.append((self._loop.time(), stream.peer))
        self._on_end(stream.peer, None if not self._relayed(stream.peer) else "the holes did not meet")

    async def _answer(self, link: Link, opening: Upgrade, stream: Stream) -> None:
        port, endpoints = self._endpoints(link)
        async with asyncio.timeout(TALK_TIMEOUT_S + PUNCH_S):
            if await self._dial_back(stream.peer, opening.addresses, self._seen(link.remote.path)):
                endpoints = ()
            asked_at = self._loop.time()
            await stream.send(UpgradeReady(endpoints))
            await stream.receive(UpgradeReady)
            rtt_s = self._loop.time() - asked_at
            await stream.send(UpgradeReady())
            await stream.receive(UpgradeReady)
            await self._punch(stream.peer, port, opening.endpoints, rtt_s, asked=True)

    def _seen(self, path: Path) -> str:
        """The host at which the relay sees the other end, "" if it does not say.

        A relay may say anything: it is believed to see a private network only if this peer sees it in one.
        """
        to_relay = None if path.relay is None else self._node.path_to(path.relay)
        relay_host, host = "" if to_relay is None else to_relay.seen_host, path.caller_host
        if (is_local(host) and not is_local(relay_host)) or (
            is_loopback(host) and not is_loopback(relay_host)
        ):
            return ""
        return host

    async def _dial_back(self, peer: PeerId, addresses: tuple[str, ...], seen: str) -> bool:
        try:
            async with asyncio.timeout(DIAL_BACK_S):
                direct = [one for one in addresses if await _may_dial(one, seen)]
                await dial_any(direct, lambda address: self._node.linker.dial_direct(peer, address))
        except (PeerError, TimeoutError) as error:
            logger.info("no way back to %s: %s", short(peer), error)
            return False
        return True

    def _endpoints(self, link: Link) -> tuple[int, tuple[Endpoint, ...]]:
        """The local port of the connection to the relay, and where that connection can be met."""
        relay = link.remote.path.relay
        path = None if relay is None else self._node.path_to(relay)
        if not CAN_PUNCH or relay is None or path is None or path.local is None or not path.address:
            return 0, ()
        seen = self._seen_at(relay)
        ends = dict.fromkeys(Endpoint(*end) for end in (seen, path.local) if end is not None)
        return path.local[1], tuple(end for end in ends if end.usable)  # a relay may say anything

    async def _punch(
        self, peer: PeerId, port: int, targets: tuple[Endpoint, ...], rtt_s: float, *, asked: bool
    ) -> None:
        """Punch until a link comes up that is not relayed, or the time is over."""
        if not port or not targets:
            raise PeerUnreachable("one of the two ends cannot punch holes")
        now = self._loop.time()
        until = now + PUNCH_S
        tries = plan_tries(now, until, rtt_s=rtt_s, asked=asked, rng=self._rng)
        linked = asyncio.Event()

        async def greet_all() -> None:
            async with aclosing(punch(port, targets, tries, until=until)) as sockets:
                async for connected in sockets:
                    self._node.linker.spawn(self._greet(connected, None if asked else peer, linked))

        punching = self._node.linker.spawn(greet_all())
        waiting = self._node.linker.spawn(linked.wait())
        try:
            await asyncio.wait({punching, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            punching.cancel()
            waiting.cancel()

    async def _greet(self, connected: socket.socket, expected: PeerId | None, linked: asyncio.Event) -> None:
        """Make the connection a link; whoever is at its other end, the handshake tells."""

        async def take_over(receiver: Receiver) -> WebSocket:
            transport, _ = await self._loop.create_connection(_Silent, sock=connected)
            scratch = self._node.linker.scratch
            return WebSocket(transport, scratch=scratch, client=expected is not None, receiver=receiver)

        try:
            await self._node.linker.greet(take_over, expected=expected, path=Path(LinkType.PUNCHED))
            linked.set()
        except PeerError as error:
            logger.info("a punched connection became no link: %s", error)

    def _relayed(self, peer: PeerId) -> bool:
        path = self._node.path_to(peer)
        return path is None or path.way is LinkType.RELAYED


async def _may_dial(address: str, seen: str) -> bool:
    """Return True if a peer that its relay sees at ``seen`` may have us dial the address.

    Of names only a tunnel's may be: its host has to show the certificate of that name before anything is sent.
    """
    if not is_address(address) or CircuitAddress.parse(address) is not None:
        return False
    if is_ip(host_of(address)):
        return may_dial_back(address, seen) or (not seen and is_public(host_of(address)))
    if not address.startswith("wss://"):
        return False
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host_of(address), 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(is_public(str(end[0])) for *_, end in found)


class _Busy(PeerError):
    """The other end is at it with another peer."""


class _Silent(asyncio.Protocol):
    """Reads nothing until a WebSocket takes the connection over."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
