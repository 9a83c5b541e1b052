from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.recipes.image_features.crops import (
    GREY,
    Crops,
    Distortions,
    distort,
    normalized,
    random_view,
    resized,
)

STILL = Distortions(flip=0.0, colour=0.0, grey=0.0, blur=0.0)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picture(height: int = 12, width: int = 16) -> torch.Tensor:
    return torch.randint(256, (3, height, width), generator=rng(7), dtype=torch.uint8)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_a_view_has_its_size_and_colours_whatever_the_image(height: int, width: int, seed: int) -> None:
    view = random_view(picture(height, width), Crops(1, 9, (0.05, 1.0)), 0.5, rng(seed))
    assert view.shape == (3, 9, 9) and view.dtype == torch.float32
    assert view.min() >= 0 and view.max() <= 1


def test_views_show_the_share_of_the_image_that_was_asked_for() -> None:
    x = torch.linspace(0, 255, 64).round().to(torch.uint8).expand(3, 64, 64)  # brightness tells the column
    widths = [
        float(view[0, 0].max() - view[0, 0].min())
        for view in (random_view(x, Crops(1, 32, (0.25, 0.25)), 0.0, rng(seed)) for seed in range(50))
    ]
    assert all(0.4 < width < 0.6 for width in widths)  # half a side, by an aspect of 3/4 to 4/3


@pytest.mark.slow
def test_a_chance_of_one_always_flips() -> None:
    x, crops = picture(), Crops(1, 8, (0.3, 0.9))
    plain, flipped = (random_view(x, crops, flip, rng()) for flip in (0.0, 1.0))
    torch.testing.assert_close(plain.flip(2), flipped)


def test_without_any_distortion_views_stay_as_they_are() -> None:
    views = torch.rand(4, 3, 8, 8, generator=rng())
    torch.testing.assert_close(distort(views, STILL, rng()), views)


def test_distorted_views_differ_from_each_other_and_stay_in_range() -> None:
    views = torch.rand(1, 3, 16, 16, generator=rng()).expand(20, 3, 16, 16)
    distorted = distort(views, Distortions(), rng())
    assert distorted.min() >= 0 and distorted.max() <= 1 + 1e-5
    assert len({tuple(view.flatten().tolist()) for view in distorted}) == 20


def test_the_same_seed_gives_the_same_views() -> None:
    views = torch.rand(4, 3, 8, 8, generator=rng())
    assert torch.equal(distort(views, Distortions(), rng(5)), distort(views, Distortions(), rng(5)))


def test_grey_views_keep_their_brightness() -> None:
    views = torch.rand(4, 3, 8, 8, generator=rng())
    greys = distort(views, Distortions(0.0, 0.0, 1.0, 0.0), rng())
    brightness = (views * torch.tensor(GREY).view(3, 1, 1)).sum(dim=1)
    torch.testing.assert_close(greys, brightness[:, None].expand_as(greys))


def test_a_blurred_dot_is_a_gaussian_of_the_width_asked_for() -> None:
    dot = torch.zeros(1, 3, 33, 33)
    dot[..., 16, 16] = 1.0
    blurred = distort(dot, Distortions(0.0, 0.0, 0.0, 1.0, (2.0, 2.0)), rng())[0, 0]
    places = torch.arange(33) - 16
    assert float(blurred.sum()) == pytest.approx(1.0, abs=1e-4)
    assert float((blurred.sum(dim=0) * places**2).sum()) == pytest.approx(4.0, rel=0.05)


def test_the_whole_image_is_resized_to_a_square() -> None:
    assert resized(torch.full((3, 5, 9), 51, dtype=torch.uint8), 4).allclose(torch.tensor(0.2))


def test_grey_of_imagenets_mean_is_zero() -> None:
    assert normalized(torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)).abs().max() == 0
