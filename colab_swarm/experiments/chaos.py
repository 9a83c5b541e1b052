"""Train a small model at simulated peers that crash, freeze, restart and lose their links, and measure the training.

The faults are random or from a script: see `colab_swarm.sim.chaos`.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import colab_swarm as cs
from colab_swarm.errors import SwarmError, require
from colab_swarm.notebook.lessons import describe_fault
from colab_swarm.sim import ScriptedFault
from colab_swarm.swarm.simulation import Simulation, simulate
from colab_swarm.swarm.swarm import Swarm

# samples and seconds of a micro-batch, and of a step if all peers train
BATCH = 16
BATCH_S = 0.1
STEP_S = 1.2
START_S = 120.0  # virtual time limit for the first step of all peers
SETTLE_S = 20.0  # time at the end without random faults; forks that last longer are reported


class ChaosMeter:
    """Measures a training by the events of its peers, which must be reported in the order of time, in seconds."""

    def __init__(self, peers: Iterable[str]) -> None:
        self.peers = tuple(peers)
        self.step = 0
        self.faults = 0
        self.training: set[str] = set()  # peers that have taken a step since they were started
        self.disturbed_until: dict[str, float] = {}  # when the freeze or the cut of a peer ends
        self.errors: list[str] = []
        self._restarts_s: list[float] = []  # times from a start to the first step
        self._lineages: dict[str, dict[int, str]] = {peer: {} for peer in self.peers}
        self._started_at: dict[str, float] = {}  # of started peers that do not train yet
        self._stepped_at = dict.fromkeys(self.peers, -math.inf)
        self._began = self._at = self._waited_s = self._longest_s = self._available_s = 0.0
        self._undisturbed = 0.0
        self._first = 0

    def begin(self, at: float) -> None:
        """Begin to measure; the steps before this give the undisturbed speed."""
        self._undisturbed = self._per_minute(at)
        self._first = self.step
        self._began = at
        self._at = at
        self._restarts_s = []
        self._waited_s = self._longest_s = self._available_s = 0.0

    def _per_minute(self, at: float) -> float:
        return 60 * (self.step - self._first) / max(at - self._began, 1e-9)

    def _pass_time(self, at: float) -> None:
        ends = {at, *(until for until in self.disturbed_until.values() if self._at < until < at)}
        for end in sorted(ends):
            well = sum(self.disturbed_until.get(peer, self._at) <= self._at for peer in self.training)
            self._available_s += well * (end - self._at)
            if well >= 2:
                self._waited_s += end - self._at
            self._longest_s = max(self._longest_s, self._waited_s)
            self._at = end

    def on_fault(self, at: float, fault: ScriptedFault) -> None:
        """Count a fault that is not a restart."""
        self._pass_time(at)
        match fault.name, *fault.arguments:
            case "crash", peer:
                self.on_stop(at, peer)
            case (("freeze" | "cut"), peer, seconds):
                self.disturbed_until[peer] = at + seconds
            case "slow", _, 1.0:
                return  # this is the end of a fault
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
        """Note that the peer took a step with the swarm, to ``step``."""
        self._pass_time(at)
        started_at = self._started_at.pop(peer, None)
        if started_at is not None:
            self._restarts_s.append(at - started_at)
        self.training.add(peer)
        self._lineages[peer][step] = lineage
        self._stepped_at[peer] = at
        if step > self.step:
            self.step = step
            self._waited_s = 0.0

    def report(self, at: float) -> dict[str, Any]:
        """Return the figures by name. A fork lasts if a peer still steps on a lineage that is not the leader's."""
        self._pass_time(at)
        taken = self._lineages
        starts = self._restarts_s
        lasted_s = max(at - self._began, 1e-9)
        last = {peer: max(taken[peer]) for peer in self.peers if self._stepped_at[peer] > at - SETTLE_S}
        if last:
            leader = taken[max(last, key=lambda peer: last[peer])]
        else:
            leader = {}
        forked = []
        for peer, step in last.items():
            lineage = taken[peer][step]
            if leader.get(step, lineage) != lineage:
                forked.append(peer)
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
            "forks that lasted": forked,
            "exceptions in a loop": self.errors,
        }


def train(swarm: Swarm, peers: int, on_step: Callable[..., object]) -> None:
    """Train a perceptron of 22,000 values to find the largest of 10 projections; the training does not end."""
    torch.manual_seed(0)  # all peers begin with equal parameters
    projections_IO = torch.randn(64, 10)
    model = nn.Sequential(nn.Linear(64, 292), nn.ReLU(), nn.Linear(292, 10))
    lamb = cs.Lamb(model.parameters(), lr=1e-2)
    batch = round(peers * BATCH * STEP_S / BATCH_S)
    optimizer = swarm.optimizer(lamb, target_batch_size=batch)
    chance = torch.Generator().manual_seed(swarm.id[0])
    while True:
        x_BI = torch.randn(BATCH, 64, generator=chance)
        loss = cross_entropy(model(x_BI), (x_BI @ projections_IO).argmax(1))
        loss.backward()  # type: ignore[no-untyped-call]
        if optimizer.step(samples=BATCH, loss=loss.item()) is not None:
            on_step(step=optimizer.global_step, lineage=optimizer.lineage.hex())


def chaos(
    peers: Sequence[str],
    faults: Sequence[ScriptedFault],
    *,
    minutes: float,
    baseline_s: float = 60.0,
    seed: int = 0,
    tell: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Train undisturbed for ``baseline_s``, then under ``faults`` for ``minutes``; return the figures by name.

    Time is virtual, the connections are those of homes, and a run depends only on ``seed``. ``tell`` gets a line for
    each fault.
    Raises `SwarmError` if the peers do not begin to train.
    """
    meter = ChaosMeter(peers)
    with simulate(1, seed=seed, samples_per_s=BATCH / BATCH_S) as simulation:

        def work(swarm: Swarm) -> None:
            try:
                train(swarm, len(peers), lambda **step: meter.on_step(simulation.time, swarm.name, **step))
            except Exception as error:  # errors of any kind; the report names the error
                meter.on_stop(simulation.time, swarm.name, f"{swarm.name}: {error!r}")

        simulation.begin(work)
        for peer in peers:
            _start(simulation, peer)
        until = simulation.time + START_S
        while len(meter.training) < len(peers):
            require(simulation.time < until, f"only {sorted(meter.training)} train", SwarmError)
            _advance(simulation, meter)
        for limit_s, script in (baseline_s, ()), (60 * minutes, faults):
            meter.begin(simulation.time)
            _play(simulation, meter, script, limit_s, tell)
        return meter.report(simulation.time)


def _start(simulation: Simulation, peer: str) -> None:
    if not simulation.network.is_up(peer):
        simulation.join(peer, at=simulation.time)


def _advance(simulation: Simulation, meter: ChaosMeter) -> None:
    over = simulation.advance(0.2)
    require(not over, f"no peer trains any more: {meter.errors}", SwarmError)


def _play(
    simulation: Simulation,
    meter: ChaosMeter,
    faults: Sequence[ScriptedFault],
    limit_s: float,
    tell: Callable[[str], object],
) -> None:
    began = simulation.time
    coming = deque(faults)
    while (now := simulation.time - began) < limit_s:
        while coming and coming[0].at <= now:
            fault = coming.popleft()
            tell(f"{now:6.1f} s  step {meter.step}  {describe_fault(fault.name, fault.arguments)}")
            if fault.name == "restart":
                meter.on_start(simulation.time, *fault.arguments)
                _start(simulation, *fault.arguments)
            else:
                if simulation.network.is_up(fault.arguments[0]):
                    simulation.fire(fault.name, *fault.arguments)
                meter.on_fault(simulation.time, fault)
        _advance(simulation, meter)
