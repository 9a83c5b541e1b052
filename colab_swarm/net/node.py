"""The real network: `Node` implements `Peers` over encrypted WebSocket links, dialled on demand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from colab_swarm.events import EventLog
from colab_swarm.net.addresses import is_local, is_loopback, reachable_addresses
from colab_swarm.net.carrier import LinkType, Path
from colab_swarm.net.identity import Identity
from colab_swarm.net.linker import Linker
from colab_swarm.net.membership import Admission, OpenAdmission
from colab_swarm.net.peers import Contact, LinkStatistics, M, Message, PeerId, R, Role, Stream, short
from colab_swarm.net.settings import NodeSettings

__all__ = ["Node", "NodeSettings"]


class Node:
    """One peer on the real network. Make it with `start`; see `Peers` for the verbs."""

    def __init__(self, identity: Identity, settings: NodeSettings, linker: Linker) -> None:
        self._identity, self._settings = identity, settings
        self.linker = linker
        self._loop = asyncio.get_running_loop()
        self.port: int | None = None

    @classmethod
    async def start(
        cls,
        identity: Identity,
        settings: NodeSettings | None = None,
        events: EventLog | None = None,
        *,
        admission: Admission | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> Node:
        """Listen (unless in client mode) and keep links alive until `close`.

        Args:
            identity: this peer's key.
            settings: all else that can be set.
            events: gets `PeerJoined`, `PeerLeft` and `Fault`.
            admission: who may link; None admits everybody of the run.
            wall_clock: seconds since the epoch.

        Raises:
            OSError: the port is taken.
        """
        settings = settings or NodeSettings()
        linker = Linker(identity, settings, admission or OpenAdmission(), events or EventLog(), wall_clock)
        node = cls(identity, settings, linker)
        try:
            await node._open()
        except (OSError, asyncio.CancelledError):
            await node.close()
            raise
        return node

    async def _open(self) -> None:
        settings = self._settings
        if settings.listen:
            self.port = await self.linker.listener.start(settings.host, settings.port)
            self.announce(settings.announce or self.listening())
        self.linker.spawn(self.linker.keep_links())

    def __repr__(self) -> str:
        where = self.contact.addresses[0] if self.contact.addresses else "client mode"
        return f"Node({short(self.id)}, {where}, {len(self.linker.table)} links)"

    @property
    def id(self) -> PeerId:
        """This peer's id."""
        return self._identity.id

    @property
    def contact(self) -> Contact:
        """How others reach this peer; no addresses in client mode."""
        return Contact(self.id, self.linker.addresses)

    def listening(self) -> tuple[str, ...]:
        """Addresses of this machine at which it listens now; none in client mode."""
        return () if self.port is None else reachable_addresses(self._settings.host, self.port)

    def announce(self, addresses: tuple[str, ...]) -> None:
        """From now on, tell others that this peer can be dialled there."""
        self.linker.addresses = addresses

    @property
    def public_key(self) -> bytes:
        """Ed25519, 32 bytes."""
        return self._identity.public_key

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature, 64 bytes."""
        return self._identity.sign(data)

    def time(self) -> float:
        """Swarm time, seconds since the epoch."""
        return self.linker.time()

    def learn(self, contact: Contact) -> None:
        """Remember where a peer can be dialled."""
        if contact.id != self.id:
            self.linker.book.learn(contact)

    def contact_of(self, peer: PeerId) -> Contact:
        """What is known of the peer's addresses."""
        return self.contact if peer == self.id else self.linker.book.find(peer)

    async def call(self, peer: PeerId, message: Message, reply: type[R], *, timeout_s: float) -> R:
        """See `Peers.call`."""
        link = self.linker.table.best(peer)
        if link is None:
            began_at = self._loop.time()
            link = await self.linker.link_to(peer, timeout_s)
            timeout_s -= self._loop.time() - began_at
        return await link.call(message, reply, timeout_s=timeout_s)

    async def stream(self, peer: PeerId, opening: Message, *, timeout_s: float) -> Stream:
        """See `Peers.stream`."""
        link = self.linker.table.best(peer) or await self.linker.link_to(peer, timeout_s)
        return link.open_stream(opening)

    def serve(
        self, kind: type[M], handler: Callable[[PeerId, M], Awaitable[Message]], *, role: Role = Role.VIEWER
    ) -> None:
        """Answer calls of type ``kind``."""
        self.linker.services[0].add(kind, handler, role)

    def serve_stream(
        self, kind: type[M], handler: Callable[[M, Stream], Awaitable[None]], *, role: Role = Role.VIEWER
    ) -> None:
        """Run ``handler`` for each stream opened with ``kind``."""
        self.linker.services[1].add(kind, handler, role)

    def unserve(self, kind: type[Message]) -> None:
        """Stop answering ``kind``."""
        for services in self.linker.services:
            services.remove(kind)

    def linked(self) -> frozenset[PeerId]:
        """Peers with an open link now."""
        return self.linker.table.peers()

    def role_of(self, peer: PeerId) -> Role:
        """What the peer may do."""
        links = self.linker.table.of(peer)
        return (
            Role.AUTHORITY
            if peer == self.id
            else max((link.remote.role for link in links), default=Role.GUEST)
        )

    def path_to(self, peer: PeerId) -> Path | None:
        """How the link to the peer runs; None without a link."""
        link = self.linker.table.best(peer)
        return None if link is None else link.remote.path

    def way_to(self, peer: PeerId) -> str:
        """The same in words."""
        path = self.path_to(peer)
        if path is None:
            return ""
        if path.way is not LinkType.DIRECT or path.remote is None or not is_local(path.remote[0]):
            return str(path)
        return "same machine" if is_loopback(path.remote[0]) else "LAN"

    def on_lost(self, listener: Callable[[PeerId], None]) -> Callable[[], None]:
        """Call ``listener(peer)`` when the last link to a peer is gone."""
        listeners = self.linker.lost_listeners
        listeners.append(listener)

        def stop() -> None:
            if listener in listeners:
                listeners.remove(listener)

        return stop

    def statistics(self, peer: PeerId | None = None) -> LinkStatistics:
        """Of one peer, or of all."""
        table = self.linker.table
        return self.linker.metering.statistics(peer, list(table) if peer is None else table.of(peer))

    def limit(self, rate_bps: float | None) -> None:
        """See `Peers.limit`."""
        self.linker.metering.limit(rate_bps)

    async def close(self) -> None:
        """Cancel handlers, close all links. Idempotent; goes on if the caller is cancelled."""
        await self.linker.close()
