"""Parameters as one vector and as a file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from colab_swarm.workunits.weights import Schema


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 3).to(torch.bfloat16))


def test_a_model_goes_through_the_vector_buffers_and_whole_numbers_included() -> None:
    source, target = model(), model()
    source[1].num_batches_tracked.fill_(7)
    source[1].running_var.fill_(0.25)
    nn.init.constant_(source[2].bias, 1.5)
    schema = Schema.of(source)
    values = schema.flatten(source)
    assert values.shape == (schema.numel,) and values.dtype == np.float32
    schema.load(target, values)
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name]), name
    schema.load(target, values - np.float32(0.3))
    assert target[1].num_batches_tracked == 7  # rounded
    np.testing.assert_array_equal(schema.flatten(source), values)  # a copy


def test_the_file_is_safetensors() -> None:
    source = model()
    schema = Schema.of(source)
    values = schema.flatten(source)
    data = schema.encode(values)
    tensors = load(data)
    assert set(tensors) == {name for name, _ in schema.entries}
    assert torch.equal(tensors["0.weight"], source[0].weight)
    np.testing.assert_array_equal(schema.decode(data), values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("1.bias"), "1.bias is missing"),
        (lambda state: state.update({"1.bias": torch.zeros(3)}), r"1.bias has shape \(3,\), \(2,\) expected"),
        (lambda state: state.update({"more": torch.zeros(3)}), "more is no tensor of this model"),
        (lambda state: state.update({"1.bias": torch.zeros(2, dtype=torch.float64)}), "other types"),
    ],
)
def test_another_models_file_is_refused_with_the_difference(change: object, message: str) -> None:
    source = model()
    schema = Schema.of(source)
    state = {name: value.float() for name, value in source.state_dict().items()}
    change(state)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        schema.decode(save(state))


@given(st.binary(max_size=300), st.integers(0, 400))
def test_garbled_files_are_refused(noise: bytes, place: int) -> None:
    schema = Schema((("a", (3,)), ("b", ())))
    good = schema.encode(np.arange(4, dtype=np.float32))
    for data in (noise, good[:place], good + noise):
        if data != good:
            with pytest.raises(ValueError):
                schema.decode(data)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(torch.zeros(2, dtype=torch.complex64), "complex"), (torch.tensor([1 << 25]), "integers beyond")],
)
def test_values_that_float32_cannot_tell_are_refused(wrong: torch.Tensor, message: str) -> None:
    module = nn.Linear(1, 1)
    module.register_buffer("wrong", wrong)
    with pytest.raises(ValueError, match=message):
        Schema.of(module)


class Masked(nn.Module):
    """A model with a buffer, such as attention has."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)


def test_masks_of_truth_values_travel() -> None:
    model, other = (
        Masked(torch.ones(3, 3, dtype=torch.bool).tril()),
        Masked(torch.zeros(3, 3, dtype=torch.bool)),
    )
    schema = Schema.of(model)
    schema.load(other, schema.flatten(model))
    assert torch.equal(model.mask, other.mask)


def test_values_that_are_not_finite_are_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"mask .* not finite.*persistent=False"):
        Schema.of(Masked(torch.full((3, 3), float("-inf")).triu(1)))


@pytest.mark.parametrize("name", ["\\ud800", "x" * 100_000])
def test_a_strangers_tensor_names_are_reported_short_and_printable(name: str) -> None:
    schema = Schema((("weight", (2,)),))
    head = f'{{"weight":{{"shape":[2]}},"{name}":{{"shape":[]}}}}'
    with pytest.raises(ValueError) as caught:
        schema.decode(len(head).to_bytes(8, "little") + head.encode())
    assert str(caught.value).isascii() and len(str(caught.value)) < 400
