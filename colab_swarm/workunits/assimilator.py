"""VC-ASGD: how a volunteer's result becomes part of the server's parameters."""

from __future__ import annotations

import numpy as np

from colab_swarm.workunits.weights import Floats

PIECE = 1 << 15
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
    new = np.empty(server.shape, np.float32)
    scratch = np.empty(min(PIECE, len(server)), np.float32)
    for start in range(0, len(server), PIECE):
        piece = slice(start, start + PIECE)
        mine = np.multiply(server[piece], np.float32(alpha), out=new[piece])
        theirs = np.multiply(result[piece], np.float32(1 - alpha), out=scratch[: len(mine)])
        np.add(mine, theirs, out=mine)
    return new
