"""Finds out how others reach this peer, keeps that true, and tells others when it changes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec

from colab_swarm.errors import PeerError, TunnelError
from colab_swarm.events import EventLog, ReachabilityChanged
from colab_swarm.net.addresses import MAX_ADDRESS_CHARS, is_local, may_dial_back
from colab_swarm.net.circuits import Circuits
from colab_swarm.net.ladder import Ladder, Reachability, Report
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact, Message, PeerId, Refusal
from colab_swarm.net.tunnels import Tunnel, TunnelSettings
from colab_swarm.net.upgrade import Upgrades

logger = logging.getLogger(__name__)
PROBE_TIMEOUT_S = 1.5
"""For one address; on a path of the internet an open port answers within three round trips."""
CALL_TIMEOUT_S = 5.0
VERIFIERS = 3
CHECK_EVERY_S = 5.0
VERIFY_EVERY_S = 300.0
DIAL_BACK_GAP_S = 1.0
"""A peer is dialled back no more often."""
MAX_PROBED = 8
Address = Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS)]
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=16)]


class DialBack(Message, frozen=True):
    """Try to dial me there."""

    addresses: Addresses


class DialledBack(Message, frozen=True):
    """Where the caller is seen, and for each address that was tried why it failed, empty if it worked."""

    seen_host: str
    outcomes: tuple[tuple[Address, str], ...]


class Moved(Message, frozen=True):
    """From now on I can be dialled there, and nowhere else."""

    addresses: Addresses


class Noted(Message, frozen=True):
    """Answers `Moved`."""


class ReachabilityWatch:
    """One peer's place on the ladder, from `start` to `close`.

    Args:
        relays: relays of the run that this peer knows.
        trusted: the addresses to tell others, if the user gave them.
        use_relays, punch: whether to climb these rungs.
        tunnel: which to open, if any.

    Attributes:
        current: how others reach this peer.
    """

    def __init__(
        self,
        node: Node,
        relays: Callable[[], Awaitable[list[Contact]]],
        events: EventLog,
        rng: random.Random,
        *,
        trusted: tuple[str, ...] = (),
        use_relays: bool = True,
        punch: bool = True,
        tunnel: TunnelSettings | None = None,
    ) -> None:
        self._node, self._events, self._rng = node, events, rng
        self._trusted, self._tunnel_settings = trusted, tunnel
        self._loop = asyncio.get_running_loop()
        self._ladder = Ladder(trusted or node.listening(), trusted=bool(trusted))
        self._dialled_back_at: dict[PeerId, float] = {}
        self._verified_at = float("-inf")
        self._verifying = asyncio.Lock()
        self._tunnel: Tunnel | None = None
        self.current: Reachability = self._ladder.decide()
        self.circuits = Circuits(node, relays, self._on_places, rng) if use_relays else None
        self.upgrades = (
            Upgrades(node, self.circuits.seen_at, self._on_upgrade, rng) if self.circuits and punch else None
        )
        if not use_relays:
            self._ladder.on_places((), (), "this peer was told to use no relay (use_relays=False)")
        if not punch:
            self._ladder.on_punched(node.id, "this peer was told to punch no holes (punch=False)")
        node.serve(DialBack, self._on_dial_back)
        node.serve(Moved, self._on_moved)

    async def start(self) -> None:
        """Find out where this peer stands; returns when that is known or after some seconds.

        Raises:
            TunnelError: the tunnel that was asked for cannot be opened; the text says what to do.
        """
        if self._tunnel_settings is not None:
            await self._open_tunnel(self._tunnel_settings)
        await self.verify()
        if not self._ladder.dialable and self.circuits is not None:
            self.circuits.start()
            await self.circuits.wait_looked(CALL_TIMEOUT_S / 2)
        self._node.linker.spawn(self._keep())

    async def close(self) -> None:
        """Close the tunnel, give up the places."""
        if self.upgrades is not None:
            self.upgrades.close()
        if self.circuits is not None:
            self.circuits.close()
        self._node.unserve(DialBack)
        self._node.unserve(Moved)
        if self._tunnel is not None:
            await self._tunnel.close()

    # --- asking others --------------------------------------------------------------------------------------

    async def verify(self) -> Reachability:
        """Have linked peers dial back, and decide anew."""
        async with self._verifying:
            self._verified_at = self._loop.time()
            if self._ladder.listening and not self._trusted:
                asked = sorted(self._node.linked(), key=self._distance)[:VERIFIERS]
                await asyncio.gather(*(self._ask(peer) for peer in asked))
            self._update()
        return self.current

    def _distance(self, peer: PeerId) -> tuple[bool, float]:
        """Peers across the internet first: what they reach, everybody reaches."""
        path = self._node.path_to(peer)
        local = path is None or path.remote is None or is_local(path.remote[0])
        return local, self._rng.random()

    async def _ask(self, peer: PeerId) -> None:
        try:
            found = await self._node.call(
                peer, DialBack(self._ladder.listening[:16]), DialledBack, timeout_s=CALL_TIMEOUT_S
            )
        except PeerError as error:
            logger.info("no dial-back: %s", error)
        else:
            self._ladder.on_report(peer, Report(found.seen_host, found.outcomes))

    async def _on_dial_back(self, peer: PeerId, ask: DialBack) -> DialledBack:
        path, now = self._node.path_to(peer), self._loop.time()
        if path is None or path.remote is None:
            raise Refusal("there is no direct way to see you")
        if now - self._dialled_back_at.get(peer, float("-inf")) < DIAL_BACK_GAP_S:
            raise Refusal(f"you were dialled back less than {DIAL_BACK_GAP_S:g} s ago")
        self._dialled_back_at = {one: at for one, at in self._dialled_back_at.items() if now - at < 60.0}
        self._dialled_back_at[peer] = now
        seen = path.seen_host
        tried = [address for address in ask.addresses if may_dial_back(address, seen)][:MAX_PROBED]
        faults = await asyncio.gather(*(self._probe(peer, address) for address in tried))
        return DialledBack(seen, tuple(zip(tried, faults, strict=True)))

    async def _probe(self, peer: PeerId, address: str) -> str:
        try:
            await self._node.linker.probe(peer, address, timeout_s=PROBE_TIMEOUT_S)
        except PeerError as error:
            return str(error).removeprefix(f"{address}: ").removeprefix(f"{address} ")[:200]
        return ""

    # --- what changes ---------------------------------------------------------------------------------------

    def _on_places(self) -> None:
        assert self.circuits is not None
        self._ladder.on_places(tuple(self.circuits.places), self.circuits.addresses)
        self._update()

    def _on_upgrade(self, peer: PeerId, fault: str | None) -> None:
        self._ladder.on_punched(peer, fault)
        self._update()

    def _on_tunnel(self, address: str | None) -> None:
        self._ladder.on_tunnel(address, "it was lost and is being opened again")
        self._update()

    async def _open_tunnel(self, settings: TunnelSettings) -> None:
        if self._node.port is None:
            raise TunnelError("a tunnel leads to a port: listen=False leaves it nowhere to lead to")
        self._tunnel = await Tunnel.open(
            settings,
            self._node.port,
            on_change=self._on_tunnel,
            events=self._events,
            sent_bytes=lambda: self._node.linker.metering.tunnelled_bytes,
        )
        self._ladder.on_tunnel(self._tunnel.address)

    def _update(self) -> None:
        decided = self._ladder.decide()
        before, self.current = self.current, decided
        if decided.addresses != self._node.contact.addresses:
            self._node.announce(decided.addresses)
            for peer in self._node.linked():
                self._node.linker.spawn(self._tell(peer))
        if (decided.rung, decided.via) != (before.rung, before.via):
            logger.info("reachability: %s", decided.explain())
            self._events.emit(ReachabilityChanged(self._loop.time(), str(decided)))

    async def _tell(self, peer: PeerId) -> None:
        try:
            moved = Moved(self._node.contact.addresses)
            await self._node.call(peer, moved, Noted, timeout_s=CALL_TIMEOUT_S)
        except PeerError as error:
            logger.info("%s does not know that this peer has moved: %s", peer.hex()[:8], error)

    async def _on_moved(self, peer: PeerId, moved: Moved) -> Noted:
        self._node.linker.book.replace(Contact(peer, moved.addresses))
        return Noted()

    async def _keep(self) -> None:
        """Look again when the network changes, when there is somebody new to ask, and from time to time."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S * self._rng.uniform(0.8, 1.2))
            listening = self._trusted or self._node.listening()
            moved = listening != self._ladder.listening
            if moved:
                self._ladder.on_listening(listening)
            few = len(self._ladder.verifiers) < VERIFIERS and self._node.linked() - self._ladder.verifiers
            if moved or few or self._loop.time() - self._verified_at > VERIFY_EVERY_S:
                await self.verify()
            if self.circuits is not None:
                (self.circuits.stop if self._ladder.dialable else self.circuits.start)()
