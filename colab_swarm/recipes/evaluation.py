"""What a masked language model has learned: its guesses, and its loss on text that it was not trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from colab_swarm.recipes.pretraining import IGNORED, MIN_WINDOW, Collator, Sample, check_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
