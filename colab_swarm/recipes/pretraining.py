"""Endless batches for masked language modelling with sentence-order prediction (ALBERT, Lan et al. 2020).

Axes: B samples of a batch, L positions of a sample. A sample is ``[CLS] first [SEP] second [SEP]``:
two consecutive pieces of text, swapped with probability one half.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from colab_swarm.recipes.text import BlockSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MASKED = 0.15
SHUFFLE_WINDOWS = 1024
MIN_WINDOW = 8
IGNORED = -100
"""A label that the loss of `transformers` ignores."""

Sample: TypeAlias = "tuple[Sequence[int], Sequence[int], bool]"
"""The tokens of two pieces, without special tokens, and whether they are swapped."""


def peer_seed(seed: int, peer: bytes) -> int:
    """Return a seed for one peer that is the same in every process, unlike ``hash()``."""
    salt = seed.to_bytes(16, "big", signed=True)
    return int.from_bytes(hashlib.blake2b(peer, digest_size=7, salt=salt).digest())


def check_sizes(batch_size: int, sequence_length: int) -> None:
    if batch_size < 1 or sequence_length < MIN_WINDOW + 3:
        least = f"at least 1 and {MIN_WINDOW + 3} are needed"
        raise ValueError(f"batch_size={batch_size}, sequence_length={sequence_length}: {least}")


class Collator:
    """Turns samples of at most L - 3 tokens into batches: special tokens, padding, masks by ``seed``."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, sequence_length: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self._tokenizer, self._length = tokenizer, sequence_length
        self._specials = torch.tensor(tokenizer.all_special_ids)

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        cls, sep = self._tokenizer.cls_token_id, self._tokenizer.sep_token_id
        input_ids = torch.full((len(samples), self._length), self._tokenizer.pad_token_id)
        attention_mask, token_type_ids = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
        for row, (first, second, _) in enumerate(samples):
            tokens = [cls, *first, sep, *second, sep]
            input_ids[row, : len(tokens)] = torch.tensor(tokens)
            attention_mask[row, : len(tokens)] = 1
            token_type_ids[row, len(first) + 2 : len(tokens)] = 1
        masked, labels = self.mask(input_ids)
        return {
            "input_ids": masked,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "labels": labels,
            "sentence_order_label": torch.tensor([swapped for *_, swapped in samples], dtype=torch.int64),
        }

    def mask(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hide 15 % of each sample's tokens, at least one: 80 % masked, 10 % replaced, 10 % unchanged.

        Return input and labels, both (B, L); labels are `IGNORED` where nothing is predicted.
        """
        chance = torch.rand(input_ids.shape, generator=self.generator)
        chance[torch.isin(input_ids, self._specials)] = 2.0
        count = (MASKED * (chance < 2).sum(dim=1)).round().clamp(min=1)
        hidden = chance.argsort(dim=1).argsort(dim=1) < count[:, None]
        labels = input_ids.where(hidden, IGNORED)
        fate = torch.rand(input_ids.shape, generator=self.generator)
        noise = torch.randint(len(self._tokenizer), input_ids.shape, generator=self.generator)
        masked = input_ids.where(~(hidden & (fate < 0.8)), self._tokenizer.mask_token_id)
        return masked.where(~(hidden & (fate >= 0.9)), noise), labels


def windows(text: str, tokenizer: PreTrainedTokenizerFast, sequence_length: int) -> Iterator[list[int]]:
    """Yield a text's tokens in consecutive pieces that fill a sample; a rest of a few is dropped."""
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    size = sequence_length - 3
    for start in range(0, len(tokens) - MIN_WINDOW + 1, size):
        yield tokens[start : start + size]


class SampledBatches(Iterator[dict[str, Tensor]]):
    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, batch_size: int, sequence_length: int, seed: int
    ) -> None:
        check_sizes(batch_size, sequence_length)
        self.tokenizer, self.batch_size, self.sequence_length = tokenizer, batch_size, sequence_length
        self._rng, self._collate = random.Random(seed), Collator(tokenizer, sequence_length, seed)

    def __repr__(self) -> str:
        size = f"{self.batch_size} x {self.sequence_length} of {len(self.tokenizer)} tokens"
        return f"{type(self).__name__}({size})"


class PretrainingBatches(SampledBatches):
    """An endless iterator of batches, ready for ``model(**batch)``.

    A batch holds int64 CPU tensors: ``input_ids``, ``attention_mask``, ``token_type_ids`` and ``labels``
    of shape (B, L), and ``sentence_order_label`` (B,), 1 where the pieces were swapped. The tokenizer
    has pad, cls, sep and mask tokens. The seed (`peer_seed`) is for the order of the text, the swaps and
    the masks. Raises `ValueError` if a size is too small.
    """

    def __init__(self, blocks: BlockSource, tokenizer: PreTrainedTokenizerFast, **sizes: int) -> None:
        super().__init__(tokenizer, **sizes)
        self._blocks, self._windows = blocks, self._shuffled_windows()

    def __next__(self) -> dict[str, Tensor]:
        samples: list[Sample] = []
        for swap in [self._rng.random() < 0.5 for _ in range(self.batch_size)]:
            window = next(self._windows)
            cut = self._rng.randint(len(window) // 4, len(window) - len(window) // 4)
            first, second = window[:cut], window[cut:]
            samples.append((second, first, True) if swap else (first, second, False))
        return self._collate(samples)

    def _shuffled_windows(self) -> Iterator[list[int]]:
        held: list[list[int]] = []
        while True:
            found = False
            for window in (
                one
                for text in self._blocks(self._rng)
                for one in windows(text, self.tokenizer, self.sequence_length)
            ):
                found = True
                held.append(window)
                if len(held) >= SHUFFLE_WINDOWS:
                    place = self._rng.randrange(len(held))
                    held[place], held[-1] = held[-1], held[place]
                    yield held.pop()
            if not found:
                raise ValueError("the text is too short or an exhausted iterator: give a longer list")
