"""Averaging in alternating groups (DeDLOC section 3.2, Appendix C): exactness, failures, group size."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from colab_swarm.averaging.exchange import Chunk, UploadEncoding
from colab_swarm.averaging.group import Group
from colab_swarm.averaging.matchmaking import PrefixRouter
from colab_swarm.averaging.moshpit import (
    MAX_ROUNDS,
    MoshpitAverager,
    MoshpitResult,
    RoundTime,
    choose_group_size,
)
from colab_swarm.averaging.round import Averager, RoundResult
from colab_swarm.bench.harness import BenchReport, benchmark, drawn, run_aside
from colab_swarm.dht.service import DHT, DHTSettings
from colab_swarm.net.peers import Message
from colab_swarm.sim import LAN, ScriptedFault, SimNetwork, run_virtual, virtual_time
from colab_swarm.tensors.codecs import Floats

NUMEL = 500


@dataclass
class Town:
    """Peers ``p0``, ``p1``, … that average a vector of `NUMEL` values each, on the simulated network.

    Attributes:
        clients: how many of them, the last ones, cannot be dialled.
        weights: one per peer; 1 by default.
        doomed: ``doomed(name, round)``: whether the peer crashes while it sends in that round, counted from 0.
        liars: peers that vote for groups of a million and send NaN.
        group_size: vote of all; None for the size that their measurements suggest.
    """

    count: int
    clients: int = 0
    weights: Sequence[float] = ()
    doomed: Callable[[str, int], bool] = lambda name, round_: False
    liars: Collection[str] = ()
    group_size: int | None = None
    seed: int = 0

    def names(self) -> list[str]:
        return [f"p{i}" for i in range(self.count)]

    def weight(self, name: str) -> float:
        return self.weights[int(name[1:])] if self.weights else 1.0

    def vector(self, name: str) -> Floats:
        return np.random.default_rng([self.seed, int(name[1:])]).standard_normal(NUMEL, dtype=np.float32)

    def mean(self, names: Sequence[str] = ()) -> Floats:
        """Return the weighted mean of the vectors of these peers (all by default), in float64."""
        chosen = list(names) or self.names()
        vectors = [self.vector(name).astype(np.float64) for name in chosen]
        return np.average(vectors, axis=0, weights=[self.weight(name) for name in chosen])


@dataclass
class GroupRun:
    """The results of a `Town`, without the peers that crashed.

    ``history`` has the vector of every peer before the first and after each round, ``results`` those of the last pass,
    ``votes`` the group size that each would choose next; ``seconds`` are virtual, for all passes.
    """

    history: list[dict[str, Floats]]
    results: dict[str, MoshpitResult]
    votes: dict[str, int]
    fired: list[ScriptedFault]
    seconds: float

    @property
    def means(self) -> dict[str, Floats]:
        return self.history[-1]

    def spread(self) -> list[float]:
        """Return the peers' variance around their common mean, before the first and after each round."""
        held = [np.stack(list(vectors.values())).astype(np.float64) for vectors in self.history]
        return [float(((vectors - vectors.mean(0)) ** 2).mean()) for vectors in held]


class _Player(Averager):
    """One peer of the town: it records its vector after each round and crashes on request."""

    def __init__(self, town: Town, network: SimNetwork, name: str, *, listen: bool) -> None:
        self.peers = network.peer(name, listen=listen)
        super().__init__(self.peers)
        self._town, self._network, self._name = town, network, name
        self.dht = DHT(self.peers, DHTSettings(), random.Random(name))
        self.averager = MoshpitAverager(PrefixRouter(self.peers), self.dht, self, "town/average")
        self.held = {0: town.vector(name)}  # by rounds done
        self.results: list[MoshpitResult] = []
        self._done = 0

    async def average(
        self, group: Group, values: Floats, encoding: UploadEncoding | None = None
    ) -> RoundResult:
        round_ = self._done + group.terms.step % MAX_ROUNDS
        if self._name in self._town.liars:
            values[:] = np.nan
        if self._town.doomed(self._name, round_):
            self._network.when(is_contribution, sender=self._name).crash(self._name)
        result = await super().average(group, values, encoding)
        self.held[round_ + 1] = values.copy()
        return result

    async def play(self, passes: int) -> None:
        weight, values = self._town.weight(self._name), self.held[0]
        group_size = 1_000_000 if self._name in self._town.liars else self._town.group_size
        for _ in range(passes):
            values, result = await self.averager.average(values, weight=weight, group_size=group_size)
            self.results.append(result)
            self._done += len(result.sides)
            self.held[self._done] = values
            weight = 1.0

    def held_after(self, rounds: int) -> Floats:
        """Return the vector after so many rounds, an older one if the peer missed the last of them."""
        return self.held[max(done for done in self.held if done <= rounds)]


def play(town: Town, *, passes: int = 1, script: Callable[[SimNetwork], None] = lambda _: None) -> GroupRun:
    """Let the town average, so many passes each."""
    return run_aside(_play(town, passes, script), run_virtual)


async def _play(town: Town, passes: int, script: Callable[[SimNetwork], None]) -> GroupRun:
    network, listening = SimNetwork(LAN, seed=town.seed), town.count - town.clients
    players = {n: _Player(town, network, n, listen=i < listening) for i, n in enumerate(town.names())}
    for name, player in players.items():
        await player.dht.bootstrap([] if name == "p0" else [players["p0"].peers.contact])
        player.dht.start()
    script(network)
    began, tasks = virtual_time(), dict[str, asyncio.Task[None]]()
    for name, player in players.items():
        tasks[name] = asyncio.create_task(player.play(passes))
        player.peers.when_down(tasks[name].cancel)
    await asyncio.wait(tasks.values())
    left = {
        name: players[name] for name, task in tasks.items() if not task.cancelled() and task.result() is None
    }
    rounds = max(max(player.held) for player in left.values())
    return GroupRun(
        [{name: player.held_after(done) for name, player in left.items()} for done in range(rounds + 1)],
        {name: player.results[-1] for name, player in left.items()},
        {name: player.averager.meter.choose_group_size(town.count) for name, player in left.items()},
        network.fired,
        virtual_time() - began,
    )


def is_contribution(message: Message) -> bool:
    return isinstance(message, Chunk) and not message.averaged


# --- the figures -----------------------------------------------------------------------------------------------------

TIME = RoundTime(overhead_s=0.5, transfer_s=2.0)  # of a model of 5 MB at 20 Mbit/s
SIZES = (2, 4, 16)


def chosen_size(peers: int, failing: float) -> int:
    """Return the best group size if a peer fails with this probability during a round of four."""
    return choose_group_size(peers, failures_per_s=-math.log1p(-failing) / TIME.seconds(4), time=TIME)


def failing_at_random(share: float, seed: int) -> Callable[[str, int], bool]:
    """Return a `Town.doomed` that draws this share of the peers in every round."""
    return lambda name, round_: random.Random(f"{seed} {name} {round_}").random() < share


@benchmark("groups")
def run(report: BenchReport) -> None:
    """Measure exactness and failures, and report the choice of the group size."""
    for count in (16, 13):
        town = Town(count, group_size=4)
        story = play(town)
        worst = max(float(np.abs(values - town.mean()).max()) for values in story.means.values())
        report.add(f"error_{count}", worst, "", f"{count} peers, m = 4, {len(story.history) - 1} rounds")
    for size in SIZES:
        _with_failures(report, size, seeds=1 if report.quick else 10)
    chosen = {f"size_16_q{percent}": chosen_size(16, percent / 100) for percent in (0, 5, 10, 20, 50)}
    report.add_all(chosen, "peers", "chosen")


def _with_failures(report: BenchReport, size: int, *, seeds: int) -> None:
    towns = [
        Town(16, group_size=size, doomed=failing_at_random(0.1, seed), seed=seed) for seed in range(seeds)
    ]
    stories = [play(town, passes=2) for town in towns]
    spreads = [story.spread() for story in stories]
    results = [result for story in stories for result in story.results.values()]
    left = [now / before for spread in spreads for before, now in pairwise(spread) if before > 1e-12]
    rounds = [one for result in results for one in result.rounds]
    whole = [one is not None and len(one.contributors) == len(one.group.members) for one in rounds]
    report.add_rows(
        (f"error_kept_m{size}", max(left), "", "10 % crash in every round: worst round"),
        (f"undisturbed_m{size}", float(np.mean(whole)), "", "rounds without a crash"),
        (f"slowest_pass_m{size}", max(result.seconds for result in results), "s", ""),
    )
    means = map(np.mean, zip(*spreads, strict=False))
    report.add_all({f"spread_m{size}_{done}": float(mean) for done, mean in enumerate(means)})


def plot(report: BenchReport, path: str) -> None:
    figures, percents = report.figures, np.geomspace(0.1, 50, 400)
    with drawn(path, (10, 4), 2) as (left, right):
        for peers in (16, 64, 256):
            left.plot(percents, [chosen_size(peers, q / 100) for q in percents], label=f"{peers} peers")
        left.set(xlabel="peers that fail in a round of four, %", xscale="log")
        left.set(ylabel="chosen group size m", yscale="log")
        sizes = [2, 4, 8, 16, 64, 256]
        left.set_yticks(sizes, labels=map(str, sizes))
        for size in SIZES:
            keys = sorted((key for key in figures if key.startswith(f"spread_m{size}_")), key=len)
            right.plot([max(figures[key], 1e-9) for key in keys], marker="o", label=f"groups of {size}")
        right.set(xlabel="rounds", ylabel="variance among 16 peers, 10 % crash per round", yscale="log")
