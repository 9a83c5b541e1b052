"""Unigram tokenizers as sahajBERT's: trained on the spot, from a file, or from the hub."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPECIALS = {
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
TRAINING_BLOCKS = 2_000
"""How many blocks of text a tokenizer is trained on: about 32 million characters."""

REPLACEMENTS = {
    "bn": {
        "\u09e4": "\u0964",
        "\u09e5": "\u0965",
        r"\|": "\u0964",
        "\u09f7": "\u0964",
        "(?<=[\u0980-\u09e3\u09f0\u09f1]):": "\u0983",
    }
}
"""By language, patterns and what is meant by them: Bengali text writes its full stop (danda, U+0964; doubled,
U+0965) as reserved code points, bars or currency signs, and visarga (U+0983) as a colon after a letter."""

TokenizerSource: TypeAlias = "str | Path | PreTrainedTokenizerFast"


def train_tokenizer(blocks: Iterable[str], *, vocabulary: int, language: str = "") -> PreTrainedTokenizerFast:
    """Train a Unigram tokenizer; the same text gives the same tokenizer in every process.

    It is complete: ``[MASK]`` takes the space before it, unknown letters become ``<unk>``, and text gets its
    ``[CLS]`` and ``[SEP]`` (sahajBERT's organizers wrote the first two into the file by hand).

    Args:
        blocks: the text; the first `TRAINING_BLOCKS` are used.
        vocabulary: number of tokens with the five specials, which come first; fewer if the text has no more.
        language: ``"bn"`` adds what Bengali needs to the normalisation.

    Raises:
        ValueError: there is no text.
    """
    from tokenizers import Tokenizer, models, trainers

    _quiet()
    pieces = list(itertools.islice(blocks, TRAINING_BLOCKS))
    if not any(piece.strip() for piece in pieces):
        raise ValueError("there is no text to train a tokenizer on")
    tokenizer = _with_pipeline(Tokenizer(models.Unigram()), language)
    specials = list(SPECIALS.values())
    trainer = trainers.UnigramTrainer(
        vocab_size=vocabulary, special_tokens=specials, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(pieces, trainer)
    trained = json.loads(tokenizer.to_str())["model"]["vocab"]
    # The trainer adds up in the order of a randomly seeded hash map: scores differ in the 11th digit between
    # runs, and the order of token ids with them. Rounded scores and alphabetical ids are the same everywhere.
    scores = {token: round(score, 3) for token, score in trained if token not in SPECIALS.values()}
    vocabulary_list = [(token, 0.0) for token in specials] + sorted(scores.items())
    return _wrapped(_with_pipeline(Tokenizer(models.Unigram(vocabulary_list, unk_id=1)), language))


def load_tokenizer(source: TokenizerSource) -> PreTrainedTokenizerFast:
    """A tokenizer from a ``tokenizer.json`` file, from a folder or hub name, or as it is.

    Raises:
        ValueError: it cannot be loaded or lacks a special token that the recipe needs.
    """
    _quiet()
    tokenizer = _load(source) if isinstance(source, str | Path) else source
    missing = [
        name for name in ("pad_token", "cls_token", "sep_token", "mask_token") if not getattr(tokenizer, name)
    ]
    if missing:
        raise ValueError(f"tokenizer {source} has no {', '.join(missing)}: masked language models need them")
    return tokenizer


def _load(source: str | Path) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    if not Path(source).is_file():
        try:
            return AutoTokenizer.from_pretrained(str(source))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{str(source)!r} is no tokenizer file or folder here nor on the hub: {error}"
            ) from error
    try:
        tokenizer = Tokenizer.from_file(str(source))
    except Exception as error:
        # tokenizers raises bare Exception for whatever it cannot parse.
        raise ValueError(f"{source} is not a tokenizer file: {error}") from error
    return _wrapped(tokenizer)


def _with_pipeline(tokenizer: Tokenizer, language: str) -> Tokenizer:
    """How sahajBERT takes text apart and puts it together (DeDLOC, appendix I.3)."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors

    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Nmt(),
            normalizers.NFKC(),
            normalizers.Replace(Regex(r"\s+"), " "),
            *(normalizers.Replace(Regex(old), new) for old, new in REPLACEMENTS.get(language, {}).items()),
            normalizers.Lowercase(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Punctuation(),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, list(SPECIALS.values()).index(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    known: dict[str, str | AddedToken] = {
        name: token for name, token in SPECIALS.items() if tokenizer.token_to_id(token) is not None
    }
    if "mask_token" in known:
        # The mask stands for a word with its space: else "a [MASK]" had a lone space before it, as no text has.
        known["mask_token"] = AddedToken(SPECIALS["mask_token"], lstrip=True, normalized=False, special=True)
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **known)


def _quiet() -> None:
    """Without this, tokenizers warns whenever a process forks after its first parallel run."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
