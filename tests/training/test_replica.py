"""What a donor's state may not do to the replica that loads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from colab_swarm.errors import StateError
from colab_swarm.training.layerwise import Lamb
from colab_swarm.training.replica import Replica, UpdateRule
from tests.training.toy import loss_of, model, parameters_of


def adam(net: torch.nn.Module) -> Replica:
    replica = Replica(UpdateRule(torch.optim.Adam(net.parameters(), lr=0.1)))
    loss_of(net, 0).backward()
    replica.rule.optimizer.step()
    return replica


def poison_parameter(replica: Replica) -> None:
    with torch.no_grad():
        replica.parameters[0][0, 0] = float("nan")


def poison_moment(replica: Replica) -> None:
    replica.rule.optimizer.state[replica.parameters[0]]["exp_avg"][0, 0] = float("inf")


def setting(name: str, value: object) -> Callable[[Replica], None]:
    def change(replica: Replica) -> None:
        replica.rule.optimizer.param_groups[0][name] = value

    return change


@pytest.mark.parametrize(
    "poison",
    [
        poison_parameter,
        poison_moment,
        setting("lr", float("nan")),
        setting("lr", 1e30),
        setting("lr", -0.1),
        setting("weight_decay", float("inf")),
    ],
)
def test_a_state_that_would_ruin_the_model_is_refused(poison: Callable[[Replica], Any]) -> None:
    donor, joiner = adam(model(seed=1)), adam(net := model(seed=2))
    before = parameters_of(net)
    poison(donor)
    with pytest.raises(StateError, match="state h"):
        joiner.load_snapshot(donor.snapshot())
    assert torch.equal(parameters_of(net), before) and joiner.step == 0


def test_a_sound_state_of_any_usual_kind_is_taken() -> None:
    donor, joiner = adam(model(seed=1)), adam(net := model(seed=2))
    setting("lr", torch.tensor(0.01))(donor)
    joiner.load_snapshot(donor.snapshot())
    assert torch.equal(parameters_of(net), torch.cat([p.detach().flatten() for p in donor.parameters]))


def test_the_state_of_another_kind_of_optimizer_is_refused_and_changes_nothing() -> None:
    kept = Replica(UpdateRule(Lamb((net := model()).parameters(), lr=0.01)))
    mine = Replica(UpdateRule(torch.optim.SGD((other := model(seed=1)).parameters(), lr=0.5)))
    before = parameters_of(other).clone()
    with pytest.raises(StateError, match=r"another optimizer: it has no .*momentum"):
        mine.load(kept.state())
    assert mine.rule.optimizer.param_groups[0]["lr"] == 0.5 and torch.equal(parameters_of(other), before)
    loss_of(net, 0).backward()
    mine.rule.optimizer.step()
