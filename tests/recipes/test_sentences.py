from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from colab_swarm.recipes.text import Passage, order_sample, passages, split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("আমি যাই।তুমি এসো| সে ৫.৩ কি.মি. দূরে", ["আমি যাই।", "তুমি এসো|", "সে ৫.৩ কি.মি.", "দূরে"]),
        ("Go! It is 3.5 km.\nNo full stop\n\nWhy? ", ["Go!", "It is 3.5 km.", "No full stop", "Why?"]),
        ("এক । দুই ॥ তিন | চার", ["এক ।", "দুই ॥", "তিন |", "চার"]),
        (" \n ", []),
    ],
)
def test_sentences_end_at_punctuation_and_line_breaks(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab .!?।|\n", max_size=80))
def test_splitting_loses_nothing_but_space(text: str) -> None:
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


def test_passages_hold_the_document_in_order(tokenizer: PreTrainedTokenizerFast) -> None:
    text = ". ".join(f"number {n} is larger than number {n - 1}" for n in range(100, 200))
    found = list(passages(text, tokenizer, 61))
    together = np.concatenate([passage.tokens for passage in found])
    assert tokenizer.decode(together).startswith(text[:3000])
    assert all(61 <= len(passage.tokens) <= 61 + 30 for passage in found[:-1])
    for passage in found:
        second = tokenizer.decode(passage.tokens[passage.borders[0] :])
        assert second.startswith("number")


def test_a_very_long_sentence_is_cut_and_a_lone_one_is_dropped(tokenizer: PreTrainedTokenizerFast) -> None:
    (passage, *_) = passages("word " * 500, tokenizer, 61)
    assert passage.borders[:2] == (30, 60)
    assert not list(passages("only one sentence.", tokenizer, 61))
    assert not list(passages(" \n", tokenizer, 61))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=8), st.integers(2, 60), st.integers(0, 99))
def test_a_sample_is_two_neighbouring_pieces_that_fit(lengths: list[int], room: int, seed: int) -> None:
    tokens = np.arange(sum(lengths), dtype=np.int32)
    borders = tuple(np.cumsum(lengths)[:-1].tolist())
    first, second, swapped = order_sample(Passage(tokens, borders), room, random.Random(seed))
    before, after = (second, first) if swapped else (first, second)
    assert before[0] == 0
    assert after[0] in borders
    assert len(first) >= 1 and len(second) >= 1
    assert len(first) + len(second) == min(room, len(tokens))
    border, left = int(after[0]), len(tokens) - int(after[0])
    shorter_is_whole = len(before) == border <= len(after) or len(after) == left <= len(before)
    assert shorter_is_whole or abs(len(before) - len(after)) <= 1


def test_half_of_the_samples_are_swapped() -> None:
    passage = Passage(np.arange(9, dtype=np.int32), (3, 6))
    rng = random.Random(0)
    samples = [order_sample(passage, 99, rng) for _ in range(400)]
    assert 150 < sum(swapped for *_, swapped in samples) < 250
    starts = {(int(first[0]), int(second[0])) for first, second, _ in samples}
    assert starts == {(0, 3), (0, 6), (3, 0), (6, 0)}
