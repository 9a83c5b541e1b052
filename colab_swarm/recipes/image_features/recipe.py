"""SwAV as the DeDLOC paper trained it (section 4.1): the model, endless batches for it, and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from colab_swarm.recipes.image_features.crops import (
    Crops,
    Distortions,
    distort,
    normalized,
    random_view,
    resized,
)
from colab_swarm.recipes.image_features.images import Images, ImageSource, open_images
from colab_swarm.recipes.image_features.model import Swav, SwavHead
from colab_swarm.recipes.masked_lm import HasId
from colab_swarm.recipes.pretraining import peer_seed
from colab_swarm.training.layerwise import Lars

if TYPE_CHECKING:
    from transformers import ResNetConfig


@dataclass(frozen=True)
class SwavSize:
    """What differs between the sizes.

    Attributes:
        layer_type, embedding_size, hidden_sizes, depths: of `transformers.ResNetConfig`.
        large, small: the views of an image: "2 + 6 random crops".
    """

    layer_type: str
    embedding_size: int
    hidden_sizes: tuple[int, ...]
    depths: tuple[int, ...]
    large: Crops
    small: Crops
    distortions: Distortions
    head: SwavHead


SIZES = {
    "tiny": SwavSize(
        "basic",
        16,
        (16, 32, 64),
        (1, 1, 1),
        large=Crops(2, 32, (0.5, 1.0)),
        small=Crops(2, 24, (0.25, 0.5)),
        distortions=Distortions(flip=0.0, colour=0.3, blur_px=(0.1, 0.8)),
        head=SwavHead(128, 32, prototypes=32, epsilon=0.02, queue=256, queue_from_step=30),
    ),
    "resnet50": SwavSize(
        "bottleneck",
        64,
        (256, 512, 1024, 2048),
        (3, 4, 6, 3),
        large=Crops(2, 224, (0.14, 1.0)),
        small=Crops(6, 96, (0.05, 0.14)),
        distortions=Distortions(),
        head=SwavHead(),
    ),
}
"""The paper's, and a tiny one that learns handwritten digits within seconds on one CPU core."""


@dataclass(frozen=True)
class SwavSettings:
    """The settings that SwAV recommends for ImageNet (Caron et al. 2020, appendix A).

    DeDLOC trains with 32,768 samples per step and does not tell the learning rate for it.

    Attributes:
        lr, momentum, weight_decay, trust, clip: of `Lars`.
        final_lr: the learning rate falls to it along half a cosine after the warm-up.
        warmup_steps, total_steps: global steps: 10 and 800 epochs of ImageNet.
        frozen_steps: global steps until the prototypes may move: one epoch.
        target_batch_size: samples per global step, of the whole swarm.
    """

    lr: float = 4.8
    momentum: float = 0.9
    weight_decay: float = 1e-6
    trust: float = 1e-3
    clip: bool = False
    final_lr: float = 0.0048
    warmup_steps: int = 3_130
    total_steps: int = 250_400
    frozen_steps: int = 313
    target_batch_size: int = 4096


SETTINGS = {
    "tiny": SwavSettings(
        lr=0.2,
        trust=0.02,
        final_lr=0.002,
        warmup_steps=10,
        total_steps=150,
        frozen_steps=10,
        target_batch_size=64,
    ),
    "resnet50": SwavSettings(),
}


class SwavBatches:
    """An endless iterator of batches, ready for ``model(**batch)``.

    A batch holds float32 CPU tensors: ``large_crops`` and ``small_crops``, each (B, V, C, H, W). Each pass over the
    images has an order of its own.

    Args:
        images: see `open_images`.
        batch_size: B.
        seed: for the order of the images and their views; see `peer_seed`.

    Raises:
        ValueError: ``batch_size`` is too small.
    """

    def __init__(self, images: Images, size: SwavSize, *, batch_size: int, seed: int) -> None:
        if batch_size < 2:
            raise ValueError(f"batch_size={batch_size}: batch normalisation needs at least 2")
        self.images = images
        self.batch_size = batch_size
        self._size = size
        self._rng = torch.Generator().manual_seed(seed)
        self._order = self._endless_order()

    def __iter__(self) -> SwavBatches:
        return self

    def __next__(self) -> dict[str, Tensor]:
        chosen = [self.images[next(self._order)] for _ in range(self.batch_size)]
        return {
            name: self._views(chosen, crops)
            for name, crops in (("large_crops", self._size.large), ("small_crops", self._size.small))
        }

    def __repr__(self) -> str:
        return f"SwavBatches({self.batch_size} of {len(self.images):,} images)"

    def _views(self, images: list[Tensor], crops: Crops) -> Tensor:
        how = self._size.distortions
        views = [
            random_view(image, crops, how.flip, self._rng) for image in images for _ in range(crops.count)
        ]
        distorted = normalized(distort(torch.stack(views), how, self._rng))
        return distorted.view(len(images), crops.count, *distorted.shape[1:])

    def _endless_order(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(len(self.images), generator=self._rng).tolist()


def swav(
    size: str = "tiny",
    *,
    images: ImageSource = "digits",
    swarm: HasId | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> tuple[Swav, SwavBatches]:
    """An untrained SwAV and endless batches for it: ``model(**batch, step=optimizer.global_step).loss`` is what to
    minimise, with the optimizer and scheduler of `swav_optimizer`.

    Peers that give the same ``size`` and ``seed`` hold equal parameters; each sees the images in an order of its own,
    and they may be its own images.

    Args:
        size: ``"tiny"`` or ``"resnet50"``.
        images: see `open_images`.
        swarm: whose ``id`` decides this peer's order; None stands for a peer without a name.
        batch_size: samples of one micro-batch; statistics of batch normalisation and assignments are its own.
        seed: of the initial parameters and, together with the peer's id, of the batches.

    Raises:
        ValueError: an argument is out of range, or there are no images.
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r} is none of {', '.join(SIZES)}")
    shape = SIZES[size]
    batches = SwavBatches(
        open_images(images), shape, batch_size=batch_size, seed=peer_seed(seed, swarm.id if swarm else b"")
    )
    return _build(shape, seed), batches


def swav_optimizer(model: Swav, settings: SwavSettings | str = "tiny") -> tuple[Lars, LambdaLR]:
    """LARS and its schedule, for ``swarm.optimizer(optimizer, scheduler=scheduler, …)``.

    The prototypes are frozen by a learning rate of 0 for the first global steps: the scheduler is the swarm's, so they
    are so at all peers alike, newcomers included.

    Args:
        settings: the size's, by its name, or your own.
    """
    chosen = SETTINGS[settings] if isinstance(settings, str) else settings
    body = [parameter for name, parameter in model.named_parameters() if name != "prototypes"]
    optimizer = Lars(
        [{"params": body}, {"params": [model.prototypes]}],
        lr=chosen.lr,
        momentum=chosen.momentum,
        weight_decay=chosen.weight_decay,
        trust=chosen.trust,
        clip=chosen.clip,
    )

    def body_share(step: int) -> float:
        if step < chosen.warmup_steps:
            return (step + 1) / chosen.warmup_steps
        done = (step - chosen.warmup_steps) / max(1, chosen.total_steps - chosen.warmup_steps)
        least = chosen.final_lr / chosen.lr
        return least + (1 - least) * (1 + math.cos(math.pi * min(1.0, done))) / 2

    def prototypes_share(step: int) -> float:
        return 0.0 if step < chosen.frozen_steps else body_share(step)

    return optimizer, LambdaLR(optimizer, [body_share, prototypes_share])


@torch.no_grad()
def embed(model: Swav, images: ImageSource, *, size_px: int, batch_size: int = 256) -> Tensor:
    """Features of images, to classify or compare them by: (N, width of the ResNet's last stage), on the CPU.

    The statistics of batch normalisation are settled anew on these very images first. So features depend on parameters
    and images alone, and all peers of one step get the same, whatever each trained on last.

    Args:
        size_px: side to which whole images are resized, such as that of the large crops.
    """
    opened, device = open_images(images), model.prototypes.device
    was_training = model.training
    norms = [part for part in model.backbone.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    momenta: list[Any] = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean of all batches
    try:
        model.train()
        for pixels in _whole(opened, size_px, batch_size):
            model.embed(pixels.to(device))
        model.eval()
        return torch.cat(
            [model.embed(p.to(device)).float().cpu() for p in _whole(opened, size_px, batch_size)]
        )
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.train(was_training)


def _whole(images: Images, size_px: int, batch_size: int) -> Iterator[Tensor]:
    for start in range(0, len(images), batch_size):
        numbers = range(start, min(start + batch_size, len(images)))
        yield normalized(torch.stack([resized(images[number], size_px) for number in numbers]))


def resnet_config(shape: SwavSize) -> ResNetConfig:
    """The configuration of `transformers` for a size."""
    from transformers import ResNetConfig

    return ResNetConfig(
        layer_type=shape.layer_type,
        embedding_size=shape.embedding_size,
        hidden_sizes=list(shape.hidden_sizes),
        depths=list(shape.depths),
    )


def _build(shape: SwavSize, seed: int) -> Swav:
    """Parameters drawn from ``seed``, so that all peers begin equal; other randomness is untouched."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return Swav(resnet_config(shape), shape.head).train()
