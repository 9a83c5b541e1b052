"""Elastic consistency: peers continue before all gradients have arrived, within a bound. See README.md here."""

from colab_swarm.elastic.schedulers import (
    AdaptiveBeta,
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
