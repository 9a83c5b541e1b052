"""Section 4.2 of DeDLOC: ALBERT-large in five set-ups, time per step and share of the high-bandwidth speed; Figure 5.

Rounds are simulated (`strategy.simulate_round`), 18 M values as float16. With delayed updates, as
in the paper, a step takes as long as the slower of computing and averaging; without, as long as
both together. The paper does not state a compute speed, only that training with equal shares is
about 2.5 times slower than with high bandwidth; `SLOWDOWN` derives it from that. The last rows are
no model: whole peers on the simulated network that measure their bandwidths.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from colab_swarm.averaging.group import equal_shares
from colab_swarm.averaging.strategy import adaptive_shares
from colab_swarm.bench.harness import BenchReport, drawn
from colab_swarm.bench.strategy import SimulatedHost, Vector, simulate_round
from colab_swarm.events import StepFinished
from colab_swarm.sim import HostProfile, NetworkProfile
from colab_swarm.sim.profiles import DEDLOC16, GIGABIT, MEGABIT
from colab_swarm.swarm.simulation import simulate
from colab_swarm.swarm.swarm import Swarm

ALBERT_LARGE = Vector(18_105_474, "float16")
SLOWDOWN = 2.5
BATCH = 4096
TRAINERS = 16
HIGH = (SimulatedHost(25 * GIGABIT),) * TRAINERS
MIXED = tuple(SimulatedHost(host.upload_bps) for host in DEDLOC16.hosts)
ASSISTED = (*MIXED, *(SimulatedHost(GIGABIT, trains=False),) * 4)
SETUPS = {
    "high_bandwidth": (HIGH, adaptive_shares),
    "heterogeneous": (MIXED, equal_shares),
    "load_balancing": (MIXED, adaptive_shares),
    "auxiliary": (ASSISTED, adaptive_shares),
    "part_time_on": ((*ASSISTED, *(SimulatedHost(100 * MEGABIT),) * 8), adaptive_shares),
}


def run(quick: bool) -> BenchReport:
    report = BenchReport("albert", quick)
    vector = replace(ALBERT_LARGE, scale=8) if quick else ALBERT_LARGE
    averaging_s = {name: simulate_round(hosts, shares, vector) for name, (hosts, shares) in SETUPS.items()}
    batch_s = averaging_s["heterogeneous"] / SLOWDOWN  # of `TRAINERS` trainers
    steps = {name: _step(SETUPS[name][0], seconds, batch_s) for name, seconds in averaging_s.items()}
    for name, step in steps.items():
        report.add(f"{name}_s", max(step), "s", f"averaging {step[1]:.2f} s")
        report.add(f"{name}_sequential_s", sum(step), "s", "without delayed updates")
    naive, balanced = steps["heterogeneous"], steps["load_balancing"]
    for name, published in (("load_balancing", "1.47"), ("auxiliary", "over 1.60")):
        report.add(f"{name}_gain", max(naive) / max(steps[name]), "times", f"published {published}")
    rates = [1 / max(steps[name]) for name in ("auxiliary", "part_time_on")]  # 8 hours each
    share = statistics.mean(rates) * max(steps["high_bandwidth"])
    report.add("part_time_share", share, "", "of high bandwidth, 8 of 28 peers half the time; published 0.74")
    hidden = 1 - (max(balanced) - balanced[0]) / balanced[1]
    report.add("hidden", hidden, "", "of averaging behind computing by delayed updates, load balancing")
    _scaling(report, vector, batch_s, (1, 8, 64) if quick else (1, 2, 4, 8, 16, 32, 64))
    for delayed, key in ((False, "sequential_s"), (True, "s")):
        _whole_peers(report, key, batch_s, scale=16 if quick else 4, delayed=delayed)
    return report


def _step(hosts: Sequence[SimulatedHost], averaging_s: float, batch_s: float) -> tuple[float, float]:
    """Return the seconds of computing and averaging. A delayed step takes their maximum, else their sum."""
    return batch_s * TRAINERS / sum(host.trains for host in hosts), averaging_s


def _scaling(report: BenchReport, vector: Vector, batch_s: float, counts: tuple[int, ...]) -> None:
    """Crowds move a part of the bytes to save memory; coarser chunks make their averaging look slower."""
    for name, hosts in (("high_bandwidth", HIGH), ("load_balancing", MIXED)):
        for count in counts:
            crowd = tuple(hosts[index * 5 % TRAINERS] for index in range(count))  # all kinds, however few
            part = max(vector.scale, count // TRAINERS)
            averaging_s = simulate_round(crowd, adaptive_shares, replace(vector, scale=part))
            seconds = max(_step(crowd, averaging_s, batch_s))
            report.add(f"scaling_{name}_{count}_s", seconds, "s", f"{count} peers, delayed")


# --- whole peers -----------------------------------------------------------------------------------------------------

WHOLE_STEPS = 6


def _whole_peers(report: BenchReport, key: str, batch_s: float, *, scale: int, delayed: bool) -> None:
    """Time 16 optimizers that measure, plan, average and step by themselves.

    The figure is the median from step to step of one peer, in the second half of its steps.
    """
    hosts = tuple(HostProfile(host.upload_bps / scale, host.download_bps / scale) for host in DEDLOC16.hosts)
    profile: NetworkProfile = replace(DEDLOC16, name="scaled", hosts=hosts)
    with simulate(TRAINERS, network=profile, samples_per_s=BATCH / batch_s / TRAINERS) as simulation:
        alice = simulation.swarms["alice"]
        simulation.run(lambda swarm: _train_one(swarm, scale, delayed=delayed))
        times = [event.at for event in alice.events.recent(StepFinished)]
    between_s = [later - earlier for earlier, later in pairwise(times[len(times) // 2 :])]
    report.add(f"whole_peers_{key}", statistics.median(between_s), "s", f"1/{scale} of the bytes")


def _train_one(swarm: Swarm, scale: int, *, delayed: bool) -> None:
    weights = torch.nn.Parameter(torch.zeros(ALBERT_LARGE.numel // scale))
    inner = torch.optim.SGD([weights], lr=0.1)
    micro_batch = BATCH // TRAINERS // 8
    optimizer = swarm.optimizer(inner, target_batch_size=BATCH, compression="float16", overlap=delayed)
    while optimizer.global_step < WHOLE_STEPS:
        weights.grad = torch.ones_like(weights)
        optimizer.step(samples=micro_batch)


def plot(report: BenchReport, path: str) -> None:
    values = report.figures
    with drawn(path, (9, 3.4), 2) as (speeds, scaling):
        shares = [values["high_bandwidth_s"] / values[f"{name}_s"] for name in SETUPS]
        speeds.barh([name.replace("_", " ") for name in SETUPS], shares)
        speeds.invert_yaxis()
        speeds.set_xlabel("speed, share of high bandwidth")
        for name in ("high_bandwidth", "load_balancing"):
            keys = [key for key in values if key.startswith(f"scaling_{name}_")]
            counts = [int(key.split("_")[-2]) for key in keys]
            scaling.plot(counts, [values[key] for key in keys], "o-", label=name.replace("_", " "))
        scaling.set(xscale="log", yscale="log", xlabel="peers", ylabel="seconds per step")
        scaling.set_xticks(counts, labels=map(str, counts))
