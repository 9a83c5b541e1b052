"""Compression on the way to the reducers and back: each member's own choice, measured, fed back."""

import numpy as np
import pytest

from colab_swarm.averaging import exchange as module
from colab_swarm.averaging.exchange import Round
from colab_swarm.averaging.group import Span, chunk_values, cut_chunks
from colab_swarm.averaging.messages import Chunk
from colab_swarm.net.peers import Buffer
from colab_swarm.tensors import codecs
from tests.averaging.swarm import NAMES, Outcome, run_round

FINE = 4 * codecs.BLOCK_VALUES
NUMEL = 64 * codecs.BLOCK_VALUES


def test_adaptive_sends_small_tensors_finer_than_large_ones() -> None:
    outcome = run_round(numel=NUMEL, codec="adaptive", fine=FINE)
    got, wanted = outcome.assert_equal_vectors(), outcome.mean()
    np.testing.assert_allclose(got[:FINE], wanted[:FINE], atol=4e-3)
    assert 4e-3 < np.abs(got[FINE:] - wanted[FINE:]).max() < 0.05
    fine = codecs.codec_of("float16").encoded_bytes(NUMEL)
    coarse = codecs.codec_of("int8").encoded_bytes(NUMEL)
    for result in outcome.results.values():
        assert 1.5 * coarse < result.sent_bytes < 1.5 * fine


def test_an_assistant_that_does_not_know_the_tensors_sends_their_means_as_float16() -> None:
    outcome = run_round(4, NUMEL, codec="adaptive", assistants=["dave"], fine=FINE)
    outcome.assert_equal_vectors()
    start, stop = outcome.spans["dave"]
    assert outcome.results["dave"].sent_bytes == 3 * 2 * (stop - start)


def test_an_unknown_codec_costs_its_sender_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt, encoded = [], Round.encoded

    def spoil(own: Round, reducer: int, index: int, chunk: Span) -> tuple[Chunk, Buffer]:
        message, payload = encoded(own, reducer, index, chunk)
        if own.me == 0:
            spoilt.append(index)
            message = Chunk(index, codec="zip")
        return message, payload

    monkeypatch.setattr(Round, "encoded", spoil)
    outcome = run_round()
    assert spoilt
    assert all(len(result.contributors) == 3 for result in outcome.results.values())


@pytest.mark.parametrize("codec", ["int8", "onebit", "sparseloco", "topk:0.1"])
def test_a_contribution_that_the_codec_refuses_costs_its_sender_the_round_and_no_time(codec: str) -> None:
    outcome = run_round(numel=NUMEL, codec=codec, prepare=lambda given: given["alice"].fill(np.inf))
    assert all(len(result.contributors) == 3 for result in outcome.results.values())
    assert max(outcome.seconds.values()) < 5 and len(outcome.results) == 4
    outcome.assert_equal_vectors()


def as_sent(codec: str, outcome: Outcome, name: str) -> codecs.Floats:
    """A contribution as others decode it."""
    one, values = codecs.codec_of(codec), outcome.contributions[name]
    chunks = [
        cut for span in outcome.spans.values() for cut in cut_chunks(span, chunk_values(codec, "float16"))
    ]
    decoded = [one.decode(one.encode(values[cut.start : cut.stop]), cut.numel) for cut in sorted(chunks)]
    return np.concatenate(decoded)


@pytest.mark.parametrize(("codec", "smaller"), [("sparseloco", 10.0), ("topk:0.01", 8.0)])
def test_the_mean_of_sparse_contributions_is_exact_and_sparse(codec: str, smaller: float) -> None:
    feedback = codecs.ErrorFeedback(NUMEL)
    outcome = run_round(8, NUMEL, codec=codec, feedbacks={"alice": feedback}, weights=[1.0] * 8)
    got, sent = outcome.assert_equal_vectors(), [as_sent(codec, outcome, name) for name in NAMES]
    np.testing.assert_allclose(got, np.mean(sent, axis=0), rtol=2**-10, atol=2**-25)
    assert 0 < np.count_nonzero(got) < 8 * 0.016 * NUMEL
    feedback.settle()
    np.testing.assert_array_equal(feedback.residual, outcome.contributions["alice"] - sent[0])
    dense = 2 * NUMEL * 2 * 7 / 8  # float16 to seven reducers, and to seven members
    assert all(smaller * result.sent_bytes < dense for result in outcome.results.values())


def test_a_damaged_sparse_mean_costs_its_reducer_the_span(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt, drop = [], module.drop_zeros

    def spoil(halves: Buffer) -> bytes:
        spoilt.append(len(halves))
        return drop(halves) if len(spoilt) > 1 else b"\xff" * 20

    monkeypatch.setattr(module, "drop_zeros", spoil)
    outcome = run_round(numel=NUMEL, codec="sparseloco")
    (liar,) = [name for name, result in outcome.results.items() if not result.spans_lost]
    span = slice(*outcome.spans[liar])
    wanted = Outcome(
        outcome.names, outcome.weights, {name: as_sent("sparseloco", outcome, name) for name in outcome.names}
    ).mean(*(name for name in outcome.names if name != liar))
    del outcome.vectors[liar]  # it believes its mean
    got = outcome.assert_equal_vectors()
    np.testing.assert_allclose(got[span], wanted[span], rtol=1e-6, atol=1e-7)
    assert spoilt and np.count_nonzero(got[span]) < 0.05 * len(got[span])  # recovered from sparse vectors
