"""Only the scheduler that the swarm steps changes an optimizer's settings, and none can part the peers."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import colab_swarm as cs
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.replica import Replica, UpdateRule
from colab_swarm.training.schedule import GlobalScheduler
from tests.training import toy

Change = Callable[[Any, Any, Any], object]
MEAN = torch.full((178,), 0.1).numpy()


def alone_for(local_steps: int) -> cs.Communication:
    return cs.Communication(local_steps=local_steps)


def train(swarm: Swarm, change: Change = lambda *_: None, **settings: Any) -> tuple[torch.Tensor, list[str]]:
    """Three steps with a scheduler; ``change`` comes once, after the first. Returns the weights and the errors."""
    net = toy.model()
    inner = SGD(net.parameters(), lr=0.1, momentum=0.5)
    given = StepLR(inner, step_size=2)
    optimizer = swarm.optimizer(inner, target_batch_size=10, scheduler=given, **toy.exchanged(settings))
    said = []
    while optimizer.global_step < 3:
        toy.loss_of(net, optimizer.global_step).backward()
        try:
            optimizer.step(samples=10)
            optimizer.wait_step(0.0)
        except ValueError as error:
            said.append(str(error))
        if optimizer.global_step == 1 and change is not None:
            change(optimizer, inner, given)
            change = None
    return toy.parameters_of(net), said


def step_own(optimizer: Any, inner: Any, given: Any) -> None:
    own = ExponentialLR(inner, gamma=0.5)
    own.step()


def step_plateau(optimizer: Any, inner: Any, given: Any) -> None:
    own = ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 2.0):
        own.step(loss)


def set_group(name: str, value: object) -> Change:
    def change(optimizer: Any, inner: Any, given: Any) -> None:
        inner.param_groups[0][name] = value

    return change


CHANGES: dict[str, Change] = {
    "a scheduler over the wrapped one, stepped in the loop": step_own,
    "the given scheduler, stepped in the loop": lambda optimizer, inner, given: given.step(),
    "a plateau scheduler over the swarm's": step_plateau,
    "a rate": set_group("lr", 0.01),
    "a weight decay": set_group("weight_decay", 0.1),
    "a momentum": set_group("momentum", 0.9),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_else_changes_a_setting_is_refused_and_set_back(change: Change) -> None:
    expected, nothing = toy.alone(train)
    parameters, said = toy.alone(lambda swarm: train(swarm, change))
    assert not nothing and len(said) == 1
    assert "set back" in said[0] and "scheduler=… to swarm.optimizer" in said[0]
    torch.testing.assert_close(parameters, expected)


def test_with_delayed_updates_a_change_while_a_round_runs_takes_no_step() -> None:
    replica = Replica(UpdateRule(inner := SGD(toy.model().parameters(), lr=0.1), delayed=True))
    replica.apply(toy.mean_of(MEAN))
    before = [parameter.clone() for parameter in replica.parameters]
    inner.param_groups[0]["lr"] = 1.0
    with pytest.raises(ValueError, match=r"lr from 0.1 to 1.0.*scheduler=…"):
        replica.apply(toy.mean_of(MEAN))
    assert replica.step == 1 and all(map(torch.equal, replica.parameters, before))
    replica.apply(toy.mean_of(MEAN))
    assert replica.step == 2 and inner.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=60),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=4),
    ],
)
@pytest.mark.parametrize("delayed", [False, True])
def test_a_scheduler_over_the_swarms_optimizer_is_refused(make: Callable[..., Any], delayed: bool) -> None:
    def attempt(swarm: Swarm) -> tuple[bool, int]:
        optimizer = swarm.optimizer(
            SGD((net := toy.model()).parameters(), lr=0.1, momentum=0.5),
            target_batch_size=10,
            communication=cs.Communication(overlap=delayed),
        )
        with pytest.raises(ValueError, match=r"scheduler=… to swarm.optimizer"):
            make(optimizer)
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.1, 0.5)
        for step in range(2):
            toy.take(optimizer, net, step)
            optimizer.wait_step(1.0)
        return optimizer._step_supports_amp_scaling, optimizer.global_step

    assert toy.alone(attempt) == (True, 2)


class NeedsLoss(LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, loss: float) -> None:  # type: ignore[override]
        self.optimizer.param_groups[0]["lr"] = loss / 100


class NeedsTwo(NeedsLoss):
    def step(self, loss: float, accuracy: float) -> None:  # type: ignore[override]
        super().step(loss * accuracy)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (NeedsTwo, "NeedsTwo: its step.. needs more than a loss"),
        (lambda inner: StepLR(SGD(toy.model().parameters(), lr=0.1), 1), "is over another optimizer"),
    ],
)
def test_a_scheduler_that_cannot_count_steps_here_is_refused_at_once(
    make: Callable[..., Any], text: str
) -> None:
    def attempt(swarm: Swarm) -> None:
        inner = SGD(toy.model().parameters(), lr=0.1)
        with pytest.raises(ValueError, match=text):
            swarm.optimizer(inner, target_batch_size=10, scheduler=make(inner))
        assert not swarm.optimizers

    toy.alone(attempt)


class Spoils(LRScheduler):
    """Changes the rates, then raises in its third step."""

    def get_lr(self) -> list[float]:
        return [0.1]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        self.optimizer.param_groups[0]["lr"] = 7.0
        if self.last_epoch > 2:
            raise OSError("no connection")


RAISES = {
    "it is over": lambda inner: OneCycleLR(inner, 0.1, total_steps=2),
    "its function raises": lambda inner: LambdaLR(inner, lambda step: (1.0, 0.5, 0.25)[step]),
    "it spoils the rates": Spoils,
}


@pytest.mark.parametrize("make", RAISES.values(), ids=RAISES)
@pytest.mark.parametrize("rule", [{}, {"delayed": True}, {"local": True}], ids=str)
def test_a_scheduler_that_raises_leaves_the_replica_as_it_was(
    make: Callable[..., Any], rule: dict[str, Any]
) -> None:
    inner = Adam(toy.model().parameters(), lr=0.1)
    replica = Replica(UpdateRule(inner, make(inner), **rule))
    for _ in range(2):
        replica.apply(toy.mean_of(MEAN))
    before = replica.snapshot()
    for _ in range(3):
        with pytest.raises((ValueError, IndexError, OSError)):
            replica.apply(toy.mean_of(MEAN))
        after = replica.snapshot()
        assert after.manifest == before.manifest
        assert (replica.step, replica.lineage) == (before.manifest.step, before.manifest.subject)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle, of the momentum too": lambda one: OneCycleLR(one, 0.1, total_steps=9),
    "in sequence": lambda one: SequentialLR(one, [StepLR(one, 1), ExponentialLR(one, 0.5)], milestones=[2]),
    "chained": lambda one: ChainedScheduler([StepLR(one, 2), ExponentialLR(one, 0.9)]),
}


class Counting(SGD):
    """Keeps a count of its steps in its groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step(closure)


@pytest.mark.parametrize("local_steps", [1, 2])
def test_an_optimizer_may_count_in_its_groups(local_steps: int) -> None:
    def run(swarm: Swarm) -> tuple[int, int]:
        inner = Counting((net := toy.model()).parameters(), lr=0.1)
        optimizer = swarm.optimizer(
            inner, target_batch_size=10, scheduler=StepLR(inner, 1), communication=alone_for(local_steps)
        )
        toy.train_to(3, optimizer, net)
        return inner.param_groups[0]["k"], local_steps

    steps, per_round = toy.alone(run)
    assert steps == 3 * per_round


def test_a_loaded_state_is_no_change_from_outside() -> None:
    def run(swarm: Swarm) -> tuple[list[float], int]:
        inner = SGD((net := toy.model()).parameters(), lr=0.1)
        optimizer = swarm.optimizer(inner, target_batch_size=10, scheduler=StepLR(inner, 1))
        first = optimizer.state_dict(), optimizer.scheduler.state_dict()
        for step in range(2):
            toy.take(optimizer, net, step)
        assert isinstance(optimizer.scheduler, GlobalScheduler)
        optimizer.load_state_dict(first[0])
        optimizer.scheduler.load_state_dict(first[1])
        before = optimizer.global_step
        while optimizer.global_step == before:
            toy.take(optimizer, net, 2)
        return optimizer.scheduler.get_last_lr(), optimizer.rule.scheduler.last_epoch

    rates, epoch = toy.alone(run)
    assert rates == [pytest.approx(0.01)] and epoch == 1


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_grad_scaler_drives_optimizer_and_scheduler_and_skips_overflow(
    delayed: bool, unscales: bool
) -> None:
    def run(swarm: Swarm) -> tuple[torch.Tensor, float]:
        inner = SGD((net := toy.model()).parameters(), lr=0.1)
        settings = toy.exchanged({"target_batch_size": 10, "overlap": delayed})
        optimizer = swarm.optimizer(inner, scheduler=StepLR(inner, 1, gamma=0.5), **settings)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step, factor in ((0, 1.0), (1, float("inf")), (1, 1.0)):
            scaler.scale(toy.loss_of(net, step) * factor).backward()
            if unscales:  # to clip
                scaler.unscale_(optimizer)
            scaler.step(optimizer, samples=10)
            scaler.update()
            optimizer.scheduler.step()  # as a framework does
            if delayed:
                optimizer.wait_step(timeout_s=1.0)  # nothing is stale
        assert scaler.get_scale() < 2.0**8
        return toy.parameters_of(net), inner.param_groups[0]["lr"]

    net = toy.model()
    plain = SGD(net.parameters(), lr=0.1)
    for step in range(2):
        plain.zero_grad()
        toy.loss_of(net, step).backward()
        plain.step()
        plain.param_groups[0]["lr"] /= 2
    parameters, rate = toy.alone(run)
    torch.testing.assert_close(parameters, toy.parameters_of(net))
    assert rate == pytest.approx(0.025)


def plateau(inner: Any) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(inner, factor=0.5, patience=0, threshold=0.0)


LOSS_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "a plateau": plateau,
    "a plateau with a cooldown": lambda inner: ReduceLROnPlateau(inner, "max", 0.5, 1, cooldown=1),
    "one of the user's": NeedsLoss,
}
ROWS_OF = {"alice": slice(0, 3), "bob": slice(3, 10)}
STEPS = 8
Course = tuple[torch.Tensor, bytes, dict[int, float], dict[str, Any]]


def sgd(net: torch.nn.Module, rate: Any = 0.2) -> SGD:
    return SGD(net.parameters(), lr=copy.deepcopy(rate), momentum=0.5)


def course(
    swarm: Swarm, make: Callable[[Any], Any] = plateau, local_steps: int = 1, rate: Any = 0.2
) -> Course:
    """Each peer's own rows of each step. Returns weights, lineage, the rate after each step, the scheduler's state."""
    net = toy.model()
    inner = sgd(net, rate)
    optimizer = swarm.optimizer(
        inner,
        target_batch_size=10,
        scheduler=make(inner),
        min_peers=2,
        communication=alone_for(local_steps),
    )
    rows = ROWS_OF[swarm.name]
    rates = {}
    for step in range(optimizer.global_step, STEPS):
        for _ in range(local_steps):
            loss = toy.loss_of(net, step, rows)
            loss.backward()
            optimizer.step(samples=rows.stop - rows.start, loss=loss)
        while optimizer.global_step == step:
            optimizer.wait_step()
        rates[optimizer.global_step] = float(inner.param_groups[0]["lr"])
    return toy.parameters_of(net), optimizer.lineage, rates, optimizer.scheduler.state_dict()


@pytest.mark.parametrize(
    ("make", "rate"),
    [
        *(pytest.param(make, 0.2, id=name) for name, make in (SCHEDULERS | LOSS_SCHEDULERS).items()),
        pytest.param(SCHEDULERS["chained"], torch.tensor(0.2), id="chained, a tensor"),
    ],
)
def test_a_schedule_of_two_peers_is_that_of_one_process_with_the_joined_loss(
    make: Callable[[Any], Any], rate: Any
) -> None:
    net = toy.model()
    plain = sgd(net, rate)
    scheduler = make(plain)
    expected = {}
    for step in range(STEPS):
        plain.zero_grad()
        loss = toy.loss_of(net, step)
        loss.backward()
        plain.step()
        scheduler.step(*([loss.item()] if make in LOSS_SCHEDULERS.values() else []))
        expected[step + 1] = float(plain.param_groups[0]["lr"])
    assert len(set(expected.values())) > 1
    with cs.simulate(2) as sim, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch warns of a scheduler that comes first
        (parameters, lineage, rates, _), (others, theirs, their_rates, _) = sim.run(
            lambda swarm: course(swarm, make, rate=rate)
        ).values()
    assert torch.equal(parameters, others) and lineage == theirs and rates == their_rates
    assert rates == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(parameters, toy.parameters_of(net), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("local_steps", [1, 2])
def test_a_late_joiner_has_the_plateaus_counters_with_the_state(local_steps: int) -> None:
    def run(swarm: Swarm) -> Course:
        if swarm.name != "carol":
            return course(swarm, local_steps=local_steps)
        inner = sgd(toy.model(9))
        scheduler = ReduceLROnPlateau(inner, factor=0.1)
        optimizer = swarm.optimizer(
            inner, target_batch_size=10, scheduler=scheduler, communication=alone_for(local_steps)
        )
        rates = {optimizer.global_step: inner.param_groups[0]["lr"]}
        optimizer.close()
        return toy.parameters_of(toy.model()), optimizer.lineage, rates, scheduler.state_dict()

    with cs.simulate(2, samples_per_s=10.0) as sim:
        sim.join("carol", at=4.0)
        results = sim.run(run)
    _, lineage, rates, state = results["alice"]
    _, _, joined, received = results["carol"]
    assert results["bob"][1:] == (lineage, rates, state)
    assert min(joined) > 0 and joined.items() <= rates.items()
    assert received["patience"] == 0 and received["factor"] == 0.5
    assert received["last_epoch"] == min(joined) and received["best"] < float("inf")


def test_a_step_without_a_loss_is_refused_where_a_scheduler_goes_by_it() -> None:
    def run(swarm: Swarm) -> list[float]:
        inner = SGD((net := toy.model()).parameters(), lr=0.1)
        optimizer = swarm.optimizer(inner, target_batch_size=10, scheduler=plateau(inner))
        for wrong in ({"samples": 10}, {"samples": 5, "loss": None}):
            toy.loss_of(net, 0).backward()
            with pytest.raises(ValueError, match=r"pass loss=…"):
                optimizer.step(**wrong)
        rates = []
        for loss in (1.0, float("nan"), torch.tensor(2.0)):
            toy.loss_of(net, 0).backward()
            optimizer.step(samples=10, loss=loss)
            rates.append(inner.param_groups[0]["lr"])
        return [optimizer.global_step, *rates]

    assert toy.alone(run) == [3, 0.1, 0.1, 0.05]


@pytest.mark.parametrize("rule", [{}, {"delayed": True}, {"local": True}], ids=str)
def test_a_round_in_which_nobody_sent_a_loss_leaves_the_plateau_where_it_is(rule: dict[str, Any]) -> None:
    inner = SGD(toy.model().parameters(), lr=0.1)
    replica = Replica(UpdateRule(inner, scheduler := plateau(inner), **rule))
    replica.apply(toy.mean_of(MEAN, loss=1.0))
    replica.apply(toy.mean_of(MEAN))
    assert (replica.step, scheduler.last_epoch, inner.param_groups[0]["lr"]) == (2, 1, 0.1)
    replica.apply(toy.mean_of(MEAN, loss=1.5))
    assert (scheduler.last_epoch, inner.param_groups[0]["lr"]) == (2, 0.05)
