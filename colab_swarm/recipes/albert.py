"""ALBERT as sahajBERT trained it (DeDLOC, section 4.3): the model and endless batches for it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import torch

from colab_swarm.recipes.asking import ENGLISH, EXAMPLES, Askable, MaskedText
from colab_swarm.recipes.memory import Fit, checkpoint_layers, fit_memory
from colab_swarm.recipes.pretraining import PretrainingBatches, peer_seed
from colab_swarm.recipes.streaming import StreamedBatches, TextMix
from colab_swarm.recipes.text import TextSource, open_text, pack
from colab_swarm.recipes.tokenizer import TokenizerSource, load_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from transformers import AlbertConfig, AlbertForPreTraining, PreTrainedTokenizerFast

MAX_POSITIONS = 512
WITHOUT_GPU_BYTES = 8 << 30
"""Where there is no GPU, the micro-batch is chosen as if there were one with so much memory."""

Batches: TypeAlias = PretrainingBatches | StreamedBatches


class HasId(Protocol):
    """All that the recipe wants of a swarm."""

    @property
    def id(self) -> bytes: ...


@runtime_checkable
class Asks(Protocol):
    """A swarm whose user can ask the model, too."""

    def can_ask(self, model: torch.nn.Module, askable: Askable) -> None:
        """From now on it is this model that is asked."""


@dataclass(frozen=True)
class AlbertSize:
    """What differs between the sizes. The FFN is four times as wide as ``hidden``; layers share weights."""

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
"""ALBERT's sizes (Lan et al. 2020, table 1), and a tiny one that learns within a minute on one CPU core."""


def albert(
    size: str = "tiny",
    *,
    text: TextSource | Mapping[str, float] = "python-docs",
    tokenizer: TokenizerSource | None = None,
    language: str = "",
    swarm: HasId | None = None,
    batch_size: int | None = 16,
    sequence_length: int | None = None,
    seed: int = 0,
) -> tuple[AlbertForPreTraining, Batches]:
    """An untrained ALBERT and endless batches for it: ``model(**batch).loss`` is what to minimise.

    Peers that give the same ``size``, ``text``, ``tokenizer`` and ``seed`` hold equal parameters and
    tokenizers; each reads the text in an order of its own. Where texts differ, give all peers one tokenizer.

    Args:
        size: ``"tiny"``, ``"base"``, ``"large"`` or ``"xlarge"``.
        text: see `open_text`; or several sources with their weights, such as ``{"wiki/*.jsonl": 0.23, "oscar":
            0.77}``, which are streamed shard by shard (see `TextMix` and `StreamedBatches`).
        tokenizer: a ``tokenizer.json``, a folder, a hub name or a fast tokenizer; None trains one.
        language: of a tokenizer that is trained here, see `train_tokenizer`.
        swarm: whose ``id`` decides this peer's order, and whose ``try_model`` asks this model; None stands for a peer
            without a name.
        batch_size: samples of one batch; None: what this machine's GPU holds, see `fit_memory`, and if need be with
            a model that computes its layers twice to save memory.
        sequence_length: tokens of one sample; None for 64 (tiny) or 512.
        seed: of the initial parameters and, together with the peer's id, of the batches.

    Raises:
        ValueError: an argument is out of range, or text or tokenizer cannot be found.
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r} is none of {', '.join(SIZES)}")
    shape = SIZES[size]
    length = sequence_length or shape.sequence_length
    if length > MAX_POSITIONS:
        raise ValueError(f"sequence_length={length}: ALBERT has {MAX_POSITIONS} positions")
    fit = _fit_this_machine(shape, length) if batch_size is None else Fit(batch_size, checkpointing=False)
    if tokenizer is None:
        words = train_tokenizer(_first_pass(text, seed), vocabulary=shape.vocabulary, language=language)
    else:
        words = load_tokenizer(tokenizer)
    batches = _batches(text, words, fit.batch_size, length, peer_seed(seed, swarm.id if swarm else b""))
    model = _build(albert_config(shape, words), seed)
    if fit.checkpointing:
        checkpoint_layers(model)
    if isinstance(swarm, Asks):
        examples = EXAMPLES.get(language) or EXAMPLES.get(text if isinstance(text, str) else "") or ENGLISH
        swarm.can_ask(model, MaskedText(words, examples))
    return model, batches


def _batches(
    text: TextSource | Mapping[str, float],
    words: PreTrainedTokenizerFast,
    batch_size: int,
    length: int,
    seed: int,
) -> Batches:
    if isinstance(text, Mapping):
        return StreamedBatches(text, words, batch_size=batch_size, sequence_length=length, seed=seed)
    return PretrainingBatches(
        open_text(text), words, batch_size=batch_size, sequence_length=length, seed=seed
    )


def _first_pass(text: TextSource | Mapping[str, float], seed: int) -> Iterator[str]:
    """Text to train a tokenizer on, the same for all peers."""
    rng = random.Random(seed)
    if isinstance(text, Mapping):
        return pack(TextMix(text, seed=seed).until_read(rng))
    return open_text(text)(rng)


def _fit_this_machine(shape: AlbertSize, length: int) -> Fit:
    has_gpu = torch.cuda.is_available()
    memory_bytes = torch.cuda.get_device_properties(0).total_memory if has_gpu else WITHOUT_GPU_BYTES
    return fit_memory(shape, memory_bytes, sequence_length=length)


def albert_config(shape: AlbertSize, tokenizer: PreTrainedTokenizerFast) -> AlbertConfig:
    """The configuration of `transformers` for a size and a tokenizer; no dropout, as in ALBERT v2."""
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


def mean_loss(model: torch.nn.Module, batches: Batches, *, count: int = 8) -> float:
    """The loss over the next ``count`` batches, without training on them."""
    was_training = model.training
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        losses = [
            float(model(**{name: tensor.to(device) for name, tensor in next(batches).items()}).loss)
            for _ in range(count)
        ]
    model.train(was_training)
    return sum(losses) / count


def _build(config: AlbertConfig, seed: int) -> AlbertForPreTraining:
    """Parameters drawn from ``seed``, so that all peers begin equal; other randomness is untouched."""
    from transformers import AlbertForPreTraining

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return AlbertForPreTraining(config).train()
