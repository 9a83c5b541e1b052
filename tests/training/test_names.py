"""Peers match tensors by name: in another order, inside a wrapper, with a difference that is named."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import colab_swarm as cs
from colab_swarm.errors import StateError
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.replica import Replica, UpdateRule
from tests.training import toy

STEPS = 6


def squares() -> nn.Sequential:
    """Return a model with two layers of one shape, which a peer could take for each other."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=chance))
    return net


class Wrapped(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        return self.net(x_BI)


def in_order(net: nn.Module) -> list[dict[str, object]]:
    return [{"params": [*net.parameters()]}]


def reversed_order(net: nn.Module) -> list[dict[str, object]]:
    return [{"params": [*net.parameters()][::-1]}]


def decay_groups(net: nn.Module) -> list[dict[str, object]]:
    matrices = [parameter for parameter in net.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in net.parameters() if parameter.ndim == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]


def decay_groups_of_sets(net: nn.Module) -> list[dict[str, object]]:
    groups = decay_groups(net)
    for group in groups:
        group["params"] = group["params"][2:] + group["params"][:2]  # type: ignore[index]
    return groups


Groups = Callable[[nn.Module], list[dict[str, object]]]


def trained(groups: dict[str, Groups], *, wraps: bool = False, **options: object) -> dict[str, torch.Tensor]:
    """Return each peer's weights after steps with its own order; bob joins late, and takes alice's state."""

    def train(swarm: Swarm) -> torch.Tensor:
        net = squares()
        model = Wrapped(net) if wraps and swarm.name == "bob" else net
        inner = torch.optim.Adam(groups[swarm.name](net), lr=0.01)
        optimizer = swarm.optimizer(
            inner, target_batch_size=2 * toy.BATCH, model=model, **toy.exchanged(options)
        )
        toy.train_to(STEPS, optimizer, net)
        optimizer.close()
        return toy.parameters_of(net)

    with cs.simulate(1, samples_per_s=10.0) as simulation:
        simulation.join("bob", at=3.0)
        return simulation.run(train)


@pytest.mark.parametrize(
    ("alice", "bob", "wraps", "options"),
    [
        (in_order, reversed_order, False, {"overlap": True}),
        (decay_groups, decay_groups_of_sets, False, {}),
        (in_order, in_order, True, {"local_steps": 2}),
    ],
    ids=["one group", "decay groups", "a wrapper"],
)
def test_peers_with_another_order_of_parameters_or_a_wrapper_train_one_model(
    alice: Groups, bob: Groups, wraps: bool, options: dict[str, object]
) -> None:
    weights = trained({"alice": alice, "bob": bob}, wraps=wraps, **options)
    assert torch.equal(weights["alice"], weights["bob"])
    if options:
        return
    net = squares()
    optimizer = torch.optim.Adam(alice(net), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        toy.loss_of(net, step).backward()
        optimizer.step()
    torch.testing.assert_close(weights["bob"], toy.parameters_of(net), atol=1e-5, rtol=0.0)


def test_a_state_goes_to_the_names_and_another_group_is_refused() -> None:
    nets = [squares(), squares()]
    replicas = []
    for net, groups in zip(nets, (decay_groups, decay_groups_of_sets), strict=True):
        replicas.append(Replica(UpdateRule(torch.optim.Adam(groups(net), lr=0.01), model=net)))
    toy.loss_of(nets[0], 0).backward()
    replicas[0].rule.optimizer.step()
    replicas[1].load(copy.deepcopy(replicas[0].state()))
    torch.testing.assert_close(toy.parameters_of(nets[0]), toy.parameters_of(nets[1]), atol=0.0, rtol=0.0)
    for mine, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        ours = replicas[0].rule.optimizer.state[mine]["exp_avg"]
        assert torch.equal(ours, replicas[1].rule.optimizer.state[theirs]["exp_avg"])
    all_in_one = Replica(UpdateRule(torch.optim.Adam(in_order(nets[1]), lr=0.01), model=nets[1]))
    with pytest.raises(StateError, match="another optimizer"):
        all_in_one.load(replicas[0].state())


def test_an_optimizer_of_another_model_is_refused() -> None:
    def train(swarm: Swarm) -> None:
        inner = torch.optim.SGD(squares().parameters(), lr=0.1)
        with pytest.raises(ValueError, match="model=… has none of the optimizer's parameters"):
            swarm.optimizer(inner, target_batch_size=8, model=squares())

    toy.alone(train)
