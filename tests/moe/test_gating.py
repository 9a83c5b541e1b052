from __future__ import annotations

import torch

from colab_swarm.moe.layer import Gating, mixing_weights, priorities


def test_a_priority_is_the_sum_of_its_indices_scores() -> None:
    gating, x = Gating(3, (2, 5)), torch.randn(4, 3)
    scores = gating(x)
    assert [tuple(score.shape) for score in scores] == [(4, 2), (4, 5)]
    indices = torch.tensor([[1, 3], [0, 4]]).expand(4, 2, 2)
    expected = torch.stack([scores[0][:, 1] + scores[1][:, 3], scores[0][:, 0] + scores[1][:, 4]], 1)
    assert torch.equal(priorities(scores, indices), expected)


def test_weights_sum_to_one_over_the_answers() -> None:
    answered = torch.tensor([[True, False, True], [True, True, True]])
    weights = mixing_weights(torch.tensor([[1.0, 9.0, 1.0], [0.0, 0.0, 0.0]]), answered)
    assert torch.allclose(weights, torch.tensor([[0.5, 0.0, 0.5], [1 / 3, 1 / 3, 1 / 3]]))


def test_without_answers_weights_and_gradients_are_zero() -> None:
    values = torch.randn(1, 3, requires_grad=True)
    weights = mixing_weights(values, torch.zeros(1, 3, dtype=torch.bool))
    weights.sum().backward()
    assert not weights.any() and values.grad is not None and not values.grad.any()
