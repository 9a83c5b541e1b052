"""What a trainer and an expert's host say to each other.

A call is one stream. The trainer opens it, sends its tensors in parts (at backward: inputs, then gradients) and keeps
its end open until it is answered: a stream that ends or breaks before takes the call back. The host answers with one
tensor of the same shape, or with one part that says it is busy, or refuses.
"""

from __future__ import annotations

from collections.abc import Iterator

from colab_swarm.net.peers import Message
from colab_swarm.tensors.codecs import BLOCK_VALUES, MAX_BLOCKS, Buffer, Codec, Floats

PART_BYTES = 120 << 10


class CallExpert(Message, frozen=True):
    """Calls an expert with tensors of shape (samples, *shape), encoded by ``codec``."""

    uid: str
    samples: int
    shape: tuple[int, ...]
    codec: str


class ForwardExpert(CallExpert, frozen=True):
    """Asks for outputs; one tensor follows."""


class BackwardExpert(CallExpert, frozen=True):
    """Asks for gradients w.r.t. inputs, and lets the expert learn; two tensors follow: inputs, gradients."""


class Part(Message, frozen=True):
    """Consecutive values of a tensor, in the payload; or, with ``busy_s``: ask again in so many seconds."""

    busy_s: float | None = None


def spans(numel: int, codec: Codec) -> Iterator[slice]:
    """Which values each part of a tensor holds: whole blocks of the codec, `MAX_BLOCKS` or `PART_BYTES` at most."""
    step = min(PART_BYTES // codec.encoded_bytes(BLOCK_VALUES), MAX_BLOCKS) * BLOCK_VALUES
    return (slice(start, min(start + step, numel)) for start in range(0, numel, step))


def encoded(values: Floats, codec: Codec) -> Iterator[Buffer]:
    """The parts of a tensor; they may share its memory."""
    flat = values.reshape(-1)
    return (codec.encode(flat[span]) for span in spans(flat.size, codec))
