"""`Node` implements `Peers` over encrypted links: those of its `colab_swarm.net.linker.Linker`."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from colab_swarm.errors import NotAdmitted, PeerError
from colab_swarm.events import EventLog
from colab_swarm.net.addresses import is_local, is_loopback, reachable_addresses
from colab_swarm.net.carrier import LinkType, NodeSettings, Path
from colab_swarm.net.identity import Identity
from colab_swarm.net.linker import Linker
from colab_swarm.net.membership import Admission, OpenAdmission
from colab_swarm.net.peers import Contact, LinkStatistics, M, Message, PeerId, R, Role, Stream

__all__ = ["Node", "NodeSettings"]


class Node:
    """One peer on the real network, made by `start`; `Peers` describes methods without a docstring."""

    def __init__(self, identity: Identity, settings: NodeSettings, linker: Linker) -> None:
        self._settings = settings
        self.linker = linker
        self._loop = asyncio.get_running_loop()
        self.port: int | None = None
        self.id = identity.id
        self.public_key = identity.public_key
        self.sign = identity.sign
        self.time = linker.time
        self.limit = linker.metering.limit
        self.linked = linker.table.peers
        self.metered = False

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
        """Listen (unless in client mode) and keep links alive until `close`; `PortError` if the port is taken.

        The ``events`` get `PeerJoined`, `PeerLeft` and `Fault`. The ``admission`` decides which peers may
        link; None admits every peer of the run. ``wall_clock`` gives seconds since the epoch.
        """
        settings = settings or NodeSettings()
        linker = Linker(identity, settings, admission or OpenAdmission(), events or EventLog(), wall_clock)
        node = cls(identity, settings, linker)
        try:
            if settings.iroh is not None:
                await linker.iroh.start()
            if settings.listen:
                node.port = await linker.listener.start(settings.host, settings.port)
            node.announce(settings.announce or (*node.listening(), *linker.iroh.addresses))
            linker.spawn(linker.keep_links())
        except (OSError, PeerError, asyncio.CancelledError):
            await node.close()
            raise
        return node

    @property
    def contact(self) -> Contact:
        return Contact(self.id, self.linker.addresses)

    def listening(self) -> tuple[str, ...]:
        """Return the addresses of this machine at which it listens now; none in client mode."""
        if self.port is None:
            return ()
        return reachable_addresses(self._settings.host, self.port)

    def announce(self, addresses: tuple[str, ...]) -> None:
        self.linker.addresses = addresses

    def learn(self, contact: Contact) -> None:
        if contact.id != self.id:
            self.linker.book.learn(contact)

    def contact_of(self, peer: PeerId) -> Contact:
        if peer == self.id:
            return self.contact
        return self.linker.book.find(peer)

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
        calls, _ = self.linker.services
        calls.add(kind, handler, role)

    def serve_stream(
        self, kind: type[M], handler: Callable[[M, Stream], Awaitable[None]], *, role: Role = Role.VIEWER
    ) -> None:
        _, streams = self.linker.services
        streams.add(kind, handler, role)

    def unserve(self, kind: type[Message]) -> None:
        for services in self.linker.services:
            services.remove(kind)

    def role_of(self, peer: PeerId) -> Role:
        if peer == self.id:
            return Role.AUTHORITY
        roles = [link.remote.role for link in self.linker.table.of(peer)]
        return max(roles, default=Role.GUEST)

    def voucher_of(self, peer: PeerId) -> bytes:
        return self.linker.vouchers.get(peer, peer)

    @property
    def membership(self) -> bytes:
        return self.linker.admission.membership

    def role_by(self, public_key: bytes, membership: bytes, at: float) -> Role:
        try:
            return self.linker.admission.verify(public_key, membership, now=at)
        except NotAdmitted:
            return Role.GUEST

    def read_at(self, peer: PeerId) -> float:
        return max((link.carrier.read_at for link in self.linker.table.of(peer)), default=-math.inf)

    def path_to(self, peer: PeerId) -> Path | None:
        link = self.linker.table.best(peer)
        return None if link is None else link.remote.path

    def way_to(self, peer: PeerId) -> str:
        path = self.path_to(peer)
        if path is None:
            return ""
        if path.way is LinkType.DIRECT and path.remote is not None:
            host = path.remote[0]
            if is_loopback(host):
                return "same machine"
            if is_local(host):
                return "LAN"
        return str(path)

    def on_lost(self, listener: Callable[[PeerId], None]) -> Callable[[], None]:
        listeners = self.linker.lost_listeners
        listeners[listener] = None
        return lambda: listeners.pop(listener, None)

    def statistics(self, peer: PeerId | None = None) -> LinkStatistics:
        table = self.linker.table
        links = list(table) if peer is None else table.of(peer)
        rtts_s = [link.rtt_s for link in links if link.rtt_s is not None]
        return self.linker.metering.statistics(peer, rtts_s)

    async def close(self) -> None:
        await self.linker.close()
