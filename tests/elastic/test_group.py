"""Forming a group, in simulated swarms."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.elastic.schedulers import NormBounded
from colab_swarm.errors import StateError
from colab_swarm.swarm.swarm import Swarm
from tests.elastic.group import join_group
from tests.training.toy import loss_of, model, parameters_of


def test_all_start_with_the_first_members_parameters_and_optimizer_state() -> None:
    def begin(swarm: Swarm) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
        join_group(swarm, model(), 3).close()  # a group may be formed again by the same peers
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


def sgd(lr: float = 0.05, width: int = 2, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(8, width).parameters(), lr=lr, **options)


@pytest.mark.parametrize(
    ("theirs", "options", "named"),
    [
        (sgd, {"compression": "int8"}, "int8"),
        (sgd, {"scheduler": NormBounded(0.5)}, "NormBounded(beta=0.5"),
        (partial(sgd, width=3), {}, "values"),
        (partial(sgd, 0.1), {}, "learning rate 0.1"),
        (partial(sgd, weight_decay=0.01), {}, "weight_decay=0.01"),
        (partial(sgd, momentum=0.9), {}, "momentum=0.9"),
        (lambda: torch.optim.Adagrad(torch.nn.Linear(8, 2).parameters(), lr=0.05), {}, "Adagrad"),
    ],
    ids=["codec", "scheduler", "size", "rate", "weight decay", "momentum", "class"],
)
def test_a_different_setting_is_reported_to_both_peers_at_once(
    theirs: Callable[[], torch.optim.Optimizer], options: dict[str, Any], named: str
) -> None:
    def begin(swarm: Swarm) -> str:
        mine = (sgd(), {}) if swarm.name == "alice" else (theirs(), options)
        with pytest.raises(ValueError, match="same settings") as raised:
            swarm.elastic.optimizer(mine[0], peers=2, **mine[1])
        return str(raised.value)

    with cs.simulate(2, network="lan", seed=1) as sim:
        said = sim.run(begin)
        assert sim.time < 30
    assert len(said) == 2 and all(named in text for text in said.values())


def test_a_timeout_reports_how_many_peers_came_and_joining_can_be_repeated() -> None:
    def wait(swarm: Swarm) -> None:
        for _ in range(2):
            with pytest.raises(StateError, match="training 'model' needs 3 peers, 2 came in 5 s"):
                join_group(swarm, model(), 3, wait_s=5.0)
        for peers, wait_s, words in ((1, 9, "2 to 16"), (17, 9, "2 to 16"), (2, 0, "wait_s=0")):
            with pytest.raises(ValueError, match=words):
                swarm.elastic.optimizer(sgd(), peers=peers, wait_s=wait_s)

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
