import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import colab_swarm as cs
from colab_swarm.recipes import image_features
from colab_swarm.recipes.image_features import Crops, as_image, distort, embed, open_images, swav
from colab_swarm.swarm.swarm import Swarm

PICTURES = np.random.default_rng(0).integers(0, 256, size=(20, 10, 12, 3), dtype=np.uint8)


def parameters_of(model: image_features.Swav) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.slow
@pytest.mark.ordeal
def test_tiny_swav_learns_to_tell_digits_apart_without_labels() -> None:
    from sklearn.datasets import load_digits
    from sklearn.neighbors import KNeighborsClassifier

    def accuracy(model: image_features.Swav) -> float:
        features = torch.nn.functional.normalize(embed(model, "digits", size_px=32)).numpy()
        labels = load_digits().target
        learned = KNeighborsClassifier(5).fit(features[:900], labels[:900])
        return float(learned.score(features[900:], labels[900:]))

    model, batches = swav("tiny", images="digits")
    optimizer, scheduler = image_features.swav_optimizer(model)
    untrained, losses = accuracy(model), []
    for step in range(image_features.SETTINGS["tiny"].total_steps):
        output = model(**next(batches), step=step)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(output.loss.item())
    assert losses[0] > math.log(model.size.prototypes) > 3.4 > sum(losses[-10:]) / 10 + 0.5
    assert output.assigned > 24  # of 32: no collapse
    assert accuracy(model) > untrained + 0.02


@pytest.mark.slow
def test_peers_start_and_stay_equal_although_images_and_statistics_differ() -> None:
    models = {name: swav(images=PICTURES, batch_size=8)[0] for name in ("alice", "bob")}
    assert torch.equal(*map(parameters_of, models.values()))
    seen = {}

    def train(swarm: Swarm) -> bytes:
        model = models[swarm.name]
        _, batches = swav(images=PICTURES, swarm=swarm, batch_size=8)
        seen[swarm.name] = next(batches)["large_crops"]
        inner, scheduler = image_features.swav_optimizer(model)
        optimizer = swarm.optimizer(inner, scheduler=scheduler, target_batch_size=16)
        while optimizer.global_step < 4:
            model(**next(batches), step=optimizer.global_step).loss.backward()
            optimizer.step(samples=8)
        return optimizer.lineage

    with cs.simulate(2, network="lan", seed=1, samples_per_s=10.0) as simulation:
        lineages = simulation.run(train)
    assert not torch.equal(seen["alice"], seen["bob"])
    assert lineages["alice"] == lineages["bob"]
    alice, bob = models["alice"], models["bob"]
    assert torch.equal(parameters_of(alice), parameters_of(bob))
    norm = "backbone.embedder.embedder.normalization.running_mean"
    assert not torch.equal(alice.state_dict()[norm], bob.state_dict()[norm])
    assert torch.equal(embed(alice, PICTURES, size_px=32), embed(bob, PICTURES, size_px=32))


def test_a_batch_has_the_views_of_its_size_and_a_pass_every_image_once() -> None:
    _, batches = swav(images=PICTURES, batch_size=7)
    shapes = {name: tuple(crops.shape) for name, crops in next(batches).items()}
    assert shapes == {"large_crops": (7, 2, 3, 32, 32), "small_crops": (7, 2, 3, 24, 24)}
    order = image_features.endless_order(20, rng())
    passes = [[next(order) for _ in range(20)] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(20)) and passes[0] != passes[1]


def test_prototypes_are_frozen_for_the_first_steps_and_the_rate_warms_up_and_falls() -> None:
    model, _ = swav(images=PICTURES)
    settings = image_features.SwavSettings(
        lr=1.0, final_lr=0.1, warmup_steps=4, total_steps=12, frozen_steps=2
    )
    optimizer, scheduler = image_features.swav_optimizer(model, settings)
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
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert body == pytest.approx([0.25, 0.5, 0.75, 1.0, *cosine, 0.1, 0.1])
    assert prototypes == (0.0, 0.0, *body[2:])


def test_features_ignore_earlier_statistics_and_leave_the_model_unchanged() -> None:
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
        model = image_features.Swav(image_features.SIZES["resnet50"])
    assert sum(p.numel() for p in model.backbone.parameters()) == 23_508_032
    assert sum(p.numel() for p in model.projection.parameters()) == 2048 * 2048 + 3 * 2048 + 2048 * 128 + 128
    assert model.prototypes.shape == (3000, 128)


def small(**head: Any) -> image_features.Swav:
    torch.manual_seed(0)
    own = {"hidden": 16, "features": 8, "prototypes": 4, "epsilon": 0.05, "queue": 0} | head
    return image_features.Swav(replace(image_features.SIZES["tiny"], **own))


def batch_of_crops(seed: int = 0, batch: int = 6, views: int = 2, side: int = 32) -> torch.Tensor:
    return torch.randn(batch, views, 3, side, side, generator=torch.Generator().manual_seed(seed))


def test_assignments_equal_those_of_the_papers_listing() -> None:
    scores = np.random.default_rng(0).uniform(-1, 1, size=(12, 5))
    # SwAV, appendix A, line by line
    q_KB = np.exp(scores / 0.05).T
    q_KB /= q_KB.sum()
    k, b = q_KB.shape
    for _ in range(3):
        q_KB /= q_KB.sum(axis=1, keepdims=True) * k
        q_KB /= q_KB.sum(axis=0, keepdims=True) * b
    ours = image_features.balance(torch.tensor(scores), epsilon=0.05, iterations=3)
    np.testing.assert_allclose(ours.numpy(), (q_KB * b).T, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_tiny_epsilon_neither_overflows_nor_divides_by_zero(dtype: torch.dtype) -> None:
    scores = torch.tensor([[1.0, -1.0], [1.0, -1.0], [1.0, 0.9]], dtype=dtype)
    assigned = image_features.balance(scores, epsilon=1e-4, iterations=3)
    assert assigned.dtype == torch.float32 and assigned.isfinite().all()
    torch.testing.assert_close(assigned.sum(dim=1), torch.ones(3))


@pytest.mark.slow
def test_the_loss_is_the_mean_over_swapped_predictions() -> None:
    model = small()
    with torch.no_grad():
        model.prototypes.mul_(torch.tensor([[0.1], [2.0], [3.0], [5.0]]))  # their length does not matter
    large, little = batch_of_crops(), batch_of_crops(1, views=1, side=24)
    output = model(large, little)
    scores = [
        torch.nn.functional.normalize(
            model.projection(model.backbone(x.transpose(0, 1).flatten(0, 1)).pooler_output.flatten(1))
        )
        @ torch.nn.functional.normalize(model.prototypes).T
        for x in (large, little)
    ]
    first, second, third = *scores[0].chunk(2), scores[1]
    halves = scores[0].detach().chunk(2)
    q1, q2 = (image_features.balance(half, epsilon=0.05, iterations=3) for half in halves)
    pairs = [(q1, second), (q1, third), (q2, first), (q2, third)]
    expected = sum(torch.nn.functional.cross_entropy(s / 0.1, q) for q, s in pairs) / 4
    torch.testing.assert_close(output.loss, expected)


def test_the_queue_of_training_counts_once_it_is_full_and_its_step_is_reached_and_is_not_saved() -> None:
    model, plain = small(queue=12, queue_from_step=5), small()
    model.eval()(batch_of_crops(), step=0)
    model.train()
    losses = [model(batch_of_crops(seed), step=step).loss for seed, step in enumerate([0, 5, 4, None, 5])]
    alone = [plain(batch_of_crops(seed)).loss for seed in range(5)]
    assert [bool(a == b) for a, b in zip(losses, alone, strict=True)] == [True, True, True, True, False]
    assert model.state_dict().keys() == plain.state_dict().keys()


STILL = replace(image_features.SIZES["resnet50"], flip=0.0, colour=0.0, grey=0.0, blur=0.0)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picture(height: int = 12, width: int = 16) -> torch.Tensor:
    return torch.randint(256, (3, height, width), generator=rng(7), dtype=torch.uint8)


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_a_view_has_its_size_and_range_for_every_image(height: int, width: int, seed: int) -> None:
    view = image_features.random_view(picture(height, width), Crops(1, 9, (0.05, 1.0)), 0.5, rng(seed))
    assert view.shape == (3, 9, 9) and view.dtype == torch.float32
    assert view.min() >= 0 and view.max() <= 1


def test_views_show_the_requested_share_of_the_image_and_are_flipped_by_chance() -> None:
    x = torch.linspace(0, 255, 64).round().to(torch.uint8).expand(3, 64, 64)  # brightness encodes the column
    crops = Crops(1, 32, (0.25, 0.25))
    views = (image_features.random_view(x, crops, 0.0, rng(seed)) for seed in range(50))
    widths = [float(view[0, 0].max() - view[0, 0].min()) for view in views]
    assert all(0.4 < width < 0.6 for width in widths)  # half a side, by an aspect of 3/4 to 4/3
    plain, flipped = (image_features.random_view(x, crops, flip, rng()) for flip in (0.0, 1.0))
    torch.testing.assert_close(plain.flip(2), flipped)


def test_without_distortion_views_are_unchanged_and_grey_ones_keep_their_brightness() -> None:
    views = torch.rand(4, 3, 8, 8, generator=rng())
    torch.testing.assert_close(distort(views, STILL, rng()), views)
    greys = distort(views, replace(STILL, grey=1.0), rng())
    brightness = (views * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(dim=1)
    torch.testing.assert_close(greys, brightness[:, None].expand_as(greys))


def test_distorted_views_differ_from_each_other_and_stay_in_range() -> None:
    views = torch.rand(1, 3, 16, 16, generator=rng()).expand(20, 3, 16, 16)
    distorted, again = (distort(views, image_features.SIZES["resnet50"], rng()) for _ in range(2))
    assert torch.equal(distorted, again) and distorted.min() >= 0 and distorted.max() <= 1 + 1e-5
    assert len({tuple(view.flatten().tolist()) for view in distorted}) == 20


def test_a_blurred_dot_is_a_gaussian_of_the_requested_width() -> None:
    dot = torch.zeros(1, 3, 33, 33)
    dot[..., 16, 16] = 1.0
    blurred = distort(dot, replace(STILL, blur=1.0, blur_px=(2.0, 2.0)), rng())[0, 0]
    places = torch.arange(33) - 16
    assert float(blurred.sum()) == pytest.approx(1.0, abs=1e-4)
    assert float((blurred.sum(dim=0) * places**2).sum()) == pytest.approx(4.0, rel=0.05)


def test_the_whole_image_is_resized_to_a_square_and_imagenets_mean_is_zero() -> None:
    assert image_features.resized(torch.full((3, 5, 9), 51, dtype=torch.uint8), 4).allclose(torch.tensor(0.2))
    assert image_features.normalized(torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)).abs().max() == 0


RED = np.zeros((4, 6, 3), np.uint8)
RED[..., 0] = 200


def is_red(image: torch.Tensor) -> bool:
    return image.shape == (3, 4, 6) and image.dtype == torch.uint8 and image[:, 0, 0].tolist() == [200, 0, 0]


@pytest.mark.parametrize(
    "images", [RED[None], [RED], torch.tensor(RED)[None], RED.transpose(2, 0, 1)[None], RED[None] / 255]
)
def test_arrays_of_every_layout_give_the_same_images(images: Any) -> None:
    opened = open_images(images)
    assert len(opened) == 1 and is_red(as_image(opened[0]))
    assert as_image(np.array([[0.0, 0.5, 1.0]])).tolist() == [[[0, 128, 255]]] * 3  # grey


def test_a_folder_is_searched_at_all_depths_and_other_files_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    Image.fromarray(RED).save(tmp_path / "sub" / "red.PNG", format="PNG")
    Image.fromarray(RED).convert("L").save(tmp_path / "zgrey.bmp")
    (tmp_path / "notes.txt").write_text("no image")
    opened = open_images(tmp_path)
    assert len(opened) == 2
    assert is_red(as_image(opened[0])) and as_image(opened[1]).shape == (3, 4, 6)


@pytest.mark.slow
def test_a_data_set_gives_its_column_of_images(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"label": [7], "picture": [Image.fromarray(RED)]})
    assert is_red(as_image(open_images(rows)[0]))
    with pytest.raises(ValueError, match="no column of images, only label"):
        open_images(rows.select_columns("label"))
    Dataset.from_dict({"image": [Image.fromarray(RED)] * 3}).to_parquet(tmp_path / "train.parquet")
    opened = open_images(str(tmp_path))
    assert len(opened) == 3 and is_red(as_image(opened[2]))


@pytest.mark.slow
def test_a_wrong_size_or_batch_a_place_without_images_and_what_is_no_image_are_refused(
    tmp_path: Path,
) -> None:
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: swav("huge"), "'huge' is none of tiny, resnet50, dedloc"),
        (lambda: swav(images=PICTURES, batch_size=1), "at least 2"),
        (lambda: open_images([]), "give at least one"),
        (lambda: open_images(np.zeros((0, 8, 8))), "give at least one"),
        (lambda: open_images(tmp_path), "no image in"),
    ]
    for shape in ((5,), (2, 2, 2, 2), (0, 4), (4, 4, 5)):
        refused.append((partial(as_image, np.zeros(shape)), "an image has shape"))
    for call, reason in refused:
        with pytest.raises(ValueError, match=reason):
            call()
