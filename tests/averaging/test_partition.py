from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.averaging.group import CHUNK_BYTES, Span, chunk_values, cut_chunks, join_spans, plan_spans
from colab_swarm.net.peers import MAX_PAYLOAD_BYTES
from colab_swarm.tensors.codecs import CODECS, codec_of

names = st.sampled_from([*CODECS, "topk:0.0001", "topk:0.01", "topk:0.5"])
shares = st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(lambda s: sum(s) > 0)


@given(st.integers(0, 1 << 40), shares)
@settings(max_examples=100)
def test_spans_tile_the_vector_and_idle_members_get_none(numel: int, shares: list[float]) -> None:
    spans = plan_spans(numel, shares)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == numel
    assert all(span.numel == 0 for span, share in zip(spans, shares, strict=True) if share == 0)
    assert all(span.numel >= 0 for span in spans)


def test_equal_shares_give_equal_spans() -> None:
    assert plan_spans(10, [1, 1]) == [Span(0, 5), Span(5, 10)]
    assert plan_spans(9, [1, 0, 2]) == [Span(0, 3), Span(3, 3), Span(3, 9)]


@pytest.mark.parametrize("shares", [[], [0, 0], [1, -1], [float("nan")], [float("inf")]])
def test_senseless_shares_are_named(shares: list[float]) -> None:
    with pytest.raises(ValueError, match="shares must be >= 0"):
        plan_spans(10, shares)


@given(st.integers(0, 1000), st.integers(0, 200_000), names, names)
@settings(max_examples=100)
def test_chunks_tile_their_span_and_fit_a_frame(start: int, numel: int, codec: str, mean_codec: str) -> None:
    span, values = Span(start, start + numel), chunk_values(codec, mean_codec)
    chunks = cut_chunks(span, values)
    assert join_spans(chunks) == ((span,) if numel else ())
    assert all((chunk.start - start) % 4096 == 0 for chunk in chunks)
    assert max(codec_of(name).encoded_bytes(values) for name in (codec, mean_codec)) <= CHUNK_BYTES
    assert 4 * values <= MAX_PAYLOAD_BYTES  # as recovery sends it
