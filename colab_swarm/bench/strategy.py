"""Table 1 of DeDLOC: averaging ResNet-50's gradients by all-reduce, a parameter server and the adaptive strategy.

Predicted by the strategy's arithmetic, and simulated: groups form and bytes move as in a live round. The notes have the
paper's own seconds. Its bytes per value and its share of protocol are not known, so ratios compare better.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from colab_swarm.averaging.group import (
    GroupFormation,
    GroupFormationSettings,
    RoundTerms,
    SharePlan,
    Strategy,
    Ticket,
    equal_shares,
)
from colab_swarm.averaging.round import Averager, AveragingSettings, RoundResult
from colab_swarm.averaging.strategy import AveragingSetup, Capacity, adaptive_shares, plan, plan_round
from colab_swarm.bench.harness import BenchReport, drawn
from colab_swarm.net.peers import Contact
from colab_swarm.sim import HostProfile, NetworkProfile, SimNetwork, SimPeers, run_virtual
from colab_swarm.sim.profiles import GIGABIT

LATENCY_S = 0.0003
PATIENT = AveragingSettings(round_timeout_s=600.0, patience_s=60.0)


# --- one simulated round ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SimulatedHost:
    """A peer with a symmetric connection; one that does not train assists."""

    bps: float
    trains: bool = True


@dataclass(frozen=True)
class Vector:
    """The averaged vector. The simulation moves ``scale`` times fewer values, over as much slower connections."""

    numel: int
    codec: str = "float32"
    scale: int = 1


def ticket(host: SimulatedHost, vector: Vector) -> Ticket:
    numel, codec = vector.numel // vector.scale, vector.codec
    terms = RoundTerms("bench", 0, b"lineage", numel, b"schema", codec, codec)
    rate_bps = host.bps / vector.scale
    return Ticket(
        terms, float(host.trains), upload_bps=rate_bps, download_bps=rate_bps, assists=not host.trains
    )


def simulate_round(hosts: Sequence[SimulatedHost], strategy: Strategy, vector: Vector) -> float:
    """Return the seconds of a round until the last peer has its means: real groups, real bytes, real sums."""
    if sum(host.trains for host in hosts) < 2:
        return 0.0
    with ThreadPoolExecutor(1) as pool:  # in a notebook, this thread has a loop already
        return pool.submit(run_virtual, _round(hosts, strategy, vector)).result()


async def _round(hosts: Sequence[SimulatedHost], strategy: Strategy, vector: Vector) -> float:
    network = SimNetwork(NetworkProfile("bench", LATENCY_S))
    peers = [
        network.peer(f"p{i}", host_profile=HostProfile(host.bps / vector.scale, host.bps / vector.scale))
        for i, host in enumerate(hosts)
    ]
    network.introduce()
    tickets = {peer.id: ticket(host, vector) for peer, host in zip(peers, hosts, strict=True)}
    formation = GroupFormation(next(iter(tickets.values())).terms, now=0.0, settings=GroupFormationSettings())
    for peer, brought in tickets.items():
        formation.on_join(brought, Contact(peer, (f"sim://{peer.hex()}",)))
    group = formation.form(bytes(16), strategy)

    async def take_part(peer: SimPeers) -> RoundResult:
        averager, brought = Averager(peer, PATIENT), tickets[peer.id]
        if brought.assists:
            return await averager.reduce(group)
        values = np.full(brought.terms.numel, float(peers.index(peer)), np.float32)
        result = await averager.average(group, values)
        if result.kept_local:
            raise RuntimeError(f"{peer.name} did not get all means: {result}")
        return result

    results = await asyncio.gather(*map(take_part, peers))
    return max(result.seconds["total"] for result in results)


def one_server(tickets: Sequence[Ticket]) -> SharePlan:
    """Strategy: the fastest peer reduces everything, an assistant if several are as fast."""
    rates = [(brought.upload_bps or 0.0, brought.assists) for brought in tickets]
    server = rates.index(max(rates))
    return SharePlan(tuple(float(index == server) for index in range(len(tickets))))


# --- the table -------------------------------------------------------------------------------------------------------

RESNET50 = Vector(25_600_000, scale=2)
A, B = (SimulatedHost(GIGABIT),) * 8, (SimulatedHost(0.2 * GIGABIT),) * 16
TABLE = {
    "a": (A, (1.19, 4.73, 1.20)),
    "b": (B, (5.3, 39.6, 5.3)),
    "c": ((*A, *B), (5.69, 14.1, 2.96)),
    "d": ((*B, SimulatedHost(2.5 * GIGABIT, trains=False)), (5.3, 3.22, 3.18)),
}
STRATEGIES: dict[str, Strategy] = {
    "all_reduce": equal_shares,
    "server": one_server,
    "adaptive": adaptive_shares,
}


def run(quick: bool) -> BenchReport:
    """Predict and simulate the table; time the planning."""
    report, vector = BenchReport("strategy", quick), replace(RESNET50, scale=4) if quick else RESNET50
    errors = dict.fromkeys(STRATEGIES, 0.0)
    for name, (hosts, published) in TABLE.items():
        for (kind, strategy), published_s in zip(STRATEGIES.items(), published, strict=True):
            predicted_s, simulated_s = _predict(hosts, strategy), simulate_round(hosts, strategy, vector)
            report.add(f"{name}_{kind}_s", predicted_s, "s", f"published {published_s} s")
            report.add(f"{name}_{kind}_simulated_s", simulated_s, "s")
            errors[kind] = max(errors[kind], abs(simulated_s / predicted_s - 1))
    seconds = report.figures
    for end in ("", "_simulated"):
        gain = seconds[f"c_all_reduce{end}_s"] / seconds[f"c_adaptive{end}_s"]
        report.add(f"speedup_c{end}", gain, "times", "adaptive against all-reduce; published 1.92")
    report.add("prediction_error", errors["adaptive"], "", "simulated against predicted, worst of 4")
    report.add("prediction_error_all", max(errors.values()), "", "all strategies, worst of 12")
    setups = [random_setup(random.Random(seed)) for seed in range(10 if quick else 50)]
    report.add("solve_ms_64", _median_ms(setups), "ms", "random setups of 64 peers: who computes, and shares")
    pairs = dict.fromkeys(permutations(range(64), 2), 10 * GIGABIT)
    limited = [replace(setup, pair_bps=pairs, target_batch_size=1e6) for setup in setups[:10]]
    report.add("solve_pairs_ms_64", _median_ms(limited), "ms", "shares, every pair limited, by HiGHS")
    return report


def _predict(hosts: Sequence[SimulatedHost], strategy: Strategy) -> float:
    tickets = [ticket(host, RESNET50) for host in hosts]
    peers = tuple(Capacity(float(h.trains), h.bps, h.bps, receives=h.trains) for h in hosts)
    setup = AveragingSetup(peers, 4 * RESNET50.numel, 4 * RESNET50.numel)
    computing = [index for index, host in enumerate(hosts) if host.trains]
    return plan_round(setup, computing, strategy(tickets).shares).averaging_s


def random_setup(rng: random.Random, peers: int = 64) -> AveragingSetup:
    def capacity() -> Capacity:
        speed, up, down = (rng.lognormvariate(0, 1) for _ in range(3))
        assists = rng.random() < 0.1
        dialable = assists or rng.random() < 0.8
        return Capacity(0.0 if assists else speed, up * 1e8, down * 1e8, dialable, not assists)

    return AveragingSetup(tuple(capacity() for _ in range(peers)), 1e8, 1e8, rng.lognormvariate(6, 2))


def _median_ms(setups: list[AveragingSetup]) -> float:
    took_s: list[float] = []
    for setup in setups:
        began = time.perf_counter()
        plan(setup)
        took_s.append(time.perf_counter() - began)
    return 1000 * statistics.median(took_s)


def plot(report: BenchReport, path: str) -> None:
    values = report.figures
    with drawn(path, (9, 3.2), len(TABLE)) as panels:
        for axes, name in zip(panels, TABLE, strict=True):
            axes.bar(STRATEGIES.keys(), [values[f"{name}_{kind}_s"] for kind in STRATEGIES])
            axes.plot([values[f"{name}_{kind}_simulated_s"] for kind in STRATEGIES], "k_", markersize=18)
            axes.set_title(name.upper())
            axes.set_xticks(range(len(STRATEGIES)), ["AR", "PS", "ours"])
        panels[0].set_ylabel("seconds per round (— simulated)")
