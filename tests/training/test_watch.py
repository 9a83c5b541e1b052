"""What is trained stays what it was at the beginning, or a sentence says what changed."""

import copy

import pytest
import torch
from torch import nn

import colab_swarm as cs
from colab_swarm.events import Notice
from colab_swarm.swarm.swarm import Swarm
from tests.training import toy


def halves() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


class Growing(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 2))
        self.register_buffer("history", torch.zeros(1))


def add_group(net: nn.Sequential, inner: torch.optim.Optimizer) -> None:
    inner.add_param_group({"params": [*net[0].parameters()]})


def drop_parameter(net: nn.Sequential, inner: torch.optim.Optimizer) -> None:
    del inner.param_groups[0]["params"][-1]


def resize(net: nn.Sequential, inner: torch.optim.Optimizer) -> None:
    net[2].weight.data = torch.randn(5, 8)
    net[2].bias.data = torch.randn(5)


def replace_layer(net: nn.Sequential, inner: torch.optim.Optimizer) -> None:
    net[2] = nn.Linear(8, 2)


def freeze(net: nn.Sequential, inner: torch.optim.Optimizer) -> None:
    net[2].bias.requires_grad_(False)


def frozen_first() -> nn.Sequential:
    net = halves()
    net[0].requires_grad_(False)
    return net


def unfreeze(net: nn.Sequential, inner: torch.optim.Optimizer) -> None:
    net[0].weight.requires_grad_(True)


def swap_frozen(net: nn.Sequential, inner: torch.optim.Optimizer) -> None:
    net[0].requires_grad_(True)
    net[2].requires_grad_(False)


def grow_buffer(net: nn.Sequential, inner: torch.optim.Optimizer) -> None:
    net.register_buffer("history", torch.zeros(2))


CHANGES = {
    "a group": (halves, add_group, "parameter groups of the wrapped optimizer were changed"),
    "a group's member": (halves, drop_parameter, "parameter groups of the wrapped optimizer were changed"),
    "a size": (halves, resize, r"2\.weight was resized, from the shape \(2, 8\) to \(5, 8\)"),
    "a layer": (halves, replace_layer, r"added or replaced, such as 2\.(weight|bias)"),
    "a frozen one": (halves, freeze, r"frozen or unfrozen.* such as 2\.bias"),
    "an unfrozen one": (frozen_first, unfreeze, r"frozen or unfrozen.* such as 0\.weight"),
    "a frozen one for another": (frozen_first, swap_frozen, "frozen or unfrozen"),
    "a buffer": (
        Growing,
        grow_buffer,
        r"buffer history had the shape \(1,\) and has \(2,\).*persistent=False",
    ),
}


@pytest.mark.parametrize(
    ("what", "options"),
    [
        *((what, {}) for what in CHANGES),
        ("a size", {"overlap": True}),
        ("an unfrozen one", {"overlap": True}),
        ("a layer", {"local_steps": 2}),
    ],
)
def test_a_change_of_what_is_trained_is_an_error_that_names_it(what: str, options: dict[str, object]) -> None:
    make, change, text = CHANGES[what]

    def train(swarm: Swarm) -> None:
        net = make()
        trained = net[-1] if change is add_group else net
        inner = torch.optim.SGD(trained.parameters(), lr=0.1)
        optimizer = swarm.optimizer(
            inner, target_batch_size=8, batch_size=8, model=net, **toy.exchanged(options)
        )
        net(torch.ones(8, 8)).square().mean().backward()
        optimizer.step()
        change(net, inner)
        net(torch.ones(8, 8)).square().mean().backward()
        with pytest.raises(RuntimeError, match=text):
            optimizer.step()

    toy.alone(train)


class MeanTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(8, 2)
        with torch.no_grad():
            self.student.weight.fill_(0.1)
            self.student.bias.zero_()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


def train_teacher(swarm: Swarm, *, again_at: int | None = None, steps: int = 30) -> tuple[torch.Tensor, int]:
    """Return the teacher's weights and how often it was said that it moves; bob makes his optimizer again."""
    net = MeanTeacher()

    def begin() -> object:
        inner = torch.optim.SGD(net.student.parameters(), lr=0.1)
        return swarm.optimizer(inner, target_batch_size=16, model=net)

    optimizer = begin()
    while optimizer.global_step < steps:  # type: ignore[attr-defined]
        if optimizer.global_step == again_at and swarm.name == "bob":  # type: ignore[attr-defined]
            again_at = None
            optimizer = begin()
        chance = torch.Generator().manual_seed(optimizer.global_step)  # type: ignore[attr-defined]
        x_BI = torch.randn(8, 8, generator=chance)
        out_BO = net.student(x_BI)
        ((out_BO - 1).square().mean() + (out_BO - net.teacher(x_BI)).square().mean()).backward()
        if optimizer.step(samples=8) is not None:  # type: ignore[attr-defined]
            with torch.no_grad():
                net.teacher.weight.lerp_(net.student.weight, 0.02)
    told = [event for event in swarm.events.recent(Notice) if "frozen parameters change" in str(event)]
    return net.teacher.weight.detach().clone(), len(told)


def test_a_late_joiner_gets_the_teacher_and_each_peer_is_told_once() -> None:
    with cs.simulate(1, samples_per_s=8.0) as simulation:
        simulation.join("bob", at=20.0)
        results = simulation.run(train_teacher)
    (alice, told), (bob, heard) = results["alice"], results["bob"]
    assert (told, heard) == (1, 1)
    # It follows the student at each peer's own steps; the first weights were 0.1.
    assert float((alice - bob).abs().max()) < 0.1 * float((alice - 0.1).abs().max())


def test_a_peer_that_makes_its_optimizer_again_is_not_refused_for_its_teacher() -> None:
    with cs.simulate(2, samples_per_s=8.0) as simulation:
        results = simulation.run(lambda swarm: train_teacher(swarm, again_at=12))
    assert len(results) == 2
