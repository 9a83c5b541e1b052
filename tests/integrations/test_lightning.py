"""What a user of Lightning expects of it, in a swarm."""

from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
from torch import nn

from colab_swarm.events import StepFinished
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


def fit(swarm: Swarm, model: Model, steps: int = 3, rows: int = 10, **options: Any) -> lightning.Trainer:
    data = torch.utils.data.TensorDataset(torch.ones(rows, 4))
    settings = {"accelerator": "cpu", "max_epochs": -1, "callbacks": [SwarmSteps(steps)], **QUIET, **options}
    trainer = lightning.Trainer(**settings)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    return trainer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_counts_what_was_accumulated_and_ends_at_the_swarms_step(precision: str) -> None:
    def train(swarm: Swarm) -> tuple[list[float], dict[str, Any]]:
        trainer = fit(swarm, Model(swarm), accumulate_grad_batches=2, precision=precision)
        return [step.samples for step in swarm.events.recent(StepFinished)], trainer.callback_metrics

    samples, metrics = alone(train)
    assert samples == [8 + 2 + 8, 2 + 8 + 2, 8 + 2 + 8]  # of batches of 4, 4 and 2
    assert metrics["swarm_step"] == 3.0 and metrics["swarm_peers"] == 1.0


@pytest.mark.parametrize(
    ("options", "told"),
    [({"gradient_clip_val": 1.0}, "max_grad_norm"), ({"max_steps": 2}, "counts steps of this peer alone")],
)
def test_settings_that_contradict_the_swarms_are_refused(options: dict[str, Any], told: str) -> None:
    def train(swarm: Swarm) -> None:
        with pytest.raises(ValueError, match=told):
            fit(swarm, Model(swarm), **options)

    alone(train)


def test_a_model_without_an_optimizer_of_the_swarm_is_refused() -> None:
    def train(swarm: Swarm) -> None:
        with pytest.raises(ValueError, match=r"return what swarm.optimizer\(…\) returns"):
            fit(swarm, Model(None))

    alone(train)


class Detector(Model):
    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.net(torch.stack(batch).flatten(1)[:, :4]).square().mean()


def images_of(rows: int, *, streamed: bool) -> torch.utils.data.DataLoader[Any]:
    class Images(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([torch.ones(3, 2, 2)] * rows)

    data: Any = Images() if streamed else [torch.ones(3, 2, 2)] * rows
    return torch.utils.data.DataLoader(data, batch_size=4, collate_fn=list)


def test_lists_of_images_are_counted_by_their_loader() -> None:
    def train(swarm: Swarm) -> list[float]:
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=-1, callbacks=[SwarmSteps(2)], **QUIET)
        trainer.fit(Detector(swarm), images_of(10, streamed=False))
        return [step.samples for step in swarm.events.recent(StepFinished)]

    assert alone(train) == [4 + 4 + 2 + 4, 4 + 2 + 4 + 4]


def test_a_batch_that_nobody_can_count_asks_for_its_samples() -> None:
    def train(swarm: Swarm) -> None:
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=-1, callbacks=[SwarmSteps(2)], **QUIET)
        with pytest.raises(ValueError, match=r"once and for all as batch_size=… to swarm.optimizer"):
            trainer.fit(Detector(swarm), images_of(2, streamed=True))

    alone(train)


class Scheduled(Model):
    def __init__(self, swarm: Swarm, make: Callable[[Any], Any], interval: str = "step") -> None:
        super().__init__(swarm)
        self.make = make
        self.interval = interval

    def configure_optimizers(self) -> Any:
        scheduler = {"scheduler": self.make(self.optimizer), "interval": self.interval, "monitor": "loss"}
        return {"optimizer": self.optimizer, "lr_scheduler": scheduler}


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
    ],
)
def test_a_scheduler_of_the_module_is_refused(make: Callable[[Any], Any], interval: str) -> None:
    def train(swarm: Swarm) -> None:
        with pytest.raises(ValueError, match=r"scheduler=… to swarm.optimizer"):
            fit(swarm, Scheduled(swarm, make, interval))

    alone(train)


def test_the_twin_of_the_swarms_scheduler_may_be_stepped() -> None:
    def train(swarm: Swarm) -> int:
        fit(swarm, model := Scheduled(swarm, lambda optimizer: optimizer.scheduler))
        return model.optimizer.global_step

    assert alone(train) == 3


def test_it_ends_with_the_session() -> None:
    class End(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if module.optimizer.global_step == 2:
                module.optimizer.end("the session ends", hand_over_s=0.0)

    def train(swarm: Swarm) -> int:
        fit(swarm, model := Model(swarm), steps=10**9, callbacks=[End(), SwarmSteps(10**9)])
        return model.optimizer.global_step

    assert alone(train) == 2


class Descending(Model):
    """Each batch has another loss."""

    def training_step(self, batch: tuple[torch.Tensor], batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(batch) * 0 + 6.0 - batch_idx


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_loss_of_accumulated_batches_is_their_mean(accumulated: int) -> None:
    def train(swarm: Swarm) -> list[float | None]:
        fit(swarm, Descending(swarm), rows=24, steps=2, accumulate_grad_batches=accumulated)
        return [event.loss for event in swarm.events.recent(StepFinished)]

    # Three batches of 4 fill a step; of pairs, two.
    expected = {1: (6.0 + 5.0 + 4.0) / 3, 2: (6.0 + 5.0 + 4.0 + 3.0) / 4}
    assert alone(train)[0] == pytest.approx(expected[accumulated])
