"""`simulate`: a swarm of many peers in this process, on virtual time, with a network of your choice.

The peers are ordinary `Swarm` objects and run the same code as on the internet; only the links, the clock and the
compute time are simulated. It is the way to learn, to try what a slow peer or a crash does, and to plan a run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TypeVar, cast

from colab_swarm.events import EventLog
from colab_swarm.presence import assemble, find_others
from colab_swarm.sim.network import SimNetwork
from colab_swarm.sim.profiles import PROFILES, ChurnProfile, NetworkProfile
from colab_swarm.sim.runtime import SimRuntime
from colab_swarm.swarm import Swarm

T = TypeVar("T")
ENTRIES = 4
NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")


class Simulation:
    """A simulated run. ``network.at(12.0).crash("bob")`` scripts a fault; `run` lets the peers work."""

    def __init__(self, profile: NetworkProfile, *, seed: int, samples_per_s: float) -> None:
        self._runtime = SimRuntime()
        self._seed = seed
        self._samples_per_s = samples_per_s
        self._train: Callable[[Swarm], object] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._later: set[asyncio.Task[None]] = set()
        self._results: dict[str, object] = {}
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
        """Add a peer, now or, once `run` is under way, at virtual time ``at``.

        Args:
            name: what faults call it; the name of a crashed peer comes back as a fresh one.
            at: virtual seconds since the simulation began.
            samples_per_s: how fast it trains; as fast as the others if None.
            listen: False for a peer that cannot be dialled.

        Raises:
            ValueError: a peer of this name is there.
        """
        options = (name, samples_per_s or self._samples_per_s, listen)
        if at <= self.time:
            self._runtime.call(self._join(*options))
        else:
            self._later.add(self._runtime.loop.create_task(self._join_later(at, *options)))

    async def _join_later(self, at: float, name: str, samples_per_s: float, listen: bool) -> None:
        await asyncio.sleep(at - self.time)
        await self._join(name, samples_per_s, listen)
        self._start(name)

    async def _join(self, name: str, samples_per_s: float, listen: bool) -> None:
        peers = self.network.peer(name, listen=listen)
        entries = [contact for swarm in self.swarms.values() if (contact := swarm.contact).addresses][
            :ENTRIES
        ]
        rng = random.Random(f"{name} {self._seed}")
        services = assemble(peers, EventLog(), rng, lambda samples: samples / samples_per_s)
        await find_others(services, entries)
        self.swarms[name] = Swarm(self._runtime, services, run_id="simulation-0", name=name, presence=None)
        peers.when_down(lambda: self._on_crash(name))

    def _on_crash(self, name: str) -> None:
        """Its process is gone: neither its thread nor its services run on."""
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
        self.swarms.pop(name).vanish()

    def run(
        self, train: Callable[[Swarm], T], *, seconds: float | None = None, churn: ChurnProfile | None = None
    ) -> dict[str, T]:
        """Run ``train(swarm)`` for every peer at once, each in its own thread, one at a time, on virtual time.

        Args:
            train: ordinary blocking code, as in a notebook cell.
            seconds: stop after so much virtual time; None: when everyone has finished.
            churn: peers crash and come back as newcomers at random times; needs ``seconds``.

        Returns:
            What ``train`` returned, by name of peer, for those that came to its end.
        """
        if churn is not None and seconds is None:
            raise ValueError("churn goes on for ever: say for how many seconds")
        self._train = train
        self._results = {}
        self._runtime.call(self._run(seconds, churn))
        return cast(dict[str, T], self._results)

    async def _run(self, seconds: float | None, churn: ChurnProfile | None) -> None:
        if churn is not None and seconds is not None:
            self._later.add(asyncio.get_running_loop().create_task(self._churn(churn, seconds)))
        for name in self.swarms:
            self._start(name)
        try:
            async with asyncio.timeout(seconds):
                while running := {*self._tasks.values(), *self._later}:
                    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    self._later -= done
                    for task in done:
                        if not task.cancelled():
                            task.result()
        except TimeoutError:
            pass
        finally:
            await self._stop_all()

    async def _churn(self, churn: ChurnProfile, seconds: float) -> None:
        begin = self.time
        rng = random.Random(f"churn {self._seed}")
        for event in churn.events(list(self.swarms), until_s=seconds, rng=rng):
            await asyncio.sleep(begin + event.at - self.time)
            if event.online:
                await self._join(event.peer, self._samples_per_s, True)
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

    def _start(self, name: str) -> None:
        self._tasks[name] = asyncio.get_running_loop().create_task(self._work(name), name=name)

    async def _work(self, name: str) -> None:
        train, swarm = self._train, self.swarms[name]
        assert train is not None
        self._results[name] = await self._runtime.run_thread(lambda: train(swarm), name)
        self._tasks.pop(name, None)

    def close(self) -> None:
        """End the simulation."""
        self._runtime.close()

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Simulation({len(self.swarms)} peers on {self.network.profile.name}, {self.time:.1f} s)"


def simulate(
    peers: int = 4, *, network: str | NetworkProfile = "home", seed: int = 0, samples_per_s: float = 10.0
) -> Simulation:
    """Begin a simulated run of ``peers`` peers, called alice, bob, carol, ….

    Args:
        peers: how many at the beginning.
        network: lan, home, dedloc16, paper_cloud, or a profile of your own.
        seed: everything random comes from it: same seed, same run.
        samples_per_s: how fast each peer trains, in virtual time.

    Raises:
        ValueError: the network is unknown, or there is no peer.
    """
    if peers < 1:
        raise ValueError(f"peers={peers}: a swarm has at least one")
    profile = PROFILES.get(network) if isinstance(network, str) else network
    if profile is None:
        raise ValueError(f"network={network!r} is unknown: choose one of {', '.join(PROFILES)}")
    simulation = Simulation(profile, seed=seed, samples_per_s=samples_per_s)
    for index in range(peers):
        simulation.join(NAMES[index] if index < len(NAMES) else f"peer{index}")
    return simulation
