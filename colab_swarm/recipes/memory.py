"""How many samples fit a GPU, and how to make more of them fit.

What training of ALBERT keeps in memory, in float32 values (H hidden size, N layers, V vocabulary, P parameters):

- 6 P: parameters, gradient, LAMB's two moments, the swarm's accumulated gradient and its copy under way;
- per token and layer 28 H for the backward pass: 8 H of the layer's input, queries, keys, values, attention and layer
  norms, and 20 H of the feed-forward part, 4 H wide, of which ``gelu_new`` keeps five stages;
- per token 3 V: logits, their softmax, and the gradient of it.

With checkpointing a layer keeps only its input, H per token, and one layer at a time is computed again. The count
of 28 H is what autograd keeps: the test asks it. Autocast to half precision needs less.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from colab_swarm.recipes.albert import AlbertSize

VALUE_BYTES = 4
STATE_COPIES = 6
LAYER_VALUES = 28
VOCABULARY_VALUES = 3
RESERVED_BYTES = 1 << 30
"""CUDA's context, kernels and work space."""
USABLE = 0.85
"""Share of the memory that fragmentation leaves."""
ENOUGH = 4
"""Samples at once that keep a GPU busy: with so many, computing every layer twice would only cost time."""
MOST = 64


@dataclass(frozen=True)
class Fit:
    """How to train on one GPU: samples at once, and whether to compute layers twice to save memory."""

    batch_size: int
    checkpointing: bool


def fit_memory(size: AlbertSize, memory_bytes: int, *, sequence_length: int | None = None) -> Fit:
    """The micro-batch for a GPU, a power of two: without checkpointing if `ENOUGH` samples fit, else with it.

    Args:
        size: of the model.
        memory_bytes: of the whole GPU.
        sequence_length: tokens of a sample; None for the size's own.

    Raises:
        ValueError: not even one sample fits.
    """
    length = sequence_length or size.sequence_length
    room = USABLE * memory_bytes - RESERVED_BYTES - STATE_COPIES * VALUE_BYTES * parameter_count(size)
    plain, saving = (int(room // sample_bytes(size, length, checkpointing=twice)) for twice in (False, True))
    checkpointing = plain < ENOUGH
    fitting = min(saving if checkpointing else plain, MOST)
    if fitting < 1:
        raise ValueError(
            f"a GPU with {memory_bytes / 2**30:.1f} GiB cannot train {size}: take a smaller size or shorter samples"
        )
    return Fit(1 << (fitting.bit_length() - 1), checkpointing)


def sample_bytes(size: AlbertSize, sequence_length: int, *, checkpointing: bool) -> int:
    """Memory that one more sample in a micro-batch takes while it is trained on."""
    layers = LAYER_VALUES + size.layers if checkpointing else LAYER_VALUES * size.layers
    return sequence_length * VALUE_BYTES * (layers * size.hidden + VOCABULARY_VALUES * size.vocabulary)


def parameter_count(size: AlbertSize) -> int:
    """Parameters of an ALBERT for pretraining: embeddings, one layer that all share, and three heads."""
    hidden, embedding = size.hidden, 128
    embeddings = (size.vocabulary + 512 + 2 + 2) * embedding + (embedding + 1) * hidden
    layer = 4 * (hidden + 1) * hidden + 8 * hidden * hidden + 5 * hidden + 4 * hidden
    heads = (hidden + 1) * hidden + (hidden + 3) * embedding + size.vocabulary + 2 * (hidden + 1)
    return embeddings + layer + heads


def checkpoint_layers(model: Any) -> None:
    """Let an ALBERT compute its layers again in the backward pass; `transformers` does not offer it for ALBERT."""
    for group in model.albert.encoder.albert_layer_groups:
        group.forward = functools.partial(checkpoint, group.forward, use_reentrant=False)
