"""The training loop of fine-tuning: a few passes over labelled examples; the best one is kept."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from colab_swarm.recipes.finetune.data import Example, Splits
from colab_swarm.recipes.finetune.tasks import Coder, Task
from colab_swarm.recipes.masked_lm import parameter_groups
from colab_swarm.recipes.text import load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FineTuning:
    """How to fine-tune; AdamW with a linear schedule.

    Attributes:
        epochs: passes over the examples.
        lr: learning rate at the end of the warm-up, which takes ``warmup_share`` of all steps.
        max_length: tokens of a text; the rest is cut off.
        seed: of the new layer's parameters and of the order of the examples.
    """

    epochs: int = 10
    batch_size: int = 16
    lr: float = 3e-5
    weight_decay: float = 0.01
    warmup_share: float = 0.1
    max_grad_norm: float = 1.0
    max_length: int = 256
    seed: int = 0


@dataclass(frozen=True)
class FineTuned:
    """What came out: the measures of the best epoch, and of its model on the test examples, if there are any."""

    best_epoch: int
    validation: dict[str, float]
    test: dict[str, float]


def finetune(
    task: Task, model: str | Path, splits: Splits, folder: str | Path, settings: FineTuning | None = None
) -> FineTuned:
    """Fine-tune a pretrained model; ``folder`` holds its best epoch, its tokenizer and ``metrics.json`` at the end.

    Args:
        task: `Tagging` or `Classification`.
        model: a folder with model and tokenizer, or a hub name.
        splits: see `load_examples`.

    Raises:
        ValueError: the examples do not fit the task, or the model cannot be loaded.
    """
    settings = settings or FineTuning()
    for example in (example for examples in splits.values() for example in examples):
        task.check(example)
    labels = task.labels(splits["train"])
    if len(labels) < 2:
        raise ValueError(f"all examples to train on are labelled {labels[0]!r}: there is nothing to learn")
    coder = Coder(load_tokenizer(str(model)), labels, settings.max_length)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        trained = task.build(str(model), labels).to(device)
        best_epoch, validation = _train(task, trained, coder, splits, Path(folder), settings)
    best = task.build(str(folder), labels).to(device)
    test = evaluate(task, best, coder, splits["test"]) if splits.get("test") else {}
    found = FineTuned(best_epoch, validation, test)
    (Path(folder) / "metrics.json").write_text(
        json.dumps(asdict(found) | {"settings": asdict(settings)}, indent=1)
    )
    return found


@torch.no_grad()
def evaluate(
    task: Task, model: Any, coder: Coder, examples: Sequence[Example], *, batch_size: int = 32
) -> dict[str, float]:
    """The task's measures of a model's predictions."""
    model.eval()
    predicted: list[Any] = []
    for start in range(0, len(examples), batch_size):
        chosen = examples[start : start + batch_size]
        batch = {name: tensor.to(model.device) for name, tensor in task.collate(chosen, coder).items()}
        batch.pop("labels")
        predicted += task.read(model(**batch).logits, chosen, coder)
    return task.measure([example.label for example in examples], predicted)


def _train(
    task: Task, model: Any, coder: Coder, splits: Splits, folder: Path, settings: FineTuning
) -> tuple[int, dict[str, float]]:
    """All epochs; the best one is saved as soon as it is known."""
    steps = settings.epochs * -(-len(splits["train"]) // settings.batch_size)
    optimizer = torch.optim.AdamW(parameter_groups(model, settings.weight_decay), lr=settings.lr)
    warmup = max(1, int(settings.warmup_share * steps))
    rate = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup)))
    rng = random.Random(settings.seed)
    best_epoch, best = 0, {task.headline: -1.0}
    for epoch in range(1, settings.epochs + 1):
        loss = _train_epoch(
            task, model, coder, rng.sample(splits["train"], len(splits["train"])), rate, settings
        )
        measured = evaluate(task, model, coder, splits["validation"])
        logger.info("epoch %d of %d: loss %.3f, %s", epoch, settings.epochs, loss, measured)
        if measured[task.headline] > best[task.headline]:
            best_epoch, best = epoch, measured
            model.save_pretrained(folder)
            coder.tokenizer.save_pretrained(folder)
    return best_epoch, best


def _train_epoch(
    task: Task, model: Any, coder: Coder, examples: Sequence[Example], rate: LambdaLR, settings: FineTuning
) -> float:
    """One pass; the mean loss of its batches."""
    model.train()
    losses: list[float] = []
    for start in range(0, len(examples), settings.batch_size):
        batch = task.collate(examples[start : start + settings.batch_size], coder)
        loss = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        rate.optimizer.step()
        rate.step()
        rate.optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses) / len(losses)
