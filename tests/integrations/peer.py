"""One of two peers, as a process: ``python -m tests.integrations.peer NAME FOLDER SCENARIO…``.

It trains by each framework in turn. It writes its parameters, and the micro-batches that it gave to each
global step, to ``FOLDER/SCENARIO.NAME``.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import colab_swarm as cs
from colab_swarm.events import BatchDropped, Event, RoundFinished, StateReceived
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.optimizer import SwarmOptimizer
from tests.training.toy import exchanged

STEPS = 20
TARGET = 24  # samples
ROWS = {"alice": 3, "bob": 4}  # of a micro-batch
LR, CLIP = 1e-3, 0.5  # at 1e-2 AdamW makes rounding of gradients near 0 visible
Batch = dict[str, torch.Tensor]


class Record:
    """Which micro-batches this peer gave to which global step."""

    def __init__(self, optimizer: SwarmOptimizer) -> None:
        self._optimizer, self._step = optimizer, optimizer.global_step
        self.given: dict[int, list[Batch]] = {}
        self._pending: list[Batch] = []
        self._contributed: set[int] = set()  # steps; the others took some without this peer
        self._is_late = False  # what this peer has computed is of an older step
        optimizer.rounds.services.events.listen(self._on_event)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RoundFinished) and self._optimizer.rounds.view.me.hex() in event.contributors:
            self._contributed.add(event.step)
        if isinstance(event, StateReceived) or (
            isinstance(event, BatchDropped) and "too late" in event.reason
        ):
            self._is_late = True

    def after_step(self, *batches: Batch) -> None:
        """Take the micro-batches of the ``step()`` that has just returned."""
        self._pending += batches
        if self._is_late:
            self._pending = []
            self._is_late = False
        if self._optimizer.global_step > self._step:
            for step in self._contributed.intersection(range(self._step, self._optimizer.global_step)):
                self.given[step] = self._pending
            self._step, self._pending = self._optimizer.global_step, []


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


def meet(optimizer: SwarmOptimizer) -> None:
    """Wait for the other peer, so that both start at step 0."""
    while len(optimizer.rounds.view.all) < 2:
        optimizer._runtime.call(optimizer.rounds.refresh())


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
    meet(optimizer)
    trainer.train()
    return model, record


def use_accelerate(swarm: Swarm, folder: Path, name: str) -> tuple[nn.Module, Record]:
    from accelerate import Accelerator

    net, accelerator = perceptron(), Accelerator(cpu=True)
    swarms = joined(swarm, net, name)
    net, optimizer = accelerator.prepare(net, swarms)
    record = Record(swarms)
    meet(swarms)
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
    meet(optimizer)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=-1, callbacks=[SwarmSteps(STEPS)], enable_model_summary=False, **quiet
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(Stream(), batch_size=None))
    return net, record


def use_lightning_by_hand(swarm: Swarm, folder: Path, name: str) -> tuple[nn.Module, Record]:
    return use_lightning(swarm, folder, name, automatic=False)


SCENARIOS: dict[str, Callable[[Swarm, Path, str], tuple[nn.Module, Record]]] = {
    "trainer": use_trainer,
    "trl": use_trl,
    "accelerate": use_accelerate,
    "lightning": use_lightning,
    "lightning-by-hand": use_lightning_by_hand,
}


def main(name: str, folder: Path, scenarios: list[str]) -> None:
    options, invitation = cs.NetworkOptions(lan=False), folder / "invitation"
    if name == "alice":
        swarm = cs.create("together", peer_name=name, options=options)
        (folder / "draft").write_text(str(swarm.invite()))
        (folder / "draft").rename(invitation)
    else:
        while not invitation.exists():
            time.sleep(0.05)
        swarm = cs.join(invitation.read_text(), peer_name=name, options=options)
    with swarm:
        for scenario in scenarios:
            net, record = SCENARIOS[scenario](swarm, folder, scenario)
            optimizer = swarm.optimizers[scenario]
            state = {key: one.detach().clone() for key, one in net.state_dict().items()}
            torch.save((state, record.given, optimizer.lineage), folder / f"{scenario}.{name}")
            optimizer.close()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
