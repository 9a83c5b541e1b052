"""The real network: `Node` implements `Peers` over encrypted WebSocket links, dialled on demand."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from colab_swarm.events import EventLog
from colab_swarm.net.addresses import is_local, is_loopback, reachable_addresses
from colab_swarm.net.carrier import LinkType, NodeSettings, Path
from colab_swarm.net.identity import Identity
from colab_swarm.net.linker import Linker
from colab_swarm.net.membership import Admission, OpenAdmission
from colab_swarm.net.peers import Contact, LinkStatistics, M, Message, PeerId, R, Role, Stream, short

__all__ = ["Node", "NodeSettings"]


class Node:
    """One peer on the real network. Make it with `start`; `Peers` describes the methods that have no docstring here."""

    def __init__(self, identity: Identity, settings: NodeSettings, linker: Linker) -> None:
        self._identity, self._settings = identity, settings
        self.linker = linker
        self._loop = asyncio.get_running_loop()
        self.port: int | None = None
        self.id, self.public_key, self.sign = identity.id, identity.public_key, identity.sign
        self.time, self.limit = linker.time, linker.metering.limit
        self.linked = linker.table.peers

    @classmethod
    async def start(
        cls,
        identity: Identity,
        settings: NodeSettings | None = None,
        events: EventLog | None = None,
        *,
        admission: Admission | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> "Node":
        """Listen (unless in client mode) and keep links alive until `close`.

        Args:
            identity: this peer's key.
            settings: addresses, limits and timeouts.
            events: gets `PeerJoined`, `PeerLeft` and `Fault`.
            admission: decides which peers may link; None admits every peer of the run.
            wall_clock: seconds since the epoch.

        Raises:
            OSError: the port is taken.
        """
        settings = settings or NodeSettings()
        linker = Linker(identity, settings, admission or OpenAdmission(), events or EventLog(), wall_clock)
        node = cls(identity, settings, linker)
        try:
            if settings.listen:
                node.port = await linker.listener.start(settings.host, settings.port)
                node.announce(settings.announce or node.listening())
            linker.spawn(linker.keep_links())
        except (OSError, asyncio.CancelledError):
            await node.close()
            raise
        return node

    def __repr__(self) -> str:
        where = self.contact.addresses[0] if self.contact.addresses else "client mode"
        return f"Node({short(self.id)}, {where}, {len(self.linker.table)} links)"

    @property
    def contact(self) -> Contact:
        return Contact(self.id, self.linker.addresses)

    def listening(self) -> tuple[str, ...]:
        """Return the addresses of this machine at which it listens now; none in client mode."""
        return () if self.port is None else reachable_addresses(self._settings.host, self.port)

    def announce(self, addresses: tuple[str, ...]) -> None:
        """Set the addresses at which others can dial this peer."""
        self.linker.addresses = addresses

    def learn(self, contact: Contact) -> None:
        if contact.id != self.id:
            self.linker.book.learn(contact)

    def contact_of(self, peer: PeerId) -> Contact:
        return self.contact if peer == self.id else self.linker.book.find(peer)

    async def call(self, peer: PeerId, message: Message, reply: type[R], *, timeout_s: float) -> R:
        link = self.linker.table.best(peer)
        if link is None:
            began_at = self._loop.time()
            link = await self.linker.link_to(peer, timeout_s)
            timeout_s -= self._loop.time() - began_at
        return await link.call(message, reply, timeout_s=timeout_s)

    async def stream(self, peer: PeerId, opening: Message, *, timeout_s: float) -> Stream:
        link = self.linker.table.best(peer) or await self.linker.link_to(peer, timeout_s)
        return link.open_stream(opening)

    def serve(
        self, kind: type[M], handler: Callable[[PeerId, M], Awaitable[Message]], *, role: Role = Role.VIEWER
    ) -> None:
        self.linker.services[0].add(kind, handler, role)

    def serve_stream(
        self, kind: type[M], handler: Callable[[M, Stream], Awaitable[None]], *, role: Role = Role.VIEWER
    ) -> None:
        self.linker.services[1].add(kind, handler, role)

    def unserve(self, kind: type[Message]) -> None:
        for services in self.linker.services:
            services.remove(kind)

    def role_of(self, peer: PeerId) -> Role:
        links = self.linker.table.of(peer)
        known = max((link.remote.role for link in links), default=Role.GUEST)
        return Role.AUTHORITY if peer == self.id else known

    def path_to(self, peer: PeerId) -> Path | None:
        """Return the path of the link to the peer; None without a link."""
        link = self.linker.table.best(peer)
        return None if link is None else link.remote.path

    def way_to(self, peer: PeerId) -> str:
        path = self.path_to(peer)
        if path is None:
            return ""
        if path.way is not LinkType.DIRECT or path.remote is None or not is_local(path.remote[0]):
            return str(path)
        return "same machine" if is_loopback(path.remote[0]) else "LAN"

    def on_lost(self, listener: Callable[[PeerId], None]) -> Callable[[], None]:
        listeners = self.linker.lost_listeners
        listeners[listener] = None
        return lambda: listeners.pop(listener, None)

    def statistics(self, peer: PeerId | None = None) -> LinkStatistics:
        table = self.linker.table
        return self.linker.metering.statistics(peer, list(table) if peer is None else table.of(peer))

    async def close(self) -> None:
        await self.linker.close()
