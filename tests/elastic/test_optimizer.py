"""`ElasticOptimizer` in simulated groups."""

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.elastic import BoundedStaleness, CrashTolerant, NormBounded, Synchronous, VarianceBounded
from colab_swarm.elastic.optimizer import ElasticOptimizer
from colab_swarm.elastic.schedulers import Scheduler
from colab_swarm.elastic.steps import ElasticStep
from colab_swarm.errors import MismatchError, StateError, StepError
from colab_swarm.events import BatchDropped, PeerLeft
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from tests.elastic.group import LR, join_group, reference, rows_of, take
from tests.training.toy import loss_of, model, parameters_of

STEPS = 20
WAITING = (Synchronous(), NormBounded(1.0), VarianceBounded(10.0), CrashTolerant(1, 10.0))


def simulation(peers: int = 2, network: str = "lan") -> Simulation:
    return cs.simulate(peers, network=network, seed=1, samples_per_s=100.0)


def train(
    swarm: Swarm, peers: int = 2, steps: int = STEPS, **options: Any
) -> tuple[torch.Tensor, list[ElasticStep]]:
    """Train on this member's rows of each batch."""
    optimizer = join_group(swarm, net := model(), peers, **options)
    steps_done = [take(optimizer, net, step, peers) for step in range(steps)]
    optimizer.close()
    return parameters_of(net), steps_done


@pytest.mark.parametrize(
    ("peers", "scheduler"),
    [*((2, one) for one in WAITING), pytest.param(5, WAITING[0], marks=pytest.mark.slow)],
)
def test_members_that_wait_equal_one_process_with_all_batches(peers: int, scheduler: Scheduler) -> None:
    with simulation(peers, "lan" if peers == 2 else "home") as sim:
        results = sim.run(lambda swarm: train(swarm, peers, scheduler=scheduler))
    assert len(results) == peers
    for parameters, steps_done in results.values():
        torch.testing.assert_close(parameters, reference(STEPS, peers), rtol=0, atol=1e-5)
        assert [one.step for one in steps_done] == list(range(STEPS))
        assert not any(one.missing for one in steps_done)


def test_a_step_that_failed_between_two_single_steps_goes_on_with_the_second() -> None:
    def train_singly(swarm: Swarm) -> tuple[torch.Tensor, int]:
        sgd = torch.optim.SGD((net := model()).parameters(), lr=LR)
        updates: list[int] = []
        failures: list[int] = []

        def failing(*_: Any) -> None:
            updates.append(1)
            if len(updates) == 2 and not failures:
                failures.append(1)
                raise torch.OutOfMemoryError("no memory for it")

        sgd.register_step_pre_hook(failing)
        scheduler = BoundedStaleness(1, single_steps=True)
        optimizer = swarm.elastic.optimizer(sgd, peers=2, scheduler=scheduler)
        for batch, share in ((0, 1.0), (1, 0.0)):
            (share * loss_of(net, batch, rows_of(optimizer.member, 2))).backward()
            updates.clear()
            with suppress(torch.OutOfMemoryError):
                optimizer.step(samples=5)
            if len(optimizer.snapshot().steps) == batch:
                optimizer.step(samples=5)
        optimizer.close()
        return parameters_of(net), len(failures)

    net = model()
    for member in range(2):
        loss_of(net, 0, rows_of(member, 2)).backward()
    torch.optim.SGD(net.parameters(), lr=LR).step()
    with simulation() as sim:
        results = sim.run(train_singly)
    for parameters, _ in results.values():
        torch.testing.assert_close(parameters, parameters_of(net), rtol=0, atol=1e-5)
    assert sum(failures for _, failures in results.values()) >= 1


@pytest.mark.parametrize("scheduler", [NormBounded(0.0), BoundedStaleness(3)], ids=repr)
def test_members_that_do_not_wait_are_faster_and_stay_close(scheduler: Scheduler) -> None:
    seconds = {}
    for name, chosen in (("waits", Synchronous()), ("continues", scheduler)):
        with simulation(network="home") as sim:
            results = sim.run(lambda swarm: train(swarm, scheduler=chosen))  # noqa: B023
            seconds[name] = sim.time
    assert seconds["continues"] < seconds["waits"]
    for parameters, steps_done in results.values():
        assert any(one.missing > 0 for one in steps_done)
        assert steps_done[-1].bound and steps_done[-1].inconsistency > 0
        assert (parameters - reference(STEPS)).abs().max() < 0.2


@pytest.mark.parametrize("compression", ["float16", "topk:0.1", "onebit"])
def test_members_apply_decoded_values_so_they_stay_equal(compression: str) -> None:
    with simulation() as sim:
        results = sim.run(
            lambda swarm: train(swarm, steps=10, scheduler=Synchronous(), compression=compression)
        )
    (alice, steps_done), (bob, _) = results.values()
    assert torch.equal(alice, bob)
    assert steps_done[-1].bound and steps_done[-1].inconsistency <= steps_done[-1].bound


@pytest.mark.parametrize("factor", [float("nan"), 1e30], ids=["not a number", "squares overflow"])
def test_a_gradient_that_is_not_finite_counts_as_zero_and_no_member_is_lost(factor: float) -> None:
    def train_with_nan(swarm: Swarm) -> tuple[torch.Tensor, list[BatchDropped], ElasticStep]:
        optimizer = join_group(swarm, net := model(), 2)
        broken = factor if optimizer.member == 0 else 1.0
        (broken * loss_of(net, 0, rows_of(1, 2))).backward()
        step = optimizer.step()
        optimizer.close()
        return parameters_of(net), swarm.events.recent(BatchDropped), step

    with simulation() as sim:
        results = sim.run(train_with_nan)
    (alice, dropped, step), (bob, others, _) = results.values()
    assert torch.equal(alice, bob) and alice.isfinite().all() and not step.lost
    assert len(dropped + others) == 1 and "NaN" in (dropped + others)[0].reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "crashes"), [(Synchronous(), True), (CrashTolerant(1, 0.5), False)], ids=repr
)
def test_a_member_that_is_lost_does_not_delay_the_others(scheduler: Scheduler, crashes: bool) -> None:
    def work(swarm: Swarm) -> tuple[torch.Tensor, list[ElasticStep]]:
        closes = swarm.name == "carol" and not crashes
        return train(swarm, 3, steps=5 if closes else 100, scheduler=scheduler)

    with simulation(3) as sim:
        if crashes:
            sim.network.at(4.0).crash("carol")
        results = sim.run(work)
        assert [fault.name for fault in sim.network.fired] == ["crash"] * crashes
        assert all(swarm.events.recent(PeerLeft) for name, swarm in sim.swarms.items() if name != "carol")
    assert results.keys() == {"alice", "bob"} | ({"carol"} if not crashes else set())
    for steps_done in (results["alice"][1], results["bob"][1]):
        assert steps_done[0].lost == () and len(steps_done[-1].lost) == 1
        assert max(one.waited_s for one in steps_done) < 2.0
        assert steps_done[-1].bound and steps_done[-1].inconsistency <= steps_done[-1].bound


def test_residuals_and_corrections_are_saved_and_restored() -> None:
    def save(swarm: Swarm) -> tuple[int, dict[str, Any]]:
        optimizer = join_group(swarm, net := model(), 2, compression="topk:0.1", error_feedback=False)
        assert [take(optimizer, net, step).bound for step in range(2)][-1] is None, "without error feedback"
        assert "residual" not in optimizer.state_dict()
        optimizer.close()
        optimizer = join_group(swarm, net := model(), 2, compression="topk:0.1", scheduler=NormBounded(0.0))
        take(optimizer, net, 0)  # the other's gradient comes during the next pass
        state = optimizer.state_dict()
        optimizer.close()
        return optimizer.member, state

    def resume(swarm: Swarm) -> torch.Tensor:
        optimizer = join_group(swarm, net := model(), 2, compression="topk:0.1")
        own = 1000.0 * (1 - optimizer.member)  # the first member's count
        optimizer.load_state_dict({**states[optimizer.member], "corrections": torch.full((178,), own)})
        with pytest.raises(StateError, match="another model"):
            optimizer.load_state_dict({"corrections": torch.ones(3)})
        torch.testing.assert_close(optimizer.state_dict()["residual"], states[optimizer.member]["residual"])
        (0.0 * loss_of(net, 0)).backward()
        optimizer.step()
        optimizer.close()
        return parameters_of(net)

    with simulation() as sim:
        states = dict(sim.run(save).values())
        assert all(state["residual"].norm() > 0 for state in states.values())
        loss_of(net := model(), 0, rows_of(1, 2)).backward()
        bobs = sum(float(parameter.grad.sum()) for parameter in net.parameters())
        owed = float((states[0]["corrections"] + states[1]["residual"]).sum())
        assert owed == pytest.approx(bobs, abs=1e-5)
        alice, bob = sim.run(resume).values()
    assert torch.equal(alice, bob)
    assert (alice - parameters_of(model())).min() == pytest.approx(-LR * 1000.0 / 2, rel=0.01)


def test_unsupported_calls_and_settings_name_the_alternative() -> None:
    def misuse(swarm: Swarm) -> str:
        inner = torch.optim.SGD(model().parameters(), lr=0.1)
        for other in (torch.optim.lr_scheduler.StepLR(inner, 1), NormBounded):
            with pytest.raises(ValueError, match=r"says when a member goes on, such as .*NormBounded\(0.8\)"):
                swarm.elastic.optimizer(inner, peers=2, scheduler=other)
        optimizer = join_group(swarm, model(), 2)
        with pytest.raises(ValueError, match="closure"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(TypeError, match="add groups before"):
            optimizer.add_param_group({})
        text = repr(optimizer)
        optimizer.close()
        optimizer.close()
        with pytest.raises(RuntimeError, match="create a new one"):
            optimizer.step()
        return text

    with simulation() as sim:
        texts = set(sim.run(misuse).values())
    assert texts == {"ElasticOptimizer(SGD, Synchronous(), step=0, 2 members, 0 lost)"}


@pytest.mark.parametrize("of_inner", [True, False])
def test_hooks_clip_what_is_sent_and_each_member_steps_a_scheduler_of_learning_rates(of_inner: bool) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        net = model()
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))  # type: ignore[no-untyped-call]
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    def run(swarm: Swarm) -> torch.Tensor:
        net, inner = made()
        optimizer = swarm.elastic.optimizer(inner, peers=2)
        rates = torch.optim.lr_scheduler.StepLR(inner if of_inner else optimizer, 1, gamma=0.5)
        for step in range(4):
            loss_of(net, step).backward()
            optimizer.step()
            rates.step()
        optimizer.close()
        return parameters_of(net)

    net, plain = made()
    for step in range(4):
        plain.zero_grad()
        loss_of(net, step).backward()
        plain.step()
        plain.param_groups[0]["lr"] *= 0.5
    with simulation() as sim:
        for parameters in sim.run(run).values():
            torch.testing.assert_close(parameters, parameters_of(net), rtol=0, atol=1e-5)


def test_parameters_that_the_loss_does_not_use_or_that_were_frozen_are_named_and_do_not_move() -> None:
    def run(swarm: Swarm) -> None:
        net = model()
        spare = torch.nn.Parameter(torch.ones(3))
        adam = torch.optim.AdamW([*net.parameters(), spare], lr=0.01, weight_decay=0.1)
        optimizer = swarm.elastic.optimizer(adam, peers=2)
        with pytest.raises(StepError, match=r"1 of 5 parameters got no gradient, such as .*3.*freeze"):
            take(optimizer, net, 0)
        optimizer.close()
        assert torch.equal(spare, torch.ones(3))
        optimizer = join_group(swarm, net := model(), 2)
        loss = loss_of(net, 0)
        next(net.parameters()).requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"was frozen between .* before swarm.elastic.optimizer"):
            loss.backward()
        optimizer.close()

    with simulation() as sim:
        sim.run(run)


def clip(net: torch.nn.Module, optimizer: ElasticOptimizer) -> None:
    loss_of(net, 1).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()


def divide(net: torch.nn.Module, optimizer: ElasticOptimizer) -> None:
    loss_of(net, 1).backward()
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 2
    optimizer.step()


def clear(net: torch.nn.Module, optimizer: ElasticOptimizer) -> None:
    loss_of(net, 1).backward()
    optimizer.zero_grad()
    optimizer.step()


def scale(net: torch.nn.Module, optimizer: ElasticOptimizer, by: float, unscaled: bool = False) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=by)
    scaler.scale(loss_of(net, 1)).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)


CHANGED = r"register_hook\(…\).* or use swarm.optimizer\(…, max_grad_norm"
SCALED = r"a GradScaler divides gradients after .* or use swarm.optimizer"
MISUSES: list[tuple[Any, str]] = [
    *((clip, CHANGED), (divide, CHANGED), (clear, CHANGED)),
    *((partial(scale, by=by), SCALED) for by in (1.0, 256.0, 2.0**127)),  # the last one overflows
    *((partial(scale, by=by, unscaled=True), SCALED) for by in (256.0, 2.0**127)),
]


def test_what_changes_gradients_after_they_were_sent_is_refused_and_a_scaler_that_is_off_is_not() -> None:
    def run(swarm: Swarm) -> None:
        for misuse, words in MISUSES:
            optimizer = join_group(swarm, net := model(), 2)
            off = torch.amp.GradScaler("cpu", enabled=False)
            off.scale(loss_of(net, 0)).backward()
            off.step(optimizer)
            before = parameters_of(net)
            with pytest.raises(RuntimeError, match=words):
                misuse(net, optimizer)
            assert torch.equal(parameters_of(net), before)
            optimizer.close()

    with simulation() as sim:
        sim.run(run)


@pytest.mark.parametrize(("by_scheduler", "of_first"), [(True, False), (False, True)])
def test_a_member_whose_learning_rates_leave_the_first_ones_is_told_at_that_step(
    by_scheduler: bool, of_first: bool
) -> None:
    def run(swarm: Swarm) -> str:
        inner = torch.optim.SGD((net := model()).parameters(), lr=0.1)
        optimizer = swarm.elastic.optimizer(inner, peers=2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
        said = f"member {optimizer.member}"
        try:
            for step in range(5):
                take(optimizer, net, step)
                changes = step == 2 and (optimizer.member == 0) == of_first
                if changes and by_scheduler:
                    scheduler.step()
                elif changes:
                    optimizer.param_groups[0]["lr"] /= 2
        except MismatchError as error:
            said = str(error)
        optimizer.close()
        return said

    with simulation() as sim:
        told, first = sorted(sim.run(run).values())
    mine, theirs = ("0.1", "0.05") if of_first else ("0.05", "0.1")
    assert first == "member 0"
    assert told.startswith(
        f"at step 3 the group's first member has the learning rate {theirs}, this one {mine}"
    )
