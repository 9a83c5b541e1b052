"""Text to train on, as consecutive blocks in an order of each peer's own.

Every source becomes a `BlockSource`: called with a random generator it gives one pass over the text. Blocks
are a few pages long, so that a passage and what follows it are found in one block; peers that shuffle them
differently read different text from the start, however large the source. Files are never loaded whole.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


BLOCK_CHARS = 1 << 14

HUB_SHUFFLE_ROWS = 10_000

TextSource: TypeAlias = str | Path | Iterable[str | Path]

BlockSource: TypeAlias = Callable[[random.Random], Iterator[str]]


def open_text(text: TextSource) -> BlockSource:
    """A source of text blocks.

    Args:
        text: ``"python-docs"`` (the language reference that CPython carries); a file or a glob pattern; a
            list of `Path`; an iterable of strings, read again for each pass; or a folder or hub name for
            `datasets.load_dataset` (``name:configuration`` where there are several), of which the ``train``
            split and the ``text`` column are streamed.

    Raises:
        ValueError: the pattern or the list holds no file and no text.
    """
    if isinstance(text, str | Path):
        return _open_named(str(text))
    if not isinstance(text, Sequence):
        return lambda rng: pack(map(str, text))
    if not text:
        raise ValueError("text is an empty list: give some files or some strings")
    if all(isinstance(item, Path) for item in text):
        return _open_files([Path(item) for item in text])
    return _shuffled(list(pack(map(str, text))))


def pack(texts: Iterable[str], block_chars: int = BLOCK_CHARS) -> Iterator[str]:
    """Join consecutive texts, and cut long ones, into blocks of ``block_chars``; the last may be shorter."""
    waiting = ""
    for text in texts:
        waiting += text + "\n"
        whole = len(waiting) - len(waiting) % block_chars
        yield from (waiting[start : start + block_chars] for start in range(0, whole, block_chars))
        waiting = waiting[whole:]
    if waiting.strip():
        yield waiting


def _open_named(name: str) -> BlockSource:
    if name == "python-docs":
        from pydoc_data.topics import topics

        return _shuffled(list(pack(topics[key] for key in sorted(topics))))
    if Path(name).is_file():
        return _open_files([Path(name)])
    if glob.has_magic(name):
        files = sorted(Path(found) for found in glob.glob(name, recursive=True) if Path(found).is_file())
        if not files:
            raise ValueError(f"no file matches {name!r}")
        return _open_files(files)
    return _open_dataset(name)


def _shuffled(blocks: list[str]) -> BlockSource:
    return lambda rng: iter(rng.sample(blocks, len(blocks)))


def _open_files(files: list[Path]) -> BlockSource:
    places = [(file, start) for file in files for start in range(0, file.stat().st_size, BLOCK_CHARS)]
    if not places:
        raise ValueError(f"there is no text in {', '.join(map(str, files))}")
    return lambda rng: (_read_block(*place) for place in rng.sample(places, len(places)))


def _read_block(file: Path, start: int) -> str:
    """One block of bytes; a character cut in two at either end is left out."""
    with file.open("rb") as opened:
        opened.seek(start)
        return opened.read(BLOCK_CHARS).decode(errors="ignore")


def open_hub(name: str) -> Any:
    """The ``train`` split of a folder or hub name (``name:configuration``) as a stream of `datasets`.

    Raises:
        ValueError: there is no such data set.
    """
    from datasets import load_dataset

    path, _, configuration = name.partition(":")
    try:
        return load_dataset(path, configuration or None, split="train", streaming=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name!r} is no file here and cannot be loaded as a data set: {error}") from error


def text_of(row: dict[str, Any]) -> str:
    """The text of a row: its ``text``, or its first column of strings.

    Raises:
        ValueError: it has none.
    """
    if "text" in row:
        return str(row["text"])
    columns = [column for column, value in row.items() if isinstance(value, str)]
    if not columns:
        raise ValueError(f"the data set has no column of text, only {', '.join(row)}")
    return str(row[columns[0]])


def _open_dataset(name: str) -> BlockSource:
    rows = open_hub(name)

    def blocks(rng: random.Random) -> Iterator[str]:
        shuffled = rows.shuffle(seed=rng.getrandbits(32), buffer_size=HUB_SHUFFLE_ROWS)
        return pack(text_of(row) for row in shuffled)

    return blocks


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


ENDS = re.compile(r"(?<=[।॥。！？])\s*|(?<=[.!?|৷])\s+|\s*\n\s*")

"""Between two sentences. A danda ends one even where no space follows; Bengali text often has a bar for it."""

Tokens: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int32]]"


@dataclass(frozen=True)
class Passage:
    """Two or more consecutive sentences, enough to fill a sample if the document has so many.

    Attributes:
        tokens: of all sentences.
        borders: where in ``tokens`` the second, third, … sentence begins.
    """

    tokens: Tokens
    borders: tuple[int, ...]


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, in order, without the space between them; a line break ends one as well."""
    return [sentence for sentence in ENDS.split(text) if sentence.strip()]


def passages(text: str, tokenizer: PreTrainedTokenizerFast, length: int) -> list[Passage]:
    """Cut a document into passages of ``length`` tokens or a few more; a lone sentence at its end is left out."""
    sentences = split_sentences(text)
    if not sentences:
        return []
    encoded = tokenizer(sentences, add_special_tokens=False, verbose=False)["input_ids"]
    return list(_gather(_halved(encoded, max(1, length // 2)), length))


def order_sample(passage: Passage, length: int, rng: random.Random) -> tuple[Tokens, Tokens, bool]:
    """Cut a passage between two sentences and swap the halves with probability one half.

    Returns:
        The two parts, together no longer than ``length`` (the longer one is cut), and whether they are swapped.
    """
    border = rng.choice(passage.borders)
    first, second = passage.tokens[:border], passage.tokens[border:]
    swapped = rng.random() < 0.5
    if swapped:
        first, second = second, first
    keep = _longest_first(len(first), len(second), length)
    return first[: keep[0]], second[: keep[1]], swapped


def _halved(sentences: Iterable[list[int]], most: int) -> Iterator[list[int]]:
    """Sentences; one that would fill more than half a sample comes in pieces, or it had no second part."""
    for tokens in sentences:
        yield from (tokens[start : start + most] for start in range(0, len(tokens), most))


def _gather(sentences: Iterable[list[int]], length: int) -> Iterator[Passage]:
    tokens: list[int] = []
    borders: list[int] = []
    for sentence in sentences:
        if tokens:
            borders.append(len(tokens))
        tokens += sentence
        if borders and len(tokens) >= length:
            yield Passage(np.array(tokens, dtype=np.int32), tuple(borders))
            tokens, borders = [], []
    if borders:
        yield Passage(np.array(tokens, dtype=np.int32), tuple(borders))


def _longest_first(first: int, second: int, length: int) -> tuple[int, int]:
    """How much of both parts to keep: the longer one is cut until both fit, then both in turn."""
    excess = max(0, first + second - length)
    from_longer = min(excess, abs(first - second))
    if first > second:
        first -= from_longer
    else:
        second -= from_longer
    rest = excess - from_longer
    return first - rest // 2, second - (rest - rest // 2)
