"""A state as hashed chunks; how they are fetched: `tests.training.test_state`."""

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import StateError
from colab_swarm.net.peers import MAX_PAYLOAD_BYTES
from colab_swarm.tensors import chunks


@given(st.integers(0, chunks.MAX_STATE_BYTES))
def test_any_state_up_to_the_limit_has_chunks_that_fit_in_a_message(size_bytes: int) -> None:
    assert chunks.CHUNK_BYTES <= chunks.chunk_bytes(size_bytes) <= MAX_PAYLOAD_BYTES
    assert -(-size_bytes // chunks.chunk_bytes(size_bytes)) <= 4096


@given(st.binary(max_size=99), st.integers(-5, 2**40), st.integers(-5, 2**50), st.integers(250, 260))
def test_an_inconsistent_manifest_is_refused(digests: bytes, size: int, step: int, letters: int) -> None:
    try:
        manifest = chunks.Manifest.decode(msgspec.msgpack.encode([b"u" * letters, step, size, digests]))
    except StateError:
        return
    assert len(digests) == 32 * manifest.chunks and 0 <= step < 2**48 and letters <= 256


def test_chunks_tile_the_blob_and_have_its_hashes() -> None:
    blob = np.random.default_rng(0).integers(0, 256, 3 * chunks.CHUNK_BYTES + 5, np.uint8)
    whole = chunks.Snapshot.of(b"", 1, blob)
    assert [whole.manifest.length(chunk) for chunk in range(4)] == [chunks.CHUNK_BYTES] * 3 + [5]
    assert b"".join(whole.chunks.values()) == blob.tobytes()
    assert chunks.Manifest.decode(whole.head) == whole.manifest
    assert all(chunks.digest_of(piece) == digest for digest, piece in whole.chunks.items())
