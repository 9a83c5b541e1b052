"""A network in memory, on virtual time: the same seed gives the same trace.

The simulated peers are real `Node` objects, with the calls, streams, credit and roles of `colab_swarm.net`. Only their
connections are simulated, without a handshake and encryption. A packet leaves through the sender's upload pipe, first
in, first out. It travels for the latency of the pair, and enters through the receiver's download pipe. Its first bit
may enter before its last bit leaves. A lost packet is sent again, which takes time. During a partition, packets wait
at the receiving end, because TCP delivers them once the partition heals.
"""

import asyncio
import hashlib
import math
import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from colab_swarm.errors import CallRefused, PeerLost, PeerUnreachable, WrongPeer, require
from colab_swarm.events import EventLog
from colab_swarm.net.carrier import Loopback, NodeSettings, Path, Remote
from colab_swarm.net.handshake import DIAL_TIMEOUT_S
from colab_swarm.net.identity import Identity, id_of
from colab_swarm.net.link import Link
from colab_swarm.net.membership import OpenAdmission
from colab_swarm.net.mux import Handler, ServiceTable
from colab_swarm.net.node import Node
from colab_swarm.net.peers import LinkStatistics, M, Message, PeerId, Role, short
from colab_swarm.net.traffic import REMEMBERED_RATES
from colab_swarm.net.websocket import HIGH_WATER_BYTES
from colab_swarm.sim.profiles import LAN, HostProfile, NetworkProfile

EPOCH = 1_750_000_000.0  # wall-clock time at virtual second 0
SETTINGS = NodeSettings()
SILENCE_S = 3 * SETTINGS.keep_alive_s
"""Connections that a partition silences for this long break, as by keep-alive; there are no pings in a simulation."""
_BUSY_BYTES = 1 << 16  # less traffic in a second says nothing about the rate
DIAL_ROUND_TRIPS = 3  # TCP, the WebSocket upgrade, the handshake


class Pipe:
    """One direction of a peer's connection; its transfers follow one another."""

    def __init__(self, rate_bps: float) -> None:
        self.most_bps = self.rate_bps = rate_bps
        self.free_at = 0.0
        self._second = -1
        self._bytes_by_second = deque[int](maxlen=REMEMBERED_RATES)  # of busy seconds, and of the present one

    def transfer(self, size_bytes: int, now: float, *, slowness: float) -> tuple[float, float]:
        """Queue ``size_bytes``; return when the first and the last bit pass."""
        begin = max(now, self.free_at)
        self.free_at = begin + size_bytes * 8 * slowness / self.rate_bps
        seconds = self._bytes_by_second
        if int(self.free_at) != self._second:
            self._second = int(self.free_at)
            if seconds and seconds[-1] < _BUSY_BYTES:
                seconds.pop()
            seconds.append(0)
        seconds[-1] += size_bytes
        return begin, self.free_at

    @property
    def peak_bps(self) -> float | None:
        """The highest rate of the last busy seconds."""
        return max((8.0 * busy for busy in self._bytes_by_second if busy >= _BUSY_BYTES), default=None)


class SimCarrier(Loopback):
    """One end of a connection between two peers, and the packets in flight from it.

    Timers only tell when a packet arrives. Queues tell which packet it is, because the event loop may swap timers that
    are due at the same time.
    """

    def __init__(self, network: "SimNetwork", near: "SimPeers", far: "SimPeers", latency_s: float) -> None:
        super().__init__()
        self.near = near
        self.far = far
        self.latency_s = latency_s
        self._network = network
        self._travelling: deque[tuple[int, float]] = deque()  # size_bytes, when its last bit arrives
        self._in_flight: deque[Callable[[], None]] = deque()
        self._arrival_at = 0.0
        self._held_up = 0
        self._leaving: deque[tuple[float, int]] = deque()  # when its last bit leaves, size_bytes
        self._leaving_bytes = 0
        self._writable = True

    @property
    def rtt_s(self) -> float:
        """Round-trip time without jitter, in seconds."""
        return 2 * self.latency_s * max(self.near.slowness, self.far.slowness) * self._network.latency_factor

    @property
    def backlog_bytes(self) -> int:
        while self._leaving and self._leaving[0][0] <= self._loop.time():
            self._leaving_bytes -= self._leaving.popleft()[1]
        return self._leaving_bytes

    def carry(self, size_bytes: int, arrive: Callable[[], None]) -> None:
        size_bytes += 84  # headers of TCP/IP and WebSocket, and the encryption's tag
        self._in_flight.append(arrive)
        slowness = self.near.slowness / self._network.width
        now = self._loop.time()
        first_bit_at, last_bit_at = self.near.upload.transfer(size_bytes, now, slowness=slowness)
        delay_s = self._delay_s()
        self._arrival_at = max(self._arrival_at, first_bit_at + delay_s)
        self._travelling.append((size_bytes, last_bit_at + delay_s))
        self._loop.call_at(self._arrival_at, self._arrive)
        self._leaving.append((last_bit_at, size_bytes))
        self._leaving_bytes += size_bytes
        if self._leaving_bytes > HIGH_WATER_BYTES and self._writable:
            self._watch_backlog()

    def _watch_backlog(self) -> None:
        writable = self.backlog_bytes <= HIGH_WATER_BYTES
        if writable is not self._writable:
            self._writable = writable
            self.receiver.on_writable(writable)
        if not writable:
            self._loop.call_at(self._leaving[0][0], self._watch_backlog)

    def _delay_s(self) -> float:
        network = self._network
        delay_s = self.rtt_s / 2
        if network.profile.jitter_s:
            delay_s += network.rng.expovariate(1 / network.profile.jitter_s) * network.latency_factor
        while network.loss and network.rng.random() < network.loss:
            delay_s += max(0.2, self.rtt_s)  # a retransmission
        return delay_s

    def _arrive(self) -> None:
        if self._travelling:  # else the connection was cut
            if not self._network.separated(self.near.name, self.far.name):
                self.other.read_at = self._loop.time()
            size_bytes, last_bit_at = self._travelling.popleft()
            slowness = self.far.slowness / self._network.width
            _, passed_at = self.far.download.transfer(size_bytes, self._loop.time(), slowness=slowness)
            self._loop.call_at(max(passed_at, last_bit_at), self._pass)

    def _pass(self) -> None:
        if self._network.separated(self.near.name, self.far.name):
            self._held_up += 1
        elif self._in_flight:
            self._in_flight.popleft()()

    def resume(self) -> None:
        """Deliver the packets that waited during a partition."""
        held_up = self._held_up
        self._held_up = 0
        for _ in range(held_up):
            self._pass()

    def abort(self, reason: str = "") -> None:
        """Cut the connection: packets in flight are lost, and the other end notices after the latency."""
        if self.open:
            self.open = self.other.open = False
            for end in (self, self.other):
                end._in_flight.clear()
                end._travelling.clear()
            self._loop.call_later(self.latency_s, self.other.receiver.on_lost, reason)


class SimLink(Link):
    """A real link that shows each decoded message to the `SimNetwork`, where a fault may break the link."""

    def __init__(
        self, network: "SimNetwork", own: "SimPeers", remote: Remote, *, carrier: Loopback, **parts: Any
    ) -> None:
        super().__init__(remote, carrier=carrier, **parts)
        self._network = network
        self._own = own
        self._wire = carrier

    @property
    def rtt_s(self) -> float | None:
        if isinstance(self._wire, SimCarrier):
            return self._wire.rtt_s
        return None

    def decode(self, kind: type[M], data: memoryview) -> M:
        message = super().decode(kind, data)
        text = f"the link to {short(self.peer)} broke just before a {kind.__name__}"
        require(not self._network.traps or not self._breaks_at(message), text, PeerLost)
        return message

    def find_handler(self, services: ServiceTable, opening: memoryview) -> tuple[Handler, Any]:
        handler, message = super().find_handler(services, opening)
        if self._network.traps and self._breaks_at(message):
            raise CallRefused("failed", "the link broke")
        return handler, message

    def _breaks_at(self, message: Message) -> bool:
        """Let the faults happen that wait for this message; return True if one of them has broken the link."""
        was_open = self._wire.open
        network = self._network
        sender = network.by_id[self.peer].name
        for trap in [trap for trap in network.traps if trap[0](message, sender, self._own.name)]:
            network.traps.remove(trap)
            trap[1]()
        return was_open and not self._wire.open


class SimPeers(Node):
    """A `Node` on the simulated network, whose links run over `SimCarrier`. `SimNetwork.peer` makes it.

    Attributes:
        role: the role that other peers give it.
        up: False once it crashed or left.
        slowness: factor on its transfer times and its latency.
    """

    def __init__(self, network: "SimNetwork", name: str, *, host: HostProfile, role: Role) -> None:
        self.name = name
        self.role = role
        self.up = True
        self.slowness = 1.0
        self._network = network
        self.upload = Pipe(host.upload_bps)
        self.download = Pipe(host.download_bps)
        self._down_callbacks: list[Callable[[], object]] = []
        identity = Identity(hashlib.sha256(f"{network.seed} {name}".encode()).digest())
        clock = partial(network.wall_clock, name)
        make_link = partial(SimLink, network, self)
        super().__init__(identity, SETTINGS, OpenAdmission(), EventLog(), clock, make_link)

    def __repr__(self) -> str:
        return f"SimPeers({self.name}, {'up' if self.up else 'down'}, {len(self.linked())} links)"

    async def link_to(self, peer: PeerId, timeout_s: float) -> Link:
        if not self.up:
            await asyncio.sleep(0.01)  # without it, a loop of retries would stop the virtual clock
            raise PeerLost(f"{self.name} is down")
        return await super().link_to(peer, timeout_s)

    async def dial_direct(self, peer: PeerId, address: str) -> Link:
        network = self._network
        other = self._network.by_address.get(address)
        unanswered = PeerUnreachable(f"nobody answers at {address}")
        if other is None:
            raise unanswered
        latency_s = network.profile.pair_latency_s(self.name, other.name, seed=network.seed)
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                for _ in range(DIAL_ROUND_TRIPS):
                    await asyncio.sleep(2 * latency_s * network.latency_factor)
                    while network.separated(self.name, other.name):
                        await asyncio.sleep(1.0)  # then dial again
                    if not (other.up and other.addresses):
                        raise unanswered
        except TimeoutError:
            raise unanswered from None
        require(other.id == peer, f"peer {short(other.id)} answered, {short(peer)} was expected", WrongPeer)
        return self.table.best(peer) or self._connect(other, latency_s)  # the other may have dialled

    def _connect(self, other: "SimPeers", latency_s: float) -> Link:
        other.require_room()
        ends = (self, other), (other, self)
        near, far = (SimCarrier(self._network, one, two, latency_s) for one, two in ends)
        near.other = far
        far.other = near
        far.receiver = other.accept(self, far, dialled=False)
        near.receiver = link = self.accept(other, near, dialled=True)
        return link

    def accept(self, other: "SimPeers", carrier: SimCarrier, *, dialled: bool) -> Link:
        """Return the link over this end of a new connection, as if a handshake were complete."""
        clock = other._own_time()
        remote = Remote(other.contact, other.public_key, role=other.role, time=clock)
        return self._on_introduced(Path(), dialled, carrier, remote, 0.0)

    def role_by(self, public_key: bytes, membership: bytes, at: float) -> Role:
        writer = self._network.by_id.get(id_of(public_key))
        if writer is None:
            return super().role_by(public_key, membership, at)
        return writer.role

    def limit(self, rate_bps: float | None) -> None:
        for pipe in (self.upload, self.download):
            pipe.rate_bps = min(pipe.most_bps, math.inf if rate_bps is None else rate_bps)

    def statistics(self, peer: PeerId | None = None) -> LinkStatistics:
        up = self.upload.peak_bps
        down = self.download.peak_bps
        return replace(super().statistics(peer), upload_bps=up, download_bps=down)

    async def close(self) -> None:
        self.up = False
        await super().close()

    def when_down(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` when this peer crashes, so that its other tasks can end, too."""
        self._down_callbacks.append(callback)

    def crash(self) -> None:
        if self.up:
            self.kill(f"{self.name} crashed")
            for callback in self._down_callbacks:
                callback()

    def kill(self, reason: str) -> None:
        self.up = False
        super().kill(reason)


@dataclass(frozen=True)
class ScriptedFault:
    """A fault that happened, or will happen, at ``at`` (virtual seconds). ``name`` is a method of `Script`."""

    at: float
    name: str
    arguments: tuple[Any, ...]


class Script:
    """The faults that can be scripted; ``schedule(name, *arguments)`` decides when each one happens."""

    def __init__(self, schedule: Callable[..., object]) -> None:
        self._schedule = schedule

    def crash(self, peer: str) -> None:
        """Kill the peer's process: its links break, which others notice after a moment, and it cannot be dialled."""
        self._schedule("crash", peer)

    def restart(self, peer: str) -> None:
        """Start a crashed peer again: it can be dialled, has the same handlers as before, and no links."""
        self._schedule("restart", peer)

    def partition(self, *groups: set[str]) -> None:
        """Stop traffic between different groups; peers that are in no group reach all others."""
        self._schedule("partition", *groups)

    def heal(self) -> None:
        """End the partition. A cut or a freeze still lasts for its ``seconds``."""
        self._schedule("heal")

    def cut(self, peer: str, seconds: float) -> None:
        """Stop the peer's traffic for ``seconds``."""
        self._schedule("cut", peer, seconds)

    def freeze(self, peer: str, seconds: float) -> None:
        """Freeze the peer's process for ``seconds``: it computes nothing and its traffic stops; timers run on."""
        self._schedule("freeze", peer, seconds)

    def slow(self, peer: str, factor: float) -> None:
        """Make the peer's connection ``factor`` times slower than in its profile, in bandwidth and latency."""
        self._schedule("slow", peer, factor)

    def skew(self, peer: str, seconds: float) -> None:
        """Set the peer's wall clock ``seconds`` ahead."""
        self._schedule("skew", peer, seconds)

    def lose(self, rate: float) -> None:
        """Lose this fraction of all messages, which are then retransmitted."""
        self._schedule("lose", rate)

    def latency(self, factor: float) -> None:
        """Multiply the latency of the network's profile."""
        self._schedule("latency", factor)

    def bandwidth(self, factor: float) -> None:
        """Multiply the bandwidths of the network's profile."""
        self._schedule("bandwidth", factor)


class SimNetwork:
    """Peers, the connections between them and scripted faults. Make it inside `run_virtual`.

    Attributes:
        loss: fraction of packets that need a retransmission.
        latency_factor, width: factors on the profile's latency and on its bandwidths.
        fired, coming: scripted faults that have happened, and scripted faults that `at` has scheduled.
        traps: pairs of a function and a fault; the fault happens when the function recognizes a message.
        by_name, by_id, by_address: the peers, whether they are up or not.
        on_fault: function that is called when a fault happens.
    """

    def __init__(self, profile: NetworkProfile = LAN, *, seed: int = 0) -> None:
        self.profile = profile
        self.seed = seed
        self.rng = random.Random(seed)
        self.loop = asyncio.get_running_loop()
        self.loss = profile.loss
        self.latency_factor = 1.0
        self.width = 1.0
        self.fired: list[ScriptedFault] = []
        self.coming: list[ScriptedFault] = []
        self.traps: list[tuple[Callable[[Message, str, str], bool], Callable[[], None]]] = []
        self.on_fault: Callable[[ScriptedFault], object] = lambda fault: None
        self.by_name: dict[str, SimPeers] = {}
        self.by_id: dict[PeerId, SimPeers] = {}
        self.by_address: dict[str, SimPeers] = {}
        self._groups: tuple[frozenset[str], ...] = ()
        self._silent_until: dict[str, float] = {}
        self._frozen_until: dict[str, float] = {}
        self._skews: dict[str, float] = {}

    def peer(
        self,
        name: str,
        *,
        listen: bool = True,
        host_profile: HostProfile | None = None,
        role: Role = Role.WORKER,
    ) -> SimPeers:
        """Add a peer, or a new process of a peer that crashed or left; raises ValueError if the peer is up.

        Args:
            listen: whether others can dial the peer; if False, it is in client mode.
            host_profile: the peer's bandwidth; None for the next one in the network's profile.
            role: the role that other peers give it; in an open run all peers are workers.
        """
        require(not self.is_up(name), f"{name} is already up")
        host = host_profile or self.profile.hosts[len(self.by_name) % len(self.profile.hosts)]
        peer = SimPeers(self, name, host=host, role=role)
        self.by_name[name] = self.by_id[peer.id] = peer
        address = f"ws://{re.sub('[^A-Za-z0-9._-]', '-', name)}:{1 + list(self.by_name).index(name)}"
        self.by_address[address] = peer
        peer.addresses = (address,) if listen else ()
        return peer

    def is_up(self, name: str) -> bool:
        return name in self.by_name and self.by_name[name].up

    def __repr__(self) -> str:
        return f"SimNetwork({self})"

    def __str__(self) -> str:
        host = self.profile.hosts[0]
        if len(self.profile.hosts) > 1:
            kinds = f"{len(self.profile.hosts)} kinds of lines, the first "
        else:
            kinds = ""
        latency_ms = 1000 * self.profile.latency_s * self.latency_factor
        up, down = (bps * self.width / 1e6 for bps in (host.upload_bps, host.download_bps))
        bandwidth = f"{kinds}{up:g} Mbit/s up, {down:g} Mbit/s down"
        return f"{self.profile.name}: {bandwidth}, {latency_ms:.3g} ms, {self.loss:.1%} of messages repeated"

    def introduce(self) -> None:
        """Give every peer the addresses of all others, as an invitation or the DHT would."""
        for peer in self.by_name.values():
            for other in self.by_name.values():
                peer.learn(other.contact)

    # -- faults

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

        If the fault breaks the link between sender and receiver, the message is not delivered. The messages of calls,
        replies, openings of streams and stream items count.
        """

        def set_trap(name: str, *arguments: Any) -> None:
            numbers = count(1)

            def is_nth(message: Message, near: str, far: str) -> bool:
                matches = sender in (None, near) and receiver in (None, far) and predicate(message)
                return matches and next(numbers) == nth

            self.traps.append((is_nth, partial(self.fire, name, *arguments)))

        return Script(set_trap)

    def now(self) -> Script:
        """Script a fault that happens immediately."""
        return Script(self.fire)

    def fire(self, name: str, *arguments: Any) -> None:
        """Let a fault happen now, and record it."""
        self.fired.append(ScriptedFault(self.loop.time(), name, arguments))
        self.on_fault(self.fired[-1])
        match name, *arguments:
            case "crash", peer:
                for until in (self._silent_until, self._frozen_until):
                    until.pop(peer, None)  # a new process is not frozen or cut off
                self.by_name[peer].crash()
            case "restart", peer:
                self.by_name[peer].up = True
            case "partition", *groups:
                now = self._groups = tuple(map(frozenset, groups))
                self._break_later(lambda *ends: self._groups is now and self.separated(*ends))
            case ("heal",):
                self._groups = ()
                self._resume()
            case (("cut" | "freeze"), peer, seconds):
                self._silence(peer, seconds, frozen=name == "freeze")
            case "slow", peer, factor:
                self.by_name[peer].slowness = factor
            case "skew", peer, seconds:
                self._skews[peer] = seconds
            case (("lose" | "latency" | "bandwidth"), number):
                setattr(self, {"lose": "loss", "latency": "latency_factor"}.get(name, "width"), number)

    def _silence(self, one: str, seconds: float, *, frozen: bool) -> None:
        until = self._silent_until[one] = self.loop.time() + seconds
        if frozen:
            self._frozen_until[one] = until
        self._break_later(
            lambda *ends: one in ends and self._silent_until.get(one) == until > self.loop.time()
        )
        self.loop.call_at(until + 1e-6, self._resume)  # later, because a loop may call a timer slightly early

    def frozen_s(self, name: str) -> float:
        """Return for how many more seconds the peer is frozen."""
        return max(0.0, self._frozen_until.get(name, 0.0) - self.loop.time())

    def _resume(self) -> None:
        for carrier in self._carriers():
            carrier.resume()

    def _break_later(self, silent: Callable[..., bool]) -> None:
        """Break the connections for which ``silent(one, other)`` is true, at the time when keep-alive would notice."""

        def break_silent() -> None:
            for carrier in self._carriers():
                near = carrier.near.name
                far = carrier.far.name
                if carrier.open and silent(near, far):
                    reason = f"{near} and {far} hear nothing of each other"
                    carrier.abort(reason)
                    carrier.receiver.on_lost(reason)

        self.loop.call_later(SILENCE_S, break_silent)

    def _carriers(self) -> list[SimCarrier]:
        """Return both ends of every connection that is still open at one end."""
        ends = [link.carrier for peer in self.by_name.values() for link in peer.table]
        carriers: dict[SimCarrier, None] = {}
        for end in ends:
            if isinstance(end, SimCarrier):
                carriers[end] = None
                carriers[end.other] = None
        return list(carriers)

    def separated(self, one: str, other: str) -> bool:
        if any(self._silent_until.get(name, 0.0) > self.loop.time() for name in (one, other)):
            return True
        sides = [next((group for group in self._groups if name in group), None) for name in (one, other)]
        return None not in sides and sides[0] is not sides[1]

    def wall_clock(self, name: str) -> float:
        """Return the time that the peer's own clock shows, in seconds since the epoch."""
        return EPOCH + self.loop.time() + self._skews.get(name, 0.0)
