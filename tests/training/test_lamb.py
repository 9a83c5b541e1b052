from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from colab_swarm.training.layerwise import Lamb


def reference(
    weight: NDArray[Any], gradients: list[NDArray[Any]], lr: float, decay: float, clamp: float
) -> NDArray[Any]:
    """You et al. 2020, Algorithm 2, line by line, in float64; betas (0.9, 0.999), eps 1e-6."""
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for t, g in enumerate(gradients, start=1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        r = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + decay * weight
        trust = min(np.linalg.norm(weight), clamp) / np.linalg.norm(r)
        weight = weight - lr * trust * r
    return weight


def run(weight: Any, gradients: list[Any], **options: Any) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.tensor(weight, dtype=torch.float64))
    optimizer = Lamb([parameter], **options)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return parameter.detach()


@pytest.mark.slow
def test_first_step_equals_the_one_worked_out_by_hand() -> None:
    # w = (3, 4), |w| = 5. After bias correction m^ = g and v^ = g^2, so r = g / |g| = (1, -1), |r| = sqrt(2).
    # trust = 5 / sqrt(2) = 3.5355339; w - 0.1 * 3.5355339 * (1, -1) = (2.64644661, 4.35355339).
    moved = run([3.0, 4.0], [[0.5, -0.25]], lr=0.1, eps=0.0)
    assert moved.tolist() == pytest.approx([2.64644661, 4.35355339], abs=1e-8)


def test_first_step_without_bias_correction_equals_the_one_worked_out_by_hand() -> None:
    # m = 0.1 g = (0.1, 0.1), v = 0.001 g^2, sqrt(v) = 0.0316228; m / sqrt(v) = (3.1622777, 3.1622777)
    # r = that + 0.5 w = (4.6622777, 5.1622777)
    # |w| = 5, |r| = 6.9560163, trust = 0.7188022; w - 0.1 * trust * r = (2.6648745, 3.6289344).
    moved = run([3.0, 4.0], [[1.0, 1.0]], lr=0.1, eps=0.0, weight_decay=0.5, bias_correction=False)
    assert moved.tolist() == pytest.approx([2.6648745, 3.6289344], abs=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("clamp", [1e4, 0.5])
def test_many_steps_equal_the_algorithm_of_the_paper(decay: float, clamp: float) -> None:
    rng = np.random.default_rng(0)
    weight, gradients = rng.normal(size=(4, 3)), list(rng.normal(size=(20, 4, 3)))
    moved = run(weight, gradients, lr=0.01, weight_decay=decay, clamp=clamp)
    np.testing.assert_allclose(moved.numpy(), reference(weight, gradients, 0.01, decay, clamp), rtol=1e-12)


def test_a_zero_weight_moves_by_the_plain_adam_step() -> None:
    assert run([0.0, 0.0], [[2.0, -3.0]], lr=0.1, eps=0.0).tolist() == pytest.approx([-0.1, 0.1])


def test_a_zero_gradient_moves_nothing() -> None:
    assert run([1.0, 2.0], [[0.0, 0.0]], lr=0.1).tolist() == [1.0, 2.0]


def test_a_parameter_without_gradient_is_left_alone() -> None:
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Lamb([used, unused])
    used.sum().backward()
    optimizer.step()
    assert unused not in optimizer.state
    assert unused.tolist() == [1.0, 1.0] != used.tolist()


def test_groups_keep_their_own_settings() -> None:
    still, moving = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Lamb([{"params": [still], "lr": 0.0}, {"params": [moving]}], lr=0.1)
    (still.sum() + moving.sum()).backward()
    optimizer.step()
    assert still.tolist() == [1.0, 1.0]
    assert moving.tolist() == pytest.approx([0.9, 0.9])


def test_a_half_precision_norm_does_not_overflow() -> None:
    weight = torch.nn.Parameter(torch.full((4096,), 2000.0, dtype=torch.float16))
    optimizer = Lamb([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.tolist() == pytest.approx([1984.4] * 4096, abs=1)  # |w| = 128,000 is clamped to 10,000


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Lamb([weight])

    def closure() -> float:
        loss = (weight * 3).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert weight.item() < 1


def test_a_sparse_gradient_is_refused_before_anything_moves() -> None:
    table = torch.nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    optimizer = Lamb(table.parameters())
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -1.0}, {"lr": float("nan")}, {"eps": -1e-8}, {"betas": (1.0, 0.9)}, {"clamp": float("inf")}],
)
def test_an_argument_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Lamb([torch.nn.Parameter(torch.ones(1))], **wrong)
