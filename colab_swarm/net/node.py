"""The real network: `Node` implements `Peers` over encrypted WebSocket links, dialled on demand."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Awaitable, Callable

import aiohttp

from colab_swarm.errors import PeerError, PeerLost, PeerTimeout, PeerUnreachable
from colab_swarm.events import EventLog, PeerJoined, PeerLeft
from colab_swarm.net.addresses import MAX_BOOK_ENTRIES, AddressBook, reachable_addresses
from colab_swarm.net.budget import RateMeter, TokenBucket
from colab_swarm.net.carrier import Carrier, Cipher, LinkLimits, Traffic
from colab_swarm.net.clock import SwarmClock
from colab_swarm.net.dialling import dial_any, introduce
from colab_swarm.net.handshake import Greeter
from colab_swarm.net.hello import Introduced, Introduction, describe_run
from colab_swarm.net.identity import Identity
from colab_swarm.net.link import Link
from colab_swarm.net.links import LinkTable
from colab_swarm.net.listener import Listener
from colab_swarm.net.loopback import NoCipher, link_to_self
from colab_swarm.net.peers import Contact, LinkStatistics, M, Message, PeerId, R, Stream, short
from colab_swarm.net.services import Services
from colab_swarm.net.settings import NodeSettings
from colab_swarm.net.websocket import SCRATCH_BYTES, WebSocket

__all__ = ["Node", "NodeSettings"]

logger = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 1.0
MISSED_KEEP_ALIVES = 3
DIALS = 3


class Node:
    """One peer on the real network. Make it with `start`; see `Peers` for the verbs."""

    def __init__(
        self,
        identity: Identity,
        settings: NodeSettings,
        events: EventLog,
        *,
        key_check: Callable[[bytes], bool] | None,
        wall_clock: Callable[[], float],
    ) -> None:
        self._identity, self._settings, self._events = identity, settings, events
        self._key_check, self._wall_clock = key_check, wall_clock
        self._loop = asyncio.get_running_loop()
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._addresses: tuple[str, ...] = ()
        self._book = AddressBook()
        self._clock = SwarmClock()
        self._links = LinkTable(identity.id)
        self._services = (Services(), Services())
        self._limits = LinkLimits(settings.max_streams_per_link, settings.max_calls_per_link)
        self._meters: dict[PeerId, tuple[RateMeter, RateMeter]] = {}
        self._sent, self._received = RateMeter(), RateMeter()
        self._upload, self._download = self._bucket(settings.upload_bps), self._bucket(settings.download_bps)
        self._listeners: list[Callable[[PeerId], None]] = []
        self._awaited: dict[PeerId, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._own_ends: tuple[Link, Link] | None = None
        self._listener: Listener | None = None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        identity: Identity,
        settings: NodeSettings | None = None,
        events: EventLog | None = None,
        *,
        key_check: Callable[[bytes], bool] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> Node:
        """Listen (unless in client mode) and keep links alive until `close`.

        Args:
            identity: this peer's key.
            settings: all else that can be set.
            events: gets `PeerJoined`, `PeerLeft` and `Fault`.
            key_check: whether a peer with this public key may link; None admits everybody of the run.
            wall_clock: seconds since the epoch.

        Raises:
            OSError: the port is taken.
        """
        settings = settings or NodeSettings()
        node = cls(identity, settings, events or EventLog(), key_check=key_check, wall_clock=wall_clock)
        try:
            await node._open()
        except (OSError, asyncio.CancelledError):
            await node.close()
            raise
        return node

    async def _open(self) -> None:
        settings = self._settings
        if settings.listen:
            self._listener = Listener(
                self._greet_caller,
                scratch=self._scratch,
                timeout_s=settings.handshake_timeout_s,
                max_fresh=settings.max_handshakes,
            )
            port = await self._listener.start(settings.host, settings.port)
            self._addresses = settings.announce or reachable_addresses(settings.host, port)
        self._spawn(self._keep_links())

    def __repr__(self) -> str:
        where = self._addresses[0] if self._addresses else "client mode"
        return f"Node({short(self.id)}, {where}, {len(self._links)} links)"

    @property
    def id(self) -> PeerId:
        """This peer's id."""
        return self._identity.id

    @property
    def contact(self) -> Contact:
        """How others reach this peer; no addresses in client mode."""
        return Contact(self.id, self._addresses)

    @property
    def public_key(self) -> bytes:
        """Ed25519, 32 bytes."""
        return self._identity.public_key

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature, 64 bytes."""
        return self._identity.sign(data)

    def time(self) -> float:
        """Swarm time, seconds since the epoch."""
        return self._wall_clock() + self._clock.offset_s

    def learn(self, contact: Contact) -> None:
        """Remember where a peer can be dialled."""
        if contact.id != self.id:
            self._book.learn(contact)

    def contact_of(self, peer: PeerId) -> Contact:
        """What is known of the peer's addresses."""
        return self.contact if peer == self.id else self._book.find(peer)

    async def call(self, peer: PeerId, message: Message, reply: type[R], *, timeout_s: float) -> R:
        """See `Peers.call`."""
        link = self._links.best(peer)
        if link is None:
            began_at = self._loop.time()
            link = await self._link_to(peer, timeout_s)
            timeout_s -= self._loop.time() - began_at
        return await link.call(message, reply, timeout_s=timeout_s)

    async def stream(self, peer: PeerId, opening: Message, *, timeout_s: float) -> Stream:
        """See `Peers.stream`."""
        link = self._links.best(peer) or await self._link_to(peer, timeout_s)
        return link.open_stream(opening)

    def serve(self, kind: type[M], handler: Callable[[PeerId, M], Awaitable[Message]]) -> None:
        """Answer calls of type ``kind``."""
        self._services[0].add(kind, handler)

    def serve_stream(self, kind: type[M], handler: Callable[[M, Stream], Awaitable[None]]) -> None:
        """Run ``handler`` for each stream opened with ``kind``."""
        self._services[1].add(kind, handler)

    def unserve(self, kind: type[Message]) -> None:
        """Stop answering ``kind``."""
        for services in self._services:
            services.remove(kind)

    def linked(self) -> frozenset[PeerId]:
        """Peers with an open link now."""
        return self._links.peers()

    def on_lost(self, listener: Callable[[PeerId], None]) -> Callable[[], None]:
        """Call ``listener(peer)`` when the last link to a peer is gone."""
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return stop

    def statistics(self, peer: PeerId | None = None) -> LinkStatistics:
        """Of one peer, or of all."""
        links = list(self._links) if peer is None else self._links.of(peer)
        totals = self._sent, self._received
        sent, received = totals if peer is None else self._meters.get(peer, (RateMeter(), RateMeter()))
        rtts_s = [link.rtt_s for link in links if link.rtt_s is not None]
        return LinkStatistics(
            sent_bytes=sent.total_bytes,
            received_bytes=received.total_bytes,
            rtt_s=statistics.median(rtts_s) if rtts_s else None,
            upload_bps=sent.peak_bps,
            download_bps=received.peak_bps,
            links=len(links),
        )

    async def close(self) -> None:
        """Cancel handlers, close all links. Idempotent; goes on if the caller is cancelled."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(asyncio.current_task()))
        await asyncio.shield(self._closing)

    async def _close(self, caller: asyncio.Task[object] | None) -> None:
        links = [*self._links, *(self._own_ends or ())]
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
        if self._listener is not None:
            await self._listener.close()
        await self._session.close()

    async def _link_to(self, peer: PeerId, timeout_s: float) -> Link:
        """A link to the peer: to ourselves in memory, else the first that comes up, whoever dialled it."""
        if self._closing is not None:
            raise PeerLost("this peer is closed")
        if peer == self.id:
            return self._own_link()
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(DIALS):
                    if self._closing is not None:
                        break
                    await asyncio.shield(self._await_link(peer))
                    # of two links that come up at once one is left again: take the best when we get to run
                    link = self._links.best(peer)
                    if link is not None:
                        return link
        except TimeoutError:
            raise PeerTimeout(f"no link to {short(peer)} in {timeout_s:.3g} s") from None
        raise PeerLost(f"{short(peer)} accepts links and drops them at once")

    def _await_link(self, peer: PeerId) -> asyncio.Future[None]:
        if peer not in self._awaited:
            self._awaited[peer] = self._loop.create_future()
            self._spawn(self._dial(peer))
        return self._awaited[peer]

    async def _dial(self, peer: PeerId) -> None:
        addresses = self._book.find(peer).addresses
        try:
            if not addresses:
                raise PeerUnreachable(f"no address of {short(peer)} is known")
            await dial_any(addresses, lambda address: self._dial_address(peer, address))
        except PeerError as error:
            awaited = self._awaited.pop(peer, None)
            if awaited is not None and not awaited.done():
                awaited.set_exception(error)
                awaited.exception()  # the waiters may all have given up

    async def _dial_address(self, peer: PeerId, address: str) -> Link:
        greeter = self._greeter(expected=peer)
        timeout_s = self._settings.dial_timeout_s
        try:
            return await introduce(
                self._session, address, greeter, scratch=self._scratch, timeout_s=timeout_s
            )
        except PeerLost as error:
            ours = describe_run(self._settings.run_id)
            raise PeerUnreachable(f"{address} refused the link: {error} (we are of {ours})") from error

    def _greeter(self, expected: PeerId | None) -> Greeter:
        introduction = Introduction(
            self._identity,
            addresses=self._addresses,
            run_id=self._settings.run_id,
            expected=expected,
            admits=self._key_check,
        )
        dialled = expected is not None

        def make_link(carrier: WebSocket, introduced: Introduced, rtt_s: float) -> Link:
            return self._on_introduced(carrier, introduced, rtt_s, dialled=dialled)

        return Greeter(introduction, wall_clock=self._wall_clock, make_link=make_link)

    def _greet_caller(self) -> Greeter:
        if self._closing is not None:
            raise PeerLost("this peer is closed")
        if self._links.full(self._settings.max_links):
            raise PeerLost(f"this peer has {len(self._links)} links, all busy")
        return self._greeter(expected=None)

    def _on_introduced(
        self, carrier: WebSocket, introduced: Introduced, rtt_s: float, *, dialled: bool
    ) -> Link:
        if self._closing is not None:
            raise PeerLost("this peer is closed")
        contact = introduced.contact
        self._book.replace(contact)
        self._clock.observe(contact.id, theirs=introduced.time, ours=self._wall_clock(), rtt_s=rtt_s)
        sent, received = self._meters.setdefault(contact.id, (RateMeter(), RateMeter()))
        if len(self._meters) > MAX_BOOK_ENTRIES:
            del self._meters[next(iter(self._meters))]
        per_peer = self._bucket(self._settings.per_peer_upload_bps)
        traffic = Traffic(
            (sent, self._sent), (received, self._received), (*self._upload, *per_peer), self._download
        )
        link = self._make_link(contact, carrier, introduced.keys, dialled=dialled, traffic=traffic)
        link.add_rtt(rtt_s)
        self._add_link(link)
        return link

    def _make_link(
        self, contact: Contact, carrier: Carrier, cipher: Cipher, *, dialled: bool, traffic: Traffic
    ) -> Link:
        return Link(
            contact,
            carrier=carrier,
            cipher=cipher,
            dialled=dialled,
            services=self._services,
            traffic=traffic,
            limits=self._limits,
            events=self._events,
        )

    def _add_link(self, link: Link) -> None:
        link.on_closed = self._on_link_closed
        first = self._links.add(link)
        best = self._links.best(link.peer)
        for other in self._links.of(link.peer):
            if other is not best:
                other.leave()
        if len(self._links) > self._settings.max_links:
            unused = self._links.longest_unused()
            if unused is not None and unused is not best:
                unused.leave()
        if first:
            self._events.emit(PeerJoined(self._loop.time(), link.peer.hex()))
        awaited = self._awaited.pop(link.peer, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(None)

    def _on_link_closed(self, link: Link) -> None:
        if not self._links.remove(link):
            return
        self._clock.forget(link.peer)
        self._events.emit(PeerLeft(self._loop.time(), link.peer.hex(), link.lost or ""))
        for listener in tuple(self._listeners):
            listener(link.peer)

    def _own_link(self) -> Link:
        if self._own_ends is None:
            self._own_ends = link_to_self(
                lambda end, dialled: self._make_link(
                    self.contact, end, NoCipher(), dialled=dialled, traffic=Traffic()
                )
            )
        return self._own_ends[0]

    async def _keep_links(self) -> None:
        """Ping every link, close the dead and the unused."""
        settings = self._settings
        while True:
            await asyncio.sleep(min(settings.keep_alive_s, settings.idle_link_s))
            now = self._loop.time()
            for link in self._links:
                if now - link.heard_at > MISSED_KEEP_ALIVES * settings.keep_alive_s:
                    link.abort(f"silent for {now - link.heard_at:.0f} s")
                elif link.outstays(now):
                    link.close("no longer needed")
                elif link.mux.quiet and now - link.used_at > settings.idle_link_s and self._can_redial(link):
                    link.leave()
                else:
                    link.ping()

    def _can_redial(self, link: Link) -> bool:
        return bool(self._addresses and link.contact.addresses)

    def _bucket(self, rate_bps: float | None) -> tuple[TokenBucket, ...]:
        return () if rate_bps is None else (TokenBucket(rate_bps, self._loop.time()),)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
