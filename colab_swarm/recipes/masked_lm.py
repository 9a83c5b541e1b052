"""ALBERT with the training settings of sahajBERT: model, batches, optimizer, micro-batch, and evaluation.

Memory of training ALBERT, in float32 values (H hidden size, N layers, V vocabulary, P parameters):

- 6 P: parameters, gradient, LAMB's two moments, the accumulated gradient and its copy in a round;
- per token and layer 28 H for the backward pass: 8 H for the layer's input, queries, keys, values,
  attention and layer norms, and 20 H for the feed-forward part, 4 H wide, of which ``gelu_new``
  keeps five stages;
- per token 3 V: logits, their softmax, and the gradient of the softmax.

With checkpointing, a layer keeps only its input, H per token, and one layer at a time is recomputed.
Half precision needs less memory, but the micro-batch is chosen as for float32.

After an evaluation, each module has the mode (training or evaluation) that it had before. Evaluate between two steps,
on the training thread.
"""

import functools
import random
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from colab_swarm.errors import require
from colab_swarm.recipes.batches import (
    IGNORED,
    MIN_WINDOW,
    Collator,
    MixedBatches,
    Sample,
    StreamedBatches,
    TextMix,
    check_sizes,
    peer_seed,
)
from colab_swarm.recipes.text import TextSource, TokenizerSource, load_tokenizer, train_tokenizer
from colab_swarm.training.layerwise import Lamb

if TYPE_CHECKING:
    from transformers import AlbertConfig, AlbertForPreTraining, PreTrainedTokenizerFast

MASK = "[MASK]"
Weights: TypeAlias = Mapping[str, Tensor]
ENGLISH = ("The capital of France is [MASK].", "She went to the [MASK] to buy some bread.")
EXAMPLES = {
    "python-docs": (
        "This function returns a [MASK] of strings.",
        "If the [MASK] is not found, an exception is raised.",
        "A class is a [MASK] of the object.",
    ),
    "bn": ("বাংলাদেশের রাজধানী [MASK]।", "আমি [MASK] খাই।"),
}
"""The questions that are asked by default, by text or language."""
Batches: TypeAlias = MixedBatches | StreamedBatches
MAX_POSITIONS = 512
VALUE_BYTES = 4
LAYER_VALUES = 28
RESERVED_BYTES = 1 << 30  # CUDA's context, kernels and work space
USABLE = 0.85  # fraction of the memory that remains after fragmentation
WITHOUT_GPU_BYTES = 8 << 30  # without a GPU, the micro-batch is chosen for this much memory
ENOUGH = 4  # a micro-batch of this size keeps a GPU busy, so recomputing layers would only take time
MOST = 64


@dataclass(frozen=True)
class AlbertSize:
    """The settings that differ between the sizes. The FFN is four times as wide as a layer; layers share weights."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 32_000
    sequence_length: int = 512


SIZES = {
    "tiny": AlbertSize(layers=2, hidden=128, heads=2, vocabulary=2_000, sequence_length=64),
    "base": AlbertSize(layers=12, hidden=768, heads=12),
    "large": AlbertSize(layers=24, hidden=1024, heads=16),
    "xlarge": AlbertSize(layers=24, hidden=2048, heads=16),
}
"""ALBERT's sizes (Lan et al. 2020, table 1), and a tiny size that learns within a minute on a CPU core."""


def fit_memory(
    size: AlbertSize, memory_bytes: int, *, sequence_length: int | None = None
) -> tuple[int, bool]:
    """Return the largest micro-batch, a power of two, and whether to recompute layers for it.

    If fewer than `ENOUGH` samples fit otherwise, the layers are recomputed, which saves memory.
    """
    length = sequence_length or size.sequence_length
    room = USABLE * memory_bytes - RESERVED_BYTES - 6 * VALUE_BYTES * parameter_count(size)
    plain, saving = (int(room // sample_bytes(size, length, checkpointing=twice)) for twice in (False, True))
    checkpointing = plain < ENOUGH
    fitting = min(saving if checkpointing else plain, MOST)
    if fitting < 1:
        raise ValueError(f"{memory_bytes / 2**30:.1f} GiB cannot train {size}: use a smaller size")
    return 1 << (fitting.bit_length() - 1), checkpointing


def sample_bytes(size: AlbertSize, sequence_length: int, *, checkpointing: bool) -> int:
    if checkpointing:
        layers = LAYER_VALUES + size.layers
    else:
        layers = LAYER_VALUES * size.layers
    return sequence_length * VALUE_BYTES * (layers * size.hidden + 3 * size.vocabulary)


def parameter_count(size: AlbertSize) -> int:
    """Count the parameters of an ALBERT for pretraining: embeddings, one shared layer, and three heads."""
    hidden = size.hidden
    embedding = 128
    embeddings = (size.vocabulary + 512 + 2 + 2) * embedding + (embedding + 1) * hidden
    layer = 4 * (hidden + 1) * hidden + 8 * hidden * hidden + 5 * hidden + 4 * hidden
    heads = (hidden + 1) * hidden + (hidden + 3) * embedding + size.vocabulary + 2 * (hidden + 1)
    return embeddings + layer + heads


def checkpoint_layers(model: Any) -> None:
    """Recompute the layers of an ALBERT in the backward pass; `transformers` has no such option for ALBERT."""
    for group in model.albert.encoder.albert_layer_groups:
        group.forward = functools.partial(checkpoint, group.forward, use_reentrant=False)


@dataclass(frozen=True)
class AlbertSettings:
    """sahajBERT's training settings (DeDLOC, section 4.3); all other settings of `Lamb` have their defaults.

    The public run of sahajBERT had a schedule of 1,000,000 steps and ended after 19,519, so its learning rate hardly
    fell.
    """

    lr: float = 1.76e-3
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    warmup_steps: int = 5_000
    total_steps: int = 125_000
    target_batch_size: int = 4096
    compression: str = "float16"


SETTINGS = {
    "tiny": AlbertSettings(lr=1e-2, warmup_steps=10, total_steps=2_000, target_batch_size=256),
    "base": AlbertSettings(),
    "large": AlbertSettings(),
    "xlarge": AlbertSettings(lr=5e-3, warmup_steps=3_125, total_steps=15_625, target_batch_size=16_384),
}
"""The settings by size. Large is sahajBERT; xlarge has the size of ALBERT's paper, with more samples per step."""


def albert_optimizer(
    model: torch.nn.Module, settings: AlbertSettings | str = "tiny"
) -> tuple[Lamb, LambdaLR]:
    """Return LAMB and its schedule, for ``swarm.optimizer(optimizer, scheduler=scheduler, …)``."""
    if isinstance(settings, str):
        chosen = SETTINGS[settings]
    else:
        chosen = settings
    optimizer = Lamb(parameter_groups(model, chosen.weight_decay), lr=chosen.lr)

    def share(step: int) -> float:
        if step < chosen.warmup_steps:
            return (step + 1) / chosen.warmup_steps
        return max(0.0, (chosen.total_steps - step) / (chosen.total_steps - chosen.warmup_steps))

    return optimizer, LambdaLR(optimizer, share)


def half_precision(device: torch.device | str) -> tuple[torch.autocast, torch.amp.GradScaler]:
    """Return the autocast and the gradient scaler with which a device trains fastest, for one training loop.

    A GPU up to compute capability 7.5, such as a T4, calculates in float16 with a scaled loss. A newer GPU calculates
    in bfloat16. All other devices calculate in float32. The scaler scales the loss only for float16::

        with autocast:
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer, samples=len(batch["input_ids"]), loss=loss.detach())
        scaler.update()
    """
    place = torch.device(device)
    dtype = torch.float32
    if place.type == "cuda":
        is_newer = torch.cuda.get_device_capability(place) > (7, 5)
        dtype = torch.bfloat16 if is_newer else torch.float16
    autocast = torch.autocast(place.type, dtype, enabled=dtype is not torch.float32)
    return autocast, torch.amp.GradScaler(place.type, enabled=dtype is torch.float16)


def parameter_groups(model: torch.nn.Module, weight_decay: float = 0.01) -> list[dict[str, Any]]:
    """Return two groups for an optimizer: matrices with weight decay; biases and layer norms without."""
    matrices = []
    others = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dim() > 1:
            matrices.append(parameter)
        else:
            others.append(parameter)
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def albert(
    size: str = "tiny",
    *,
    text: TextSource | Mapping[str, float] = "python-docs",
    tokenizer: "TokenizerSource | None" = None,
    language: str = "",
    swarm: Any = None,
    batch_size: int | None = 16,
    sequence_length: int | None = None,
    seed: int = 0,
) -> "tuple[AlbertForPreTraining, Batches]":
    """Return an untrained ALBERT and endless batches for it. Minimize ``model(**batch).loss``.

    Peers with the same ``size``, ``text``, ``tokenizer`` and ``seed`` get equal parameters and
    tokenizers, and read the text in different orders. If their texts differ, pass the same tokenizer at all peers.
    Raises `ValueError` if an argument is out of range, or if the text or the tokenizer cannot be found.

    Args:
        size: ``"tiny"``, ``"base"``, ``"large"`` or ``"xlarge"``.
        text: one source, see `open_text`. Or several sources with weights, such as ``{"wiki/*.jsonl": 0.23,
            "oscar": 0.77}``, which are streamed shard by shard (see `TextMix` and `StreamedBatches`).
        tokenizer: a ``tokenizer.json``, a folder, a hub name or a fast tokenizer; None trains a tokenizer.
        language: language of a tokenizer that is trained here, see `train_tokenizer`.
        swarm: the swarm of this peer. The peer's ``id`` seeds its order of the text, and ``swarm.try_model`` then uses
            this model.
        batch_size: samples of one batch; None: as many as fit this machine's GPU (see `fit_memory`).
        sequence_length: tokens of one sample; None for 64 (tiny) or 512.
        seed: seed of the initial parameters and, together with the peer's id, of the batches.
    """
    require(size in SIZES, f"size={size!r} is none of {', '.join(SIZES)}")
    shape = SIZES[size]
    length = sequence_length or shape.sequence_length
    require(length <= MAX_POSITIONS, f"sequence_length={length}: ALBERT has {MAX_POSITIONS} positions")
    batch_size, checkpointing = _fit_this_machine(batch_size, shape, length)
    if tokenizer is None:
        blocks = TextMix(text, seed=seed).until_read(
            random.Random(seed)
        )  # read in the same order at all peers
        tokenizer = train_tokenizer(blocks, vocabulary=shape.vocabulary, language=language)
    words = load_tokenizer(tokenizer)
    own_seed = peer_seed(seed, swarm.id if swarm else b"")
    stop = threading.Event()
    mix = TextMix(text, seed=own_seed, wait=stop.wait)
    made = MixedBatches(mix, words, batch_size=batch_size, sequence_length=length, seed=own_seed)
    batches: Batches = made
    if isinstance(text, Mapping):
        batches = StreamedBatches(made, stop)
    from transformers import AlbertForPreTraining

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model = AlbertForPreTraining(albert_config(shape, words)).train()
    if checkpointing:
        checkpoint_layers(model)
    probe = getattr(swarm, "probe", None)
    if probe is not None:
        of_text = EXAMPLES.get(text if isinstance(text, str) else "", ENGLISH)
        probe.known = model, words, EXAMPLES.get(language, of_text)
    return model, batches


def _fit_this_machine(batch_size: int | None, shape: AlbertSize, length: int) -> tuple[int, bool]:
    if batch_size is not None:
        return batch_size, False
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        memory_bytes = torch.cuda.get_device_properties(0).total_memory
    else:
        memory_bytes = WITHOUT_GPU_BYTES
    return fit_memory(shape, memory_bytes, sequence_length=length)


def albert_config(shape: AlbertSize, tokenizer: "PreTrainedTokenizerFast") -> "AlbertConfig":
    """Return the `transformers` configuration for a size and a tokenizer; no dropout (ALBERT v2)."""
    from transformers import AlbertConfig

    return AlbertConfig(
        vocab_size=len(tokenizer),
        embedding_size=128,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.hidden,
        hidden_act="gelu_new",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
    )


@dataclass(frozen=True)
class Guess:
    """A token for a masked place, and the probability that the model gives it."""

    token: str
    probability: float

    def __str__(self) -> str:
        return f"{self.token} {self.probability:.0%}"


@dataclass(frozen=True)
class Reply:
    """The likeliest answers for a mask, by the model's first weights (empty if unknown) and by its present weights."""

    question: str
    before: tuple[Guess, ...]
    now: tuple[Guess, ...]


def replies(
    model: nn.Module, tokenizer: "PreTrainedTokenizerFast", question: str, before: Weights | None = None
) -> list[Reply]:
    """Return a reply for each mask; ``before`` are the weights that the model had at first."""
    require(MASK in question, f"{question!r} has no gap: write {MASK} where the model is to fill in a word")
    now = fill_mask(model, tokenizer, question)
    earlier: list[list[Guess]] = [[] for _ in now]
    if before:
        earlier = fill_mask(model, tokenizer, question, weights=before)
    replies = []
    for number, guesses in enumerate(now):
        text = question
        if len(now) > 1:
            text = f"{question} (gap {number + 1})"
        replies.append(Reply(text, tuple(earlier[number]), tuple(guesses)))
    return replies


def fill_mask(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerFast",
    text: str,
    *,
    top: int = 5,
    weights: Weights | None = None,
) -> list[list[Guess]]:
    """Return the ``top`` likeliest tokens per ``[MASK]``. Raises ValueError without a mask, or if scores are NaN."""
    length = getattr(getattr(model, "config", None), "max_position_embeddings", 512)
    text = text.replace(MASK, str(tokenizer.mask_token))
    batch = tokenizer(text, return_tensors="pt", truncation=True, max_length=length)
    masked = batch["input_ids"][0] == tokenizer.mask_token_id
    require(
        masked.any(),
        f"there is no {MASK} in the text, or not within its first {length} tokens, which is all that the model "
        f"reads: {text[:80]!r}",
    )
    scores = token_logits(call(model, weights, **batch))[0].cpu()[masked].float()
    chances, tokens = scores.softmax(-1).topk(min(top, scores.shape[1]))
    require(chances.isfinite().all(), "the model has diverged: go back to an earlier checkpoint")
    guesses = []
    for row_tokens, row_chances in zip(tokens.tolist(), chances.tolist(), strict=True):
        row = zip(row_tokens, row_chances, strict=True)
        guesses.append([Guess(tokenizer.decode([token]).strip(), chance) for token, chance in row])
    return guesses


def masked_loss(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerFast",
    texts: Iterable[str],
    *,
    sequence_length: int = 512,
    batch_size: int = 16,
    seed: int = 0,
) -> float:
    """Return the mean loss per hidden token of held-out text, in nats; its exponential is the perplexity.

    Each text is cut separately into samples of ``sequence_length`` tokens. With the same text, length and seed, the
    same tokens are hidden, so that runs can be compared. Raises `ValueError` if there is too little text.
    """
    check_sizes(batch_size, sequence_length)
    size = sequence_length - 3
    samples: list[Sample] = []
    for text in texts:
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        # the last few tokens of a text are dropped
        for start in range(0, len(tokens) - MIN_WINDOW + 1, size):
            window = tokens[start : start + size]
            half = len(window) // 2
            samples.append((window[:half], window[half:], False))
    require(samples, f"the held-out text is too short: a sample needs {MIN_WINDOW} tokens")
    held_out = Collator(tokenizer, sequence_length, seed)(
        samples
    )  # all samples together, so that the masks do not depend on batch_size
    del held_out["sentence_order_label"]
    total = count = 0.0
    for start in range(0, len(samples), batch_size):
        batch = {name: tensor[start : start + batch_size] for name, tensor in held_out.items()}
        labels = batch.pop("labels").flatten()
        scores = token_logits(call(model, None, **batch)).float().flatten(0, 1).cpu()
        total += nn.functional.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum").item()
        count += int((labels != IGNORED).sum())
    return total / count


def token_logits(output: Any) -> Tensor:
    scores: Tensor = output.prediction_logits if "prediction_logits" in output else output.logits
    return scores


def call(model: nn.Module, weights: Weights | None, **inputs: Tensor) -> Any:
    """Return the model's output in evaluation mode, with ``weights`` or, if None, with its own weights."""
    own = dict(model.named_parameters())
    device = next(model.parameters()).device
    lent = {name: weight.to(own[name].device, own[name].dtype) for name, weight in (weights or {}).items()}
    moved = {name: tensor.to(device) for name, tensor in inputs.items()}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return torch.func.functional_call(model, lent, (), moved)
    finally:
        for module, training in modes:
            module.training = training
