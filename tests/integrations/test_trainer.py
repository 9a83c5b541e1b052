"""What a user of the Hugging Face Trainer expects of it, in a swarm."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import colab_swarm as cs
from colab_swarm.events import Notice, StepFinished
from colab_swarm.integrations.trackers import track
from colab_swarm.integrations.transformers import attach
from colab_swarm.swarm.swarm import Swarm
from tests.integrations.peer import language_model, padded, texts
from tests.training.toy import alone

TARGET = 12


def trainer_of(folder: Path, model: Any = None, **options: Any) -> Trainer:
    settings = {"save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-2, **options}
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True, **settings
    )
    return Trainer(model or language_model(), arguments, train_dataset=texts("alice"), data_collator=padded)


IMPORTS = """
import sys, colab_swarm.integrations
print(*{"torch"} & {*sys.modules})
import colab_swarm.recipes, colab_swarm.workunits
large = {"transformers", "accelerate", "peft", "trl", "lightning", "datasets", "tokenizers", "sklearn", "PIL"}
print(*{*large, "sqlalchemy", "redis"} & {*sys.modules})
"""


def test_the_package_imports_no_framework_and_no_database() -> None:
    found = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert found.stdout == "\n\n"


def test_arguments_of_another_type_or_that_would_end_early_are_refused_with_the_right_call(
    tmp_path: Path,
) -> None:
    def train(swarm: Swarm) -> None:
        trainer: Any = trainer_of(tmp_path, max_steps=49)
        call = r"call attach\(trainer, swarm"
        for given, target, steps, kind, told in (
            ((swarm, trainer), TARGET, 3, TypeError, f"Swarm is no Trainer of transformers: {call}"),
            ((trainer, trainer), TARGET, 3, TypeError, "Trainer is no swarm, as cs.create"),
            ((trainer, swarm), TARGET, None, TypeError, "max_steps=None: pass the swarm's last step"),
            ((trainer_of(tmp_path), swarm), None, 3, ValueError, "target_batch_size=None: pass the samples"),
            ((trainer, swarm), TARGET, 50, ValueError, "of this peer alone, .* before the swarm's step 50"),
        ):
            with pytest.raises(kind, match=told):
                attach(*given, target_batch_size=target, max_steps=steps)
        assert not swarm.optimizers and trainer.args.max_steps == 49

    alone(train)


def test_it_ends_logs_and_saves_by_the_swarms_steps_and_a_resumed_one_continues_with_its_parameters(
    tmp_path: Path,
) -> None:
    def begin(swarm: Swarm) -> tuple[Trainer, bytes]:
        trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=2, logging_steps=2)
        optimizer = attach(trainer, swarm, target_batch_size=TARGET, max_steps=4)
        output = trainer.train()
        assert output.global_step == 4 and output.training_loss == output.metrics["train_loss"]
        return trainer, optimizer.lineage

    def again(swarm: Swarm) -> tuple[list[Any], list[int]]:
        trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=100)
        optimizer = attach(trainer, swarm, target_batch_size=TARGET, max_steps=6)
        first: list[Any] = []

        class Look(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                parameters = {key: value.clone() for key, value in trainer.model.state_dict().items()}
                inner = optimizer.rule.optimizer.state_dict()["state"][0]["step"].item()
                first.extend((optimizer.lineage, inner, parameters))

        trainer.add_callback(Look())
        trainer.train(resume_from_checkpoint=True)
        return first, [log["step"] for log in trainer.state.log_history if "loss" in log]

    trainer, lineage = alone(begin)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == [2, 4] == [log["swarm_step"] for log in logs]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-4"}
    assert trainer.state.num_train_epochs == 1  # 48 of 200 samples
    assert [log["learning_rate"] for log in logs] == pytest.approx([0.5e-2, 0.0])
    (resumed, inner, loaded), steps = alone(again)
    torch.testing.assert_close(loaded, dict(trainer.model.state_dict()), rtol=0, atol=0)
    assert resumed == lineage and inner == 4.0
    assert steps == [2, 4, 5, 6]  # the first two are of the log that was saved


def test_a_training_that_was_interrupted_continues_and_one_that_is_over_or_was_replaced_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted: list[int] = []

    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2 and not interrupted:
                interrupted.append(state.global_step)
                raise KeyboardInterrupt

    def train(swarm: Swarm) -> None:
        trainer = trainer_of(tmp_path)
        optimizer = attach(trainer, swarm, target_batch_size=TARGET, max_steps=4)
        trainer.add_callback(Interrupt())
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert optimizer.global_step == 2 and interrupted == [2]
        assert attach(trainer, swarm, target_batch_size=TARGET, max_steps=4) is optimizer
        trainer.train()
        assert "raise max_steps" not in capsys.readouterr().out
        trainer.train()
        assert "step 4 of 4 is done: raise max_steps" in capsys.readouterr().out
        again = trainer_of(tmp_path)  # the whole cell again
        continued = attach(again, swarm, target_batch_size=TARGET, max_steps=6)
        assert continued.global_step == 4
        for use in (trainer.train, partial(optimizer.step, samples=4, weight=4)):
            with pytest.raises(RuntimeError, match="use what that returned"):
                use()
        again.train()
        assert continued.global_step == 6

    alone(train)


class Detector(Trainer):
    """A Trainer whose model takes its own part of a batch."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        return super().compute_loss(model, {**inputs, "mask": None}, *arguments, **named)


def test_a_batch_that_nobody_can_count_asks_for_batch_size(tmp_path: Path) -> None:
    def unclear(rows: list[Any]) -> dict[str, Any]:
        parts = {name: part.repeat(2, 1)[:7] for name, part in padded(rows).items()}
        return {"mask": torch.ones(35, 35), **parts}

    def trainer() -> Trainer:
        plain = trainer_of(tmp_path, remove_unused_columns=False)
        return Detector(plain.model, plain.args, train_dataset=texts("alice"), data_collator=unclear)

    def train(swarm: Swarm) -> list[float]:
        asking, told = trainer(), trainer()
        attach(asking, swarm, target_batch_size=TARGET, max_steps=1)
        with pytest.raises(ValueError, match=r"pass batch_size=… to attach"):
            asking.train()
        swarm.optimizers["model"].close()
        attach(told, swarm, target_batch_size=TARGET, max_steps=1, batch_size=3, name="counted")
        told.train()
        return samples_of_steps(swarm)

    assert alone(train) == [TARGET]


def test_a_plateau_of_the_trainers_is_refused_and_one_of_the_swarms_goes_by_its_loss(tmp_path: Path) -> None:
    def train(swarm: Swarm) -> dict[str, Any]:
        trainer = trainer_of(tmp_path, lr_scheduler_type="constant")
        plateau = ReduceLROnPlateau(trainer.create_optimizer())
        trainer.lr_scheduler = plateau
        with pytest.raises(ValueError, match=r"pass scheduler=ReduceLROnPlateau"):
            attach(trainer, swarm, target_batch_size=TARGET, max_steps=3)
        attach(trainer, swarm, target_batch_size=TARGET, max_steps=3, scheduler=plateau)
        trainer.train()
        losses = [event.loss for event in swarm.events.recent(StepFinished)]
        logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        assert logged == pytest.approx(losses, rel=1e-4), "both are means over what was accumulated"
        return {**plateau.state_dict(), "losses": losses}

    state = alone(train)
    assert state["last_epoch"] == len(state["losses"]) == 3
    assert state["best"] == pytest.approx(min(state["losses"]), rel=1e-3)


def test_any_tracker_gets_the_swarms_metrics(tmp_path: Path) -> None:
    rows: list[tuple[str, float, int]] = []
    logged: list[tuple[dict[str, float], int]] = []
    writer = SimpleNamespace(add_scalar=lambda *row: rows.append(row))
    run = SimpleNamespace(log=lambda metrics, step: logged.append((metrics, step)))

    def train(swarm: Swarm) -> None:
        with pytest.raises(TypeError, match="neither add_scalar nor log"):
            track(swarm, object())
        stops = [track(swarm, writer), track(swarm, run)]
        trainer = trainer_of(tmp_path)
        attach(trainer, swarm, target_batch_size=TARGET, max_steps=2)
        trainer.train()
        for stop in stops:
            stop()
        attach(trainer, swarm, target_batch_size=TARGET, max_steps=3)
        trainer.train()

    alone(train)
    assert [step for _, step in logged] == [1, 2] and logged[1][0]["swarm_samples"] == TARGET
    assert {"loss", "swarm_peers", "swarm_samples_per_s"} < {name for name, _, _ in rows}


def samples_of_steps(swarm: Swarm) -> list[float]:
    return [step.samples for step in swarm.events.recent(StepFinished)]


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}])
def test_texts_in_one_row_count_as_many_as_they_are(tmp_path: Path, options: dict[str, Any]) -> None:
    def train(swarm: Swarm) -> list[float]:
        plain = trainer_of(tmp_path, remove_unused_columns=False)
        data = texts("alice")[:10]
        trainer = Trainer(
            plain.model, plain.args, train_dataset=data, data_collator=DataCollatorWithFlattening()
        )
        attach(trainer, swarm, target_batch_size=10, max_steps=2, **options)
        trainer.train()
        return samples_of_steps(swarm)

    # Of batches of 4, 4 and 2 texts; the user's word is for each batch.
    assert alone(train) == ([10, 10] if not options else [12, 12])


class Lengths(torch.utils.data.Sampler[int]):
    """A sampler of the user's own, which draws from torch's global random numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(torch.randperm(self.count).tolist())

    def __len__(self) -> int:
        return self.count


class Own(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return Lengths(len(self.train_dataset))


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_each_way_to_sample_gives_each_peer_an_order_of_its_own(tmp_path: Path, strategy: str) -> None:
    def train(swarm: Swarm) -> list[int]:
        trainer = trainer_of(tmp_path / swarm.name, train_sampling_strategy=strategy, max_grad_norm=0.5)
        arguments = trainer.args
        attach(trainer, swarm, target_batch_size=TARGET, max_steps=2)
        assert (arguments.max_steps, arguments.max_grad_norm) == (-1, 0.5), "the user's arguments stay"
        # what a Trainer does as it begins
        torch.manual_seed(42)
        rows = [row for batch in trainer.get_train_dataloader() for row in batch["input_ids"]]
        assert not swarm.events.recent(Notice)
        return [int(row.sum()) for row in rows]

    with cs.simulate(2, seed=1) as simulation:
        alices, bobs = simulation.run(train).values()
    assert alices != bobs and sorted(alices) == sorted(bobs)


def test_an_order_that_peers_may_share_is_told_of(tmp_path: Path) -> None:
    def train(swarm: Swarm) -> list[list[str]]:
        told = []
        plain = trainer_of(tmp_path, train_sampling_strategy="sequential")
        own = Own(plain.model, plain.args, train_dataset=texts("alice"), data_collator=padded)
        for name, trainer in (("plain", plain), ("own", own)):
            attach(trainer, swarm, target_batch_size=TARGET, max_steps=1, name=name)
            trainer.train()
            told.append([notice.text for notice in swarm.events.recent(Notice)])
        return told

    first, both = alone(train)
    assert len(first) == 1 and first[0].startswith("all peers read this loader in one order")
    assert len(both) == 2 and "the same random seed" in both[1] and "Lengths" in both[1]


def grpo(trl: Any, tokenizer: Any, settings: dict[str, Any]) -> Any:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    rows = [{"prompt": f"w{index % 9 + 2} w3"} for index in range(64)]
    arguments = trl.GRPOConfig(**settings, num_generations=2, max_completion_length=4)
    data = Dataset.from_list(rows)
    return trl.GRPOTrainer(language_model(), reward, arguments, data, processing_class=tokenizer)


def dpo(trl: Any, tokenizer: Any, settings: dict[str, Any]) -> Any:
    rows = [{"prompt": f"w{n % 9 + 2}", "chosen": " w3 w4", "rejected": " w5 w6 w7"} for n in range(64)]
    models, data = (language_model(), language_model()), Dataset.from_list(rows)
    arguments = trl.DPOConfig(**settings)
    return trl.DPOTrainer(*models, args=arguments, train_dataset=data, processing_class=tokenizer)


def sft(trl: Any, tokenizer: Any, settings: dict[str, Any], *, packed: bool = False) -> Any:
    data = Dataset.from_list([{"input_ids": [2, 3, 4, 5][: 2 + index % 3]} for index in range(96)])
    arguments = trl.SFTConfig(**settings, padding_free=True, packing=packed, max_length=6 if packed else None)
    return trl.SFTTrainer(language_model(), args=arguments, train_dataset=data, processing_class=tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "accumulated"),
    [(grpo, 1), (grpo, 4), (dpo, 2), (sft, 1), (partial(sft, packed=True), 1)],
)
def test_trainers_of_trl_count_completions_pairs_and_packed_examples(
    make: Callable[..., Any], accumulated: int, tmp_path: Path
) -> None:
    """Two steps of 16 samples are eight micro-batches of four."""
    trl = pytest.importorskip("trl", reason="the extra [dev] installs trl")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    settings = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": accumulated,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_checkpointing": False,
    }

    def train(swarm: Swarm) -> int:
        trainer, computed = make(trl, tokenizer, settings), []
        compute = trainer.training_step

        def counted(*given: Any, **named: Any) -> Any:
            computed.append(0)
            return compute(*given, **named)

        trainer.training_step = counted
        attach(trainer, swarm, target_batch_size=16, max_steps=2)
        trainer.train()
        return len(computed)

    assert alone(train) == 8
