"""Train a small model while peers are killed, frozen and restarted: ``colab-swarm chaos``.

The peers are processes on this machine or simulated; one script of faults (`colab_swarm.sim.chaos`)
serves both. A process stays the same peer after a kill, by its folder. Faults of the network are
simulated only: on a real one they need the rights of an administrator.
"""

import math
import queue
import random
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import colab_swarm as cs
from colab_swarm.bench.harness import Channel, Crew
from colab_swarm.errors import JoinError, SwarmError, require
from colab_swarm.notebook.lessons import describe_fault
from colab_swarm.sim import ScriptedFault
from colab_swarm.sim.chaos import random_faults, read_script
from colab_swarm.swarm.simulation import nth_name, simulate
from colab_swarm.swarm.swarm import Swarm

BATCH, BATCH_S, STEP_S = 16, 0.1, 1.2  # samples and seconds of a micro-batch; of a step if all peers train
START_S = 120.0  # time limit for the first step of all peers
SETTLE_S = 20.0  # without random faults, at the end: forks that last longer count
REAL = {"crash", "restart", "freeze"}  # what processes suffer


class ChaosMeter:
    """Measures a training by what happens to its peers, at rising times in seconds."""

    def __init__(self, peers: Iterable[str]) -> None:
        self.peers, self.step, self.faults = tuple(peers), 0, 0
        self.training: set[str] = set()  # they have taken a step since they were started
        self.disturbed_until: dict[str, float] = {}  # by a freeze or a cut
        self.errors: list[str] = []
        self._restarts_s: list[float] = []  # from a start to the first step
        self._lineages: dict[str, dict[int, str]] = {peer: {} for peer in self.peers}
        self._started_at: dict[str, float] = {}  # of started peers that do not train yet
        self._stepped_at = dict.fromkeys(self.peers, -math.inf)
        self._began = self._at = self._waited_s = self._longest_s = self._available_s = 0.0
        self._undisturbed, self._first = 0.0, 0

    def begin(self, at: float) -> None:
        """Start to measure; earlier steps give the undisturbed speed."""
        self._undisturbed = self._per_minute(at)
        self._first, self._began, self._at, self._restarts_s = self.step, at, at, []
        self._waited_s = self._longest_s = self._available_s = 0.0

    def _per_minute(self, at: float) -> float:
        return 60 * (self.step - self._first) / max(at - self._began, 1e-9)

    def _pass_time(self, at: float) -> None:
        ends = {at, *(until for until in self.disturbed_until.values() if self._at < until < at)}
        for end in sorted(ends):
            well = sum(self.disturbed_until.get(peer, self._at) <= self._at for peer in self.training)
            self._available_s += well * (end - self._at)
            self._waited_s += (end - self._at) * (well >= 2)
            self._longest_s, self._at = max(self._longest_s, self._waited_s), end

    def on_fault(self, at: float, fault: ScriptedFault) -> None:
        """Count a fault other than a restart."""
        self._pass_time(at)
        match fault.name, *fault.arguments:
            case "crash", peer:
                self.on_stop(at, peer)
            case (("freeze" | "cut"), peer, seconds):
                self.disturbed_until[peer] = at + seconds
            case "slow", _, 1.0:
                return  # the end of one
        self.faults += 1

    def on_start(self, at: float, peer: str) -> None:
        if peer not in self.training:
            self._started_at[peer] = at

    def on_stop(self, at: float, peer: str, *errors: str) -> None:
        self._pass_time(at)
        self.errors += errors
        self.training.discard(peer)
        self._started_at.pop(peer, None)

    def on_step(self, at: float, peer: str, step: int, lineage: str) -> None:
        """The peer took a step with the swarm, to ``step``."""
        self._pass_time(at)
        if (started_at := self._started_at.pop(peer, None)) is not None:
            self._restarts_s.append(at - started_at)
        self.training.add(peer)
        self._lineages[peer][step], self._stepped_at[peer] = lineage, at
        if step > self.step:
            self.step, self._waited_s = step, 0.0

    def report(self, at: float) -> dict[str, Any]:
        """Return the figures by name; a fork lasts if a peer still steps where the leader took another way."""
        self._pass_time(at)
        taken, starts, lasted_s = self._lineages, self._restarts_s, max(at - self._began, 1e-9)
        last = {peer: max(taken[peer]) for peer in self.peers if self._stepped_at[peer] > at - SETTLE_S}
        leader = taken[max(last, key=lambda peer: last[peer])] if last else {}
        return {
            "faults": self.faults,
            "steps": self.step - self._first,
            "steps a minute": self._per_minute(at),
            "undisturbed steps a minute": self._undisturbed,
            "part of the undisturbed steps": self._per_minute(at) / max(self._undisturbed, 1e-9),
            "part of the peers' time without a fault": self._available_s / lasted_s / len(self.peers),
            "longest wait for a step with two peers, s": self._longest_s,
            "restarts that trained again": len(starts),
            "restarts that did not": len(self._started_at),
            "median time until then, s": statistics.median(starts) if starts else None,
            "worst, s": max(starts, default=None),
            "forks that lasted": [
                peer for peer, at in last.items() if leader.get(at, taken[peer][at]) != taken[peer][at]
            ],
            "exceptions in a loop": self.errors,
        }


def train(swarm: Swarm, peers: int, on_step: Callable[..., object], pause: Callable[[], object]) -> None:
    """Train a perceptron of 22,000 values to tell which of 10 projections is largest; it does not end."""
    torch.manual_seed(0)  # all peers begin with equal parameters
    projections_IO = torch.randn(64, 10)
    model = nn.Sequential(nn.Linear(64, 292), nn.ReLU(), nn.Linear(292, 10))
    lamb, batch = cs.Lamb(model.parameters(), lr=1e-2), round(peers * BATCH * STEP_S / BATCH_S)
    optimizer = swarm.optimizer(lamb, target_batch_size=batch)
    chance = torch.Generator().manual_seed(swarm.id[0])
    while True:
        x_BI = torch.randn(BATCH, 64, generator=chance)
        loss = cross_entropy(model(x_BI), (x_BI @ projections_IO).argmax(1))
        loss.backward()  # type: ignore[no-untyped-call]
        pause()
        if optimizer.step(samples=BATCH, loss=loss.item()) is not None:
            on_step(step=optimizer.global_step, lineage=optimizer.lineage.hex())


def be_peer(parent: Channel, folder: str, name: str, invite: str, peers: int) -> None:
    """Be one peer, in a process; ``invite`` is empty for the creator of the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    enter: Callable[..., Swarm] = partial(cs.join, invite) if invite else partial(cs.create, "chaos")
    own, options, swarm = Path(folder) / name, cs.NetworkOptions(lan=False), None
    while swarm is None:
        with suppress(JoinError):  # a person would try again, too
            swarm = enter(peer_name=name, state_dir=own, options=options)
    parent.send(invite=str(swarm.invite()))
    train(swarm, peers, parent.send, partial(time.sleep, BATCH_S))


class Processes:
    """Peers that are processes of this machine, until the ``stack`` closes; ``meter`` gets their reports."""

    def __init__(self, meter: ChaosMeter, stack: ExitStack) -> None:
        self._folder = stack.enter_context(TemporaryDirectory())
        self._crew = stack.enter_context(Crew())
        self._meter, self._invite, self.now = meter, "", time.monotonic

    def start(self, name: str) -> None:
        if name in self._crew.by_name:
            return
        peers = self._meter.peers
        while not self._invite and name != peers[0]:
            self.advance()
        invite = "" if name == peers[0] else self._invite
        self._crew.start(be_peer, self._folder, name, invite, len(peers), name=name)

    def advance(self) -> None:
        """Process one worker message, waiting 50 ms at most."""
        with suppress(queue.Empty):
            name, worker, message = self._crew.messages.get(timeout=0.05)
            if self._crew.by_name.get(name) is not worker:
                return  # sent before it was killed
            if "step" in message:
                self._meter.on_step(self.now(), name, **message)
            elif not message:
                del self._crew.by_name[name]
                self._meter.on_stop(self.now(), name, f"{name} ended: see its error above")
            self._invite = self._invite or message.get("invite", "")

    def act(self, fault: ScriptedFault) -> None:
        match self._crew.by_name.get(fault.arguments[0]), fault.name, *fault.arguments:
            case None, *_:
                pass
            case worker, "freeze", _, seconds:
                worker.process.send_signal(signal.SIGSTOP)
                threading.Timer(seconds, worker.process.send_signal, (signal.SIGCONT,)).start()
            case worker, _, name:
                del self._crew.by_name[name]
                worker.process.kill()
                worker.process.wait()


class Simulated:
    """Peers in virtual time, on home connections."""

    def __init__(self, meter: ChaosMeter, stack: ExitStack, seed: int) -> None:
        self._meter = meter
        self._simulation = stack.enter_context(simulate(1, seed=seed, samples_per_s=BATCH / BATCH_S))
        self._simulation.begin(self._train)

    def now(self) -> float:
        return self._simulation.time

    def _train(self, swarm: Swarm) -> None:
        tell = partial(self._meter.on_step, peer=swarm.name)
        try:
            train(swarm, len(self._meter.peers), lambda **step: tell(self.now(), **step), lambda: None)
        except Exception as error:  # of any kind: the report names it
            self._meter.on_stop(self.now(), swarm.name, f"{swarm.name}: {error!r}")

    def start(self, name: str) -> None:
        if not self._simulation.network.is_up(name):
            self._simulation.join(name, at=self.now())

    def advance(self) -> None:
        over = self._simulation.advance(0.2)
        require(not over, f"no peer trains any more: {self._meter.errors}", SwarmError)

    def act(self, fault: ScriptedFault) -> None:
        if self._simulation.network.is_up(fault.arguments[0]):
            self._simulation.fire(fault.name, *fault.arguments)


def plan(
    peers: int, script: str | None, mean_s: float, kinds: str, *, minutes: float, seed: int
) -> tuple[list[str], list[ScriptedFault]]:
    """Return the peers' names, and the faults of the file ``script`` or random ones; ValueError if unusable."""
    names, until_s = [nth_name(index) for index in range(peers)], 60 * minutes - SETTLE_S
    if script is not None:
        return names, read_script(Path(script).read_text(encoding="utf-8"), names)
    rng = random.Random(seed)
    return names, random_faults(names, until_s=until_s, mean_s=mean_s, kinds=kinds.split(","), rng=rng)


def chaos(
    peers: Sequence[str],
    faults: Sequence[ScriptedFault],
    *,
    minutes: float,
    baseline_s: float = 60.0,
    simulated: bool = False,
    seed: int = 0,
    tell: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Train undisturbed for ``baseline_s``, then under ``faults`` for ``minutes``; return the figures.

    ``tell`` gets a line for each fault. ``simulated`` peers run in virtual time, with ``seed``.
    A ValueError for faults of the network on real peers, a `SwarmError` if these do not begin to train.
    """
    if not simulated and (other := {fault.name for fault in faults} - REAL):
        raise ValueError(f"{other} can only be simulated (--simulate)")
    meter = ChaosMeter(peers)
    with ExitStack() as stack:
        stage = Simulated(meter, stack, seed) if simulated else Processes(meter, stack)
        for peer in peers:
            stage.start(peer)
        until = stage.now() + START_S
        while len(meter.training) < len(peers):
            require(stage.now() < until, f"only {sorted(meter.training)} train", SwarmError)
            stage.advance()
        for limit_s, script in (baseline_s, ()), (60 * minutes, faults):
            meter.begin(stage.now())
            _play(stage, meter, script, limit_s, tell)
        return meter.report(stage.now())


def _play(
    stage: Processes | Simulated,
    meter: ChaosMeter,
    faults: Sequence[ScriptedFault],
    limit_s: float,
    tell: Callable[[str], object],
) -> None:
    began, coming = stage.now(), deque(faults)
    while (now := stage.now() - began) < limit_s:
        while coming and coming[0].at <= now:
            fault = coming.popleft()
            tell(f"{now:6.1f} s  step {meter.step}  {describe_fault(fault.name, fault.arguments)}")
            if fault.name == "restart":
                meter.on_start(stage.now(), *fault.arguments)
                stage.start(*fault.arguments)
            else:
                stage.act(fault)
                meter.on_fault(stage.now(), fault)
        stage.advance()
