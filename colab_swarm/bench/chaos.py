"""Train a small model while peers are killed, frozen and restarted: ``colab-swarm chaos``.

The peers are processes on this machine or simulated; one script of faults (`colab_swarm.sim.chaos`) serves both.
A process stays the same peer after a kill, by its folder. Faults of the network are simulated only: on a real one
they need the rights of an administrator.
"""

import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import colab_swarm as cs
from colab_swarm.bench.harness import Channel, Crew, Worker
from colab_swarm.errors import JoinError, SwarmError, require
from colab_swarm.sim.chaos import (
    LASTS_S,
    SETTLE_S,
    SLOWER,
    ChaosFault,
    ChaosMeter,
    random_faults,
    read_script,
)
from colab_swarm.swarm.simulation import nth_name, simulate
from colab_swarm.swarm.swarm import Swarm

BATCH, BATCH_S, STEP_S = 16, 0.1, 1.2  # samples and seconds of a micro-batch; of a step if all peers train
START_S = 120.0  # time limit for the first step of all peers
REAL = ("kill", "freeze", "restart")


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
    """Be one peer, in a process; ``invite`` is empty for the one that creates the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    enter: Callable[..., Swarm] = partial(cs.join, invite) if invite else partial(cs.create, "chaos")
    own, options, swarm = Path(folder) / name, cs.NetworkOptions(lan=False), None
    while swarm is None:
        with suppress(JoinError):  # a person would try again, too
            swarm = enter(peer_name=name, state_dir=own, options=options)
    parent.send(invite=str(swarm.invite()))
    train(swarm, peers, parent.send, partial(time.sleep, BATCH_S))


class Processes(ExitStack):
    """Peers that are processes of this machine; ``meter`` gets what they report."""

    def __init__(self, meter: ChaosMeter) -> None:
        super().__init__()
        self.meter, self.now = meter, time.monotonic
        self._folder, self._crew = self.enter_context(TemporaryDirectory()), self.enter_context(Crew())
        self._alive: dict[str, Worker] = {}
        self._messages: queue.Queue[tuple[str, Worker, dict[str, Any]]] = queue.Queue()
        self._invite = ""

    def start(self, name: str) -> None:
        _, *others = self.meter.peers
        while not self._invite and name in others:
            self.advance()
        invite = self._invite if name in others else ""
        self._alive[name] = worker = self._crew.start(be_peer, self._folder, name, invite, 1 + len(others))
        threading.Thread(target=self._read, args=(name, worker), daemon=True).start()

    def _read(self, name: str, worker: Worker) -> None:
        with suppress(EOFError, ValueError):  # it ended, or is closed
            while True:
                self._messages.put((name, worker, worker.receive()))
        self._messages.put((name, worker, {}))

    def advance(self) -> None:
        """Take what the next message says, or wait a moment."""
        with suppress(queue.Empty):
            name, worker, message = self._messages.get(timeout=0.05)
            if self._alive.get(name) is not worker:
                return  # sent before it was killed
            if "step" in message:
                self.meter.on_step(self.now(), name, **message)
            elif not message:
                del self._alive[name]
                self.meter.on_stop(self.now(), name)
                self.meter.errors.append(f"{name} ended: see its error above")
            self._invite = self._invite or message.get("invite", "")

    def act(self, fault: ChaosFault, *, ends: bool) -> None:
        if fault.kind == "freeze" and fault.peer in self._alive:
            self._alive[fault.peer].process.send_signal(signal.SIGCONT if ends else signal.SIGSTOP)
        elif fault.peer in self._alive:
            process = self._alive.pop(fault.peer).process
            process.kill()
            process.wait()


class Simulated(ExitStack):
    """Peers in virtual time, on home connections."""

    def __init__(self, meter: ChaosMeter, seed: int) -> None:
        super().__init__()
        self.meter = meter
        self.simulation = self.enter_context(simulate(1, seed=seed, samples_per_s=BATCH / BATCH_S))
        self.simulation.begin(self._train)

    def now(self) -> float:
        return self.simulation.time

    def _train(self, swarm: Swarm) -> None:
        def on_step(**step: Any) -> None:
            self.meter.on_step(self.now(), swarm.name, **step)

        try:
            train(swarm, len(self.meter.peers), on_step, lambda: None)
        except Exception as error:
            self.meter.on_stop(self.now(), swarm.name)
            self.meter.errors.append(f"{swarm.name}: {error!r}")

    def start(self, name: str) -> None:
        if not self.simulation.network.is_up(name):
            self.simulation.join(name, at=self.now())

    def advance(self) -> None:
        require(not self.simulation.advance(0.2), f"no peer trains any more: {self.meter.errors}", SwarmError)

    def act(self, fault: ChaosFault, *, ends: bool) -> None:
        if not self.simulation.network.is_up(fault.peer):
            return
        if fault.kind in ("kill", "restart"):
            self.simulation.fire("crash", fault.peer)
        elif fault.kind == "slow":
            self.simulation.fire("slow", fault.peer, 1.0 if ends else SLOWER)
        elif not ends:
            self.simulation.fire(fault.kind, fault.peer, fault.seconds)


def plan(
    peers: int, script: str | None, mean_s: float, kinds: str, *, minutes: float, seed: int
) -> tuple[list[str], list[ChaosFault]]:
    """Return the peers' names, and the faults of the file ``script`` or random ones; ValueError if unusable."""
    names, until_s = [nth_name(index) for index in range(peers)], 60 * minutes - SETTLE_S
    if script is not None:
        return names, read_script(Path(script).read_text(encoding="utf-8"), names)
    chosen, rng = kinds.split(","), random.Random(seed)
    require(set(chosen) <= LASTS_S.keys() and mean_s > 0, f"kinds={kinds}: choose of {', '.join(LASTS_S)}")
    return names, random_faults(names, until_s=until_s, mean_s=mean_s, kinds=chosen, rng=rng)


def chaos(
    peers: Sequence[str],
    faults: Sequence[ChaosFault],
    *,
    minutes: float,
    baseline_s: float = 60.0,
    simulated: bool = False,
    seed: int = 0,
    tell: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Train undisturbed for ``baseline_s``, then under ``faults`` for ``minutes``; return the figures.

    ``tell`` gets a line for each fault as it begins or ends. ``simulated`` peers run in virtual time, with ``seed``.
    A ValueError for faults of the network on real peers, a `SwarmError` if these do not begin to train.
    """
    if other := {fault.kind for fault in faults}.difference(LASTS_S if simulated else REAL):
        raise ValueError(f"{other} can only be simulated (--simulate), of {', '.join(LASTS_S)}")
    meter = ChaosMeter(peers)
    with Simulated(meter, seed) if simulated else Processes(meter) as stage:
        for peer in peers:
            stage.start(peer)
        _play(stage, (), START_S, tell, lambda: len(meter.training) == len(peers))
        require(len(meter.training) == len(peers), f"only {sorted(meter.training)} train", SwarmError)
        for limit_s, script in (baseline_s, ()), (60 * minutes, faults):
            meter.begin(stage.now())
            _play(stage, script, limit_s, tell)
        return meter.report(stage.now())


def _play(
    stage: Processes | Simulated,
    faults: Sequence[ChaosFault],
    limit_s: float,
    tell: Callable[[str], object],
    over: Callable[[], bool] = lambda: False,
) -> None:
    began, meter, coming, ending = stage.now(), stage.meter, list(faults), list[tuple[float, ChaosFault]]()
    while (now := stage.now() - began) < limit_s and not over():
        begin = [one for one in coming if (meter.step if one.by_step else now) >= one.at]
        end = [one for ends_at, one in ending if ends_at <= now]
        for fault, ends in [(one, False) for one in begin] + [(one, True) for one in end]:
            tell(f"{now:6.1f} s  step {meter.step}  {'end of ' * ends}{fault.kind} {fault.peer}")
            _change(stage, fault, ends=ends)
        coming = [one for one in coming if one not in begin]
        ending = [one for one in ending if one[1] not in end] + [(now + one.seconds, one) for one in begin]
        stage.advance()


def _change(stage: Processes | Simulated, fault: ChaosFault, *, ends: bool) -> None:
    meter, now = stage.meter, stage.now()
    meter.pass_time(now)
    meter.faults += not ends
    if fault.kind in ("freeze", "cut"):
        meter.disturbed ^= {fault.peer}
    if ends and fault.kind in ("kill", "restart"):
        meter.on_start(now, fault.peer)
        stage.start(fault.peer)
    else:
        stage.act(fault, ends=ends)
        if fault.kind in ("kill", "restart"):
            meter.on_stop(now, fault.peer)
