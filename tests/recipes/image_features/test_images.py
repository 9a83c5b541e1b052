from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from colab_swarm.recipes.image_features.images import as_image, open_images

RED = np.zeros((4, 6, 3), np.uint8)
RED[..., 0] = 200


def is_red(image: torch.Tensor) -> bool:
    return image.shape == (3, 4, 6) and image.dtype == torch.uint8 and image[:, 0, 0].tolist() == [200, 0, 0]


@pytest.mark.parametrize(
    "images", [RED[None], [RED], torch.tensor(RED)[None], RED.transpose(2, 0, 1)[None], RED[None] / 255]
)
def test_arrays_of_every_layout_give_the_same_images(images: Any) -> None:
    opened = open_images(images)
    assert len(opened) == 1 and is_red(opened[0])


def test_grey_images_get_three_equal_channels() -> None:
    image = as_image(np.array([[0.0, 0.5, 1.0]]))
    assert image.tolist() == [[[0, 128, 255]]] * 3


def test_a_folder_is_searched_to_the_bottom_and_other_files_are_left_out(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "sub").mkdir()
    Image.fromarray(RED).save(tmp_path / "sub" / "red.PNG", format="PNG")
    Image.fromarray(RED).convert("L").save(tmp_path / "zgrey.bmp")
    (tmp_path / "notes.txt").write_text("no image")
    opened = open_images(tmp_path)
    assert len(opened) == 2
    assert is_red(opened[0]) and opened[1].shape == (3, 4, 6)


@pytest.mark.slow
def test_a_data_set_gives_its_column_of_images() -> None:
    from datasets import Dataset
    from PIL import Image

    rows = Dataset.from_dict({"label": [7], "picture": [Image.fromarray(RED)]})
    assert is_red(open_images(rows)[0])
    with pytest.raises(ValueError, match="no column of images, only label"):
        open_images(rows.select_columns("label"))


@pytest.mark.slow
def test_a_folder_of_a_data_set_is_loaded(tmp_path: Path) -> None:
    from datasets import Dataset
    from PIL import Image

    Dataset.from_dict({"image": [Image.fromarray(RED)] * 3}).to_parquet(tmp_path / "train.parquet")
    opened = open_images(str(tmp_path))
    assert len(opened) == 3 and is_red(opened[2])


@pytest.mark.slow
def test_digits_come_with_scikit_learn() -> None:
    opened = open_images("digits")
    assert len(opened) == 1797
    assert opened[0].shape == (3, 8, 8) and opened[0].max() == 239  # 15 of 16


@pytest.mark.parametrize("images", [[], np.zeros((0, 8, 8))])
def test_no_image_is_an_error(images: Any) -> None:
    with pytest.raises(ValueError, match="give one at least"):
        open_images(images)


@pytest.mark.slow
def test_a_place_without_images_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder of images"):
        open_images(tmp_path)


@pytest.mark.parametrize("shape", [(5,), (2, 2, 2, 2), (0, 4), (4, 4, 5)])
def test_what_has_not_the_shape_of_an_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="an image has shape"):
        as_image(np.zeros(shape))
