"""The experts that ship."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from colab_swarm.moe.expert import Expert, ExpertRule, FeedForward, TransformerBlock

RULE = ExpertRule(partial(torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize(
    ("module", "sample", "samples"),
    [
        (FeedForward(8), (8,), (8,)),
        (FeedForward(8, 3), (8,), (8,)),
        (TransformerBlock(8, 2), (-1, 8), (7, 8)),
        (TransformerBlock(8, 2, 5), (4, 8), (4, 8)),
        (nn.Identity(), (2, 3), (2, 3)),
    ],
)
def test_blocks_are_experts_and_compute_the_same_twice(
    module: nn.Module, sample: tuple[int, ...], samples: tuple[int, ...]
) -> None:
    one = Expert("block.0", module, RULE, sample)
    inputs = torch.randn(3, *samples)
    assert one.forward(inputs).shape == inputs.shape
    assert torch.equal(one.forward(inputs), one.forward(inputs))
    assert one.backward(inputs, torch.ones_like(inputs)).shape == inputs.shape


@pytest.mark.parametrize(("module", "shape"), [(FeedForward(8), (5, 8)), (TransformerBlock(8, 2), (5, 4, 8))])
def test_a_sample_does_not_see_the_others_in_its_batch(module: nn.Module, shape: tuple[int, ...]) -> None:
    inputs = torch.randn(shape)
    alone = torch.cat([module(sample[None]) for sample in inputs])
    assert torch.allclose(module(inputs), alone, atol=1e-6)
