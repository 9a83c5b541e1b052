"""What a user of Lightning expects of it, in a swarm."""

from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

import colab_swarm as cs
from colab_swarm.events import Notice, StepFinished
from colab_swarm.integrations.lightning import SwarmSteps
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import alone

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Model(lightning.LightningModule):
    def __init__(self, swarm: Swarm | None) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        inner = torch.optim.SGD(self.parameters(), lr=0.1)
        self.optimizer: Any = inner
        if swarm is not None:
            self.optimizer = swarm.optimizer(inner, target_batch_size=12, model=self)

    def training_step(self, batch: tuple[torch.Tensor]) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer


def rows_of_ones(count: int = 10) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(count, 4)), batch_size=4)


def fit(model: Model, steps: int = 3, loader: Any = None, **options: Any) -> lightning.Trainer:
    settings = {"accelerator": "cpu", "max_epochs": -1, "callbacks": [SwarmSteps(steps)], **QUIET, **options}
    trainer = lightning.Trainer(**settings)
    trainer.fit(model, rows_of_ones() if loader is None else loader)
    return trainer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_counts_what_was_accumulated_and_ends_at_the_swarms_step(precision: str) -> None:
    def train(swarm: Swarm) -> tuple[list[float], dict[str, Any]]:
        trainer = fit(Model(swarm), accumulate_grad_batches=2, precision=precision)
        return [step.samples for step in swarm.events.recent(StepFinished)], trainer.callback_metrics

    samples, metrics = alone(train)
    assert samples == [8 + 2 + 8, 2 + 8 + 2, 8 + 2 + 8]  # of batches of 4, 4 and 2
    assert metrics["swarm_step"] == 3.0 and metrics["swarm_peers"] == 1.0


class Detector(Model):
    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.net(torch.stack(batch).flatten(1)[:, :4]).square().mean()


def test_lists_of_images_are_counted_by_their_loader_or_ask_for_their_samples() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(images[:2])

    def train(swarm: Swarm) -> list[float]:
        model = Detector(swarm)
        fit(model, 2, torch.utils.data.DataLoader(images, batch_size=4, collate_fn=list))
        with pytest.raises(ValueError, match=r"once and for all as batch_size=… to swarm.optimizer"):
            fit(model, 4, torch.utils.data.DataLoader(Stream(), batch_size=4, collate_fn=list))
        return [step.samples for step in swarm.events.recent(StepFinished)]

    images: Any = [torch.ones(3, 2, 2)] * 10
    assert alone(train) == [4 + 4 + 2 + 4, 4 + 2 + 4 + 4]


class Scheduled(Model):
    def __init__(self, swarm: Swarm, make: Callable[[Any], Any], interval: str = "step") -> None:
        super().__init__(swarm)
        self.make = make
        self.interval = interval

    def configure_optimizers(self) -> Any:
        scheduler = {"scheduler": self.make(self.optimizer), "interval": self.interval, "monitor": "loss"}
        return {"optimizer": self.optimizer, "lr_scheduler": scheduler}


CLASH = r"scheduler=… to swarm.optimizer"


@pytest.mark.parametrize(
    ("make", "options", "told"),
    [
        (Model, {"gradient_clip_val": 1.0}, "max_grad_norm"),
        (Model, {"max_steps": 2}, "counts steps of this peer alone"),
        (lambda _: Model(None), {}, r"return what swarm.optimizer\(…\) returns"),
        (lambda swarm: Scheduled(swarm, lambda one: CosineAnnealingLR(one, T_max=40)), {}, CLASH),
        (lambda swarm: Scheduled(swarm, lambda one: CosineAnnealingLR(one, T_max=40), "epoch"), {}, CLASH),
        (lambda swarm: Scheduled(swarm, ReduceLROnPlateau), {}, CLASH),
    ],
)
def test_what_contradicts_the_swarm_is_refused(
    make: Callable[[Swarm], Model], options: dict[str, Any], told: str
) -> None:
    def train(swarm: Swarm) -> None:
        with pytest.raises(ValueError, match=told):
            fit(make(swarm), **options)

    alone(train)


def test_the_twin_of_the_swarms_scheduler_may_be_stepped() -> None:
    def train(swarm: Swarm) -> int:
        fit(model := Scheduled(swarm, lambda optimizer: optimizer.scheduler))
        return model.optimizer.global_step

    assert alone(train) == 3


def test_it_ends_with_the_session() -> None:
    class End(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if module.optimizer.global_step == 2:
                module.optimizer.hooks.end("the session ends", hand_over_s=0.0)

    def train(swarm: Swarm) -> int:
        fit(model := Model(swarm), steps=10**9, callbacks=[End(), SwarmSteps(10**9)])
        return model.optimizer.global_step

    assert alone(train) == 2


def test_a_fit_that_is_over_says_so_and_one_without_its_optimizer_raises(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Fault(lightning.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            raise RuntimeError("a fault of the user")

    def train(swarm: Swarm) -> None:
        fit(model := Model(swarm))
        assert "raise max_steps" not in capsys.readouterr().out
        fit(model)
        assert "step 3 of 3 is done: raise max_steps" in capsys.readouterr().out
        with pytest.raises(RuntimeError, match="a fault of the user"):
            fit(model, steps=9, callbacks=[Fault(), SwarmSteps(9)])
        model.optimizer.close()
        with pytest.raises(RuntimeError, match="has left its swarm"):
            model.optimizer.step(samples=4)
        with pytest.raises(RuntimeError, match="has left its swarm"):
            fit(model, steps=9)

    alone(train)


class Regression(Model):
    """A model of this process, the same at all peers, with the rows that it has seen."""

    def __init__(self, swarm: Swarm, target_batch_size: int, *, automatic: bool = True) -> None:
        super().__init__(None)
        torch.manual_seed(0)
        self.net = nn.Linear(8, 2)
        inner = torch.optim.SGD(self.parameters(), lr=0.1)
        self.optimizer = swarm.optimizer(inner, target_batch_size=target_batch_size, model=self)
        self.automatic_optimization = automatic
        self.seen: list[list[int]] = []

    def training_step(self, batch: tuple[torch.Tensor], batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        self.seen.append(batch[0][:, 0].int().tolist())
        loss = self.net(batch[0]).square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss / 2)
            if batch_idx % 2:
                self.optimizers().step()
        return loss


@pytest.mark.parametrize(
    ("rows", "batch_size", "accumulated"),
    [(40, 8, 1), (40, 8, 4), (20, 8, 2), (21, 4, 3)],
    ids=["no accumulation", "a lone last batch", "a short last batch", "a lone and short last batch"],
)
def test_a_step_is_the_mean_over_its_rows_however_they_were_accumulated(
    rows: int, batch_size: int, accumulated: int
) -> None:
    x_BI = torch.randn(rows, 8, generator=torch.Generator().manual_seed(3))

    def train(swarm: Swarm) -> tuple[torch.Tensor, float | None]:
        model = Regression(swarm, rows)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x_BI), batch_size)
        fit(model, 1, data, accumulate_grad_batches=accumulated)
        return model.net.weight.detach().clone(), swarm.events.recent(StepFinished)[-1].loss

    weight, loss = alone(train)
    torch.manual_seed(0)
    net = nn.Linear(8, 2)
    expected = net(x_BI).square().mean()
    expected.backward()
    torch.testing.assert_close(weight, net.weight - 0.1 * net.weight.grad, rtol=0, atol=1e-5)
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_manual_optimisation_counts_the_batches_since_the_last_step() -> None:
    def train(swarm: Swarm) -> list[float]:
        fit(Regression(swarm, 16, automatic=False), 2, loaders())
        return [step.samples for step in swarm.events.recent(StepFinished)]

    assert alone(train) == [16, 16]


def loaders(workers: int = 0, **options: Any) -> Any:
    data = torch.utils.data.TensorDataset(torch.arange(64.0)[:, None].expand(-1, 8))
    return torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=workers, **{"shuffle": True, **options}
    )


@pytest.mark.parametrize(
    "make",
    [
        loaders,
        lambda: loaders(generator=torch.Generator().manual_seed(42)),
        lambda: loaders(
            shuffle=False, sampler=torch.utils.data.WeightedRandomSampler(torch.ones(64).tolist(), 64)
        ),
        pytest.param(lambda: loaders(1), marks=pytest.mark.slow),
    ],
    ids=["shuffled", "with a seeded generator", "with a sampler", "by a process"],
)
def test_peers_that_seed_alike_read_each_in_an_order_of_its_own(make: Callable[[], Any]) -> None:
    def train(swarm: Swarm) -> list[list[int]]:
        lightning.seed_everything(42, verbose=False)
        model = Regression(swarm, 4)
        fit(model, 5, make())
        assert not swarm.events.recent(Notice)
        return model.seen[:5]

    orders = []
    for seed in (1, 2):
        with cs.simulate(1, seed=seed) as simulation:
            orders.append(simulation.run(train)["alice"])
    assert orders[0] != orders[1]
