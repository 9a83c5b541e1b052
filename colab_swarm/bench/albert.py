"""Section 4.2 of DeDLOC: ALBERT-large in five set-ups, time per step and share of the high-bandwidth speed; Figure 5.

Rounds are simulated (`simulated`), 18 M values as float16. With delayed updates, as in the paper, a step takes as long
as the slower of computing and averaging; without, as both together. The paper tells no compute speed in its text, but
that training with equal shares is about 2.5 times slower than with high bandwidth: `SLOWDOWN` sets it by that.
The last rows are no model: whole peers on the simulated network that measure their bandwidths themselves.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from itertools import pairwise

from colab_swarm.averaging.group import Strategy, equal_shares
from colab_swarm.averaging.strategy import adaptive_shares
from colab_swarm.bench.report import BenchReport
from colab_swarm.bench.simulated import SimulatedHost, Vector, simulate_round
from colab_swarm.events import RoundFinished, StepFinished
from colab_swarm.sim import HostProfile, NetworkProfile
from colab_swarm.sim.profiles import DEDLOC16, GIGABIT, MEGABIT
from colab_swarm.swarm.simulation import simulate
from colab_swarm.swarm.swarm import Swarm

ALBERT_LARGE = Vector(18_105_474, "float16")
QUICK_ALBERT = replace(ALBERT_LARGE, scale=8)
SLOWDOWN = 2.5
BATCH = 4096
TRAINERS = 16
"""In the published set-ups."""


@dataclass(frozen=True)
class AlbertSetup:
    """Who takes part, and how shares are decided."""

    hosts: tuple[SimulatedHost, ...]
    strategy: Strategy = adaptive_shares


HIGH = (SimulatedHost(25 * GIGABIT),) * TRAINERS
MIXED = tuple(SimulatedHost(host.upload_bps) for host in DEDLOC16.hosts)
ASSISTED = (*MIXED, *(SimulatedHost(GIGABIT, trains=False),) * 4)
CROWDED = (*ASSISTED, *(SimulatedHost(100 * MEGABIT),) * 8)
SETUPS = {
    "high_bandwidth": AlbertSetup(HIGH),
    "heterogeneous": AlbertSetup(MIXED, equal_shares),
    "load_balancing": AlbertSetup(MIXED),
    "auxiliary": AlbertSetup(ASSISTED),
    "part_time_on": AlbertSetup(CROWDED),
}


@dataclass(frozen=True)
class Step:
    """Seconds of a step's two parts."""

    compute_s: float
    averaging_s: float

    @property
    def sequential_s(self) -> float:
        """One after the other."""
        return self.compute_s + self.averaging_s

    @property
    def delayed_s(self) -> float:
        """At the same time."""
        return max(self.compute_s, self.averaging_s)


def run(quick: bool) -> BenchReport:
    """Simulate the set-ups, the scaling, and whole peers."""
    report, vector = BenchReport("albert", quick), QUICK_ALBERT if quick else ALBERT_LARGE
    averaging_s = {
        name: simulate_round(setup.hosts, setup.strategy, vector) for name, setup in SETUPS.items()
    }
    batch_s = averaging_s["heterogeneous"] / SLOWDOWN  # of `TRAINERS` trainers
    steps = {name: _step(setup.hosts, averaging_s[name], batch_s) for name, setup in SETUPS.items()}
    for name, step in steps.items():
        share = steps["high_bandwidth"].delayed_s / step.delayed_s
        note = f"{share:.0%} of high bandwidth; averaging {step.averaging_s:.2f} s, computing {step.compute_s:.2f} s"
        report.add(f"albert.{name}_s", step.delayed_s, "s", note)
        report.add(f"albert.{name}_sequential_s", step.sequential_s, "s", "without delayed updates")
    _gains(report, steps)
    _scaling(report, vector, batch_s, (1, 8, 64) if quick else (1, 2, 4, 8, 16, 32, 64))
    _whole_peers(report, batch_s, scale=16 if quick else 4)
    return report


def _step(hosts: tuple[SimulatedHost, ...], averaging_s: float, batch_s: float) -> Step:
    return Step(batch_s * TRAINERS / sum(host.trains for host in hosts), averaging_s)


def _gains(report: BenchReport, steps: dict[str, Step]) -> None:
    naive, balanced = steps["heterogeneous"], steps["load_balancing"]
    published = {"load_balancing": "published 1.47", "auxiliary": "published over 1.60"}
    for name, note in published.items():
        gain, sequential = (
            naive.delayed_s / steps[name].delayed_s,
            naive.sequential_s / steps[name].sequential_s,
        )
        report.add(
            f"albert.{name}_gain", gain, "times", f"over equal shares; {note}; {sequential:.2f} not delayed"
        )
    rates = [1 / steps[name].delayed_s for name in ("auxiliary", "part_time_on")]  # 8 hours each
    share = statistics.mean(rates) * steps["high_bandwidth"].delayed_s
    report.add(
        "albert.part_time_share",
        share,
        "",
        "of the high-bandwidth speed, 8 of 28 peers half the time; published 0.74",
    )
    hidden = 1 - (balanced.delayed_s - balanced.compute_s) / balanced.averaging_s
    report.add(
        "albert.hidden", hidden, "", "of averaging hidden behind computing by delayed updates, load balancing"
    )


def _scaling(report: BenchReport, vector: Vector, batch_s: float, counts: tuple[int, ...]) -> None:
    """Crowds move a part of the bytes, for memory's sake: coarser chunks make their averaging look slower."""
    for name, hosts in (("high_bandwidth", HIGH), ("load_balancing", MIXED)):
        for count in counts:
            crowd = tuple(hosts[index * 5 % TRAINERS] for index in range(count))  # all kinds, however few
            part = max(vector.scale, count // TRAINERS)
            averaging_s = simulate_round(crowd, adaptive_shares, replace(vector, scale=part))
            step = _step(crowd, averaging_s, batch_s)
            note = f"{count} peers, delayed; averaging {averaging_s:.2f} s, 1/{part} of the bytes"
            report.add(f"albert.scaling_{name}_{count}_s", step.delayed_s, "s", note)


# --- whole peers -----------------------------------------------------------------------------------------------------

WHOLE_STEPS = 6


def _whole_peers(report: BenchReport, batch_s: float, *, scale: int) -> None:
    """16 optimizers that measure, plan, average and step by themselves, with updates at once and delayed."""
    hosts = tuple(HostProfile(host.upload_bps / scale, host.download_bps / scale) for host in DEDLOC16.hosts)
    profile = replace(DEDLOC16, name="scaled", hosts=hosts)
    for delayed, key in ((False, "sequential_s"), (True, "s")):
        step_s, rounds = _train(profile, BATCH / batch_s / TRAINERS, scale, delayed=delayed)
        errors = [abs(r.averaging_s / r.predicted_s - 1) for r in rounds if r.predicted_s]
        told = (
            f"{rounds[-1].explanation}; 1/{scale} of the bytes: prediction off by {statistics.median(errors):.0%}"
            if errors
            else ""
        )
        report.add(f"albert.whole_peers_{key}", step_s, "s", told)


def _train(
    profile: NetworkProfile, samples_per_s: float, scale: int, *, delayed: bool
) -> tuple[float, list[RoundFinished]]:
    """Median seconds from step to step in the second half, and its rounds, of one peer."""
    with simulate(TRAINERS, network=profile, samples_per_s=samples_per_s) as simulation:
        alice = simulation.swarms["alice"]
        simulation.run(lambda swarm: _train_one(swarm, scale, delayed=delayed))
        times = [event.at for event in alice.events.recent(StepFinished)]
        rounds = [event for event in alice.events.recent(RoundFinished) if isinstance(event, RoundFinished)]
    between_s = [later - earlier for earlier, later in pairwise(times[len(times) // 2 :])]
    return statistics.median(between_s), rounds[len(rounds) // 2 :]


def _train_one(swarm: Swarm, scale: int, *, delayed: bool) -> None:
    import torch

    weights = torch.nn.Parameter(torch.zeros(ALBERT_LARGE.numel // scale))
    inner = torch.optim.SGD([weights], lr=0.1)
    micro_batch = BATCH // TRAINERS // 8
    optimizer = swarm.optimizer(inner, target_batch_size=BATCH, compression="float16", overlap=delayed)
    while optimizer.global_step < WHOLE_STEPS:
        weights.grad = torch.ones_like(weights)
        optimizer.step(samples=micro_batch)


def plot(report: BenchReport, path: str) -> None:
    """Draw the set-ups' speeds (Figure 4's order) and the scaling (Figure 5)."""
    from matplotlib.figure import Figure

    values = {row.key.removeprefix("albert."): row.value for row in report.rows}
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    speeds, scaling = figure.subplots(1, 2)
    for index, name in enumerate(SETUPS):
        speeds.barh(index, values["high_bandwidth_s"] / values[f"{name}_s"], color=f"C{index}")
    speeds.set_yticks(range(len(SETUPS)), [name.replace("_", " ") for name in SETUPS])
    speeds.invert_yaxis()
    speeds.set_xlabel("speed, share of high bandwidth")
    for name in ("high_bandwidth", "load_balancing"):
        start, end = f"scaling_{name}_", "_s"
        found = {int(key[len(start) : -len(end)]): s for key, s in values.items() if key.startswith(start)}
        scaling.plot(list(found), list(found.values()), "o-", label=name.replace("_", " "))
    scaling.set(xscale="log", yscale="log", xlabel="peers", ylabel="seconds per step")
    scaling.set_xticks(list(found), list(map(str, found)))
    scaling.legend()
    figure.savefig(path, dpi=150)
