"""Train a small model while peers are killed, frozen and restarted: ``colab-swarm chaos``.

The peers are processes on this machine or simulated; one script of faults (`colab_swarm.sim.chaos`) serves both.
A process stays the same peer after a kill, by its folder. Faults of the network are simulated only: on a real one
they need the rights of an administrator.
"""

import queue
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
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
from colab_swarm.sim.chaos import (
    KILLS,
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

    def act(self, fault: ChaosFault) -> None:
        if (worker := self._crew.by_name.get(fault.peer)) is None:
            return
        if fault.kind == "freeze":
            worker.process.send_signal(signal.SIGCONT if fault.ends else signal.SIGSTOP)
        else:
            del self._crew.by_name[fault.peer]
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
        def on_step(**step: Any) -> None:
            self._meter.on_step(self.now(), swarm.name, **step)

        try:
            train(swarm, len(self._meter.peers), on_step, lambda: None)
        except Exception as error:  # of any kind: the report names it
            self._meter.on_stop(self.now(), swarm.name, f"{swarm.name}: {error!r}")

    def start(self, name: str) -> None:
        if not self._simulation.network.is_up(name):
            self._simulation.join(name, at=self.now())

    def advance(self) -> None:
        over = self._simulation.advance(0.2)
        require(not over, f"no peer trains any more: {self._meter.errors}", SwarmError)

    def act(self, fault: ChaosFault) -> None:
        how = SLOWER ** (not fault.ends) if fault.kind == "slow" else fault.seconds
        if self._simulation.network.is_up(fault.peer) and (fault.kind == "slow" or not fault.ends):
            arguments = ("crash", fault.peer) if fault.kind in KILLS else (fault.kind, fault.peer, how)
            self._simulation.fire(*arguments)


def plan(
    peers: int, script: str | None, mean_s: float, kinds: str, *, minutes: float, seed: int
) -> tuple[list[str], list[ChaosFault]]:
    """Return the peers' names, and the faults of the file ``script`` or random ones; ValueError if unusable."""
    names, until_s = [nth_name(index) for index in range(peers)], 60 * minutes - SETTLE_S
    if script is not None:
        return names, read_script(Path(script).read_text(encoding="utf-8"), names)
    rng = random.Random(seed)
    return names, random_faults(names, until_s=until_s, mean_s=mean_s, kinds=kinds.split(","), rng=rng)


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
    faults: Sequence[ChaosFault],
    limit_s: float,
    tell: Callable[[str], object],
) -> None:
    began, coming = stage.now(), list(faults)
    while (now := stage.now() - began) < limit_s:
        for fault in [one for one in coming if (meter.step if one.by_step else now) >= one.at]:
            coming.remove(fault)
            if not fault.ends:
                coming.append(replace(fault, at=now + fault.seconds, by_step=False, ends=True))
            tell(f"{now:6.1f} s  step {meter.step}  {'end of ' * fault.ends}{fault.kind} {fault.peer}")
            meter.pass_time(at := stage.now())
            meter.faults += not fault.ends
            if fault.kind in ("freeze", "cut"):
                meter.disturbed ^= {fault.peer}
            if fault.kind not in KILLS:
                stage.act(fault)
            elif fault.ends:
                meter.on_start(at, fault.peer)
                stage.start(fault.peer)
            else:
                stage.act(fault)
                meter.on_stop(at, fault.peer)
        stage.advance()
