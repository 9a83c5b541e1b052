from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AlbertConfig, AlbertForPreTraining

from colab_swarm.recipes.masked_lm import (
    ENOUGH,
    LAYER_VALUES,
    SIZES,
    AlbertSize,
    MicroBatch,
    checkpoint_layers,
    fit_memory,
    parameter_count,
    sample_bytes,
)

GIB = 1 << 30
LENGTH = 32
SMALL = AlbertSize(layers=3, hidden=128, heads=2, vocabulary=100, sequence_length=LENGTH)


def model(shape: AlbertSize, layers: int | None = None) -> AlbertForPreTraining:
    torch.manual_seed(0)
    return AlbertForPreTraining(
        AlbertConfig(
            vocab_size=shape.vocabulary,
            embedding_size=128,
            hidden_size=shape.hidden,
            num_hidden_layers=layers or shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=4 * shape.hidden,
            hidden_act="gelu_new",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
        )
    )


def batch(samples: int = 2) -> dict[str, torch.Tensor]:
    tokens = torch.arange(samples * LENGTH).reshape(samples, LENGTH) % SMALL.vocabulary
    present = torch.ones_like(tokens)
    present[0, -4:] = 0  # padding, as in real batches: attention is computed another way without it
    return {
        "input_ids": tokens,
        "attention_mask": present,
        "labels": tokens,
        "sentence_order_label": torch.zeros(samples, dtype=torch.int64),
    }


def kept_values_per_token(trained: AlbertForPreTraining) -> float:
    """What autograd holds between forward and backward pass, each memory counted once, less the parameters."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = trained(**batch()).loss
    own = {parameter.data_ptr() for parameter in trained.parameters()}
    assert loss.requires_grad
    return sum(s.nbytes() for place, s in storages.items() if place not in own) / 4 / (2 * LENGTH)


@pytest.mark.slow
def test_a_layer_keeps_as_many_values_as_the_arithmetic_says() -> None:
    more, fewer = (kept_values_per_token(model(SMALL, layers)) for layers in (5, 3))
    assert (more - fewer) / 2 / SMALL.hidden == pytest.approx(LAYER_VALUES, abs=0.5)


@pytest.mark.slow
def test_checkpointing_gives_the_same_gradients_from_less_memory() -> None:
    plain, saving = model(SMALL), model(SMALL)
    checkpoint_layers(saving)
    assert kept_values_per_token(saving) < kept_values_per_token(plain) - 2 * LAYER_VALUES * SMALL.hidden
    for each in (plain, saving):
        each(**batch()).loss.backward()
    gradients = dict(saving.named_parameters())
    assert gradients.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad)


@pytest.mark.parametrize(
    ("size", "gib", "fit"),
    [
        ("large", 6, MicroBatch(8, True)),
        ("large", 15, MicroBatch(4, False)),  # a T4, with which sahajBERT's volunteers took 4 as well
        ("large", 80, MicroBatch(32, False)),
        ("xlarge", 15, MicroBatch(16, True)),
        ("xlarge", 24, MicroBatch(4, False)),
        ("tiny", 6, MicroBatch(64, False)),
    ],
)
def test_the_micro_batch_follows_the_memory(size: str, gib: int, fit: MicroBatch) -> None:
    assert fit_memory(SIZES[size], gib * GIB) == fit


@pytest.mark.parametrize("size", SIZES)
def test_what_is_chosen_fits_and_more_memory_never_gives_less_speed(size: str) -> None:
    shape, chosen = SIZES[size], []
    for gib in range(6, 200, 2):
        fit = fit_memory(shape, gib * GIB)
        needed = fit.batch_size * sample_bytes(shape, shape.sequence_length, checkpointing=fit.checkpointing)
        assert needed + 24 * parameter_count(shape) < gib * GIB
        chosen.append((not fit.checkpointing, fit.batch_size))
        assert fit.checkpointing or fit.batch_size >= ENOUGH
    assert chosen == sorted(chosen)


def test_a_gpu_that_is_too_small_is_reported() -> None:
    with pytest.raises(ValueError, match=r"2\.0 GiB cannot train .*layers=24"):
        fit_memory(SIZES["xlarge"], 2 * GIB)


@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_counted_as_the_model_has_them(size: str) -> None:
    with torch.device("meta"):
        counted: Any = sum(parameter.numel() for parameter in model(SIZES[size]).parameters())
    assert parameter_count(SIZES[size]) == counted
