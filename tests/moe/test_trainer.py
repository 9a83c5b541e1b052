import _thread
import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colab_swarm as cs
from colab_swarm.errors import ExpertError, NoExpertsError
from colab_swarm.moe import trainer as module
from colab_swarm.moe.trainer import AsyncTrainer

QUIET: dict[str, Any] = {"concurrency": 4, "progress": False}


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def batches(count: int) -> list[Tensor]:
    return list(torch.randn(count, 8, 4, generator=torch.Generator().manual_seed(0)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(4, 2)


def test_with_one_batch_in_flight_it_is_plain_training(model: nn.Linear) -> None:
    twin = copy.deepcopy(model)
    optimizer = sgd(twin)
    for batch in batches(5):
        optimizer.zero_grad()
        square(twin, batch).backward()
        optimizer.step()
    result = AsyncTrainer(model, square, sgd(model), concurrency=1, progress=False).fit(batches(5))
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert (result.updates, result.samples, result.mean_staleness) == (5, 40, 0.0) and result.seconds > 0
    with pytest.raises(ValueError, match="concurrency=0"):
        AsyncTrainer(model, square, sgd(model), concurrency=0)


def test_every_batch_in_flight_sees_the_same_parameters_and_all_updates_count(model: nn.Linear) -> None:
    together = threading.Barrier(4)
    seen: list[Tensor] = []

    def loss(replica: nn.Module, batch: Tensor) -> Tensor:
        together.wait(10)
        seen.append(next(replica.parameters()).detach().clone())
        together.wait(10)
        return square(replica, batch)

    before = copy.deepcopy(model)
    result = AsyncTrainer(model, loss, sgd(model), **QUIET).fit(batches(4))
    assert len(seen) == 4 and all(torch.equal(weight, before.weight) for weight in seen)
    assert result.mean_staleness == pytest.approx(1.5)
    for batch in batches(4):
        square(before, batch).backward()  # gradients add up
    sgd(before).step()
    torch.testing.assert_close(model.state_dict(), before.state_dict())


@pytest.mark.parametrize("error", [ExpertError("it is dead"), NoExpertsError("no expert is alive")])
def test_failures_are_retried_until_patience_ends(
    model: nn.Linear, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.001)
    faults = [error] * 5

    def loss(replica: nn.Module, batch: Tensor) -> Tensor:
        if faults:
            raise faults.pop()
        return square(replica, batch)

    result = AsyncTrainer(model, loss, sgd(model), **QUIET).fit(batches(6))
    assert (result.updates, result.retries) == (6, 5) and not faults
    faults.append(error)
    with pytest.raises(type(error), match=str(error)):
        AsyncTrainer(model, loss, sgd(model), **QUIET, patience_s=-1.0).fit(batches(6))


@pytest.mark.parametrize("where", ["loss", "batches", "on_update"])
def test_the_users_own_errors_are_raised_wherever_they_come_from(model: nn.Linear, where: str) -> None:
    def come(place: str) -> None:
        if place == where:
            raise ZeroDivisionError(f"in the {place}")

    def loss(replica: nn.Module, batch: Tensor) -> Tensor:
        come("loss")
        return square(replica, batch)

    def feed() -> Iterator[Tensor]:
        yield from batches(2)
        come("batches")

    with pytest.raises(ZeroDivisionError, match=where):
        AsyncTrainer(model, loss, sgd(model), **QUIET, on_update=lambda _: come("on_update")).fit(feed())


def test_an_interrupt_leaves_complete_updates_and_drops_batches_in_flight(model: nn.Linear) -> None:
    release, steps = threading.Event(), 0

    class Interrupted(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            nonlocal steps
            steps += 1
            if steps == 3:
                _thread.interrupt_main()  # in the midst of an update
            super().step(closure)

    def loss(replica: nn.Module, batch: Tensor) -> Tensor:
        if steps >= 3:
            release.wait(10)
        return square(replica, batch)

    trainer = AsyncTrainer(model, loss, Interrupted(model.parameters(), lr=0.05), **QUIET)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(batches(1000))
    after = [parameter.detach().clone() for parameter in model.parameters()]
    applied = trainer.result.updates
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("trainer-"):
            thread.join(10)
    assert steps == applied < 1000, "nothing was applied after the interrupt, and nothing half"
    assert all(torch.equal(a, b) for a, b in zip(after, model.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_is_dropped(model: nn.Linear) -> None:
    before = model.weight.detach().clone()
    result = AsyncTrainer(model, lambda m, b: square(m, b) * torch.nan, sgd(model), **QUIET).fit(batches(3))
    assert (result.updates, result.dropped) == (0, 3) and torch.equal(model.weight, before)


@pytest.mark.parametrize("norm", [0.01, 0.0])
def test_gradients_are_clipped_and_buffers_follow(norm: float) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    AsyncTrainer(model, square, optimizer, max_grad_norm=norm).fit(batches(1))
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, model.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(norm, rel=1e-3)
    assert model.state_dict()["0.num_batches_tracked"] == 1


def test_an_optimizer_that_counts_samples_gets_their_number_where_it_is_known(model: nn.Linear) -> None:
    steps: list[tuple[int | None, float]] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None, *, samples: int | None = None, loss: float) -> None:  # type: ignore[override]
            steps.append((samples, loss))

    def loss(replica: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return square(replica, batch[1])

    optimizer = Counting(model.parameters(), lr=0.1)
    AsyncTrainer(model, square, optimizer, **QUIET).fit(batches(3))
    assert [samples for samples, _ in steps] == [8, 8, 8] and all(loss > 0 for _, loss in steps)
    mask_first = [(torch.zeros(35, 4), torch.ones(8, 4))] * 2  # its parts disagree
    assert AsyncTrainer(model, loss, optimizer, **QUIET).fit(mask_first).samples == 2
    assert [samples for samples, _ in steps[3:]] == [None, None]


@pytest.mark.slow
def test_a_collaborative_optimizer_steps_when_the_swarm_s_batch_is_full() -> None:
    with cs.create("together", options=cs.NetworkOptions(lan=False)) as swarm:
        model = nn.Linear(4, 2)
        optimizer = swarm.optimizer(sgd(model), target_batch_size=32)
        before = square(model, torch.cat(batches(20))).item()
        assert AsyncTrainer(model, square, optimizer, **QUIET).fit(batches(20)).samples == 160
        assert optimizer.global_step == 5 and square(model, torch.cat(batches(20))) < before
