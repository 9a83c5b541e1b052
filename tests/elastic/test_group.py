"""Forming a group, in simulated swarms."""

from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.elastic.optimizer import ElasticOptimizer
from colab_swarm.elastic.schedulers import NormBounded, Synchronous
from colab_swarm.elastic.steps import ElasticSettings
from colab_swarm.errors import StateError
from colab_swarm.swarm.swarm import Swarm
from tests.elastic.group import join_group
from tests.training.toy import loss_of, model, parameters_of


def step_and_close(optimizer: ElasticOptimizer, net: torch.nn.Module) -> None:
    loss_of(net, 0).backward()
    optimizer.step()
    optimizer.close()


def test_all_start_with_the_first_members_parameters_and_optimizer_state() -> None:
    def begin(swarm: Swarm) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
        net = model(seed=len(swarm.name))
        own = parameters_of(net)
        optimizer = join_group(swarm, net, 3)
        at_start = parameters_of(net)
        loss_of(net, 0).backward()
        optimizer.step()
        momentum = optimizer.state_dict()["optimizer"]["state"][0]["momentum_buffer"]
        optimizer.close()
        return optimizer.member, own, at_start, momentum

    with cs.simulate(3, network="home", seed=2) as sim:
        results = sorted(sim.run(begin).values(), key=lambda result: result[0])
    assert [member for member, *_ in results] == [0, 1, 2]
    for _, _, at_start, momentum in results:
        assert torch.equal(at_start, results[0][1]) and torch.equal(momentum, results[0][3])
    assert len({tuple(own.tolist()) for _, own, *_ in results}) > 1


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ({"compression": "int8"}, "int8"),
        ({"scheduler": NormBounded(0.5)}, "NormBounded(beta=0.5"),
        ({"hidden": 3}, "values"),
    ],
)
def test_different_settings_are_reported_to_both_peers_at_once(theirs: dict[str, object], named: str) -> None:
    def begin(swarm: Swarm) -> str:
        options = {"scheduler": Synchronous(), **(theirs if swarm.name == "bob" else {})}
        net = torch.nn.Linear(8, int(str(options.pop("hidden", 2))))
        with pytest.raises(ValueError, match="same settings") as raised:
            join_group(swarm, net, 2, **options)
        return str(raised.value)

    with cs.simulate(2, network="lan", seed=1) as sim:
        results = sim.run(begin)
        assert sim.time < 30
    assert len(results) == 2 and all(named in text for text in results.values())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), "learning rate 0.1"),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.05, weight_decay=0.01), "weight_decay=0.01"),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9), "momentum=0.9"),
        (lambda parameters: torch.optim.Adagrad(parameters, lr=0.05), "Adagrad"),
    ],
    ids=["rate", "weight decay", "momentum", "class"],
)
def test_another_optimizer_or_option_is_reported_to_both_peers(make: Any, named: str) -> None:
    def begin(swarm: Swarm) -> str:
        parameters = [*torch.nn.Linear(8, 2).parameters()]
        mine = torch.optim.SGD(parameters, lr=0.05)
        with pytest.raises(ValueError, match="same settings") as raised:
            swarm.elastic_optimizer(make(parameters) if swarm.name == "bob" else mine, peers=2)
        return str(raised.value)

    with cs.simulate(2, network="lan", seed=1) as sim:
        assert all(named in text for text in sim.run(begin).values())


def test_a_timeout_reports_how_many_peers_came_and_joining_can_be_repeated() -> None:
    def wait(swarm: Swarm) -> None:
        for _ in range(2):
            with pytest.raises(StateError, match="training 'model' needs 3 peers, 2 came in 5 s"):
                join_group(swarm, model(), 3, wait_s=5.0)

    with cs.simulate(2, network="lan", seed=1) as sim:
        assert len(sim.run(wait)) == 2


def test_a_surplus_peer_is_advised_to_choose_another_name() -> None:
    def begin(swarm: Swarm) -> str:
        try:
            optimizer = join_group(swarm, model(), 2, wait_s=30.0)
        except StateError as error:
            return str(error)
        loss_of(model(), 0).backward()
        optimizer.close()
        return "in"

    with cs.simulate(3, network="lan", seed=1) as sim:
        messages = sorted(sim.run(begin).values(), key=len)
    assert messages[:2] == ["in", "in"] and ("choose another name" in messages[2] or "1 came" in messages[2])


def test_a_group_may_be_formed_again_by_the_same_peers() -> None:
    def twice(swarm: Swarm) -> int:
        for _ in range(2):
            optimizer = join_group(swarm, net := model(), 2)
            step_and_close(optimizer, net)
        return optimizer.member

    with cs.simulate(2, network="home", seed=1) as sim:
        assert sorted(sim.run(twice).values()) == [0, 1]


def test_a_crash_while_the_group_is_formed_is_reported() -> None:
    def begin(swarm: Swarm) -> str:
        with pytest.raises(StateError) as raised:
            join_group(swarm, model(), 2, wait_s=20.0)
        return str(raised.value)

    with cs.simulate(2, network="home", seed=1) as sim:
        sim.network.when(lambda message: type(message).__name__ == "FetchState").crash("bob")
        sim.network.when(lambda message: type(message).__name__ == "ElasticLink").crash("bob")
        results = sim.run(begin)
        assert [fault.name for fault in sim.network.fired] == ["crash"]
    assert results.keys() == {"alice"}


@pytest.mark.parametrize(
    ("peers", "wait_s", "words"), [(1, 9, "2 to 16"), (17, 9, "2 to 16"), (2, 0, "wait_s=0")]
)
def test_a_group_has_two_to_sixteen_members(peers: int, wait_s: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ElasticSettings("run/elastic/model", peers, wait_s=wait_s)
