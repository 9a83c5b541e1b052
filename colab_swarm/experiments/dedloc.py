"""DeDLOC: SwAV (Figure 3), the strategy (Table 1), ALBERT-large (Figures 4 and 5), alternating groups (Appendix C).

*swav*: the time per step on servers, on workstations and on both, with a quarter of the paper's machines. Simulated
peers measure their bandwidth and average a part of the bytes. They do not compute; only the time of computing passes.

*strategy*: averaging ResNet-50's gradients by all-reduce, by a parameter server and by the adaptive
strategy. The times are predicted by the strategy's formula, and simulated: groups form and bytes move as in a
real round. The paper's bytes per value and its protocol overhead are not known, so compare only ratios.

*albert*: ALBERT-large in five set-ups: the time per step, and the speed relative to that with high bandwidth. Rounds
are simulated (`simulate_round`), with 18 M values as float16. With delayed updates, as in the paper, a
step takes as long as computing or averaging, whichever is longer; without, it takes as long as both together. The paper
states no compute speed, but says that training with equal shares is about 2.5 times slower than with
high bandwidth (`SLOWDOWN`). The last rows are from complete simulated peers that measure their bandwidths.

*groups*: how exact the averages of alternating groups are, how much crashes cost, and which group size is chosen.
"""

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from timeit import timeit
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

import colab_swarm as cs
from colab_swarm.averaging import group as messages
from colab_swarm.averaging.forming import Formation, FormationSettings
from colab_swarm.averaging.group import Group, RoundTerms, SharePlan, Strategy, Ticket, equal_shares
from colab_swarm.averaging.messages import AveragingSettings, Chunk
from colab_swarm.averaging.moshpit import MoshpitAverager, MoshpitResult, RoundMeter
from colab_swarm.averaging.result import GroupResult
from colab_swarm.averaging.round import Averager
from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.averaging.strategy import AdaptiveShares, adaptive_shares, plan_round
from colab_swarm.dht.service import DHT
from colab_swarm.events import StepFinished
from colab_swarm.experiments.report import Lines, Report, draw, reports, simulated
from colab_swarm.net.patience import Patience
from colab_swarm.net.peers import Contact, Message, PeerId
from colab_swarm.runtime import loop_now
from colab_swarm.sim import LAN, HostProfile, NetworkProfile, ScriptedFault, SimNetwork, SimPeers
from colab_swarm.sim.profiles import DEDLOC16, GIGABIT, MEGABIT
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.tensors.codecs import Floats
from colab_swarm.tensors.vector import HostVector, Vector
from colab_swarm.training.communication import Communication
from colab_swarm.training.link_rounds import LinkRounds

PATIENT = AveragingSettings(round_timeout_s=600.0, patience_s=60.0)
RESNET50 = RoundTerms("bench", 0, b"lineage", 25_600_000, b"schema")
SCALE = 2


def host(bps: float, *, trains: bool = True) -> Ticket:
    return Ticket(RESNET50, float(trains), upload_bps=bps, download_bps=bps, assists=not trains)


def scaled(offer: Ticket, terms: RoundTerms, scale: int) -> Ticket:
    """Return a peer's offer to average ``scale`` times fewer values, over a link that is ``scale`` times slower."""
    terms = msgspec.structs.replace(terms, numel=terms.numel // scale)
    bps = (offer.upload_bps or 0.0) / scale
    return msgspec.structs.replace(offer, terms=terms, upload_bps=bps, download_bps=bps)


def trainers_of(hosts: Sequence[Ticket]) -> int:
    return sum(not ticket.assists for ticket in hosts)


def simulate_round(hosts: Sequence[Ticket], strategy: Strategy, terms: RoundTerms, scale: int) -> float:
    """Return the seconds until the last peer has its averages, in a round with real groups, bytes and sums."""
    if trainers_of(hosts) < 2:
        return 0.0
    offers = [scaled(ticket, terms, scale) for ticket in hosts]
    return simulated(_round(offers, strategy))


async def _round(offers: Sequence[Ticket], strategy: Strategy) -> float:
    network = SimNetwork(NetworkProfile("bench", latency_s=0.0003))
    terms = offers[0].terms
    settings = FormationSettings(terms, 0.0, strategy, window_s=0.0)
    formation = Formation(settings, PeerId(bytes(32)), None, Patience(60.0), 0.0)
    peers = []
    tickets = {}
    for number, offer in enumerate(offers):
        line = HostProfile(offer.upload_bps or 0.0, offer.download_bps or 0.0)
        peer = network.peer(f"p{number}", host_profile=line)
        peers.append(peer)
        tickets[peer.id] = offer
        contact = Contact(peer.id, (f"sim://{peer.id.hex()}",))
        formation.on_attend(peer.id, messages.Attend(contact, b"", terms, 0.0))
        formation.on_report(peer.id, messages.StepReport(terms.step, terms.lineage, ticket=offer), 0.0)
    network.introduce()
    group = formation.next_action(0.0, ()).group
    assert group is not None

    async def take_part(peer: SimPeers) -> GroupResult:
        averager = Averager(peer, PATIENT)
        brought = tickets[peer.id]
        if brought.assists:
            return await averager.reduce(group)
        values = np.full(brought.terms.numel, float(peers.index(peer)), np.float32)
        result = await averager.average(group, HostVector(values))
        if result.kept_local:
            raise RuntimeError(f"{peer.name} did not get all means: {result}")
        return result

    results = await asyncio.gather(*map(take_part, peers))
    return max(result.seconds for result in results)


def one_server(tickets: Sequence[Ticket]) -> SharePlan:
    """A strategy in which the fastest peer reduces all values; of equally fast peers, an assistant."""
    rates = [(ticket.upload_bps or 0.0, ticket.assists) for ticket in tickets]
    shares = [0.0] * len(tickets)
    shares[rates.index(max(rates))] = 1.0
    return SharePlan(tuple(shares))


A = (host(GIGABIT),) * 8
B = (host(0.2 * GIGABIT),) * 16
TABLE = {
    "a": (A, (1.19, 4.73, 1.20)),
    "b": (B, (5.3, 39.6, 5.3)),
    "c": ((*A, *B), (5.69, 14.1, 2.96)),
    "d": ((*B, host(2.5 * GIGABIT, trains=False)), (5.3, 3.22, 3.18)),
}
STRATEGIES: dict[str, Strategy] = dict(all_reduce=equal_shares, server=one_server, adaptive=adaptive_shares)


@reports("strategy")
def run_strategy(report: Report) -> None:
    scale = SCALE
    seeds = range(50)
    if report.quick:
        scale = 4
        seeds = range(10)
    errors = []
    for name, (hosts, published) in TABLE.items():
        tickets = [scaled(ticket, RESNET50, SCALE) for ticket in hosts]
        for (kind, strategy), published_s in zip(STRATEGIES.items(), published, strict=True):
            predicted_s = plan_round(hosts, strategy(tickets).shares).averaging_s
            simulated_s = simulate_round(hosts, strategy, RESNET50, scale)
            report.add(f"{name}_{kind}_s", predicted_s, "s", f"published {published_s} s")
            report.add(f"{name}_{kind}_simulated_s", simulated_s, "s")
        errors.append(abs(simulated_s / predicted_s - 1))  # for the adaptive strategy, which is the last one
    seconds = report.figures
    for end in ("", "_simulated"):
        gain = seconds[f"c_all_reduce{end}_s"] / seconds[f"c_adaptive{end}_s"]
        report.add(f"speedup_c{end}", gain, "times", "adaptive against all-reduce; published 1.92")
    report.add("prediction_error", max(errors), "", "simulated against predicted, adaptive, worst of 4")
    took_s = []
    for seed in seeds:
        setup = random_setup(random.Random(seed))
        took_s.append(timeit(partial(plan_round, setup), number=1))
    report.add("solve_ms_64", 1e3 * statistics.median(took_s), "ms", "random setups of 64 peers")
    for name, hosts in SPECIAL_CASES.items():
        shares = plan_round(hosts).shares
        report.add(f"special_{name}", shares[-1], "", f"share of the last of {len(hosts)} peers")


_SLOW = (host(10 * MEGABIT),) * 4
SPECIAL_CASES = {
    "all_reduce": (host(GIGABIT),) * 4,
    "server": (*_SLOW, host(100 * GIGABIT, trains=False)),
    "byteps": (*_SLOW, host(10 * MEGABIT, trains=False)),
    "client": (*_SLOW, msgspec.structs.replace(_SLOW[0], reduces=False)),
}
"""Equal peers, one far faster peer, one peer that only reduces, and one that nobody can dial (section 3.2)."""


def random_setup(rng: random.Random) -> list[Ticket]:
    tickets = []
    for _ in range(64):
        up = rng.lognormvariate(0, 1)
        down = rng.lognormvariate(0, 1)
        assists = rng.random() < 0.1
        dialable = assists or rng.random() < 0.8
        tickets.append(Ticket(RESNET50, float(not assists), dialable, up * 1e8, down * 1e8, assists))
    return tickets


def plot_strategy(report: Report, path: str) -> None:
    figures = report.figures
    panels = list[Any]()
    kinds = list(STRATEGIES)
    for name in TABLE:
        predicted = [figures[f"{name}_{kind}_s"] for kind in kinds]
        simulated_s = [figures[f"{name}_{kind}_simulated_s"] for kind in kinds]
        lines: Lines = {"predicted": (kinds, predicted, "o"), "simulated": (kinds, simulated_s, "_")}
        panels.append(({"title": name.upper(), "ylabel": "seconds per round", "ylim": (0, None)}, lines))
    draw(path, panels)


ALBERT_LARGE = RoundTerms("bench", 0, b"lineage", 18_105_474, b"schema", "float16", "float16")
SLOWDOWN = 2.5
BATCH = 4096
TRAINERS = 16
WHOLE_STEPS = 10
HIGH = (host(25 * GIGABIT),) * TRAINERS
MIXED = tuple(host(line.upload_bps) for line in DEDLOC16.hosts)
ASSISTED = (*MIXED, *(host(GIGABIT, trains=False),) * 4)
SETUPS = {
    "high_bandwidth": (HIGH, adaptive_shares),
    "heterogeneous": (MIXED, equal_shares),
    "load_balancing": (MIXED, adaptive_shares),
    "auxiliary": (ASSISTED, adaptive_shares),
    "part_time_on": ((*ASSISTED, *(host(100 * MEGABIT),) * 8), adaptive_shares),
}


@reports("albert")
def run_albert(report: Report) -> None:
    scale = 1
    whole = 4
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    if report.quick:
        scale = 8
        whole = 16
        counts = (1, 8, 64)
    steps = albert_steps(scale)
    for name, step in steps.items():
        report.add(f"{name}_s", step.delayed_s, "s", f"averaging {step.averaging_s:.2f} s")
        report.add(f"{name}_sequential_s", step.sequential_s, "s", "without delayed updates")
    naive = steps["heterogeneous"]
    balanced = steps["load_balancing"]
    # each set-up trains for 8 hours
    rates = [1 / steps[name].delayed_s for name in ("auxiliary", "part_time_on")]
    share = statistics.mean(rates) * steps["high_bandwidth"].delayed_s
    hidden = 1 - (balanced.delayed_s - balanced.computing_s) / balanced.averaging_s
    report.add_rows(
        ("load_balancing_gain", naive.delayed_s / balanced.delayed_s, "times", "published 1.47"),
        ("auxiliary_gain", naive.delayed_s / steps["auxiliary"].delayed_s, "times", "published over 1.60"),
        ("part_time_share", share, "", "of high bandwidth, 8 of 28 peers half the time; published 0.74"),
        ("hidden", hidden, "", "of averaging behind computing by delayed updates, load balancing"),
    )
    # with `TRAINERS` trainers
    batch_s = naive.computing_s
    for name, hosts in (("high_bandwidth", HIGH), ("load_balancing", MIXED)):
        for count in counts:
            # include all kinds of hosts, even if the crowd is small
            crowd = tuple(hosts[index * 5 % TRAINERS] for index in range(count))
            # a crowd moves only a part of the bytes, to save memory; coarser chunks make its averaging look slower
            part_s = simulate_round(crowd, adaptive_shares, ALBERT_LARGE, max(scale, count // TRAINERS))
            step = albert_step(crowd, batch_s, part_s)
            report.add(f"scaling_{name}_{count}_s", step.delayed_s, "s", f"{count} peers, delayed")
    for key, shares, delayed in WHOLE_PEERS:
        report.add(
            key, _whole_peers_s(batch_s, whole, shares, delayed=delayed), "s", f"1/{whole} of the bytes"
        )
    gain = report.figures["whole_peers_equal_s"] / report.figures["whole_peers_s"]
    report.add("whole_peers_gain", gain, "times", "of balanced shares, by whole peers; published 1.47")


@dataclass(frozen=True)
class AlbertStep:
    """A step's seconds of computing and of averaging."""

    computing_s: float
    averaging_s: float

    @property
    def delayed_s(self) -> float:
        """Seconds of a step with delayed updates, in which computing and averaging overlap."""
        return max(self.computing_s, self.averaging_s)

    @property
    def sequential_s(self) -> float:
        return self.computing_s + self.averaging_s


def albert_step(hosts: Sequence[Ticket], batch_s: float, averaging_s: float) -> AlbertStep:
    """Return the step of these hosts; `TRAINERS` of them would compute a batch in ``batch_s``."""
    return AlbertStep(batch_s * TRAINERS / trainers_of(hosts), averaging_s)


def albert_steps(scale: int) -> dict[str, AlbertStep]:
    """Simulate a step of each of `SETUPS`; with equal shares, averaging takes `SLOWDOWN` times as long as computing."""
    averaging_s = {name: simulate_round(*setup, ALBERT_LARGE, scale) for name, setup in SETUPS.items()}
    batch_s = averaging_s["heterogeneous"] / SLOWDOWN
    steps = {}
    for name, (hosts, _) in SETUPS.items():
        steps[name] = albert_step(hosts, batch_s, averaging_s[name])
    return steps


class EqualShares(AdaptiveShares):
    """The strategy of a peer that gives all members equal shares."""

    def __call__(self, tickets: Sequence[Ticket]) -> SharePlan:
        return equal_shares(tickets)


WHOLE_PEERS = (
    ("whole_peers_equal_s", EqualShares, True),
    ("whole_peers_sequential_s", AdaptiveShares, False),
    ("whole_peers_s", AdaptiveShares, True),
)


def _whole_peers_s(
    batch_s: float, scale: int, shares: Callable[[], AdaptiveShares], *, delayed: bool
) -> float:
    hosts = tuple(HostProfile(line.upload_bps / scale, line.download_bps / scale) for line in DEDLOC16.hosts)
    profile: NetworkProfile = replace(DEDLOC16, name="scaled", hosts=hosts)

    def train(swarm: cs.Swarm) -> None:
        weights = torch.nn.Parameter(torch.zeros(ALBERT_LARGE.numel // scale))
        inner = torch.optim.SGD([weights], lr=0.1)
        optimizer = swarm.optimizer(
            inner, target_batch_size=BATCH, communication=Communication("float16", overlap=delayed)
        )
        assert isinstance(optimizer.rounds, LinkRounds)
        optimizer.rounds.shares = shares()
        while optimizer.global_step < WHOLE_STEPS:
            weights.grad = torch.ones_like(weights)
            optimizer.step(samples=BATCH // TRAINERS // 8)

    with cs.simulate(TRAINERS, network=profile, samples_per_s=BATCH / batch_s / TRAINERS) as simulation:
        simulation.run(train)
        times = [event.at for event in simulation.swarms["alice"].events.recent(StepFinished)]
    return statistics.median(later - earlier for earlier, later in pairwise(times[len(times) // 2 :]))


def plot_albert(report: Report, path: str) -> None:
    figures = report.figures
    shares = []
    labels = []
    for name in SETUPS:
        shares.append(figures["high_bandwidth_s"] / figures[f"{name}_s"])
        labels.append(name.replace("_", " "))
    speeds: Lines = {"simulated": (shares, labels, "o")}
    scaling = Lines()
    for name in ("high_bandwidth", "load_balancing"):
        counts = []
        seconds = []
        for key, figure in figures.items():
            if key.startswith(f"scaling_{name}_"):
                counts.append(int(key.split("_")[-2]))
                seconds.append(figure)
        scaling[name.replace("_", " ")] = counts, seconds, "o-"
    logarithmic = {"xscale": "log", "yscale": "log", "xlabel": "peers", "ylabel": "seconds per step"}
    draw(path, [({"xlabel": "speed, share of high bandwidth"}, speeds), (logarithmic, scaling)])


VALUES = 100_000
LIGHTER = 28.1e6 / VALUES  # ResNet-50 with SwAV's head
SWAV_BATCH = 8192
# images per second: SwAV's authors train 100 epochs of ImageNet in 6.25 hours on 64 V100; 1080 Ti by Figure 3
SERVERS = ((89.0, GIGABIT),) * 2
WORKSTATIONS = ((36.0, 0.2 * GIGABIT),) * 4
HARDWARE = {"server": SERVERS, "workstation": WORKSTATIONS, "hybrid": (*SERVERS, *WORKSTATIONS)}


@reports("swav")
def run_swav(report: Report) -> None:
    steps = 3 if report.quick else 20
    for name, peers in HARDWARE.items():
        images_per_s = sum(speed for speed, _ in peers)
        note = f"{SWAV_BATCH / images_per_s:.1f} s of it to compute"
        report.add(f"{name}_s", _swav_step_s(peers, steps), "s", note)


def _swav_step_s(peers: Sequence[tuple[float, float]], steps: int) -> float:
    hosts = tuple(HostProfile(bps / LIGHTER, bps / LIGHTER) for _, bps in peers)

    def train(swarm: cs.Swarm) -> float:
        weights = torch.nn.Parameter(torch.zeros(VALUES))
        inner = torch.optim.SGD([weights])
        optimizer = swarm.optimizer(inner, target_batch_size=SWAV_BATCH, communication="float16")
        while optimizer.global_step <= steps:
            weights.grad = torch.zeros(VALUES)
            optimizer.step(samples=32)
        times = [event.at for event in swarm.events.recent(StepFinished)]
        return (times[-1] - times[0]) / (len(times) - 1)

    network = NetworkProfile("paper", 0.01, hosts=hosts)
    with Simulation(network, seed=0, samples_per_s=1.0) as simulation:
        for number, (images_per_s, _) in enumerate(peers):
            simulation.join(f"peer{number}", samples_per_s=images_per_s)
        return max(simulation.run(train).values())


NUMEL = 500


@dataclass
class Town:
    """Peers ``p0``, ``p1``, … that average `NUMEL` values each; the last ``clients`` cannot be dialled.

    ``doomed(name, round)``: whether the peer crashes while it sends in that round, counted from 0. ``liars`` vote for
    groups of a million peers, and send NaN. ``group_size`` is the vote of all other peers; if it is None, each peer
    votes for the size that its measurements suggest.
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

    def mean(self, names: Sequence[str] = ()) -> NDArray[np.float64]:
        chosen = list(names) or self.names()
        total = np.zeros(NUMEL)
        weight = 0.0
        for name in chosen:
            total += self.weight(name) * self.vector(name).astype(np.float64)
            weight += self.weight(name)
        return total / weight


@dataclass
class GroupRun:
    """The surviving peers' vectors before and after each round, the results of their last pass, and virtual seconds."""

    history: list[dict[str, Floats]]
    results: dict[str, MoshpitResult]
    fired: list[ScriptedFault]
    seconds: float

    @property
    def means(self) -> dict[str, Floats]:
        return self.history[-1]

    def spread(self) -> list[float]:
        """Return the variance among the peers, before the first round and after each round."""
        variances = []
        for vectors in self.history:
            held = np.stack(list(vectors.values())).astype(np.float64)
            variances.append(float(((held - held.mean(0)) ** 2).mean()))
        return variances

    def whole(self) -> list[bool]:
        """Return, for each round of the last pass, whether all members contributed."""
        whole = []
        for result in self.results.values():
            for round_ in result.rounds:
                is_whole = round_ is not None and len(round_.contributors) == len(round_.group.members)
                whole.append(is_whole)
        return whole


class _Player(Averager):
    def __init__(self, town: Town, network: SimNetwork, name: str, *, listen: bool) -> None:
        self.peers = network.peer(name, listen=listen)
        super().__init__(self.peers)
        self._town = town
        self._network = network
        self._name = name
        self.dht = DHT(self.peers, random.Random(name))
        self.averager = MoshpitAverager(PrefixRouter(self.peers), self.dht, self, "town/average")
        # by the number of finished rounds
        self.held = {0: town.vector(name)}
        self.results: list[MoshpitResult] = []
        self._done = 0

    async def average(
        self, group: Group, vector: Vector, fine: int | None = None, *, bounded: bool = False
    ) -> GroupResult:
        round_ = self._done + group.terms.step
        if self._name in self._town.liars:
            assert isinstance(vector, HostVector)
            vector.values.fill(np.nan)
        if self._town.doomed(self._name, round_):
            self._network.when(is_contribution, sender=self._name).crash(self._name)
        result = await super().average(group, vector, fine, bounded=bounded)
        self.held[round_ + 1] = vector.read(0, vector.numel).copy()
        return result

    def held_after(self, rounds: int) -> Floats:
        """Return the vector after this number of rounds, or after the last round in which this peer took part."""
        return self.held[max(done for done in self.held if done <= rounds)]

    async def play(self, passes: int) -> None:
        weight = self._town.weight(self._name)
        values = self.held[0]
        group_size = self._town.group_size
        if self._name in self._town.liars:
            group_size = 1_000_000
        for _ in range(passes):
            values, result = await self.averager.average(values, weight=weight, group_size=group_size)
            self.results.append(result)
            self._done += len(result.sides)
            self.held[self._done] = values
            weight = 1.0


def play(town: Town, *, passes: int = 1, script: Callable[[SimNetwork], None] = lambda _: None) -> GroupRun:
    return simulated(_play(town, passes, script))


async def _play(town: Town, passes: int, script: Callable[[SimNetwork], None]) -> GroupRun:
    network = SimNetwork(LAN, seed=town.seed)
    listening = town.count - town.clients
    players = {}
    for number, name in enumerate(town.names()):
        players[name] = _Player(town, network, name, listen=number < listening)
    for name, player in players.items():
        await player.dht.bootstrap([] if name == "p0" else [players["p0"].peers.contact])
        player.dht.start()
    script(network)
    began = loop_now()
    tasks = dict[str, asyncio.Task[None]]()
    for name, player in players.items():
        tasks[name] = asyncio.create_task(player.play(passes))
        player.peers.when_down(tasks[name].cancel)
    await asyncio.wait(tasks.values())
    survivors = {}
    for name, task in tasks.items():
        if not task.cancelled():
            task.result()
            survivors[name] = players[name]
    rounds = max(max(player.held) for player in survivors.values())
    history = []
    for done in range(rounds + 1):
        history.append({name: player.held_after(done) for name, player in survivors.items()})
    results = {name: player.results[-1] for name, player in survivors.items()}
    return GroupRun(history, results, network.fired, loop_now() - began)


def is_contribution(message: Message) -> bool:
    return isinstance(message, Chunk) and not message.averaged


TIME = RoundMeter(overhead_s=0.5, transfer_s=2.0)  # of a model of 5 MB at 20 Mbit/s
SIZES = (2, 4, 16)


def chosen_size(peers: int, failing: float) -> int:
    """Return the best group size if a peer fails with this probability during a round of four."""
    meter = replace(TIME, failures_per_s=-math.log1p(-failing) / TIME.seconds(4))
    return meter.choose_group_size(peers)


def failing_at_random(share: float, seed: int) -> Callable[[str, int], bool]:
    return lambda name, round_: random.Random(f"{seed} {name} {round_}").random() < share


@reports("groups")
def run_groups(report: Report) -> None:
    spread, difference = _beside_one_process()
    report.add(
        "spread_of_trainers", spread, "", "largest difference between 4 peers' parameters after 6 steps"
    )
    report.add("one_process", difference, "", "largest difference to one process with the joined batches")
    for count in (16, 13):
        town = Town(count, group_size=4)
        story = play(town)
        errors = np.abs(list(story.means.values()) - town.mean())
        worst = float(errors.max())
        report.add(f"error_{count}", worst, "", f"{count} peers, m = 4, {len(story.history) - 1} rounds")
    for size in SIZES:
        _measure_crashes(report, size)
    for percent in (0, 5, 10, 20, 50):
        report.add(f"size_16_q{percent}", chosen_size(16, percent / 100), "peers", "chosen")


def _beside_one_process() -> tuple[float, float]:
    """Return how far peers that train together differ from each other, and from one process with their batches."""
    steps = 6
    target = torch.randn(64, generator=torch.Generator().manual_seed(0))
    taken: dict[int, list[torch.Tensor]] = {step: [] for step in range(steps)}

    def train(swarm: cs.Swarm) -> torch.Tensor:
        weights = torch.nn.Parameter(torch.zeros(64))
        noise = torch.Generator().manual_seed(swarm.id[0])
        optimizer = swarm.optimizer(torch.optim.SGD([weights], lr=0.1, momentum=0.9), target_batch_size=128)
        while optimizer.global_step < steps:
            gradient = weights.detach() - target + torch.randn(64, generator=noise)
            weights.grad = gradient.clone()
            taken[optimizer.global_step].append(gradient)
            optimizer.step(samples=16)
        return weights.detach()

    with cs.simulate(4, network="lan", seed=0, samples_per_s=32) as simulation:
        trained = torch.stack(list(simulation.run(train).values()))
    alone = torch.nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.SGD([alone], lr=0.1, momentum=0.9)
    for gradients in taken.values():
        alone.grad = torch.stack(gradients).mean(0)
        optimizer.step()
    spread = (trained - trained[0]).abs().max()
    return float(spread), float((trained - alone.detach()).abs().max())


def _measure_crashes(report: Report, size: int) -> None:
    seeds = range(1) if report.quick else range(10)
    spreads = []
    whole = []
    kept = []
    passes_s = []
    for seed in seeds:
        town = Town(16, group_size=size, doomed=failing_at_random(0.1, seed), seed=seed)
        story = play(town, passes=2)
        spreads.append(story.spread())
        whole += story.whole()
        passes_s += [result.seconds for result in story.results.values()]
        for before, now in pairwise(story.spread()):
            if before > 1e-12:
                kept.append(now / before)
    report.add_rows(
        (f"error_kept_m{size}", max(kept), "", "10 % crash in every round: worst round"),
        (f"undisturbed_m{size}", float(np.mean(whole)), "", "rounds without a crash"),
        (f"slowest_pass_m{size}", max(passes_s), "s", ""),
    )
    for done, after_round in enumerate(zip(*spreads, strict=False)):
        report.add(f"spread_m{size}_{done}", statistics.mean(after_round))


def plot_groups(report: Report, path: str) -> None:
    figures = report.figures
    percents = np.geomspace(0.1, 50, 400)
    spreads = Lines()
    chosen = Lines()
    for peers in (16, 64, 256):
        sizes = [chosen_size(peers, percent / 100) for percent in percents]
        chosen[f"{peers} peers"] = percents, sizes, "-"
    for size in SIZES:
        variances: list[float] = []
        while (key := f"spread_m{size}_{len(variances)}") in figures:
            variances.append(max(figures[key], 1e-9))
        spreads[f"groups of {size}"] = range(len(variances)), variances, "o-"
    left = {"xlabel": "peers that fail in a round of four, %", "ylabel": "chosen group size m"}
    right = {"xlabel": "rounds", "ylabel": "variance among 16 peers, 10 % crash per round"}
    draw(path, [({**left, "xscale": "log", "yscale": "log"}, chosen), ({**right, "yscale": "log"}, spreads)])
