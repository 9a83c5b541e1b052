"""Gradients of weight 0, as where all targets are masked: who has only them is told, and any weight counts."""

from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.events import Notice
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import join_training, loss_of, model, parameters_of

SAMPLES = 5  # of a micro-batch


def weightless_notices(swarm: Swarm) -> list[str]:
    texts = [event.text for event in swarm.events.recent(Notice) if isinstance(event, Notice)]
    return [text for text in texts if "the weight 0" in text]


@pytest.mark.parametrize(
    ("peers", "mailbox", "settings"),
    [(1, False, {}), (3, False, {}), (2, False, {"overlap": True}), (2, True, {"local_steps": 2})],
    ids=["alone", "links", "overlap", "a bucket"],
)
def test_rounds_without_any_weight_are_told_of_once_and_the_next_weight_counts(
    peers: int, mailbox: bool, settings: dict[str, Any]
) -> None:
    def train(swarm: Swarm) -> tuple[list[str], bool, int]:
        net = model()
        optimizer = join_training(
            swarm, net, target_batch_size=10, weight_unit="target tokens", min_peers=peers, **settings
        )
        before = parameters_of(net)
        unchanged = True
        for step in range(10_000):
            masked = swarm.runtime.time() < 6.0
            if masked:
                unchanged = torch.equal(parameters_of(net), before) and optimizer.global_step == 0
            loss_of(net, step).backward()
            optimizer.step(samples=SAMPLES, weight=0 if masked else 3)
            if optimizer.global_step >= 2:
                break
        return weightless_notices(swarm), unchanged, optimizer.global_step

    with cs.simulate(peers, mailbox=mailbox, seed=1, samples_per_s=100.0) as simulation:
        results = simulation.run(train, seconds=3000)
    assert len(results) == peers
    for told, unchanged, steps in results.values():
        assert len(told) == 1 and "target tokens" in told[0] and "-100" in told[0]
        assert unchanged and steps >= 2


def test_one_peer_without_weight_takes_the_others_steps_without_a_word() -> None:
    def train(swarm: Swarm) -> tuple[list[str], torch.Tensor]:
        net = model()
        optimizer = join_training(swarm, net, weight_unit="target tokens", min_peers=2)
        while optimizer.global_step < 4:
            loss_of(net, optimizer.global_step).backward()
            optimizer.step(samples=SAMPLES, weight=0 if swarm.name == "bob" else 3)
        return weightless_notices(swarm), parameters_of(net)

    with cs.simulate(2, seed=1, samples_per_s=100.0) as simulation:
        results = simulation.run(train)
    assert torch.equal(results["alice"][1], results["bob"][1])
    assert not results["alice"][0] and not results["bob"][0]
