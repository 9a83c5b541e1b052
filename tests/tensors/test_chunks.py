"""A state as one blob and as hashed chunks; how they are fetched: `tests.training.test_state`."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import StateError
from colab_swarm.net.peers import MAX_PAYLOAD_BYTES
from colab_swarm.sim import LAN, SimNetwork
from colab_swarm.tensors import chunks


def test_every_type_of_tensor_is_aligned_and_comes_back() -> None:
    some = torch.tensor([True]), torch.rand(3).bfloat16(), torch.arange(3), torch.empty(0), torch.tensor(0.5)
    state = dict(zip("abcde", some, strict=True))
    layout, blob = chunks.pack(state)
    again = chunks.unpack(layout, blob)
    assert again.keys() == state.keys() and blob.nbytes == 4 * chunks.ALIGNMENT_BYTES
    assert all(torch.equal(state[key], again[key]) and state[key].dtype == again[key].dtype for key in state)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_state_that_is_not_finite_is_refused(kind: torch.dtype, value: float) -> None:
    with pytest.raises(StateError, match=r"NaN or infinite values in 'weight'"):
        chunks.unpack(*chunks.pack({"weight": torch.tensor([1.0, value], dtype=kind)}))


@pytest.mark.parametrize(
    "lie",
    [
        *({"shape": (10**9,)}, {"shape": (-1,)}, {"shape": (50,)}, {"shape": (100, *[1] * 64)}),
        *({"kind": "object"}, {"kind": "load"}, {"name": "another"}),
    ],
)
def test_a_layout_that_lies_about_its_tensors_is_refused(lie: dict[str, object]) -> None:
    layout, blob = chunks.pack({"weight": torch.rand(100)})
    whole = msgspec.msgpack.decode(layout, type=chunks.Layout)
    entry = {**dict(zip(("name", "kind", "shape"), whole.tensors[0], strict=True)), **lie}
    with pytest.raises(StateError):
        chunks.unpack(msgspec.msgpack.encode(chunks.Layout(whole.skeleton, (tuple(entry.values()),))), blob)


def test_an_empty_tensor_of_an_impossible_shape_and_one_that_is_named_twice_are_refused() -> None:
    empty = chunks.Layout(b'{"tensor":"w"}', (("w", "float32", (0, 2**64 - 1)),))
    with pytest.raises(StateError, match="invalid tensor 'w'"):
        chunks.unpack(msgspec.msgpack.encode(empty), np.zeros(0, np.uint8))
    layout, blob = chunks.pack({"weight": torch.rand(16)})
    whole = msgspec.msgpack.decode(layout, type=chunks.Layout)
    twice = msgspec.msgpack.encode(chunks.Layout(whole.skeleton, whole.tensors * 2))
    with pytest.raises(StateError, match="twice"):
        chunks.unpack(twice, np.concatenate([blob, blob]))


def test_a_state_shorter_or_longer_than_its_layout_is_refused() -> None:
    layout, blob = chunks.pack({"a": torch.rand(16), "b": torch.rand(16)})
    assert chunks.unpack(layout, blob).keys() == {"a", "b"}
    for other in (blob[:-3], blob[:64], np.pad(blob, (0, 1))):
        with pytest.raises(StateError, match="than its layout says"):
            chunks.unpack(layout, other)


@given(st.binary(max_size=200))
def test_an_arbitrary_layout_raises_only_state_error(layout: bytes) -> None:
    with pytest.raises(StateError):
        chunks.unpack(layout, np.zeros(256, np.uint8))


@given(st.integers(0, chunks.MAX_STATE_BYTES))
def test_any_state_up_to_the_limit_has_chunks_that_fit_in_a_message(size_bytes: int) -> None:
    assert chunks.CHUNK_BYTES <= chunks.chunk_bytes(size_bytes) <= MAX_PAYLOAD_BYTES
    assert -(-size_bytes // chunks.chunk_bytes(size_bytes)) <= 4096


@given(st.binary(max_size=99), st.integers(-5, 2**40), st.integers(-5, 2**50), st.integers(250, 260))
def test_an_inconsistent_manifest_is_refused(digests: bytes, size: int, step: int, letters: int) -> None:
    try:
        manifest = chunks.Manifest.decode(msgspec.msgpack.encode([b"u" * letters, step, b"", size, digests]))
    except StateError:
        return
    assert len(digests) == 32 * manifest.chunks and 0 <= step < 2**48 and letters <= 256


def test_chunks_tile_the_blob_and_have_its_hashes() -> None:
    blob = np.random.default_rng(0).integers(0, 256, 3 * chunks.CHUNK_BYTES + 5, np.uint8)
    whole = chunks.Snapshot.of(b"", 1, b"", blob)
    assert [whole.manifest.length(chunk) for chunk in range(4)] == [chunks.CHUNK_BYTES] * 3 + [5]
    assert b"".join(whole.chunks.values()) == blob.tobytes()
    assert chunks.Manifest.decode(whole.head) == whole.manifest
    assert all(chunks.digest_of(piece) == digest for digest, piece in whole.chunks.items())


class Ask(chunks.FetchChunks, frozen=True):
    pass


async def test_chunks_that_are_missing_here_come_from_honest_donors() -> None:
    blob = np.random.default_rng(0).integers(0, 256, 3 * chunks.CHUNK_BYTES + 5, np.uint8)
    whole, network = chunks.Snapshot.of(b"", 1, b"", blob), SimNetwork(LAN, seed=0)
    alice, *donors = map(network.peer, ("alice", "bob", "mallory"))
    network.introduce()
    for donor, has in zip(donors, (whole, chunks.Snapshot(whole.manifest, np.zeros_like(blob))), strict=True):
        donor.serve_stream(Ask, lambda ask, stream, has=has: chunks.send_chunks(ask, stream, has.read))
    download, digests = chunks.ChunkDownload(alice, whole.manifest, Ask), [*whole.chunks]
    download.fill({digests[0]: bytes(whole.chunks[digests[0]]), digests[1]: b"short"}.get)
    with pytest.raises(StateError, match="3 of 4 chunks did not arrive"):
        await download.run([donors[1].id])
    await download.run(donor.id for donor in donors)
    assert np.array_equal(download.blob, blob) and download.used == {donors[0].id}
