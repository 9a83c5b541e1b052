"""SwAV (Caron et al. 2020): image features without labels, as DeDLOC trained them (section 4.1).

Views of one image predict each other's cluster. Shapes: N images, B samples, V views, C = 3
channels, H x W pixels, D features, K prototypes.

The peers of a swarm share only the parameters. So prototypes are normalized when they are used. Batches are
normalized by their own statistics, as in data parallelism. Each peer has its own queue of earlier features ("for each
worker"). The queue is used from a fixed global step on, so all peers begin to use it together.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import update_bn

from colab_swarm.errors import require
from colab_swarm.recipes.batches import peer_seed
from colab_swarm.training.layerwise import Lars

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
Batches: TypeAlias = Iterator[dict[str, Tensor]]
ImageSource: TypeAlias = "str | Path | Tensor | NDArray[Any] | Sequence[Any]"


def open_images(images: ImageSource) -> Sequence[Any]:
    """Return a source of images as a sequence for `as_image`; each image is loaded when it is needed.

    Args:
        images: ``"digits"`` (scikit-learn's 1,797 handwritten digits); a folder, which is searched for image
            files at all depths; a folder or hub name for `datasets.load_dataset` (``train`` split); a
            data set that is not streamed; an array (N, H, W), (N, H, W, C) or (N, C, H, W); or a sequence.

    Raises:
        ValueError: there is no image, or the data set cannot be loaded.
    """
    rows: Any = _named(images) if isinstance(images, str | Path) else images
    require(len(rows), f"no image in {images!s:.80}: give at least one")
    if not hasattr(rows, "column_names"):
        return rows  # type: ignore[no-any-return]
    columns = [name for name, value in rows[0].items() if hasattr(value, "convert")]
    if not columns:
        raise ValueError(f"the data set has no column of images, only {', '.join(rows.column_names)}")
    return rows[columns[0]]  # type: ignore[no-any-return]  # loads a row when it is needed


def _named(images: str | Path) -> Any:
    if images == "digits":
        from sklearn.datasets import load_digits

        return load_digits().images / 16
    files = sorted(path for path in Path(images).rglob("*") if path.suffix.lower() in SUFFIXES)
    if files:
        return files
    from datasets import load_dataset

    try:
        return load_dataset(str(images), split="train")
    except (OSError, ValueError) as error:
        raise ValueError(f"no image in {images!s:.80}, and it is no data set: {error}") from error


def as_image(image: Any) -> Tensor:
    """Return an image as uint8 (3, H, W); floats are scaled from [0, 1]. Raises ValueError if its shape is wrong."""
    if isinstance(image, Path):
        from PIL import Image

        with Image.open(image) as opened:
            return as_image(opened)
    if hasattr(image, "convert"):  # a PIL image
        image = np.array(image.convert("RGB"))
    pixels = torch.as_tensor(image)
    if pixels.dim() == 2:
        pixels = pixels[None]
    elif pixels.dim() == 3 and pixels.shape[0] not in (1, 3):
        pixels = pixels.permute(2, 0, 1)
    if pixels.dim() != 3 or pixels.shape[0] not in (1, 3) or 0 in pixels.shape:
        raise ValueError(f"an image has shape (H, W) or (H, W, 1 or 3), not {tuple(pixels.shape)}")
    if pixels.is_floating_point():
        pixels = pixels.mul(255).round().clamp(0, 255)
    return pixels.to(torch.uint8).expand(3, -1, -1)


GREY = (0.299, 0.587, 0.114)
TO_YIQ = (GREY, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))
ASPECT = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Crops:
    """One kind of view: ``count`` per image, ``size_px`` wide; it covers a part, random in ``area``, of the image."""

    count: int
    size_px: int
    area: tuple[float, float]


def random_view(image_CHW: Tensor, crops: Crops, flip: float, rng: torch.Generator) -> Tensor:
    """Crop a uint8 image with random position, area and aspect ratio; the view is a float32 square in [0, 1]."""
    _, height, width = image_CHW.shape
    area_u, aspect_u, top_u, left_u, flip_u = torch.rand(5, generator=rng).tolist()
    area = height * width * (crops.area[0] + area_u * (crops.area[1] - crops.area[0]))
    aspect = ASPECT[0] * (ASPECT[1] / ASPECT[0]) ** aspect_u
    h = min(height, max(1, round(math.sqrt(area / aspect))))
    w = min(width, max(1, round(math.sqrt(area * aspect))))
    top = int(top_u * (height - h + 1))
    left = int(left_u * (width - w + 1))
    view = resized(image_CHW[:, top : top + h, left : left + w], crops.size_px)
    return view.flip(2) if flip_u < flip else view


def resized(image_CHW: Tensor, size_px: int) -> Tensor:
    square = F.interpolate(image_CHW[None] / 255, (size_px, size_px), mode="bilinear", antialias=True)
    return square[0].clamp(0, 1)


def distort(views_NCHW: Tensor, how: "SwavSize", rng: torch.Generator) -> Tensor:
    """Jitter, grey and blur each view independently, in that order; values stay in [0, 1]."""
    coins = _uniform(views_NCHW, 0, 1, rng)
    views = torch.where(coins < 0.8, _jitter(views_NCHW, how.colour, rng), views_NCHW)
    views = torch.where(_uniform(views, 0, 1, rng) < how.grey, _grey(views), views)
    sigma = _uniform(views, *how.blur_px, rng)
    return _blur(views, torch.where(_uniform(views, 0, 1, rng) < how.blur, sigma, 0.0), how.blur_px[1])


def normalized(views_NCHW: Tensor) -> Tensor:
    mean_std = torch.tensor([(0.485, 0.456, 0.406), (0.229, 0.224, 0.225)]).view(2, 3, 1, 1)  # ImageNet's
    return (views_NCHW - mean_std[0]) / mean_std[1]


def _uniform(views: Tensor, low: float, high: float, rng: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(len(views), 1, 1, 1, generator=rng)


def _grey(views: Tensor) -> Tensor:
    return (views * torch.tensor(GREY).view(3, 1, 1)).sum(dim=1, keepdim=True).expand_as(views)


def _jitter(views: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """Change brightness, contrast, saturation and hue; the hue is rotated in YIQ, a linear approximation of HSV."""
    low = max(0.0, 1 - 0.8 * strength)
    high = 1 + 0.8 * strength
    views = (views * _uniform(views, low, high, rng)).clamp(0, 1)
    middle = _grey(views).mean(dim=(1, 2, 3), keepdim=True)
    views = torch.lerp(middle.expand_as(views), views, _uniform(views, low, high, rng)).clamp(0, 1)
    views = torch.lerp(_grey(views), views, _uniform(views, low, high, rng)).clamp(0, 1)
    angle = 2 * math.pi * _uniform(views, -0.2 * strength, 0.2 * strength, rng).flatten()
    cos = angle.cos()
    sin = angle.sin()
    one = torch.ones_like(angle)
    zero = torch.zeros_like(angle)
    turn = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], dim=1).view(-1, 3, 3)
    to_yiq = torch.tensor(TO_YIQ)
    return torch.einsum("nij,njhw->nihw", to_yiq.inverse() @ turn @ to_yiq, views).clamp(0, 1)


def _blur(views: Tensor, sigma_N111: Tensor, largest: float) -> Tensor:
    n, c, height, width = views.shape
    radius = min(math.ceil(3 * largest), (min(height, width) - 1) // 2)
    offsets = torch.arange(-radius, radius + 1)
    kernels = torch.exp(-(offsets**2) / (2 * sigma_N111.view(n, 1) ** 2).clamp(min=1e-12))
    kernels = (kernels / kernels.sum(dim=1, keepdim=True)).repeat_interleave(c, dim=0)
    flat = F.pad(views.reshape(1, n * c, height, width), (radius,) * 4, mode="reflect")
    flat = F.conv2d(flat, kernels.view(n * c, 1, 1, -1), groups=n * c)
    return F.conv2d(flat, kernels.view(n * c, 1, -1, 1), groups=n * c).view_as(views)


@dataclass(frozen=True)
class SwavSize:
    resnet: dict[str, Any]  # arguments of `transformers.ResNetConfig`
    large: Crops  # the views of an image: "2 + 6 random crops"
    small: Crops
    flip: float = 0.5  # probabilities of flip, grey and blur
    grey: float = 0.2
    blur: float = 0.5
    blur_px: tuple[float, float] = (0.1, 2.0)  # least and largest standard deviation of the blur
    colour: float = 1.0  # strength of the jitter
    hidden: int = 2048  # width of the projection's hidden layer
    features: int = 128  # D
    prototypes: int = 3000  # K
    temperature: float = 0.1
    epsilon: float = 0.05  # of Sinkhorn-Knopp; see `balance`
    iterations: int = 3
    queue: int = (
        3840  # earlier samples that assignments include, because batches are small compared to K; 0: none
    )
    queue_from_step: int = 4_692  # before this step, features change too fast for the queue


RESNET50 = SwavSize({}, large=Crops(2, 224, (0.14, 1.0)), small=Crops(6, 96, (0.05, 0.14)))
SIZES = {
    "tiny": SwavSize(
        {"layer_type": "basic", "embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 1, 1]},
        large=Crops(2, 32, (0.5, 1.0)),
        small=Crops(2, 24, (0.25, 0.5)),
        flip=0.0,
        blur_px=(0.1, 0.8),
        colour=0.3,
        hidden=128,
        features=32,
        prototypes=32,
        epsilon=0.02,
        queue=256,
        queue_from_step=30,
    ),
    "resnet50": RESNET50,
    "dedloc": replace(RESNET50, epsilon=0.03, queue_from_step=3_062),
}
"""The size of SwAV, that of DeDLOC, and a tiny size that learns digits within seconds on one CPU core.

DeDLOC's code starts the queue after 98,000 micro-batches of 64 at each worker, and frees the prototypes after
5,005. With its 16 equal workstations these are 3,062 and 156 global steps of 32,768 samples.
"""


@dataclass(frozen=True)
class SwavOutput:
    """The loss, and how many prototypes have a sample; a small number indicates a collapse."""

    loss: Tensor
    assigned: int


class Swav(nn.Module):
    """A ResNet of `transformers`, a projection, and prototypes."""

    def __init__(self, size: SwavSize) -> None:
        from transformers import ResNetConfig, ResNetModel

        super().__init__()
        self.size = size
        config = ResNetConfig(**size.resnet)
        self.backbone = ResNetModel(config)
        self.projection = nn.Sequential(
            nn.Linear(config.hidden_sizes[-1], size.hidden),
            nn.BatchNorm1d(size.hidden),
            nn.ReLU(),
            nn.Linear(size.hidden, size.features),
        )
        self.prototypes = nn.Parameter(F.normalize(torch.randn(size.prototypes, size.features)))
        self._queue_VQD: Tensor | None = None

    def forward(
        self, large_crops: Tensor, small_crops: Tensor | None = None, step: int | None = None
    ) -> SwavOutput:
        """Compute the loss of a batch.

        Each of the ``large_crops`` (B, V, C, H, W) is predicted from all other views; ``small_crops``
        (B, V, C, h, w) are only used to predict. ``step`` is the ``optimizer.global_step``; None: no queue.
        """
        large_VBD = self._project(large_crops)
        if small_crops is None:
            views_VBD = large_VBD
        else:
            views_VBD = torch.cat([large_VBD, self._project(small_crops)])
        prototypes_KD = F.normalize(self.prototypes)
        logs_VBK = F.log_softmax((views_VBD @ prototypes_KD.T).float() / self.size.temperature, dim=-1)
        targets_TBK = self._assign(large_VBD, prototypes_KD, step)
        losses_TV = -(targets_TBK[:, None] * logs_VBK).sum(dim=-1).mean(dim=-1)
        others_TV = ~torch.eye(*losses_TV.shape, dtype=torch.bool, device=losses_TV.device)
        used = set(targets_TBK.argmax(dim=-1).flatten().tolist())
        return SwavOutput(losses_TV[others_TV].mean(), len(used))

    def _project(self, crops_BVCHW: Tensor) -> Tensor:
        """Return unit vectors (V, B, D); all views of one size go through the network together."""
        pixels = crops_BVCHW.transpose(0, 1).flatten(0, 1)
        features = F.normalize(self.projection(self.backbone(pixels).pooler_output.flatten(1)))
        return features.view(crops_BVCHW.shape[1], crops_BVCHW.shape[0], -1)

    @torch.no_grad()
    def _assign(self, large_VBD: Tensor, prototypes_KD: Tensor, step: int | None) -> Tensor:
        """Return the assignments of the large views, (V, B, K); a full queue is balanced together with them."""
        size = self.size
        if self._queue_VQD is None:
            former_VQD = large_VBD[:, :0]
        else:
            former_VQD = self._queue_VQD
        queued = step is not None and step >= size.queue_from_step and former_VQD.shape[1] >= size.queue
        held_VND = torch.cat([large_VBD, former_VQD.to(large_VBD)], dim=1)
        if self.training:
            self._queue_VQD = held_VND[:, : size.queue]
        scores_VNK = (held_VND if queued else large_VBD) @ prototypes_KD.T
        balanced = balance(scores_VNK, epsilon=size.epsilon, iterations=size.iterations)
        return balanced[:, : large_VBD.shape[1]]


def balance(scores: Tensor, *, epsilon: float, iterations: int) -> Tensor:
    """Assign samples to prototypes so that all are used equally (Sinkhorn-Knopp; SwAV, equation 3).

    Logarithms in float32 avoid overflow and division by zero with a small epsilon or half precision. In the
    result (…, B, K), rows sum to 1 and columns to about B / K; with epsilon 0 each sample gets one prototype.
    """
    logs = scores.float() / epsilon
    for _ in range(iterations):
        logs = logs - logs.logsumexp(dim=-2, keepdim=True)
        logs = logs - logs.logsumexp(dim=-1, keepdim=True)
    return logs.exp()


@dataclass(frozen=True)
class SwavSettings:
    """SwAV's settings for ImageNet (appendix A): 10 epochs of warm-up, then a cosine schedule; 800 epochs in all."""

    lr: float = 4.8
    trust: float = 1e-3
    first_lr: float = 0.0
    final_lr: float = 0.0048
    warmup_steps: int = 3_130
    total_steps: int = 250_400
    frozen_steps: int = 313
    target_batch_size: int = 4_096


SETTINGS = {
    "tiny": SwavSettings(
        lr=0.2,
        trust=0.02,
        final_lr=0.002,
        warmup_steps=10,
        total_steps=150,
        frozen_steps=10,
        target_batch_size=128,
    ),
    "resnet50": SwavSettings(),
    "dedloc": SwavSettings(
        lr=2.4,
        first_lr=0.3,
        warmup_steps=500,
        total_steps=5_000,
        frozen_steps=156,
        target_batch_size=32_768,
    ),
}
"""The settings by size. DeDLOC trained with another batch size than SwAV (section 4.1).

Its learning rates are those of its published code.
"""


def _batches(images: Sequence[Any], size: SwavSize, batch_size: int, rng: torch.Generator) -> Batches:
    order = endless_order(len(images), rng)
    while True:
        chosen = [as_image(images[next(order)]) for _ in range(batch_size)]
        batch = {}
        for name, crops in (("large_crops", size.large), ("small_crops", size.small)):
            views = []
            for image in chosen:
                for _ in range(crops.count):
                    views.append(random_view(image, crops, size.flip, rng))
            distorted = normalized(distort(torch.stack(views), size, rng))
            batch[name] = distorted.view(batch_size, crops.count, *distorted.shape[1:])
        yield batch


def endless_order(count: int, rng: torch.Generator) -> Iterator[int]:
    while True:
        yield from torch.randperm(count, generator=rng).tolist()


def swav(
    size: str = "tiny",
    *,
    images: ImageSource = "digits",
    swarm: Any = None,
    batch_size: int = 64,
    seed: int = 0,
) -> tuple[Swav, Batches]:
    """Return an untrained SwAV and endless batches: ``large_crops`` and ``small_crops``, each float32 (B, V, C, H, W).

    Minimize ``model(**batch, step=optimizer.global_step).loss`` with `swav_optimizer`. Peers with
    the same ``size`` and ``seed`` get equal parameters. Raises `ValueError` if an argument is unusable.

    Args:
        size: ``"tiny"``, ``"resnet50"``, or ``"dedloc"``, a ResNet-50 with DeDLOC's settings.
        images: see `open_images`.
        swarm: the swarm of this peer, whose ``id`` seeds the order of the images.
        batch_size: samples of one micro-batch; features are normalized, and assignments balanced, over these.
        seed: seed of the initial parameters and, together with the peer's id, of the batches.
    """
    require(size in SIZES, f"size={size!r} is none of {', '.join(SIZES)}")
    require(batch_size >= 2, f"batch_size={batch_size}: batch normalization needs at least 2")
    rng = torch.Generator().manual_seed(peer_seed(seed, swarm.id if swarm else b""))
    batches = _batches(open_images(images), SIZES[size], batch_size, rng)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return Swav(SIZES[size]).train(), batches


def swav_optimizer(model: Swav, settings: SwavSettings | str = "tiny") -> tuple[Lars, LambdaLR]:
    """Return LARS and its schedule, for ``swarm.optimizer(optimizer, scheduler=scheduler, …)``.

    ``settings`` are your own, or the name of a size. During the first global steps, the prototypes have a learning rate
    of 0 at all peers, so these steps do not change them.
    """
    if isinstance(settings, str):
        chosen = SETTINGS[settings]
    else:
        chosen = settings
    body = [parameter for name, parameter in model.named_parameters() if name != "prototypes"]
    groups = [{"params": body}, {"params": [model.prototypes]}]
    optimizer = Lars(groups, lr=chosen.lr, momentum=0.9, weight_decay=1e-6, trust=chosen.trust, clip=False)

    def body_share(step: int) -> float:
        if step < chosen.warmup_steps:
            first = chosen.first_lr / chosen.lr
            return first + (1 - first) * (step + 1) / chosen.warmup_steps
        done = (step - chosen.warmup_steps) / max(1, chosen.total_steps - chosen.warmup_steps)
        least = chosen.final_lr / chosen.lr
        return least + (1 - least) * (1 + math.cos(math.pi * min(1.0, done))) / 2

    shares = [body_share, lambda step: 0.0 if step < chosen.frozen_steps else body_share(step)]
    return optimizer, LambdaLR(optimizer, shares)


@torch.no_grad()
def embed(model: Swav, images: ImageSource, *, size_px: int, batch_size: int = 256) -> Tensor:
    """Return the features of images, resized to ``size_px``: (N, width of the ResNet's last stage), on CPU.

    The statistics of batch normalization are first measured on these images, so that all peers get equal features.
    """
    backbone = copy.deepcopy(model.backbone)
    source = (open_images(images), size_px, batch_size)
    device = model.prototypes.device
    update_bn(_squares(*source), backbone, device)
    backbone.eval()
    pooled = [backbone(pixels.to(device)).pooler_output for pixels in _squares(*source)]
    return torch.cat([features.flatten(1).float().cpu() for features in pooled])


def _squares(images: Sequence[Any], size_px: int, batch_size: int) -> Iterator[Tensor]:
    for start in range(0, len(images), batch_size):
        numbers = range(start, min(start + batch_size, len(images)))
        yield normalized(torch.stack([resized(as_image(images[number]), size_px) for number in numbers]))
