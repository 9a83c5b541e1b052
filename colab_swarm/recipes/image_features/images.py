"""Images to train on, from wherever they are: uint8 tensors (C = 3, H, W), of any sizes, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}

ImageSource: TypeAlias = "str | Path | Tensor | NDArray[Any] | Sequence[Any]"


class Images(Protocol):
    """What a recipe wants of images."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Tensor: ...


class _Files:
    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Tensor:
        from PIL import Image

        with Image.open(self._files[index]) as image:
            return as_image(image)


class _Rows:
    """Arrays, PIL images, or the rows of a data set that has a column of images."""

    def __init__(self, rows: Any, column: str | None = None) -> None:
        self._rows = rows
        self._column = column

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        row = self._rows[index]
        return as_image(row if self._column is None else row[self._column])


def open_images(images: ImageSource) -> Images:
    """Images by number, from 0.

    Args:
        images: ``"digits"`` (1,797 handwritten digits that scikit-learn carries); a folder of image files, searched
            to the bottom; a folder or hub name for `datasets.load_dataset`, of which the ``train`` split is taken;
            a data set of `datasets` that is not streamed; an array or tensor of images (N, H, W), (N, H, W, C) or
            (N, C, H, W); a sequence of such images or of PIL's.

    Raises:
        ValueError: there is no image.
    """
    if isinstance(images, str | Path):
        return _open_named(str(images))
    if not len(images):
        raise ValueError("images is empty: give one at least")
    if hasattr(images, "column_names"):
        return _open_dataset(images)
    return _Rows(images)


def as_image(image: Any) -> Tensor:
    """One image as a uint8 tensor (3, H, W); floats are taken as shares of 1, greys get three equal channels.

    Raises:
        ValueError: it has not the shape of an image.
    """
    if hasattr(image, "convert"):  # PIL's
        image = np.array(image.convert("RGB"))
    pixels = torch.as_tensor(image)
    if pixels.dim() == 2:
        pixels = pixels[None]
    elif pixels.dim() == 3 and pixels.shape[0] not in (1, 3):
        pixels = pixels.permute(2, 0, 1)
    if pixels.dim() != 3 or pixels.shape[0] not in (1, 3) or 0 in pixels.shape:
        raise ValueError(
            f"an image has shape (H, W), (H, W, C) or (C, H, W), C 1 or 3; not {tuple(pixels.shape)}"
        )
    if pixels.is_floating_point():
        pixels = pixels.mul(255).round().clamp(0, 255)
    return pixels.to(torch.uint8).expand(3, -1, -1)


def _open_named(name: str) -> Images:
    if name == "digits":
        from sklearn.datasets import load_digits

        return _Rows(load_digits().images / 16)
    if Path(name).is_dir():
        files = sorted(path for path in Path(name).rglob("*") if path.suffix.lower() in SUFFIXES)
        if files:
            return _Files(files)
    from datasets import load_dataset

    try:
        return _open_dataset(load_dataset(name, split="train"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name!r} is no folder of images and cannot be loaded as a data set: {error}"
        ) from error


def _open_dataset(rows: Any) -> Images:
    if not len(rows):
        raise ValueError("the data set has no rows")
    columns = [name for name, value in rows[0].items() if hasattr(value, "convert")]
    if not columns:
        raise ValueError(f"the data set has no column of images, only {', '.join(rows.column_names)}")
    return _Rows(rows, columns[0])
