"""Small jobs for tests: the digits that scikit-learn carries, and a model that learns them in seconds."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from colab_swarm.workunits.job import Job, WorkPlan


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Without state, so that a new one for each unit is the old one."""
    return torch.optim.SGD(parameters, lr=0.1)


def digits(part: slice) -> tuple[Any, Any]:
    """Pixels (n, 64) from 0 to 1, and labels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.data))[part]
    return (bunch.data[order] / 16).astype(np.float32), bunch.target[order].astype(np.int64)


def digits_job(rows: int = 256, **plan: Any) -> Job:
    return Job(
        "digits",
        model,
        data=lambda: digits(slice(0, rows)),
        validation=lambda: digits(slice(1500, 1700)),
        optimizer=sgd,
        plan=WorkPlan(**{"max_epochs": 2, "batch_size": 32, **plan}),
    )
