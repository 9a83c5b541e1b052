"""Twenty virtual hours of a simulated run whose volunteers come and go: do all peers keep training?

The ideal is what the online peers could do without ever waiting: their samples, divided by the target batch size.
"""

from __future__ import annotations

import random
import time
from functools import partial

from colab_swarm.bench.report import BenchReport
from colab_swarm.events import RoundFinished, StateReceived
from colab_swarm.sim.profiles import ChurnProfile
from colab_swarm.swarm.simulation import simulate
from colab_swarm.swarm.swarm import Swarm

SAMPLES_PER_S = 1.0
MICRO_BATCH = 20
CHURN = ChurnProfile(mean_session_s=4 * 3600.0, mean_absence_s=1800.0)
SEED = 1


def _train(swarm: Swarm, target_batch_size: int) -> None:
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(64))]
    optimizer = swarm.optimizer(torch.optim.SGD(parameters, lr=0.1), target_batch_size=target_batch_size)
    while True:
        parameters[0].grad = torch.ones(64)
        optimizer.step(samples=MICRO_BATCH)


def _ideal_samples(names: list[str], end_s: float) -> float:
    """Return the samples of peers that never wait, with the same churn."""
    online, since, peer_seconds = len(names), 0.0, 0.0
    for event in CHURN.events(names, until_s=end_s, rng=random.Random(f"churn {SEED}")):
        peer_seconds += online * (event.at - since)
        online, since = online + (1 if event.online else -1), event.at
    return (peer_seconds + online * (end_s - since)) * SAMPLES_PER_S


def run(quick: bool) -> BenchReport:
    """Simulate the run."""
    peers, hours, step_s = (8, 2.0, 300.0) if quick else (16, 20.0, 600.0)  # a step with all peers online
    report, began, batch = (
        BenchReport("soak", quick),
        time.perf_counter(),
        int(peers * step_s * SAMPLES_PER_S),
    )
    with simulate(peers, network="home", seed=SEED, samples_per_s=SAMPLES_PER_S) as simulation:
        ideal_steps = _ideal_samples(list(simulation.swarms), hours * 3600) / batch
        simulation.run(partial(_train, target_batch_size=batch), seconds=hours * 3600, churn=CHURN)
        steps = [swarm.snapshot().step for swarm in simulation.swarms.values()]
        events = [event for swarm in simulation.swarms.values() for event in swarm.events.recent()]
        crashes = sum(fault.name == "crash" for fault in simulation.network.fired)
    what = f"{peers} peers, {hours:g} virtual hours, mean session 4 h, {crashes} crashes"
    report.add("soak.step_share", max(steps) / ideal_steps, "", f"of the ideal step count; {what}")
    stuck = sum(step < max(steps) - 1 for step in steps)
    report.add("soak.stuck_peers", stuck, "", "online but behind at the end")
    caught_up = sum(isinstance(event, StateReceived) for event in events)
    report.add("soak.caught_up", caught_up, "", "late joiners online")
    kept_local = sum(event.kept_local for event in events if isinstance(event, RoundFinished))
    report.add("soak.kept_local", kept_local, "values", "without a mean in a round")
    report.add("soak.real_s", time.perf_counter() - began, "s", "to simulate it")
    return report
