"""Published settings of the recipes, and how parameters are grouped for weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class AlbertSettings:
    """The settings that sahajBERT was trained with (DeDLOC, section 4.3).

    Attributes:
        lr, betas, eps, weight_decay, clamp: of `Lamb`; no decay for biases and layer norms.
        max_grad_norm: the averaged gradient is clipped to it.
        warmup_steps, total_steps: global steps over which the learning rate rises, then falls to 0, linearly.
        target_batch_size: samples per global step, of the whole swarm.
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


def parameter_groups(model: torch.nn.Module, weight_decay: float = 0.01) -> list[dict[str, Any]]:
    """Two groups for an optimizer: matrices with weight decay; biases and layer norms without.

    The latter are told by having one axis, so it holds for any model.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
