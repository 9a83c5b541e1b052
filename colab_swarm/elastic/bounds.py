"""How far a peer's view may be from the global parameter: the constants B of "Elastic Consistency", Table 1.

A view satisfies ``E ||x_t - v_t^i||^2 <= alpha^2 B^2`` (Definition 1). x_t holds every gradient that was generated
before step t, v_t^i what peer i has applied of them, alpha is the learning rate. Where two relaxations meet, their
constants add up (triangle inequality).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """What is known of a run.

    Attributes:
        peers: p, of the group at its start.
        m: M, the root of the gradients' second moment, ``E ||g||^2 <= M^2``.
        sigma: the root of their variance, ``E ||g - E g||^2 <= sigma^2``.
        gamma: of the codec, ``||Q(w) - w||^2 <= gamma ||w||^2``; its residuals are fed back. None: nothing is known.
        crashed: peers that were lost.
        largest: norm of any gradient so far. What crashes lose is lost for good, and too little to take a mean of: it
            is bounded by this.
    """

    peers: int
    m: float
    sigma: float
    gamma: float | None = 0.0
    crashed: int = 0
    largest: float = 0.0


def bounded_staleness(peers: int, tau: int, m: float) -> float:
    """``(p - 1) tau M / p``: message passing, tau-bounded asynchrony (Lemma 15)."""
    return (peers - 1) * tau * m / peers


def faults(peers: int, f: int, m: float) -> float:
    """``f M / p``: synchronous, at most f crashes, or f messages that have not come (Lemmas 13 and 14)."""
    return f * m / peers


def variance_bounded(sigma: float) -> float:
    """``3 sigma``: the variance-bounded elastic scheduler (Lemma 16)."""
    return 3 * sigma


def compression(gamma: float, m: float) -> float:
    """``sqrt((2 - gamma) gamma / (1 - gamma)^3) M``: compression with error feedback (Lemma 18)."""
    return math.sqrt((2 - gamma) * gamma / (1 - gamma) ** 3) * m
