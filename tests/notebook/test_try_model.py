"""A model is asked between two steps, as it is and as this peer found it, and notices nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import colab_swarm as cs
from colab_swarm.notebook import try_model
from colab_swarm.notebook.try_model import InitialParameters, ModelProbe, TryModel, cell_runs
from colab_swarm.recipes.evaluation import DIGITS, Classes, MaskedText, call
from colab_swarm.recipes.masked_lm import SIZES, albert_config
from colab_swarm.recipes.text import train_tokenizer
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import join_training

SEEN = Classes("0123456789", shape=(1, 8, 8), ink=240.0)


def digits_model(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout(0.5), nn.BatchNorm1d(10))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.01 * torch.randn(parameter.shape, generator=generator))
    return net


@pytest.fixture
def alice() -> Iterator[Swarm]:
    with cs.simulate(1) as simulation:
        yield simulation.swarms["alice"]


@pytest.mark.slow
def test_before_and_now_differ_after_a_step_and_the_model_is_left_as_it_was(alice: Swarm) -> None:
    net, asking = digits_model(), ModelProbe()
    optimizer = join_training(alice, net)
    asking.on_optimizer("model", optimizer)
    at_first = [answer.label for answer in SEEN.replies(net, SEEN.examples[0], None)[0].now]
    net(torch.rand(16, 1, 8, 8)).square().sum().backward()
    optimizer.step(samples=10)
    net[2].eval()  # somebody froze a part of it
    weights = [parameter.clone() for parameter in [*net.parameters(), *net.buffers()]]
    chance = torch.get_rng_state()
    found = asking.try_model(None, net, SEEN).snapshot()
    assert (found.step_before, found.step_now) == (0, 1) and len(found.replies) == len(DIGITS)
    assert [answer.label for answer in found.replies[0].before] == at_first
    assert found.replies[0].before != found.replies[0].now
    assert [module.training for module in net] == [True, True, False, True] and net.training
    after = [*net.parameters(), *net.buffers()]
    assert all(torch.equal(one, other) for one, other in zip(weights, after, strict=True))
    assert torch.equal(chance, torch.get_rng_state())


def test_without_an_optimizer_there_is_no_before_and_it_says_why() -> None:
    found = ModelProbe().try_model(SEEN.examples[1], digits_model(), SEEN).snapshot()
    assert not found.replies[0].before and "no swarm.optimizer" in found.why_not


def test_a_large_model_has_no_before_and_it_says_why(alice: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_model, "MAX_BYTES", 1000)
    net, asking = digits_model(), ModelProbe()
    asking.on_optimizer("model", join_training(alice, net))
    found = asking.try_model(SEEN.examples[1], net, SEEN).snapshot()
    assert found.replies[0].now and not found.replies[0].before and "more than 1 kB" in found.why_not


def test_the_copy_is_of_the_trained_parameters_only() -> None:
    net = digits_model()
    net[1].weight.requires_grad_(False)
    begun = InitialParameters([p for p in net.parameters() if p.requires_grad], step=3)
    assert begun.is_of(net) and not begun.is_of(digits_model())
    assert set(begun.weights_of(net)) == {"1.bias", "3.weight", "3.bias"}


def test_what_cannot_be_asked_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="Pass model= and labels="):
        ModelProbe().try_model(None, None, None)
    with pytest.raises(ValueError, match="10 scores, and there are 2 labels"):
        Classes("ab").replies(digits_model(), torch.zeros(1, 8, 8), None)


@pytest.mark.slow
def test_a_masked_language_model_fills_every_gap() -> None:
    from transformers import AlbertForPreTraining

    text = ["the cat sat on the mat and the dog sat on the cat"] * 50
    tokenizer = train_tokenizer(text, vocabulary=60)
    model = AlbertForPreTraining(albert_config(SIZES["tiny"], tokenizer)).train()
    mine = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    found = MaskedText(tokenizer).replies(model, "the [MASK] sat on the [MASK]", mine)
    assert [reply.question[-8:] for reply in found] == [" (gap 1)", " (gap 2)"]
    for reply in found:
        assert len(reply.now) == len(reply.before) == 5
        assert reply.before[0].probability == pytest.approx(1 / len(tokenizer))  # all weights are 0
    assert model.training
    with pytest.raises(ValueError, match=r"write \[MASK\]"):
        MaskedText(tokenizer).replies(model, "no gap", None)


def test_weights_are_lent_for_one_call_only_even_if_it_fails() -> None:
    net = digits_model()
    own = net[1].weight
    with pytest.raises(RuntimeError):
        call(net, {"1.weight": torch.zeros(10, 64)}, torch.zeros(1, 3))
    assert net[1].weight is own and net.training


# --- the form ---------------------------------------------------------------------------------------------------------


def form_of(shown: TryModel) -> tuple[list[object], object]:
    *form, said, _ = shown._box.children
    return form, said


def test_a_digit_is_drawn_with_buttons_and_asked_about() -> None:
    net, asking = digits_model(), ModelProbe()
    shown = TryModel(lambda these: asking._ask(net, SEEN, these), (), form=SEEN.form, live=True)
    assert shown.snapshot().replies == ()
    (field, pressed), _ = form_of(shown)
    button, clear = pressed.children  # type: ignore[attr-defined]
    for y in range(8):
        field.children[y].children[4].value = True  # type: ignore[attr-defined]
    button.click()
    picture = shown.snapshot().replies[0].picture
    assert picture == ((0, 0, 0, 0, 1, 0, 0, 0),) * 8
    clear.click()
    assert not field.children[0].children[4].value  # type: ignore[attr-defined]
    assert "aria-label" in shown._view.value and str(shown).count("██") >= 8


def test_a_question_that_cannot_be_asked_is_answered_in_words() -> None:
    tokenizer = train_tokenizer(["some words"] * 9, vocabulary=20)
    asking = ModelProbe()
    shown = TryModel(
        lambda these: asking._ask(nn.Linear(1, 1), MaskedText(tokenizer), these), (), form="text", live=True
    )
    (line, *_), said = form_of(shown)
    text, button = line.children  # type: ignore[attr-defined]
    text.value = "no gap here"
    button.click()
    assert "write [MASK]" in said.value  # type: ignore[attr-defined]


@pytest.mark.parametrize("question", [[1.0, 2.0], [[1.0], [2.0, 3.0]], "seven"])
def test_what_is_no_picture_is_refused_in_words(question: Any) -> None:
    with pytest.raises(ValueError, match="pass 8 x 8 numbers"):
        ModelProbe().try_model(question, digits_model(), Classes("0123456789", (8, 8), 1.0))


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_model_that_has_diverged_is_told_so(weight: float) -> None:
    net = digits_model()
    torch.nn.init.constant_(next(net.parameters()), weight)
    with pytest.raises(ValueError, match="has diverged"):
        ModelProbe().try_model(None, net, Classes("0123456789", (8, 8), 1.0))


def test_labels_are_escaped() -> None:
    found = ModelProbe().try_model(
        torch.ones(64), digits_model()[1:], Classes([f"<b>{n}" for n in range(10)])
    )
    assert "<b>" not in found._repr_html_().replace("<b>what", "") and "&lt;b&gt;" in found._repr_html_()


def test_a_running_cell_is_noticed() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.run_cell("from colab_swarm.notebook.try_model import cell_runs; found = cell_runs()")
    assert shell.user_ns["found"] and not cell_runs()
