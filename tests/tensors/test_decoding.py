"""Every processor decodes the same bytes to the same bits, so that equal means are equal parameters.

Encoding is not compared so: it rounds sums, which differ in the last bit from processor to processor. Where
a value lies between two codes, either is right.
"""

import hashlib

import numpy as np
import pytest

from colab_swarm.tensors.codecs import BLOCK_VALUES, codec_of
from colab_swarm.tensors.sparse import pack_12

NUMEL = 40 * BLOCK_VALUES + 1000
RNG_SEED = 0


def floats(rng: np.random.Generator, count: int) -> bytes:
    return ((rng.random(count, np.float32) - np.float32(0.5)) * np.float32(1000)).tobytes()


def sixteen_bits(rng: np.random.Generator, *, exponent: int) -> bytes:
    """Any bits but those whose exponent means infinity or NaN."""
    bits = rng.integers(0, 1 << 16, NUMEL, dtype=np.uint16)
    return np.where(bits & exponent == exponent, 0, bits).astype(np.uint16).tobytes()


def int8_bytes(rng: np.random.Generator) -> bytes:
    scales = rng.random(NUMEL // BLOCK_VALUES + 1, np.float32)
    levels = rng.integers(-127, 128, NUMEL, dtype=np.int8)
    return scales.tobytes() + levels.tobytes()


def onebit_bytes(rng: np.random.Generator) -> bytes:
    means = rng.random((NUMEL // BLOCK_VALUES + 1, 2), np.float32) * np.float32([1, -1])
    return means.tobytes() + rng.bytes(-(-NUMEL // 8))


def sparseloco_bytes(rng: np.random.Generator) -> bytes:
    blocks = [BLOCK_VALUES] * (NUMEL // BLOCK_VALUES) + [NUMEL % BLOCK_VALUES]
    kept = [size // 64 if size == BLOCK_VALUES else size // 128 * 2 for size in blocks]
    chosen = [
        np.sort(rng.choice(size, count, replace=False)) for size, count in zip(blocks, kept, strict=True)
    ]
    return floats(rng, 4) + rng.bytes(-(-sum(kept) // 4)) + pack_12(np.concatenate(chosen))


def topk_bytes(rng: np.random.Generator) -> bytes:
    """The choice of the largest compares integers: it is equal on all processors too."""
    values = np.frombuffer(floats(rng, NUMEL), np.float32)
    return bytes(codec_of("topk:0.01").encode(values))


ENCODED = {
    "float32": (lambda rng: floats(rng, NUMEL), "2eef620964558d1c"),
    "float16": (lambda rng: sixteen_bits(rng, exponent=0x7C00), "c67141e0ae41a802"),
    "bfloat16": (lambda rng: sixteen_bits(rng, exponent=0x7F80), "bcded0c1e15c6893"),
    "int8": (int8_bytes, "cb05e284274e3e4c"),
    "onebit": (onebit_bytes, "c5499b64244274bb"),
    "sparseloco": (sparseloco_bytes, "7374024a6f4c71cf"),
    "topk:0.01": (topk_bytes, "578e1db79bd4aea9"),
}


@pytest.mark.parametrize("name", ENCODED)
def test_decoded_bits_are_the_same_on_every_processor(name: str) -> None:
    make, digest = ENCODED[name]
    encoded = make(np.random.default_rng(RNG_SEED))
    decoded = codec_of(name).decode(encoded, NUMEL)
    assert hashlib.blake2b(decoded.tobytes(), digest_size=8).hexdigest() == digest
