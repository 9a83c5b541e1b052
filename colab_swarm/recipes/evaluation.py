"""Evaluate a masked language model: its guesses for masked words, and its loss on held-out text.

The model runs in evaluation mode and without gradients, then each module gets its mode back.
Evaluate between two steps, on the thread that trains.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from colab_swarm.recipes.batches import IGNORED, MIN_WINDOW, Collator, check_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
class Guess:
    """A token for a masked place, and how sure the model is of it."""

    token: str
    probability: float

    def __str__(self) -> str:
        return f"{self.token} {self.probability:.0%}"


@dataclass(frozen=True)
class Reply:
    """The likeliest answers by the model as this peer found it (empty if unknown), and as it is."""

    question: str
    before: tuple[Guess, ...]
    now: tuple[Guess, ...]


def replies(
    model: nn.Module, tokenizer: "PreTrainedTokenizerFast", question: str, before: Weights | None = None
) -> list[Reply]:
    """Return a reply for each gap; ``before`` are the weights that the model had at first."""
    if MASK not in question:
        raise ValueError(f"{question!r} has no gap: write {MASK} where the model is to fill in a word")
    now = fill_mask(model, tokenizer, question)
    then = fill_mask(model, tokenizer, question, weights=before) if before else [[] for _ in now]
    texts = [question] if len(now) == 1 else [f"{question} (gap {n})" for n in range(1, len(now) + 1)]
    return [Reply(*one) for one in zip(texts, map(tuple, then), map(tuple, now), strict=True)]


def fill_mask(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerFast",
    text: str,
    *,
    top: int = 5,
    weights: Weights | None = None,
) -> list[list[Guess]]:
    """Return the ``top`` likeliest tokens per ``[MASK]``; ValueError without one, or if scores are NaN."""
    length = getattr(getattr(model, "config", None), "max_position_embeddings", 512)
    text = text.replace(MASK, str(tokenizer.mask_token))
    batch = tokenizer(text, return_tensors="pt", truncation=True, max_length=length)
    masked = batch["input_ids"][0] == tokenizer.mask_token_id
    if not masked.any():
        first = f"its first {length} tokens, which is all that the model reads"
        raise ValueError(f"there is no {MASK} in the text, or not within {first}: {text[:80]!r}")
    scores = token_logits(call(model, weights, **batch))[0].cpu()[masked].float()
    chances, tokens = scores.softmax(-1).topk(min(top, scores.shape[1]))
    if not chances.isfinite().all():
        raise ValueError(
            "the model's scores are no numbers (NaN): its training has diverged, or so has what it was asked about; go "
            "back to an earlier checkpoint, and train on with a lower learning rate"
        )
    rows = zip(tokens.tolist(), chances.tolist(), strict=True)
    return [[Guess(tokenizer.decode([t]).strip(), p) for t, p in zip(*row, strict=True)] for row in rows]


def masked_loss(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerFast",
    texts: Iterable[str],
    *,
    sequence_length: int = 512,
    batch_size: int = 16,
    seed: int = 0,
) -> float:
    """Return the mean loss per hidden token of held-out text, in nats; its exponential is the perplexity.

    Each text is cut into samples of ``sequence_length`` tokens by itself. The same text, length and seed
    hide the same tokens whatever the batch size, so that steps and runs can be compared. Raises
    `ValueError` if there is not enough text for one sample, or a size is too small.
    """
    check_sizes(batch_size, sequence_length)
    collate, size = Collator(tokenizer, sequence_length, seed), sequence_length - 3
    samples = []
    for text in texts:
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for start in range(0, len(tokens) - MIN_WINDOW + 1, size):  # a rest of a few is dropped
            one = tokens[start : start + size]
            samples.append(collate([(one[: len(one) // 2], one[len(one) // 2 :], False)]))
    if not samples:
        raise ValueError(f"the held-out text is too short: a sample needs {MIN_WINDOW} tokens")
    total = count = 0.0
    for start in range(0, len(samples), batch_size):
        rows = samples[start : start + batch_size]
        batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        batch.pop("sentence_order_label")
        labels = batch.pop("labels").flatten()
        scores = token_logits(call(model, None, **batch)).float().flatten(0, 1).cpu()
        total += nn.functional.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum").item()
        count += int((labels != IGNORED).sum())
    return total / count


def token_logits(output: Any) -> Tensor:
    scores: Tensor = output.prediction_logits if "prediction_logits" in output else output.logits
    return scores


def call(model: nn.Module, weights: Weights | None, **inputs: Tensor) -> Any:
    """Return the model's output in evaluation mode, with its own weights or others."""
    own, device = dict(model.named_parameters()), next(model.parameters()).device
    lent = {name: weight.to(own[name].device, own[name].dtype) for name, weight in (weights or {}).items()}
    moved = {name: one.to(device) for name, one in inputs.items()}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return torch.func.functional_call(model, lent, (), moved)
    finally:
        for module, training in modes:
            module.training = training
