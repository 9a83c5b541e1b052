from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.averaging.exchange import LEAD, STALL_S, Pace


def test_a_small_span_waits_for_a_large_one() -> None:
    pace = Pace({1: 2, 2: 100}, now=0.0)
    pace.on_chunk(1, 0, now=0.0)
    assert not pace.may_send(1, now=0.0)
    for index in range(49):
        assert pace.may_send(2, now=0.0)
        assert pace.on_chunk(2, index, now=0.0) == (index < 49)
    assert pace.may_send(1, now=0.0)


def test_a_reducer_that_takes_nothing_is_waited_for_a_moment_only() -> None:
    pace = Pace({1: 100, 2: 100}, now=0.0)
    for index in range(2):
        assert pace.may_send(1, now=0.5)
        pace.on_chunk(1, index, now=0.5)
    assert not pace.may_send(1, now=0.5)
    assert pace.may_send(1, now=STALL_S)


def test_a_reducer_that_is_gone_is_not_waited_for() -> None:
    pace = Pace({1: 100, 2: 100}, now=0.0)
    for index in range(6):
        pace.on_chunk(1, index, now=0.0)
    pace.on_over(2)
    assert pace.may_send(1, now=0.0)


def test_empty_spans_delay_no_stream() -> None:
    pace = Pace({1: 0, 2: 3}, now=0.0)
    for index in range(3):
        assert pace.may_send(2, now=0.0)
        pace.on_chunk(2, index, now=0.0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 1 << 32))
def test_one_stream_may_always_send_and_none_runs_ahead(counts: list[int], seed: int) -> None:
    rng, sent = random.Random(seed), dict.fromkeys(range(len(counts)), 0)
    pace = Pace(dict(enumerate(counts)), now=0.0)
    while unfinished := [reducer for reducer, index in sent.items() if index < counts[reducer]]:
        allowed = [reducer for reducer in unfinished if pace.may_send(reducer, now=0.0)]
        reducer = rng.choice(allowed)  # an empty list would raise: deadlock
        pace.on_chunk(reducer, sent[reducer], now=0.0)
        sent[reducer] += 1
        last = min(sent[other] / counts[other] for other in sent)
        assert sent[reducer] / counts[reducer] <= last + LEAD + 1 / counts[reducer] + 1e-9
