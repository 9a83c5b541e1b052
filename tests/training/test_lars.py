from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from colab_swarm.training.layerwise import Lars


def reference(
    weight: NDArray[Any], gradients: list[NDArray[Any]], lr: float, decay: float, clip: bool
) -> NDArray[Any]:
    """The algorithm line by line, in float64; momentum 0.9, trust 0.001, as apex has it before SGD."""
    m = np.zeros_like(weight)
    for g in gradients:
        norm = np.linalg.norm(weight)
        ratio = 1e-3 * norm / (np.linalg.norm(g) + decay * norm + 1e-8)
        if clip:
            ratio = min(ratio / lr, 1)
        m = 0.9 * m + ratio * (g + decay * weight)
        weight = weight - lr * m
    return weight


def run(
    weight: Any, gradients: list[Any], kind: type[torch.optim.Optimizer] = Lars, **options: Any
) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.tensor(weight, dtype=torch.float64))
    optimizer = kind([parameter], **options)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return parameter.detach()


def test_first_step_equals_the_one_worked_out_by_hand() -> None:
    # |w| = 5, |g| = 10, r = 0.2 * 5 / (10 + 0.5 * 5) = 0.08; g + 0.5 w = (7.5, 10)
    # w - 2 * 0.08 * (7.5, 10) = (1.8, 2.4).
    moved = run([3.0, 4.0], [[6.0, 8.0]], lr=2.0, weight_decay=0.5, trust=0.2)
    assert moved.tolist() == pytest.approx([1.8, 2.4], abs=1e-8)


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("lr", [4.8, 0.002, 0.0002])  # LARC clips never, at some steps, always
def test_many_steps_equal_the_algorithm_of_the_paper(lr: float, clip: bool, decay: float) -> None:
    rng = np.random.default_rng(0)
    weight, gradients = rng.normal(size=(4, 3)), list(rng.normal(size=(20, 4, 3)))
    moved = run(weight, gradients, lr=lr, weight_decay=decay, clip=clip)
    np.testing.assert_allclose(moved.numpy(), reference(weight, gradients, lr, decay, clip), rtol=1e-12)


def test_larc_with_a_large_trust_is_plain_sgd() -> None:
    rng = np.random.default_rng(1)
    weight, gradients = rng.normal(size=(4, 3)), list(rng.normal(size=(20, 4, 3)))
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    moved = run(weight, gradients, trust=1e9, clip=True, **options)
    torch.testing.assert_close(moved, run(weight, gradients, torch.optim.SGD, **options))


def test_a_zero_weight_takes_the_plain_gradient() -> None:
    moved = run([0.0, 0.0], [[2.0, -3.0]], lr=0.1, weight_decay=0.5)
    assert moved.tolist() == pytest.approx([-0.2, 0.3])


def test_a_zero_gradient_moves_nothing() -> None:
    assert run([1.0, 2.0], [[0.0, 0.0]], lr=0.1, weight_decay=0.5).tolist() == [1.0, 2.0]


def test_a_frozen_group_gathers_no_momentum() -> None:
    still, moving = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Lars([{"params": [still], "lr": 0.0}, {"params": [moving]}], lr=0.1, trust=0.1)
    (still.sum() + moving.sum()).backward()
    optimizer.step()
    assert still.tolist() == [1.0, 1.0] and still not in optimizer.state
    assert moving.tolist() == pytest.approx([0.99, 0.99])


def test_a_half_precision_norm_does_not_overflow() -> None:
    weight = torch.nn.Parameter(torch.full((4096,), 2000.0, dtype=torch.float16))
    optimizer = Lars([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.tolist() == pytest.approx([1998.0] * 4096)  # |w| = 128,000, |g| = 64


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Lars([weight])

    def closure() -> float:
        loss = (weight * 3).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert weight.item() < 1


def test_a_sparse_gradient_is_refused_before_anything_moves() -> None:
    table = torch.nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    optimizer = Lars(table.parameters())
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"lr": float("nan")}, {"momentum": 1.0}, {"trust": float("inf")}]
)
def test_an_argument_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Lars([torch.nn.Parameter(torch.ones(1))], **wrong)
