"""The Hugging Face `Trainer`, and the trainers of TRL, which inherit it, train with a swarm:

    trainer = Trainer(model, args, train_dataset=…)
    attach(trainer, swarm, target_batch_size=256, max_steps=500)
    trainer.train()

The Trainer counts the swarm's steps, and logs, evaluates, saves and ends by this count. Its learning rate schedule and
its ``max_grad_norm`` apply to the averaged gradient. ``gradient_accumulation_steps`` makes larger micro-batches. The
gradients of a causal language model are weighed by their target tokens. So the averaged gradient is the gradient of one
Trainer with the joined batch.
"""

import copy
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from colab_swarm.errors import StepError, require
from colab_swarm.swarm.order import give_order
from colab_swarm.swarm.script import done_line
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.samples import RowCounter
from colab_swarm.training.gradients import MeanLoss
from colab_swarm.training.optimizer import SwarmOptimizer

logger = logging.getLogger(__name__)

ENDLESS = 1 << 40  # the Trainer's limit of steps; the swarm's steps end the training
SHUFFLED = 1000  # size, in samples, of the buffer that shuffles a streamed data set


def attach(
    trainer: Trainer, swarm: Swarm, *, target_batch_size: int, max_steps: int, **options: Any
) -> SwarmOptimizer:
    """Let the swarm step the trainer's optimizer, until ``max_steps`` of the swarm; call it before ``train()``.

    The ``options`` are those of `Swarm.optimizer`. Each peer shuffles its data in its own order. When the session of
    the platform ends, the training ends, and this peer hands its last samples over to the others. To continue with
    other ``max_steps``, call `attach` again.

    Raises:
        ValueError: a setting of the Trainer contradicts a setting of the swarm.
        TypeError: an argument has a wrong type.

    It also raises the errors of `Swarm.optimizer`.
    """
    _check_types(trainer, swarm, max_steps)
    args = trainer.args
    for flow in trainer.callback_handler.callbacks:
        if isinstance(flow, SwarmFlow):
            require(
                not flow.optimizer.hooks.closed.is_set(),
                "this Trainer was attached to a swarm that this peer has left: make a new Trainer",
            )
            flow.max_steps = max_steps
            return flow.optimizer
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
    text = (
        "the Trainer's ReduceLROnPlateau goes by this peer's own evaluations: pass "
        "scheduler=ReduceLROnPlateau(trainer.create_optimizer()) to attach(…), which goes by the swarm's training loss"
    )
    require("scheduler" in options or not isinstance(trainer.lr_scheduler, ReduceLROnPlateau), text)
    counts_targets = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    defaults = {
        "model": trainer.model,
        "scheduler": trainer.lr_scheduler,
        "max_grad_norm": args.max_grad_norm or None,
        "weight_unit": "target tokens" if counts_targets else "samples",
    }
    optimizer = swarm.optimizer(
        trainer.optimizer, target_batch_size=target_batch_size, **{**defaults, **options}
    )
    trainer.optimizer = optimizer
    trainer.args = copy.copy(args)  # a copy, because another Trainer may have the same arguments
    trainer.args.max_steps = ENDLESS
    trainer.args.max_grad_norm = 0.0
    _shuffle(trainer, optimizer, seed=int.from_bytes(swarm.id[:4]))
    trainer.remove_callback(DefaultFlowCallback)
    trainer.callback_handler.callbacks.insert(0, SwarmFlow(trainer, optimizer, max_steps))
    return optimizer


def _check_types(trainer: Any, swarm: Any, max_steps: Any) -> None:
    call = "attach(trainer, swarm, target_batch_size=256, max_steps=500)"
    text = f"{type(trainer).__name__} is no Trainer of transformers: call {call}"
    require(isinstance(trainer, Trainer), text, TypeError)
    text = f"{type(swarm).__name__} is no swarm, as cs.create(…) and cs.join(…) return: call {call}"
    # not isinstance, because the form of cs.connect() also has all methods of its swarm
    require(callable(getattr(swarm, "optimizer", None)), text, TypeError)
    text = f"max_steps={max_steps!r}: pass the swarm's last step, a whole number, as in {call}"
    require(isinstance(max_steps, int) and max_steps > 0, text, TypeError)


def _shuffle(trainer: Any, optimizer: SwarmOptimizer, *, seed: int) -> None:
    """Give the trainer's data this peer's own order."""
    trainer.args.seed = trainer.args.data_seed = seed
    trainer.accelerator.dataloader_config.data_seed = seed
    data = trainer.train_dataset
    if isinstance(data, torch.utils.data.IterableDataset):
        if hasattr(data, "shuffle"):  # a stream of the library `datasets`
            trainer.train_dataset = data.shuffle(seed=seed, buffer_size=SHUFFLED)
        else:
            logger.warning(
                "this peer cannot shuffle an IterableDataset: let it yield other samples at each peer"
            )
        return
    get_loader = trainer.get_train_dataloader

    def get_train_dataloader(*arguments: Any, **named: Any) -> Any:
        loader = get_loader(*arguments, **named)
        # Some samplers do not use the seed of the arguments, but torch's global seed, which each Trainer sets to the
        # same value.
        warning = give_order(loader, seed)
        if warning:
            optimizer.hooks.warn(warning)
        return loader

    trainer.get_train_dataloader = get_train_dataloader


class SwarmFlow(DefaultFlowCallback):  # type: ignore[misc]
    """Makes a Trainer count samples and targets for the swarm, and log, evaluate, save and end by the swarm's steps."""

    def __init__(self, trainer: Trainer, optimizer: SwarmOptimizer, max_steps: int) -> None:
        self._trainer = trainer
        self.optimizer = optimizer
        self.max_steps = max_steps
        # the number and the loss of this peer's present step
        self._step = 0
        self._loss = torch.tensor(0.0)
        self._samples = self._weight = self._counted = 0.0
        # mean losses since the last log, and of the whole training
        self._logged = MeanLoss()
        self._total = MeanLoss()
        args = trainer.args
        data = trainer.train_dataset
        most = len(data) if hasattr(data, "__len__") else None
        self._rows = RowCounter(args.train_batch_size, optimizer.settings.batch_size, most=most)
        self._computing = False
        self._examples: float | None = None  # samples of the present micro-batch
        self._targets: float | None = (
            None  # target tokens of the present step, if gradients are weighed by them
        )
        self._batches = trainer.get_batch_samples
        self._compute = trainer.training_step
        self._compute_loss = trainer.compute_loss
        self._log = trainer.log
        self._train = trainer.train
        trainer.get_batch_samples = self.get_batch_samples
        trainer.training_step = self.training_step
        trainer.compute_loss = self.compute_loss
        trainer.log = self.log
        trainer.train = self.train
        trainer.create_scheduler = self.create_scheduler
        self.create_scheduler()

    def create_scheduler(self, *_: Any, **__: Any) -> Any:
        """Give the Trainer a stand-in for the scheduler, because the swarm steps the scheduler itself."""
        self._trainer.lr_scheduler = self.optimizer.scheduler
        return self.optimizer.scheduler

    def get_batch_samples(self, *arguments: Any, **named: Any) -> tuple[Sequence[Any], Any]:
        """Return the micro-batches of this peer's next step."""
        batches, items = self._batches(*arguments, **named)
        self._samples = self._weight = 0.0
        self._targets = None
        self._loss = torch.tensor(0.0)
        if items is not None and self._by_targets:
            args = self._trainer.args
            self._targets = float(torch.as_tensor(items).flatten()[0])
            if args.n_gpu > 1 and not args.average_tokens_across_devices:
                self._targets *= args.n_gpu  # the Trainer has divided the number by this
        return batches, items

    @property
    def _by_targets(self) -> bool:
        return self.optimizer.settings.weight_unit != "samples"

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        """Compute one micro-batch, and count it; its loss is a part of the step's loss."""
        self._computing = True
        self._examples = None
        try:
            loss = self._compute(model, inputs, *arguments, **named)
        finally:
            self._computing = False
        if self._examples is None:
            self._examples = self._count(inputs)
        self._samples += self._examples
        self._weight = self._samples if self._targets is None else self._targets
        self._loss = self._loss.to(loss.device) + loss.detach()
        weight = self._weight if self._by_targets else None
        self.optimizer.hooks.next_step(samples=self._samples, weight=weight, loss=self._loss)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        """Compute a loss, and count the samples that the model gets, such as completions for a part of a batch."""
        if self._computing and self._examples is None:
            self._examples = self._count(inputs)
        return self._compute_loss(model, inputs, *arguments, **named)

    def _count(self, inputs: Any) -> float:
        examples = self._rows.count(inputs)
        if examples is None:
            text = "the parts of a batch do not say how many samples it has: pass batch_size=… to attach(…)"
            raise StepError(text)
        return examples

    def log(self, logs: dict[str, Any], *arguments: Any, **named: Any) -> None:
        """Log the mean loss of this peer's samples, and the swarm's metrics."""
        if "loss" in logs:
            logs["loss"] = self._logged.value or logs["loss"]
            self._logged = MeanLoss()
            logs |= self.optimizer.metrics()
        if "train_loss" in logs:
            logs["train_loss"] = self._total.value or logs["train_loss"]
            logs["train_samples_per_second"] = round(self._counted / logs["train_runtime"], 3)
        self._log(logs, *arguments, **named)

    def train(self, *arguments: Any, **named: Any) -> Any:
        """Train to the swarm's last step. Raises RuntimeError if the optimizer has left or was replaced."""
        with self.optimizer.hooks.running():
            output = self._train(*arguments, **named)
        return output._replace(training_loss=output.metrics["train_loss"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        state.compute_steps(args, self.max_steps)  # for settings that are fractions of all steps
        self._step = state.global_step = self.optimizer.global_step
        if self._step >= self.max_steps:
            print(done_line(self._step, self.max_steps))
        state.max_steps = self.max_steps
        self._total = MeanLoss()
        self._counted = 0.0
        data = self._trainer.train_dataset
        if hasattr(data, "__len__"):  # only for display: passes over the data by all peers together
            samples = self.max_steps * self.optimizer.settings.target_batch_size
            state.num_train_epochs = math.ceil(samples / len(data))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> TrainerControl:
        if not self._trainer.accelerator.optimizer_step_was_skipped:
            for mean in (self._logged, self._total):
                mean.add(self._loss, self._weight)
            self._counted += self._samples
        self.optimizer.hooks.print_news()
        before = self._step
        self._step = self.optimizer.global_step
        for step in range(before + 1, self._step + 1):  # a peer that catches up takes several steps together
            state.global_step = step
            control = super().on_step_end(args, state, control, **more)
        state.global_step = self._step
        control.should_training_stop |= self._step >= self.max_steps or self.optimizer.hooks.over
        return control
