"""Trainers that only dial out, and an assistant that everybody can dial, in simulated swarms."""

from __future__ import annotations

import pytest
import torch

import colab_swarm as cs
from colab_swarm.averaging.exchange import Chunk, ReduceSpan
from colab_swarm.events import RoundFinished, StateReceived
from colab_swarm.simulation import Simulation
from colab_swarm.swarm import Swarm
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.state import ChunkOf
from tests.training.toy import join_training, joint_reference, loss_of, model, parameters_of, train_freely

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
    collaboration = optimizer.collaboration
    while len(collaboration.progress.records) < trainers or not collaboration.assistants.records:
        swarm._runtime.call(collaboration.refresh())


def train_halves(swarm: Swarm, steps: int) -> Result:
    """Alice assists; bob and carol take their rows of each step's batch."""
    if swarm.name not in HALVES:
        swarm.assist()
        return None
    optimizer = join_training(swarm, net := model(), matchmaking_s=20.0)
    wait_for(swarm, optimizer, len(HALVES))
    rows = HALVES[swarm.name]
    while (step := optimizer.global_step) < steps:
        loss_of(net, step, rows).backward()
        optimizer.step(samples=rows.stop - rows.start)
        if optimizer.global_step == step:
            optimizer.wait_step()
    return parameters_of(net), optimizer.lineage


def train_or_assist(swarm: Swarm, steps: int) -> Result:
    if swarm.name == "alice":
        swarm.assist()
        return None
    return train_freely(swarm, steps)


def lineages(results: dict[str, Result]) -> set[bytes]:
    return {result[1] for result in results.values() if result is not None}


def test_two_peers_that_only_dial_out_equal_one_process_through_an_assistant() -> None:
    with simulation("bob", "carol") as sim:
        results = sim.run(lambda swarm: train_halves(swarm, 10))
        rounds = sim.swarms["bob"].events.recent(RoundFinished)
        assistance = sim.swarms["alice"].assistance
    assert len(lineages(results)) == 1
    for name in HALVES:
        torch.testing.assert_close(results[name][0], joint_reference(10), rtol=0, atol=1e-5)
    assert all(e.group_size == 3 and len(e.contributors) == 2 for e in rounds)
    assert assistance.snapshot().rounds >= 9


def test_a_newcomer_gets_the_state_of_peers_it_cannot_reach_through_the_assistant() -> None:
    with simulation("bob", "carol") as sim:
        sim.join("dave", at=6.0, listen=False)
        results = sim.run(lambda swarm: train_or_assist(swarm, 20))
        received = sim.swarms["dave"].events.recent(StateReceived)
        assert sim.swarms["alice"].assistance.snapshot().mirrored_bytes > 0
        assert received and received[0].donors == (sim.swarms["alice"].id.hex(),)
    assert results["dave"] and len(lineages(results)) == 1
