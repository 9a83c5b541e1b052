"""Mistakes whose error used to name an internal thing: now a sentence says what is wrong and what to write."""

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import colab_swarm as cs
from colab_swarm.errors import StateError, StepError
from colab_swarm.swarm.swarm import Swarm
from tests.training import toy


def mixture(swarm: Swarm) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), swarm.experts.mixture("ffn", 4, grid=(2, 2), k=1))


def adam() -> torch.optim.Optimizer:
    return torch.optim.AdamW(toy.model().parameters())


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda swarm: torch.save(mixture(swarm), io.BytesIO()), "save model.state_dict()"),
        (lambda swarm: pickle.dumps(swarm.experts.expert("ffn.0.0", grid=(2, 2))), "save model.state_dict()"),
        (pickle.dumps, "may call cs.join(INVITATION)"),
        (copy.deepcopy, "may call cs.join(INVITATION)"),
        (lambda swarm: pickle.dumps(swarm.panel()), "keep swarm.snapshot() instead"),
        (lambda swarm: copy.deepcopy(swarm.panel()), "keep swarm.snapshot() instead"),
        (
            lambda swarm: swarm.optimizer(adam(), 256),
            "(…, 256): name what you pass, as in target_batch_size=256",
        ),
        (lambda swarm: swarm.optimizer(adam(), toy.model(), 256), "name what you pass"),
        (
            lambda swarm: swarm.batches(adam(), [], max_steps=9),
            "pass the loader first, then what swarm.optimizer",
        ),
        (
            lambda swarm: swarm.batches(
                TensorDataset(torch.ones(8, 8)), toy.join_training(swarm, toy.model()), max_steps=9
            ),
            "pass torch.utils.data.DataLoader(data",
        ),
        (
            lambda swarm: swarm.experts.host("ffn", torch.nn.Linear(4, 4), grid=(2, 2)),
            "pass a function that makes an expert",
        ),
        (
            lambda swarm: swarm.experts.mixture("ffn", 4, grid=4),
            "grid=4: pass the number of experts along each dimension",
        ),
        (lambda _: cs.create("demo", port=4500), "pass options=cs.NetworkOptions(port=4500)"),  # type: ignore[call-arg]
        (lambda _: cs.create("demo", statedir="."), "it has state_dir"),  # type: ignore[call-arg]
        (
            lambda _: cs.create("demo", options={"port": 4500}),  # type: ignore[arg-type]
            "pass cs.NetworkOptions(…)",
        ),
        (lambda _: cs.NetworkOptions(announce="ws://h:1"), "as in announce=['ws://h:1']"),  # type: ignore[arg-type]
        (lambda _: cs.NetworkOptions(announce=""), "as in announce=['']"),  # type: ignore[arg-type]
    ],
)
def test_a_mistake_is_told_in_a_sentence(mistake: Callable[[Swarm], object], told: str) -> None:
    def make_it(swarm: Swarm) -> str:
        with pytest.raises(TypeError) as caught:
            mistake(swarm)
        return str(caught.value)

    assert told in toy.alone(make_it)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda: cs.NetworkOptions(port="4500"), "port='4500': pass a whole number"),  # type: ignore[arg-type]
        (lambda: cs.simulate(peers="4"), "peers='4': pass a whole number"),  # type: ignore[arg-type]
        (lambda: cs.join("digits"), "'digits' is no invitation: pass the whole line"),
    ],
)
def test_a_wrong_value_is_told_in_a_sentence(mistake: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        mistake()


@pytest.mark.parametrize("loss", ["x", [1.0, 2.0], torch.ones(5)])
def test_a_loss_that_is_not_one_number_is_refused(loss: Any) -> None:
    def step(swarm: Swarm) -> None:
        optimizer = toy.join_training(swarm, toy.model())
        with pytest.raises(StepError, match="pass the mean loss of the micro-batch"):
            optimizer.step(samples=1, loss=loss)

    toy.alone(step)


def test_what_the_sentence_names_works() -> None:
    def save(swarm: Swarm) -> None:
        model = mixture(swarm)
        torch.save(model.state_dict(), file := io.BytesIO())
        file.seek(0)
        mixture(swarm).load_state_dict(torch.load(file))
        assert copy.deepcopy(model) is not model  # as trainers with several batches in flight do

    toy.alone(save)


@pytest.mark.parametrize("below", ["", "folder", "folder/another"])
def test_a_state_dir_that_is_a_file_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    options = cs.NetworkOptions(listen=False, lan=False, use_relays=False)
    with pytest.raises(StateError, match=r"notes\.txt is a file; name a folder"):
        cs.create("demo", options=options, state_dir=tmp_path / "notes.txt" / below)
    assert (tmp_path / "notes.txt").read_text() == "mine"
