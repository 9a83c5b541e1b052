"""Image classification as a job of work units: scikit-learn's digits, or an ``.npz`` of images."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from colab_swarm.workunits.job import Array, Job, WorkPlan

HIDDEN = 128
WIDTH = 16
_PLAN = WorkPlan()


class Pixels(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.float() / 255


class PreActivation(nn.Module):
    """Residual block of ResNetV2: twice norm, activation, convolution. A block that adds channels halves the size."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        stride = 1 if channels == out else 2
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(out)])
        self.first = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride == 2:
            self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        active = F.relu(self.norms[0](images))
        changed: Tensor = self.second(F.relu(self.norms[1](self.first(active))))
        kept: Tensor = self.shortcut(active)
        return changed + kept


def resnet(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return a ResNetV2 of 8 layers for small images; the paper's network has 552 layers."""
    widths = [WIDTH, WIDTH, 2 * WIDTH, 4 * WIDTH]
    stem = nn.Conv2d(shape[0], WIDTH, 3, padding=1, bias=False)
    blocks = [PreActivation(*pair) for pair in pairwise(widths)]
    head = [nn.BatchNorm2d(widths[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(Pixels(), stem, *blocks, *head, nn.Linear(widths[-1], classes))


def perceptron(shape: tuple[int, int, int], classes: int) -> nn.Module:
    inner = nn.Linear(int(np.prod(shape)), HIDDEN)
    return nn.Sequential(Pixels(), nn.Flatten(), inner, nn.ReLU(), nn.Linear(HIDDEN, classes))


def shape_of(data: str | Path = "digits") -> tuple[int, int, int]:
    """Return channels, height and width of the images in ``data``; see `classification_job`."""
    if data == "digits":
        return 1, 8, 8
    _, height, width, *channels = np.load(data)["x_train"].shape
    return channels[0] if channels else 1, height, width


def classification_job(
    data: str | Path = "digits",
    *,
    shape: tuple[int, int, int] = (1, 8, 8),
    classes: int = 10,
    model: Literal["mlp", "resnet"] = "mlp",
    plan: WorkPlan = _PLAN,
) -> Job:
    """Return a job that trains an image classifier. Volunteers need no data file.

    Args:
        data: ``digits`` (1,797 images from scikit-learn), or an ``.npz`` file with ``x_train``,
            ``y_train``, ``x_test`` and ``y_test``: pixels (n, h, w) or (n, h, w, channels), 0 to 255.
        shape: channels, height and width of an image.
        model: an MLP or a small ResNetV2.
        plan: how the job is cut into units.
    """
    return Job(
        f"{Path(data).stem.lower()}-{model}",
        partial({"mlp": perceptron, "resnet": resnet}[model], shape, classes),
        data=partial(_images, str(data), "train", shape),
        validation=partial(_images, str(data), "test", shape),
        plan=plan,
    )


def _images(data: str, part: Literal["train", "test"], shape: tuple[int, int, int]) -> tuple[Array, Array]:
    """Return images (n, channels, h, w), uint8, and labels (n,), int64."""
    pixels, labels = _digits(part) if data == "digits" else _load(data, part)
    if pixels.ndim == 4:
        pixels = pixels.transpose(0, 3, 1, 2)
    if pixels.size != len(labels) * np.prod(shape):
        raise ValueError(f"{data} holds images of {pixels.shape[1:]}, the job expects {shape}: pass shape=")
    return np.ascontiguousarray(pixels).reshape(-1, *shape).astype(np.uint8), labels.astype(np.int64)


def _digits(part: str) -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    held_out = len(labels) // 5  # always the same samples
    chosen = order[:held_out] if part == "test" else order[held_out:]
    return (pixels[chosen] * 15).reshape(-1, 8, 8), labels[chosen]


def _load(path: str, part: str) -> tuple[Any, Any]:
    with np.load(path) as arrays:
        missing = {f"x_{part}", f"y_{part}"} - set(arrays.files)
        if missing:
            raise ValueError(f"{path} has no {min(missing)}: it holds {', '.join(arrays.files)}")
        return arrays[f"x_{part}"], arrays[f"y_{part}"]
