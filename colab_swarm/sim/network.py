"""A network in memory, on virtual time: the same seed gives the same trace."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import statistics
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

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
from colab_swarm.sim.faults import Script, ScriptedFault, Trap
from colab_swarm.sim.link import Conditions, Connection, SimLink, SimStream, UnansweredCall, decode, encode
from colab_swarm.sim.profiles import LAN, HostProfile, NetworkProfile

logger = logging.getLogger(__name__)
EPOCH = 1_750_000_000.0  # wall-clock time at virtual second 0
SILENCE_S = 30.0  # links that a partition silences for this long break, as keep-alive would find
DIAL_ROUND_TRIPS = 3  # TCP, the WebSocket upgrade and the first two messages of Noise XX
MAX_ADDRESSES = 8
REDIAL_S = 1.0  # between two tries of a dial that gets no answer
DOWN_S = 0.01  # a crashed peer's own calls fail after this time: at 0, a loop of retries would stop the clock


class SimNetwork(Conditions):
    """Peers, the links between them and scripted faults. Make it inside `run_virtual`.

    Attributes:
        fired, coming: scripted faults that happened, and those scheduled by `at`.
        by_name, by_id: the peers, up or not.
        standing: whether two peers have a link already when the simulation begins. It is made when it is first used,
            without the time that dialling takes: ten thousand peers have a million links.
        on_fault: called when a fault happens.
    """

    def __init__(self, profile: NetworkProfile = LAN, *, seed: int = 0) -> None:
        super().__init__(profile, seed)
        self.fired: list[ScriptedFault] = []
        self.coming: list[ScriptedFault] = []
        self.standing: Callable[[SimPeers, SimPeers], bool] = lambda one, other: False
        self.on_fault: Callable[[ScriptedFault], object] = lambda fault: None
        self._seed, self.loop = seed, asyncio.get_running_loop()
        self.by_name: dict[str, SimPeers] = {}
        self.by_id: dict[PeerId, SimPeers] = {}
        self._skews: dict[str, float] = {}

    def peer(
        self,
        name: str,
        *,
        listen: bool = True,
        host_profile: HostProfile | None = None,
        role: Role = Role.WORKER,
    ) -> SimPeers:
        """Add a peer; the name of a peer that crashed or left gets a new process with the same identity.

        Args:
            listen: whether others can dial it; without, it is in client mode.
            host_profile: its bandwidth, if not the next of the network's profile.
            role: its role at the other peers; in an open run all peers are workers.

        Raises:
            ValueError: that peer is up.
        """
        if self.is_up(name):
            raise ValueError(f"{name} is already up")
        host = host_profile or self.profile.hosts[len(self.by_name) % len(self.profile.hosts)]
        identity = Identity(hashlib.sha256(f"{self._seed} {name}".encode()).digest())
        peer = SimPeers(self, name, identity=identity, listen=listen, host=host, role=role)
        self.by_name[name] = self.by_id[peer.id] = peer
        return peer

    def is_up(self, name: str) -> bool:
        """Return True if a peer of that name runs."""
        return name in self.by_name and self.by_name[name].up

    def __repr__(self) -> str:
        return f"SimNetwork({self})"

    def __str__(self) -> str:
        host = self.profile.hosts[0]
        kinds = f"{len(self.profile.hosts)} kinds of lines, the first " if len(self.profile.hosts) > 1 else ""
        latency_ms = 1000 * self.profile.latency_s * self.latency_factor
        up, down = (bps * self.width / 1e6 for bps in (host.upload_bps, host.download_bps))
        bandwidth = f"{kinds}{up:g} Mbit/s up, {down:g} Mbit/s down"
        return f"{self.profile.name}: {bandwidth}, {latency_ms:.3g} ms, {self.loss:.1%} of messages repeated"

    def introduce(self) -> None:
        """Give every peer the addresses of all others, as an invitation or the DHT would."""
        for peer in self.by_name.values():
            for other in self.by_name.values():
                peer.learn(other.contact)

    # --- faults ---------------------------------------------------------------------------------------------------

    def at(self, seconds: float) -> Script:
        """Script a fault for a time on the virtual clock: ``network.at(12.0).crash("bob")``."""
        return Script(partial(self._fire_at, seconds))

    def _fire_at(self, seconds: float, name: str, *arguments: Any) -> None:
        fault = ScriptedFault(seconds, name, arguments)
        self.coming.append(fault)
        self.loop.call_at(seconds, self._fire_scheduled, fault)

    def _fire_scheduled(self, fault: ScriptedFault) -> None:
        self.coming.remove(fault)
        self.fire(fault.name, *fault.arguments)

    def when(
        self,
        predicate: Callable[[Message], bool],
        *,
        sender: str | None = None,
        receiver: str | None = None,
        nth: int = 1,
    ) -> Script:
        """Script a fault for the moment just before the ``nth`` matching message reaches its receiver.

        If the fault breaks the link between the two, the message is not delivered. Calls, replies,
        openings of streams and their items count.
        """

        def set_trap(name: str, *arguments: Any) -> None:
            self._traps.append(Trap(predicate, sender, receiver, nth, partial(self.fire, name, *arguments)))

        return Script(set_trap)

    def now(self) -> Script:
        """Let a fault happen at once."""
        return Script(self.fire)

    def fire(self, name: str, *arguments: Any) -> None:
        """Let a fault happen now and record it."""
        self.fired.append(ScriptedFault(self.loop.time(), name, arguments))
        self.on_fault(self.fired[-1])
        match name, *arguments:
            case "crash", peer:
                self.by_name[peer].crash()
            case "restart", peer:
                self.by_name[peer].up = True
            case "partition", *groups:
                self._groups = tuple(map(frozenset, groups))
                self.loop.call_later(SILENCE_S, self._break_silent_links, self._groups)
            case ("heal",):
                self._heal()
            case "slow", peer, factor:
                self.by_name[peer].connection.slowness = factor
            case "skew", peer, seconds:
                self._skews[peer] = seconds
            case "lose", rate:
                self.loss = rate
            case "latency", factor:
                self.latency_factor = factor
            case "bandwidth", factor:
                self.width = factor

    def _heal(self) -> None:
        self._groups = ()
        for _, _, link in self._all_links():
            link.resume()

    def _break_silent_links(self, groups: tuple[frozenset[str], ...]) -> None:
        if self._groups is groups:
            for one, other, link in self._all_links():
                if self.separated(one.name, other.name):
                    reason = f"{one.name} and {other.name} hear nothing of each other"
                    self.break_link(one, other, link, reason)

    def _all_links(self) -> list[tuple[SimPeers, SimPeers, SimLink]]:
        found: dict[SimLink, tuple[SimPeers, SimPeers]] = {}
        for peer in self.by_name.values():
            for other, link in peer._links.items():
                found.setdefault(link, (peer, self.by_id[other]))
        return [(one, other, link) for link, (one, other) in found.items()]

    # --- called by links and peers --------------------------------------------------------------------------------

    def latency_s(self, one: SimPeers, other: SimPeers) -> float:
        """Return the pair's own one-way delay; it does not depend on other peers."""
        first, second = sorted((one.name, other.name))
        spread, mean_s = self.profile.spread, self.profile.latency_s - self.profile.jitter_s
        if not spread:
            return mean_s
        rng = random.Random(f"{self._seed} {first} {second}")
        return mean_s * rng.lognormvariate(-(spread**2) / 2, spread)

    def link(self, one: SimPeers, other: SimPeers) -> SimLink:
        """Make a link between two peers, or of one with itself."""
        if one is other:
            ends = Connection(one.name, HostProfile()), Connection(one.name, HostProfile())
            return SimLink(self, ends, latency_s=0.0)
        return SimLink(self, (one.connection, other.connection), latency_s=self.latency_s(one, other))

    def break_link(self, one: SimPeers, other: SimPeers, link: SimLink, reason: str) -> None:
        """Cut a link now; both ends notice after its latency."""
        link.cut()
        for peer, far in ((one, other), (other, one)):
            if peer._links.get(far.id) is link:
                del peer._links[far.id]
        self.loop.call_later(link.latency_s, self._report_lost, one, other, link, reason)

    def _report_lost(self, one: SimPeers, other: SimPeers, link: SimLink, reason: str) -> None:
        link.fail_waiting(reason)
        one.on_link_lost(other.id)
        if other is not one:
            other.on_link_lost(one.id)

    def skew_of(self, peer: PeerId) -> float:
        """Return how far the peer's wall clock is ahead, seconds."""
        return self._skews.get(self.by_id[peer].name, 0.0) if self._skews else 0.0


class SimPeers:
    """One peer's view of the simulated network: the `Peers` interface without a socket. Made by `SimNetwork.peer`.

    Unlike at a `Node`, a second handler of a message replaces the first.

    Attributes:
        role: its role at the other peers.
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
        self.name, self.listen, self.role, self.up = name, listen, role, True
        self.connection = Connection(name, host)
        self._network, self._identity = network, identity
        self.id, self.public_key = identity.id, identity.public_key
        self._links: dict[PeerId, SimLink] = {}
        self._contacts: dict[PeerId, Contact] = {}
        self._calls, self._streams = ServiceTable(), ServiceTable()
        self._listeners: list[Callable[[PeerId], None]] = []
        self._down_callbacks: list[Callable[[], object]] = []
        self._tasks: dict[asyncio.Task[None], None] = {}  # a set would cancel them in any order

    def __repr__(self) -> str:
        return f"SimPeers({self.name}, {'up' if self.up else 'down'}, {len(self.linked())} links)"

    @property
    def contact(self) -> Contact:
        return Contact(self.id, (f"sim://{self.name}",) if self.listen else ())

    def sign(self, data: bytes) -> bytes:
        return self._identity.sign(data)

    def time(self) -> float:
        own = self._network.skew_of(self.id)
        others = [self._network.skew_of(peer) for peer in self.linked()]
        correction = statistics.median([0.0, *(skew - own for skew in others)])
        return EPOCH + self._network.loop.time() + own + correction

    def learn(self, contact: Contact) -> None:
        if contact.addresses:
            known = self.contact_of(contact.id).addresses
            addresses = tuple(dict.fromkeys(contact.addresses + known))[:MAX_ADDRESSES]
            self._contacts[contact.id] = Contact(contact.id, addresses)

    def contact_of(self, peer: PeerId) -> Contact:
        return self._contacts.get(peer, Contact(peer))

    def linked(self) -> frozenset[PeerId]:
        return frozenset(self._links) - {self.id}

    def way_to(self, peer: PeerId) -> str:
        return "direct" if peer in self.linked() else ""  # simulated links need no relays

    def limit(self, rate_bps: float | None) -> None:
        self.connection.limit(rate_bps)

    def statistics(self, peer: PeerId | None = None) -> LinkStatistics:
        if peer is not None:
            link = self._links.get(peer)
            return link.statistics(self._end_of(link)) if link else LinkStatistics()
        up, down = self.connection.upload, self.connection.download
        rtts = [self._links[peer].rtt_s for peer in self.linked()]
        rtt_s = statistics.median(rtts) if rtts else None
        return LinkStatistics(up.total_bytes, down.total_bytes, rtt_s, up.peak_bps, down.peak_bps, len(rtts))

    def serve(
        self,
        kind: type[M],
        handler: Callable[[PeerId, M], Awaitable[Message]],
        *,
        role: Role = Role.VIEWER,
    ) -> None:
        self._calls.remove(kind)
        self._calls.add(kind, handler, role)

    def serve_stream(
        self, kind: type[M], handler: Callable[[M, Stream], Awaitable[None]], *, role: Role = Role.VIEWER
    ) -> None:
        self._streams.remove(kind)
        self._streams.add(kind, handler, role)

    def role_of(self, peer: PeerId) -> Role:
        if peer == self.id:
            return Role.AUTHORITY
        return self._network.by_id[peer].role if peer in self._links else Role.GUEST

    def unserve(self, kind: type[Message]) -> None:
        self._calls.remove(kind)
        self._streams.remove(kind)

    def on_lost(self, listener: Callable[[PeerId], None]) -> Callable[[], None]:
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return stop

    async def close(self) -> None:
        await asyncio.gather(*self.go_down(f"{self.name} left"), return_exceptions=True)

    # --- calls ----------------------------------------------------------------------------------------------------

    async def call(self, peer: PeerId, message: Message, reply: type[R], *, timeout_s: float) -> R:
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._dial(peer)
                return decode(await self._call(link, peer, message), reply)
        except TimeoutError as error:
            text = f"{short(peer)} did not answer {type(message).__name__} within {timeout_s} s"
            raise PeerTimeout(text) from error

    async def _call(self, link: SimLink, peer: PeerId, message: Message) -> bytes:
        body, call, end = encode(message), UnansweredCall(), self._end_of(link)
        other = self._network.by_id[peer]
        deliver = partial(other._on_call, self.id, link, call, type(message).__name__, body)
        link.waiting[call] = None
        try:
            link.carry(end, len(body), deliver, message=message)
            return await call.reply
        except asyncio.CancelledError:
            if link.alive:
                link.carry(end, 0, call.cancel)
            raise
        finally:
            link.waiting.pop(call, None)

    def _on_call(self, caller: PeerId, link: SimLink, call: UnansweredCall, name: str, body: bytes) -> None:
        call.handler = self._spawn(self._answer(caller, link, call, name, body))

    async def _answer(
        self, caller: PeerId, link: SimLink, call: UnansweredCall, name: str, body: bytes
    ) -> None:
        end = link.other(self._network.by_id[caller]._end_of(link))
        try:
            handler, message = self._calls.find_named(name, body, self.role_of(caller))
            reply = await handler(caller, message)
            encoded = encode(reply)
        except Exception as error:
            refusal = self._refusal(name, error)
            if link.alive:
                link.carry(end, len(str(refusal)), partial(call.fail, refusal))
        else:
            if link.alive:
                link.carry(end, len(encoded), partial(call.answer, encoded), message=reply)

    def _refusal(self, name: str, error: Exception) -> CallRefused:
        """The door at which a handler's fault stops."""
        if isinstance(error, Unserved):
            return CallRefused(error.code, str(error))
        if isinstance(error, Refusal):
            return CallRefused("refused", str(error))
        logger.exception("%s: the handler of %s failed", self.name, name)
        return CallRefused("failed", f"{name} failed at {self.name}: {error!r}")

    # --- streams --------------------------------------------------------------------------------------------------

    async def stream(self, peer: PeerId, opening: Message, *, timeout_s: float) -> Stream:
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._dial(peer)
        except TimeoutError as error:
            raise PeerTimeout(f"{short(peer)} could not be dialled within {timeout_s} s") from error
        body, end, other = encode(opening), self._end_of(link), self._network.by_id[peer]
        near, far = SimStream(link, end, peer), SimStream(link, link.other(end), self.id)
        near.twin, far.twin = far, near
        deliver = partial(other._on_stream, far, type(opening).__name__, body)
        link.carry(end, len(body), deliver, message=opening)
        return near

    def _on_stream(self, stream: SimStream, name: str, body: bytes) -> None:
        self._spawn(self._run_stream(stream, name, body))

    async def _run_stream(self, stream: SimStream, name: str, body: bytes) -> None:
        try:
            handler, opening = self._streams.find_named(name, body, self.role_of(stream.peer))
            await handler(opening, stream)
            await stream.leave()
        except asyncio.CancelledError:
            stream.reset("its handler was cancelled")
            raise
        except PeerError as error:
            stream.reset(str(error))  # the peer's own fault, or the network's: nothing to report
        except Exception as error:
            stream.refuse(self._refusal(name, error))

    # --- links ----------------------------------------------------------------------------------------------------

    async def _dial(self, peer: PeerId) -> SimLink:
        """Return the link to ``peer``; open it if there is none."""
        if not self.up:
            await asyncio.sleep(DOWN_S)
            raise PeerLost(f"{self.name} is down")
        if peer == self.id and peer not in self._links:
            self._links[peer] = self._network.link(self, self)
        failure: PeerError = PeerUnreachable(f"no address of {short(peer)} is known")
        for address in () if peer in self._links else self.contact_of(peer).addresses:
            try:
                await self._open_at(peer, address)
                break
            except PeerError as error:
                failure = error
        if peer not in self._links:
            raise failure
        return self._links[peer]

    async def _open_at(self, peer: PeerId, address: str) -> None:
        other = self._network.by_name.get(address.removeprefix("sim://"))
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
        self._connect(other)

    def _connect(self, other: SimPeers) -> None:
        if not (self.up and other.up):
            raise PeerUnreachable(f"{other.name} vanished while being dialled")
        if other.id not in self._links:  # it may have dialled us meanwhile
            self._links[other.id] = other._links[self.id] = self._network.link(self, other)
            self.learn(other.contact)
            other.learn(self.contact)

    def _end_of(self, link: SimLink) -> Connection:
        """Our end; a link to ourselves has two of its own, so that it takes no bandwidth."""
        return self.connection if self.connection in link.ends else link.ends[0]

    def on_link_lost(self, peer: PeerId) -> None:
        if peer not in self._links:
            for listener in tuple(self._listeners):
                listener(peer)

    def go_down(self, reason: str) -> list[asyncio.Task[None]]:
        """Stop at once and break every link; return the cancelled handlers, except the one that called this."""
        self.up = False
        tasks = [task for task in self._tasks if task is not asyncio.current_task(self._network.loop)]
        for task in tasks:
            task.cancel()
        for peer, link in list(self._links.items()):
            self._network.break_link(self, self._network.by_id[peer], link, reason)
        return tasks

    def when_down(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` when this peer crashes, so that its other tasks can end too."""
        self._down_callbacks.append(callback)

    def crash(self) -> None:
        """Kill the process, if it is up."""
        if self.up:
            self.go_down(f"{self.name} crashed")
            for callback in self._down_callbacks:
                callback()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._network.loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task
