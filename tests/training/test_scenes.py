"""What happens in swarms of some peers, on virtual time. After each scene those that live have equal parameters.

Each peer counts 4 samples in 2 s, and a step has 64 of them.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.averaging.group import News
from colab_swarm.averaging.rendezvous import Rendezvous
from colab_swarm.events import BatchDropped, Fault, PeerRefused, RoundFinished, StateReceived, Waited
from colab_swarm.net.peers import Message
from colab_swarm.sim.network import SimNetwork
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.optimizer import SwarmOptimizer
from tests.training import toy

SAMPLES, TARGET, SPEED = 4, 64, 2.0
ORGANIZER = "whoever organizes then"
ASSISTANTS = ("alice", "helper")


@dataclass
class Trainer:
    """A peer's loop."""

    sim: Simulation
    swarm: Swarm
    optimizer: SwarmOptimizer
    weight: torch.nn.Parameter
    chance: torch.Generator

    def batch(self) -> None:
        self.weight.grad = torch.randn(self.weight.shape, generator=self.chance)
        self.optimizer.step(samples=SAMPLES)

    def until(self, end_s: float = math.inf, step: float = math.inf) -> None:
        while self.sim.time < end_s and self.optimizer.global_step < step:
            self.batch()

    def idle(self, seconds: float) -> None:
        self.swarm.runtime.call(asyncio.sleep(seconds))


Life = Callable[[Trainer], None]


@dataclass
class Scene:
    """Peers train until ``end_s``; ``life`` is what bob does in between."""

    fault: Callable[[SimNetwork], None] = lambda network: None
    life: Life = lambda trainer: None
    peers: int = 4
    end_s: float = 130.0
    settings: dict[str, Any] = field(default_factory=dict)
    late: tuple[str, float] | None = None  # a fast joiner, and when it comes
    dials_out: bool = False  # all but the two assistants
    fewest: int = 9  # steps
    dead: tuple[str, ...] = ()
    short: int = 0  # steps whose batch may lack what a lost peer had counted
    blamed: bool = False  # whether anybody may be told to be late, refused or at fault
    faults: tuple[str, ...] = ()  # that must happen


@dataclass
class Outcome:
    """What came of a scene."""

    steps: dict[str, int]
    parameters: dict[str, torch.Tensor]
    lineages: dict[str, bytes]
    rounds: list[RoundFinished]
    events: list[Any]
    fired: list[str]


def play(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    organizers: list[str] = []
    real_organize = Rendezvous._organize
    real_fire = SimNetwork.fire
    steps: dict[str, int] = {}
    parameters: dict[str, torch.Tensor] = {}
    lineages: dict[str, bytes] = {}
    swarms: dict[str, Swarm] = {}

    async def organize(rendezvous: Rendezvous) -> None:
        organizers.append(rendezvous.me.hex())
        await real_organize(rendezvous)

    def fire(network: SimNetwork, name: str, *arguments: Any) -> None:
        by_id = {swarm.id.hex(): one for one, swarm in swarms.items()}
        named = [by_id[organizers[-1]] if one == ORGANIZER else one for one in arguments]
        real_fire(network, name, *named)

    def train(swarm: Swarm) -> None:
        swarms[swarm.name] = swarm
        if scene.dials_out and swarm.name in ASSISTANTS:
            swarm.reduce()
            swarm.runtime.call(asyncio.sleep(scene.end_s))
            return
        weight = torch.nn.Parameter(torch.zeros(4))
        settings = {"target_batch_size": TARGET, **scene.settings}
        optimizer = swarm.optimizer(torch.optim.SGD([weight], lr=0.01), **toy.exchanged(settings))
        trainer = Trainer(sim, swarm, optimizer, weight, torch.Generator().manual_seed(swarm.id[0]))
        if swarm.name == "bob":
            scene.life(trainer)
        trainer.until(scene.end_s)
        steps[swarm.name] = optimizer.global_step
        parameters[swarm.name] = weight.detach().clone()
        lineages[swarm.name] = optimizer.lineage

    monkeypatch.setattr(Rendezvous, "_organize", organize)
    monkeypatch.setattr(SimNetwork, "fire", fire)
    first = 1 if scene.dials_out else scene.peers
    with cs.simulate(first, network="home", seed=1, samples_per_s=SPEED) as sim:
        for name in ("bob", "carol", "dave") if scene.dials_out else ():
            sim.join(name, listen=False)
        if scene.dials_out:
            sim.join("helper")
        if scene.late is not None:
            sim.join(scene.late[0], at=scene.late[1], samples_per_s=10 * SPEED)
        scene.fault(sim.network)
        sim.run(train, seconds=scene.end_s + 60.0)
        events = [event for swarm in sim.swarms.values() for event in swarm.events.recent()]
        rounds = [event for event in swarms["carol"].events.recent() if isinstance(event, RoundFinished)]
        fired = [fault.name for fault in sim.network.fired]
    return Outcome(steps, parameters, lineages, rounds, events, fired)


def is_grant(message: Message) -> bool:
    return isinstance(message, News) and message.granted is not None


def is_group(message: Message) -> bool:
    return isinstance(message, News) and message.group is not None


def evaluate(trainer: Trainer) -> None:
    for end_s in (40.0, 70.0, 100.0):
        trainer.until(end_s)
        trainer.idle(3.0)


def drop_three(trainer: Trainer) -> None:
    trainer.until(60.0)
    for _ in range(3):
        trainer.weight.grad = torch.full_like(trainer.weight, math.inf)
        trainer.optimizer.step(samples=SAMPLES)
    trainer.until(80.0)
    assert len(trainer.swarm.events.recent(BatchDropped)) == 3


def pause(trainer: Trainer) -> None:
    trainer.until(60.0)
    with trainer.swarm.paused():
        trainer.idle(40.0)


def evaluate_long(trainer: Trainer) -> None:
    trainer.until(step=4)
    trainer.idle(60.0)


def cut_one_way(network: SimNetwork) -> None:
    """What alice sends to bob does not arrive, for a minute."""
    separated = network.separated

    def separated_one_way(one: str, other: str) -> bool:
        is_cut = 60.0 < network.loop.time() < 120.0 and (one, other) == ("alice", "bob")
        if is_cut and not network.fired:
            network.fire("cut one way", one, other)
        return separated(one, other) or is_cut

    network.separated = separated_one_way  # type: ignore[method-assign]
    network.at(120.001).heal()


def wait(trainer: Trainer) -> None:
    while trainer.sim.time < 100.0:
        trainer.batch()
        trainer.optimizer.wait_step(timeout_s=60.0)


def interrupt(trainer: Trainer) -> None:
    """Ctrl-C in a step that waits, and the cell is run again 20 s later."""
    trainer.until(60.0)
    runner = trainer.optimizer._trainer._runtime
    waiting = InterruptedRunner(runner)
    trainer.optimizer._trainer._runtime = waiting  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        trainer.until(80.0)
    trainer.optimizer._trainer._runtime = runner
    trainer.sim.network.fire("interrupt")
    trainer.idle(20.0)


@dataclass
class InterruptedRunner:
    """Interrupts a trainer that waits for its group."""

    runner: Any

    def call(self, coroutine: Any) -> Any:
        if coroutine.__name__ != "ready":
            return self.runner.call(coroutine)
        try:
            return self.runner.call(asyncio.wait_for(coroutine, 0.01))
        except TimeoutError:
            raise KeyboardInterrupt from None

    def time(self) -> float:
        return float(self.runner.time())


def part_twice(network: SimNetwork) -> None:
    network.at(60.0).partition({"alice", "bob"}, {"carol", "dave", "erin"})
    network.at(180.0).heal()


def leave_alone(network: SimNetwork) -> None:
    network.at(60.0).partition({"alice"}, {"bob", "carol", "dave"})
    network.at(1260.0).heal()


SCENES = {
    "an organizer is killed before its grants": Scene(
        lambda network: network.when(is_grant).crash(ORGANIZER),
        settings={"min_peers": 3},
        dead=("bob",),
        faults=("crash",),
    ),
    "an organizer is killed after telling one of three": Scene(
        lambda network: network.when(is_group, nth=11).crash(ORGANIZER),
        dead=("bob",),
        short=1,
        blamed=True,
        faults=("crash",),
    ),
    "an organizer is frozen for 10 s": Scene(
        lambda network: network.at(45.0).freeze(ORGANIZER, 10.0), faults=("freeze",)
    ),
    "an organizer is cut off, and another one takes over": Scene(
        lambda network: network.at(47.0).cut(ORGANIZER, 12.0), blamed=True, faults=("cut",)
    ),
    "two and three part, and come together": Scene(
        part_twice, peers=5, end_s=240.0, fewest=20, blamed=True, faults=("partition", "heal")
    ),
    "the creator is alone for 20 minutes": Scene(
        leave_alone, short=1, end_s=1320.0, fewest=100, blamed=True, faults=("partition", "heal")
    ),
    "a line becomes 20 times as slow": Scene(
        lambda network: network.at(40.0).slow("dave", 20.0), faults=("slow",)
    ),
    "none can be dialled but two assistants, of which one dies": Scene(
        lambda network: network.at(80.0).crash("alice"), dials_out=True, faults=("crash",)
    ),
    "none can be dialled but two assistants": Scene(dials_out=True),
    "three gradients in a row are not finite": Scene(life=drop_three, blamed=True),
    "one evaluates 3 s each 30 s": Scene(life=evaluate, blamed=True),
    "one is paused": Scene(life=pause),
    "one is paused, with local steps": Scene(life=pause, settings={"local_steps": 2}, fewest=4, blamed=True),
    "one waits for each step": Scene(life=wait),
    "one is interrupted in a step that waits": Scene(life=interrupt, blamed=True, faults=("interrupt",)),
    **{
        f"one dies and a fast one joins, with {name}": Scene(
            lambda network: network.at(61.0).crash("bob"),
            settings=settings,
            late=("zoe", 70.0),
            fewest=4,
            dead=("bob",),
            blamed=True,
            faults=("crash",),
        )
        for name, settings in {
            "overlap": {"overlap": True},
            "sparse local steps": {"local_steps": 2, "compression": "sparseloco"},
        }.items()
    },
    "one evaluates for a minute": Scene(life=evaluate_long, blamed=True),
    "a link carries nothing one way": Scene(
        cut_one_way, short=1, blamed=True, faults=("cut one way", "heal")
    ),
    "a fast peer joins": Scene(late=("zoe", 60.0), end_s=100.0, fewest=10),
}


LONG = ("the creator is alone for 20 minutes", "none can be dialled but two assistants")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ordeal) if name in LONG else name for name in SCENES]
)
def test_after_each_scene_all_that_live_have_equal_parameters(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = SCENES[name]
    outcome = play(scene, monkeypatch)
    assert tuple(outcome.fired) == scene.faults
    assert not {*scene.dead} & outcome.steps.keys()
    # With overlap a step may be on its way at the end.
    last = max(outcome.steps.values())
    there = [peer for peer in outcome.steps if outcome.steps[peer] == last]
    assert len(there) > 1 or scene.settings.get("overlap")
    assert len({outcome.lineages[peer] for peer in there}) == 1
    # The model is ahead of the swarm's parameters, or shows those of the step before.
    if not scene.settings.keys() & {"local_steps", "overlap"}:
        assert all(torch.equal(outcome.parameters[peer], outcome.parameters[there[0]]) for peer in there)
    assert min(outcome.steps.values()) >= max(scene.fewest, last - 1)
    target = TARGET * scene.settings.get("local_steps", 1)
    fullness = [one.samples / target for one in outcome.rounds]
    assert sum(part < 1.0 for part in fullness) <= scene.short, fullness
    blame = [event for event in outcome.events if isinstance(event, Waited | PeerRefused | Fault)]
    assert scene.blamed or not blame


def test_two_optimizers_in_one_loop_do_not_wait_for_each_other() -> None:
    """As a GAN's: who waits in one's step computes nothing for the other, and all would wait for all."""

    def train(swarm: Swarm) -> list[int]:
        weights = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
        optimizers = []
        for name, weight in zip(("generator", "critic"), weights, strict=True):
            inner = torch.optim.SGD([weight], lr=0.01)
            optimizers.append(swarm.optimizer(inner, name=name, target_batch_size=TARGET))
        while sim.time < 200.0:
            for optimizer, weight in zip(optimizers, weights, strict=True):
                weight.grad = torch.ones(4)
                optimizer.step(samples=SAMPLES)
        return [optimizer.global_step for optimizer in optimizers]

    with cs.simulate(4, network="home", seed=1, samples_per_s=SPEED) as sim:
        steps = sim.run(train)
    # All together compute 1,600 samples; with each waiting for each there were 5 steps.
    assert min(min(one) for one in steps.values()) >= 8


def test_a_joiner_loads_the_state_once_whenever_it_comes() -> None:
    """One of a step before lacks the mean of a round that was on its way. Rounds take a third of a step here."""

    def train(swarm: Swarm) -> None:
        weight = torch.nn.Parameter(torch.zeros(300_000))
        optimizer = swarm.optimizer(torch.optim.SGD([weight], lr=0.01), target_batch_size=TARGET)
        while sim.time < 90.0:
            weight.grad = torch.ones_like(weight)
            optimizer.step(samples=SAMPLES)

    with cs.simulate(4, network="home", seed=2, samples_per_s=8.0) as sim:
        for number in range(6):
            sim.join(f"late-{number}", at=40.0 + 5.37 * number)
        sim.run(train)
        loaded = {name: swarm.events.recent(StateReceived) for name, swarm in sim.swarms.items()}
    assert {len(loaded[name]) for name in loaded if name.startswith("late")} == {1}
