"""Evaluate a masked language model: its guesses for masked words, and its loss on held-out text.

Evaluation does not disturb training: the model runs in evaluation mode and without gradients, then each module gets
its mode back. A call may also use other weights than the model's own. Evaluate between two steps, on the thread that
trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from colab_swarm.recipes.pretraining import IGNORED, MIN_WINDOW, Collator, Sample, check_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Answer:
    """One of the likeliest answers, and its probability."""

    label: str
    probability: float


@dataclass(frozen=True)
class Reply:
    """The likeliest answers to one question, the likeliest first.

    Attributes:
        question: as text.
        before: by the model as this peer found it; empty if that is not known.
        now: by the model as it is.
    """

    question: str
    before: tuple[Answer, ...]
    now: tuple[Answer, ...]


@dataclass(frozen=True)
class Guess:
    """A token for a masked place, and how sure the model is of it."""

    token: str
    probability: float

    def __str__(self) -> str:
        return f"{self.token} {self.probability:.0%}"


def fill_mask(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, text: str, *, top: int = 5
) -> list[list[Guess]]:
    """The ``top`` likeliest tokens for each ``[MASK]`` of a text, the likeliest first.

    Args:
        model: of `transformers`, for pretraining or masked language modelling.

    Raises:
        ValueError: there is no mask in the text.
    """
    batch = tokenizer(text, return_tensors="pt", truncation=True, max_length=_positions(model))
    masked = batch["input_ids"][0] == tokenizer.mask_token_id
    if not masked.any():
        raise ValueError(
            f"there is no {tokenizer.mask_token} in the text, or not within its first part: {text[:80]!r}"
        )
    with _evaluating(model) as device:
        scores = token_logits(model(**{name: tensor.to(device) for name, tensor in batch.items()}))
    found = scores[0, masked.to(device)].float().softmax(dim=-1).topk(top)
    return [
        [
            Guess(tokenizer.decode([token]).strip(), chance)
            for token, chance in zip(tokens, chances, strict=True)
        ]
        for tokens, chances in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]


def masked_loss(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    texts: Iterable[str],
    *,
    sequence_length: int = 512,
    batch_size: int = 16,
    seed: int = 0,
) -> float:
    """The mean loss per hidden token of held-out text, in nats; its exponential is the perplexity.

    The same text, length and seed hide the same tokens every time, whatever the batch size, so that steps of a run
    and runs can be compared.

    Args:
        texts: read once; each is cut into samples by itself.
        sequence_length: L, tokens of a sample.

    Raises:
        ValueError: there is not enough text for one sample, or a size is too small.
    """
    check_sizes(batch_size, sequence_length)
    collate = Collator(tokenizer, sequence_length, seed)
    samples = [collate([sample]) for text in texts for sample in _samples(text, tokenizer, sequence_length)]
    if not samples:
        raise ValueError(f"the held-out text is too short: a sample needs {MIN_WINDOW} tokens")
    total = count = 0.0
    with _evaluating(model) as device:
        for start in range(0, len(samples), batch_size):
            rows = samples[start : start + batch_size]
            batch = {name: torch.cat([row[name] for row in rows]).to(device) for name in rows[0]}
            labels = batch.pop("labels")
            batch.pop("sentence_order_label")
            scores = token_logits(model(**batch)).float().flatten(0, 1)
            total += float(
                nn.functional.cross_entropy(scores, labels.flatten(), ignore_index=IGNORED, reduction="sum")
            )
            count += int((labels != IGNORED).sum())
    return total / count


def token_logits(output: Any) -> Tensor:
    """The scores (B, L, V) in the output of a model for pretraining or for masked language modelling."""
    scores: Tensor = output.prediction_logits if "prediction_logits" in output else output.logits
    return scores


def _samples(text: str, tokenizer: PreTrainedTokenizerFast, sequence_length: int) -> Iterator[Sample]:
    """Consecutive pieces in two halves, in order, as in training."""
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    size = sequence_length - 3
    for start in range(0, len(tokens) - MIN_WINDOW + 1, size):
        window = tokens[start : start + size]
        yield window[: len(window) // 2], window[len(window) // 2 :], False


def _positions(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.max_position_embeddings)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[torch.device]:
    """The model without dropout and gradients; its device."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)


TOP = 5

MASK = "[MASK]"

Weights: TypeAlias = Mapping[str, Tensor]

ENGLISH = ("The capital of France is [MASK].", "She went to the [MASK] to buy some bread.")

EXAMPLES = {
    "python-docs": (
        "This function returns a [MASK] of strings.",
        "If the [MASK] is not found, an exception is raised.",
        "A class is a [MASK] of the object.",
    ),
    "bn": ("বাংলাদেশের রাজধানী [MASK]।", "আমি [MASK] খাই।"),
}

"""What to ask by default, by text or language."""


@dataclass(frozen=True)
class MaskedText:
    """Texts with gaps, for a masked language model with its tokenizer.

    Attributes:
        examples: texts with ``[MASK]`` in them.
    """

    tokenizer: PreTrainedTokenizerFast
    examples: Sequence[str] = ENGLISH

    def replies(self, model: nn.Module, question: str, before: Weights | None) -> list[Reply]:
        """One reply for each gap."""
        if MASK not in question:
            raise ValueError(f"{question!r} has no gap: write {MASK} where the model is to fill in a word")
        mask = str(self.tokenizer.mask_token)
        length = getattr(getattr(model, "config", None), "max_position_embeddings", 512)
        inputs = self.tokenizer(
            question.replace(MASK, mask), return_tensors="pt", truncation=True, max_length=length
        )
        gaps = (inputs["input_ids"][0] == self.tokenizer.mask_token_id).nonzero().flatten().tolist()
        if not gaps:
            raise ValueError(f"the first {length} tokens, which is all that the model reads, have no gap")
        now = self._fill(model, inputs, gaps, None)
        then = [()] * len(gaps) if before is None else self._fill(model, inputs, gaps, before)
        texts = [question if len(gaps) == 1 else f"{question} (gap {n})" for n in range(1, len(gaps) + 1)]
        return [Reply(text, *answers) for text, *answers in zip(texts, then, now, strict=True)]

    def _fill(
        self, model: nn.Module, inputs: Mapping[str, Tensor], gaps: list[int], weights: Weights | None
    ) -> list[tuple[Answer, ...]]:
        scores = token_logits(call(model, weights, **inputs))[0]
        return [best(scores[gap], self._word) for gap in gaps]

    def _word(self, token: int) -> str:
        text = str(self.tokenizer.convert_ids_to_tokens(token))
        return text.replace("\u2581", " ").strip() or "(space)"


def call(model: nn.Module, weights: Weights | None, *inputs: Tensor, **named: Tensor) -> Any:
    """The model's output in evaluation mode, with its own weights or others."""
    first = next(model.parameters())
    things = [thing.to(first.device) for thing in inputs]
    things = [thing.to(first.dtype) if thing.is_floating_point() else thing for thing in things]
    with _at_rest(model), torch.no_grad():
        moved = {name: thing.to(first.device) for name, thing in named.items()}
        if weights is None:
            return model(*things, **moved)
        own = dict(model.named_parameters())
        lent = {name: weight.to(own[name].device, own[name].dtype) for name, weight in weights.items()}
        return torch.func.functional_call(model, lent, tuple(things), moved)


def best(scores: Tensor, label: Any) -> tuple[Answer, ...]:
    """The answers with the highest scores.

    Args:
        scores: one for each possible answer.
        label: of an answer, by its index.

    Raises:
        ValueError: they are no numbers.
    """
    chances, indices = scores.float().softmax(0).topk(min(TOP, len(scores)))
    if not chances.isfinite().all():
        raise ValueError(
            "the model's scores are no numbers (NaN): its training has diverged, or so has what it was asked about; go "
            "back to an earlier checkpoint, and train on with a lower learning rate"
        )
    return tuple(Answer(label(i), p) for i, p in zip(indices.tolist(), chances.tolist(), strict=True))


@contextmanager
def _at_rest(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
