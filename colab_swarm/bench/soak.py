"""Twenty virtual hours of a run whose volunteers come and go, simulated: does everybody keep training?

Ideal is what the peers online could have done without ever waiting: their samples, divided by the target batch.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from colab_swarm.bench.report import BenchReport
from colab_swarm.events import RoundFinished, StateReceived
from colab_swarm.sim.profiles import ChurnProfile
from colab_swarm.swarm.simulation import simulate
from colab_swarm.swarm.swarm import Swarm

SAMPLES_PER_S = 1.0
MICRO_BATCH = 20
CHURN = ChurnProfile(mean_session_s=4 * 3600.0, mean_absence_s=1800.0)
SEED = 1


@dataclass(frozen=True)
class SoakPlan:
    """Peers at the beginning, virtual hours, and seconds of a global step with everybody online."""

    peers: int
    hours: float
    step_s: float


FULL = SoakPlan(peers=16, hours=20.0, step_s=600.0)
QUICK = SoakPlan(peers=8, hours=2.0, step_s=300.0)


def _train(swarm: Swarm, target_batch_size: int) -> None:
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(64))]
    optimizer = swarm.optimizer(torch.optim.SGD(parameters, lr=0.1), target_batch_size=target_batch_size)
    while True:
        parameters[0].grad = torch.ones(64)
        optimizer.step(samples=MICRO_BATCH)


def _ideal_steps(plan: SoakPlan, names: list[str]) -> float:
    """Steps of a swarm that never waits, with the same comings and goings."""
    end_s = plan.hours * 3600
    online, since, peer_seconds = plan.peers, 0.0, 0.0
    for event in CHURN.events(names, until_s=end_s, rng=random.Random(f"churn {SEED}")):
        peer_seconds += online * (event.at - since)
        online, since = online + (1 if event.online else -1), event.at
    peer_seconds += online * (end_s - since)
    return peer_seconds * SAMPLES_PER_S / _target(plan)


def _target(plan: SoakPlan) -> int:
    return int(plan.peers * plan.step_s * SAMPLES_PER_S)


def run(quick: bool) -> BenchReport:
    """Simulate; see `SoakPlan` for the sizes."""
    plan, report, began = QUICK if quick else FULL, BenchReport("soak", quick), time.perf_counter()
    with simulate(plan.peers, network="home", seed=SEED, samples_per_s=SAMPLES_PER_S) as simulation:
        names = list(simulation.swarms)
        simulation.run(lambda swarm: _train(swarm, _target(plan)), seconds=plan.hours * 3600, churn=CHURN)
        steps = [swarm.snapshot().step for swarm in simulation.swarms.values()]
        events = [event for swarm in simulation.swarms.values() for event in swarm.events.recent()]
        crashes = sum(fault.name == "crash" for fault in simulation.network.fired)
    kept_local = sum(event.kept_local for event in events if isinstance(event, RoundFinished))
    what = f"{plan.peers} peers, {plan.hours:g} virtual hours, mean session 4 h, {crashes} crashes"
    report.add(
        "soak.step_share", max(steps) / _ideal_steps(plan, names), "", f"of the ideal step count; {what}"
    )
    report.add(
        "soak.stuck_peers", sum(step < max(steps) - 1 for step in steps), "", "online but behind at the end"
    )
    report.add(
        "soak.caught_up", sum(isinstance(event, StateReceived) for event in events), "", "newcomers online"
    )
    report.add("soak.kept_local", kept_local, "values", "without a mean in a round")
    report.add("soak.real_s", time.perf_counter() - began, "s", "to simulate it")
    return report
