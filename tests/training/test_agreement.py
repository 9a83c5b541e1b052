"""Peers that would train something else are refused by name, before they train."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

import colab_swarm as cs
from colab_swarm.errors import MismatchError
from colab_swarm.net.peers import PeerId
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.agreement import agreement_of
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.records import MAX_PAIR_TEXT, ProgressRecord
from colab_swarm.training.replica import Replica, UpdateRule
from colab_swarm.training.settings import TrainingSettings
from colab_swarm.training.view import SwarmView
from tests.training.toy import exchanged

REFUSED_WITHIN_S = 5.0


class Adapted(nn.Module):
    """A frozen base with an adapter of some rank, as LoRA makes one."""

    def __init__(self, rank: int = 2, change: float = 0.0) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(0)
        self.base = nn.Parameter(torch.randn(8, 8, generator=chance), requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, 8, generator=chance))
        self.up = nn.Parameter(torch.zeros(8, rank))
        self.base.data[0, 0] += change

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        return x_BI @ (self.base + self.up @ self.down)


def adam(net: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW((one for one in net.parameters() if one.requires_grad), lr)


def begin(
    swarm: Swarm,
    net: nn.Module | None = None,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    **changes: Any,
) -> SwarmOptimizer:
    net = net or Adapted()
    settings = {"batch_size": 4, "target_batch_size": 4, "max_grad_norm": 1.0, **changes}
    return swarm.optimizer(make(net), model=net, **exchanged(settings))


def train_to(optimizer: SwarmOptimizer, step: int) -> int:
    while optimizer.global_step < step:
        optimizer.rule.model(torch.ones(4, 8)).square().mean().backward()  # type: ignore[misc]
        optimizer.step()
    return optimizer.global_step


def renamed() -> nn.Module:
    net = Adapted()
    net.other = net.up
    del net.up
    return net


def in_half() -> nn.Module:
    net = Adapted()
    net.up.data = net.up.data.to(torch.bfloat16)
    return net


OTHERS: dict[str, tuple[str, Callable[[Swarm], SwarmOptimizer]]] = {
    "base": (
        "frozen base: .*: 64 values in float32 there, .*: 64 values in float32 here",
        lambda swarm: begin(swarm, Adapted(change=1e-3)),
    ),
    "rank": (
        r"model: 32 trained values in 2 float32 tensors .* there, 64 trained values in 2 float32 tensors .* here.*"
        r"Other tensors: down: \(2, 8\) there, \(4, 8\) here; up: \(8, 2\) there, \(8, 4\) here$",
        lambda swarm: begin(swarm, Adapted(rank=4)),
    ),
    "names": ("other: only here; up: only there", lambda swarm: begin(swarm, renamed())),
    "types": ("up: float32 there, bfloat16 here", lambda swarm: begin(swarm, in_half())),
    "batch": ("target_batch_size: 4 there, 512 here", lambda swarm: begin(swarm, target_batch_size=512)),
    "optimizer": (
        r"optimizer: AdamW there, SGD here\. Use the run's",
        lambda swarm: begin(swarm, make=lambda net: torch.optim.SGD([net.down, net.up], 1e-3)),
    ),
    "rate": (
        "learning rate: 0.001 there, 0.01 here",
        lambda swarm: begin(swarm, make=lambda net: adam(net, 1e-2)),
    ),
    "decay": (
        "optimizer options: [0-9a-f]{8}: defaults there, [0-9a-f]{8}: weight_decay=0.5 here",
        lambda swarm: begin(
            swarm, make=lambda net: torch.optim.AdamW([net.down, net.up], 1e-3, weight_decay=0.5)
        ),
    ),
    "clip": ("max_grad_norm: 1 there, none here", lambda swarm: begin(swarm, max_grad_norm=None)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_peer_that_would_train_something_else_is_refused_in_time_and_the_others_train_on(what: str) -> None:
    told, other = OTHERS[what]

    def work(swarm: Swarm) -> int:
        if swarm.name == "mallory":
            began = swarm.runtime.time()
            with pytest.raises(MismatchError, match=told):
                other(swarm)
            assert swarm.runtime.time() - began < REFUSED_WITHIN_S and not swarm.optimizers
            return 0
        return train_to(begin(swarm), 8)

    with cs.simulate(2, network="home", seed=1, samples_per_s=8.0) as simulation:
        simulation.join("mallory", at=3.0)
        assert simulation.run(work) == {"alice": 8, "bob": 8, "mallory": 0}


@pytest.mark.parametrize("seed", range(2))
def test_of_two_that_begin_together_one_is_refused(seed: int) -> None:
    def work(swarm: Swarm) -> str:
        try:
            train_to(begin(swarm, target_batch_size=8 if swarm.name == "alice" else 16), 4)
        except MismatchError as error:
            return str(error)
        return ""

    with cs.simulate(2, network="home", seed=seed, samples_per_s=8.0) as simulation:
        told = sorted(simulation.run(work).values())
    assert told[0] == "" and "target_batch_size" in told[1]


ME, BOB, CAROL = (PeerId(bytes([n]) * 32) for n in range(3))


def record(batch: str, **facts: object) -> ProgressRecord:
    agreement = (("target_batch_size", batch),)
    facts = {"samples": 0.0, "samples_per_s": 1.0, "syncing": False, "name": "", **facts}
    return ProgressRecord(0, b"same", agreement=agreement, **facts)  # type: ignore[arg-type]


def test_a_peer_that_has_averaged_with_others_is_told_nothing_by_strangers() -> None:
    view = SwarmView(ME, record("8"), round_samples=8.0)
    view.on_records({BOB: record("8"), CAROL: record("64")}, now=0.0)
    assert view.disagreement() == ""
    view.own = record("512", syncing=True)
    assert view.disagreement() == "target_batch_size: 8 there, 512 here"
    view.on_step({ME: 4.0, BOB: 4.0}, now=1.0, swarm_now=1.0)
    assert view.disagreement() == ""


def test_text_of_others_cannot_control_a_terminal() -> None:
    view = SwarmView(ME, record("8", syncing=True))
    view.on_records({BOB: record("\x1b[2J")}, now=0.0)
    assert view.disagreement() == "target_batch_size: ?[2J there, 8 here"


def options_of(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None) -> str:
    replica = Replica(UpdateRule(optimizer, scheduler))
    return dict(agreement_of(replica, TrainingSettings("run/model", 8.0)))["optimizer options"]


class Quiet(torch.optim.AdamW):
    """Passes its options on without naming them."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda net: torch.optim.AdamW(net.parameters(), weight_decay=0.5), "weight_decay=0.5"),
        (lambda net: torch.optim.AdamW(net.parameters(), betas=(0.9, 0.9)), "betas=(0.9, 0.9)"),
        (lambda net: torch.optim.AdamW(net.parameters(), amsgrad=True), "amsgrad=True"),
        (
            lambda net: torch.optim.AdamW(
                [{"params": [net.weight]}, {"params": [net.bias], "weight_decay": 0}]
            ),
            "defaults (1 tensor), weight_decay=0 (1 tensor)",
        ),
        (lambda net: Quiet(net.parameters(), weight_decay=0.5), "weight_decay=0.5"),
    ],
)
def test_options_that_change_the_steps_are_compared(
    make: Callable[[nn.Module], torch.optim.Optimizer], text: str
) -> None:
    usual = options_of(torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    options = options_of(make(nn.Linear(2, 2)))
    assert usual.endswith(": defaults") and options.endswith(f": {text}")
    assert options.partition(":")[0] != usual.partition(":")[0]


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"lora_alpha": 64}, "lora_alpha=64"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"alpha_pattern": {"0": 4}}, "alpha_pattern="),
    ],
    ids=str,
)
def test_the_scale_of_an_adapter_is_compared(option: dict[str, object], text: str) -> None:
    peft = pytest.importorskip("peft", reason="the extra [dev] installs peft")

    def adapters(**options: object) -> str:
        config = peft.LoraConfig(**{"r": 2, "lora_alpha": 8, "target_modules": ["0"], **options})
        net = peft.get_peft_model(nn.Sequential(nn.Linear(8, 2)), config)
        replica = Replica(UpdateRule(adam(net), model=net))
        return dict(agreement_of(replica, TrainingSettings("run/model", 8.0)))["adapters"]

    assert text in adapters(**option) and text not in adapters()


def test_options_that_change_no_step_are_not_compared() -> None:
    usual = options_of(torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    assert usual == options_of(
        torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=1.0, foreach=True, weight_decay=torch.tensor(0.01))
    )


def test_the_momentum_of_a_cycling_scheduler_is_not_compared() -> None:
    def cycled(steps: int) -> str:
        optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return options_of(optimizer, scheduler)

    assert cycled(0) == cycled(4)


def test_long_options_end_within_a_record() -> None:
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)])
    groups = [{"params": layer.parameters(), "weight_decay": 0.1 * n} for n, layer in enumerate(net)]
    other = [{"params": layer.parameters(), "weight_decay": 0.1 * n} for n, layer in enumerate(net)]
    other[-1]["weight_decay"] = 7.0
    long = options_of(torch.optim.AdamW(groups))
    assert len(long) == MAX_PAIR_TEXT and long != options_of(torch.optim.AdamW(other))


def test_a_schedule_of_another_length_is_refused_at_the_first_step_where_it_differs() -> None:
    lengths = {"alice": 4, "bob": 6, "carol": 4}

    def work(swarm: Swarm) -> str:
        net = Adapted()
        sgd = torch.optim.SGD([net.down, net.up], 1e-2)
        scheduler = StepLR(sgd, lengths[swarm.name], gamma=0.5)
        optimizer = swarm.optimizer(sgd, target_batch_size=12, model=net, scheduler=scheduler)
        try:
            while optimizer.global_step < 12:
                net(torch.ones(4, 8)).square().mean().backward()
                optimizer.step(samples=4)
        except MismatchError as error:
            swarm.leave()
            return str(error)
        return ""

    with cs.simulate(3, seed=1, samples_per_s=2.0) as simulation:
        errors = simulation.run(work)
    assert errors["alice"] == errors["carol"] == ""
    assert "the swarm has the learning rate" in errors["bob"] and "scheduler=" in errors["bob"]
