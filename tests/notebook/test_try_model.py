"""`Swarm.try_model` compares a model's answers before and after training, and leaves the model as it was."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast as Words
from transformers.modeling_outputs import MaskedLMOutput

import colab_swarm as cs
from colab_swarm.notebook import try_model
from colab_swarm.notebook.try_model import ModelProbe, TryModel, cell_runs
from colab_swarm.recipes.masked_lm import call, replies
from colab_swarm.recipes.text import train_tokenizer
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import join_training

TEXT = ["the cat sat on the mat and the dog sat on the <b>cat</b>"] * 50
QUESTION = "the [MASK] sat on the [MASK]"
EXAMPLES = ("the [MASK] sat", "[MASK] and the dog")


class Guesser(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(words, 8), nn.Dropout(0.5), nn.Linear(8, words))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.01 * torch.randn(parameter.shape, generator=generator))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> MaskedLMOutput:
        return MaskedLMOutput(logits=self.layers(input_ids))


@pytest.fixture(scope="module")
def texts() -> Words:
    return train_tokenizer(TEXT, vocabulary=60)


@pytest.fixture
def net(texts: Words) -> Guesser:
    return Guesser(len(texts)).train()


@pytest.fixture
def alice() -> Iterator[Swarm]:
    with cs.simulate(1) as simulation:
        yield simulation.swarms["alice"]


@pytest.mark.slow
def test_before_and_now_differ_after_a_step_and_the_model_is_left_as_it_was(
    alice: Swarm, net: Guesser, texts: Words
) -> None:
    probe = ModelProbe()
    probe.on_optimizer("model", optimizer := join_training(alice, net))
    first = [answer.token for answer in replies(net, texts, EXAMPLES[0])[0].now]
    net(torch.arange(16)).logits.square().sum().backward()
    optimizer.step(samples=10)
    net.layers[2].eval()  # a frozen part
    weights = [parameter.clone() for parameter in net.parameters()]
    chance = torch.get_rng_state()
    probe.known = net, texts, EXAMPLES
    found = probe.try_model(None, net, None).replies
    with pytest.raises(RuntimeError):
        call(net, {"layers.2.weight": torch.zeros(10, 64)}, input_ids=torch.zeros(1, dtype=torch.int64))
    assert len(found) == len(EXAMPLES)
    assert [answer.token for answer in found[0].before] == first and found[0].before != found[0].now
    assert [module.training for module in net.layers] == [True, True, False] and net.training
    assert all(torch.equal(one, other) for one, other in zip(weights, net.parameters(), strict=True))
    assert torch.equal(chance, torch.get_rng_state())


@pytest.mark.parametrize(("trains", "words"), [(False, "no swarm.optimizer"), (True, "more than 100 B")])
def test_without_an_optimizer_or_of_a_large_model_there_is_no_before_and_it_says_why(
    alice: Swarm, net: Guesser, texts: Words, monkeypatch: pytest.MonkeyPatch, trains: bool, words: str
) -> None:
    monkeypatch.setattr(try_model, "MAX_BYTES", 100)
    probe = ModelProbe()
    if trains:
        probe.on_optimizer("model", join_training(alice, net))
    found = probe.try_model(QUESTION, net, texts)
    assert found.replies[0].now and not found.replies[0].before and words in str(found)


def test_the_copy_has_only_the_trained_parameters(net: Guesser, texts: Words) -> None:
    net.layers[0].weight.requires_grad_(False)
    optimizer: Any = SimpleNamespace(param_groups=[{"params": list(net.parameters())}])
    probe = ModelProbe()
    probe.on_optimizer("model", optimizer)
    assert [parameter for parameter, _ in probe._first_weights["model"]] == list(net.layers[2].parameters())
    assert probe.try_model(QUESTION, net, texts).replies[0].before
    assert not probe.try_model(QUESTION, Guesser(len(texts)).train(), texts).replies[0].before


def test_a_model_is_needed_and_a_recipe_can_set_it(net: Guesser, texts: Words) -> None:
    probe = ModelProbe()
    with pytest.raises(ValueError, match="Pass model= and tokenizer="):
        probe.try_model(None, None, None)
    probe.known = net, texts, EXAMPLES
    assert "TryModel(2 questions: " in repr(probe.try_model(None, None, None))


@pytest.mark.slow
def test_a_masked_language_model_fills_every_gap(texts: Words) -> None:
    from transformers import AlbertForPreTraining

    from colab_swarm.recipes.masked_lm import SIZES, albert_config

    model = AlbertForPreTraining(albert_config(SIZES["tiny"], texts)).train()
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    found = replies(model, texts, QUESTION, zeros)
    assert [reply.question[-8:] for reply in found] == [" (gap 1)", " (gap 2)"]
    for reply in found:
        assert len(reply.now) == len(reply.before) == 5
        assert reply.before[0].probability == pytest.approx(1 / len(texts))  # all weights are 0
    assert model.training
    with pytest.raises(ValueError, match=r"write \[MASK\]"):
        replies(model, texts, "no gap")


def test_the_form_answers_a_question_or_says_what_is_wrong(net: Guesser, texts: Words) -> None:
    probe = ModelProbe()
    shown = TryModel(lambda question: probe._ask(net, texts, question), EXAMPLES, live=True)
    line, error, view = shown._box.children
    text, button = line.children
    assert text.value == EXAMPLES[0]
    text.value = "no gap here"
    button.click()
    assert "write [MASK]" in error.value
    text.value = QUESTION
    button.click()
    assert error.value == "" and "(gap 2)" in view.value
    assert shown._repr_mimebundle_().keys() >= {"application/vnd.jupyter.widget-view+json"}


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_diverged_model_is_reported(net: Guesser, texts: Words, weight: float) -> None:
    nn.init.constant_(net.layers[0].weight, weight)
    with pytest.raises(ValueError, match="has diverged"):
        ModelProbe().try_model(QUESTION, net, texts)


def test_a_running_cell_is_noticed() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.run_cell("from colab_swarm.notebook.try_model import cell_runs; found = cell_runs()")
    assert shell.user_ns["found"] and not cell_runs()
