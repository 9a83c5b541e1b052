"""Which expert suits which sample: a linear map per dimension of the grid (Learning@home, section 3.2).

Shapes: B samples, K chosen experts, G dimensions of the grid, D values of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Gating(nn.Module):
    """``g(x, f) = sum_i g_i(x)[u_i]``: the priority of an expert is the sum of its indices' scores.

    Args:
        dim: values of a sample.
        sides: how many indices each dimension of the grid has.
    """

    def __init__(self, dim: int, sides: Sequence[int]) -> None:
        super().__init__()
        self.sides = tuple(sides)
        self.maps = nn.Linear(dim, sum(sides))  # all g_i side by side

    def forward(self, x_BD: Tensor) -> tuple[Tensor, ...]:
        """One tensor of shape (B, side) per dimension."""
        return self.maps(x_BD).split(self.sides, dim=1)  # type: ignore[no-any-return]


def priorities(scores: Sequence[Tensor], indices_BKG: Tensor) -> Tensor:
    """Of the experts at these indices: a tensor (B, K), differentiable in the scores."""
    picked = [score_BM.gather(1, indices_BKG[:, :, i]) for i, score_BM in enumerate(scores)]
    return torch.stack(picked).sum(0)


def mixing_weights(priorities_BK: Tensor, answered_BK: Tensor) -> Tensor:
    """Softmax over those that answered, 0 for the others; all 0 where nobody did."""
    lowest = torch.finfo(priorities_BK.dtype).min
    weights_BK = priorities_BK.masked_fill(~answered_BK, lowest).softmax(1)
    return weights_BK.masked_fill(~answered_BK, 0.0)  # not -inf above: its gradient would be NaN
