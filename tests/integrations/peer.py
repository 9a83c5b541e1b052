"""One of two peers, alice and bob, that train by each framework in turn."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.optimizer import SwarmOptimizer
from tests.training.toy import exchanged

STEPS = 8
TARGET = 24  # samples
ROWS = {"alice": 3, "bob": 4}  # of a micro-batch
LR, CLIP = 1e-3, 0.5  # at 1e-2 AdamW makes rounding of gradients near 0 visible
Batch = dict[str, torch.Tensor]
Result = tuple[dict[str, torch.Tensor], list[list[Batch]], bytes]


class Record:
    """The micro-batches that this peer gave to each global step, the next one included."""

    def __init__(self, optimizer: SwarmOptimizer) -> None:
        self._optimizer = optimizer
        self.given: list[list[Batch]] = [[]]

    def after_step(self, *batches: Batch) -> None:
        """Take the micro-batches of the ``step()`` that has just returned."""
        self.given[-1] += batches
        if self._optimizer.global_step == len(self.given):
            self.given.append([])


def language_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **shape))


def adapted_model() -> Any:
    from peft import LoraConfig, get_peft_model

    model = language_model()
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def texts(name: str) -> list[dict[str, list[int]]]:
    """Ragged sequences, others for each peer."""
    chance = torch.Generator().manual_seed(len(name))
    lengths = torch.randint(4, 24, (200,), generator=chance).tolist()
    return [{"input_ids": torch.randint(1, 64, (n,), generator=chance).tolist()} for n in lengths]


def padded(rows: list[dict[str, list[int]]]) -> Batch:
    longest = max(len(row["input_ids"]) for row in rows)
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        ids, missing = row["input_ids"], longest - len(row["input_ids"])
        columns["input_ids"].append(ids + [0] * missing)
        columns["labels"].append(ids + [-100] * missing)
        columns["attention_mask"].append([1] * len(ids) + [0] * missing)
    return {name: torch.tensor(column) for name, column in columns.items()}


def points(name: str) -> Iterator[Batch]:
    chance = torch.Generator().manual_seed(len(name))
    while True:
        rows = ROWS[name]
        yield {
            "x": torch.randn(rows, 8, generator=chance),
            "y": torch.randn(rows, 2, generator=chance),
        }


def loss_of(net: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(net(batch["x"]), batch["y"])


def joined(swarm: Swarm, net: nn.Module, name: str) -> SwarmOptimizer:
    inner = torch.optim.AdamW(net.parameters(), LR)
    settings = {"target_batch_size": TARGET, "min_peers": 2, "batch_size": ROWS[swarm.name], "model": net}
    return swarm.optimizer(inner, name=name, max_grad_norm=CLIP, **exchanged(settings))


def use_trainer(swarm: Swarm, folder: Path, name: str) -> tuple[nn.Module, Record]:
    from transformers import Trainer

    return _trained_by(Trainer, language_model(), swarm, folder, name, data_collator=padded)


def use_trl(swarm: Swarm, folder: Path, name: str) -> tuple[nn.Module, Record]:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{i}": i for i in range(64)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w1"
    )
    options = {"processing_class": tokenizer, "data_collator": padded}
    return _trained_by(SFTTrainer, adapted_model(), swarm, folder, name, SFTConfig, **options)


def _trained_by(
    kind: Any, model: Any, swarm: Swarm, folder: Path, name: str, settings: Any = None, **options: Any
) -> tuple[nn.Module, Record]:
    from datasets import Dataset
    from transformers import TrainerCallback, TrainingArguments

    from colab_swarm.integrations.transformers import attach

    arguments = (settings or TrainingArguments)(
        str(folder / swarm.name),
        per_device_train_batch_size=ROWS[swarm.name],
        gradient_accumulation_steps=2,
        learning_rate=LR,
        max_grad_norm=CLIP,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        gradient_checkpointing=False,
    )
    data = Dataset.from_list(texts(swarm.name))
    trainer = kind(model=model, args=arguments, train_dataset=data, **options)
    optimizer = attach(trainer, swarm, target_batch_size=2 * TARGET, max_steps=STEPS, name=name, min_peers=2)
    record, batches, get = Record(optimizer), [], trainer.get_batch_samples

    def recorded(*given: Any, **named: Any) -> Any:
        found, items = get(*given, **named)
        batches[:] = [{key: one[key].clone() for key in ("input_ids", "labels")} for one in found]
        return found, items

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            record.after_step(*batches)

    trainer.get_batch_samples = recorded
    trainer.add_callback(Watch())
    trainer.train()
    return model, record


def use_accelerate(swarm: Swarm, folder: Path, name: str) -> tuple[nn.Module, Record]:
    from accelerate import Accelerator

    net, accelerator = perceptron(), Accelerator(cpu=True)
    swarms = joined(swarm, net, name)
    net, optimizer = accelerator.prepare(net, swarms)
    record = Record(swarms)
    for batch in points(swarm.name):
        accelerator.backward(loss_of(net, batch))
        optimizer.step()
        optimizer.zero_grad()
        record.after_step(batch)
        if swarms.global_step == STEPS:
            return net, record
    raise AssertionError


def use_lightning(
    swarm: Swarm, folder: Path, name: str, *, automatic: bool = True
) -> tuple[nn.Module, Record]:
    import lightning

    from colab_swarm.integrations.lightning import SwarmSteps

    net = perceptron()

    class Stream(torch.utils.data.IterableDataset[Batch]):
        def __iter__(self) -> Iterator[Batch]:
            return points(swarm.name)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = net, automatic

        def training_step(self, batch: Batch) -> torch.Tensor:
            loss = loss_of(self.net, batch)
            if not automatic:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
            record.after_step(batch)

        def configure_optimizers(self) -> SwarmOptimizer:
            return optimizer

    optimizer = joined(swarm, net, name)
    record = Record(optimizer)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=-1, callbacks=[SwarmSteps(STEPS)], enable_model_summary=False, **quiet
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(Stream(), batch_size=None))
    return net, record


SCENARIOS: dict[str, Callable[[Swarm, Path, str], tuple[nn.Module, Record]]] = {
    "trainer": use_trainer,
    "trl": use_trl,
    "accelerate": use_accelerate,
    "lightning": use_lightning,
    "lightning-by-hand": partial(use_lightning, automatic=False),
}


def train_all(swarm: Swarm, folder: Path) -> dict[str, Result]:
    """Train by each framework in turn; return each one's parameters, micro-batches by step, and lineage."""
    results = {}
    for scenario, use in SCENARIOS.items():
        net, record = use(swarm, folder, scenario)
        optimizer = swarm.optimizers[scenario]
        state = {key: one.detach().clone() for key, one in net.state_dict().items()}
        results[scenario] = state, record.given, optimizer.lineage
        optimizer.close()
    return results
