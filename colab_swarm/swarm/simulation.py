"""`simulate`: a swarm of many peers in this process, on virtual time, with a network of your choice.

The peers are ordinary `Swarm` objects and run the same code as on the internet. Only the links, the clock and the
compute time are simulated. Use it to learn, to try what a slow peer or a crash does, and to plan a run:
`Simulation.run` works through it at once, `Simulation.play` shows it live and lets you interfere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar, cast

from colab_swarm.events import EventLog
from colab_swarm.notebook.lessons import (
    Action,
    SimulatedPeer,
    SimulationSnapshot,
    describe_fault,
    draw_simulation,
)
from colab_swarm.sim.faults import ScriptedFault
from colab_swarm.sim.network import SimNetwork
from colab_swarm.sim.profiles import PROFILES, ChurnProfile, NetworkProfile
from colab_swarm.sim.runtime import SimRuntime
from colab_swarm.snapshot import SwarmSnapshot
from colab_swarm.swarm.lesson import InteractiveRun
from colab_swarm.swarm.network import assemble, find_others
from colab_swarm.swarm.swarm import Swarm

T = TypeVar("T")
ENTRIES = 4
NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")


class Simulation(AbstractContextManager["Simulation"]):
    """A simulated run. ``network.at(12.0).crash("bob")`` scripts a fault; `run` and `play` let the peers work."""

    def __init__(self, profile: NetworkProfile, *, seed: int, samples_per_s: float) -> None:
        self._runtime, self._seed, self._samples_per_s = SimRuntime(), seed, samples_per_s
        self._names: list[str] = []  # of all peers that ever joined
        self._speeds: dict[str, float] = {}
        self._train: Callable[[Swarm], object] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._later: set[asyncio.Task[None]] = set()
        self._crashed: dict[str, SimulatedPeer] = {}  # their last state
        self._arriving: dict[str, asyncio.Task[None]] = {}  # peers that are joining now
        self._lesson: InteractiveRun | None = None
        self.results: dict[str, object] = {}
        self.network = self._runtime.call(self._make_network(profile))
        self.swarms: dict[str, Swarm] = {}

    async def _make_network(self, profile: NetworkProfile) -> SimNetwork:
        return SimNetwork(profile, seed=self._seed)

    @property
    def time(self) -> float:
        """Virtual seconds since the simulation began."""
        return self._runtime.loop.time()

    def join(
        self, name: str, *, at: float = 0.0, samples_per_s: float | None = None, listen: bool = True
    ) -> None:
        """Add a peer, now or, once `run` or `play` is under way, at virtual time ``at``.

        Args:
            name: its name in faults; the name of a crashed peer starts a new process of that peer.
            at: virtual seconds since the simulation began.
            samples_per_s: its training speed; as fast as the others if None.
            listen: False for a peer that cannot be dialled.

        Raises:
            ValueError: a peer of this name is online.
        """
        if at <= self.time and (name in self.swarms or name in self._arriving):
            raise ValueError(f"{name} is already online: use another name, or crash it first")
        if samples_per_s is not None:
            self._speeds[name] = samples_per_s
        if self._train is None and at <= self.time:
            self._runtime.call(self._join(name, listen))
        else:
            task = self._runtime.loop.create_task(self._join_later(at, name, listen))
            self._later.add(task)
            if at <= self.time:
                self._arriving[name] = task

    async def _join_later(self, at: float, name: str, listen: bool) -> None:
        await asyncio.sleep(at - self.time)
        me = asyncio.current_task()
        assert me is not None
        self._arriving[name] = me
        try:
            await self._join(name, listen)
        finally:
            if self._arriving.get(name) is me:
                del self._arriving[name]
        self._start(name)

    def resize(self, wanted: int) -> None:
        """Add peers, or kill the last ones, to get ``wanted`` of them; call it only while no time passes."""
        for name in [*self.swarms, *self._arriving][wanted:]:
            if name in self.swarms:
                self.fire("crash", name)
            else:
                self._arriving.pop(name).cancel()
        for name in map(nth_name, range(wanted)):
            if name not in self.swarms and name not in self._arriving:
                self.join(name, at=self.time)

    async def _join(self, name: str, listen: bool) -> None:
        peers = self.network.peer(name, listen=listen)
        self.results.pop(name, None)
        self._crashed.pop(name, None)
        if name not in self._names:
            self._names.append(name)
        contacts = [swarm.contact for swarm in self.swarms.values()]
        entries = [contact for contact in contacts if contact.addresses][:ENTRIES]
        rng = random.Random(f"{name} {self._seed}")
        services = assemble(peers, EventLog(), rng, lambda samples: samples / self.speed_of(name))
        try:
            await find_others(services, entries)
        except BaseException:  # a cancelled task included: the name must be free for the next try
            services.dht.kill()
            peers.go_down(f"{name} could not join")
            raise
        self.swarms[name] = Swarm(self._runtime, services, "simulation-0", name, None)
        peers.when_down(lambda: self._on_crash(name))

    def _on_crash(self, name: str) -> None:
        if name in self._tasks:
            self._tasks.pop(name).cancel()
        swarm = self.swarms.pop(name)
        self._crashed[name] = replace(self._peer(name, swarm.snapshot()), state="crashed", samples=0.0)
        swarm.kill()

    def speed_of(self, name: str) -> float:
        """Return the peer's training speed, samples per virtual second."""
        return self._speeds.get(name, self._samples_per_s)

    def change_speed(self, name: str, samples_per_s: float) -> None:
        """Set the peer's training speed from its next batch on.

        Raises:
            ValueError: no peer of this name ever joined.
        """
        if name not in self._names:
            raise ValueError(f"{name} never joined")
        self._speeds[name] = samples_per_s

    def run(
        self, train: Callable[[Swarm], T], *, seconds: float | None = None, churn: ChurnProfile | None = None
    ) -> dict[str, T]:
        """Run ``train(swarm)`` for every peer at once, each in its own thread, one at a time, on virtual time.

        Args:
            train: ordinary blocking code, as in a notebook cell.
            seconds: stop after this virtual time; None: when all peers have finished.
            churn: peers crash and join again at random times; needs ``seconds``.

        Returns:
            The return values of ``train`` by name of peer, for those that finished.
        """
        if churn is not None and seconds is None:
            raise ValueError("churn has no end: pass seconds= as well")
        self._stop_lesson()
        self.begin(train)
        try:
            if churn is not None and seconds is not None:
                self._later.add(self._runtime.loop.create_task(self._churn(churn, seconds)))
            self.advance(seconds)
        finally:
            self.end()
        return cast(dict[str, T], self.results)

    def play(
        self,
        train: Callable[[Swarm], object],
        *,
        seconds: float | None = None,
        speed: float = 10.0,
        actions: Sequence[Action] = (),
        live: bool | None = None,
    ) -> InteractiveRun:
        """Run ``train(swarm)`` for every peer in the background and show it, with sliders and a kill button.

        Without a front-end it runs to its end at once and prints what happens. Returns an `InteractiveRun`.

        Args:
            train: as for `run`.
            seconds: stop after so much virtual time; None: when everyone has finished.
            speed: virtual seconds per second.
            actions: changes at given times; those of an earlier run (``lesson.actions``) repeat it exactly.
            live: whether to use widgets and to keep to ``speed``; None to find out.
        """
        self._lesson = InteractiveRun(self, train, seconds=seconds, speed=speed, actions=actions, live=live)
        return self._lesson

    def _stop_lesson(self) -> None:
        if self._lesson is not None:
            self._lesson.stop()
            self._lesson = None

    def begin(self, train: Callable[[Swarm], object]) -> None:
        """Start ``train`` at every peer; time passes in `advance` only."""
        self._train, self.results = train, {}
        for name in self.swarms:
            self._start(name)

    def advance(self, seconds: float | None = None) -> bool:
        """Let this much virtual time pass, or less if all peers finish before; return True if all have finished.

        Raises:
            Exception: raised by a peer's ``train``.
        """
        return self._runtime.call(self._advance(seconds))

    async def _advance(self, seconds: float | None) -> bool:
        try:
            async with asyncio.timeout(seconds) as limit:
                while running := {*self._tasks.values(), *self._later}:
                    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    self._later -= done
                    for task in done:
                        if not task.cancelled():
                            task.result()
        except TimeoutError:
            if not limit.expired():
                raise
            return False
        return True

    def fire(self, name: str, *arguments: object) -> None:
        """Let a fault happen now, as ``network.now()`` does; call it only while no time passes."""
        self._runtime.call(self._fire(name, *arguments))

    async def _fire(self, name: str, *arguments: object) -> None:
        self.network.fire(name, *arguments)

    def end(self) -> None:
        """Stop ``train`` at every peer that still runs it."""
        self._runtime.call(self._stop_all())
        self._train = None

    async def _churn(self, churn: ChurnProfile, seconds: float) -> None:
        begin, rng = self.time, random.Random(f"churn {self._seed}")
        for event in churn.events(list(self.swarms), until_s=seconds, rng=rng):
            await asyncio.sleep(begin + event.at - self.time)
            if event.online:
                await self._join(event.peer, True)
                self._start(event.peer)
            else:
                self.network.now().crash(event.peer)

    async def _stop_all(self) -> None:
        tasks = [*self._tasks.values(), *self._later]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._later.clear()
        self._arriving.clear()

    def _start(self, name: str) -> None:
        self._tasks[name] = self._runtime.loop.create_task(self._work(name), name=name)

    async def _work(self, name: str) -> None:
        train, swarm = self._train, self.swarms[name]
        assert train is not None
        self.results[name] = await self._runtime.run_thread(lambda: train(swarm), name)
        self._tasks.pop(name, None)

    def close(self) -> None:
        """End the simulation."""
        self._stop_lesson()
        self._runtime.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def snapshot(self) -> SimulationSnapshot:
        """Return what panels show. Call it only while no time passes; otherwise use `InteractiveRun.snapshot`."""
        swarms = {name: swarm.snapshot() for name, swarm in self.swarms.items()}
        seen = next(iter(swarms.values()), None)
        return SimulationSnapshot(
            at=self.time,
            network=str(self.network),
            peers=tuple(self._peer(name, swarms.get(name)) for name in self._names),
            target_batch_size=max((swarm.target_batch_size for swarm in swarms.values()), default=0.0),
            fired=tuple(map(_describe, self.network.fired)),
            coming=tuple(map(_describe, sorted(self.network.coming, key=lambda fault: fault.at))),
            seen=seen,
        )

    def _peer(self, name: str, seen: SwarmSnapshot | None) -> SimulatedPeer:
        if seen is None:
            state = "joining" if self.network.is_up(name) else "crashed"
            return self._crashed.get(name, SimulatedPeer(name, state, 0, 0.0, self.speed_of(name), None))
        row = next(peer for peer in seen.peers if peer.me)
        loss = seen.loss_history[-1][1] if seen.loss_history else None
        state = row.role if row.role == "catching up" else seen.state
        if name in self.results:
            state = "finished"
        return SimulatedPeer(name, state, row.step, row.samples, self.speed_of(name), loss)

    def __repr__(self) -> str:
        return f"Simulation({len(self.swarms)} peers on {self.network.profile.name}, {self.time:.1f} s)"

    def _repr_html_(self) -> str:
        seen = self.snapshot() if self._lesson is None else self._lesson.snapshot().simulation
        return draw_simulation(seen).html()


def _describe(fault: ScriptedFault) -> str:
    return f"{fault.at:.0f} s: {describe_fault(fault.name, fault.arguments)}"


def simulate(
    peers: int = 4, *, network: str | NetworkProfile = "home", seed: int = 0, samples_per_s: float = 10.0
) -> Simulation:
    """Start a simulated run of ``peers`` peers, called alice, bob, carol, ….

    Args:
        peers: number of peers at the start.
        network: lan, home, dedloc16, paper_cloud, or your own profile.
        seed: of all random numbers: same seed, same run.
        samples_per_s: training speed of each peer, in virtual time.

    Raises:
        ValueError: the network is unknown, or ``peers`` is below 1.
    """
    if peers < 1:
        raise ValueError(f"peers={peers}: a swarm needs at least one")
    profile = PROFILES.get(network) if isinstance(network, str) else network
    if profile is None:
        raise ValueError(f"network={network!r} is unknown: choose one of {', '.join(PROFILES)}")
    simulation = Simulation(profile, seed=seed, samples_per_s=samples_per_s)
    for index in range(peers):
        simulation.join(nth_name(index))
    return simulation


def nth_name(index: int) -> str:
    """Return the name of the simulation's peer number ``index``."""
    return NAMES[index] if index < len(NAMES) else f"peer{index}"
