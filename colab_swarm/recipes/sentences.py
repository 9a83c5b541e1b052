"""Samples for sentence-order prediction from whole sentences, as sahajBERT made them (DeDLOC, section 4.3)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ENDS = re.compile(r"(?<=[।॥。！？])\s*|(?<=[.!?|৷])\s+|\s*\n\s*")
"""Between two sentences. A danda ends one even where no space follows; Bengali text often has a bar for it."""

Tokens: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int32]]"


@dataclass(frozen=True)
class Passage:
    """Two or more consecutive sentences, enough to fill a sample if the document has so many.

    Attributes:
        tokens: of all sentences.
        borders: where in ``tokens`` the second, third, … sentence begins.
    """

    tokens: Tokens
    borders: tuple[int, ...]


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, in order, without the space between them; a line break ends one as well."""
    return [sentence for sentence in ENDS.split(text) if sentence.strip()]


def passages(text: str, tokenizer: PreTrainedTokenizerFast, length: int) -> list[Passage]:
    """Cut a document into passages of ``length`` tokens or a few more; a lone sentence at its end is left out."""
    sentences = split_sentences(text)
    if not sentences:
        return []
    encoded = tokenizer(sentences, add_special_tokens=False, verbose=False)["input_ids"]
    return list(_gather(_halved(encoded, max(1, length // 2)), length))


def order_sample(passage: Passage, length: int, rng: random.Random) -> tuple[Tokens, Tokens, bool]:
    """Cut a passage between two sentences and swap the halves with probability one half.

    Returns:
        The two parts, together no longer than ``length`` (the longer one is cut), and whether they are swapped.
    """
    border = rng.choice(passage.borders)
    first, second = passage.tokens[:border], passage.tokens[border:]
    swapped = rng.random() < 0.5
    if swapped:
        first, second = second, first
    keep = _longest_first(len(first), len(second), length)
    return first[: keep[0]], second[: keep[1]], swapped


def _halved(sentences: Iterable[list[int]], most: int) -> Iterator[list[int]]:
    """Sentences; one that would fill more than half a sample comes in pieces, or it had no second part."""
    for tokens in sentences:
        yield from (tokens[start : start + most] for start in range(0, len(tokens), most))


def _gather(sentences: Iterable[list[int]], length: int) -> Iterator[Passage]:
    tokens: list[int] = []
    borders: list[int] = []
    for sentence in sentences:
        if tokens:
            borders.append(len(tokens))
        tokens += sentence
        if borders and len(tokens) >= length:
            yield Passage(np.array(tokens, dtype=np.int32), tuple(borders))
            tokens, borders = [], []
    if borders:
        yield Passage(np.array(tokens, dtype=np.int32), tuple(borders))


def _longest_first(first: int, second: int, length: int) -> tuple[int, int]:
    """How much of both parts to keep: the longer one is cut until both fit, then both in turn."""
    excess = max(0, first + second - length)
    from_longer = min(excess, abs(first - second))
    if first > second:
        first -= from_longer
    else:
        second -= from_longer
    rest = excess - from_longer
    return first - rest // 2, second - (rest - rest // 2)
