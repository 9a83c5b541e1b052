from __future__ import annotations

import numpy as np
import pytest
import torch

from colab_swarm.training.replica import FlatVector


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))]


def test_gradients_add_up_by_weight_and_absent_ones_count_as_zero() -> None:
    first, second = parameters()
    flat, total = FlatVector([first, second]), np.zeros(10, np.float32)
    first.grad = torch.arange(6.0).view(2, 3)
    assert flat.accumulate(total, 2.0)
    second.grad = torch.full((4,), 0.5, dtype=torch.bfloat16)
    assert flat.accumulate(total, 3.0)
    np.testing.assert_array_equal(total, [0, 5, 10, 15, 20, 25, 1.5, 1.5, 1.5, 1.5])


def test_a_gradient_that_is_not_finite_adds_nothing() -> None:
    first, second = parameters()
    flat, total = FlatVector([first, second]), np.zeros(10, np.float32)
    first.grad, second.grad = torch.ones(2, 3), torch.full((4,), float("nan"), dtype=torch.bfloat16)
    assert not flat.accumulate(total, 1.0)
    assert not total.any()


def test_a_flat_vector_becomes_gradients_in_the_parameters_own_dtype() -> None:
    first, second = parameters()
    FlatVector([first, second]).to_gradients(np.arange(10, dtype=np.float32))
    assert first.grad is not None and first.grad.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.grad is not None and second.grad.dtype == torch.bfloat16
    assert second.grad.tolist() == [6, 7, 8, 9]


def test_another_model_has_another_schema() -> None:
    first, second = parameters()
    assert FlatVector([first, second]).schema == FlatVector(parameters()).schema
    assert FlatVector([first, second]).schema != FlatVector([second, first]).schema


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="flat vector of 10 values"):
        FlatVector(parameters()).to_gradients(np.zeros(9, np.float32))
