"""Published settings of the recipes, and how parameters are grouped for weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from colab_swarm.training.lamb import Lamb


@dataclass(frozen=True)
class AlbertSettings:
    """The settings that sahajBERT was trained with (DeDLOC, section 4.3).

    Its public run had a schedule of 1,000,000 steps and ended after 19,519: the learning rate hardly fell.

    Attributes:
        lr, betas, eps, weight_decay, clamp: of `Lamb`; no decay for biases and layer norms.
        max_grad_norm: the averaged gradient is clipped to it.
        warmup_steps, total_steps: global steps over which the learning rate rises, then falls to 0, linearly.
        target_batch_size: samples per global step, of the whole swarm.
        codec: of gradients on the wire.
        matchmaking_s: how long a round waits for peers; notebooks need longer than machines of one data centre.
    """

    lr: float = 1.76e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    clamp: float = 1e4
    max_grad_norm: float = 1.0
    warmup_steps: int = 5_000
    total_steps: int = 125_000
    target_batch_size: int = 4096
    codec: str = "float16"
    matchmaking_s: float = 10.0


SETTINGS = {
    "tiny": AlbertSettings(lr=1e-2, warmup_steps=10, total_steps=2_000, target_batch_size=256),
    "base": AlbertSettings(),
    "large": AlbertSettings(),
    "xlarge": AlbertSettings(lr=5e-3, warmup_steps=3_125, total_steps=15_625, target_batch_size=16_384),
}
"""By size. Large is sahajBERT, xlarge the second run of its makers, sahajBERT-XL (DeDLOC, appendix I.7)."""


def albert_optimizer(
    model: torch.nn.Module, settings: AlbertSettings | str = "tiny"
) -> tuple[Lamb, LambdaLR]:
    """LAMB and its schedule, for ``swarm.optimizer(optimizer, scheduler=scheduler, …)``.

    Args:
        settings: the size's, by its name, or your own.
    """
    chosen = SETTINGS[settings] if isinstance(settings, str) else settings
    optimizer = Lamb(
        parameter_groups(model, chosen.weight_decay),
        lr=chosen.lr,
        betas=chosen.betas,
        eps=chosen.eps,
        clamp=chosen.clamp,
    )

    def share(step: int) -> float:
        if step < chosen.warmup_steps:
            return (step + 1) / chosen.warmup_steps
        return max(0.0, (chosen.total_steps - step) / (chosen.total_steps - chosen.warmup_steps))

    return optimizer, LambdaLR(optimizer, share)


def parameter_groups(model: torch.nn.Module, weight_decay: float = 0.01) -> list[dict[str, Any]]:
    """Two groups for an optimizer: matrices with weight decay; biases and layer norms without.

    The latter are told by having one axis, so it holds for any model.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
