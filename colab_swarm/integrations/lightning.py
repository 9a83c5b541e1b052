"""Lightning trains with a swarm, by automatic or manual optimisation:

class Model(LightningModule):
    def configure_optimizers(self):
        inner = AdamW(self.parameters())
        return swarm.optimizer(inner, target_batch_size=256, batch_size=32, model=self, scheduler=…)

Trainer(max_epochs=-1, callbacks=[SwarmSteps(500)]).fit(Model(), loader)
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from colab_swarm.errors import require
from colab_swarm.tensors.samples import samples_of
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.schedule import HOW_TO_SCHEDULE, GlobalScheduler


class SwarmSteps(Callback):
    """Ends the training after ``max_steps`` of the swarm or with the session, counts samples, logs metrics."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        # of accumulated batches; None: their parts do not say, and a bare step asks for samples=
        self._samples: float | None = 0.0
        self._loss: float | Tensor = 0.0  # of accumulated batches, each by its part

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        require(
            trainer.gradient_clip_val is None,
            "the Trainer's gradient_clip_val would clip each peer's own gradients: pass max_grad_norm=… to "
            "swarm.optimizer(…), which clips their mean",
        )
        text = f"the scheduler of configure_optimizers() would step at this peer's pace: {HOW_TO_SCHEDULE}"
        for config in trainer.lr_scheduler_configs:
            require(isinstance(config.scheduler, GlobalScheduler), text)
        require(
            not 0 <= trainer.max_steps < self._max_steps,
            f"max_steps={trainer.max_steps} of the Trainer counts steps of this peer alone, and would end the "
            f"training before the swarm's step {self._max_steps}: leave it out",
        )
        require(trainer.world_size == 1, "start one peer per process, each with its own GPU: devices=1")
        require(
            _of_swarm(trainer),
            "configure_optimizers() returned no optimizer of a swarm: return what swarm.optimizer(…) returns",
        )
        for optimizer in _of_swarm(trainer):
            optimizer.raises_at_end = False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        optimizers = _of_swarm(trainer)
        samples: float | None = samples_of(batch, trainer.train_dataloader, batch_idx)
        if samples is None:
            samples = optimizers[0].settings.batch_size
        if samples is None or self._samples is None:
            self._samples = None
        else:
            self._samples += samples
        for optimizer in optimizers:
            optimizer.next_batch(samples=self._samples)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if not pl_module.automatic_optimization:
            return
        # Lightning has divided the loss by the number of accumulated batches.
        self._loss = self._loss + loss.detach()
        for optimizer in _of_swarm(trainer):
            optimizer.next_batch(samples=self._samples, loss=self._loss)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch:
            self._samples = 0.0
            self._loss = 0.0
        for optimizer in _of_swarm(trainer):
            pl_module.log_dict(optimizer.metrics(), prog_bar=True)
            trainer.should_stop |= optimizer.over or optimizer.global_step >= self._max_steps


def _of_swarm(trainer: Trainer) -> list[SwarmOptimizer]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, SwarmOptimizer)]
