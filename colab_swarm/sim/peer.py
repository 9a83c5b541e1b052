"""One peer of a simulated network: the `Peers` interface without a socket."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from colab_swarm.errors import (
    CallRefused,
    PeerError,
    PeerLost,
    PeerTimeout,
    PeerUnreachable,
    WrongPeer,
)
from colab_swarm.net.identity import Identity
from colab_swarm.net.mux import ServiceTable, Unserved
from colab_swarm.net.peers import Contact, LinkStatistics, M, Message, PeerId, R, Refusal, Role, Stream, short
from colab_swarm.sim.link import Connection, SimLink, SimStream, decode, encode
from colab_swarm.sim.profiles import HostProfile

if TYPE_CHECKING:
    from colab_swarm.sim.network import SimNetwork

logger = logging.getLogger(__name__)

DIAL_ROUND_TRIPS = 3
"""TCP, the WebSocket upgrade and the first two messages of Noise XX."""
MAX_ADDRESSES = 8
REDIAL_S = 1.0
"""A dial that meets silence tries again after this long."""
DOWN_S = 0.01
"""What a crashed peer's own calls take to fail: never 0, so that a loop of retries cannot stop the clock."""


class _Question:
    """A call between being asked and answered."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.answering: asyncio.Task[None] | None = None

    def answer(self, body: bytes) -> None:
        """The reply is in."""
        if not self.reply.done():
            self.reply.set_result(body)

    def fail(self, error: PeerError) -> None:
        """There will be no reply."""
        self.cancel()
        if not self.reply.done():
            self.reply.set_exception(error)

    def cancel(self) -> None:
        """Nobody waits for the reply any more."""
        if self.answering is not None:
            self.answering.cancel()


class SimPeers:
    """What one simulated peer sees of the network. Made by `SimNetwork.peer`.

    Attributes:
        role: what the others let it do, as its membership would tell them.
    """

    def __init__(
        self,
        network: SimNetwork,
        name: str,
        *,
        identity: Identity,
        listen: bool,
        host: HostProfile,
        role: Role = Role.WORKER,
    ) -> None:
        self.name = name
        self.listen = listen
        self.role = role
        self.up = True
        self.connection = Connection(name, host)
        self._network = network
        self._identity = identity
        self._links: dict[PeerId, SimLink] = {}
        self._contacts: dict[PeerId, Contact] = {}
        self._calls, self._streams = ServiceTable(), ServiceTable()
        self._listeners: list[Callable[[PeerId], None]] = []
        self._mourners: list[Callable[[], None]] = []
        self._tasks: dict[asyncio.Task[None], None] = {}  # a set would cancel them in any order

    def __repr__(self) -> str:
        return f"SimPeers({self.name}, {'up' if self.up else 'down'}, {len(self.linked())} links)"

    @property
    def id(self) -> PeerId:
        """SHA-256 of the public key."""
        return self._identity.id

    @property
    def public_key(self) -> bytes:
        """Ed25519, 32 bytes; the network's seed and the name decide it."""
        return self._identity.public_key

    @property
    def contact(self) -> Contact:
        """Dialled as ``sim://name``; no address in client mode."""
        return Contact(self.id, (f"sim://{self.name}",) if self.listen else ())

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature by this peer's key."""
        return self._identity.sign(data)

    def time(self) -> float:
        """The simulation's wall clock as this peer knows it: skewed, and corrected by its links' median."""
        own = self._network.skew_of(self.id)
        others = [self._network.skew_of(peer) for peer in self.linked()]
        return self._network.wall_time() + own + statistics.median([0.0, *(skew - own for skew in others)])

    def learn(self, contact: Contact) -> None:
        """Remember where a peer can be dialled, before what was known already."""
        if contact.addresses:
            known = self.contact_of(contact.id).addresses
            addresses = tuple(dict.fromkeys(contact.addresses + known))[:MAX_ADDRESSES]
            self._contacts[contact.id] = Contact(contact.id, addresses)

    def contact_of(self, peer: PeerId) -> Contact:
        """What is known of the peer's addresses."""
        return self._contacts.get(peer, Contact(peer))

    def linked(self) -> frozenset[PeerId]:
        """Peers with an open link now."""
        return frozenset(self._links) - {self.id}

    def way_to(self, peer: PeerId) -> str:
        """See `Peers.way_to`; simulated links need no detours."""
        return "direct" if peer in self.linked() else ""

    def limit(self, rate_bps: float | None) -> None:
        """See `Peers.limit`."""
        self.connection.limit(rate_bps)

    def statistics(self, peer: PeerId | None = None) -> LinkStatistics:
        """Of the open link to one peer, or of this peer's whole connection since it was made."""
        if peer is not None:
            link = self._links.get(peer)
            return link.statistics(self._end_of(link)) if link else LinkStatistics()
        up, down = self.connection.upload, self.connection.download
        rtts = [self._links[peer].rtt_s for peer in self.linked()]
        return LinkStatistics(
            up.total_bytes,
            down.total_bytes,
            statistics.median(rtts) if rtts else None,
            up.peak_bps,
            down.peak_bps,
            len(rtts),
        )

    def serve(
        self,
        kind: type[M],
        handler: Callable[[PeerId, M], Awaitable[Message]],
        *,
        role: Role = Role.VIEWER,
    ) -> None:
        """Answer calls of type ``kind``; unlike at a `Node`, a handler may take another's place."""
        self._calls.remove(kind)
        self._calls.add(kind, handler, role)

    def serve_stream(
        self, kind: type[M], handler: Callable[[M, Stream], Awaitable[None]], *, role: Role = Role.VIEWER
    ) -> None:
        """Run the handler for each stream opened with ``kind``; it may take another's place."""
        self._streams.remove(kind)
        self._streams.add(kind, handler, role)

    def role_of(self, peer: PeerId) -> Role:
        """What the peer may do."""
        if peer == self.id:
            return Role.AUTHORITY
        return self._network.peer_of(peer).role if peer in self._links else Role.GUEST

    def unserve(self, kind: type[Message]) -> None:
        """Stop answering ``kind``."""
        self._calls.remove(kind)
        self._streams.remove(kind)

    def on_lost(self, listener: Callable[[PeerId], None]) -> Callable[[], None]:
        """Call ``listener(peer)`` when the link to a peer is gone."""
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return stop

    async def close(self) -> None:
        """Leave: handlers are cancelled, others lose their links to this peer."""
        await asyncio.gather(*self.go_down(f"{self.name} left"), return_exceptions=True)

    # -- calls

    async def call(self, peer: PeerId, message: Message, reply: type[R], *, timeout_s: float) -> R:
        """Send ``message``, wait for the reply."""
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._dial(peer)
                return decode(await self._ask(link, peer, message), reply)
        except TimeoutError as error:
            text = f"{short(peer)} did not answer {type(message).__name__} within {timeout_s} s"
            raise PeerTimeout(text) from error

    async def _ask(self, link: SimLink, peer: PeerId, message: Message) -> bytes:
        body, question, end = encode(message), _Question(), self._end_of(link)
        other = self._network.peer_of(peer)
        asked = partial(other._on_call, self.id, link, question, (type(message).__name__, body))
        link.guests[question] = None
        try:
            link.carry(end, len(body), asked, message=message)
            return await question.reply
        except asyncio.CancelledError:
            if link.alive:
                link.carry(end, 0, question.cancel)
            raise
        finally:
            link.guests.pop(question, None)

    def _on_call(
        self, caller: PeerId, link: SimLink, question: _Question, named_body: tuple[str, bytes]
    ) -> None:
        question.answering = self._spawn(self._answer(caller, link, question, *named_body))

    async def _answer(
        self, caller: PeerId, link: SimLink, question: _Question, name: str, body: bytes
    ) -> None:
        end = link.other(self._network.peer_of(caller)._end_of(link))
        try:
            reply, encoded = await self._handle(caller, name, body)
        except CallRefused as refusal:
            if link.alive:
                link.carry(end, len(str(refusal)), partial(question.fail, refusal))
        else:
            if link.alive:
                link.carry(end, len(encoded), partial(question.answer, encoded), message=reply)

    async def _handle(self, caller: PeerId, name: str, body: bytes) -> tuple[Message, bytes]:
        """Run the handler and encode its reply; whatever goes wrong becomes `CallRefused`."""
        try:
            handler, message = self._calls.find_named(name, body, self.role_of(caller))
        except Unserved as error:
            raise CallRefused(error.code, str(error)) from error
        try:
            reply = await handler(caller, message)
            return reply, encode(reply)
        except Exception as error:
            raise self._refusal(name, error) from error

    def _refusal(self, name: str, error: Exception) -> CallRefused:
        """The door where a handler's fault stops."""
        if isinstance(error, Refusal):
            return CallRefused("refused", str(error))
        logger.exception("%s: the handler of %s failed", self.name, name)
        return CallRefused("failed", f"{name} failed at {self.name}: {error!r}")

    # -- streams

    async def stream(self, peer: PeerId, opening: Message, *, timeout_s: float) -> Stream:
        """Open a stream."""
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._dial(peer)
        except TimeoutError as error:
            raise PeerTimeout(f"{short(peer)} could not be dialled within {timeout_s} s") from error
        body, end, other = encode(opening), self._end_of(link), self._network.peer_of(peer)
        near, far = SimStream(link, end, peer), SimStream(link, link.other(end), self.id)
        near.twin, far.twin = far, near
        opened = partial(other._on_stream, far, type(opening).__name__, body)
        link.carry(end, len(body), opened, message=opening)
        return near

    def _on_stream(self, stream: SimStream, name: str, body: bytes) -> None:
        self._spawn(self._converse(stream, name, body))

    async def _converse(self, stream: SimStream, name: str, body: bytes) -> None:
        """Run the stream's handler; its fault refuses the stream."""
        try:
            handler, opening = self._streams.find_named(name, body, self.role_of(stream.peer))
        except Unserved as error:
            stream.refuse(CallRefused(error.code, str(error)))
            return
        try:
            await handler(opening, stream)
            await stream.leave()
        except asyncio.CancelledError:
            stream.reset("its handler was cancelled")
            raise
        except PeerError as error:
            stream.reset(str(error))  # the peer's own fault, or the network's: nothing to report
        except Exception as error:
            stream.refuse(self._refusal(name, error))

    # -- links

    async def _dial(self, peer: PeerId) -> SimLink:
        """The link to ``peer``, opened if need be."""
        if not self.up:
            await asyncio.sleep(DOWN_S)
            raise PeerLost(f"{self.name} is down")
        if peer not in self._links:
            if peer == self.id:
                self._links[peer] = self._network.link(self, self)
            else:
                await self._open(peer)
        return self._links[peer]

    async def _open(self, peer: PeerId) -> None:
        failure: PeerError = PeerUnreachable(f"no address of {short(peer)} is known")
        for address in self.contact_of(peer).addresses:
            try:
                return await self._open_at(peer, address)
            except PeerError as error:
                failure = error
        raise failure

    async def _open_at(self, peer: PeerId, address: str) -> None:
        other = self._network.dialled(address)
        if other is None:
            raise PeerUnreachable(f"nobody answers at {address}")
        if self._network.standing(self, other) and other.up and other.id == peer:
            return self._connect(other)
        rtt_s = 2 * self._network.latency_s(self, other) * self._network.latency_factor
        await asyncio.sleep(rtt_s)
        while self._network.separated(self.name, other.name):
            await asyncio.sleep(REDIAL_S)
        if not (other.up and other.listen):
            raise PeerUnreachable(f"nobody answers at {address}")
        await asyncio.sleep(rtt_s * (DIAL_ROUND_TRIPS - 1))
        if other.id != peer:
            raise WrongPeer(f"{short(other.id)} answers at {address}, not {short(peer)}")
        if not (self.up and other.up):
            raise PeerUnreachable(f"{other.name} vanished while being dialled")
        self._connect(other)

    def _connect(self, other: SimPeers) -> None:
        if other.id not in self._links:  # it may have dialled us meanwhile
            self._links[other.id] = other._links[self.id] = self._network.link(self, other)
            self.learn(other.contact)
            other.learn(self.contact)

    def _end_of(self, link: SimLink) -> Connection:
        """Our end; a link to ourselves has two of its own, so that it takes no bandwidth."""
        return self.connection if self.connection in link.ends else link.ends[0]

    def forget(self, peer: PeerId, link: SimLink) -> None:
        """``link`` is broken: do not use it any more."""
        if self._links.get(peer) is link:
            del self._links[peer]

    def tell_lost(self, peer: PeerId) -> None:
        """Tell the listeners that ``peer`` is gone, unless there is a new link already."""
        if peer not in self._links:
            for listener in tuple(self._listeners):
                listener(peer)

    def go_down(self, reason: str) -> list[asyncio.Task[None]]:
        """Stop at once: every link breaks; returns the handlers, cancelled but for the one that called this."""
        self.up = False
        tasks = [task for task in self._tasks if task is not asyncio.current_task(self._network.loop)]
        for task in tasks:
            task.cancel()
        for peer, link in list(self._links.items()):
            self._network.break_link(self, self._network.peer_of(peer), link, reason)
        return tasks

    def links(self) -> list[tuple[PeerId, SimLink]]:
        """The open links, each with who is at its other end."""
        return list(self._links.items())

    def when_down(self, listener: Callable[[], None]) -> None:
        """Call ``listener()`` when this peer crashes, so that what else runs in its name can end too."""
        self._mourners.append(listener)

    def crash(self) -> None:
        """The process dies."""
        self.go_down(f"{self.name} crashed")
        for listener in self._mourners:
            listener()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task
