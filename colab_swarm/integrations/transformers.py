"""The Hugging Face `Trainer`, and TRL's that inherit it, train with a swarm:

    trainer = Trainer(model, args, train_dataset=…)
    attach(trainer, swarm, target_batch_size=256, max_steps=500)
    trainer.train()

The Trainer counts the swarm's steps: it logs, evaluates, saves and ends by them. Its learning rate schedule and its
gradient clipping apply to the averaged gradient. ``gradient_accumulation_steps`` makes larger micro-batches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from colab_swarm.errors import require
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.optimizer import SwarmOptimizer

ENDLESS = 1 << 40  # steps; the swarm's decide


def attach(
    trainer: Trainer, swarm: Swarm, *, target_batch_size: int, max_steps: int, **options: Any
) -> SwarmOptimizer:
    """Let the swarm step the trainer's optimizer, until ``max_steps`` of the swarm; call it before ``train()``.

    The ``options`` are those of `Swarm.optimizer`. Every peer shuffles its data in an order of its own. At the end of
    the session the training ends, and this peer's last samples are handed over.

    Raises:
        ValueError: a setting of the Trainer contradicts the swarm's; or what `Swarm.optimizer` raises.
    """
    args = trainer.args
    require(
        not 0 < args.max_steps < max_steps,
        f"max_steps={args.max_steps} of the TrainingArguments counts steps of this peer alone, and would end the "
        f"training before the swarm's step {max_steps}: leave it out",
    )
    require(
        args.world_size == 1 and not trainer.is_deepspeed_enabled and not trainer.is_fsdp_enabled,
        "a Trainer of several processes cannot join: start one peer per process, each with its own GPU",
    )
    trainer.create_optimizer()
    trainer.create_scheduler(num_training_steps=max_steps)
    samples = args.train_batch_size * args.gradient_accumulation_steps
    optimizer = swarm.optimizer(
        trainer.optimizer,
        target_batch_size=target_batch_size,
        **{
            "model": trainer.model,
            "scheduler": trainer.lr_scheduler,
            "max_grad_norm": args.max_grad_norm or None,
            "batch_size": samples,
            **options,
        },
    )
    optimizer.over_quietly = True
    trainer.optimizer, trainer.lr_scheduler = optimizer, optimizer.scheduler
    args.max_steps, args.max_grad_norm = ENDLESS, 0.0
    args.data_seed = int.from_bytes(swarm.id[:4])
    trainer.remove_callback(DefaultFlowCallback)
    trainer.callback_handler.callbacks.insert(0, SwarmFlow(optimizer, max_steps))
    _count(trainer, optimizer)
    return optimizer


class SwarmFlow(DefaultFlowCallback):
    """Lets a Trainer log, evaluate, save and end by the swarm's steps."""

    def __init__(self, optimizer: SwarmOptimizer, max_steps: int) -> None:
        self._optimizer, self._max_steps = optimizer, max_steps

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        state.compute_steps(args, self._max_steps)  # settings that are parts of all steps
        state.max_steps, state.global_step = self._max_steps, self._optimizer.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> TrainerControl:
        before, state.global_step = state.global_step - 1, self._optimizer.global_step
        if state.global_step > before:
            control = super().on_step_end(args, state, control, **more)
        control.should_training_stop |= state.global_step >= self._max_steps or self._optimizer.over
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            logs |= self._optimizer.metrics()


def _count(trainer: Any, optimizer: SwarmOptimizer) -> None:
    """Let each step count its samples, also where the last batch is smaller, and its loss."""
    batches: Callable[..., tuple[Sequence[Any], Any]] = trainer.get_batch_samples
    compute: Callable[..., torch.Tensor] = trainer.training_step

    def get_batch_samples(*arguments: Any, **named: Any) -> tuple[Sequence[Any], Any]:
        samples, items = batches(*arguments, **named)
        optimizer.batch_size = float(sum(len(next(iter(batch.values()))) for batch in samples)) or None
        return samples, items

    def training_step(*arguments: Any, **named: Any) -> torch.Tensor:
        loss = compute(*arguments, **named)
        optimizer.loss = loss if optimizer.loss is None else optimizer.loss + loss  # of accumulated batches
        return loss

    trainer.get_batch_samples, trainer.training_step = get_batch_samples, training_step
