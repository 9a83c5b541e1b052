"""SwAV (Caron et al. 2020): views of one image must predict each other's cluster.

Shapes: B samples, V views of each, C x H x W pixels, D features, K prototypes.

What a swarm must agree on are the parameters alone, and the function that is trained depends on nothing else:

- Prototypes are normalised where they are used, not stored normalised: it makes no difference when a peer does so.
- Batch normalisation takes the statistics of each peer's own micro-batch, as plain data parallelism does. Its running
  statistics are each peer's own and enter no training step; `embed` measures them again on the given images.
- The queue of former features is each peer's own, too (DeDLOC, section 4.1: "for each worker"), and a newcomer fills
  it with its first batches. It counts from a global step on, so that all begin together.
- Assignments are balanced over a peer's own batch and queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import ResNetConfig


@dataclass(frozen=True)
class SwavHead:
    """What comes after the ResNet.

    Attributes:
        hidden: width of the projection's hidden layer.
        features: D.
        prototypes: K.
        temperature: of the prediction.
        epsilon: of the assignment; towards 0 each sample gets one prototype.
        iterations: of Sinkhorn and Knopp.
        queue: former samples that assignments take into account, for batches that are small against K; 0: none.
        queue_from_step: global step from which on they do; features change too fast before.
    """

    hidden: int = 2048
    features: int = 128
    prototypes: int = 3000
    temperature: float = 0.1
    epsilon: float = 0.05
    iterations: int = 3
    queue: int = 3840
    queue_from_step: int = 4_692


@dataclass(frozen=True)
class SwavOutput:
    """Of one batch.

    Attributes:
        loss: the mean cross-entropy between a view's prediction and another's assignment; who predicts all
            prototypes alike has ln K.
        assigned: how many of the K prototypes the batch was assigned to; few tell of a collapse.
    """

    loss: Tensor
    assigned: int


class Swav(nn.Module):
    """A ResNet of `transformers`, a projection, and prototypes."""

    def __init__(self, config: ResNetConfig, head: SwavHead) -> None:
        from transformers import ResNetModel

        super().__init__()
        self.head = head
        self.backbone = ResNetModel(config)
        self.projection = nn.Sequential(
            nn.Linear(config.hidden_sizes[-1], head.hidden),
            nn.BatchNorm1d(head.hidden),
            nn.ReLU(),
            nn.Linear(head.hidden, head.features),
        )
        self.prototypes = nn.Parameter(F.normalize(torch.randn(head.prototypes, head.features)))
        self._queue_VQD: list[Tensor] = []

    def embed(self, pixels_BCHW: Tensor) -> Tensor:
        """What the ResNet makes of images: the features that other tasks use."""
        pooled: Tensor = self.backbone(pixels_BCHW).pooler_output
        return pooled.flatten(1)

    def forward(
        self, large_crops: Tensor, small_crops: Tensor | None = None, step: int | None = None
    ) -> SwavOutput:
        """The loss of a batch.

        Args:
            large_crops: (B, V, C, H, W); each of them is predicted from all other views.
            small_crops: (B, V, C, h, w); these only predict.
            step: ``optimizer.global_step``, which begins the queue; None: no queue.
        """
        large_VBD = self._project(large_crops)
        views = [*large_VBD, *(() if small_crops is None else self._project(small_crops))]
        prototypes_KD = F.normalize(self.prototypes)
        scores_VBK = [view @ prototypes_KD.T for view in views]
        assignments_VBK = self._assign(large_VBD, prototypes_KD, step)
        logs_VBK = [F.log_softmax(scores.float() / self.head.temperature, dim=1) for scores in scores_VBK]
        losses = [
            -(assigned * log).sum(dim=1).mean()
            for target, assigned in enumerate(assignments_VBK)
            for view, log in enumerate(logs_VBK)
            if view != target
        ]
        used = set(torch.cat(assignments_VBK).argmax(dim=1).tolist())
        return SwavOutput(torch.stack(losses).mean(), len(used))

    def _project(self, crops_BVCHW: Tensor) -> Tensor:
        """Unit vectors (V, B, D); all views of one size pass the network together."""
        pixels = crops_BVCHW.transpose(0, 1).flatten(0, 1)
        features = F.normalize(self.projection(self.embed(pixels)))
        return features.view(crops_BVCHW.shape[1], crops_BVCHW.shape[0], -1)

    @torch.no_grad()
    def _assign(self, large_VBD: Tensor, prototypes_KD: Tensor, step: int | None) -> list[Tensor]:
        """Each large view's assignments (B, K), balanced together with the queue's once that is full."""
        head = self.head
        full = bool(self._queue_VQD) and len(self._queue_VQD[0]) >= head.queue
        queued = full and step is not None and step >= head.queue_from_step
        assignments = []
        for view, features in enumerate(large_VBD):
            held = torch.cat([features, self._queue_VQD[view].to(features)]) if queued else features
            balanced = balance(held @ prototypes_KD.T, epsilon=head.epsilon, iterations=head.iterations)
            assignments.append(balanced[: len(features)])
        if self.training and head.queue:
            former = self._queue_VQD or [features[:0] for features in large_VBD]
            self._queue_VQD = [
                torch.cat([features, held.to(features)])[: head.queue]
                for features, held in zip(large_VBD, former, strict=True)
            ]
        return assignments


def balance(scores_BK: Tensor, *, epsilon: float, iterations: int) -> Tensor:
    """Assign samples to prototypes so that all prototypes are used alike (Sinkhorn-Knopp; SwAV, equation 3).

    In logarithms and float32: neither a small epsilon nor half precision makes it overflow or divide by zero.

    Args:
        scores_BK: likeness of samples and prototypes.
        epsilon: the entropy's weight; towards 0 each sample gets one prototype.

    Returns:
        (B, K), float32; each row sums to 1, each column to about B / K.
    """
    logs = scores_BK.float() / epsilon
    for _ in range(iterations):
        logs = logs - logs.logsumexp(dim=0, keepdim=True)
        logs = logs - logs.logsumexp(dim=1, keepdim=True)
    return logs.exp()
