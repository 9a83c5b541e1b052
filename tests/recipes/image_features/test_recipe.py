from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import colab_swarm as cs
from colab_swarm.recipes.image_features.model import Swav
from colab_swarm.recipes.image_features.recipe import (
    SETTINGS,
    SIZES,
    SwavSettings,
    embed,
    resnet_config,
    swav,
    swav_optimizer,
)
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.replica import Replica, UpdateRule

PICTURES = np.random.default_rng(0).integers(0, 256, size=(20, 10, 12, 3), dtype=np.uint8)


@dataclass(frozen=True)
class Peer:
    id: bytes


def parameters_of(model: Swav) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.slow
@pytest.mark.ordeal
def test_tiny_swav_learns_to_tell_digits_that_it_was_never_told() -> None:
    from sklearn.datasets import load_digits
    from sklearn.neighbors import KNeighborsClassifier

    def accuracy(model: Swav) -> float:
        features = torch.nn.functional.normalize(embed(model, "digits", size_px=32)).numpy()
        labels = load_digits().target
        return float(
            KNeighborsClassifier(5).fit(features[:900], labels[:900]).score(features[900:], labels[900:])
        )

    model, batches = swav("tiny", images="digits")
    optimizer, scheduler = swav_optimizer(model)
    untrained, losses = accuracy(model), []
    for step in range(SETTINGS["tiny"].total_steps):
        output = model(**next(batches), step=step)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(output.loss.item())
    chance = math.log(model.head.prototypes)
    assert losses[0] > chance > 3.4 > sum(losses[-10:]) / 10 + 0.5
    assert output.assigned > 24  # of 32: no collapse
    assert accuracy(model) > untrained + 0.02


@pytest.mark.slow
def test_peers_of_a_swarm_stay_equal_though_each_has_its_own_images_and_statistics() -> None:
    models = {name: swav(images=PICTURES, batch_size=8)[0] for name in ("alice", "bob")}

    def train(swarm: Swarm) -> bytes:
        model = models[swarm.name]
        _, batches = swav(images=PICTURES, swarm=swarm, batch_size=8)
        inner, scheduler = swav_optimizer(model)
        optimizer = swarm.optimizer(
            inner, scheduler=scheduler, target_batch_size=16, matchmaking_timeout_s=20.0
        )
        while optimizer.global_step < 4:
            model(**next(batches), step=optimizer.global_step).loss.backward()
            optimizer.step(samples=8)
        return optimizer.lineage

    with cs.simulate(2, network="lan", seed=1, samples_per_s=10.0) as simulation:
        lineages = simulation.run(train)
    assert lineages["alice"] == lineages["bob"]
    alice, bob = models["alice"], models["bob"]
    assert torch.equal(parameters_of(alice), parameters_of(bob))
    norm = "backbone.embedder.embedder.normalization.running_mean"
    assert not torch.equal(alice.state_dict()[norm], bob.state_dict()[norm])
    assert torch.equal(embed(alice, PICTURES, size_px=32), embed(bob, PICTURES, size_px=32))


def test_a_newcomer_gets_momentum_and_schedule_with_the_state() -> None:
    def replica() -> Replica:
        optimizer, scheduler = swav_optimizer(swav(images=PICTURES)[0])
        return Replica(UpdateRule(optimizer, scheduler))

    alice, bob = replica(), replica()
    mean = np.full(alice.flat.numel, 0.01, np.float32)
    for _ in range(12):  # past the warm-up and the freezing
        alice.apply(mean)
    bob.load_snapshot(alice.snapshot())
    alice.apply(mean)
    bob.apply(mean)
    assert alice.lineage == bob.lineage
    assert all(torch.equal(a, b) for a, b in zip(alice.model, bob.model, strict=True))


@pytest.mark.slow
def test_peers_begin_equal_and_see_other_views() -> None:
    (alice, hers), (bob, his) = (swav(images=PICTURES, swarm=Peer(name)) for name in (b"alice", b"bob"))
    assert torch.equal(parameters_of(alice), parameters_of(bob))
    assert not torch.equal(next(hers)["large_crops"], next(his)["large_crops"])


def test_a_batch_has_the_views_of_its_size() -> None:
    _, batches = swav(images=PICTURES, batch_size=7)
    shapes = {name: tuple(crops.shape) for name, crops in next(batches).items()}
    assert shapes == {"large_crops": (7, 2, 3, 32, 32), "small_crops": (7, 2, 3, 24, 24)}


def test_every_image_comes_once_in_each_pass() -> None:
    _, batches = swav(images=PICTURES, batch_size=2)
    passes = [[next(batches._order) for _ in range(20)] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(20))
    assert passes[0] != passes[1]


def test_prototypes_are_frozen_for_the_first_steps_and_the_rate_warms_up_and_falls() -> None:
    model, _ = swav(images=PICTURES)
    settings = SwavSettings(lr=1.0, final_lr=0.1, warmup_steps=4, total_steps=12, frozen_steps=2)
    optimizer, scheduler = swav_optimizer(model, settings)
    before, moved, rates = model.prototypes.detach().clone(), [], []
    for _ in range(14):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        rates.append(scheduler.get_last_lr())
        optimizer.step()
        scheduler.step()
        moved.append(not torch.equal(model.prototypes, before))
    assert moved == [False, False] + [True] * 12
    body, prototypes = zip(*rates, strict=True)
    assert body == pytest.approx(
        [0.25, 0.5, 0.75, 1.0]
        + [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
        + [0.1, 0.1]
    )
    assert prototypes == (0.0, 0.0, *body[2:])


def test_features_do_not_depend_on_what_the_statistics_were_and_leave_the_model_as_it_was() -> None:
    model, _ = swav(images=PICTURES)
    fresh = embed(model, PICTURES, size_px=32, batch_size=8)
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.running_mean.fill_(3.0)
    assert torch.equal(embed(model, PICTURES, size_px=32, batch_size=8), fresh)
    assert fresh.shape == (20, 64) and model.training
    assert model.backbone.embedder.embedder.normalization.momentum == 0.1


def test_resnet50_has_its_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = Swav(resnet_config(SIZES["resnet50"]), SIZES["resnet50"].head)
    assert sum(p.numel() for p in model.backbone.parameters()) == 23_508_032
    assert sum(p.numel() for p in model.projection.parameters()) == 2048 * 2048 + 3 * 2048 + 2048 * 128 + 128
    assert model.prototypes.shape == (3000, 128)


def test_a_wrong_size_or_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="'huge' is none of tiny, resnet50"):
        swav("huge")
    with pytest.raises(ValueError, match="at least 2"):
        swav(images=PICTURES, batch_size=1)


@pytest.mark.slow
def test_importing_the_recipe_imports_no_large_library() -> None:
    large = "{'transformers', 'datasets', 'sklearn', 'PIL'}"
    program = f"import sys, colab_swarm.recipes.image_features.recipe; print(*{large} & {{*sys.modules}})"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
