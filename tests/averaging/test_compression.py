"""Compression on the way to the reducers and back: each member's own choice, measured, fed back."""

from __future__ import annotations

import numpy as np
import pytest

import colab_swarm as cs
from colab_swarm.averaging.exchange import Chunk, Exchange, Sending
from colab_swarm.averaging.partition import Span
from colab_swarm.net.peers import Buffer
from colab_swarm.swarm import Swarm
from colab_swarm.tensors.codecs import BLOCK_VALUES, Float16, Int8, Precision
from tests.averaging.swarm import NAMES, run_round, vector
from tests.training.toy import join_training, loss_of, model

FINE = 4 * BLOCK_VALUES
NUMEL = 64 * BLOCK_VALUES


def test_adaptive_sends_small_tensors_finer_than_large_ones() -> None:
    sendings = {name: Sending(fine=FINE) for name in NAMES[:4]}
    outcome = run_round(numel=NUMEL, codec="adaptive", sendings=sendings)
    got, wanted = outcome.assert_equal_vectors(), outcome.mean()
    np.testing.assert_allclose(got[:FINE], wanted[:FINE], atol=4e-3)
    assert 4e-3 < np.abs(got[FINE:] - wanted[FINE:]).max() < 0.05
    fine, coarse = Float16().encoded_bytes(NUMEL), Int8().encoded_bytes(NUMEL)
    for result in outcome.results.values():
        assert 1.5 * coarse < result.sent_bytes < 1.5 * fine


def test_an_assistant_that_does_not_know_the_tensors_sends_their_means_as_float16() -> None:
    sendings = {name: Sending(fine=FINE) for name in NAMES[:3]}
    outcome = run_round(4, NUMEL, codec="adaptive", assistants=["dave"], sendings=sendings)
    outcome.assert_equal_vectors()
    start, stop = outcome.spans["dave"]
    assert outcome.results["dave"].sent_bytes == 3 * 2 * (stop - start)


def test_a_member_may_send_less_than_the_group_has_agreed() -> None:
    sendings = {"bob": Sending(precision="int8")}
    outcome = run_round(codec="float16", sendings=sendings)
    np.testing.assert_allclose(outcome.assert_equal_vectors(), outcome.mean(), atol=0.05)
    assert len(outcome.results["bob"].contributors) == 4
    assert outcome.results["bob"].sent_bytes < 0.8 * outcome.results["alice"].sent_bytes


def test_a_codec_that_nobody_knows_costs_its_sender_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt, encoded = [], Exchange._encoded

    def spoil(exchange: Exchange, index: int, chunk: Span) -> tuple[Chunk, Buffer]:
        message, payload = encoded(exchange, index, chunk)
        if exchange.me == 0:
            spoilt.append(index)
            message = Chunk(index, codec="zip")
        return message, payload

    monkeypatch.setattr(Exchange, "_encoded", spoil)
    outcome = run_round()
    assert spoilt
    assert all(len(result.contributors) == 3 for result in outcome.results.values())


@pytest.mark.parametrize(("codec", "least", "most"), [("float32", 0, 0), ("int8", 1e-3, 0.02)])
def test_the_error_of_compression_is_measured(codec: str, least: float, most: float) -> None:
    for result in run_round(codec=codec).results.values():
        assert least <= result.compression_error <= most


def test_the_residual_is_exactly_what_the_codec_cut_off() -> None:
    residual = np.zeros(NUMEL, np.float32)
    outcome = run_round(numel=NUMEL, codec="int8", sendings={"alice": Sending(residual=residual)})
    own, (start, stop) = vector(0, NUMEL), outcome.spans["alice"]
    assert not residual[start:stop].any()  # nothing is cut off what does not travel
    start, stop = outcome.spans["bob"]
    sent = own[start:stop]
    arrived = Int8().decode(Int8().encode(sent), len(sent))
    np.testing.assert_array_equal(residual[start:stop], sent - arrived)


def test_error_feedback_adds_what_was_cut_off_to_the_next_gradient() -> None:
    def train(swarm: Swarm) -> tuple[float, float]:
        net = model()
        optimizer = join_training(swarm, net, codec="int8", error_feedback=True)
        loss_of(net, 0).backward()
        while optimizer.step(samples=10) is None:
            loss_of(net, 0).backward()
        residual = optimizer._gathered._residual
        assert residual is not None
        return float(np.abs(optimizer._gathered._sum).sum()), float(np.abs(residual).sum())

    with cs.simulate(2, network="lan", seed=1) as sim:
        for carried, cut_off in sim.run(train).values():
            assert carried > 0 and cut_off > 0


def test_an_unknown_precision_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="float16, bfloat16, int8, adaptive"):
        Precision("zip")
