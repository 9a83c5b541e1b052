"""How tensors are cut for the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.moe.messages import PART_BYTES, encoded, spans
from colab_swarm.tensors.codecs import CODECS


@given(st.sampled_from(list(CODECS)), st.integers(0, 1_000_000))
def test_spans_tile_a_tensor_and_fit_into_a_part(codec: str, numel: int) -> None:
    found = list(spans(numel, CODECS[codec]))
    assert [span.start for span in found] == [0, *(span.stop for span in found)][: len(found)]
    assert not found or found[-1].stop == numel
    assert all(0 < CODECS[codec].encoded_bytes(span.stop - span.start) <= PART_BYTES for span in found)


@pytest.mark.parametrize("codec", CODECS)
def test_parts_hold_what_spans_announce(codec: str) -> None:
    values = np.random.default_rng(0).standard_normal((70, 1001), np.float32)
    parts = list(encoded(values, CODECS[codec]))
    lengths = [span.stop - span.start for span in spans(values.size, CODECS[codec])]
    assert [len(part) for part in parts] == [CODECS[codec].encoded_bytes(length) for length in lengths]
    decoded = [CODECS[codec].decode(part, length) for part, length in zip(parts, lengths, strict=True)]
    assert np.abs(np.concatenate(decoded).reshape(values.shape) - values).max() < 0.05
