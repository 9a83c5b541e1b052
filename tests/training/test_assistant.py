"""Trainers that only dial out, and an assistant that all peers can dial, in simulated swarms."""

import asyncio

import pytest
import torch

import colab_swarm as cs
from colab_swarm.averaging.group import MAX_TEXT, Group, GroupMember, RoundTerms
from colab_swarm.averaging.messages import Chunk, ReduceSpan
from colab_swarm.events import RoundFinished, StateReceived
from colab_swarm.net.peers import Message
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.assistant import IDLE_S, PUBLISH_S
from colab_swarm.training.optimizer import SwarmOptimizer
from tests.training import toy

Result = tuple[torch.Tensor, bytes] | None
HALVES = {"bob": slice(0, 3), "carol": slice(3, 10)}


def simulation(*clients: str, network: str = "home", seed: int = 1) -> Simulation:
    """A backbone called alice, and trainers that cannot be dialled."""
    sim = cs.simulate(1, network=network, seed=seed)
    for name in clients:
        sim.join(name, listen=False)
    return sim


def wait_for(swarm: Swarm, optimizer: SwarmOptimizer, trainers: int) -> None:
    """Until this peer knows of the assistant and of all trainers."""
    rounds = optimizer.rounds
    while len(rounds.view.all) < trainers or not rounds.view.assistants:
        swarm.runtime.call(rounds.refresh())


def train_halves(swarm: Swarm, steps: int) -> Result:
    """Alice assists; bob and carol take their rows of each step's batch."""
    if swarm.name not in HALVES:
        swarm.reduce()
        return None
    optimizer = toy.join_training(swarm, net := toy.model())
    wait_for(swarm, optimizer, len(HALVES))
    toy.train_rows(optimizer, net, HALVES[swarm.name], steps)
    return toy.parameters_of(net), optimizer.lineage


def train_or_assist(swarm: Swarm, steps: int) -> Result:
    if swarm.name == "alice":
        swarm.reduce()
        return None
    return toy.train_freely(swarm, steps)


@pytest.mark.slow
def test_two_peers_that_only_dial_out_equal_one_process_through_an_assistant() -> None:
    with simulation("bob", "carol") as sim:
        results = sim.run(lambda swarm: train_halves(swarm, 10))
        rounds = sim.swarms["bob"].events.recent(RoundFinished)
        assistance = sim.swarms["alice"].assistant
        helped = sim.swarms["alice"].events.recent(RoundFinished)
    assert len(toy.lineages(results)) == 1
    for name in HALVES:
        torch.testing.assert_close(results[name][0], toy.joint_reference(10), rtol=0, atol=1e-5)
    assert all(e.group_size == 3 and len(e.contributors) == 2 for e in rounds)
    assert assistance.rounds == len(helped) >= 9
    assert all(e.samples == 10 and e.members and e.seconds >= e.averaging_s for e in helped)


@pytest.mark.slow
def test_a_late_joiner_gets_the_state_of_unreachable_peers_through_the_assistant() -> None:
    with simulation("bob", "carol") as sim:
        sim.join("dave", at=6.0, listen=False)
        results = sim.run(lambda swarm: train_or_assist(swarm, 20))
        received = sim.swarms["dave"].events.recent(StateReceived)
        assert received[0].donors == (sim.swarms["alice"].id.hex(),) and received[0].seconds < 6
    assert results["dave"] and len(toy.lineages(results)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("phase", [ReduceSpan, Chunk])
def test_training_continues_when_the_assistant_crashes_in_a_round_and_returns(phase: type[Message]) -> None:
    role = {"receiver": "alice"} if phase is ReduceSpan else {"sender": "alice"}
    with simulation("bob", "carol") as sim:
        sim.network.when(lambda message: isinstance(message, phase), nth=5, **role).crash("alice")
        sim.join("alice", at=8.0)
        results = sim.run(lambda swarm: train_or_assist(swarm, 50))
        assert [fault.name for fault in sim.network.fired] == ["crash"]
        rounds = [e for name in ("bob", "carol") for e in sim.swarms[name].events.recent(RoundFinished)]
        assert sim.swarms["alice"].assistant.rounds > 8
    assert {e.group_size for e in rounds} >= {1, 3}  # alone while it was away
    assert results["bob"] and results["carol"] and len(toy.lineages(results)) == 1


def test_with_trainers_that_can_be_dialled_the_assistant_is_one_more_reducer() -> None:
    with simulation("bob", "carol") as sim:
        sim.join("dave")
        results = sim.run(lambda swarm: train_or_assist(swarm, 12))
        rounds = sim.swarms["bob"].events.recent(RoundFinished)
        assert sim.swarms["alice"].assistant.rounds >= 8
    assert len(toy.lineages(results)) == 1 and max(e.group_size for e in rounds) == 4
    assert max(len(e.contributors) for e in rounds) == 3 and not any(e.kept_local for e in rounds)


def test_a_trainer_alone_sends_nothing_to_the_assistant() -> None:
    with simulation("bob") as sim:
        results = sim.run(lambda swarm: train_or_assist(swarm, 5))
        rounds = sim.swarms["bob"].events.recent(RoundFinished)
    assert results["bob"] and len(rounds) == 5
    assert all(len(e.contributors) == 1 and e.sent_bytes == 0 for e in rounds)


@pytest.mark.slow
def test_an_assistant_helps_two_models_of_one_peer_or_only_the_named_one() -> None:
    def train(swarm: Swarm, only: str | None) -> dict[str, int]:
        if swarm.name == "alice":
            swarm.reduce(only)
            return {}
        nets = {name: toy.model(seed) for seed, name in enumerate(("one", "two"))}
        optimizers = {name: toy.join_training(swarm, net, name=name) for name, net in nets.items()}
        for _ in range(30):
            for name, net in nets.items():
                toy.loss_of(net, optimizers[name].global_step, slice(0, 2)).backward()
                optimizers[name].step(samples=2)
        assert min(optimizer.global_step for optimizer in optimizers.values()) >= 3
        return {name: optimizer.global_step for name, optimizer in optimizers.items()}

    for only, helped in ((None, {"one", "two"}), ("two", {"two"})):
        with simulation("bob", "carol") as sim:
            sim.run(lambda swarm, only=only: train(swarm, only))
            prefixes = sim.swarms["alice"].assistant.collaborations
        assert {prefix.partition("/")[2] for prefix in prefixes} == helped


def test_an_assistant_that_stops_says_so_and_counts_no_more() -> None:
    def train(swarm: Swarm) -> int:
        if swarm.name == "alice":
            assistance = swarm.reduce()
            assert "0 rounds" in repr(assistance)
            assistance.close()
            assistance.close()
            assert "stopped" in repr(assistance)
            return 0
        optimizer = toy.join_training(swarm, toy.model())
        swarm.runtime.call(optimizer.rounds.refresh())
        return len(optimizer.rounds.view.assistants)

    with simulation("bob") as sim:
        assert sim.run(train)["bob"] == 0


def test_an_assistant_forgets_a_collaboration_that_needed_nothing_for_long() -> None:
    async def idle(swarm: Swarm) -> None:
        await asyncio.sleep(IDLE_S)
        swarm.assistant.enter(f"{swarm.run_id}/model")
        for seconds, helped in ((IDLE_S - 1, 1), (PUBLISH_S + 2, 0)):
            await asyncio.sleep(seconds)
            assert len(swarm.assistant.collaborations) == helped

    def assist(swarm: Swarm) -> None:
        swarm.reduce()
        swarm.runtime.call(idle(swarm))

    toy.alone(assist)


def test_strangers_cannot_keep_an_assistant_busy_with_all_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def called(swarm: Swarm) -> int:
        prefix = f"{swarm.run_id}/".ljust(MAX_TEXT, "x")
        ours = (f"{swarm.run_id}/{number}" for number in range(20))
        for entering in (*ours, prefix, f"{prefix}x", "other-run/model"):
            swarm.assistant.enter(entering)
        assert len(swarm.assistant.collaborations) == 16 and swarm.assistant.collaborations[-1] == prefix
        part, sizes = swarm.assistant._parts[prefix], (1001, *[1000] * 5)
        for step, numel in enumerate(sizes):
            terms = RoundTerms(prefix, step, b"", numel)
            part.on_group(Group(bytes(16), terms, (GroupMember(swarm.id, (), 0.0, 1.0),)), contributes=False)
        return len(part._rounds)

    def assist(swarm: Swarm) -> int:
        swarm.reduce()
        return swarm.runtime.call(called(swarm))

    monkeypatch.setattr("colab_swarm.training.assistant._memory_bytes", lambda: 16_000)
    assert toy.alone(assist) == 4  # one is too large, and four are enough


def test_an_assistant_may_begin_to_train() -> None:
    def train(swarm: Swarm) -> Result:
        if swarm.name == "alice":
            swarm.reduce()
            while not swarm.assistant.collaborations:
                swarm.runtime.call(asyncio.sleep(1))
        return toy.train_freely(swarm, 12)

    with simulation("bob", "carol") as sim:
        results = sim.run(train)
    assert all(results.values()) and len(toy.lineages(results)) == 1
