"""Parameters as one vector and as a file, and equation 1 of the VC-ASGD paper."""

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from colab_swarm.workunits.weights import PIECE, Floats, Schema, assimilate


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
    tensors = load(data := schema.encode(values))
    assert set(tensors) == {name for name, _ in schema.entries}
    assert torch.equal(tensors["0.weight"], source[0].weight)  # the file is safetensors
    np.testing.assert_array_equal(schema.decode(data), values)


NORMAL = np.random.default_rng(0).normal(size=5000).astype(np.float32)
NOISE = np.frombuffer(np.random.default_rng(0).bytes(20_000), np.float32)


@pytest.mark.parametrize(("values", "share"), [(NORMAL, 0.93), (0 * NORMAL, 0.93), (NOISE, 1.0)])
def test_a_packed_file_is_smaller_if_it_can_be_and_unpacks_bit_for_bit(values: Floats, share: float) -> None:
    schema = Schema((("w", (5000,)),))
    file = schema.head() + values.tobytes()
    packed = schema.pack(memoryview(file))
    assert len(packed) <= share * len(file)
    assert schema.unpack(packed) == schema.unpack(file) == file


def test_packed_files_that_are_garbled_or_of_another_size_are_refused_before_they_fill_memory() -> None:
    schema = Schema.of(nn.Linear(100, 50))
    packed = schema.pack(schema.encode(np.zeros(schema.numel, np.float32)))
    # a frame whose head says 1 TiB
    bomb = zstandard.FRAME_HEADER + b"\xe0" + (1 << 40).to_bytes(8, "little") + packed[8:]
    other = zstandard.ZstdCompressor().compress(b"another file")
    for wrong in (bomb, other, packed[:-5], packed[:5]):
        with pytest.raises(ValueError, match=r"expected|no compressed parameters"):
            schema.unpack(wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("1.bias"), r"^lacks 1.bias \(2,\)$"),
        (lambda state: state.update({"1.bias": torch.zeros(3)}), r"^lacks 1.bias \(2,\), has 1.bias \(3,\)$"),
        (lambda state: state.update({"more": torch.zeros(3)}), r"^has more \(3,\)$"),
        (lambda state: state.update({"1.bias": torch.zeros(2, dtype=torch.float64)}), "other types"),
    ],
)
def test_another_models_file_is_refused_with_the_difference(change: object, message: str) -> None:
    schema = Schema.of(source := model())
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
    [
        (torch.zeros(2, dtype=torch.complex64), "complex"),
        (torch.tensor([(1 << 24) + 1]), "as integers"),
        (torch.full((3, 3), float("-inf")).triu(1), r"mask .* not finite.*persistent=False"),
    ],
)
def test_values_that_no_float32_or_no_result_may_have_are_refused(wrong: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schema.of(Masked(wrong))


class Masked(nn.Module):
    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)


def test_masks_of_truth_values_travel() -> None:
    model = Masked(torch.ones(3, 3, dtype=torch.bool).tril())
    other = Masked(torch.zeros(3, 3, dtype=torch.bool))
    schema = Schema.of(model)
    schema.load(other, schema.flatten(model))
    assert torch.equal(model.mask, other.mask)
    assert Schema.of(Masked(torch.tensor([1 << 24]))).numel == 1


@pytest.mark.parametrize("name", ["\\ud800", "x" * 100_000])
def test_a_strangers_tensor_names_are_reported_short_and_printable(name: str) -> None:
    schema = Schema((("weight", (2,)),))
    head = f'{{"weight":{{"shape":[2]}},"{name}":{{"shape":[]}}}}'
    with pytest.raises(ValueError) as caught:
        schema.decode(len(head).to_bytes(8, "little") + head.encode())
    assert str(caught.value).isascii() and len(str(caught.value)) < 400


def test_an_update_weighs_by_alpha_and_changes_nothing_in_place() -> None:
    server, result = np.random.default_rng(1).normal(size=(2, PIECE + 3)).astype(np.float32)
    before = server.copy()
    np.testing.assert_array_equal(assimilate(server, result, 0.0), result)
    np.testing.assert_array_equal(server, before)
    np.testing.assert_array_equal(assimilate(server, server, 0.95), server)
    np.testing.assert_allclose(assimilate(server, result, 0.7), 0.7 * server + 0.3 * result, atol=1e-6)
