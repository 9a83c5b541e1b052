"""The model's buffers and the swarm's copies of them."""

import numpy as np
import pytest
import torch

from colab_swarm.training.buffers import Buffers


def norm_of(mean: list[float]) -> torch.nn.BatchNorm1d:
    norm = torch.nn.BatchNorm1d(2)
    norm.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    norm.register_buffer("scratch", torch.ones(2), persistent=False)
    norm.running_mean = torch.tensor(mean)
    return norm


def test_saved_buffers_of_numbers_count_and_no_masks_or_scratch() -> None:
    buffers = Buffers(norm_of([0.0, 0.0]))
    assert buffers.names == ["running_mean", "running_var", "num_batches_tracked"]
    assert buffers.numel == 5
    assert Buffers(None).numel == 0 and not Buffers(None).live


def test_a_change_is_written_since_the_last_mean_and_0_where_it_is_not_finite() -> None:
    norm = norm_of([1.0, 2.0])
    buffers = Buffers(norm)
    norm.running_mean += torch.tensor([0.5, float("nan")])
    norm.num_batches_tracked += 3
    change = np.empty(5, np.float32)
    buffers.write_change(change)
    assert change.tolist() == [0.5, 0.0, 0.0, 0.0, 3.0]


def test_a_mean_changes_the_shared_buffers_and_the_model_only_when_it_is_shown() -> None:
    norm = norm_of([1.0, 2.0])
    buffers = Buffers(norm)
    buffers.add(np.array([0.5, 0.0, 0.0, 0.0, 2.6], np.float32))
    assert norm.running_mean.tolist() == [1.0, 2.0]
    buffers.show()
    assert norm.running_mean.tolist() == [1.5, 2.0]
    assert norm.num_batches_tracked == 3, "a count stays whole"


def test_without_a_new_mean_the_model_keeps_its_own_buffers() -> None:
    norm = norm_of([1.0, 2.0])
    buffers = Buffers(norm)
    norm.running_mean += 1.0
    buffers.show()
    assert norm.running_mean.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("size", [4, 6])
def test_a_vector_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="flat vector of 5 values"):
        Buffers(norm_of([0.0, 0.0])).add(np.zeros(size, np.float32))
