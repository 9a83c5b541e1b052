"""Views of an image: crops of two sizes, flipped, recoloured and blurred at random (SwAV, section 3.3; SimCLR).

In plain torch, without torchvision. Shapes: N images, C = 3 channels, H x W pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, from 0 to 1, per channel."""
GREY = (0.299, 0.587, 0.114)
TO_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))
ASPECT = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Crops:
    """How many views of one kind an image gives.

    Attributes:
        count: views of an image.
        size_px: side of a view.
        area: least and largest share of the image that a view shows.
    """

    count: int
    size_px: int
    area: tuple[float, float]


@dataclass(frozen=True)
class Distortions:
    """What happens to a crop, each with its chance.

    Attributes:
        flip: chance to be mirrored.
        colour: strength of the jitter of brightness, contrast and saturation (0.8 of it) and hue (0.2 of it); its
            chance is 0.8.
        grey: chance to lose its colours.
        blur: chance to be blurred.
        blur_px: least and largest standard deviation of the blur.
    """

    flip: float = 0.5
    colour: float = 1.0
    grey: float = 0.2
    blur: float = 0.5
    blur_px: tuple[float, float] = (0.1, 2.0)


def random_view(image_CHW: Tensor, crops: Crops, flip: float, rng: torch.Generator) -> Tensor:
    """A crop of random place, area and aspect at the size of ``crops``, float32 in [0, 1].

    Args:
        image_CHW: uint8, of any size.
        flip: chance to be mirrored.
    """
    _, height, width = image_CHW.shape
    area_u, aspect_u, top_u, left_u, flip_u = torch.rand(5, generator=rng).tolist()
    area = height * width * (crops.area[0] + area_u * (crops.area[1] - crops.area[0]))
    aspect = ASPECT[0] * (ASPECT[1] / ASPECT[0]) ** aspect_u
    h = min(height, max(1, round(math.sqrt(area / aspect))))
    w = min(width, max(1, round(math.sqrt(area * aspect))))
    top, left = int(top_u * (height - h + 1)), int(left_u * (width - w + 1))
    view = resized(image_CHW[:, top : top + h, left : left + w], crops.size_px)
    return view.flip(2) if flip_u < flip else view


def resized(image_CHW: Tensor, size_px: int) -> Tensor:
    """The whole image as a square, float32 in [0, 1]."""
    square = F.interpolate(image_CHW[None] / 255, (size_px, size_px), mode="bilinear", antialias=True)
    return square[0].clamp(0, 1)


def distort(views_NCHW: Tensor, how: Distortions, rng: torch.Generator) -> Tensor:
    """Jitter, grey and blur each view by its own chance, in that order; values stay in [0, 1]."""
    views = torch.where(_coins(views_NCHW, 0.8, rng), _jitter(views_NCHW, how.colour, rng), views_NCHW)
    views = torch.where(_coins(views, how.grey, rng), _grey(views), views)
    sigma = _between(views, *how.blur_px, rng)
    return _blur(views, torch.where(_coins(views, how.blur, rng), sigma, 0.0), how.blur_px[1])


def normalized(views_NCHW: Tensor) -> Tensor:
    """Shifted and scaled as networks for ImageNet want it."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (views_NCHW - mean) / std


def _between(views: Tensor, low: float, high: float, rng: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(len(views), 1, 1, 1, generator=rng)


def _coins(views: Tensor, chance: float, rng: torch.Generator) -> Tensor:
    return _between(views, 0.0, 1.0, rng) < chance


def _grey(views: Tensor) -> Tensor:
    return (views * torch.tensor(GREY).view(3, 1, 1)).sum(dim=1, keepdim=True).expand_as(views)


def _jitter(views: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """Brightness, contrast, saturation, hue; the hue is turned in YIQ, a linear stand-in for HSV."""
    low, high = max(0.0, 1 - 0.8 * strength), 1 + 0.8 * strength
    views = (views * _between(views, low, high, rng)).clamp(0, 1)
    middle = _grey(views).mean(dim=(1, 2, 3), keepdim=True)
    views = torch.lerp(middle.expand_as(views), views, _between(views, low, high, rng)).clamp(0, 1)
    views = torch.lerp(_grey(views), views, _between(views, low, high, rng)).clamp(0, 1)
    angle = 2 * math.pi * _between(views, -0.2 * strength, 0.2 * strength, rng).flatten()
    cos, sin, one, zero = angle.cos(), angle.sin(), torch.ones_like(angle), torch.zeros_like(angle)
    turn = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], dim=1).view(-1, 3, 3)
    to_yiq = torch.tensor(TO_YIQ)
    return torch.einsum("nij,njhw->nihw", to_yiq.inverse() @ turn @ to_yiq, views).clamp(0, 1)


def _blur(views: Tensor, sigma_N111: Tensor, largest: float) -> Tensor:
    """Gaussian, of each view's own width; 0 leaves a view as it is."""
    n, c, height, width = views.shape
    radius = min(math.ceil(3 * largest), (min(height, width) - 1) // 2)
    places = torch.arange(-radius, radius + 1)
    kernels = torch.exp(-(places**2) / (2 * sigma_N111.view(n, 1) ** 2).clamp(min=1e-12))
    kernels = (kernels / kernels.sum(dim=1, keepdim=True)).repeat_interleave(c, dim=0)
    flat = F.pad(views.reshape(1, n * c, height, width), (radius,) * 4, mode="reflect")
    flat = F.conv2d(flat, kernels.view(n * c, 1, 1, -1), groups=n * c)
    return F.conv2d(flat, kernels.view(n * c, 1, -1, 1), groups=n * c).view_as(views)
