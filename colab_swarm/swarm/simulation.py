"""`simulate`: many peers in this process, on virtual time, with a network of your choice.

The peers are ordinary `Swarm` objects and run the same code as on the internet. Only the links, the
clock and the compute time are simulated. `Simulation.run` runs to the end without a display;
`Simulation.play` shows the run live:

    lesson = cs.simulate(4).play(train)              # with sliders and a kill button
    lesson.inject("crash", "bob")                    # the same from code
    lesson.wait()
"""

import asyncio
import itertools
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

from colab_swarm.errors import JoinError, require
from colab_swarm.events import BatchDropped, Event, EventLog, Fault, RoundFinished, StateReceived
from colab_swarm.mailbox.bucket import MEMORY, MemoryStore
from colab_swarm.net.peers import end_tasks
from colab_swarm.notebook import lessons
from colab_swarm.notebook.lessons import SimulationSnapshot
from colab_swarm.notebook.panel import Panel
from colab_swarm.notebook.platforms import has_frontend
from colab_swarm.runtime import POLL_S, on_loop
from colab_swarm.sim.network import SimNetwork
from colab_swarm.sim.profiles import PROFILES, NetworkProfile
from colab_swarm.sim.runtime import SimRuntime
from colab_swarm.snapshot import PeerRow, describe
from colab_swarm.swarm.network import assemble, find_others
from colab_swarm.swarm.swarm import Swarm

T = TypeVar("T")
RUN_ID = "simulation-0"
NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")
_SLICE_S = 0.5  # virtual time after which the user's injected actions are applied
LOOK_S = 0.25  # real time between two snapshots
MAX_ENTRIES = 4  # how many peers a new peer contacts to join the DHT


class Simulation(AbstractContextManager["Simulation"]):
    """A simulated run. ``network.at(12.0).crash("bob")`` scripts a fault; `run` and `play` start it."""

    def __init__(
        self, profile: NetworkProfile, *, seed: int, samples_per_s: float, mailbox: bool = False
    ) -> None:
        self._runtime = SimRuntime()
        self._seed = seed
        self._samples_per_s = samples_per_s
        self._names: list[str] = []  # of all peers that ever joined
        self._speeds: dict[str, float] = {}
        self._train: Callable[[Swarm], object] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._later: set[asyncio.Task[None]] = set()
        self._crashed: dict[str, PeerRow] = {}  # the last state of each crashed peer
        self._arriving: set[str] = set()  # peers that are joining now
        self._story: deque[str] = deque(maxlen=1000)
        self._told_step = -1  # last step in the log of the run
        self._lesson: InteractiveRun | None = None
        self._mailbox = f"memory://{id(self):x}" if mailbox else ""
        self.bucket = MemoryStore(lambda: self.time)  # stores the mailbox
        MEMORY[self._mailbox] = self.bucket
        self.results: dict[str, object] = {}
        self.swarms: dict[str, Swarm] = {}
        self.network = self._runtime.call(on_loop(lambda: SimNetwork(profile, seed=seed)))
        self.network.on_fault = lambda fault: self.tell(lessons.describe_fault(fault.name, fault.arguments))

    @property
    def time(self) -> float:
        """Virtual seconds since the simulation began."""
        return self._runtime.loop.time()

    def join(
        self,
        name: str,
        *,
        at: float = 0.0,
        samples_per_s: float | None = None,
        listen: bool = True,
    ) -> None:
        """Add a peer: now, or at virtual second ``at`` after `run` or `play` has begun.

        The ``name`` of a crashed peer starts a new process of that peer. ``samples_per_s`` is its
        training speed; None: the speed of the other peers. ``listen=False``: it cannot be dialled.
        """
        is_online = name in self.swarms or name in self._arriving
        text = f"{name} is already online: use another name, or crash it first"
        require(at > self.time or not is_online, text)
        if samples_per_s is not None:
            self._speeds[name] = samples_per_s
        if at <= self.time:
            self._arriving.add(name)
        if self._train is None and at <= self.time:
            self._runtime.call(self._join(name, listen))
        else:
            self._later.add(self._runtime.loop.create_task(self._join(name, listen, at=at)))

    async def _join(self, name: str, listen: bool = True, *, at: float = 0.0) -> None:
        if at > self.time:
            await asyncio.sleep(at - self.time)
        self._arriving.add(name)
        try:
            peers = self.network.peer(name, listen=listen)
            self.results.pop(name, None)
            self._crashed.pop(name, None)
            if name not in self._names:
                self._names.append(name)
            contacts = [swarm.services.peers.contact for swarm in self.swarms.values()]
            entries = [contact for contact in contacts if contact.addresses][:MAX_ENTRIES]
            services = assemble(
                peers,
                RUN_ID,
                EventLog(),
                random.Random(f"{name} {self._seed}"),
                mailbox=self._mailbox,
                pace=lambda samples: samples / self.speed_of(name) + self.network.frozen_s(name),
            )
            try:
                await find_others(services, entries)
            except BaseException:
                # the name must be free for the next try, also after a cancellation
                services.dht.kill()
                peers.kill(f"{name} could not join")
                raise
            self.swarms[name] = Swarm(self._runtime, services, RUN_ID, name, None)
        finally:
            self._arriving.discard(name)
        peers.when_down(lambda: self._on_crash(name))
        self.swarms[name].events.listen(partial(self._on_event, name))
        if self._train is not None:
            self.tell(f"{name} has joined")
            self._start(name)

    def _on_crash(self, name: str) -> None:
        if name in self._tasks:
            self._tasks.pop(name).cancel()
        self._crashed[name] = replace(self._peer(name), role="crashed", samples=0.0)
        self.swarms.pop(name).kill()

    def new_name(self) -> str:
        """Return the first name that no peer has had."""
        return next(name for name in map(_nth_name, itertools.count()) if name not in self._names)

    def speed_of(self, name: str) -> float:
        return self._speeds.get(name, self._samples_per_s)

    def tell(self, words: str) -> None:
        self._story.append(f"{self.time:6.1f} s  {words}")

    def _on_event(self, name: str, event: Event) -> None:
        if isinstance(event, RoundFinished):
            # another peer has reported this step
            if event.step <= self._told_step:
                return
            self._told_step = event.step
        if isinstance(event, BatchDropped) and not event.told:
            return
        if isinstance(event, RoundFinished | StateReceived | BatchDropped | Fault):
            self.tell(f"{name}: {describe(event).partition(';')[0]}")

    def run(self, train: Callable[[Swarm], T], *, seconds: float | None = None) -> dict[str, T]:
        """Run ``train(swarm)`` for every peer on virtual time; return each peer's result by the peer's name.

        ``train`` is ordinary blocking code, as in a notebook cell. The run stops after ``seconds`` of
        virtual time, or when all peers have finished.
        """
        self._stop_lesson()
        self.begin(train)
        try:
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
        live: bool | None = None,
    ) -> "InteractiveRun":
        """Run ``train(swarm)`` for every peer in the background and show it, with controls.

        ``speed`` is in virtual seconds per second; ``train`` and ``seconds`` are as for `run`.
        Without a notebook's page, or with ``live=False``, the run goes to its end and prints its log.
        """
        text = f"speed={speed}, seconds={seconds}: both must be above 0"
        require(speed > 0 and (seconds is None or seconds > 0), text)
        if InteractiveRun.running is not None:
            InteractiveRun.running.close()
        lesson = InteractiveRun(self, math.inf if seconds is None else self.time + seconds, speed)
        if live is None:
            live = has_frontend()
        if live:
            self.begin(train)
            lesson.start()
            self._lesson = lesson
        else:
            self._story.clear()
            try:
                self.run(train, seconds=seconds)
            finally:
                print(*self._story, sep="\n")
                lesson.end("finished")
        return lesson

    def _stop_lesson(self) -> None:
        if self._lesson is not None:
            self._lesson.close()
            self._lesson = None

    def begin(self, train: Callable[[Swarm], object]) -> None:
        self._train = train
        self.results = {}
        self._told_step = -1
        for name in self.swarms:
            self._start(name)

    def advance(self, seconds: float | None = None) -> bool:
        """Advance virtual time; return True if all peers finished. Raises a peer's exception."""
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
        """Make a fault happen now, as ``network.now()`` does; call this only while virtual time stands still."""
        self._runtime.call(on_loop(partial(self.network.fire, name, *arguments)))

    def end(self) -> None:
        self._runtime.call(self._stop_all())
        self._train = None

    async def _stop_all(self) -> None:
        await end_tasks(*self._tasks.values(), *self._later)
        self._tasks.clear()
        self._later.clear()
        self._arriving.clear()

    def _start(self, name: str) -> None:
        self._tasks[name] = self._runtime.loop.create_task(self._work(name), name=name)

    async def _work(self, name: str) -> None:
        train = self._train
        swarm = self.swarms[name]
        assert train is not None
        self.results[name] = await self._runtime.run_thread(lambda: train(swarm), name)
        self._tasks.pop(name, None)
        self.tell(f"{name} has finished")

    def close(self) -> None:
        MEMORY.pop(self._mailbox, None)
        self._stop_lesson()
        self._runtime.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def snapshot(self) -> SimulationSnapshot:
        """Return what the panel shows. While virtual time passes, use `InteractiveRun.snapshot` instead."""
        peers = tuple(map(self._peer, self._names))
        coming = tuple(
            f"{fault.at:.0f} s: {lessons.describe_fault(fault.name, fault.arguments)}"
            for fault in sorted(self.network.coming, key=lambda fault: fault.at)
        )
        return SimulationSnapshot(self.time, str(self.network), peers, tuple(self._story), coming)

    def _peer(self, name: str) -> PeerRow:
        speed = self.speed_of(name)
        if name not in self.swarms:
            state = "joining" if self.network.is_up(name) else "crashed"
            waiting = PeerRow(name, "", state, 0, 0.0, 0.0, None, me=False, compute_samples_per_s=speed)
            return self._crashed.get(name, waiting)
        snapshot = self.swarms[name].snapshot()
        row = next(peer for peer in snapshot.peers if peer.me)
        loss = snapshot.loss_history[-1][1] if snapshot.loss_history else None
        state = snapshot.state
        if name in self.results:
            state = "finished"
        elif row.role == "catching up":
            state = row.role
        return replace(row, name=name, role=state, compute_samples_per_s=speed, loss=loss)

    def __repr__(self) -> str:
        return f"Simulation({len(self.swarms)} peers on {self.network.profile.name}, {self.time:.1f} s)"

    def _repr_html_(self) -> str:
        shown = self if self._lesson is None else self._lesson
        return lessons.draw(shown.snapshot()).html()


class InteractiveRun:
    """A running simulation, made by `Simulation.play`. A new one stops the earlier one.

    Injected actions are applied every half second of virtual time. You can change ``speed``, in virtual seconds per
    second, at any time.
    """

    running: "ClassVar[InteractiveRun | None]" = None

    def __init__(self, simulation: Simulation, until: float, speed: float) -> None:
        self._simulation = simulation
        self._until = until
        self.speed = speed
        self._injected: deque[tuple[lessons.Verb, tuple[Any, ...]]] = deque()
        self._paused = False
        self._single_steps = 0
        self._stopping = False
        self._end = ""  # the final state
        self._error: Exception | None = None
        self._wake = threading.Event()
        self._over = threading.Event()
        self._panel: Panel[SimulationSnapshot] | None = None
        self._look()

    def start(self) -> None:
        choose_speed = partial(setattr, self, "speed")
        controls = lessons.LessonControls(self.snapshot(), self.inject, self.step, choose_speed)
        self._panel = Panel(
            lambda: controls.update(self.snapshot()),
            self.close,
            views=lessons.LESSON,
            pause=self.pause,
            controls=lambda: controls.rows,
            live=True,
        )
        InteractiveRun.running = self
        threading.Thread(target=self._run, name="colab-swarm-lesson", daemon=True).start()

    def end(self, state: str) -> None:
        try:
            self._look()
        finally:
            self._end = state
            self._over.set()

    def inject(self, verb: lessons.Verb, *arguments: str | float) -> None:
        """Change the simulation, such as ``inject("crash", "bob")``. Thread-safe.

        Verbs, with their arguments: ``join`` (a peer's name; without it, a new peer), ``crash`` (a peer), ``speed``
        (a peer, samples per second), ``slow`` (a peer, how many times slower its connection becomes), ``latency``
        (factor), ``bandwidth`` (factor), ``lose`` (fraction of the messages).
        """
        self._injected.append((verb, arguments))
        self._wake.set()

    def pause(self, paused: bool = True) -> None:
        self._paused = paused
        self._wake.set()

    def step(self) -> None:
        """While paused, advance one virtual second."""
        self._single_steps += round(1 / _SLICE_S)
        self._wake.set()

    def close(self) -> None:
        self._stopping = True
        self._wake.set()
        while not self._over.wait(POLL_S):
            pass

    def wait(self) -> dict[str, object]:
        """Update the view until the end, then return the results or raise the error. An interrupt ends the waiting."""
        self.pause(False)
        over = False
        while not over:
            over = self._over.wait(LOOK_S)
            if self._panel is not None:
                self._panel.refresh()
        if self._error is not None:
            raise self._error
        return dict(self._simulation.results)

    def snapshot(self) -> SimulationSnapshot:
        state = self._end or ("paused" if self._paused else "playing")
        error = "" if self._error is None else f"{type(self._error).__name__}: {self._error}"
        return replace(self._seen, state=state, speed=self.speed, error=error)

    def __repr__(self) -> str:
        return f"Lesson({lessons.draw(self.snapshot()).line})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if self._panel is None:
            return lessons.draw(self.snapshot()).bundle()
        return self._panel._repr_mimebundle_()

    def _run(self) -> None:
        state = "failed"
        try:
            state = self._pass_time()
        except Exception as error:
            # the user's code failed: the panel shows the error, and `wait` raises it
            self._error = error
        finally:
            try:
                self._simulation.end()
            finally:
                self.end(state)

    def _pass_time(self) -> str:
        """Pass slices of virtual time until the run ends or is stopped; return the final state."""
        simulation = self._simulation
        # a run is idle if every peer has finished or crashed; it waits for an action of the user
        idle = False
        while not self._stopping:
            began = time.monotonic()
            wait_s: float | None = None
            look_s = 0.0
            while self._injected:
                self._act(*self._injected.popleft())
                idle = False
            if idle and simulation.swarms:
                return "finished"
            if not idle and (self._single_steps or not self._paused):
                self._single_steps = max(0, self._single_steps - 1)
                idle = self._pass_slice()
                if simulation.time > self._until - 1e-6:
                    return "finished"
                wait_s = max(0.0, began + _SLICE_S / max(self.speed, 0.01) - time.monotonic())
                look_s = LOOK_S
            if time.monotonic() - self._looked_at >= look_s:
                self._look()
            self._wake.wait(wait_s)
            self._wake.clear()
        return "stopped"

    def _pass_slice(self) -> bool:
        try:
            return self._simulation.advance(min(_SLICE_S, self._until - self._simulation.time))
        except JoinError as error:
            self._simulation.tell(f"a late joiner could not join: {error}")
            return False

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        self._seen = self._simulation.snapshot()

    def _act(self, verb: lessons.Verb, arguments: tuple[Any, ...]) -> None:
        simulation = self._simulation
        # the fraction of lost messages is at least 0 and below 1; all other numbers are above 0
        low, high = (-1e-9, 1.0) if verb == "lose" else (0.0, math.inf)
        try:
            for argument in arguments:
                in_range = isinstance(argument, str) or low < argument < high
                require(in_range, "a number is out of range")
            match verb, *arguments:
                case ("join",):
                    simulation.join(simulation.new_name(), at=simulation.time)
                case "join", str(name):
                    simulation.join(name, at=simulation.time)
                case "speed", str(name), float() | int() as samples_per_s if name in simulation._names:
                    simulation._speeds[name] = samples_per_s
                case ("crash", name) | ("slow", name, float() | int()) if name in simulation.swarms:
                    simulation.fire(verb, *arguments)
                case (("latency" | "bandwidth" | "lose"), float() | int()):
                    simulation.fire(verb, *arguments)
                case _:
                    raise ValueError("there is no such action, or no such peer is online")
        except (ValueError, TypeError) as error:
            simulation.tell(f"{verb} {' '.join(map(str, arguments))}: not possible, {error}")


def simulate(
    peers: int = 4,
    *,
    network: str | NetworkProfile = "home",
    seed: int = 0,
    samples_per_s: float = 10.0,
    mailbox: bool = False,
) -> Simulation:
    """Start a simulated run of peers called alice, bob, carol, …; the same ``seed`` gives the same run.

    ``network`` is lan, home, dedloc16, paper_cloud, or your own `NetworkProfile`; ``samples_per_s`` is per peer.
    ``mailbox``: rounds go through a bucket in memory, as with ``create(…, mailbox=…)``.
    """
    require(isinstance(peers, int) and peers >= 1, f"peers={peers!r}: pass a whole number, at least one")
    if isinstance(network, str):
        require(network in PROFILES, f"network={network!r} is unknown: choose one of {', '.join(PROFILES)}")
        network = PROFILES[network]
    simulation = Simulation(network, seed=seed, samples_per_s=samples_per_s, mailbox=mailbox)
    for index in range(peers):
        simulation.join(_nth_name(index))
    return simulation


def _nth_name(index: int) -> str:
    return NAMES[index] if index < len(NAMES) else f"peer{index}"
