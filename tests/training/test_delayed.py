"""Delayed parameter updates: rounds and updates run while the peers compute on, exactly one step late."""

from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.averaging.group import RoundRefused
from colab_swarm.averaging.result import GroupResult
from colab_swarm.averaging.round import Averager
from colab_swarm.events import RoundFinished
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.layerwise import Lamb
from colab_swarm.training.records import Mean
from colab_swarm.training.replica import Replica
from tests.training import toy


def stale_reference(steps: int) -> torch.Tensor:
    """By hand: the gradient of step t is taken at the parameters that lack the update of step t - 1."""
    shown, updated = toy.model(), toy.model()
    optimizer = Lamb(updated.parameters(), lr=0.01)
    for step in range(steps):
        shown.zero_grad()
        toy.loss_of(shown, step).backward()
        shown_next = [parameter.detach().clone() for parameter in updated.parameters()]
        for mine, theirs in zip(updated.parameters(), shown.parameters(), strict=True):
            mine.grad = theirs.grad.clone() if theirs.grad is not None else None
        optimizer.step()
        with torch.no_grad():
            for mine, newer in zip(shown.parameters(), shown_next, strict=True):
                mine.copy_(newer)
    return toy.parameters_of(updated)


def train_delayed(swarm: Swarm, steps: int) -> tuple[torch.Tensor, bytes]:
    """Each peer takes its own rows of each step's batch, once; the next batch is computed while a round runs."""
    optimizer = toy.join_training(swarm, net := toy.model(), overlap=True, min_peers=len(toy.ROWS))
    toy.wait_for_peers(swarm, optimizer, len(toy.ROWS))
    for step in range(steps):
        toy.take(optimizer, net, step, toy.ROWS[swarm.name])
    optimizer.wait_step()
    return toy.parameters_of(net), optimizer.lineage


def test_a_delayed_step_that_fails_is_raised_and_its_samples_count_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apply, failures = Replica.apply, [RuntimeError("no memory for the step")]

    def fail_once(replica: Replica, mean: Mean) -> bytes:
        if failures:
            raise failures.pop()
        return apply(replica, mean)

    def train(swarm: Swarm) -> None:
        optimizer = toy.join_training(swarm, net := toy.model(), target_batch_size=10, overlap=True)
        toy.loss_of(net, 0).backward()
        optimizer.step(samples=10)
        with pytest.raises(RuntimeError, match="no memory for the step"):
            optimizer.wait_step()
        assert optimizer.global_step == 0 and optimizer._gathered.samples == 10
        optimizer.wait_step()
        assert optimizer.global_step == 1
        parameters = toy.parameters_of(net)
        torch.testing.assert_close(parameters, stale_reference(1), rtol=0, atol=1e-5)

    monkeypatch.setattr(Replica, "apply", fail_once)
    toy.alone(train)
    assert not failures


@pytest.mark.slow
def test_four_peers_equal_a_one_step_stale_reference() -> None:
    with cs.simulate(4, network="home", seed=1, samples_per_s=1e6) as sim:
        results = sim.run(lambda swarm: train_delayed(swarm, 20))
        assert len(sim.swarms["alice"].events.recent(RoundFinished)) == 20
    assert len(results) == 4 and len(toy.lineages(results)) == 1
    for parameters, _ in results.values():
        torch.testing.assert_close(parameters, stale_reference(20), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_rounds_hide_behind_computing() -> None:
    ends = {}
    for delayed in (False, True):
        with cs.simulate(4, network="home", seed=1, samples_per_s=10.0) as sim:
            sim.run(lambda swarm, d=delayed: toy.train_freely(swarm, 8, target_batch_size=40, overlap=d))
            ends[delayed] = sim.time
    assert ends[True] < 0.9 * ends[False]


def test_a_gradient_whose_round_was_refused_is_kept_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [RoundRefused("unreachable", "scripted")]

    async def refuse_once(*args: Any, **rest: Any) -> GroupResult:
        if refusals:
            raise refusals.pop()
        return await average(*args, **rest)

    def train(swarm: Swarm) -> tuple[torch.Tensor, int]:
        optimizer = toy.join_training(swarm, net := toy.model(), overlap=True)
        assert toy.take(optimizer, net, 0) is None  # the round began, and will be refused
        assert optimizer.wait_step() is None
        assert optimizer.wait_step() is not None
        return toy.parameters_of(net), optimizer.global_step

    average = Averager.average
    monkeypatch.setattr(Averager, "average", refuse_once)
    parameters, steps = toy.alone(train)
    assert not refusals and steps == 1
    torch.testing.assert_close(parameters, stale_reference(1))


def test_leaving_while_a_round_is_under_way_leaves_the_newest_parameters() -> None:
    def train(swarm: Swarm) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer = toy.join_training(swarm, net := toy.model(), overlap=True)
        for step in range(3):
            toy.take(optimizer, net, step)
        optimizer.close()
        newest = [parameter.detach().flatten() for parameter in optimizer.param_groups[0]["params"]]
        return toy.parameters_of(net), torch.cat(newest)

    shown, newest = toy.alone(train)
    torch.testing.assert_close(shown, newest, rtol=0, atol=0)
    assert not torch.equal(shown, toy.parameters_of(toy.model()))
