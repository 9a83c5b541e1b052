"""How evenly experts are used: the load-balancing loss, and each expert's share of the work."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

MEMORY = 0.99
"""Part of a share that is left after a batch without the expert."""
FORGOTTEN = 1e-4
"""An expert with less has not been used for about a thousand batches: it is gone."""


def balance_loss(importance_E: Tensor, idle: int) -> Tensor:
    """Squared coefficient of variation of the experts' importance (Shazeer et al. 2017, eq. 6-7).

    Args:
        importance_E: of the experts that took part: the sum of their weights over the batch.
        idle: how many more were known and took no part: their importance is 0.

    Returns:
        A scalar >= 0; 0 if all are equally important or none took part.
    """
    if not len(importance_E):
        return importance_E.sum()
    everyone = len(importance_E) + idle
    mean = importance_E.sum() / everyone
    variance = ((importance_E - mean).square().sum() + idle * mean.square()) / everyone
    return variance / mean.square().clamp_min(1e-20)


@dataclass(frozen=True)
class MixtureStatistics:
    """What a layer has seen so far.

    Attributes:
        batches: forward passes.
        answers: of experts, forward.
        failures: of experts, forward: an error, or silence until the others' grace was over.
        lost_gradients: backward calls that failed: the expert may not have learned, its part counted as zero.
        unanswered: samples for which nobody answered, which passed unchanged.
        outliers: answers for single samples that lay too far from the others'.
        sent_bytes, received_bytes: of activations and gradients, as they travelled.
    """

    batches: int = 0
    answers: int = 0
    failures: int = 0
    lost_gradients: int = 0
    unanswered: int = 0
    outliers: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Usage:
    """Counts what a layer does. Copies of the layer share it, on whatever threads they run."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._shares: dict[str, float] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> Usage:
        return self

    def count(self, **more: int) -> None:
        """Add to the counters of `MixtureStatistics`."""
        with self._lock:
            for name, number in more.items():
                self._counts[name] = self._counts.get(name, 0) + number

    def statistics(self) -> MixtureStatistics:
        """So far."""
        with self._lock:
            return MixtureStatistics(**self._counts)

    def on_batch(self, weights: Mapping[str, float]) -> int:
        """A batch was mixed with these sums of weights; returns how many other experts are known."""
        total = sum(weights.values())
        with self._lock:
            if total:
                shares = {uid: MEMORY * share for uid, share in self._shares.items()}
                for uid, weight in weights.items():
                    shares[uid] = shares.get(uid, 0.0) + (1 - MEMORY) * weight / total
                self._shares = {
                    uid: share for uid, share in shares.items() if share >= FORGOTTEN or uid in weights
                }
            return len(self._shares.keys() - weights.keys())

    @property
    def shares(self) -> dict[str, float]:
        """Each known expert's part of the work of the last hundred batches or so; they sum to 1."""
        with self._lock:
            total = sum(self._shares.values())
            return {uid: share / total for uid, share in sorted(self._shares.items())}
