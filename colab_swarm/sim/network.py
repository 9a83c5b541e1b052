"""A network in memory, on virtual time: the same seed gives the same trace.

async def main() -> None:
    network = SimNetwork(HOME, seed=1)
    alice, bob = network.peer("alice"), network.peer("bob")
    network.introduce()
    network.at(12.0).crash("bob")
    ...
    assert [fault.name for fault in network.fired] == ["crash"]

run_virtual(main())
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from typing import Any

from colab_swarm.net.identity import Identity
from colab_swarm.net.peers import Message, PeerId, Role
from colab_swarm.sim.faults import ComingFault, FiredFault, Script, Trap
from colab_swarm.sim.link import Connection, SimLink
from colab_swarm.sim.peer import SimPeers
from colab_swarm.sim.profiles import LAN, HostProfile, NetworkProfile

EPOCH = 1_750_000_000.0
"""Wall-clock time at virtual second 0."""
SILENCE_S = 30.0
"""Links that a partition silences for this long break, as keep-alive would find."""


class SimNetwork:
    """Peers, links between them and what goes wrong. Make it inside `run_virtual`.

    Attributes:
        fired, coming: scripted faults, those that `when` waits for left out.
        standing: whether two peers have a link already when the simulation begins. It is made when it is first used,
            without the time that dialling takes: ten thousand peers have a million links.
    """

    def __init__(self, profile: NetworkProfile = LAN, *, seed: int = 0) -> None:
        self.profile = profile
        self.rng = random.Random(seed)
        self.loss = profile.loss
        self.latency_factor = 1.0
        self.fired: list[FiredFault] = []
        self.coming: list[ComingFault] = []
        self.standing: Callable[[SimPeers, SimPeers], bool] = lambda one, other: False
        self._seed = seed
        self.loop = asyncio.get_running_loop()
        self._names: dict[str, SimPeers] = {}
        self._ids: dict[PeerId, SimPeers] = {}
        self._skews: dict[str, float] = {}
        self._width = 1.0
        self._groups: tuple[frozenset[str], ...] = ()
        self._traps: list[Trap] = []

    def peer(
        self,
        name: str,
        *,
        listen: bool = True,
        host_profile: HostProfile | None = None,
        role: Role = Role.WORKER,
    ) -> SimPeers:
        """Add a peer; a name whose peer crashed or left gets a new process with the same identity.

        Args:
            listen: whether others can dial it; without, it is in client mode.
            host_profile: its bandwidth, if not the next of the network's profile.
            role: what the others let it do; in an open run everybody is a worker.

        Raises:
            ValueError: that peer is up.
        """
        if name in self._names and self._names[name].up:
            raise ValueError(f"{name} is already up")
        host = host_profile or self.profile.hosts[len(self._names) % len(self.profile.hosts)]
        identity = Identity(hashlib.sha256(f"{self._seed} {name}".encode()).digest())
        peer = SimPeers(self, name, identity=identity, listen=listen, host=host, role=role)
        peer.connection.widen(self._width)
        self._names[name] = self._ids[peer.id] = peer
        return peer

    def is_up(self, name: str) -> bool:
        """Whether a peer of that name runs."""
        return name in self._names and self._names[name].up

    def __repr__(self) -> str:
        return f"SimNetwork({self})"

    def __str__(self) -> str:
        host = self.profile.hosts[0]
        kinds = f"{len(self.profile.hosts)} kinds of lines, the first " if len(self.profile.hosts) > 1 else ""
        latency_ms = 1000 * self.profile.latency_s * self.latency_factor
        up, down = (bps * self._width / 1e6 for bps in (host.upload_bps, host.download_bps))
        line = f"{kinds}{up:g} Mbit/s up, {down:g} Mbit/s down"
        return f"{self.profile.name}: {line}, {latency_ms:.3g} ms, {self.loss:.1%} of messages repeated"

    def introduce(self) -> None:
        """Tell every peer made so far the addresses of all others, as an invitation or the DHT would."""
        for peer in self._names.values():
            for other in self._names.values():
                peer.learn(other.contact)

    def at(self, seconds: float) -> Script:
        """Script a fault for a time on the virtual clock: ``network.at(12.0).crash("bob")``."""

        def schedule(name: str, arguments: tuple[Any, ...], fire: Callable[[], None]) -> None:
            fault = ComingFault(seconds, name, arguments)

            def happen() -> None:
                self.coming.remove(fault)
                fire()

            self.coming.append(fault)
            self.loop.call_at(seconds, happen)

        return Script(self, schedule)

    def when(
        self,
        predicate: Callable[[Message], bool],
        *,
        sender: str | None = None,
        receiver: str | None = None,
        nth: int = 1,
    ) -> Script:
        """Script a fault for the moment just before the ``nth`` matching message is handed to its receiver.

        If the fault breaks the link between the two, the message is not delivered. Calls, replies, openings
        of streams and their items count.
        """
        return Script(
            self, lambda _, __, fire: self._traps.append(Trap(predicate, sender, receiver, nth, fire))
        )

    def now(self) -> Script:
        """Let a fault happen at once."""
        return Script(self, lambda _, __, fire: fire())

    def fire(self, name: str, *arguments: Any) -> None:
        """Let a fault happen now and record it."""
        self.fired.append(FiredFault(self.loop.time(), name, arguments))
        getattr(self, f"_{name}")(*arguments)

    def _crash(self, peer: str) -> None:
        if self._names[peer].up:
            self._names[peer].crash()

    def _restart(self, peer: str) -> None:
        self._names[peer].up = True

    def _partition(self, *groups: set[str]) -> None:
        self._groups = tuple(frozenset(group) for group in groups)
        self.loop.call_later(SILENCE_S, self._break_silent_links, self._groups)

    def _heal(self) -> None:
        self._groups = ()
        for _, _, link in self._all_links():
            link.resume()

    def _slow(self, peer: str, factor: float) -> None:
        self._names[peer].connection.slow(factor)

    def _skew(self, peer: str, seconds: float) -> None:
        self._skews[peer] = seconds

    def _lose(self, rate: float) -> None:
        self.loss = rate

    def _latency(self, factor: float) -> None:
        self.latency_factor = factor

    def _bandwidth(self, factor: float) -> None:
        self._width = factor
        for peer in self._names.values():
            peer.connection.widen(factor)

    def _break_silent_links(self, groups: tuple[frozenset[str], ...]) -> None:
        if self._groups is groups:
            for one, other, link in self._all_links():
                if self.separated(one.name, other.name):
                    self.break_link(
                        one, other, link, f"{one.name} and {other.name} hear nothing of each other"
                    )

    def _all_links(self) -> list[tuple[SimPeers, SimPeers, SimLink]]:
        found: dict[SimLink, tuple[SimPeers, SimPeers]] = {}
        for peer in self._names.values():
            for other, link in peer.links():
                found.setdefault(link, (peer, self._ids[other]))
        return [(one, other, link) for link, (one, other) in found.items()]

    # -- what links and peers ask

    def separated(self, one: str, other: str) -> bool:
        """Whether a partition lies between two peers."""
        if not self._groups:
            return False
        sides = [next((group for group in self._groups if name in group), None) for name in (one, other)]
        return None not in sides and sides[0] is not sides[1]

    def delivering(self, message: Message, sender: str, receiver: str) -> None:
        """Fire the faults that wait for this message."""
        for trap in [trap for trap in self._traps if trap.matches(message, sender, receiver)]:
            self._traps.remove(trap)
            trap.fire()

    def latency_s(self, one: SimPeers, other: SimPeers) -> float:
        """The pair's own one-way delay, the same whoever else is there."""
        first, second = sorted((one.name, other.name))
        spread, mean_s = self.profile.spread, self.profile.latency_s - self.profile.jitter_s
        if not spread:
            return mean_s
        return mean_s * random.Random(f"{self._seed} {first} {second}").lognormvariate(
            -(spread**2) / 2, spread
        )

    def link(self, one: SimPeers, other: SimPeers) -> SimLink:
        """A new link between two peers, or of one with itself."""
        if one is other:
            ends = Connection(one.name, HostProfile()), Connection(one.name, HostProfile())
            return SimLink(self, ends, latency_s=0.0)
        return SimLink(self, (one.connection, other.connection), latency_s=self.latency_s(one, other))

    def break_link(self, one: SimPeers, other: SimPeers, link: SimLink, reason: str) -> None:
        """Cut a link now; both ends learn of it after its latency."""
        link.cut()
        one.forget(other.id, link)
        other.forget(one.id, link)

        def tell() -> None:
            link.fail_guests(reason)
            one.tell_lost(other.id)
            if other is not one:
                other.tell_lost(one.id)

        self.loop.call_later(link.latency_s, tell)

    def peer_of(self, peer: PeerId) -> SimPeers:
        """The peer with that id."""
        return self._ids[peer]

    def dialled(self, address: str) -> SimPeers | None:
        """Who is at an address, up or not."""
        return self._names.get(address.removeprefix("sim://"))

    def skew_of(self, peer: PeerId) -> float:
        """How far the peer's wall clock is ahead, seconds."""
        return self._skews.get(self._ids[peer].name, 0.0) if self._skews else 0.0

    def wall_time(self) -> float:
        """Seconds since the epoch on a clock without skew."""
        return EPOCH + self.loop.time()
