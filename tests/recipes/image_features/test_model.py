from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from colab_swarm.recipes.image_features.model import Swav, SwavHead, balance
from colab_swarm.recipes.image_features.recipe import SIZES, resnet_config


def reference(scores_BK: NDArray[Any], epsilon: float, iterations: int) -> NDArray[Any]:
    """The listing of the SwAV paper, appendix A, line by line, in float64."""
    q_KB = np.exp(scores_BK / epsilon).T
    q_KB /= q_KB.sum()
    k, b = q_KB.shape
    for _ in range(iterations):
        q_KB /= q_KB.sum(axis=1, keepdims=True) * k
        q_KB /= q_KB.sum(axis=0, keepdims=True) * b
    return (q_KB * b).T


def small(**head: Any) -> Swav:
    torch.manual_seed(0)
    return Swav(resnet_config(SIZES["tiny"]), SwavHead(16, 8, 4, **{"queue": 0, **head}))


def crops(seed: int = 0, batch: int = 6, views: int = 2, side: int = 32) -> torch.Tensor:
    return torch.randn(batch, views, 3, side, side, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("iterations", [1, 3, 10])
def test_assignments_equal_those_of_the_paper(iterations: int) -> None:
    scores = np.random.default_rng(0).uniform(-1, 1, size=(12, 5))
    ours = balance(torch.tensor(scores), epsilon=0.05, iterations=iterations)
    np.testing.assert_allclose(ours.numpy(), reference(scores, 0.05, iterations), rtol=1e-3, atol=1e-6)


def test_assignments_are_balanced() -> None:
    scores = torch.rand(40, 8, generator=torch.Generator().manual_seed(0))
    assigned = balance(scores, epsilon=0.05, iterations=100)
    torch.testing.assert_close(assigned.sum(dim=1), torch.ones(40))
    torch.testing.assert_close(assigned.sum(dim=0), torch.full((8,), 5.0), rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_tiny_epsilon_neither_overflows_nor_divides_by_zero(dtype: torch.dtype) -> None:
    scores = torch.tensor([[1.0, -1.0], [1.0, -1.0], [1.0, 0.9]], dtype=dtype)
    assigned = balance(scores, epsilon=1e-4, iterations=3)
    assert assigned.dtype == torch.float32 and assigned.isfinite().all()
    torch.testing.assert_close(assigned.sum(dim=1), torch.ones(3))


@pytest.mark.slow
def test_the_loss_is_the_mean_over_swapped_predictions() -> None:
    model = small()
    large, little = crops(), crops(1, views=1, side=24)
    output = model(large, little)
    scores = [
        torch.nn.functional.normalize(model.projection(model.embed(x.transpose(0, 1).flatten(0, 1))))
        @ torch.nn.functional.normalize(model.prototypes).T
        for x in (large, little)
    ]
    first, second, third = *scores[0].chunk(2), scores[1]
    q1, q2 = (balance(s.detach(), epsilon=0.05, iterations=3) for s in (first, second))
    pairs = [(q1, second), (q1, third), (q2, first), (q2, third)]
    expected = sum(torch.nn.functional.cross_entropy(s / 0.1, q) for q, s in pairs) / 4
    torch.testing.assert_close(output.loss, expected)


def test_the_length_of_prototypes_does_not_matter() -> None:
    model = small()
    with torch.no_grad():
        before = model(crops()).loss
        model.prototypes.mul_(torch.tensor([[0.1], [2.0], [3.0], [5.0]]))
        torch.testing.assert_close(model(crops()).loss, before)


def test_the_queue_counts_once_it_is_full_and_its_step_has_come() -> None:
    model, plain = small(queue=12, queue_from_step=5), small()
    losses = [model(crops(seed), step=step).loss for seed, step in enumerate([0, 5, 4, None, 5])]
    alone = [plain(crops(seed)).loss for seed in range(5)]
    assert [bool(a == b) for a, b in zip(losses, alone, strict=True)] == [True, True, True, True, False]


def test_the_queue_grows_in_training_only_and_is_not_saved() -> None:
    model = small(queue=12)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.eval()(crops(), step=0)
    assert model._queue_VQD == []
    model.train()
    for seed in range(3):
        model(crops(seed), step=0)
    assert [tuple(queue.shape) for queue in model._queue_VQD] == [(12, 8), (12, 8)]
    assert model.state_dict().keys() == state.keys()


def test_who_predicts_all_prototypes_alike_has_the_logarithm_of_their_number() -> None:
    model = small()
    with torch.no_grad():
        model.prototypes.fill_(1.0)
        assert model(crops()).loss.item() == pytest.approx(math.log(4))
