"""Lightning trains with a swarm, by automatic or manual optimisation:

class Model(LightningModule):
    def configure_optimizers(self):
        inner = AdamW(self.parameters())
        return swarm.optimizer(inner, target_batch_size=256, batch_size=32, model=self, scheduler=…)

Trainer(max_epochs=-1, callbacks=[SwarmSteps(500)]).fit(Model(), loader)
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from colab_swarm.errors import require
from colab_swarm.swarm.order import give_order, seed_of
from colab_swarm.swarm.script import done_line
from colab_swarm.tensors.samples import SampleCounter
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.schedule import HOW_TO_SCHEDULE, GlobalScheduler

logger = logging.getLogger(__name__)


class SwarmSteps(Callback):
    """Ends the training after ``max_steps`` of the swarm or with the session, counts samples, and logs metrics.

    Each peer reads its data in its own order, because this callback seeds torch by the peer, even if
    ``seed_everything`` has set the same seed for all.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._counter = SampleCounter()
        self._present: float | None = None  # samples of the present batch; None: unknown
        self._loops = ExitStack()  # the optimizers' `running()` contexts, while they train
        self._begin()

    def _begin(self) -> None:
        """Begin the sums of a new step."""
        self._sizes: list[float | None] = []  # samples of each batch that gave a loss since the last step
        self._loss: float | Tensor = 0.0  # sum of these batches' losses, each times its samples

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = _of_swarm(trainer)
        if optimizers:
            # Seed before the loaders draw their first samples, perhaps in other processes.
            torch.manual_seed(seed_of(optimizers[0].hooks.peer, "lightning", optimizers[0].global_step))

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
        optimizers = _of_swarm(trainer)
        self._loops.close()  # the contexts of a fit that raised
        for optimizer in optimizers:
            self._loops.enter_context(optimizer.hooks.running())
            if optimizer.global_step >= self._max_steps:
                print(done_line(optimizer.global_step, self._max_steps))
        self._counter = SampleCounter(trainer.train_dataloader, optimizers[0].settings.batch_size)
        self._begin()
        for number, loader in enumerate(_loaders_of(trainer.train_dataloader)):
            warning = give_order(
                loader, seed_of(optimizers[0].hooks.peer, "lightning", number, optimizers[0].global_step)
            )
            if warning:
                optimizers[0].hooks.warn(warning)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._present = self._counter.count(batch, batch_idx)
        if not pl_module.automatic_optimization:
            for optimizer in _of_swarm(trainer):
                optimizer.hooks.begin_batch(self._present)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loops.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._loops.close()

    @property
    def _samples(self) -> float | None:
        """Samples since the last step. None if a batch's samples are unknown; then step() without samples= raises."""
        known = [size for size in self._sizes if size is not None]
        return sum(known) if len(known) == len(self._sizes) else None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if not pl_module.automatic_optimization:
            return
        self._sizes.append(self._present)
        samples = self._samples
        share = 1.0
        if self._present and self._sizes[0]:
            # Weigh each batch by its samples, because Lightning takes the plain mean of the batches' losses.
            share = self._present / self._sizes[0]
        if share != 1.0:
            loss.register_hook(lambda gradient: gradient * share)  # type: ignore[no-untyped-call]
        self._loss = self._loss + loss.detach() * share
        for optimizer in _of_swarm(trainer):
            optimizer.hooks.next_step(samples=samples, loss=self._loss * self._correction(trainer))

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        correction = self._correction(trainer)
        if not pl_module.automatic_optimization or correction == 1.0:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(correction)

    def _correction(self, trainer: Trainer) -> float:
        """Return the factor that turns the sum of the step's losses into their mean over samples.

        Lightning has divided each loss by the number of batches of a full step, even if an epoch ends within the step.
        """
        samples = self._samples
        if not samples or not self._sizes[0]:
            return 1.0
        return trainer.accumulate_grad_batches * self._sizes[0] / samples

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch:
            self._begin()
        for optimizer in _of_swarm(trainer):
            optimizer.hooks.print_news()
            pl_module.log_dict(optimizer.metrics(), prog_bar=True)
            trainer.should_stop |= optimizer.hooks.over or optimizer.global_step >= self._max_steps


def _of_swarm(trainer: Trainer) -> list[SwarmOptimizer]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, SwarmOptimizer)]


def _loaders_of(loaders: Any) -> list[Any]:
    """Return the loaders of a Trainer, a single loader or a collection of loaders, as a list."""
    if isinstance(loaders, CombinedLoader):
        return [*loaders.flattened]
    if isinstance(loaders, Mapping):
        loaders = [*loaders.values()]
    if isinstance(loaders, list | tuple):
        return [loader for part in loaders for loader in _loaders_of(part)]
    return [loaders]
