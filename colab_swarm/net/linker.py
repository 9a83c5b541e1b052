"""A node's links: `Linker` dials, accepts, pings and closes them; `SwarmClock` compares the ends' clocks.

Swarm time is the own clock moved by the median offset of the linked peers, with an own offset of
zero among them. So two peers whose clocks differ meet in the middle, and one liar among honest
peers moves nothing. The own clock is never moved by more than `_MAX_OFFSET_S`: otherwise a late
joiner's only peer could make expired records valid again. An own clock that agreed with the others and is
then set by more than that is not followed: swarm time goes on as the clock ran.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import replace
from functools import partial
from statistics import median
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
    MAX_BOOK_ENTRIES,
    AddressBook,
    is_iroh,
    is_loopback,
    may_dial,
    relay_of,
)
from colab_swarm.net.carrier import LinkType, Loopback, Metering, NodeSettings, Path, Remote, Traffic
from colab_swarm.net.handshake import HandshakeReceiver, Introduction, Listener, describe_run, dial_any
from colab_swarm.net.identity import Identity
from colab_swarm.net.iroh import IrohEndpoint
from colab_swarm.net.link import LEAVE_TIMEOUT_S, Link, LinkTable, Unread, fail
from colab_swarm.net.membership import Admission
from colab_swarm.net.mux import ServiceTable
from colab_swarm.net.patience import LeftOut
from colab_swarm.net.peers import Contact, PeerId, Role, remember, short
from colab_swarm.net.websocket import SCRATCH_BYTES, WebSocket, bound_socket, dial

logger = logging.getLogger(__name__)
_MAX_OFFSET_S = 600.0
_STEP_S = 1.0  # less is a clock that is adjusted
_CLOSE_TIMEOUT_S = 1.0
# An address that did not answer is dialled again after REDIAL_S, then after twice as long, up to _MAX_REDIAL_S.
REDIAL_S = 1.0
_MAX_REDIAL_S = 30.0
# A link that is silent for this many keep-alives is dead.
_SILENT_KEEP_ALIVES = 3
# A peer that accepts links and drops them at once is dialled this often for one call.
_DIALS = 3
# The type of link by the scheme of its address; every other one is direct.
_WAYS = {"wss": LinkType.TUNNEL, "iroh": LinkType.IROH}


class SwarmClock:
    """Collects clock offsets, one per peer. Free of I/O.

    ``offset_s`` is to be added to `own`, 10 minutes at most; ``behind_s`` is by how much the machine's clock
    is behind the linked peers' median, negative if it is ahead.
    """

    def __init__(self) -> None:
        # Leads are those of clocks over this peer's monotonic one.
        self._leads_s: dict[Hashable, float] = {}
        self._lead_s = 0.0  # of the machine's clock
        self._agreed_s: float | None = None  # of the machine's clock when it last agreed with the others
        self._followed_s = 0.0
        self.offset_s = 0.0
        self.behind_s = 0.0

    def own(self, wall: float, now: float) -> float:
        """Return the own clock as this peer follows it; ``wall`` is the machine's at the monotonic time ``now``."""
        if abs(wall - now - self._lead_s) > _STEP_S:
            self._lead_s = wall - now
            self._compare()
        return wall + self._followed_s - self._lead_s

    def observe(self, peer: Hashable, *, theirs: float, ours: float, rtt_s: float) -> None:
        """Note that a peer's clock showed ``theirs`` seconds half a round trip before the machine's showed ``ours``."""
        self._leads_s[peer] = theirs + rtt_s / 2 - ours + self._lead_s
        self._compare()

    def forget(self, peer: Hashable) -> None:
        self._leads_s.pop(peer, None)
        self._compare()

    def _compare(self) -> None:
        leads_s = self._leads_s.values()
        others_s = median(leads_s or [self._lead_s])
        self.behind_s = others_s - self._lead_s
        if self._agreed_s is None or abs(self.behind_s) <= max(_MAX_OFFSET_S, abs(others_s - self._agreed_s)):
            self._followed_s = self._lead_s
        else:
            self._followed_s = self._agreed_s
        if leads_s and abs(self.behind_s) <= _MAX_OFFSET_S:
            self._agreed_s = self._lead_s
        offset_s = median([0.0, *(lead_s - self._followed_s for lead_s in leads_s)])
        self.offset_s = max(-_MAX_OFFSET_S, min(_MAX_OFFSET_S, offset_s))


def _socket_to(info: tuple[Any, ...]) -> socket.socket:
    """Return a socket to dial one result of ``getaddrinfo`` from; OSError if the address may not be dialled."""
    family = info[0]
    host = info[4][0]
    if not may_dial(host):
        raise OSError(errno.EACCES, f"{host} is in a private network, and this machine has no address there")
    # Hole punching starts from the local port of such a socket.
    return bound_socket(family)


class Linker:
    """A node's links: dials, accepts and closes them.

    Attributes:
        admission: who may link, and this peer's membership.
        addresses: where others can dial this peer, as its handshakes state.
        pinned: peers whose quiet links stay open (relays that hold a place for this peer).
        open_circuit: opens a connection to a peer through a relay; None where circuits are not offered.
        on_relayed: called with each new relayed link that this end dialled.
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
        self._identity = identity
        self._settings = settings
        self.admission = admission
        self._events = events
        self._wall_clock = wall_clock
        self._loop = asyncio.get_running_loop()
        self._awaited: dict[PeerId, asyncio.Future[None]] = {}
        # A dict keeps the order of their start, in which they are cancelled; a set would not.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._own_ends: tuple[Link, Link] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.services = (ServiceTable(), ServiceTable())
        self._make_link = partial(
            make_link,
            services=self.services,
            settings=settings,
            events=events,
            unread=Unread(events),
        )
        self.table = LinkTable(identity.id)
        self.book = AddressBook()
        self.clock = SwarmClock()
        self.metering = Metering(settings, self._loop.time)
        self._unanswered = LeftOut[str](REDIAL_S, _MAX_REDIAL_S)
        self.addresses: tuple[str, ...] = ()
        self.pinned: set[PeerId] = set()
        # The vouchers of linked peers, and of peers that have left.
        self.vouchers: dict[PeerId, bytes] = {}
        self.lost_listeners: dict[Callable[[PeerId], None], None] = {}
        self.open_circuit: Callable[[Contact, PeerId, HandshakeReceiver], Awaitable[WebSocket]] | None = None
        self.on_relayed: Callable[[Link], None] = lambda link: None
        self.listener = Listener(self._receive_caller, self.scratch, settings)
        self.iroh = IrohEndpoint(identity, settings, events, self.scratch, self._receive_iroh)

    def time(self) -> float:
        """Return swarm time, seconds since the epoch."""
        return self.own_time() + self.clock.offset_s

    def own_time(self) -> float:
        return self.clock.own(self._wall_clock(), self._loop.time())

    async def link_to(self, peer: PeerId, timeout_s: float) -> Link:
        """Return a link to the peer: in memory to ourselves, else the first that opens, from either end."""
        if peer == self._identity.id:
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
                    # If two links open at once, one of them is left again, so take the best one now.
                    link = self.table.best(peer)
                    if link is not None:
                        return link
        except TimeoutError:
            raise PeerTimeout(f"no link to {short(peer)} in {timeout_s:.3g} s") from None
        raise PeerLost(f"{short(peer)} accepts links and drops them at once")

    async def _dial(self, peer: PeerId, awaited: asyncio.Future[None]) -> None:
        """Dial the peer; in the end ``awaited`` is done (`_add_link` sets its result)."""
        failure: PeerError = PeerLost(f"dialling {short(peer)} was cancelled")
        try:
            addresses = self.book.find(peer).addresses
            require(addresses, f"no address of {short(peer)} is known", PeerUnreachable)
            # The relays that keep places for us may reach a peer that we cannot.
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
        if self.open_circuit is None or relay.id in (peer, self._identity.id):
            raise PeerUnreachable(f"{address}: this peer uses no relays")
        connect = partial(self.open_circuit, relay, peer)
        path = Path(LinkType.RELAYED, relay=relay.id, address=address)
        link = await self.shake_hands(connect, expected=peer, path=path)
        self.on_relayed(link)
        return link

    async def dial_direct(self, peer: PeerId, address: str) -> Link:
        """Dial an address, but not at once again where no peer answered: any member may name a victim's."""
        scheme = address.partition(":")[0]
        way = _WAYS.get(scheme, LinkType.DIRECT)
        path = Path(way, address=address)
        # Where another peer answers, others may still dial: only this peer's dialling waits then.
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
        """Raise `PeerError` unless the peer can be dialled at a direct address; opens no link."""
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

        Raises `PeerUnreachable` if no peer answers in time, or it refuses, or as `Introduction` does.
        """
        receiver = self._receiver(expected, path, make_link)
        timeout_s = timeout_s or self._settings.dial_timeout_s
        name = path.address or str(path)
        websocket: WebSocket | None = None
        try:
            async with asyncio.timeout(timeout_s):
                websocket = await connect(receiver)
                receiver.use(websocket)
                # Without the shield, a timeout would cancel the future, which counts as done below.
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
        make_link = make_link or partial(self.on_introduced, path, expected is not None)
        return HandshakeReceiver(introduction, wall_clock=self.own_time, make_link=make_link)

    def _receive_caller(self, request: web.BaseRequest) -> HandshakeReceiver:
        self.require_room()
        way = LinkType.DIRECT
        # A tunnel's agent is local. Any other caller could send the header too.
        if is_loopback(request.remote or "") and "X-Forwarded-For" in request.headers:
            way = LinkType.TUNNEL
        return self._receiver(None, Path(way))

    def _receive_iroh(self) -> HandshakeReceiver:
        self.require_room()
        return self._receiver(None, Path(LinkType.IROH))

    def on_introduced(
        self, path: Path, dialled: bool, carrier: WebSocket | Loopback, remote: Remote, rtt_s: float
    ) -> Link:
        self._require_open()
        contact = remote.contact
        self.book.replace(contact)
        for address in contact.addresses:
            self._unanswered.forgive(address)
        # a clock that was set meanwhile is noticed before it is compared
        self.own_time()
        self.clock.observe(contact.id, theirs=remote.time, ours=self._wall_clock(), rtt_s=rtt_s)
        local_end, remote_end = carrier.ends
        path = replace(path, local=local_end, remote=remote_end)
        traffic = self.metering.traffic(contact.id, path, dialled=dialled)
        link = self._make_link(replace(remote, path=path), carrier=carrier, traffic=traffic, dialled=dialled)
        link.rtts_s.append(rtt_s)
        self._add_link(link)
        return link

    def _add_link(self, link: Link) -> None:
        link.on_closed = self._on_link_closed
        first = self.table.add(link)
        remember(self.vouchers, link.peer, link.voucher, MAX_BOOK_ENTRIES)
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
        # a peer that leaves says nothing of the others, which stay
        if self._closing is None:
            self._events.emit(PeerLeft(self._loop.time(), link.peer.hex(), link.lost or ""))
        for listener in tuple(self.lost_listeners):
            listener(link.peer)

    def _own_link(self) -> Link:
        if self._own_ends is None:
            contact = Contact(self._identity.id, self.addresses)
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

    async def keep_links(self) -> None:
        """Ping every link; close the dead, the unused, and those of peers no longer admitted. Never returns."""
        while True:
            await asyncio.sleep(min(self._settings.keep_alive_s, self._settings.idle_link_s))
            self.recheck()
            for link in self.table:
                self._keep(link)

    def _keep(self, link: Link) -> None:
        now = self._loop.time()
        silent_s = now - link.carrier.read_at
        if silent_s > _SILENT_KEEP_ALIVES * self._settings.keep_alive_s:
            link.abort(f"silent for {silent_s:.0f} s")
            return
        unused_s = now - link.used_at if link.mux.quiet else 0.0
        if link.mux.leaving and unused_s > LEAVE_TIMEOUT_S:
            link.close("no longer needed")
            return
        # If both ends have addresses, either can dial again.
        dialable = bool(self.addresses and self.book.find(link.peer).addresses)
        needed = link.peer in self.pinned or not dialable
        if unused_s > self._settings.idle_link_s and not needed:
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
        """Raise `PeerLost` if no link may be added."""
        self._require_open()
        full = self.table.full(self._settings.max_links)
        require(not full, f"this peer has {len(self.table)} links, all busy", PeerLost)

    async def close(self) -> None:
        """Cancel handlers, close all links. Idempotent; continues if the caller is cancelled."""
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
        """Cancel every task and break every link at once, as a crash would."""
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
        """Cancel all tasks, dials and handlers but ``caller``, in the order of their start; return the tasks."""
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
