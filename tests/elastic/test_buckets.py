"""Gradients in buckets that are full one by one."""

import numpy as np
import pytest
import torch
from torch import nn

from colab_swarm.elastic.optimizer import FEWEST, Buckets
from colab_swarm.tensors.codecs import BLOCK_VALUES, Floats
from colab_swarm.training.flat import reals

MOST = 2 * BLOCK_VALUES


class Full:
    """The buckets of a model, and the full ones in order."""

    def __init__(self, model: nn.Module, most: int = MOST) -> None:
        self.full_ones: list[tuple[int, Floats]] = []
        self.parameters = list(model.parameters())
        self.buckets = Buckets(self.parameters, most=most, on_full=lambda *item: self.full_ones.append(item))


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(2 * FEWEST)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_buckets_fill_up_last_layer_first_during_backward_and_hold_all_gradients(dtype: torch.dtype) -> None:
    model = deep().to(dtype)
    full = Full(model)
    first_layers: list[int] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda _: first_layers.append(len(full.full_ones)))
    model(torch.randn(4, 64, dtype=dtype)).abs().square().sum().backward()
    assert [bucket for bucket, _ in full.full_ones] == list(range(len(full.buckets.sizes)))
    assert first_layers[0] >= len(full.full_ones) - 1 >= FEWEST
    expected = torch.cat([reals(one.grad).flatten().float() for one in reversed(full.parameters)]).numpy()
    np.testing.assert_array_equal(np.concatenate([values for _, values in full.full_ones]), expected)
    before = [one.grad.clone() for one in full.parameters]
    full.buckets.to_gradients([values for _, values in full.full_ones])
    for grad, parameter in zip(before, full.parameters, strict=True):
        assert parameter.grad.dtype == dtype
        torch.testing.assert_close(parameter.grad, grad)


def test_a_parameter_larger_than_a_bucket_reaches_into_several() -> None:
    full = Full(nn.Linear(300, 100))
    assert max(full.buckets.sizes) <= MOST and sum(full.buckets.sizes) == 30_100
    full.parameters[0].square().sum().backward()
    buckets = [bucket for bucket, _ in full.full_ones]
    assert buckets == list(range(1, len(full.buckets.sizes)))  # the bias has none


def test_buckets_fill_once_in_a_step_until_they_are_closed() -> None:
    model = nn.Linear(8, 4)
    full = Full(model)
    model(torch.ones(1, 8)).sum().backward()
    kept = full.full_ones[0][1].copy()
    with pytest.raises(RuntimeError, match=r"call optimizer.step\(\) after each backward"):
        model(torch.ones(1, 8)).sum().backward()
    full.buckets.begin()
    model(5 * torch.ones(1, 8)).sum().backward()
    assert len(full.full_ones) == 2
    np.testing.assert_array_equal(full.full_ones[0][1], kept, "values handed over change no more")
    full.buckets.close()
    model(torch.ones(1, 8)).sum().backward()
    assert len(full.full_ones) == 2, "closed buckets collect nothing"
