"""How tensors are cut for the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.moe.calls import PART_BYTES, encoded, spans
from colab_swarm.tensors.codecs import CODECS, codec_of

NAMES = [*CODECS, "topk:0.0001", "topk:0.01", "topk:0.5"]


@given(st.sampled_from(NAMES), st.integers(0, 1_000_000))
def test_spans_tile_a_tensor_and_fit_into_a_part(name: str, numel: int) -> None:
    codec = codec_of(name)
    found = list(spans(numel, codec))
    assert [span.start for span in found] == [0, *(span.stop for span in found)][: len(found)]
    assert not found or found[-1].stop == numel
    assert all(0 < codec.encoded_bytes(span.stop - span.start) <= PART_BYTES for span in found)


@pytest.mark.parametrize("name", NAMES)
def test_parts_hold_what_spans_announce(name: str) -> None:
    codec = codec_of(name)
    values = np.random.default_rng(0).standard_normal((70, 1001), np.float32)
    parts = list(encoded(values, codec))
    lengths = [span.stop - span.start for span in spans(values.size, codec)]
    assert [len(part) for part in parts] == [codec.encoded_bytes(length) for length in lengths]
    decoded = [codec.decode(part, length) for part, length in zip(parts, lengths, strict=True)]
    lost = np.concatenate(decoded) - values.ravel()
    assert np.linalg.norm(lost) ** 2 <= codec.gamma(values.size) * np.linalg.norm(values) ** 2 + 1e-6
