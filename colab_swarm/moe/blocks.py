"""Experts that ship ready: modules that map samples of a shape to samples of the same shape.

None has dropout: an expert computes each call twice, at *forward* and again at *backward*, and two masks would give
gradients of another function than the caller saw.
"""

from __future__ import annotations

from torch import Tensor, nn


class FeedForward(nn.Module):
    """``x + W3 ReLU(LN(W2 ReLU(LN(W1 x))))``, dim -> hidden -> hidden -> dim (Learning@home, section 4.1).

    Args:
        dim: values of a sample.
        hidden: width inside; None: 4 * ``dim``.
    """

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = 4 * dim if hidden is None else hidden
        self.sample = (dim,)
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden),
            nn.LayerNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, dim),
        )

    def forward(self, x_BD: Tensor) -> Tensor:
        """Of the same shape."""
        change_BD: Tensor = self.layers(x_BD)
        return x_BD + change_BD


class TransformerBlock(nn.Module):
    """A Transformer encoder block: self-attention and a feed-forward layer, normalised before each.

    Args:
        dim: width of the embeddings.
        heads: of the attention; they divide ``dim``.
        hidden: width of the feed-forward layer; None: 4 * ``dim``.
    """

    def __init__(self, dim: int, heads: int, hidden: int | None = None) -> None:
        super().__init__()
        self.sample = (-1, dim)  # of any length
        self.layer = nn.TransformerEncoderLayer(
            dim,
            heads,
            4 * dim if hidden is None else hidden,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Of the same shape; a sequence sees itself only."""
        y_BLD: Tensor = self.layer(x_BLD)
        return y_BLD


class Nop(nn.Module):
    """Gives back what it got: what is left of a call without computation."""

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        return x
