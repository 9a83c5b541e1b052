"""Modules for experts: blocks whose output has the shape of their input.

`FeedForward` and `PaperTransformerBlock` are those of Learning@home; `TransformerBlock` is ours.

Axes: B samples, L places of a sequence, D width, H heads, E width of a head.
"""

import math
from collections.abc import Callable
from zlib import crc32

import torch
from torch import Tensor, nn

from colab_swarm.errors import require


class FeedForward(nn.Module):
    """``x + W3 ReLU(LN(W2 ReLU(LN(W1 x))))``, dim -> hidden -> hidden -> dim (Learning@home, section 4.1).

    LN is layer normalization. By default, ``hidden`` is 4 * ``dim``.
    """

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = 4 * dim if hidden is None else hidden
        self.sample = (dim,)
        self.layers = nn.Sequential(
            *(nn.Linear(dim, hidden), nn.LayerNorm(hidden), nn.ReLU()),
            *(nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU()),
            nn.Linear(hidden, dim),
        )

    def forward(self, x_BD: Tensor) -> Tensor:
        change_BD: Tensor = self.layers(x_BD)
        return x_BD + change_BD


class TransformerBlock(nn.Module):
    """A pre-norm Transformer encoder block: self-attention and a feed-forward layer of width ``hidden``.

    `PaperTransformerBlock` is the published block. ``dim``, the width of the embeddings, must be a multiple of
    ``heads``. By default, ``hidden`` is 4 * ``dim``.
    """

    def __init__(self, dim: int, heads: int, hidden: int | None = None) -> None:
        super().__init__()
        self.sample = (-1, dim)  # of any length
        width = 4 * dim if hidden is None else hidden
        self.layer = nn.TransformerEncoderLayer(
            dim, heads, width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return a tensor of the same shape; sequences do not see each other."""
        y_BLD: Tensor = self.layer(x_BLD)
        return y_BLD


class PaperTransformerBlock(nn.Module):
    """The published Transformer block: post-norm, GELU, 16 heads, dropout of 0.1 (Learning@home, section 4.1).

    An expert's backward computes forward again. Here the dropout masks of a sample depend only on
    the sample's bits and on ``salt``, which `Expert` sets to the expert's name. So both passes have the same masks,
    whichever other calls are in the batch. Equal samples have equal masks in one expert. The published code draws new
    masks in backward. After ``eval()`` there is no dropout.
    """

    def __init__(self, dim: int, heads: int = 16, hidden: int | None = None) -> None:
        super().__init__()
        require(dim % heads == 0, f"dim={dim} and heads={heads}: the number of heads must divide the width")
        self.sample = (-1, dim)  # of any length
        width = 4 * dim if hidden is None else hidden
        self._heads = heads
        self.dropout = 0.1
        self.salt = b""
        self.attend_in = nn.Linear(dim, 3 * dim)
        self.attend_out = nn.Linear(dim, dim)
        self.attend_norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, width)
        self.narrow = nn.Linear(width, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return a tensor of the same shape; sequences do not see each other."""
        drop = self._drop_of(x_BLD)
        samples, length, _ = x_BLD.shape
        parts = self.attend_in(x_BLD).view(samples, length, 3, self._heads, -1)
        q_BHLE, k_BHLE, v_BHLE = parts.permute(2, 0, 3, 1, 4)
        scores_BHLL = q_BHLE @ k_BHLE.mT / math.sqrt(q_BHLE.shape[-1])
        seen_BHLE = drop(scores_BHLL.softmax(-1)) @ v_BHLE
        seen_BLD = self.attend_out(seen_BHLE.transpose(1, 2).reshape(x_BLD.shape))
        h_BLD = self.attend_norm(x_BLD + drop(seen_BLD))
        change_BLD = self.narrow(drop(nn.functional.gelu(self.widen(h_BLD))))
        y_BLD: Tensor = self.norm(h_BLD + drop(change_BLD))
        return y_BLD

    def _drop_of(self, x_BLD: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that drops a fraction `dropout` of the values, with a new mask at each call."""
        if not self.training:
            return lambda values: values
        generators = []
        for sample in x_BLD.detach().float().cpu().numpy():
            seed = crc32(sample.tobytes(), crc32(self.salt))
            generators.append(torch.Generator(x_BLD.device).manual_seed(seed))

        def drop(values: Tensor) -> Tensor:
            shape = values.shape[1:]
            draws = [torch.rand(shape, generator=generator, device=values.device) for generator in generators]
            return values * torch.stack(draws).ge(self.dropout) / (1 - self.dropout)

        return drop
