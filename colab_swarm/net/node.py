"""A peer on the network: its links to others, and calls and streams over them.

`colab_swarm.net.peers` has the rules for calls and streams. The simulator (`colab_swarm.sim`) uses the same
node over another carrier, so all layers above run unchanged on both.
"""

import asyncio
import errno
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from colab_swarm.errors import (
    NotAdmitted,
    PeerError,
    PeerLost,
    PeerTimeout,
    PeerUnreachable,
    WrongPeer,
    require,
)
from colab_swarm.events import EventLog, Fault, PeerJoined, PeerLeft
from colab_swarm.net.addresses import (
    AddressBook,
    is_iroh,
    is_local,
    is_loopback,
    may_dial,
    reachable_addresses,
    relay_of,
)
from colab_swarm.net.carrier import LinkType, Loopback, NodeSettings, Path, Remote
from colab_swarm.net.clock import SwarmClock
from colab_swarm.net.handshake import (
    DIAL_TIMEOUT_S,
    HandshakeReceiver,
    Introduction,
    Listener,
    describe_run,
    dial_any,
)
from colab_swarm.net.identity import Identity
from colab_swarm.net.iroh import IrohEndpoint
from colab_swarm.net.link import LEAVE_TIMEOUT_S, Link, LinkTable, Unread, fail
from colab_swarm.net.membership import Admission, OpenAdmission
from colab_swarm.net.mux import ServiceTable
from colab_swarm.net.patience import LeftOut
from colab_swarm.net.peers import (
    Contact,
    LinkStatistics,
    M,
    Message,
    PeerId,
    R,
    Role,
    Stream,
    short,
)
from colab_swarm.net.traffic import Metering, Traffic
from colab_swarm.net.websocket import SCRATCH_BYTES, WebSocket, dial

logger = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 1.0
# An address that did not answer is dialled again after REDIAL_S. The time doubles each time, up to _MAX_REDIAL_S.
REDIAL_S = 1.0
_MAX_REDIAL_S = 30.0
# Maximum number of open links. Beyond that, the link that is unused for longest is closed, or new links are refused.
MAX_LINKS = 256
# An unused link is closed after this time, unless one of its ends cannot be dialled.
IDLE_LINK_S = 300.0
# A link on which nothing arrived for this many keep-alive periods is dead.
_SILENT_KEEP_ALIVES = 3
# A peer that accepts links but drops them immediately is dialled this many times for one call.
_DIALS = 3
# The type of link by the scheme of its address; links to all other schemes are direct.
_WAYS = {"wss": LinkType.TUNNEL, "iroh": LinkType.IROH}


def _socket_to(info: tuple[Any, ...]) -> socket.socket:
    """Return a socket that can dial this result of ``getaddrinfo``; OSError if the address may not be dialled."""
    family, kind, protocol, _, (host, *_) = info
    if not may_dial(host):
        raise OSError(errno.EACCES, f"{host} is in a private network, and this machine has no address there")
    return socket.socket(family, kind, protocol)


class Node:
    """The network as one peer sees it: calls and streams over the links that this peer dials, accepts and closes.

    Attributes:
        id: the SHA-256 of this peer's Ed25519 ``public_key`` (32 bytes).
        sign: ``sign(data)`` returns this peer's signature (64 bytes).
        admission: decides which peers may link, and has this peer's membership.
        addresses: where others can dial this peer, as its handshakes state; none in client mode.
        metered: True if a relay or a tunnel carries the traffic to this peer. Then this peer reduces only if no
            member that is not metered accepts connections.
        port: the port on which it listens; None in client mode.
        pinned: peers whose unused links stay open (relays that keep a place for this peer).
        open_circuit: opens a connection to a peer through a relay; None if this peer uses no relays.
    """

    def __init__(
        self,
        identity: Identity,
        settings: NodeSettings,
        admission: Admission,
        events: EventLog,
        wall_clock: Callable[[], float],
        make_link: Callable[..., Link] = Link,
    ) -> None:
        self.id = identity.id
        self.public_key = identity.public_key
        self.sign = identity.sign
        self._identity = identity
        self._settings = settings
        self.admission = admission
        self._events = events
        self._wall_clock = wall_clock
        self._loop = asyncio.get_running_loop()
        self._awaited: dict[PeerId, asyncio.Future[None]] = {}
        # Tasks are cancelled in the order of their start, which a dict keeps, unlike a set.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._own_ends: tuple[Link, Link] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.services = (ServiceTable(), ServiceTable())
        self._make_link = partial(
            make_link,
            services=self.services,
            events=events,
            unread=Unread(events),
            on_closed=self._on_link_closed,
        )
        self.table = LinkTable(identity.id)
        self.book = AddressBook()
        self.clock = SwarmClock()
        self.metering = Metering(settings, self._loop.time)
        self._unanswered = LeftOut[str](REDIAL_S, _MAX_REDIAL_S)
        self.addresses: tuple[str, ...] = ()
        self.metered = False
        self.port: int | None = None
        self.pinned: set[PeerId] = set()
        self.lost_listeners: dict[Callable[[PeerId], None], None] = {}
        self.open_circuit: Callable[[Contact, PeerId, HandshakeReceiver], Awaitable[WebSocket]] | None = None
        self.listener = Listener(self._receive_caller, self.scratch)
        self.iroh = IrohEndpoint(identity, settings, events, self.scratch, self._receive_iroh)

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
        """Listen (unless in client mode), and keep links alive until `close`.

        The node emits `PeerJoined`, `PeerLeft` and `Fault` to ``events``. The ``admission`` decides which peers may
        link; None admits every peer of the run. ``wall_clock`` returns seconds since the epoch. Raises `PortError` if
        the port is taken.
        """
        settings = settings or NodeSettings()
        node = cls(identity, settings, admission or OpenAdmission(), events or EventLog(), wall_clock)
        try:
            if settings.iroh is not None:
                await node.iroh.start()
            if settings.listen:
                node.port = await node.listener.start(settings.host, settings.port)
            node.addresses = settings.announce or (*node.listening(), *node.iroh.addresses)
            node.spawn(node._keep_links())
        except (OSError, PeerError, asyncio.CancelledError):
            await node.close()
            raise
        return node

    # What others see.

    def time(self) -> float:
        """Return swarm time, which all peers of a run share, in seconds since the epoch."""
        return self._own_time() + self.clock.offset_s

    def _own_time(self) -> float:
        return self.clock.own(self._wall_clock(), self._loop.time())

    def linked(self) -> frozenset[PeerId]:
        """Return the peers that have an open link to this peer now."""
        return self.table.peers()

    def limit(self, rate_bps: float | None) -> None:
        """Limit all links together to ``rate_bps`` bits per second in each direction; None removes the limit."""
        self.metering.limit(rate_bps)

    @property
    def contact(self) -> Contact:
        """How others reach this peer; without addresses in client mode."""
        return Contact(self.id, self.addresses)

    def listening(self) -> tuple[str, ...]:
        """Return the addresses of this machine at which it listens now; none in client mode."""
        if self.port is None:
            return ()
        return reachable_addresses(self._settings.host, self.port)

    def learn(self, contact: Contact) -> None:
        """Remember where a peer can be dialled. This is cheap, so call it for every contact."""
        if contact.id != self.id:
            self.book.learn(contact)

    def contact_of(self, peer: PeerId) -> Contact:
        """Return the peer's contact, without addresses if none is known."""
        if peer == self.id:
            return self.contact
        return self.book.find(peer)

    async def call(self, peer: PeerId, message: Message, reply: type[R], *, timeout_s: float) -> R:
        """Send ``message``; return the peer's reply, which must be of type ``reply``, or raise a `PeerError`."""
        link = self.table.best(peer)
        if link is None:
            began_at = self._loop.time()
            link = await self.link_to(peer, timeout_s)
            timeout_s -= self._loop.time() - began_at
        return await link.call(message, reply, timeout_s=timeout_s)

    async def stream(self, peer: PeerId, opening: Message, *, timeout_s: float) -> Stream:
        """Open a stream. The type of ``opening`` selects the peer's handler. ``timeout_s`` only limits the dialling.

        Raises PeerError if dialling fails. If the peer refuses the stream, the first receive raises `CallRefused`.
        """
        link = self.table.best(peer) or await self.link_to(peer, timeout_s)
        return link.open_stream(opening)

    def serve(
        self, kind: type[M], handler: Callable[[PeerId, M], Awaitable[Message]], *, role: Role = Role.VIEWER
    ) -> None:
        """Answer calls of type ``kind`` by peers of ``role`` or above with ``await handler(peer, message)``."""
        calls, _ = self.services
        calls.add(kind, handler, role)

    def serve_stream(
        self, kind: type[M], handler: Callable[[M, Stream], Awaitable[None]], *, role: Role = Role.VIEWER
    ) -> None:
        """Run ``await handler(opening, stream)`` for each stream that a peer opens with ``kind``."""
        _, streams = self.services
        streams.add(kind, handler, role)

    def unserve(self, kind: type[Message]) -> None:
        """Stop answering ``kind``."""
        for services in self.services:
            services.remove(kind)

    def role_of(self, peer: PeerId) -> Role:
        """Return the role that the peer's membership gives; ``GUEST`` without a link."""
        if peer == self.id:
            return Role.AUTHORITY
        roles = [link.remote.role for link in self.table.of(peer)]
        return max(roles, default=Role.GUEST)

    @property
    def membership(self) -> bytes:
        """The membership that proves this peer's role to others; empty in an open run."""
        return self.admission.membership

    def role_by(self, public_key: bytes, membership: bytes, at: float) -> Role:
        """Return the role that a membership gave its owner at the swarm time ``at``; ``GUEST`` if it gave none."""
        try:
            return self.admission.verify(public_key, membership, now=at)
        except NotAdmitted:
            return Role.GUEST

    def read_at(self, peer: PeerId) -> float:
        """Return the loop time at which the last bytes from a peer arrived; -inf without a link."""
        return max((link.carrier.read_at for link in self.table.of(peer)), default=-math.inf)

    def path_to(self, peer: PeerId) -> Path | None:
        link = self.table.best(peer)
        return None if link is None else link.remote.path

    def way_to(self, peer: PeerId) -> str:
        """Return the type of link to a peer: ``direct``, ``LAN``, ``relayed by 1a2b3c4d``; empty without a link."""
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
        """Call ``listener(peer)`` when the last link to a peer is gone; return a function that stops this."""
        listeners = self.lost_listeners
        listeners[listener] = None
        return lambda: listeners.pop(listener, None)

    def statistics(self, peer: PeerId | None = None) -> LinkStatistics:
        """Return the totals of the links to one peer, or to all peers."""
        table = self.table
        links = list(table) if peer is None else table.of(peer)
        rtts_s = [link.rtt_s for link in links if link.rtt_s is not None]
        return self.metering.statistics(peer, rtts_s)

    # The links.

    async def link_to(self, peer: PeerId, timeout_s: float) -> Link:
        """Return a link to the peer: the first one that opens, whichever end dialled; to ourselves, one in memory."""
        if peer == self.id:
            self._require_open()
            return self._own_link()
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(_DIALS):
                    self._require_open()
                    if peer not in self._awaited:
                        awaited = self._loop.create_future()
                        self._awaited[peer] = awaited
                        self.spawn(self._dial(peer, awaited))
                    await asyncio.shield(self._awaited[peer])
                    # If two links open at the same time, one of them is closed again, so take the better one.
                    link = self.table.best(peer)
                    if link is not None:
                        return link
        except TimeoutError:
            raise PeerTimeout(f"no link to {short(peer)} in {timeout_s:.3g} s") from None
        raise PeerLost(f"{short(peer)} accepts links and drops them at once")

    async def _dial(self, peer: PeerId, awaited: asyncio.Future[None]) -> None:
        """Dial the peer. In the end ``awaited`` has an error, or the result that `_add_link` sets."""
        failure: PeerError = PeerLost(f"dialling {short(peer)} was cancelled")
        try:
            addresses = self.book.find(peer).addresses
            require(addresses, f"no address of {short(peer)} is known", PeerUnreachable)
            # The relays that keep a place for this peer may reach a peer that this one cannot reach.
            detours = [address for address in self.addresses if relay_of(address) is not None]
            await dial_any(addresses, partial(self._dial_address, peer), detours)
        except PeerError as error:
            failure = error
        except Exception as error:
            fault = Fault.of(self._loop.time(), f"dialling {short(peer)}", error)
            logger.exception("%s failed", fault.where)
            self._events.emit(fault)
            failure = PeerUnreachable(f"{fault.where} failed: {fault.text}")
        finally:
            if self._awaited.get(peer) is awaited:
                del self._awaited[peer]
            fail(awaited, failure)

    async def _dial_address(self, peer: PeerId, address: str) -> Link:
        relay = relay_of(address)
        if relay is None:
            return await self.dial_direct(peer, address)
        if self.open_circuit is None or relay.id in (peer, self.id):
            raise PeerUnreachable(f"{address}: this peer uses no relays")
        connect = partial(self.open_circuit, relay, peer)
        path = Path(LinkType.RELAYED, relay=relay.id, address=address)
        return await self.shake_hands(connect, expected=peer, path=path)

    async def dial_direct(self, peer: PeerId, address: str) -> Link:
        """Dial an address, but not soon again if no peer answered, because any member may name a victim's address."""
        scheme = address.partition(":")[0]
        way = _WAYS.get(scheme, LinkType.DIRECT)
        path = Path(way, address=address)
        # If another peer than the expected one answers, only dialling for this peer must wait.
        address_of_peer = f"{peer.hex()} {address}"
        now = self._loop.time()
        left_out = self._unanswered.holds(address, now) or self._unanswered.holds(address_of_peer, now)
        require(not left_out, f"{address} did not answer a moment ago", PeerUnreachable)
        try:
            link = await self.shake_hands(partial(self.connect, address), expected=peer, path=path)
        except PeerUnreachable:
            self._unanswered.fail(address, self._loop.time())
            raise
        except WrongPeer:
            self._unanswered.fail(address_of_peer, self._loop.time())
            raise
        self._unanswered.forgive(address)
        return link

    async def probe(self, peer: PeerId, address: str, *, timeout_s: float) -> None:
        """Raise `PeerError` unless the peer can be dialled at this direct address; no link stays open."""
        proof: list[Remote] = []

        def stop(carrier: WebSocket, remote: Remote, rtt_s: float) -> Link:
            proof.append(remote)
            raise PeerError("probed")

        connect = partial(self.connect, address)
        path = Path(address=address)
        try:
            await self.shake_hands(connect, expected=peer, path=path, make_link=stop, timeout_s=timeout_s)
        except PeerError:
            if not proof:
                raise

    async def connect(self, address: str, receiver: HandshakeReceiver) -> WebSocket:
        self._require_open()
        if is_iroh(address):
            return await self.iroh.connect(address, receiver)
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0,
                force_close=True,
                socket_factory=_socket_to,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return await dial(self._session, address, scratch=self.scratch, receiver=receiver)

    async def shake_hands(
        self,
        connect: Callable[[HandshakeReceiver], Awaitable[WebSocket]],
        *,
        expected: PeerId | None,
        path: Path,
        make_link: Callable[[WebSocket, Remote, float], Link] | None = None,
        timeout_s: float | None = None,
    ) -> Link:
        """Make a link over the connection that ``connect`` opens; ``expected`` is None at the end that was dialled.

        Raises `PeerUnreachable` if no peer answers in time or if the peer refuses, and the errors of `Introduction`.
        """
        receiver = self._receiver(expected, path, make_link)
        timeout_s = timeout_s or DIAL_TIMEOUT_S
        name = path.address or str(path)
        websocket: WebSocket | None = None
        try:
            async with asyncio.timeout(timeout_s):
                websocket = await connect(receiver)
                receiver.use(websocket)
                # Without the shield, a timeout would cancel the future, which would then count as done below.
                return await asyncio.shield(receiver.link)
        except TimeoutError:
            raise PeerUnreachable(f"{name} did not answer in {timeout_s:.3g} s") from None
        except PeerLost as error:
            ours = describe_run(self._settings.run_id)
            raise PeerUnreachable(f"{name} refused the link: {error} (we belong to {ours})") from error
        except PeerError:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PeerUnreachable(f"{name}: {error}") from error
        finally:
            linked = receiver.link.done() and receiver.link.exception() is None
            if websocket is not None and not linked:
                websocket.abort("the handshake failed")

    def _receiver(
        self,
        expected: PeerId | None,
        path: Path,
        make_link: Callable[[WebSocket, Remote, float], Link] | None = None,
    ) -> HandshakeReceiver:
        introduction = Introduction(
            self._identity,
            addresses=self.addresses,
            run_id=self._settings.run_id,
            expected=expected,
            membership=self.admission.membership,
            admit=lambda key, membership: self.admission.admit(key, membership, now=self.time()),
        )
        make_link = make_link or partial(self._on_introduced, path, expected is not None)
        return HandshakeReceiver(introduction, wall_clock=self._own_time, make_link=make_link)

    def _receive_caller(self, request: web.BaseRequest) -> HandshakeReceiver:
        self.require_room()
        way = LinkType.DIRECT
        # A tunnel's agent connects from this machine. From elsewhere, any caller could send this header.
        if is_loopback(request.remote or "") and "X-Forwarded-For" in request.headers:
            way = LinkType.TUNNEL
        return self._receiver(None, Path(way))

    def _receive_iroh(self) -> HandshakeReceiver:
        self.require_room()
        return self._receiver(None, Path(LinkType.IROH))

    def _on_introduced(
        self, path: Path, dialled: bool, carrier: WebSocket | Loopback, remote: Remote, rtt_s: float
    ) -> Link:
        self._require_open()
        contact = remote.contact
        self.book.replace(contact)
        for address in contact.addresses:
            self._unanswered.forgive(address)
        # if this machine's clock was set meanwhile, this call notices it before the clocks are compared
        self._own_time()
        self.clock.observe(contact.id, theirs=remote.time, ours=self._wall_clock(), rtt_s=rtt_s)
        path = replace(path, remote=carrier.remote_end)
        traffic = self.metering.traffic(contact.id, path, dialled=dialled)
        link = self._make_link(replace(remote, path=path), carrier=carrier, traffic=traffic, dialled=dialled)
        link.rtts_s.append(rtt_s)
        self._add_link(link)
        return link

    def _add_link(self, link: Link) -> None:
        first = self.table.add(link)
        best = self.table.best(link.peer)
        for other in self.table.of(link.peer):
            if other is not best:
                other.leave()
        if len(self.table) > MAX_LINKS:
            unused = self.table.longest_unused()
            if unused is not None and unused is not best:
                unused.leave()
        if first:
            self._events.emit(PeerJoined(self._loop.time(), link.peer.hex()))
        awaited = self._awaited.pop(link.peer, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(None)

    def _on_link_closed(self, link: Link) -> None:
        if not self.table.remove(link):
            return
        self.clock.forget(link.peer)
        # while this peer itself leaves, it does not report the other peers as having left
        if self._closing is None:
            self._events.emit(PeerLeft(self._loop.time(), link.peer.hex(), link.lost or ""))
        for listener in tuple(self.lost_listeners):
            listener(link.peer)

    def _own_link(self) -> Link:
        if self._own_ends is None:
            contact = Contact(self.id, self.addresses)
            remote = Remote(contact, role=Role.AUTHORITY)
            near = Loopback()
            far = Loopback()
            near.other = far
            far.other = near
            make_link = partial(self._make_link, remote, traffic=(Traffic(), Traffic()))
            near_link = make_link(carrier=near, dialled=True)
            far_link = make_link(carrier=far, dialled=False)
            near.receiver = near_link
            far.receiver = far_link
            self._own_ends = (near_link, far_link)
        return self._own_ends[0]

    async def _keep_links(self) -> None:
        """Ping every link; close links that are dead, unused or of peers no longer admitted. Never returns."""
        while True:
            await asyncio.sleep(min(self._settings.keep_alive_s, IDLE_LINK_S))
            self.recheck()
            now = self._loop.time()
            for link in self.table:
                silent_s = now - link.carrier.read_at
                unused_s = now - link.used_at if link.mux.quiet else 0.0
                # If both ends have addresses, either end can dial the other again.
                dialable = bool(self.addresses and self.book.find(link.peer).addresses)
                needed = link.peer in self.pinned or not dialable
                if silent_s > _SILENT_KEEP_ALIVES * self._settings.keep_alive_s:
                    link.abort(f"silent for {silent_s:.0f} s")
                elif link.mux.leaving and unused_s > LEAVE_TIMEOUT_S:
                    link.close("no longer needed")
                elif unused_s > IDLE_LINK_S and not needed:
                    link.leave()
                else:
                    link.ping()

    def recheck(self) -> None:
        for link in self.table:
            try:
                self._admit_again(link, link.remote.membership)
            except NotAdmitted as error:
                link.close(f"not admitted: {error}")

    def readmit(self, peer: PeerId, membership: bytes) -> Role:
        """Admit the peer with a renewed membership and return its role, or raise `NotAdmitted`."""
        roles = [self._admit_again(link, membership) for link in self.table.of(peer)]
        return max(roles, default=Role.GUEST)

    def _admit_again(self, link: Link, membership: bytes) -> Role:
        role = self.admission.admit(link.remote.public_key, membership, now=self.time())
        link.remote = replace(link.remote, membership=membership, role=role)
        return role

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``work`` until it ends or the node is closed."""
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def _require_open(self) -> None:
        require(self._closing is None, "this peer is closed", PeerLost)

    def require_room(self) -> None:
        """Raise `PeerLost` if this peer can accept no more links, or is closed."""
        self._require_open()
        full = self.table.full(MAX_LINKS)
        require(not full, f"this peer has {len(self.table)} links, all busy", PeerLost)

    async def close(self) -> None:
        """Cancel all handlers and close all links. Idempotent; it continues if its caller is cancelled."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(asyncio.current_task()))
        await asyncio.shield(self._closing)

    async def _close(self, caller: asyncio.Task[object] | None) -> None:
        links = self._all_links()
        tasks = self._cancel(links, caller, "this peer is closed")
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in links:
            link.close("the peer left")
        await asyncio.gather(*(link.wait_closed(timeout_s=_CLOSE_TIMEOUT_S) for link in links))
        await self.listener.close()
        await self.iroh.close()
        if self._session is not None:
            await self._session.close()

    def kill(self, reason: str) -> None:
        """Cancel every task and break every link immediately, as a crash would."""
        links = self._all_links()
        self._cancel(links, None, reason)
        self._own_ends = None
        for link in links:
            link.carrier.abort(reason)
            self._loop.call_soon(link.on_lost, reason)

    def _all_links(self) -> list[Link]:
        """Return the links to other peers, and both ends of the link to this peer itself."""
        return [*self.table, *(self._own_ends or ())]

    def _cancel(
        self, links: list[Link], caller: asyncio.Task[object] | None, reason: str
    ) -> list[asyncio.Task[Any]]:
        """Cancel all tasks, dials and handlers except ``caller``, in the order of their start; return the tasks."""
        tasks = list(self._tasks)
        for link in links:
            tasks += link.tasks
        if caller in tasks:
            tasks.remove(caller)
        for task in tasks:
            task.cancel()
        for awaited in self._awaited.values():
            fail(awaited, PeerLost(reason))
        self._awaited.clear()
        return tasks
