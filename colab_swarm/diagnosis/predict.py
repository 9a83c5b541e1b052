"""What training will be like, worked out before it begins. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PARAMETER_BYTES = 16
"""Memory per parameter where it is trained: itself, its gradient and two moments, in float32."""
STATE_BYTES = 12
"""What a newcomer downloads per parameter: itself and two moments, in float32."""
USABLE = 0.8
"""Share of free memory to plan with; the rest is for temporaries and fragments."""
ROUND_TRIPS = 2
"""A round forms and begins within so many round trips."""
MAX_MICRO_BATCH = 512
DEAD_BPS = 1.0
"""What a line carries at least, for the arithmetic."""


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        parameters: count of the model's trained values.
        micro_batch: samples of one forward and backward pass.
        target_batch_size: samples of all peers together for one global step.
        value_bytes: bytes of one value on the wire, by the codec.
    """

    parameters: int
    micro_batch: int
    target_batch_size: int
    value_bytes: float


@dataclass(frozen=True)
class Line:
    """This peer's way to the others: bits per second and seconds; infinite and 0 where nothing is known."""

    upload_bps: float = math.inf
    download_bps: float = math.inf
    rtt_s: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """What will happen.

    Attributes:
        first_sample_s: from now to this peer's first counted sample.
        samples_per_s: this peer's speed.
        swarm_samples_per_s: all peers' speed while they compute.
        step_s: time of a global step, the averaging included.
        averaging_s: the averaging's part of it.
        gb_per_hour: sent and received by this peer together.
        share: this peer's part of a step's samples, 0 to 1.
    """

    first_sample_s: float
    samples_per_s: float
    swarm_samples_per_s: float
    step_s: float
    averaging_s: float
    gb_per_hour: float
    share: float


def predict(
    work: Workload, samples_per_s: float, others: Sequence[float], line: Line, *, reduces: bool = True
) -> Prediction:
    """Predict a training with equal averaging shares (DeDLOC, section 3.1 and 3.2).

    With n peers, S samples/s of all together, a target batch of B samples and micro-batches of m::

        step      = (B + n m) / S + averaging              each peer finishes the micro-batch it is at
        averaging = 2 rtt + max(sent / upload, received / download)
        sent      = received = 2 (n - 1) / n * vector      reducers; others send and receive the vector once
        vector    = parameters * bytes of a value

    A peer alone averages nothing, and its step takes the micro-batches that fill B.

    Args:
        work: what is trained.
        samples_per_s: this peer's measured speed, > 0.
        others: speeds of the other trainers.
        line: this peer's way to them; the others' lines are taken to be no slower.
        reduces: whether this peer takes a share of the averaging, for which others must be able to reach it.
    """
    peers, total = 1 + len(others), samples_per_s + sum(others)
    moved_bytes = averaging_s = state_s = 0.0
    batch = float(math.ceil(work.target_batch_size / work.micro_batch) * work.micro_batch)
    if others:
        batch = work.target_batch_size + peers * work.micro_batch
        moved_bytes = work.parameters * work.value_bytes * (2 * (peers - 1) / peers if reduces else 1)
        download_bps = max(line.download_bps, DEAD_BPS)
        slowest_bps = min(max(line.upload_bps, DEAD_BPS), download_bps)
        averaging_s = ROUND_TRIPS * line.rtt_s + 8 * moved_bytes / slowest_bps
        state_s = ROUND_TRIPS * line.rtt_s + 8 * work.parameters * STATE_BYTES / download_bps
    step_s = batch / total + averaging_s
    return Prediction(
        first_sample_s=state_s + work.micro_batch / samples_per_s,
        samples_per_s=samples_per_s,
        swarm_samples_per_s=total,
        step_s=step_s,
        averaging_s=averaging_s,
        gb_per_hour=2 * moved_bytes * 3600 / step_s / 1e9,
        share=samples_per_s / total,
    )


@dataclass(frozen=True)
class Needs:
    """Memory that a model wants: per parameter and, kept for the backward pass, per sample.

    Attributes:
        name: for people, such as "ALBERT-large at 512 tokens".
        parameters: count of its trained values.
        sample_bytes: kept for the backward pass of one sample.
    """

    name: str
    parameters: int
    sample_bytes: float


def micro_batch(free_bytes: float, needs: Needs) -> int:
    """The largest power of two (at most 512) whose training fits into ``free_bytes``; 0 if no sample does."""
    room_bytes = USABLE * free_bytes - PARAMETER_BYTES * needs.parameters
    fitting = min(int(room_bytes / needs.sample_bytes), MAX_MICRO_BATCH)
    return 1 << (fitting.bit_length() - 1) if fitting > 0 else 0


def albert_needs(name: str, *, layers: int, hidden: int, vocabulary: int, length: int) -> Needs:
    """What an ALBERT in float32 wants; layers share their parameters, embeddings have 128 axes.

    Kept for the backward pass: 28 values per token, layer and hidden unit (counted with torch's saved-tensor hooks:
    16 of them in the four times wider feed-forward part), and 3 per token and word of the vocabulary.
    """
    embedding = 128
    embeddings = embedding * (vocabulary + 512 + 2 + 2) + embedding * hidden + hidden
    layer = 12 * hidden**2 + 13 * hidden
    heads = hidden**2 + hidden + hidden * embedding + 3 * embedding + vocabulary + 2 * hidden + 2
    sample_bytes = 4 * length * (28 * hidden * layers + 3 * vocabulary)
    return Needs(f"ALBERT-{name} at {length} tokens", embeddings + layer + heads, sample_bytes)
