"""Elastic consistency: peers that go on before all gradients are there, inside a bound that is measured."""

from __future__ import annotations

from colab_swarm.elastic.adaptive import AdaptiveBeta
from colab_swarm.elastic.schedulers import (
    BoundedStaleness,
    CrashTolerant,
    NormBounded,
    Synchronous,
    VarianceBounded,
)

__all__ = [
    "AdaptiveBeta",
    "BoundedStaleness",
    "CrashTolerant",
    "NormBounded",
    "Synchronous",
    "VarianceBounded",
]
