"""The arithmetic of the doctor's prediction and of its memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.notebook.checks import (
    PARAMETER_BYTES,
    USABLE,
    Needs,
    UplinkFacts,
    Workload,
    albert_needs,
    micro_batch,
    predict,
)

WORK = Workload(parameters=1_000_000, micro_batch=8, target_batch_size=256, value_bytes=2)
HOME = UplinkFacts(upload_bps=20e6, download_bps=100e6, rtt_s=0.05)


def test_two_equal_peers_take_half_of_a_step_each() -> None:
    found = predict(WORK, 10.0, (10.0,), HOME)
    assert found.share == 0.5
    assert found.averaging_s == pytest.approx(
        2 * 0.05 + 8 * 2e6 / 20e6
    )  # 2 (n-1)/n of 2 MB, at the slower way
    assert found.step_s == pytest.approx((256 + 2 * 8) / 20 + found.averaging_s)
    assert found.gb_per_hour == pytest.approx(2 * 2e6 * 3600 / found.step_s / 1e9)


def test_a_late_joiner_first_downloads_the_state() -> None:
    found = predict(WORK, 10.0, (10.0,), HOME)
    assert found.first_sample_s == pytest.approx(0.1 + 12e6 * 8 / 100e6 + 8 / 10)


def test_a_peer_alone_moves_nothing_and_fills_the_batch_by_itself() -> None:
    found = predict(Workload(1_000, micro_batch=10, target_batch_size=96, value_bytes=4), 10.0, (), HOME)
    assert (found.step_s, found.averaging_s, found.gb_per_hour, found.share) == (10.0, 0.0, 0.0, 1.0)


def test_a_peer_that_only_dials_out_sends_its_vector_once() -> None:
    reducer = predict(WORK, 10.0, (10.0,) * 9, HOME)
    dialler = predict(WORK, 10.0, (10.0,) * 9, HOME, reduces=False)
    assert (reducer.averaging_s - 0.1) / (dialler.averaging_s - 0.1) == pytest.approx(2 * 9 / 10)


@settings(deadline=None)
@given(
    st.floats(0, 1e12), st.floats(0, 1e12), st.lists(st.floats(0.01, 1e4), max_size=50), st.floats(0.01, 1e4)
)
def test_any_bandwidth_gives_finite_predictions(
    upload_bps: float, download_bps: float, others: list[float], own: float
) -> None:
    found = predict(WORK, own, tuple(others), UplinkFacts(upload_bps, download_bps, 0.1))
    assert 0 < found.step_s < math.inf
    assert 0 < found.first_sample_s < math.inf
    assert 0 < found.share <= 1


@settings(deadline=None)
@given(st.floats(0, 1e12), st.integers(1, 10**9), st.floats(1e3, 1e9))
def test_the_suggested_micro_batch_fits_and_twice_as_much_does_not(
    free_bytes: float, parameters: int, sample_bytes: float
) -> None:
    size = micro_batch(free_bytes, Needs("model", parameters, sample_bytes))
    room_bytes = USABLE * free_bytes - PARAMETER_BYTES * parameters
    assert size * sample_bytes <= max(room_bytes, 0)
    assert size == 512 or max(2 * size, 1) * sample_bytes > room_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "base"])
def test_the_needs_of_an_albert_are_those_of_the_model_itself(name: str) -> None:
    import torch
    from transformers import AlbertConfig, AlbertForPreTraining

    from colab_swarm.notebook.machine import _saved_bytes
    from colab_swarm.recipes.masked_lm import SIZES

    size, words, length = SIZES[name], 100, 64  # few words: their part depends on when torch frees them
    found = albert_needs(name, layers=size.layers, hidden=size.hidden, vocabulary=words, length=length)
    config = AlbertConfig(
        vocab_size=words,
        embedding_size=128,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        hidden_act="gelu_new",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids_BL = torch.randint(0, words, (2, length))
    order_B = torch.zeros(2, dtype=torch.long)
    batch = {"input_ids": ids_BL, "labels": ids_BL, "sentence_order_label": order_B}
    model = AlbertForPreTraining(config)
    saved_bytes, samples = _saved_bytes(model, batch)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.sample_bytes == pytest.approx(saved_bytes / samples, rel=0.25)
