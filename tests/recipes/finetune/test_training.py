from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AlbertForPreTraining, PreTrainedTokenizerFast

from colab_swarm.recipes.finetune.__main__ import main
from colab_swarm.recipes.finetune.data import Example, Splits
from colab_swarm.recipes.finetune.tasks import Classification, Coder, Tagging, Task
from colab_swarm.recipes.finetune.training import FineTuning, evaluate, finetune
from colab_swarm.recipes.masked_lm import AlbertSize, albert_config
from colab_swarm.recipes.text import SPECIALS, load_tokenizer

SMALL = AlbertSize(layers=1, hidden=32, heads=2)
NAMES, PLACES = ["alice", "bob", "carol", "dave"], ["dhaka", "sylhet", "khulna"]
WORDS = ["walks", "to", "and", "from", "with", "sees"]
KINDS = {**dict.fromkeys(NAMES, "B-PER"), **dict.fromkeys(PLACES, "B-LOC")}
FAST = FineTuning(epochs=6, batch_size=8, lr=5e-3, max_length=32)


def sentences(count: int, seed: int) -> list[Example]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        words = tuple(rng.choice([*NAMES, *PLACES, *WORDS]) for _ in range(rng.randint(3, 7)))
        found.append(Example(words, tuple(KINDS.get(word, "O") for word in words)))
    return found


def verdicts(count: int, seed: int) -> list[Example]:
    """Texts about a person or about a place."""
    rng = random.Random(seed)
    about = [("person", NAMES), ("place", PLACES)]
    chosen = [rng.choice(about) for _ in range(count)]
    return [
        Example(f"{rng.choice(WORDS)} {rng.choice(words)} {rng.choice(WORDS)}", label)
        for label, words in chosen
    ]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    vocabulary = [*SPECIALS.values(), *NAMES, *PLACES, *WORDS]
    words = Tokenizer(models.WordLevel(dict(zip(vocabulary, range(99), strict=False)), unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **SPECIALS)
    torch.manual_seed(0)
    AlbertForPreTraining(albert_config(SMALL, tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "make", "measure"), [(Tagging(), sentences, "f1"), (Classification(), verdicts, "accuracy")]
)
def test_a_task_is_learned_and_its_best_epoch_kept(
    task: Task, make: object, measure: str, pretrained: Path, tmp_path: Path
) -> None:
    assert callable(make)
    splits: Splits = {"train": make(96, 0), "validation": make(24, 1), "test": make(24, 2)}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    result = finetune(task, pretrained, splits, tmp_path, FAST)
    assert torch.equal(torch.rand(1), expected)
    assert result.test[measure] > 0.9
    labels = task.labels(splits["train"])
    coder = Coder(load_tokenizer(tmp_path), labels, FAST.max_length)
    assert evaluate(task, task.build(str(tmp_path), labels), coder, splits["validation"]) == result.validation
    stored = json.loads((tmp_path / "metrics.json").read_text())
    assert stored["test"] == result.test and stored["best_epoch"] == result.best_epoch


@pytest.mark.slow
def test_the_same_seed_gives_the_same_model(pretrained: Path, tmp_path: Path) -> None:
    splits = {"train": sentences(32, 0), "validation": sentences(16, 1)}
    short = FineTuning(epochs=1, batch_size=8, lr=5e-3, max_length=32)
    for name in ("first", "second"):
        finetune(Tagging(), pretrained, splits, tmp_path / name, short)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


class Downhill(Classification):
    """A task whose measure is best after the first epoch."""

    def __init__(self) -> None:
        self.measured = 0

    def measure(self, expected: object, predicted: object) -> dict[str, float]:
        self.measured += 1
        return {"accuracy": 1 / self.measured}


@pytest.mark.slow
def test_a_later_worse_epoch_does_not_replace_the_best(pretrained: Path, tmp_path: Path) -> None:
    splits = {"train": verdicts(8, 0), "validation": verdicts(8, 1)}
    result = finetune(Downhill(), pretrained, splits, tmp_path / "three", FineTuning(epochs=3, max_length=32))
    assert (result.best_epoch, result.validation) == (1, {"accuracy": 1.0})


def test_words_too_far_out_are_tagged_as_nothing(pretrained: Path) -> None:
    coder = Coder(load_tokenizer(pretrained), ["B-PER", "O"], 6)
    example = Example(("alice",) * 9, ("B-PER",) * 9)
    batch = Tagging().collate([example], coder)
    scores = torch.tensor([1.0, 0.0]).expand(*batch["labels"].shape, 2)
    (tags,) = Tagging().read(scores, [example], coder)
    seen = int((batch["labels"] == 0).sum())
    assert 0 < seen < 9
    assert tags == ("B-PER",) * seen + ("O",) * (9 - seen)


def test_examples_of_the_other_task_are_refused(pretrained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a list of words"):
        finetune(Tagging(), pretrained, {"train": verdicts(2, 0)}, tmp_path)
    with pytest.raises(ValueError, match="needs one label"):
        finetune(Classification(), pretrained, {"train": sentences(2, 0)}, tmp_path)
    with pytest.raises(ValueError, match="nothing to learn"):
        finetune(Classification(), pretrained, {"train": [Example("a", "x")] * 3}, tmp_path)


@pytest.mark.slow
def test_the_command_trains_with_each_seed_and_says_how_well(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "news.jsonl"
    data.write_text("\n".join(json.dumps({"text": e.text, "label": e.label}) for e in verdicts(60, 0)))
    output = tmp_path / "out"
    command = ["classify", str(pretrained), str(data), "--output", str(output), "--seeds", "0", "1"]
    main([*command, "--epochs", "2", "--lr", "5e-3"])
    printed = capsys.readouterr().out
    assert "validation accuracy: " in printed and " ± " in printed and "macro_f1" in printed
    assert (output / "seed-1" / "model.safetensors").exists()


def test_the_command_says_what_is_wrong(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "news.jsonl"
    data.write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n')
    with pytest.raises(SystemExit):
        main(["ner", str(pretrained), str(data)])
    assert "to tag, an example needs a list of words" in capsys.readouterr().err
