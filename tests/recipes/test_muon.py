"""Muon and AdamW as one optimizer."""

import copy

import pytest
import torch

import colab_swarm as cs
from colab_swarm.swarm.swarm import Swarm


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    hidden = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16)
    return torch.nn.Sequential(torch.nn.Embedding(10, 8), *hidden, torch.nn.Linear(16, 10))


def learn(model: torch.nn.Module, batches: range, *optimizers: torch.optim.Optimizer) -> torch.nn.Module:
    for batch in batches:
        words = torch.randint(10, (32,), generator=torch.Generator().manual_seed(batch))
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(words), 9 - words).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model


def assert_equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_hidden_matrices_step_as_by_muon_and_all_else_as_by_adamw() -> None:
    mine, theirs = net(), net()
    hidden = [theirs[1].weight, theirs[3].weight]  # type: ignore[index]
    rest = [one for one in theirs.parameters() if all(one is not other for other in hidden)]
    muon = torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    learn(mine, range(5), cs.recipes.muon(mine, lr=0.01))
    assert_equal(mine, learn(theirs, range(5), muon, adamw))


def test_a_loaded_state_continues_as_if_nothing_had_happened() -> None:
    mine = net()
    learn(mine, range(3), optimizer := cs.recipes.muon(mine, lr=0.01))
    again = copy.deepcopy(mine)
    loaded = cs.recipes.muon(again, lr=1.0)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_equal(learn(mine, range(3, 6), optimizer), learn(again, range(3, 6), loaded))


def test_frozen_parameters_stay_and_a_model_without_a_hidden_matrix_is_refused() -> None:
    model = net()
    model[1].requires_grad_(False)  # type: ignore[index, union-attr]
    before = copy.deepcopy(model[1])  # type: ignore[index]
    learn(model, range(2), cs.recipes.muon(model))
    assert_equal(model[1], before)  # type: ignore[index]
    with pytest.raises(ValueError, match="no hidden matrix"):
        cs.recipes.muon(torch.nn.Linear(4, 4))


def test_peers_take_local_steps_with_it_and_agree() -> None:
    def train(swarm: Swarm) -> bytes:
        model = net()
        inner = cs.recipes.muon(model, lr=0.01)
        way = cs.Communication("sparseloco", local_steps=3)
        optimizer = swarm.optimizer(inner, target_batch_size=64, communication=way)
        while optimizer.global_step < 3:
            words = torch.randint(10, (16,))
            torch.nn.functional.cross_entropy(model(words), 9 - words).backward()
            optimizer.step(samples=16)
        return optimizer.lineage

    with cs.simulate(2) as sim:
        assert len(set(sim.run(train).values())) == 1
