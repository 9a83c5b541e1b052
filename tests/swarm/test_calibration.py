"""Calibrating measures a model and leaves no trace in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from colab_swarm.swarm.doctor import calibrate


class Net(torch.nn.Module):
    """Has buffers that change while it trains, and chance in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.dropout = torch.nn.Dropout(0.5)
        self.last = torch.nn.Linear(32, 1)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.last(self.dropout(self.norm(self.first(x)).relu())).square().mean())


def batches(count: int | None = None) -> Iterator[dict[str, Tensor]]:
    return itertools.islice(itertools.repeat({"x": torch.ones(4, 8)}), count)


def test_a_calibrated_model_is_unchanged() -> None:
    net = Net().eval()
    net.first.weight.grad = torch.full_like(net.first.weight, 7.0)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    chance = torch.get_rng_state()

    found = calibrate(net, batches(), seconds=0.01)

    assert found.samples_per_s > 0
    assert found.micro_batch == 4
    assert found.parameters == sum(parameter.numel() for parameter in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(net.first.weight.grad, torch.full_like(net.first.weight, 7.0))
    assert net.last.weight.grad is None
    assert not net.training
    assert torch.equal(torch.get_rng_state(), chance)


def test_saved_bytes_do_not_include_the_parameters() -> None:
    class Square(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1000))

        def forward(self, x: Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=(x * self.scale).square().sum())

    found = calibrate(Square(), itertools.repeat({"x": torch.ones(3, 1000)}), seconds=0.01)
    assert (
        found.sample_bytes == 2 * 4 * 1000
    )  # x for the gradient of the scale, the product for that of its square


def test_too_few_batches_raise() -> None:
    with pytest.raises(ValueError, match="ran out"):
        calibrate(Net(), batches(2), seconds=0.01)
