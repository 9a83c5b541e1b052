"""Opens links: dials peers at every address they have, greets callers, and keeps what stands alive.

Swarm time: the own clock moved by the median offset of the linked peers, the own zero included.

With zero among them, two peers whose clocks differ meet in the middle, and one liar among honest peers moves
nothing. The own clock is never moved by more than `MAX_OFFSET_S`: whoever is all that a newcomer sees could
otherwise make what has expired valid again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator
from functools import partial
from statistics import median
from typing import Any

import aiohttp
from aiohttp import web

from colab_swarm.errors import NotAdmitted, PeerError, PeerLost, PeerTimeout, PeerUnreachable
from colab_swarm.events import EventLog, PeerJoined, PeerLeft
from colab_swarm.net.addresses import AddressBook, CircuitAddress, is_loopback
from colab_swarm.net.carrier import Carrier, Cipher, LinkLimits, LinkType, Path, Receiver, Remote, Traffic
from colab_swarm.net.handshake import HandshakeProtocol, Listener, introduce, try_to_dial
from colab_swarm.net.hello import Introduced, Introduction, describe_run
from colab_swarm.net.identity import Identity
from colab_swarm.net.link import Link, ServiceTable
from colab_swarm.net.membership import Admission
from colab_swarm.net.metering import Metering
from colab_swarm.net.peers import Contact, PeerId, Role, short
from colab_swarm.net.punch import bound_socket
from colab_swarm.net.settings import NodeSettings
from colab_swarm.net.websocket import SCRATCH_BYTES, WebSocket, dial


class NoCipher:
    """Seals nothing."""

    overhead_bytes = 0

    def seal_into(self, plaintext: bytes, out: memoryview) -> None:
        """The same bytes."""
        out[:] = plaintext

    def open(self, ciphertext: memoryview) -> bytes:
        """The same bytes, in memory of their own."""
        return bytes(ciphertext)


class Loopback:
    """One end of a carrier in memory."""

    backlog_bytes = 0

    def __init__(self) -> None:
        self.receiver: Receiver
        self.other: Loopback
        self._loop = asyncio.get_running_loop()
        self._open = True

    def send(self, size: int, fill: Callable[[memoryview], None]) -> int:
        """Deliver in the next turn of the event loop."""
        message = memoryview(bytearray(size))
        fill(message)
        self._loop.call_soon(self.other._deliver, message)
        return size

    def close(self, reason: str = "") -> None:
        """Tell the other end after what was sent before."""
        if self._open:
            self._open = False
            self._loop.call_soon(self.other._lose, reason)

    def abort(self, reason: str = "") -> None:
        """The same as `close`."""
        self.close(reason)

    def pause_reading(self) -> None:
        """Nothing to pause: budgets do not apply to oneself."""

    def resume_reading(self) -> None:
        """Nothing to resume."""

    async def wait_closed(self) -> None:
        """Closed at once."""

    def _deliver(self, message: memoryview) -> None:
        if self._open:
            self.receiver.on_message(message)

    def _lose(self, reason: str) -> None:
        if self._open:
            self._open = False
            self.receiver.on_lost(reason)


def link_to_self(make_link: Callable[[Loopback, bool], Link]) -> tuple[Link, Link]:
    """Both ends of a link in memory; ``make_link(carrier, dialled)`` makes each, the dialled one first."""
    near, far = Loopback(), Loopback()
    near.other, far.other = far, near
    near.receiver, far.receiver = links = make_link(near, True), make_link(far, False)
    return links


SIMULTANEOUS_S = 10.0


class LinkTable:
    """Links by peer.

    A link through a relay is only used while there is no other: both ends leave it as soon as they have a better
    one, and it ends when its calls and streams are over, so nothing is lost in the change.

    When both ends dial at once there are two links for a moment. Both ends choose the one that the peer with
    the smaller id dialled, and leave the other, which ends when its calls and streams are over. A link that
    comes later than a dial can last replaces the old one: the peer would not have dialled if that still
    worked for it.

    Args:
        own: this peer's id.
    """

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._by_peer: dict[PeerId, list[Link]] = {}

    def __iter__(self) -> Iterator[Link]:
        return iter(
            [link for links in list(self._by_peer.values()) for link in links]
        )  # seen from other threads

    def __len__(self) -> int:
        return sum(len(links) for links in self._by_peer.values())

    def peers(self) -> frozenset[PeerId]:
        """Peers with a link."""
        return frozenset(self._by_peer)

    def of(self, peer: PeerId) -> list[Link]:
        """All links to a peer."""
        return list(self._by_peer.get(peer, ()))

    def best(self, peer: PeerId) -> Link | None:
        """The link to use for something new."""
        usable = [link for link in self._by_peer.get(peer, ()) if not link.leaving]
        if len(usable) < 2:
            return usable[0] if usable else None
        usable = [link for link in usable if not _relayed(link)] or usable
        newest = max(link.opened_at for link in usable)
        rivals = [link for link in usable if newest - link.opened_at < SIMULTANEOUS_S]
        return max(rivals, key=lambda link: (link.dialled == (self._own < peer), link.opened_at))

    def add(self, link: Link) -> bool:
        """Take a new link; returns whether it is the first to its peer."""
        links = self._by_peer.setdefault(link.peer, [])
        links.append(link)
        return len(links) == 1

    def remove(self, link: Link) -> bool:
        """Forget a link; returns whether it was the last to its peer."""
        links = self._by_peer.get(link.peer, [])
        if link in links:
            links.remove(link)
            if not links:
                del self._by_peer[link.peer]
                return True
        return False

    def full(self, limit: int) -> bool:
        """Whether no link may be added: of ``limit`` none can be closed, or too many never leave when told to."""
        return len(self) >= 2 * limit or (len(self) >= limit and self.longest_unused() is None)

    def longest_unused(self) -> Link | None:
        """The quiet link that could be closed first."""
        quiet = [link for link in self if link.mux.quiet and not link.leaving]
        return min(quiet, key=lambda link: link.used_at, default=None)


def _relayed(link: Link) -> bool:
    return link.remote.path.way is LinkType.RELAYED


MAX_OFFSET_S = 600.0


class SwarmClock:
    """Collects clock offsets, one per peer. Free of I/O."""

    def __init__(self) -> None:
        self._offsets_s: dict[Hashable, float] = {}

    def observe(self, peer: Hashable, *, theirs: float, ours: float, rtt_s: float) -> None:
        """A peer's clock said ``theirs`` half a round trip before our clock said ``ours`` (seconds)."""
        self._offsets_s[peer] = theirs + rtt_s / 2 - ours

    def forget(self, peer: Hashable) -> None:
        """The peer is gone; its clock no longer counts."""
        self._offsets_s.pop(peer, None)

    @property
    def offset_s(self) -> float:
        """Seconds to add to the own clock, 10 minutes at most."""
        return max(-MAX_OFFSET_S, min(MAX_OFFSET_S, median([0.0, *self._offsets_s.values()])))

    @property
    def behind_s(self) -> float:
        """How far the own clock is behind the linked peers' median; negative if it is ahead."""
        return median(self._offsets_s.values() or [0.0])


CLOSE_TIMEOUT_S = 1.0
MISSED_KEEP_ALIVES = 3
DIALS = 3

OpenCircuit = Callable[[Contact, PeerId, Receiver], Awaitable[WebSocket]]


class Linker:
    """A node's links, and all that makes them.

    Attributes:
        services: calls and streams that this peer answers, one registry each.
        addresses: where others can dial this peer, as its handshakes tell.
        pinned: peers whose links are kept though they are quiet (relays that hold a place for this peer).
        open_circuit: opens a way to a peer through a relay; None where circuits are not offered.
        on_relayed: called with each new relayed link that this end dialled.
    """

    def __init__(
        self,
        identity: Identity,
        settings: NodeSettings,
        admission: Admission,
        events: EventLog,
        wall_clock: Callable[[], float],
    ) -> None:
        self._identity, self._settings, self._admission = identity, settings, admission
        self._events, self._wall_clock, self._loop = events, wall_clock, asyncio.get_running_loop()
        self._limits = LinkLimits(settings.max_streams_per_link, settings.max_calls_per_link)
        self._awaited: dict[PeerId, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._own_ends: tuple[Link, Link] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                force_close=True,
                socket_factory=lambda info: bound_socket(info[0]),  # so that its port can be punched from
            ),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.services = (ServiceTable(), ServiceTable())
        self.table, self.book, self.clock = LinkTable(identity.id), AddressBook(), SwarmClock()
        self.metering = Metering(settings, self._loop.time)
        self.addresses: tuple[str, ...] = ()
        self.pinned: set[PeerId] = set()
        self.lost_listeners: list[Callable[[PeerId], None]] = []
        self.open_circuit: OpenCircuit | None = None
        self.on_relayed: Callable[[Link], None] = lambda link: None
        self.listener = Listener(
            self._greet_caller,
            scratch=self.scratch,
            timeout_s=settings.handshake_timeout_s,
            max_fresh=settings.max_handshakes,
        )

    def time(self) -> float:
        """Swarm time, seconds since the epoch."""
        return self._wall_clock() + self.clock.offset_s

    @property
    def closed(self) -> bool:
        """Whether the node is closed, or closing."""
        return self._closing is not None

    # --- reaching a peer ------------------------------------------------------------------------------------

    async def link_to(self, peer: PeerId, timeout_s: float) -> Link:
        """A link to the peer: to ourselves in memory, else the first that comes up, whoever dialled it.

        Raises:
            PeerError: there is none to be had in time.
        """
        self._require_open()
        if peer == self._identity.id:
            return self._own_link()
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(DIALS):
                    if self.closed:
                        break
                    await asyncio.shield(self._await_link(peer))
                    # of two links that come up at once one is left again: take the best when we get to run
                    link = self.table.best(peer)
                    if link is not None:
                        return link
        except TimeoutError:
            raise PeerTimeout(f"no link to {short(peer)} in {timeout_s:.3g} s") from None
        raise PeerLost(f"{short(peer)} accepts links and drops them at once")

    def _await_link(self, peer: PeerId) -> asyncio.Future[None]:
        if peer not in self._awaited:
            awaited = self._awaited[peer] = self._loop.create_future()
            self.spawn(self._dial(peer, awaited))
        return self._awaited[peer]

    async def _dial(self, peer: PeerId, awaited: asyncio.Future[None]) -> None:
        """Dial the peer; however that ends, ``awaited`` is done afterwards (`_add_link` tells it of a new link)."""
        failure: PeerError | None = PeerLost(f"dialling {short(peer)} was cancelled")
        dial_address = partial(self._dial_address, peer)
        try:
            failure = await try_to_dial(self.book.find(peer), dial_address, self._detours, self._events)
        finally:
            if self._awaited.get(peer) is awaited:
                del self._awaited[peer]
            if failure is not None and not awaited.done():
                awaited.set_exception(failure)
                awaited.exception()  # the waiters may all have given up

    def _detours(self) -> list[str]:
        """Through relays that keep our places: they may reach a peer that we cannot."""
        return [address for address in self.addresses if CircuitAddress.parse(address) is not None]

    async def _dial_address(self, peer: PeerId, address: str) -> Link:
        circuit = CircuitAddress.parse(address)
        if circuit is None:
            return await self.dial_direct(peer, address)
        if self.open_circuit is None or circuit.relay.id in (peer, self._identity.id):
            raise PeerUnreachable(f"{address}: this peer uses no relays")
        relay, open_circuit = circuit.relay, self.open_circuit
        path = Path(LinkType.RELAYED, relay=relay.id, address=address)
        link = await self.greet(partial(open_circuit, relay, peer), expected=peer, path=path)
        self.on_relayed(link)
        return link

    async def dial_direct(self, peer: PeerId, address: str) -> Link:
        """Dial one direct address.

        Raises:
            PeerUnreachable: nobody answers there, or it refuses the link.
            WrongPeer, NotAdmitted, ProtocolError: somebody else answers, or a stranger, or garbage.
        """
        path = Path(LinkType.TUNNEL if address.startswith("wss") else LinkType.DIRECT, address=address)
        return await self._introduce(address, self._greeter(peer, path))

    async def probe(self, peer: PeerId, address: str, *, timeout_s: float) -> None:
        """Find out whether the peer can be dialled at a direct address; no link comes of it.

        Raises:
            PeerError: it cannot; see `dial_direct`.
        """

        def hang_up(carrier: WebSocket, introduced: Introduced, rtt_s: float) -> Link:
            raise _Probed

        greeter = HandshakeProtocol(self.introduction(peer), wall_clock=self._wall_clock, make_link=hang_up)
        try:
            async with asyncio.timeout(timeout_s):
                await self._introduce(address, greeter)
        except _Probed:
            pass
        except TimeoutError:
            raise PeerUnreachable(f"{address} did not answer in {timeout_s:.3g} s") from None

    async def _introduce(self, address: str, greeter: HandshakeProtocol) -> Link:
        timeout_s = self._settings.dial_timeout_s
        try:
            return await introduce(
                lambda: self.connect(address, greeter), greeter, timeout_s=timeout_s, name=address
            )
        except PeerLost as error:
            ours = describe_run(self._settings.run_id)
            raise PeerUnreachable(f"{address} refused the link: {error} (we are of {ours})") from error

    async def connect(self, address: str, receiver: Receiver) -> WebSocket:
        """Open a WebSocket to a direct address.

        Raises:
            PeerLost, aiohttp.ClientError, OSError: see `dial`.
        """
        return await dial(self._session, address, scratch=self.scratch, receiver=receiver)

    # --- shaking hands --------------------------------------------------------------------------------------

    async def greet(
        self, connect: Callable[[Receiver], Awaitable[WebSocket]], *, expected: PeerId | None, path: Path
    ) -> Link:
        """Shake hands over the connection that ``connect(receiver)`` makes; ``expected`` for the end that begins.

        Raises:
            PeerError: no link came of it; the connection is closed.
        """
        greeter = self._greeter(expected, path)
        timeout_s, begins = self._settings.handshake_timeout_s, expected is not None
        return await introduce(
            lambda: connect(greeter), greeter, timeout_s=timeout_s, name=str(path), start=begins
        )

    def introduction(self, expected: PeerId | None) -> Introduction:
        """This peer's end of a handshake."""
        return Introduction(
            self._identity,
            addresses=self.addresses,
            run_id=self._settings.run_id,
            expected=expected,
            membership=self._admission.membership,
            admit=lambda key, membership: self._admission.admit(key, membership, now=self.time()),
        )

    def _greeter(self, expected: PeerId | None, path: Path) -> HandshakeProtocol:
        def make_link(carrier: WebSocket, introduced: Introduced, rtt_s: float) -> Link:
            return self._on_introduced(carrier, introduced, rtt_s, path, dialled=expected is not None)

        return HandshakeProtocol(
            self.introduction(expected), wall_clock=self._wall_clock, make_link=make_link
        )

    def _greet_caller(self, request: web.BaseRequest) -> HandshakeProtocol:
        self.require_room()
        local = is_loopback(request.remote or "")  # as a tunnel's agent is; anybody can send the header
        tunnelled = local and "X-Forwarded-For" in request.headers
        return self._greeter(None, Path(LinkType.TUNNEL if tunnelled else LinkType.DIRECT))

    def _on_introduced(
        self, carrier: WebSocket, introduced: Introduced, rtt_s: float, path: Path, *, dialled: bool
    ) -> Link:
        self._require_open()
        contact, (local, remote) = introduced.contact, carrier.ends
        self.book.replace(contact)
        self.clock.observe(contact.id, theirs=introduced.time, ours=self._wall_clock(), rtt_s=rtt_s)
        path = Path(path.way, path.relay, local, remote, path.address, path.caller_host)
        link = self._make_link(
            Remote(contact, introduced.public_key, introduced.membership, introduced.role, path),
            carrier,
            introduced.keys,
            dialled=dialled,
            traffic=self.metering.traffic(contact.id, path, dialled=dialled),
        )
        link.add_rtt(rtt_s)
        self._add_link(link)
        return link

    def _make_link(
        self, remote: Remote, carrier: Carrier, cipher: Cipher, *, dialled: bool, traffic: Traffic
    ) -> Link:
        return Link(
            remote,
            carrier=carrier,
            cipher=cipher,
            dialled=dialled,
            services=self.services,
            traffic=traffic,
            limits=self._limits,
            events=self._events,
        )

    def _add_link(self, link: Link) -> None:
        link.on_closed = self._on_link_closed
        first = self.table.add(link)
        best = self.table.best(link.peer)
        for other in self.table.of(link.peer):
            if other is not best:
                other.leave()
        if len(self.table) > self._settings.max_links:
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
        self._events.emit(PeerLeft(self._loop.time(), link.peer.hex(), link.lost or ""))
        for listener in tuple(self.lost_listeners):
            listener(link.peer)

    def _own_link(self) -> Link:
        if self._own_ends is None:
            own = Remote(Contact(self._identity.id, self.addresses), role=Role.AUTHORITY)
            self._own_ends = link_to_self(
                lambda end, dialled: self._make_link(own, end, NoCipher(), dialled=dialled, traffic=Traffic())
            )
        return self._own_ends[0]

    # --- upkeep ---------------------------------------------------------------------------------------------

    async def keep_links(self) -> None:
        """Ping every link, close the dead, the unused and those whose peer is no longer admitted; for ever."""
        settings = self._settings
        while True:
            await asyncio.sleep(min(settings.keep_alive_s, settings.idle_link_s))
            self.recheck()
            now = self._loop.time()
            for link in self.table:
                if now - link.heard_at > MISSED_KEEP_ALIVES * settings.keep_alive_s:
                    link.abort(f"silent for {now - link.heard_at:.0f} s")
                elif link.outstays(now):
                    link.close("no longer needed")
                elif link.mux.quiet and now - link.used_at > settings.idle_link_s and self._can_redial(link):
                    link.leave()
                else:
                    link.ping()

    def recheck(self) -> None:
        """Close the links of peers that are no longer admitted."""
        for link in self.table:
            try:
                self._admit_again(link, link.remote.membership)
            except NotAdmitted as error:
                link.close(f"not admitted: {error}")

    def readmit(self, peer: PeerId, membership: bytes) -> Role:
        """The peer shows a renewed membership; returns the role it has now.

        Raises:
            NotAdmitted: it is not valid; the links stay as they were.
        """
        roles = [self._admit_again(link, membership) for link in self.table.of(peer)]
        return max(roles, default=Role.GUEST)

    def _admit_again(self, link: Link, membership: bytes) -> Role:
        remote = link.remote
        role = self._admission.admit(remote.public_key, membership, now=self.time())
        link.remote = Remote(remote.contact, remote.public_key, membership, role, remote.path)
        return role

    def _can_redial(self, link: Link) -> bool:
        return link.peer not in self.pinned and bool(self.addresses and self.book.find(link.peer).addresses)

    # --- life -----------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``work`` until it ends or the node is closed."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _require_open(self) -> None:
        if self.closed:
            raise PeerLost("this peer is closed")

    def require_room(self) -> None:
        """Raise `PeerLost` if no link may be added."""
        self._require_open()
        if self.table.full(self._settings.max_links):
            raise PeerLost(f"this peer has {len(self.table)} links, all busy")

    async def close(self) -> None:
        """Cancel handlers, close all links. Idempotent; goes on if the caller is cancelled."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(asyncio.current_task()))
        await asyncio.shield(self._closing)

    async def _close(self, caller: asyncio.Task[object] | None) -> None:
        links = [*self.table, *(self._own_ends or ())]
        tasks = {*self._tasks, *(task for link in links for task in link.tasks())} - {caller}
        for task in tasks:
            task.cancel()
        for awaited in self._awaited.values():
            if not awaited.done():
                awaited.set_exception(PeerLost("this peer is closed"))
                awaited.exception()  # there may be no waiter
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in links:
            link.close("the peer left")
        await asyncio.gather(*(link.wait_closed(timeout_s=CLOSE_TIMEOUT_S) for link in links))
        await self.listener.close()
        await self._session.close()


class _Probed(PeerError):
    """The handshake went far enough to know that the peer is there."""
