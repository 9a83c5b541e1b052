"""Text for masked language models: the shards of a source, a tokenizer, passages of whole sentences.

A shard is a function that can be called by itself, for example after a lost connection or in another process. Each call
starts one pass over the shard's documents. Files are never loaded whole.
"""

import glob
import itertools
import json
import logging
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from colab_swarm.errors import require

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)
DOCUMENT_CHARS = 1 << 14  # texts and lines are joined to about this size; longer rows are cut
SHARD_BYTES = LINE_BYTES = 1 << 18  # size of a local file's shards; lines up to this size stay whole
TextSource: TypeAlias = str | Path | Iterable[str | Path]
Shard: TypeAlias = Callable[[], Iterator[str]]


class Stopped(ValueError):
    """There are no more documents, because an iterator is exhausted or the reader was closed while it waited."""


def open_text(text: TextSource) -> list[Shard]:
    """Return the shards of a text.

    ``text`` is one of these:

    - ``"python-docs"``, CPython's language reference;
    - a file or a glob pattern (plain text, ``.jsonl`` or ``.parquet``), or a list of `Path`;
    - an iterable of strings, which is read again for each pass;
    - a folder or hub name for `datasets.load_dataset` (``name:configuration``), whose ``train`` split is streamed.

    A document is a row's column ``text``, or else the first column of strings. Raises `ValueError` if there is no text.
    """
    if isinstance(text, str | Path):
        shards = _open_named(str(text))
    elif not isinstance(text, Sequence):
        shards = [partial(_read_iterable, text)]
    elif text and isinstance(text[0], Path):
        missing = [str(path) for path in text if not Path(path).is_file()]
        if missing:
            raise ValueError(f"there is no file {', '.join(missing)}")
        shards = []
        for path in text:
            shards += _open_named(str(path))
    else:
        shards = [partial(iter, [block]) for block in pack(map(str, text))]
    require(shards, f"there is no text in {text!s:.200}")
    return shards


def _read_iterable(texts: Iterable[str | Path]) -> Iterator[str]:
    blocks = pack(map(str, texts))
    first = next(blocks, None)
    if first is None:
        raise Stopped("the text is empty or an exhausted iterator: give a longer list")
    yield first
    yield from blocks


def pack(texts: Iterable[str]) -> Iterator[str]:
    """Join or cut consecutive texts into blocks of `DOCUMENT_CHARS`; the last may be shorter."""
    waiting = ""
    for text in texts:
        waiting += text + "\n"
        whole = len(waiting) - len(waiting) % DOCUMENT_CHARS
        yield from _cut([waiting[:whole]])
        waiting = waiting[whole:]
    if waiting.strip():
        yield waiting


def find_files(name: str) -> list[Path]:
    """Return the files of a path, or of a pattern, which must match at least one file; none for other names."""
    if Path(name).is_file():
        paths = [name]
    else:
        paths = sorted(glob.glob(name, recursive=True))
    files = [Path(path) for path in paths if Path(path).is_file()]
    require(not glob.has_magic(name) or files, f"no file matches {name!r}")
    return files


def _open_named(name: str) -> list[Shard]:
    if name == "python-docs":
        from pydoc_data.topics import topics

        return open_text([topics[key] for key in sorted(topics)])
    files = find_files(name)
    if not files:
        path, _, configuration = name.partition(":")
        try:
            return _open_rows(path, configuration or None)
        except (OSError, ValueError) as error:
            raise ValueError(f"{name!r} is neither a local file nor a Hub data set: {error}") from error
    shards: list[Shard] = []
    for file in files:
        if file.suffix == ".parquet":
            shards += _open_rows("parquet", data_files=str(file))
        else:
            shards += [partial(_read_shard, file, at) for at in range(0, file.stat().st_size, SHARD_BYTES)]
    return shards


def _open_rows(path: str, configuration: str | None = None, **options: str) -> list[Shard]:
    from datasets import load_dataset

    data_set = load_dataset(path, configuration, split="train", streaming=True, **options)
    if data_set.num_shards < 64 and hasattr(data_set, "reshard"):
        data_set = data_set.reshard()  # so that peers read different text
    elif data_set.num_shards < 64:
        # The extra [train] requires datasets 5, but Colab has its own version, and datasets before 4.6 cannot split.
        logger.warning("peers may read the same text of %s at first: install 'datasets>=5'", path)
    count: int = data_set.num_shards

    def shard(number: int) -> Iterator[str]:
        return _cut(text_of(row) for row in data_set.shard(count, number))

    return [partial(shard, number) for number in range(count)]


def _read_shard(file: Path, start: int) -> Iterator[str]:
    """Yield the documents of the lines that start within one shard of a file."""
    lines = _lines(file, start)
    waiting = ""
    if file.suffix == ".jsonl":
        yield from _cut(text_of(json.loads(line)) for line in lines if line.strip())
        return
    for line in _cut(lines):
        waiting += line
        if len(waiting) >= DOCUMENT_CHARS:
            yield waiting
            waiting = ""
    if waiting:
        yield waiting


def _lines(file: Path, start: int) -> Iterator[str]:
    # a text without line breaks is cut at the borders of shards
    if file.suffix == ".jsonl":
        most = -1
    else:
        most = LINE_BYTES
    with file.open("rb") as opened:
        if start:
            opened.seek(start - 1)
            if len(opened.readline(most)) == most:
                opened.seek(start)
        while opened.tell() < start + SHARD_BYTES and (line := opened.readline(most)):
            yield line.decode(errors="ignore")


def _cut(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from (text[start : start + DOCUMENT_CHARS] for start in range(0, len(text), DOCUMENT_CHARS))


def text_of(row: dict[str, Any]) -> str:
    """Return the ``text`` of a row, or else its first column of strings. Raises ValueError if there is none."""
    if "text" in row:
        return str(row["text"])
    for value in row.values():
        if isinstance(value, str):
            return value
    raise ValueError(f"the data set has no column of text, only {', '.join(row)}")


SPECIALS = {
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
TRAINING_BLOCKS = 2_000  # number of documents on which a tokenizer is trained: about 32 million characters
REPLACEMENTS = {
    "bn": {
        "\u09e4": "\u0964",
        "\u09e5": "\u0965",
        r"\|": "\u0964",
        "\u09f7": "\u0964",
        "(?<=[\u0980-\u09e3\u09f0\u09f1]):": "\u0983",
    }
}
"""Patterns to normalize, by language. In Bengali texts, the full stop (danda, U+0964; doubled, U+0965) is often written
as a reserved code point, a bar or a currency sign, and visarga (U+0983) as a colon after a letter."""
TokenizerSource: TypeAlias = "str | Path | PreTrainedTokenizerFast"


def train_tokenizer(
    blocks: Iterable[str], *, vocabulary: int, language: str = ""
) -> "PreTrainedTokenizerFast":
    """Train a Unigram tokenizer; the same text gives the same tokenizer in every process.

    ``[MASK]`` includes the space before it, unknown letters become ``<unk>``, and ``[CLS]`` and ``[SEP]`` are added
    to a text. The first `TRAINING_BLOCKS` blocks are used. The ``vocabulary`` is the number of tokens, including the
    five special tokens, which come first. Language ``"bn"`` adds Bengali normalization. Raises `ValueError` if there
    is no text.
    """
    from tokenizers import Tokenizer, models, trainers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # otherwise the library warns at every fork
    pieces = list(itertools.islice(blocks, TRAINING_BLOCKS))
    require(any(piece.strip() for piece in pieces), "there is no text to train a tokenizer on")
    tokenizer = _with_pipeline(Tokenizer(models.Unigram()), language)
    specials = list(SPECIALS.values())
    trainer = trainers.UnigramTrainer(
        vocab_size=vocabulary, special_tokens=specials, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(pieces, trainer)
    trained = dict(json.loads(tokenizer.to_str())["model"]["vocab"])
    scores = {token: score for token, score in trained.items() if token not in SPECIALS.values()}
    # The trainer goes through randomly seeded hash maps. Letters that its model lacks get the lowest score, and 0.0001
    # more from letter to letter; the sums of the others differ in the 11th digit. So the former get one score, all
    # scores are rounded, and ids are alphabetical.
    lowest = min(scores.values(), default=0.0)
    letters = [token for token in scores if len(token) == 1]
    for letter in letters:
        if scores[letter] < lowest + 0.0001 * len(letters):
            scores[letter] = lowest
    scores = {token: round(score, 3) for token, score in scores.items()}
    vocabulary_list = [(token, 0.0) for token in specials] + sorted(scores.items())
    return _wrapped(_with_pipeline(Tokenizer(models.Unigram(vocabulary_list, unk_id=1)), language))


def load_tokenizer(source: "TokenizerSource") -> "PreTrainedTokenizerFast":
    """Load a tokenizer from a file, a folder or a hub name, or check a given one. Raises ValueError if unusable."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if isinstance(source, str | Path):
        tokenizer = _load(source)
    else:
        tokenizer = source
    needed = ("pad_token", "cls_token", "sep_token", "mask_token")
    missing = [name for name in needed if not getattr(tokenizer, name)]
    if missing:
        raise ValueError(f"tokenizer {source} has no {', '.join(missing)}: masked language models need them")
    return tokenizer


def _load(source: str | Path) -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    if Path(source).is_file():
        try:
            return _wrapped(Tokenizer.from_file(str(source)))
        except Exception as error:  # the library raises a plain Exception if it cannot parse the file
            raise ValueError(f"{source} is not a tokenizer file: {error}") from error
    try:
        return AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(source)!r} is no tokenizer here or on the hub: {error}") from error


def _with_pipeline(tokenizer: "Tokenizer", language: str) -> "Tokenizer":
    """Add sahajBERT's normalization and splitting (DeDLOC, appendix I.3)."""
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


def _wrapped(tokenizer: "Tokenizer") -> "PreTrainedTokenizerFast":
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    known: dict[str, str | AddedToken] = {}
    for name, token in SPECIALS.items():
        if tokenizer.token_to_id(token) is not None:
            known[name] = token
    if "mask_token" in known:
        # The mask stands for a word with its space. Otherwise "a [MASK]" would contain a separate space, unlike any
        # text.
        known["mask_token"] = AddedToken(SPECIALS["mask_token"], lstrip=True, normalized=False, special=True)
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **known)


ENDS = re.compile(r"(?<=[।॥。！？])\s*|(?<=[!?|৷])\s+|(?<=\.)(?<![\u0980-\u09FF]\.)\s+|\s*\n\s*")
"""Sentence borders. A danda needs no space after it; Bengali text often has a bar instead of a danda.

A full stop after a Bengali letter marks an abbreviation, as in bnlp, the library that split sahajBERT's text.
"""
Tokens: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int32]]"


@dataclass(frozen=True)
class Passage:
    """Consecutive sentences that fill a sample; ``borders`` are the starts of all sentences except the first."""

    tokens: Tokens
    borders: tuple[int, ...]


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text without the space between them; a line break also ends a sentence."""
    return [sentence for sentence in ENDS.split(text) if sentence.strip()]


def passages(text: str, tokenizer: "PreTrainedTokenizerFast", length: int) -> Iterator[Passage]:
    """Cut a document into passages of about ``length`` tokens; a lone last sentence is dropped."""
    sentences = split_sentences(text)
    if sentences:
        encoded = tokenizer(sentences, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        encoded = []
    half = max(
        1, length // 2
    )  # a sentence longer than half a sample is cut, because a sample needs a second part
    tokens: list[int] = []
    borders: list[int] = []
    pieces = []
    for ids in encoded:
        pieces += [ids[start : start + half] for start in range(0, len(ids), half)]
    for number, piece in enumerate(pieces, 1):
        if tokens:
            borders.append(len(tokens))
        tokens += piece
        if borders and (len(tokens) >= length or number == len(pieces)):
            yield Passage(np.array(tokens, dtype=np.int32), tuple(borders))
            tokens = []
            borders = []


def ordered(passage: Passage, length: int, rng: random.Random) -> tuple[Tokens, Tokens, bool]:
    """Return the two parts of a passage, cut to ``length`` tokens in all, and whether they were swapped at random."""
    border = rng.choice(passage.borders)
    first = passage.tokens[:border]
    second = passage.tokens[border:]
    swapped = rng.random() < 0.5
    if swapped:
        first, second = second, first
    keep = [len(first), len(second)]
    excess = max(0, sum(keep) - length)
    from_longer = min(excess, abs(keep[0] - keep[1]))
    keep[0 if keep[0] > keep[1] else 1] -= from_longer
    rest = excess - from_longer
    return first[: keep[0] - rest // 2], second[: keep[1] - (rest - rest // 2)], swapped
