"""Table 1 of DeDLOC: averaging ResNet-50's gradients by all-reduce, a parameter server and the adaptive strategy.

Predicted by the strategy's arithmetic, and simulated: groups are formed and bytes move as in a live round. The paper's
own seconds are in the notes; its bytes per value and its share of protocol are not known, so ratios compare better.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace

from colab_swarm.averaging.group import Strategy, equal_shares
from colab_swarm.averaging.strategy import AveragingSetup, Capacity, adaptive_shares, plan, plan_round
from colab_swarm.bench.report import BenchReport
from colab_swarm.bench.simulated import SimulatedHost, Vector, one_server, simulate_round, ticket
from colab_swarm.sim.profiles import GIGABIT

RESNET50 = Vector(25_600_000, scale=2)
QUICK_RESNET50 = replace(RESNET50, scale=4)


@dataclass(frozen=True)
class StrategyRow:
    """A row of the table: who takes part, and the published seconds per strategy."""

    hosts: tuple[SimulatedHost, ...]
    published_s: tuple[float, float, float]


A, B = (SimulatedHost(GIGABIT),) * 8, (SimulatedHost(0.2 * GIGABIT),) * 16
TABLE = {
    "a": StrategyRow(A, (1.19, 4.73, 1.20)),
    "b": StrategyRow(B, (5.3, 39.6, 5.3)),
    "c": StrategyRow((*A, *B), (5.69, 14.1, 2.96)),
    "d": StrategyRow((*B, SimulatedHost(2.5 * GIGABIT, trains=False)), (5.3, 3.22, 3.18)),
}
STRATEGIES: dict[str, Strategy] = {
    "all_reduce": equal_shares,
    "server": one_server,
    "adaptive": adaptive_shares,
}


def run(quick: bool) -> BenchReport:
    """Plan and simulate the table; time the planning."""
    report, vector = BenchReport("strategy", quick), QUICK_RESNET50 if quick else RESNET50
    seconds: dict[tuple[str, str], tuple[float, float]] = {}
    for name, row in TABLE.items():
        for (kind, strategy), published_s in zip(STRATEGIES.items(), row.published_s, strict=True):
            predicted_s, simulated_s = _predict(row, strategy), simulate_round(row.hosts, strategy, vector)
            seconds[name, kind] = predicted_s, simulated_s
            report.add(f"strategy.{name}_{kind}_s", predicted_s, "s", f"predicted; published {published_s} s")
            report.add(f"strategy.{name}_{kind}_simulated_s", simulated_s, "s")
    for index, suffix in enumerate(("", "_simulated")):
        gain = seconds["c", "all_reduce"][index] / seconds["c", "adaptive"][index]
        report.add(
            f"strategy.speedup_c{suffix}", gain, "times", "adaptive against all-reduce; published 1.92"
        )
    errors = [abs(simulated_s / predicted_s - 1) for predicted_s, simulated_s in seconds.values()]
    adaptive = [abs(s / p - 1) for (_, kind), (p, s) in seconds.items() if kind == "adaptive"]
    report.add(
        "strategy.prediction_error", max(adaptive), "", "simulated against predicted, adaptive, worst of 4"
    )
    report.add("strategy.prediction_error_all", max(errors), "", "all strategies, worst of 12")
    _solving(report, 10 if quick else 50)
    return report


def _predict(row: StrategyRow, strategy: Strategy) -> float:
    tickets = [ticket(host, RESNET50) for host in row.hosts]
    peers = tuple(Capacity(float(h.trains), h.bps, h.bps, receives=h.trains) for h in row.hosts)
    setup = AveragingSetup(peers, 4 * RESNET50.numel, 4 * RESNET50.numel)
    computing = [index for index, host in enumerate(row.hosts) if host.trains]
    return plan_round(setup, computing, strategy(tickets).shares).averaging_s


def _solving(report: BenchReport, repeats: int) -> None:
    setups = [random_setup(random.Random(seed)) for seed in range(repeats)]
    what = f"median of {repeats} random setups of 64 peers"
    report.add("strategy.solve_ms_64", _median_ms(setups), "ms", f"{what}: who computes, and shares")
    pairs = {(i, j): 10 * GIGABIT for i in range(64) for j in range(64) if i != j}
    limited = [replace(setup, pair_bps=pairs, target_batch_size=1e6) for setup in setups[:10]]
    report.add(
        "strategy.solve_pairs_ms_64", _median_ms(limited), "ms", "shares, every pair limited, by HiGHS"
    )


def random_setup(rng: random.Random, peers: int = 64) -> AveragingSetup:
    """Peers of very different speeds, some without accelerators, some that only dial out."""

    def capacity() -> Capacity:
        speed, up, down = (rng.lognormvariate(0, 1) for _ in range(3))
        assists = rng.random() < 0.1
        return Capacity(
            0.0 if assists else speed, up * 1e8, down * 1e8, assists or rng.random() < 0.8, not assists
        )

    return AveragingSetup(tuple(capacity() for _ in range(peers)), 1e8, 1e8, rng.lognormvariate(6, 2))


def _median_ms(setups: list[AveragingSetup]) -> float:
    took_s: list[float] = []
    for setup in setups:
        began = time.perf_counter()
        plan(setup)
        took_s.append(time.perf_counter() - began)
    return 1000 * statistics.median(took_s)


def plot(report: BenchReport, path: str) -> None:
    """Draw the table: per setup and strategy, what is predicted and what was simulated."""
    from matplotlib.figure import Figure

    values = {row.key: row.value for row in report.rows}
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(TABLE)), TABLE, strict=True):
        for index, kind in enumerate(STRATEGIES):
            predicted_s = values[f"strategy.{name}_{kind}_s"]
            axes.bar(index, predicted_s, color=f"C{index}", label=kind.replace("_", "-"))
            axes.plot(index, values[f"strategy.{name}_{kind}_simulated_s"], "k_", markersize=18)
        axes.set_title(name.upper())
        axes.set_xticks(range(len(STRATEGIES)), ["AR", "PS", "ours"])
    figure.axes[0].set_ylabel("seconds per round (— simulated)")
    figure.savefig(path, dpi=150)
