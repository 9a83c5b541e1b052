import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.averaging.group import Span, cut_chunks
from colab_swarm.averaging.reducer import SpanReducer
from colab_swarm.tensors.codecs import Floats

CHUNKS = cut_chunks(Span(100, 110), 4)


def reducer(*weights: float) -> SpanReducer:
    return SpanReducer(CHUNKS, weights, np.full(10, np.nan, np.float32))


def full(chunk: int, value: float) -> Floats:
    return np.full(CHUNKS[chunk].numel, value, np.float32)


def test_chunks_finish_with_the_last_awaited_contribution_and_have_the_weighted_mean() -> None:
    r = reducer(1, 3, 0)
    assert r.awaited() == [0, 1]
    assert not r.on_chunk(2, 0, full(0, 9.0))  # of no weight
    assert not r.on_chunk(0, 0, full(0, 4.0))
    assert not r.on_chunk(0, 0, full(0, 9.0))  # comes twice
    assert r.on_chunk(1, 0, full(0, 8.0))
    np.testing.assert_array_equal(r.mean(0), full(0, 7.0))
    assert r.missing(0) == () and r.unfinished == {1, 2}
    r.on_chunk(0, 1, full(1, 1.0))
    assert r.drop(1) == [1]
    assert r.on_chunk(0, 2, full(2, 1.0))
    assert [r.mean(chunk)[0] for chunk in range(3)] == [7.0, 1.0, 1.0]
    assert [r.missing(chunk) for chunk in range(3)] == [(), (1,), (1,)]


def test_a_contribution_over_the_bound_is_refused() -> None:
    r = SpanReducer(CHUNKS, [1, 1], np.empty(10, np.float32), most_rms=20.0)
    r.on_chunk(0, 0, full(0, 20.0))
    with pytest.raises(ValueError, match="far too large: 21"):
        r.on_chunk(1, 0, full(0, 21.0))
    assert r.drop(1) == [0] and r.largest_rms == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("chunk", "length", "value"),
    [(0, 4, np.nan), (0, 4, np.inf), (2, 4, 1.0), (3, 4, 1.0), (-1, 2, 1.0), (0, 2, 1.0)],
)
def test_invalid_chunks_are_refused_and_change_nothing(chunk: int, length: int, value: float) -> None:
    r = reducer(1, 1)
    with pytest.raises(ValueError, match="chunk"):
        r.on_chunk(0, chunk, np.full(length, value, np.float32))
    r.on_chunk(1, 0, full(0, 2.0))
    assert r.drop(0) == [0]
    np.testing.assert_array_equal(r.mean(0), full(0, 2.0))


def test_huge_values_and_weights_do_not_overflow() -> None:
    r = reducer(9e8, 9e8)
    r.on_chunk(0, 0, full(0, 3e38))
    r.on_chunk(1, 0, full(0, 2e38))
    np.testing.assert_allclose(r.mean(0), full(0, 2.5e38), rtol=1e-6)


@given(st.integers(0, 10**6), st.lists(st.just(0.0) | st.floats(1e-9, 1e9), min_size=1, max_size=6))
@settings(max_examples=100)
def test_any_order_of_contributions_and_losses_finishes_with_the_mean_of_the_arrived(
    seed: int, weights: list[float]
) -> None:
    rng, r = random.Random(seed), reducer(*weights)
    events = [(m, c) for m in range(len(weights)) for c in (0, 1, 2, None)]
    rng.shuffle(events)
    r.finished()
    arrived: dict[int, list[int]] = {0: [], 1: [], 2: []}
    gone: set[int] = set()
    for member, chunk in events:
        if chunk is None:
            gone.add(member)
            r.drop(member)
        else:
            r.on_chunk(member, chunk, full(chunk, member))
            arrived[chunk] += [member] if member not in gone and weights[member] > 0 else []
    assert not r.unfinished
    for chunk, members in arrived.items():
        total = sum(weights[m] for m in members)
        expected = sum(m * weights[m] for m in members) / total if members else None
        mean = r.mean(chunk)
        assert (mean is None) == (expected is None)
        assert mean is None or mean[0] == pytest.approx(expected, rel=1e-5, abs=1e-6)
