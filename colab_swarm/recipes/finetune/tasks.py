"""The two tasks of DeDLOC's table 2: tag the words of a text, or classify it.

Axes: B examples, L tokens, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from colab_swarm.recipes.finetune.data import Example
from colab_swarm.recipes.finetune.metrics import accuracy, entity_f1, macro_f1
from colab_swarm.recipes.pretraining import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Task(Protocol):
    """What differs between the tasks. ``headline`` is the measure by which the best epoch is chosen."""

    headline: str

    def check(self, example: Example) -> None: ...

    def labels(self, examples: Sequence[Example]) -> list[str]: ...

    def build(self, source: str, labels: Sequence[str]) -> Any: ...

    def collate(self, examples: Sequence[Example], coder: Coder) -> dict[str, Tensor]: ...

    def read(self, logits: Tensor, examples: Sequence[Example], coder: Coder) -> list[Any]: ...

    def measure(self, expected: Sequence[Any], predicted: Sequence[Any]) -> dict[str, float]: ...


@dataclass(frozen=True)
class Coder:
    """Turns texts and labels into numbers."""

    tokenizer: PreTrainedTokenizerFast
    labels: Sequence[str]
    max_length: int

    def encode(self, examples: Sequence[Example], *, words: bool) -> Any:
        texts = [list(example.text) if words else example.text for example in examples]
        return self.tokenizer(
            texts,
            is_split_into_words=words,
            truncation=True,
            max_length=self.max_length,
            padding=True,
            return_tensors="pt",
        )

    def number(self, label: str) -> int:
        """Of the label; one that only validation or test knows cannot be learned and is left out of the loss."""
        return self.labels.index(label) if label in self.labels else IGNORED


class Tagging:
    """One tag for each word, on its first token; words beyond the longest length are tagged O."""

    headline = "f1"

    def check(self, example: Example) -> None:
        if isinstance(example.text, str):
            raise ValueError(
                f"to tag, an example needs a list of words and one of tags, not {example.text[:60]!r}"
            )

    def labels(self, examples: Sequence[Example]) -> list[str]:
        return sorted({tag for example in examples for tag in example.label} | {"O"})

    def build(self, source: str, labels: Sequence[str]) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(source, **_named(labels))

    def collate(self, examples: Sequence[Example], coder: Coder) -> dict[str, Tensor]:
        encoded = coder.encode(examples, words=True)
        targets_BL = torch.full(encoded["input_ids"].shape, IGNORED)
        for row, example in enumerate(examples):
            for word, place in _first_tokens(encoded.word_ids(row)).items():
                targets_BL[row, place] = coder.number(example.label[word])
        return {**encoded, "labels": targets_BL}

    def read(self, logits: Tensor, examples: Sequence[Example], coder: Coder) -> list[tuple[str, ...]]:
        encoded = coder.encode(examples, words=True)
        best_BL = logits.argmax(dim=-1).tolist()
        found = []
        for row, example in enumerate(examples):
            places = _first_tokens(encoded.word_ids(row))
            numbers = (
                best_BL[row][places[word]] if word in places else None for word in range(len(example.text))
            )
            found.append(tuple("O" if number is None else coder.labels[number] for number in numbers))
        return found

    def measure(self, expected: Sequence[Any], predicted: Sequence[Any]) -> dict[str, float]:
        flat = [[tag for tags in side for tag in tags] for side in (expected, predicted)]
        return {"f1": entity_f1(expected, predicted), "accuracy": accuracy(*flat)}


class Classification:
    """One label for a text."""

    headline = "accuracy"

    def check(self, example: Example) -> None:
        if not isinstance(example.label, str):
            raise ValueError(f"to classify, an example needs one label, not {example.label[:5]}")

    def labels(self, examples: Sequence[Example]) -> list[str]:
        return sorted({str(example.label) for example in examples})

    def build(self, source: str, labels: Sequence[str]) -> Any:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(source, **_named(labels))

    def collate(self, examples: Sequence[Example], coder: Coder) -> dict[str, Tensor]:
        targets_B = torch.tensor([coder.number(str(example.label)) for example in examples])
        return {**coder.encode(examples, words=False), "labels": targets_B}

    def read(self, logits: Tensor, examples: Sequence[Example], coder: Coder) -> list[str]:
        return [coder.labels[number] for number in logits.argmax(dim=-1).tolist()]

    def measure(self, expected: Sequence[Any], predicted: Sequence[Any]) -> dict[str, float]:
        return {"accuracy": accuracy(expected, predicted), "macro_f1": macro_f1(expected, predicted)}


def _first_tokens(words: Sequence[int | None]) -> dict[int, int]:
    """Place of the first token of each word."""
    return {word: place for place, word in reversed(list(enumerate(words))) if word is not None}


def _named(labels: Sequence[str]) -> dict[str, Any]:
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
    }
