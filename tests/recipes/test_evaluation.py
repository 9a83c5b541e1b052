import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AlbertForPreTraining as Albert
from transformers import PreTrainedTokenizerFast as Words
from transformers.modeling_outputs import MaskedLMOutput

from colab_swarm.recipes.masked_lm import SIZES, albert_config, fill_mask, masked_loss
from colab_swarm.recipes.text import train_tokenizer

RHYME = ["one two three four five six seven eight nine ten eleven twelve " * 4]


class Prejudiced(torch.nn.Module):
    """A model that thinks the same of every place, whatever the text."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = torch.nn.Parameter(scores)
        self.config = SimpleNamespace(max_position_embeddings=512)

    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> MaskedLMOutput:
        return MaskedLMOutput(logits=self.scores.expand(*input_ids.shape, -1))


@pytest.fixture(scope="module")
def tokenizer() -> Words:
    return train_tokenizer(RHYME, vocabulary=60)


@pytest.fixture(scope="module")
def untrained(tokenizer: Words) -> Albert:
    torch.manual_seed(0)
    return Albert(albert_config(SIZES["tiny"], tokenizer)).train()


def test_guesses_are_the_likeliest_tokens_with_their_probabilities(tokenizer: Words) -> None:
    chances = torch.full((len(tokenizer),), 1e-9)
    chances[tokenizer.convert_tokens_to_ids(["e", "n", "t"])] = torch.tensor([0.2, 0.5, 0.3])
    (guesses,) = fill_mask(Prejudiced(chances.log()), tokenizer, "one [MASK] three", top=3)
    assert [guess.token for guess in guesses] == ["n", "t", "e"]
    assert [guess.probability for guess in guesses] == pytest.approx([0.5, 0.3, 0.2], abs=1e-5)
    assert str(guesses[0]) == "n 50%"


def test_the_loss_counts_the_hidden_tokens_and_no_others(tokenizer: Words) -> None:
    ids = tokenizer(RHYME[0], add_special_tokens=False)["input_ids"]
    knowing = torch.full((len(tokenizer),), -1e4)
    knowing[sorted(set(ids))] = 0.0  # counting a special or padded place would give an enormous loss
    loss = masked_loss(Prejudiced(knowing), tokenizer, RHYME, sequence_length=32)
    assert loss == pytest.approx(math.log(len(set(ids))))


def test_the_loss_is_always_the_same_for_any_batch_size(untrained: Albert, tokenizer: Words) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    cases: list[dict[str, int]] = [{"batch_size": 1}, {"batch_size": 3}, {"seed": 1}]
    one, three, other = (
        masked_loss(untrained, tokenizer, RHYME, sequence_length=32, **case) for case in cases
    )
    assert three == pytest.approx(one, rel=1e-5) and other != pytest.approx(one, rel=1e-5)
    assert torch.equal(torch.rand(1), expected) and untrained.training


def test_text_without_a_mask_or_too_short_is_refused(untrained: Albert, tokenizer: Words) -> None:
    with pytest.raises(ValueError, match=r"no \[MASK\] in the text"):
        fill_mask(untrained, tokenizer, "one two")
    with pytest.raises(ValueError, match="too short"):
        masked_loss(untrained, tokenizer, ["", "a"])
