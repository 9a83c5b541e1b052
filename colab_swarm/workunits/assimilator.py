"""VC-ASGD: how a volunteer's result becomes part of the server's parameters."""

from __future__ import annotations

import numpy as np

from colab_swarm.workunits.weights import Floats

PIECE = 1 << 16
"""Values at a time, so that they stay in the processor's cache between the steps."""


def assimilate(server: Floats, result: Floats, alpha: float) -> Floats:
    """The server's parameters after a result: ``W_s <- alpha W_s + (1 - alpha) W_c``, in float32.

    "Distributed Deep Learning Using Volunteer Computing-Like Paradigm", equation 1. In whatever order results come,
    n of them leave ``alpha^n`` of the parameters before; with alpha 0 only the last result counts.

    Args:
        server: parameters W_s (numel,); not changed.
        result: W_c (numel,), which a volunteer has trained.
        alpha: weight of the server's, in [0, 1).
    """
    # from the one that weighs more, so that rounding is least, and none where they agree or alpha is 0
    near, far, weight = (result, server, alpha) if alpha < 0.5 else (server, result, 1 - alpha)
    new = np.empty(server.shape, np.float32)
    for start in range(0, len(server), PIECE):
        piece = slice(start, start + PIECE)
        step = np.subtract(far[piece], near[piece], out=new[piece])
        np.multiply(step, np.float32(weight), out=step)
        np.add(step, near[piece], out=step)
    return new
